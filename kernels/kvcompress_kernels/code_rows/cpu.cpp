// Quantizing and packing of coded rows on the CPU, and the gathering of the rows to be transformed.
// `api.py` states the contract, `reference.py` the result, `code_format.py` the bytes.
//
// Cells are independent of one another and of the number of threads. Decisions are those of the
// reference: scales are rounded once, from sums in float64, and quotients are rounded by float32
// division.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <optional>
#include <tuple>
#include <vector>

#include "csrc/cells.h"
#include "csrc/checks.h"
#include "csrc/codes.h"
#include "csrc/simd.h"

namespace kvcompress {
namespace {

using simd::kWidth;

constexpr float kSmallestScale = 0x1p-14f;
constexpr float kLargestScale = 65504.0f;
constexpr int kNumThresholds = 15 + 3 + 1;

// Thresholds of the widths 4, 2 and 1, one after another.
struct Thresholds {
  const float* begin[kNumWidths];

  explicit Thresholds(const float* all) : begin{nullptr, all, all + 15, all + 18} {}
};

// Rows of channels of one side and where their codes and scales go.
class Quantizer {
 public:
  Quantizer(const at::Tensor& z, const CodeSide& side, const Thresholds& thresholds)
      : z_(z.const_data_ptr<float>()),
        stride_(z.stride(0)),
        side_(side),
        thresholds_(thresholds) {}

  // Codes of row `row` into `codes`, its scales into the column `scales` of planes of `rows`.
  void run(int64_t row, uint8_t* codes, c10::Half* scales, int64_t rows) const {
    const float* z = z_ + row * stride_;
    const int64_t wide = side_.counts[0], all = side_.num_channels();
    if (wide < all) {
      double sums[kSums] = {};
      int64_t c = wide;
      for (; c + kSums <= all; c += kSums) {
        for (int i = 0; i < kSums; ++i) {
          sums[i] += static_cast<double>(z[c + i]) * static_cast<double>(z[c + i]);
        }
      }
      for (; c < all; ++c) sums[0] += static_cast<double>(z[c]) * static_cast<double>(z[c]);
      const double total = std::accumulate(sums, sums + kSums, 0.0);
      const double mean = total / static_cast<double>(all - wide);
      const float scale = store_scale(
          static_cast<float>(std::sqrt(mean)), scales + side_.rms * rows);
      int64_t start = wide;
      for (int k = 1; k < kNumWidths; ++k) {
        narrow(z + start, side_.counts[k], scale, k, codes + start);
        start += side_.counts[k];
      }
    }
    if (wide) {
      float largest = 0;
      for (int64_t c = 0; c < wide; ++c) largest = std::max(largest, std::abs(z[c]));
      const float scale = store_scale(largest / 128.0f, scales + side_.max * rows);
      for (int64_t c = 0; c < wide; ++c) {
        const float level = std::clamp(std::nearbyintf(z[c] / scale), -128.0f, 127.0f);
        codes[c] = static_cast<uint8_t>(static_cast<int>(level) + 128);
      }
    }
  }

 private:
  static constexpr int64_t kChunk = 64;
  static constexpr int kSums = 16;

  static float store_scale(float raw, c10::Half* target) {
    *target = c10::Half(std::clamp(raw, kSmallestScale, kLargestScale));
    return static_cast<float>(*target);
  }

  void narrow(const float* z, int64_t count, float scale, int k, uint8_t* codes) const {
    const float* thresholds = thresholds_.begin[k];
    const int num_thresholds = (1 << kCodeWidths[k]) - 1;
    for (int64_t c = 0; c < count; c += kChunk) {
      const int64_t size = std::min(kChunk, count - c);
      float x[kChunk] = {};
      int32_t above[kChunk] = {};
      for (int64_t i = 0; i < size; ++i) x[i] = z[c + i] / scale;
      for (int j = 0; j < num_thresholds; ++j) {
        for (int64_t i = 0; i < kChunk; ++i) above[i] += x[i] > thresholds[j];
      }
      for (int64_t i = 0; i < size; ++i) codes[c + i] = static_cast<uint8_t>(above[i]);
    }
  }

