// From packed codes to pairs of bfloat16 levels.
//
// A run of codes (code_format.py) is read 16 codes at a time, from two runs of equal shape at once:
// the planes of two key channels, or the value rows of two tokens. The result are 16 words of 32
// bits, word i with the level of code i of the first run in its lower half and that of the second
// in its upper half, as the dot products of bfloat16 pairs take them.
//
// Reads may go past a run by the length of a run and a vector; `Plan::overrun` says how far past
// the cell that is.
#pragma once

#include <c10/util/BFloat16.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "csrc/codes.h"
#include "csrc/simd.h"

#if defined(CPU_CAPABILITY_AVX512) && defined(__AVX512VBMI__)
#define KVCOMPRESS_BYTE_SHUFFLE 1
#endif

namespace kvcompress {
namespace {

constexpr int kWindow = 16;  // codes of a window
// Runs of up to this many bytes are read whole, wherever in them a window is.
#if defined(KVCOMPRESS_BYTE_SHUFFLE)
constexpr int64_t kWholeBytes = 64;
#else
constexpr int64_t kWholeBytes = 16;
#endif

inline int64_t round_up(int64_t x, int64_t step) { return (x + step - 1) / step * step; }

// Levels of the widths 4, 2 and 1 as bits of bfloat16. Every table is repeated until it is full, so
// that bits above those of a code do not matter.
struct Levels {
#if defined(KVCOMPRESS_BYTE_SHUFFLE)
  using Entry = uint16_t;
  static constexpr int kSize = 32;
#else
  using Entry = uint32_t;
  static constexpr int kSize = 16;
#endif
  alignas(64) Entry tables[kNumWidths][kSize];

  explicit Levels(const float* levels) {
    for (int k = 1; k < kNumWidths; ++k) {
      const int count = 1 << kCodeWidths[k];
      for (int i = 0; i < kSize; ++i) tables[k][i] = c10::BFloat16(levels[i % count]).x;
      levels += count;
    }
  }
};

// How to read the codes [first, first + 16) of a run of `num_codes` codes. What is read for codes
// past the end is anything.
struct Window {
  int class_index;
  // 16 bytes from `offset` on are read, of which some are replaced by those from `wrapped` on: a
  // window of a long run may begin near its end and go on at its beginning
  int64_t offset = 0, wrapped = 0;
  bool wraps = false;
  alignas(16) uint8_t replaced[kWindow] = {};
  alignas(16) uint8_t bytes[kWindow];  // of the codes, in what is read
  alignas(64) uint32_t shift[kWindow];
#if defined(KVCOMPRESS_BYTE_SHUFFLE)
  // the two above for pairs of codes, as operands of a shuffle of two vectors and of a shift
  alignas(64) uint8_t pair_bytes[64] = {};
  alignas(64) uint16_t pair_shift[32];
#endif

  Window(int class_index, int64_t num_codes, int64_t first) : class_index(class_index) {
    const int width = kCodeWidths[class_index];
    const int64_t stride = run_bytes(num_codes, width);
    const bool whole = class_index > 0 && stride <= kWholeBytes;
    if (!whole) {
      offset = first % stride;
      wrapped = offset - stride;
      wraps = offset + std::min<int64_t>(kWindow, num_codes - first) > stride;
    }
    for (int i = 0; i < kWindow; ++i) {
      const int64_t code = std::min(first + i, num_codes - 1);
      replaced[i] = wraps && offset + i >= stride ? 0xff : 0;
      bytes[i] = static_cast<uint8_t>(whole ? code % stride : i);
      shift[i] = static_cast<uint32_t>(code / stride * width);
#if defined(KVCOMPRESS_BYTE_SHUFFLE)
      pair_bytes[4 * i] = bytes[i];
      pair_bytes[4 * i + 2] = static_cast<uint8_t>(64 + bytes[i]);
      pair_shift[2 * i] = pair_shift[2 * i + 1] = static_cast<uint16_t>(shift[i]);
#endif
    }
  }

