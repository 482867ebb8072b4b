// Attention that a few queries pay to the tokens of a paged prompt, on CPU. `api.py` states the
// contract, `reference.py` the result.
//
// A task is one (layer, KV head). Its queries, all heads and positions of them, are rows; a few
// rows at a time are multiplied with all keys, and their logits, a buffer [rows, n], become
// probabilities in place. Rows are added up in order, whatever the number of threads.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "csrc/cells.h"
#include "csrc/simd.h"
#include "segment_attention/tile.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <tuple>
#include <type_traits>
#include <vector>

namespace {

namespace simd = kvcompress::simd;
using kvcompress::CacheView;
using kvcompress::kMaxLanes;
using kvcompress::Operand;
using simd::kWidth;
using simd::Vec;

// Sums of sums, so that float32 keeps its last digits: vectors of a row, and rows, that are added up
// before they join the total.
constexpr int64_t kSumVectors = 32;
constexpr int64_t kSumRows = 64;

struct Prompt {
  const int32_t *source, *tail;
  int64_t num_source, num_blocks;  // blocks of both
  int64_t num_tokens, first_position;

  int64_t block(int64_t index) const {
    return index < num_source ? source[index] : tail[index - num_source];
  }
};

template <typename T>
class HeadScorer {
 public:
  HeadScorer(
      const CacheView<T>& cache, const Prompt& prompt, int64_t rows, int64_t num_queries,
      float scale)
      : cache_(cache),
        prompt_(prompt),
        rows_(rows),
        num_queries_(num_queries),
        scale_(scale),
        slots_(prompt.num_blocks * cache.block_size),
        // the odd vector keeps the rows out of one another's cache sets
        stride_(slots_ + kWidth),
        operands_((rows + kMaxLanes - 1) / kMaxLanes * kMaxLanes * cache.head_size),
        logits_(kMaxLanes * stride_),
        partial_(slots_),
        sums_(slots_) {}

  // Args: queries [rows, D]; mass and scores [G], written.
  void run(int64_t layer, int64_t head, const T* queries, float* mass, float* scores) {
    std::fill(operands_.begin(), operands_.end(), Operand<T>(0.f));
    std::copy_n(queries, rows_ * cache_.head_size, operands_.begin());
    const int64_t scored = prompt_.num_source * cache_.block_size;
    std::fill(sums_.begin(), sums_.end(), 0.f);
    for (int64_t begin = 0; begin < rows_; begin += kSumRows) {
      const int64_t end = std::min(rows_, begin + kSumRows);
      std::fill(partial_.begin(), partial_.end(), 0.f);
      for (int64_t row = begin; row < end; row += kMaxLanes) {
        multiply(layer, head, row);
        add_probabilities(std::min<int64_t>(kMaxLanes, end - row));
      }
      for (int64_t n = 0; n < scored; ++n) sums_[n] += partial_[n];
    }
    std::copy_n(sums_.begin(), scored, mass);
    for (int64_t b = 0; b < prompt_.num_source; ++b) {
      const T* values = cache_.values(prompt_.block(b), layer, head);
      for (int64_t n = 0; n < cache_.block_size; ++n) {
        const int64_t token = b * cache_.block_size + n;
        scores[token] = mass[token] * norm(values + n * cache_.head_size);
      }
    }
  }

 private:
  int64_t visible(int64_t row) const {
    return std::min(prompt_.num_tokens, prompt_.first_position + row % num_queries_ + 1);
  }

  // Logits of kMaxLanes rows, -inf for hidden tokens and for slots past the prompt.
  void multiply(int64_t layer, int64_t head, int64_t row) {
    int64_t seen[kMaxLanes], least = prompt_.num_tokens;
    for (int lane = 0; lane < kMaxLanes; ++lane) {
      seen[lane] = visible(row + lane);
      least = std::min(least, seen[lane]);
    }
    for (int64_t b = 0; b < prompt_.num_blocks; ++b) {
      const T* keys = cache_.keys(prompt_.block(b), layer, head);
      const bool masked = (b + 1) * cache_.block_size > least;
      const int64_t next = std::min(b + 1, prompt_.num_blocks - 1);
      const T* ahead = cache_.keys(prompt_.block(next), layer, head);
      int64_t n = 0;
      for (; n + 2 * kWidth <= cache_.block_size; n += 2 * kWidth) {
        multiply_slots<2>(keys + n, ahead + n, row, b * cache_.block_size + n, masked, seen);
      }
      for (; n < cache_.block_size; n += kWidth) {
        multiply_slots<1>(keys + n, ahead + n, row, b * cache_.block_size + n, masked, seen);
      }
    }
  }

  template <int NV>
  void multiply_slots(
      const T* keys, const T* ahead, int64_t row, int64_t token, bool masked,
      const int64_t (&seen)[kMaxLanes]) {
    Vec dots[kMaxLanes][NV];
    kvcompress::dot_keys<T, kMaxLanes, NV>(
        keys, cache_.block_size, cache_.head_size, operands_.data() + row * cache_.head_size,
        ahead, dots);
    const Vec hidden = simd::set1(-std::numeric_limits<float>::infinity());
    for (int lane = 0; lane < kMaxLanes; ++lane) {
      for (int j = 0; j < NV; ++j) {
        Vec logit = simd::mul(dots[lane][j], simd::set1(scale_));
        const int64_t first = token + j * kWidth;
        if (masked) {
          const int64_t count = std::clamp<int64_t>(seen[lane] - first, 0, kWidth);
          logit = simd::keep_first(logit, static_cast<int>(count), hidden);
        }
        simd::store(logits_.data() + lane * stride_ + first, logit);
      }
    }
  }