  const float* z_;
  int64_t stride_;
  CodeSide side_;
  Thresholds thresholds_;
};

// bytes[i] = codes i, i + s, i + 2 s, ... of a run of s bytes, from its lowest bits up.
inline void pack_run(const uint8_t* codes, int64_t num_codes, int width, uint8_t* bytes) {
  const int64_t s = run_bytes(num_codes, width);
  std::copy_n(codes, s, bytes);
  for (int part = 1; part < 8 / width; ++part) {
    const int64_t count = std::clamp<int64_t>(num_codes - part * s, 0, s);
    for (int64_t i = 0; i < count; ++i) {
      bytes[i] = static_cast<uint8_t>(bytes[i] | codes[part * s + i] << part * width);
    }
  }
}

// The planes of `num_channels` channels: codes [rows, code_stride] -> bytes [num_channels, s].
// `line` has room for one code of each channel.
inline void pack_planes(
    const uint8_t* codes, int64_t code_stride, int64_t rows, int64_t num_channels, int width,
    uint8_t* line, uint8_t* planes) {
  const int64_t s = run_bytes(rows, width);
  for (int64_t i = 0; i < s; ++i) {
    std::copy_n(codes + i * code_stride, num_channels, line);
    for (int part = 1; part < 8 / width; ++part) {
      const uint8_t* more = codes + (i + part * s) * code_stride;
      for (int64_t c = 0; c < num_channels; ++c) {
        line[c] = static_cast<uint8_t>(line[c] | more[c] << part * width);
      }
    }
    for (int64_t c = 0; c < num_channels; ++c) planes[c * s + i] = line[c];
  }
}

void check_channels(
    const char* name, const at::Tensor& z, int64_t num_rows, int64_t num_channels) {
  TORCH_CHECK_VALUE(
      z.dim() == 2 && z.size(0) == num_rows && z.size(1) == num_channels, name,
      ": expected [num_rows, num_channels] = [", num_rows, ", ", num_channels, "], got ",
      z.sizes());
  TORCH_CHECK_VALUE(
      z.scalar_type() == at::kFloat && (z.stride(1) == 1 || z.size(1) <= 1) &&
          z.device().is_cpu(),
      name, ": expected float32 on the CPU with contiguous rows, got ", z.scalar_type(),
      " with strides ", z.strides(), " on ", z.device());
}

void check_cells(const at::Tensor& kv_cache) {
  TORCH_CHECK_VALUE(
      kv_cache.dim() == 5 && kv_cache.size(4) % 2 == 0 && kv_cache.stride(4) == 1 &&
          kv_cache.stride(3) == kv_cache.size(4) && kv_cache.device().is_cpu(),
      "kv_cache: expected [num_layers, num_blocks, num_kv_heads, block_size, 2 * head_size] on the "
      "CPU with the last two dimensions contiguous, got ", kv_cache.sizes(), " with strides ",
      kv_cache.strides(), " on ", kv_cache.device());
}

void check_blocks(const char* name, const at::Tensor& blocks, int64_t num_blocks) {
  TORCH_CHECK_VALUE(blocks.dim() == 1, name, ": expected one dimension, got ", blocks.sizes());
  check_index(name, blocks, "[num_blocks]", {blocks.size(0)});
  const int32_t* ids = blocks.const_data_ptr<int32_t>();
  for (int64_t i = 0; i < blocks.size(0); ++i) {
    TORCH_CHECK_VALUE(
        ids[i] >= 0 && ids[i] < num_blocks, name, "[", i, "]: expected a block below ", num_blocks,
        ", got ", ids[i]);
  }
}

// Bytes of the pool, whatever its elements are.
CacheView<uint8_t> bytes_of(const at::Tensor& kv_cache) {
  CacheView<uint8_t> view(kv_cache);
  const int64_t size = kv_cache.element_size();
  view.stride_layer *= size;
  view.stride_block *= size;
  view.stride_head *= size;
  return view;
}

int64_t code_rows(
    const at::Tensor& z_keys, const at::Tensor& z_values, const std::optional<at::Tensor>& bias,
    at::IntArrayRef layout_numbers, const at::Tensor& thresholds, const at::Tensor& kv_cache,
    const at::Tensor& slab, int64_t first_cell) {
  check_cells(kv_cache);
  TORCH_CHECK_VALUE(
      layout_numbers.size() == 2 * kNumWidths + 1, "layout: expected ", 2 * kNumWidths + 1,
      " numbers, got ", layout_numbers.size());
  const CodeLayout layout(layout_numbers.data());
  const int64_t num_rows = z_keys.dim() == 2 ? z_keys.size(0) : -1;
  check_channels("z_keys", z_keys, num_rows, layout.key.num_channels());
  check_channels("z_values", z_values, num_rows, layout.value.num_channels());
  TORCH_CHECK_VALUE(
      bias.has_value() == (layout.bias >= 0), "bias: expected exactly if the layout has one, got ",
      bias.has_value() ? "one" : "none");
  if (bias) {
    TORCH_CHECK_VALUE(
        bias->dim() == 1 && bias->size(0) == num_rows && bias->scalar_type() == at::kFloat &&
            bias->is_contiguous() && bias->device().is_cpu(),
        "bias: expected contiguous float32 [num_rows] = [", num_rows, "] on the CPU, got ",
        bias->scalar_type(), " ", bias->sizes());
  }
  TORCH_CHECK_VALUE(
      thresholds.scalar_type() == at::kFloat && thresholds.is_contiguous() &&
          thresholds.numel() == kNumThresholds,
      "thresholds: expected contiguous float32 [", kNumThresholds, "], got ",
      thresholds.scalar_type(), " ", thresholds.sizes());
  check_blocks("slab", slab, kv_cache.size(1));
  const int64_t cell_bytes = kv_cache.size(3) * kv_cache.size(4) * kv_cache.element_size();
  const int64_t rows = layout.rows_per_cell(cell_bytes);
  TORCH_CHECK_VALUE(
      rows > 0, "layout: rows of ", layout.row_bits(), " bits; ", kRowStep,
      " of them must fit a cell of ", cell_bytes, " bytes, and rows of 0 bits are no code");
  const int64_t num_cells = (num_rows + rows - 1) / rows;
  const int64_t room = slab.size(0) * kv_cache.size(0) * kv_cache.size(2);
  TORCH_CHECK_VALUE(
      first_cell >= 0 && first_cell + num_cells <= room, "first_cell: expected ", num_cells,
      " cells from it on within the ", room, " of the slab, got ", first_cell);

  const CacheView<uint8_t> cache = bytes_of(kv_cache);
  const int32_t* blocks = slab.const_data_ptr<int32_t>();
  const Thresholds bounds(thresholds.const_data_ptr<float>());
  const Quantizer keys(z_keys, layout.key, bounds), values(z_values, layout.value, bounds);
  const int64_t num_keys = layout.key.num_channels(), num_values = layout.value.num_channels();
  at::parallel_for(0, num_cells, 1, [&](int64_t begin, int64_t end) {
    std::vector<uint8_t> key_codes(rows * num_keys), value_codes(num_values), line(num_keys);
    for (int64_t cell = begin; cell < end; ++cell) {
      const CellIndex at = cache.locate(first_cell + cell);
      uint8_t* target = cache.keys(blocks[at.block], at.layer, at.head);
      c10::Half* scales = reinterpret_cast<c10::Half*>(target);
      uint8_t* value_row = target + layout.value_offset(rows);
      const int64_t count = std::min(rows, num_rows - cell * rows);
      std::memset(target, 0, layout.key_offset(rows));
      std::memset(value_row + count * layout.value_bytes, 0, (rows - count) * layout.value_bytes);
      std::fill(key_codes.begin() + count * num_keys, key_codes.end(), 0);
      for (int64_t i = 0; i < count; ++i) {
        const int64_t row = cell * rows + i;
        keys.run(row, key_codes.data() + i * num_keys, scales + i, rows);
        values.run(row, value_codes.data(), scales + i, rows);
        if (bias) scales[layout.bias * rows + i] = c10::Half(bias->const_data_ptr<float>()[row]);
        const uint8_t* codes = value_codes.data();
        for (int k = 0; k < kNumWidths; ++k) {
          pack_run(codes, layout.value.counts[k], kCodeWidths[k], value_row);
          codes += layout.value.counts[k];
          value_row += run_bytes(layout.value.counts[k], kCodeWidths[k]);
        }
      }
      uint8_t* planes = target + layout.key_offset(rows);
      const uint8_t* codes = key_codes.data();
      for (int k = 0; k < kNumWidths; ++k) {
        const int64_t channels = layout.key.counts[k];
        pack_planes(codes, num_keys, rows, channels, kCodeWidths[k], line.data(), planes);
        codes += channels;
        planes += channels * run_bytes(rows, kCodeWidths[k]);
      }
    }
  });
  return first_cell + num_cells;
}

template <typename T>
void gather(
    const CacheView<T>& cache, int64_t layer, const int32_t* source, int64_t first_head,
    int64_t group_size, int64_t start, int64_t stop, float* keys, float* values) {
  const int64_t block_size = cache.block_size, head_size = cache.head_size;
  const int64_t num_rows = stop - start, width = group_size * head_size;
  const int64_t first_block = start / block_size;
  const int64_t num_blocks = (stop + block_size - 1) / block_size - first_block;
  at::parallel_for(0, num_blocks * group_size, 8, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      // all blocks of a head in order: writes to `keys` go along its rows
      const int64_t member = task / num_blocks, block = first_block + task % num_blocks;
      const int64_t first = std::max(start, block * block_size);
      const int64_t count = std::min(stop, (block + 1) * block_size) - first;
      const int64_t slot = first - block * block_size;
      const T* cell = cache.keys(source[block], layer, first_head + member);
      for (int64_t d = 0; d < head_size; ++d) {
        float* target = keys + (member * head_size + d) * num_rows + first - start;
        const T* from = cell + d * block_size + slot;
        for (int64_t i = 0; i < count; ++i) target[i] = static_cast<float>(from[i]);
      }
      for (int64_t i = 0; i < count; ++i) {
        float* target = values + (first - start + i) * width + member * head_size;
        const T* from = cell + (block_size + slot + i) * head_size;
        for (int64_t d = 0; d < head_size; d += kWidth) {
          simd::store(target + d, simd::load(from + d));
        }
      }
    }
  });
}