  // The bytes of a window that is part of its run.
  __m128i part(const uint8_t* run) const {
    const __m128i read = _mm_loadu_si128(reinterpret_cast<const __m128i*>(run + offset));
    if (!wraps) return read;
    const __m128i other = _mm_loadu_si128(reinterpret_cast<const __m128i*>(run + wrapped));
    const __m128i mask = _mm_load_si128(reinterpret_cast<const __m128i*>(replaced));
    return _mm_blendv_epi8(read, other, mask);
  }
};

#if defined(CPU_CAPABILITY_AVX512)
// 16 words.
using Words = __m512i;

inline Words load_words(const uint32_t* p) { return _mm512_loadu_si512(p); }
inline simd::Vec first_levels(Words words) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
}
inline simd::Vec second_levels(Words words) {
  return _mm512_castsi512_ps(_mm512_and_si512(words, _mm512_set1_epi32(0xffff0000)));
}
// Level of a code of 8 bits, float32.
inline Words wide_levels(const uint8_t* p) {
  const __m512i code =
      _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm512_castps_si512(
      _mm512_cvtepi32_ps(_mm512_sub_epi32(code, _mm512_set1_epi32(128))));
}
inline Words wide_words(const uint8_t* first, const uint8_t* second) {
  const __m512i upper = _mm512_set1_epi32(0xffff0000);
  return _mm512_or_si512(
      _mm512_srli_epi32(wide_levels(first), 16), _mm512_and_si512(wide_levels(second), upper));
}
#else
using Words = __m256i;

inline Words load_words(const uint32_t* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
inline simd::Vec first_levels(Words words) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(words, 16));
}
inline simd::Vec second_levels(Words words) {
  return _mm256_castsi256_ps(_mm256_and_si256(words, _mm256_set1_epi32(0xffff0000)));
}
#endif

#if defined(KVCOMPRESS_BYTE_SHUFFLE)

enum class Reach {
  kWide,   // codes of 8 bits
  kWhole,  // a run that is read whole, or neighbouring windows of a longer one, with one read
  kPart,   // windows of a longer run, each with reads of its own
};


// How NV neighbouring windows of a run are read.
template <int NV>
inline Reach reach_of(const Window* windows) {
  if (windows[0].class_index == 0) return Reach::kWide;
  const Window& last = windows[NV - 1];
  const int64_t further = last.offset - windows[0].offset;
  const bool together = further >= 0 && further <= 64 - kWindow;
  return together && !windows[0].wraps && !last.wraps ? Reach::kWhole : Reach::kPart;
}

// Pairs of runs, decoded as they are read: pair i are the runs at base + i * step and `second`
// bytes further on, of which NV neighbouring windows are read.
template <Reach kReach, int NV>
class PackedPairs {
 public:
  PackedPairs(
      const uint8_t* base, int64_t step, int64_t second, const Window* windows,
      const Levels& levels)
      : base_(base), step_(step), second_(second), windows_(windows) {
    if constexpr (kReach == Reach::kWhole) base_ += windows[0].offset;
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) {
      bytes_[j] = _mm512_load_si512(windows[j].pair_bytes);
      shift_[j] = _mm512_load_si512(windows[j].pair_shift);
      if constexpr (kReach == Reach::kWhole) {
        const auto further = static_cast<int16_t>(windows[j].offset - windows[0].offset);
        bytes_[j] = _mm512_add_epi8(bytes_[j], _mm512_set1_epi16(further));
      }
    }
    table_ = _mm512_load_si512(levels.tables[windows[0].class_index]);
  }

  [[gnu::always_inline]] void read(int64_t i, Words (&words)[NV]) const {
    const uint8_t* first = base_ + i * step_;
    const uint8_t* second = first + second_;
    if constexpr (kReach == Reach::kWhole) {
      const __m512i a = _mm512_loadu_si512(first), b = _mm512_loadu_si512(second);
#pragma GCC unroll 4
      for (int j = 0; j < NV; ++j) words[j] = look_up(j, a, b);
    } else {
#pragma GCC unroll 4
      for (int j = 0; j < NV; ++j) {
        if constexpr (kReach == Reach::kWide) {
          words[j] = wide_words(first + windows_[j].offset, second + windows_[j].offset);
        } else {
          words[j] = look_up(
              j, _mm512_castsi128_si512(windows_[j].part(first)),
              _mm512_castsi128_si512(windows_[j].part(second)));
        }
      }
    }
  }

 private:
  [[gnu::always_inline]] Words look_up(int j, __m512i first, __m512i second) const {
    constexpr __mmask64 kEven = 0x5555555555555555;  // every byte becomes a 16-bit element
    const __m512i codes = _mm512_maskz_permutex2var_epi8(kEven, first, bytes_[j], second);
    return _mm512_permutexvar_epi16(_mm512_srlv_epi16(codes, shift_[j]), table_);
  }

  const uint8_t* base_;
  int64_t step_, second_;
  const Window* windows_;
  __m512i bytes_[NV], shift_[NV], table_;
};

#else

