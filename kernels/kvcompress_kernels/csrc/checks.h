// Checks of arguments that several operations share.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

namespace kvcompress {

// Raises ValueError unless `tensor` is contiguous int32 of these sizes.
inline void check_index(
    const char* name, const at::Tensor& tensor, const char* expected, at::IntArrayRef sizes) {
  TORCH_CHECK_VALUE(
      tensor.sizes() == sizes, name, ": expected ", expected, " = ", sizes, ", got ",
      tensor.sizes());
  TORCH_CHECK_VALUE(
      tensor.scalar_type() == at::kInt && tensor.is_contiguous() && tensor.device().is_cpu(), name,
      ": expected contiguous int32 on the CPU, got ", tensor.scalar_type(), " with strides ",
      tensor.strides(), " on ", tensor.device());
}

}  // namespace kvcompress
