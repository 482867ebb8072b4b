// The inner loops of `segment_attention`: online softmax of a few lanes over the cells of a tile.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "csrc/cells.h"
#include "csrc/simd.h"

namespace kvcompress {
namespace {

using simd::kWidth;
using simd::Vec;

// Slots whose scores are held at once; a block larger than this is a tile of its own.
constexpr int kTileSlots = 256;
constexpr int kMaxBlockSize = 512;
constexpr int kMaxTileCells = kTileSlots / 16;
constexpr int kMaxHeadSize = 256;
// Lanes that share one load of the keys; bounded by the vector registers.
constexpr int kMaxLanes = kWidth == 16 ? 8 : 4;

template <typename T>
#if defined(KVCOMPRESS_BF16_DOT)
constexpr bool kDot = std::is_same_v<T, c10::BFloat16>;
#else
constexpr bool kDot = false;
#endif

// What queries and probabilities are multiplied as.
template <typename T>
using Operand = std::conditional_t<kDot<T>, T, float>;

template <typename T>
struct Cell {
  const T* keys;
  const float* bias;
  int valid;         // slots past it hold garbage
  int64_t position;  // of slot 0, for the causal mask; negative for a cell of a segment
};

inline void prefetch(const void* p) {
  _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0);
}

#if defined(KVCOMPRESS_BF16_DOT)
// Undoes the order in which unpack leaves 32 values: it works within 128-bit lanes, so that 0-3,
// 8-11, ... come out first.
inline void restore_order(Vec& low, Vec& high) {
  const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
  const Vec result = _mm512_permutex2var_ps(low, first, high);
  high = _mm512_permutex2var_ps(low, second, high);
  low = result;
}

// (even[i], odd[i]) as 32-bit elements, for NV * 16 values of each; in the order of unpack unless
// NV is 1. An odd row that is null counts as 0.
template <int NV>
inline void interleave(
    const c10::BFloat16* even, const c10::BFloat16* odd, __m512i (&pairs)[NV]) {
  if constexpr (NV == 1) {
    const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(even));
    const __m256i b = odd ? _mm256_loadu_si256(reinterpret_cast<const __m256i*>(odd))
                          : _mm256_setzero_si256();
    pairs[0] = _mm512_or_si512(
        _mm512_cvtepu16_epi32(a), _mm512_slli_epi32(_mm512_cvtepu16_epi32(b), 16));
  } else {
#pragma GCC unroll 2
    for (int j = 0; j < NV; j += 2) {
      const __m512i a = _mm512_loadu_si512(even + j * kWidth);
      const __m512i b = odd ? _mm512_loadu_si512(odd + j * kWidth) : _mm512_setzero_si512();
      pairs[j] = _mm512_unpacklo_epi16(a, b);
      pairs[j + 1] = _mm512_unpackhi_epi16(a, b);
    }
  }
}

// Two neighbouring values of a row in every 32-bit element.
inline __m512i broadcast_pair(const c10::BFloat16* p) {
  int32_t pair;
  std::memcpy(&pair, p, sizeof(pair));
  return _mm512_set1_epi32(pair);
}
#endif

// Dot products of kLanes queries with the keys of NV * kWidth slots, in slot order.
template <typename T, int kLanes, int NV>
inline void dot_keys(
    const T* keys, int64_t block_size, int64_t head_size, const Operand<T>* query, const T* ahead,
    Vec (&result)[kLanes][NV]) {
  // few lanes are few chains of dependent additions; two sums each keep the units busy
  constexpr int kChains = kLanes <= 3 ? 2 : 1;
  // sums of sums: adding up all of a long head in one chain would cost float32 its last digits
  constexpr int64_t kBlock = kDot<T> ? kMaxHeadSize : 16;
#pragma GCC unroll 32
  for (int i = 0; i < kLanes * NV; ++i) (&result[0][0])[i] = simd::zero();
  for (int64_t begin = 0; begin < head_size; begin += kBlock) {
    const int64_t end = std::min(begin + kBlock, head_size);
    Vec sum[kChains][kLanes][NV];
#pragma GCC unroll 32
    for (int i = 0; i < kChains * kLanes * NV; ++i) (&sum[0][0][0])[i] = simd::zero();
#if defined(KVCOMPRESS_BF16_DOT)
    if constexpr (kDot<T>) {
      for (int64_t d = begin; d < end; d += 2 * kChains) {
#pragma GCC unroll 2
        for (int c = 0; c < kChains; ++c) {
          const int64_t even = (d + 2 * c) * block_size;
          __m512i pairs[NV];
          interleave(keys + even, keys + even + block_size, pairs);
          prefetch(ahead + even);
          prefetch(ahead + even + block_size);
#pragma GCC unroll 8
          for (int g = 0; g < kLanes; ++g) {
            const __m512i q = broadcast_pair(query + g * head_size + d + 2 * c);
#pragma GCC unroll 2
            for (int j = 0; j < NV; ++j) {
              sum[c][g][j] = _mm512_dpbf16_ps(sum[c][g][j], (__m512bh)pairs[j], (__m512bh)q);
            }
          }
        }
      }
    } else
#endif
    {
      for (int64_t d = begin; d < end; d += kChains) {
#pragma GCC unroll 2
        for (int c = 0; c < kChains; ++c) {
          const int64_t row = (d + c) * block_size;
          Vec k[NV];
#pragma GCC unroll 2
          for (int j = 0; j < NV; ++j) k[j] = simd::load(keys + row + j * kWidth);
          prefetch(ahead + row);
          if constexpr (NV * kWidth * sizeof(T) > 64) prefetch(ahead + row + 64 / sizeof(T));
#pragma GCC unroll 8
          for (int g = 0; g < kLanes; ++g) {
            const Vec q = simd::set1(query[g * head_size + d + c]);
#pragma GCC unroll 2
            for (int j = 0; j < NV; ++j) sum[c][g][j] = simd::fma(q, k[j], sum[c][g][j]);
          }
        }
      }
    }
#pragma GCC unroll 32
    for (int i = 0; i < kLanes * NV; ++i) {
      Vec total = (&sum[0][0][0])[i];
      if constexpr (kChains == 2) total = simd::add(total, (&sum[1][0][0])[i]);
      (&result[0][0])[i] = simd::add((&result[0][0])[i], total);
    }
  }
#if defined(KVCOMPRESS_BF16_DOT)
  if constexpr (kDot<T> && NV == 2) {
#pragma GCC unroll 8
    for (int g = 0; g < kLanes; ++g) restore_order(result[g][0], result[g][1]);
  }
#endif
}