// Levels of the codes of one window of a run, bits of bfloat16 in 16 words.
inline void window_levels(
    const uint8_t* run, const Window& window, const Levels& levels, Words* words) {
  __m128i bytes;
  if (window.offset == 0 && !window.wraps) {
    const __m128i index = _mm_load_si128(reinterpret_cast<const __m128i*>(window.bytes));
    bytes = _mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(run)), index);
  } else {
    bytes = window.part(run);
  }
#if defined(CPU_CAPABILITY_AVX512)
  const __m512i shifted =
      _mm512_srlv_epi32(_mm512_cvtepu8_epi32(bytes), _mm512_load_si512(window.shift));
  words[0] = _mm512_permutexvar_epi32(
      shifted, _mm512_load_si512(levels.tables[window.class_index]));
#else
  const auto* table = reinterpret_cast<const __m256i*>(levels.tables[window.class_index]);
  const auto* shift = reinterpret_cast<const __m256i*>(window.shift);
  for (int j = 0; j < 2; ++j) {
    const __m256i code =
        _mm256_srlv_epi32(_mm256_cvtepu8_epi32(bytes), _mm256_load_si256(shift + j));
    const __m256i low = _mm256_permutevar8x32_epi32(_mm256_load_si256(table), code);
    const __m256i high = _mm256_permutevar8x32_epi32(_mm256_load_si256(table + 1), code);
    // bit 3 of the code chooses the half of the table
    const __m256i upper = _mm256_slli_epi32(code, 28);
    words[j] = _mm256_castps_si256(_mm256_blendv_ps(
        _mm256_castsi256_ps(low), _mm256_castsi256_ps(high), _mm256_castsi256_ps(upper)));
    bytes = _mm_unpackhi_epi64(bytes, bytes);
  }
#endif
}

#if !defined(CPU_CAPABILITY_AVX512)
inline Words wide_words(const uint8_t* first, const uint8_t* second) {
  const auto level = [](const uint8_t* p) {
    const __m256i code =
        _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    return _mm256_castps_si256(
        _mm256_cvtepi32_ps(_mm256_sub_epi32(code, _mm256_set1_epi32(128))));
  };
  const __m256i upper = _mm256_set1_epi32(0xffff0000);
  return _mm256_or_si256(
      _mm256_srli_epi32(level(first), 16), _mm256_and_si256(level(second), upper));
}
#endif

// Decodes one window of `count` pairs of runs: pair i are the runs at src + i * step and `second`
// bytes further on; its 16 words go to out + i * out_stride.
inline void decode_window(
    const uint8_t* src, int64_t step, int64_t second, int64_t count, const Window& window,
    const Levels& levels, uint32_t* out, int64_t out_stride) {
  constexpr int kParts = kWindow / simd::kWidth;
  for (int64_t i = 0; i < count; ++i, src += step, out += out_stride) {
    if (window.class_index == 0) {
      for (int j = 0; j < kParts; ++j) {
        const uint8_t* p = src + window.offset + j * simd::kWidth;
        reinterpret_cast<Words*>(out)[j] = wide_words(p, p + second);
      }
    } else {
      Words first[kParts], other[kParts];
      window_levels(src, window, levels, first);
      window_levels(src + second, window, levels, other);
      for (int j = 0; j < kParts; ++j) {
#if defined(CPU_CAPABILITY_AVX512)
        first[j] = _mm512_or_si512(first[j], _mm512_slli_epi32(other[j], 16));
#else
        first[j] = _mm256_or_si256(first[j], _mm256_slli_epi32(other[j], 16));
#endif
        reinterpret_cast<Words*>(out)[j] = first[j];
      }
    }
  }
}

#endif

// Pairs of runs that are decoded already: words base[i * stride, ...), NV vectors of them.
template <int NV>
class DecodedPairs {
 public:
  DecodedPairs(const uint32_t* base, int64_t stride) : base_(base), stride_(stride) {}

  [[gnu::always_inline]] void read(int64_t i, Words (&words)[NV]) const {
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) words[j] = load_words(base_ + i * stride_ + j * simd::kWidth);
  }

 private:
  const uint32_t* base_;
  int64_t stride_;
};

// How the rows of one group are read.
struct Plan {
  static constexpr int64_t kScratchBytes = 24 * 1024;
  static constexpr int64_t kMaxTile = 256;