  // Adds the probabilities of the first `lanes` rows to the partial sums.
  void add_probabilities(int64_t lanes) {
    Vec factors[kMaxLanes];
    for (int64_t lane = 0; lane < lanes; ++lane) {
      factors[lane] = simd::set1(1.0f / exponentiate(lane));
    }
    for (int64_t n = 0; n < prompt_.num_source * cache_.block_size; n += kWidth) {
      Vec sum = simd::zero();
      for (int64_t lane = 0; lane < lanes; ++lane) {
        sum = simd::fma(simd::load(logits_.data() + lane * stride_ + n), factors[lane], sum);
      }
      float* partial = partial_.data() + n;
      simd::store(partial, simd::add(simd::load(partial), sum));
    }
  }

  // Replaces the logits of a row by their exponentials, of which the largest is 1; their sum.
  float exponentiate(int64_t lane) {
    float* row = logits_.data() + lane * stride_;
    Vec top = simd::load(row);
    for (int64_t n = kWidth; n < slots_; n += kWidth) top = simd::max(top, simd::load(row + n));
    const Vec shift = simd::set1(simd::reduce_max(top));
    Vec total = simd::zero();
    for (int64_t begin = 0; begin < slots_; begin += kSumVectors * kWidth) {
      const int64_t end = std::min(slots_, begin + kSumVectors * kWidth);
      Vec sum = simd::zero();
      for (int64_t n = begin; n < end; n += kWidth) {
        const Vec p = simd::exp_nonpositive(simd::sub(simd::load(row + n), shift));
        simd::store(row + n, p);
        sum = simd::add(sum, p);
      }
      total = simd::add(total, sum);
    }
    return simd::reduce_add(total);
  }

  float norm(const T* value) const {
    Vec sum = simd::zero();
    for (int64_t d = 0; d < cache_.head_size; d += kWidth) {
      const Vec x = simd::load(value + d);
      sum = simd::fma(x, x, sum);
    }
    return std::sqrt(simd::reduce_add(sum));
  }

  const CacheView<T>& cache_;
  const Prompt& prompt_;
  int64_t rows_, num_queries_;
  float scale_;
  int64_t slots_, stride_;
  std::vector<Operand<T>> operands_;
  std::vector<float> logits_;          // [kMaxLanes, slots]
  std::vector<float> partial_, sums_;  // [slots]
};

template <typename T>
void score(
    const at::Tensor& kv_cache, const at::Tensor& queries, const Prompt& prompt, float scale,
    at::Tensor& mass, at::Tensor& scores) {
  const CacheView<T> cache(kv_cache);
  const int64_t rows = queries.size(1) / cache.num_kv_heads * queries.size(2);
  const int64_t scored = mass.size(2);
  const T* query = reinterpret_cast<const T*>(queries.const_data_ptr());
  float* masses = mass.mutable_data_ptr<float>();
  float* weighed = scores.mutable_data_ptr<float>();
  at::parallel_for(
      0, cache.num_layers * cache.num_kv_heads, 1, [&](int64_t begin, int64_t end) {
        HeadScorer<T> scorer(cache, prompt, rows, queries.size(2), scale);
        for (int64_t task = begin; task < end; ++task) {
          scorer.run(
              task / cache.num_kv_heads, task % cache.num_kv_heads,
              query + task * rows * cache.head_size, masses + task * scored,
              weighed + task * scored);
        }
      });
}

std::tuple<at::Tensor, at::Tensor> window_scores(
    const at::Tensor& kv_cache, const at::Tensor& source, const at::Tensor& tail,
    int64_t num_tokens, const at::Tensor& queries, int64_t first_position, double scale) {
  const Prompt prompt{
      source.const_data_ptr<int32_t>(), tail.const_data_ptr<int32_t>(), source.numel(),
      source.numel() + tail.numel(), num_tokens, first_position};
  at::Tensor mass = at::empty(
      {kv_cache.size(0), kv_cache.size(2), source.numel() * kv_cache.size(3)},
      kv_cache.options().dtype(at::kFloat));
  at::Tensor scores = at::empty_like(mass);
  const float factor = static_cast<float>(scale);
  switch (kv_cache.scalar_type()) {
    case at::kBFloat16:
      score<c10::BFloat16>(kv_cache, queries, prompt, factor, mass, scores);
      break;
    case at::kHalf:
      score<c10::Half>(kv_cache, queries, prompt, factor, mass, scores);
      break;
    default:
      TORCH_CHECK(
          kv_cache.scalar_type() == at::kFloat, "window_scores: unsupported dtype ",
          kv_cache.scalar_type());
      score<float>(kv_cache, queries, prompt, factor, mass, scores);
  }
  return {mass, scores};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(kvcompress, m) {
  m.def(
      "window_scores(Tensor kv_cache, Tensor source, Tensor tail, int num_tokens, Tensor queries, "
      "int first_position, float scale) -> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(kvcompress, CPU, m) { m.impl("window_scores", &window_scores); }