// Keys [group_size * D, m] and values [m, group_size * D] of tokens of whole blocks, float32.
std::tuple<at::Tensor, at::Tensor> gather_rows(
    const at::Tensor& kv_cache, int64_t layer, const at::Tensor& source, int64_t first_head,
    int64_t group_size, int64_t start, int64_t stop) {
  check_cells(kv_cache);
  check_blocks("source", source, kv_cache.size(1));
  TORCH_CHECK_VALUE(
      layer >= 0 && layer < kv_cache.size(0), "layer: expected 0 <= layer < ", kv_cache.size(0),
      ", got ", layer);
  TORCH_CHECK_VALUE(
      first_head >= 0 && group_size > 0 && first_head + group_size <= kv_cache.size(2),
      "first_head: expected ", group_size, " heads from it on within the ", kv_cache.size(2),
      " KV heads, got ", first_head);
  TORCH_CHECK_VALUE(
      start >= 0 && start <= stop && stop <= source.size(0) * kv_cache.size(3),
      "expected 0 <= start <= stop <= ", source.size(0) * kv_cache.size(3), " tokens of source, "
      "got ", start, " and ", stop);
  TORCH_CHECK_VALUE(
      kv_cache.size(4) % 32 == 0, "kv_cache: expected a head size that is a multiple of 16, got ",
      kv_cache.size(4) / 2);
  const int64_t width = group_size * kv_cache.size(4) / 2;
  at::Tensor keys = at::empty({width, stop - start}, at::kFloat);
  at::Tensor values = at::empty({stop - start, width}, at::kFloat);
  const auto run = [&]<typename T>(T) {
    gather<T>(
        CacheView<T>(kv_cache), layer, source.const_data_ptr<int32_t>(), first_head, group_size,
        start, stop, keys.mutable_data_ptr<float>(), values.mutable_data_ptr<float>());
  };
  switch (kv_cache.scalar_type()) {
    case at::kFloat:
      run(float{});
      break;
    case at::kBFloat16:
      run(c10::BFloat16{});
      break;
    case at::kHalf:
      run(c10::Half{});
      break;
    default:
      TORCH_CHECK_VALUE(
          false, "kv_cache: expected float32, bfloat16 or float16, got ", kv_cache.scalar_type());
  }
  return {keys, values};
}

}  // namespace
}  // namespace kvcompress

TORCH_LIBRARY_FRAGMENT(kvcompress, m) {
  m.def(
      "code_rows(Tensor z_keys, Tensor z_values, Tensor? bias, int[] layout, Tensor thresholds, "
      "Tensor(a!) kv_cache, Tensor slab, int first_cell) -> int");
  m.def(
      "gather_rows(Tensor kv_cache, int layer, Tensor source, int first_head, int group_size, "
      "int start, int stop) -> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(kvcompress, CPU, m) {
  m.impl("code_rows", &kvcompress::code_rows);
  m.impl("gather_rows", &kvcompress::gather_rows);
}