  CodeLayout layout;
  int64_t rows;        // rows of a cell
  int64_t tile;        // rows that are treated at once, a multiple of kWindow
  int64_t cell_tiles;  // tiles of a cell
  // channels as operands see them: every class begins at a multiple of 2 (keys) or kWindow
  // (values), the whole ends at a multiple of kWindow
  int64_t key_starts[kNumWidths + 1], value_starts[kNumWidths + 1];
  int64_t key_width, value_width;
  int64_t key_bytes[kNumWidths], value_bytes[kNumWidths];  // at which the classes begin, in a cell
  std::vector<Window> key_windows[kNumWidths];    // of rows [16 i, 16 i + 16)
  std::vector<Window> value_windows[kNumWidths];  // of channels likewise
  int64_t content;  // bytes of a cell that are used
  int64_t overrun;  // bytes past them that are read

  Plan(const CodeLayout& layout, int64_t rows) : layout(layout), rows(rows) {
    int64_t key = 0, value = 0, longest = layout.value_bytes;
    int64_t key_at = layout.key_offset(rows), value_at = layout.value_offset(rows);
    for (int k = 0; k < kNumWidths; ++k) {
      const int64_t num_keys = layout.key.counts[k], num_values = layout.value.counts[k];
      key_starts[k] = key;
      value_starts[k] = value;
      key_bytes[k] = key_at;
      value_bytes[k] = value_at;
      key += round_up(num_keys, 2);
      value += round_up(num_values, kWindow);
      const int64_t plane = run_bytes(rows, kCodeWidths[k]);
      key_at += num_keys * plane;
      value_at += run_bytes(num_values, kCodeWidths[k]);
      if (num_keys) {
        for (int64_t i = 0; i < rows; i += kWindow) key_windows[k].emplace_back(k, rows, i);
        longest = std::max(longest, plane);
      }
      for (int64_t i = 0; i < num_values; i += kWindow) {
        value_windows[k].emplace_back(k, num_values, i);
      }
    }
    key_starts[kNumWidths] = key;
    value_starts[kNumWidths] = value;
    key_width = round_up(key, kWindow);
    value_width = value;
    content = rows * layout.row_bits() / 8;
    overrun = longest + 64;
    const int64_t width = std::max({key_width, value_width, int64_t{kWindow}});
    const int64_t most =
        std::clamp<int64_t>(kScratchBytes / (2 * width) / 32 * 32, 32, kMaxTile);
    const int64_t tiles = (rows + most - 1) / most;
    tile = round_up((rows + tiles - 1) / tiles, 2 * kWindow);
    cell_tiles = (rows + tile - 1) / tile;
  }

#if !defined(KVCOMPRESS_BYTE_SHUFFLE)
  // Words of the larger of the two decoded sides.
  int64_t scratch_words() const { return std::max(key_width, value_width) * tile / 2; }

  // Keys of `count` rows of a cell from `first` on, a multiple of kWindow: [pairs of channels,
  // tile] words.
  void decode_keys(
      const uint8_t* cell, int64_t first, int64_t count, const Levels& levels,
      uint32_t* out) const {
    for (int k = 0; k < kNumWidths; ++k) {
      const int64_t plane = run_bytes(rows, kCodeWidths[k]);
      for (int64_t i = 0; layout.key.counts[k] && i < count; i += kWindow) {
        decode_window(
            cell + key_bytes[k], 2 * plane, plane, (layout.key.counts[k] + 1) / 2,
            key_windows[k][(first + i) / kWindow], levels, out + key_starts[k] / 2 * tile + i,
            tile);
      }
    }
  }

  // Values likewise: [pairs of rows, value_width] words.
  void decode_values(
      const uint8_t* cell, int64_t first, int64_t count, const Levels& levels,
      uint32_t* out) const {
    const int64_t row = layout.value_bytes;
    for (int k = 0; k < kNumWidths; ++k) {
      for (size_t i = 0; i < value_windows[k].size(); ++i) {
        decode_window(
            cell + value_bytes[k] + first * row, 2 * row, row, (count + 1) / 2,
            value_windows[k][i], levels, out + value_starts[k] + i * kWindow, value_width);
      }
    }
  }
#endif
};

// The plan for a layout in cells of this many rows, made once in a process.
inline const Plan& plan_for(const CodeLayout& layout, int64_t rows) {
  using Key = std::vector<int64_t>;
  static std::mutex mutex;
  static std::map<Key, std::unique_ptr<const Plan>> plans;
  Key key(layout.key.counts, layout.key.counts + kNumWidths);
  key.insert(key.end(), layout.value.counts, layout.value.counts + kNumWidths);
  key.push_back(layout.bias >= 0);
  key.push_back(rows);
  const std::lock_guard lock(mutex);
  auto& plan = plans[key];
  if (!plan) plan = std::make_unique<const Plan>(layout, rows);
  return *plan;
}

}  // namespace
}  // namespace kvcompress