// Scores of kLanes queries for the NV * kWidth slots of a cell from `slot` on:
// scores[g, :] = query . key * scale + bias, -inf from visible[g] on.
// Not inlined: on its own, the compiler keeps the whole inner loop in registers.
template <typename T, int kLanes, int NV>
[[gnu::noinline]] void score_slots(
    const Cell<T>& cell, int slot, int64_t block_size, int64_t head_size,
    const Operand<T>* query, const T* ahead, float scale, const int (&visible)[kLanes],
    float* scores, int64_t scores_stride) {
  Vec dots[kLanes][NV];
  dot_keys<T, kLanes, NV>(cell.keys + slot, block_size, head_size, query, ahead + slot, dots);
  const Vec masked = simd::set1(-std::numeric_limits<float>::infinity());
#pragma GCC unroll 2
  for (int j = 0; j < NV; ++j) {
    const int first = slot + j * kWidth;
    const Vec bias = simd::load(cell.bias + first);
#pragma GCC unroll 8
    for (int g = 0; g < kLanes; ++g) {
      const Vec logit = simd::fma(dots[g][j], simd::set1(scale), bias);
      simd::store(
          scores + g * scores_stride + first,
          simd::keep_first(logit, visible[g] - first, masked));
    }
  }
}

// sums[g, :NV * kWidth] = sums * correction[g] + probs[g] @ values, over the valid slots of the
// tile's cells; `values` and `sums` start at the first of these dimensions.
template <typename T, int kLanes, int NV>
[[gnu::noinline]] void add_values(
    const Cell<T>* cells, int num_cells, int64_t offset, int64_t block_size, int64_t head_size,
    const Operand<T>* probs, int64_t probs_stride, const float* correction, const T* const* ahead,
    float* sums) {
  Vec sum[kLanes][NV];
#pragma GCC unroll 32
  for (int i = 0; i < kLanes * NV; ++i) (&sum[0][0])[i] = simd::zero();
  for (int c = 0; c < num_cells; ++c) {
    const T* values = cells[c].keys + block_size * head_size + offset;
    const Operand<T>* p = probs + c * block_size;
    const T* next = ahead[c] + offset;
    const int valid = cells[c].valid;
#if defined(KVCOMPRESS_BF16_DOT)
    if constexpr (kDot<T>) {
      const auto add_pair = [&](const T* even, const T* odd, int n)
          __attribute__((always_inline)) {
        __m512i pairs[NV];
        interleave(even, odd, pairs);
#pragma GCC unroll 8
        for (int g = 0; g < kLanes; ++g) {
          const __m512i w = broadcast_pair(p + g * probs_stride + n);
#pragma GCC unroll 4
          for (int j = 0; j < NV; ++j) {
            sum[g][j] = _mm512_dpbf16_ps(sum[g][j], (__m512bh)pairs[j], (__m512bh)w);
          }
        }
      };
      int n = 0;
      for (; n + 2 <= valid; n += 2) {
        const T* even = values + n * head_size;
#pragma GCC unroll 4
        for (int j = 0; j < NV; j += 2) {
          prefetch(next + n * head_size + j * kWidth);
          prefetch(next + (n + 1) * head_size + j * kWidth);
        }
        add_pair(even, even + head_size, n);
      }
      if (n < valid) add_pair(values + n * head_size, nullptr, n);
    } else
#endif
    {
      for (int n = 0; n < valid; ++n) {
        Vec v[NV];
#pragma GCC unroll 4
        for (int j = 0; j < NV; ++j) v[j] = simd::load(values + n * head_size + j * kWidth);
#pragma GCC unroll 4
        for (int j = 0; j < NV; j += std::max<int>(1, 64 / (kWidth * sizeof(T)))) {
          prefetch(next + n * head_size + j * kWidth);
        }
#pragma GCC unroll 8
        for (int g = 0; g < kLanes; ++g) {
          const Vec w = simd::set1(p[g * probs_stride + n]);
#pragma GCC unroll 4
          for (int j = 0; j < NV; ++j) sum[g][j] = simd::fma(w, v[j], sum[g][j]);
        }
      }
    }
  }
#pragma GCC unroll 8
  for (int g = 0; g < kLanes; ++g) {
#if defined(KVCOMPRESS_BF16_DOT)
    if constexpr (kDot<T> && NV >= 2) {
#pragma GCC unroll 2
      for (int j = 0; j < NV; j += 2) restore_order(sum[g][j], sum[g][j + 1]);
    }
#endif
    const Vec factor = simd::set1(correction[g]);
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) {
      float* target = sums + g * head_size + j * kWidth;
      simd::store(target, simd::fma(simd::load(target), factor, sum[g][j]));
    }
  }
}

