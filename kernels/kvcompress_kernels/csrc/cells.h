// Addresses in the paged pool; the layout is described in formats.py.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <cstdint>

namespace kvcompress {

struct CellIndex {
  int64_t block;  // index into the slab (the block table), not a block id
  int64_t layer;
  int64_t head;
};

// The pool kv_cache[L, B, H, N, 2 * D]; strides in elements. A CPU cell is K transposed [D, N],
// then V [N, D].
template <typename T>
struct CacheView {
  T* data;
  int64_t stride_layer, stride_block, stride_head;
  int64_t num_layers, num_blocks, num_kv_heads, block_size, head_size;

  explicit CacheView(const at::Tensor& kv_cache)
      : data(reinterpret_cast<T*>(kv_cache.data_ptr())),
        stride_layer(kv_cache.stride(0)),
        stride_block(kv_cache.stride(1)),
        stride_head(kv_cache.stride(2)),
        num_layers(kv_cache.size(0)),
        num_blocks(kv_cache.size(1)),
        num_kv_heads(kv_cache.size(2)),
        block_size(kv_cache.size(3)),
        head_size(kv_cache.size(4) / 2) {}

  // Keys of a cell, [D, N].
  T* keys(int64_t block, int64_t layer, int64_t head) const {
    return data + layer * stride_layer + block * stride_block + head * stride_head;
  }
  // Values of a cell, [N, D].
  T* values(int64_t block, int64_t layer, int64_t head) const {
    return keys(block, layer, head) + head_size * block_size;
  }
  CellIndex locate(int64_t cell) const {
    const int64_t cells_per_block = num_layers * num_kv_heads;
    const int64_t rest = cell % cells_per_block;
    return {cell / cells_per_block, rest / num_kv_heads, rest % num_kv_heads};
  }
};

// The side tensor bias[B, L, H, N] of float32.
struct BiasView {
  float* data;
  int64_t stride_block, stride_layer, stride_head;

  explicit BiasView(const at::Tensor& bias)
      : data(reinterpret_cast<float*>(bias.data_ptr())),
        stride_block(bias.stride(0)),
        stride_layer(bias.stride(1)),
        stride_head(bias.stride(2)) {}

  // Bias of the slots of a cell, [N].
  float* slots(int64_t block, int64_t layer, int64_t head) const {
    return data + block * stride_block + layer * stride_layer + head * stride_head;
  }
};

// Raises ValueError unless kv_cache and bias are as the two views above expect them.
inline void check_pool(const at::Tensor& kv_cache, const at::Tensor& bias) {
  TORCH_CHECK_VALUE(
      kv_cache.dim() == 5 && kv_cache.size(4) % 2 == 0,
      "kv_cache: expected [num_layers, num_blocks, num_kv_heads, block_size, 2 * head_size], got ",
      kv_cache.sizes());
  TORCH_CHECK_VALUE(
      kv_cache.stride(4) == 1 && kv_cache.stride(3) == kv_cache.size(4),
      "kv_cache: expected the last two dimensions contiguous (strides ..., ", kv_cache.size(4),
      ", 1), got strides ", kv_cache.strides());
  TORCH_CHECK_VALUE(
      bias.dim() == 4 && bias.size(0) == kv_cache.size(1) && bias.size(1) == kv_cache.size(0) &&
          bias.size(2) == kv_cache.size(2) && bias.size(3) == kv_cache.size(3),
      "bias: expected [num_blocks, num_layers, num_kv_heads, block_size] = [", kv_cache.size(1),
      ", ", kv_cache.size(0), ", ", kv_cache.size(2), ", ", kv_cache.size(3), "], got ",
      bias.sizes());
  TORCH_CHECK_VALUE(
      bias.scalar_type() == at::kFloat, "bias: expected float32, got ", bias.scalar_type());
  TORCH_CHECK_VALUE(
      bias.stride(3) == 1, "bias: expected the last dimension contiguous, got strides ",
      bias.strides());
  TORCH_CHECK_VALUE(
      kv_cache.device().is_cpu() && bias.device().is_cpu(),
      "kv_cache and bias: expected CPU tensors, got ", kv_cache.device(), " and ", bias.device());
}

}  // namespace kvcompress