// What is common to the tiles of an item.
template <typename T>
struct Lanes {
  const Operand<T>* query;    // [lanes, D]
  const int64_t* positions;   // [lanes]
  float* sums;                // [lanes, D]
  float* maxima;              // [lanes]
  float* denominators;        // [lanes]
};

// Online softmax of kLanes lanes, from `lane` on, over the cells of one tile.
template <typename T, int kLanes>
void attend_tile(
    const Cell<T>* cells, int num_cells, int64_t block_size, int64_t head_size, float scale,
    const Lanes<T>& lanes, int lane, const T* const* ahead) {
  const int slots = num_cells * static_cast<int>(block_size);
  // row stride of the buffers; the odd vector keeps the lanes out of one another's cache sets
  constexpr int kStride = kMaxBlockSize + kWidth;
  alignas(64) float scores[kLanes * kStride];
  alignas(64) Operand<T> rounded[kDot<T> ? kLanes * kStride : 1];
  const Operand<T>* query = lanes.query + lane * head_size;

  for (int c = 0; c < num_cells; ++c) {
    const Cell<T>& cell = cells[c];
    int visible[kLanes];
    for (int g = 0; g < kLanes; ++g) {
      visible[g] = cell.valid;
      if (cell.position >= 0) {
        const int64_t limit = lanes.positions[lane + g] + 1 - cell.position;
        visible[g] = static_cast<int>(std::clamp<int64_t>(limit, 0, cell.valid));
      }
    }
    const T* values = cell.keys + block_size * head_size;
    float* target = scores + c * block_size;
    int n = 0;
    for (; n + 2 * kWidth <= block_size; n += 2 * kWidth) {
      score_slots<T, kLanes, 2>(
          cell, n, block_size, head_size, query, values, scale, visible, target, kStride);
    }
    if (n < block_size) {
      score_slots<T, kLanes, 1>(
          cell, n, block_size, head_size, query, values, scale, visible, target, kStride);
    }
  }

  alignas(64) float correction[kLanes];
  for (int g = 0; g < kLanes; ++g) {
    float* s = scores + g * kStride;
    Vec top = simd::load(s);
    for (int n = kWidth; n < slots; n += kWidth) top = simd::max(top, simd::load(s + n));
    const float old_max = lanes.maxima[lane + g];
    const float new_max = std::max(old_max, simd::reduce_max(top));
    const Vec shift = simd::set1(new_max);
    Vec total = simd::zero();
    for (int n = 0; n < slots; n += kWidth) {
      const Vec p = simd::exp_nonpositive(simd::sub(simd::load(s + n), shift));
      total = simd::add(total, p);
      if constexpr (kDot<T>) {
        simd::store(rounded + g * kStride + n, p);
      } else {
        simd::store(s + n, p);
      }
    }
    correction[g] = simd::exp_nonpositive(old_max - new_max);
    lanes.maxima[lane + g] = new_max;
    lanes.denominators[lane + g] =
        lanes.denominators[lane + g] * correction[g] + simd::reduce_add(total);
  }

  const Operand<T>* probs;
  if constexpr (kDot<T>) {
    probs = rounded;
  } else {
    probs = scores;
  }
  float* sums = lanes.sums + lane * head_size;
  constexpr int kVecs = (kWidth == 16 ? kLanes <= 6 : kLanes <= 2) ? 4 : 2;
  int64_t d = 0;
  const auto add = [&]<int NV>(std::integral_constant<int, NV>) __attribute__((always_inline)) {
    add_values<T, kLanes, NV>(
        cells, num_cells, d, block_size, head_size, probs, kStride, correction, ahead, sums + d);
    d += NV * kWidth;
  };
  while (d + kVecs * kWidth <= head_size) add(std::integral_constant<int, kVecs>{});
  if (d + 2 * kWidth <= head_size) add(std::integral_constant<int, 2>{});
  if (d < head_size) add(std::integral_constant<int, 1>{});
}

}  // namespace
}  // namespace kvcompress
