// Writes chosen tokens of a layer into a slab on CPU, and merges the values of others into them.
// `api.py` states the contract, `reference.py` the result.
//
// Work is divided into (head, group of whole buckets). In a bucket, the kept keys are gathered into
// rows and multiplied with all keys, straight from the cells. Which kept key is nearest is decided
// in float32; where the two nearest are too close for that, in float64, whose products are exact
// and whose sums run in the order of the reference. The outcome therefore depends on neither vector
// width nor threads.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>
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
using kvcompress::BiasView;
using kvcompress::CacheView;
using kvcompress::kMaxLanes;
using kvcompress::Operand;
using simd::kWidth;
using simd::Vec;

constexpr int64_t kGroupTokens = 128;
constexpr float kMinMass = 1e-8f;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Layer {
  int64_t layer, num_tokens, bucket;
  double alpha;
  const int32_t *source, *slab;
  const bool* kept;   // [H, G]
  const float* mass;  // [H, G]
};

// One head; goes through its buckets and writes their entries.
template <typename T>
class Merger {
 public:
  Merger(const CacheView<T>& cache, const BiasView& bias, const Layer& layer, int64_t head)
      : cache_(cache),
        bias_(bias),
        layer_(layer),
        head_(head),
        size_(cache.head_size),
        kept_of_(layer.kept + head * layer.num_tokens),
        mass_(layer.mass + head * layer.num_tokens) {}

  // Tokens [begin, end), a bucket or less; its kept ones become the entries from `entry` on of the
  // segment at `first_cell`. Returns how many of the others were merged.
  int64_t run(int64_t begin, int64_t end, int64_t first_cell, int64_t entry) {
    begin_ = begin;
    length_ = end - begin;
    tokens_.clear();
    for (int64_t token = begin; token < end; ++token) {
      if (kept_of_[token]) tokens_.push_back(token);
    }
    const int64_t count = tokens_.size();
    if (count == 0) return 0;
    gather_rows();
    merged_.assign(count, false);
    int64_t num_merged = 0;
    if (layer_.bucket > 0 && count < length_) {
      route();
      num_merged = merge();
    }
    write(first_cell, entry);
    return num_merged;
  }

 private:
  const T* cell(int64_t token) const {
    return cache_.keys(layer_.source[token / cache_.block_size], layer_.layer, head_);
  }
  int64_t slot(int64_t token) const { return token % cache_.block_size; }
  const T* value(int64_t token) const {
    return cell(token) + (cache_.block_size + slot(token)) * size_;
  }
  float mass(int64_t token) const { return std::max(mass_[token], kMinMass); }

  void gather_rows() {
    const int64_t count = tokens_.size();
    const int64_t padded = (count + kMaxLanes - 1) / kMaxLanes * kMaxLanes;
    rows_.assign(padded * size_, T(0.f));
    for (int64_t k = 0; k < count; ++k) {
      const T* from = cell(tokens_[k]) + slot(tokens_[k]);
      for (int64_t d = 0; d < size_; ++d) rows_[k * size_ + d] = from[d * cache_.block_size];
    }
  }

  const Operand<T>* operands() {
    if constexpr (std::is_same_v<Operand<T>, T>) {
      return rows_.data();
    } else {
      operands_.assign(rows_.begin(), rows_.end());
      return operands_.data();
    }
  }

  // Squared norms of the bucket's keys and their products with the kept keys.
  void multiply() {
    const int64_t count = tokens_.size();
    const int64_t padded = rows_.size() / size_;
    // room for two vectors, because the last piece of a block overruns by less than that; the
    // overrun reads what follows in the same cell, and is overwritten by the next piece
    stride_ = (length_ + 15) / 16 * 16 + 2 * kWidth;
    dots_.resize(std::max<size_t>(dots_.size(), padded * stride_));
    squares_.resize(std::max<size_t>(squares_.size(), stride_));
    const Operand<T>* rows = operands();
    for (int64_t token = begin_; token < begin_ + length_;) {
      const int64_t piece =
          std::min(begin_ + length_ - token, cache_.block_size - slot(token));
      for (int64_t done = 0; done < piece; done += 2 * kWidth) {
        const T* keys = cell(token) + slot(token) + done;
        const int64_t at = token - begin_ + done;
        if (piece - done > kWidth) {
          multiply_slots<2>(keys, rows, count, at);
        } else {
          multiply_slots<1>(keys, rows, count, at);
        }
      }
      token += piece;
    }
  }

  template <int NV>
  void multiply_slots(const T* keys, const Operand<T>* rows, int64_t count, int64_t at) {
    Vec squares[NV];
    for (int j = 0; j < NV; ++j) squares[j] = simd::zero();
    for (int64_t d = 0; d < size_; ++d) {
      for (int j = 0; j < NV; ++j) {
        const Vec key = simd::load(keys + d * cache_.block_size + j * kWidth);
        squares[j] = simd::fma(key, key, squares[j]);
      }
    }
    for (int j = 0; j < NV; ++j) simd::store(squares_.data() + at + j * kWidth, squares[j]);
    for (int64_t k = 0; k < count; k += kMaxLanes) {
      Vec dots[kMaxLanes][NV];
      kvcompress::dot_keys<T, kMaxLanes, NV>(
          keys, cache_.block_size, size_, rows + k * size_, keys, dots);
      for (int lane = 0; lane < kMaxLanes; ++lane) {
        for (int j = 0; j < NV; ++j) {
          simd::store(dots_.data() + (k + lane) * stride_ + at + j * kWidth, dots[lane][j]);
        }
      }
    }
  }

  // Outside this range of squared norms float32 may over- or underflow.
  static bool trusted(float square) { return square > 1e-20f && square < 1e20f; }

  // target_[t]: which kept token takes the bucket's token t in, -1 for none.
  void route() {
    const int64_t count = tokens_.size();
    multiply();
    best_.assign(length_, -kInfinity);
    second_.assign(length_, -kInfinity);
    target_.assign(length_, -1);
    bool all_trusted = true;
    for (int64_t k = 0; k < count; ++k) {
      const float square = squares_[tokens_[k] - begin_];
      all_trusted &= trusted(square);
      const float inverse = 1.0f / std::sqrt(square);
      const float* dots = dots_.data() + k * stride_;
      float *best = best_.data(), *second = second_.data();
      int32_t* target = target_.data();
      for (int64_t t = 0; t < length_; ++t) {
        const float similar = dots[t] * inverse;
        const bool better = similar > best[t];
        const float loser = better ? best[t] : similar;
        second[t] = loser > second[t] ? loser : second[t];
        target[t] = better ? static_cast<int32_t>(k) : target[t];
        best[t] = better ? similar : best[t];
      }
    }
    // float32 rounding of the product, of the kept key's norm and of the line above, in units of
    // the token's norm: at most (1.5 * D + 8) * 2^-24
    const float guard = static_cast<float>(2 * size_ + 64) * 0x1p-24f;
    for (int64_t t = 0; t < length_; ++t) {
      if (kept_of_[begin_ + t]) continue;
      const bool sure = all_trusted && trusted(squares_[t]) &&
          best_[t] - second_[t] > 2 * guard * std::sqrt(squares_[t]);
      if (!sure) target_[t] = nearest(begin_ + t);
    }
  }

  // The definition, in float64.
  int32_t nearest(int64_t token) const {
    const T* key = cell(token) + slot(token);
    double best = -std::numeric_limits<double>::infinity();
    int32_t target = -1;
    for (size_t k = 0; k < tokens_.size(); ++k) {
      double dot = 0, square = 0;
      for (int64_t d = 0; d < size_; ++d) {
        const double kept = static_cast<float>(rows_[k * size_ + d]);
        dot += static_cast<double>(static_cast<float>(key[d * cache_.block_size])) * kept;
        square += kept * kept;
      }
      const double similar = dot / std::sqrt(square);
      if (similar > best) {
        best = similar;
        target = static_cast<int32_t>(k);
      }
    }
    return target;
  }

  int64_t merge() {
    const int64_t count = tokens_.size();
    sums_.resize(std::max<size_t>(sums_.size(), count * size_));
    added_.resize(std::max<size_t>(added_.size(), count));
    norms_.assign(count, -1.f);
    int64_t num_merged = 0;
    for (int64_t t = 0; t < length_; ++t) {
      const int32_t k = target_[t];
      if (kept_of_[begin_ + t] || k < 0) continue;
      const T* from = value(begin_ + t);
      const T* into = value(tokens_[k]);
      if (norms_[k] < 0.f) norms_[k] = std::sqrt(dot(into, into));
      const float gate = dot(from, into) / (std::sqrt(dot(from, from)) * norms_[k]);
      if (!(gate > 0.f)) continue;
      float* sums = sums_.data() + k * size_;
      if (!merged_[k]) {
        merged_[k] = true;
        added_[k] = 0.f;
        const Vec weight = simd::set1(mass(tokens_[k]));
        for (int64_t d = 0; d < size_; d += kWidth) {
          simd::store(sums + d, simd::mul(weight, simd::load(into + d)));
        }
      }
      const float weight = gate * mass(begin_ + t);
      added_[k] += weight;
      for (int64_t d = 0; d < size_; d += kWidth) {
        const Vec sum = simd::load(sums + d);
        simd::store(sums + d, simd::fma(simd::set1(weight), simd::load(from + d), sum));
      }
      ++num_merged;
    }
    return num_merged;
  }

  float dot(const T* a, const T* b) const {
    Vec sum = simd::zero();
    for (int64_t d = 0; d < size_; d += kWidth) {
      sum = simd::fma(simd::load(a + d), simd::load(b + d), sum);
    }
    return simd::reduce_add(sum);
  }

  void write(int64_t first_cell, int64_t entry) {
    const int64_t count = tokens_.size();
    for (int64_t k = 0; k < count;) {
      const kvcompress::CellIndex at =
          cache_.locate(first_cell + (entry + k) / cache_.block_size);
      const int64_t block = layer_.slab[at.block];
      const int64_t slot = (entry + k) % cache_.block_size;
      const int64_t piece = std::min(count - k, cache_.block_size - slot);
      T* keys = cache_.keys(block, at.layer, at.head) + slot;
      for (int64_t d = 0; d < size_; ++d) {
        for (int64_t i = 0; i < piece; ++i) {
          keys[d * cache_.block_size + i] = rows_[(k + i) * size_ + d];
        }
      }
      T* values = cache_.values(block, at.layer, at.head) + slot * size_;
      float* bias = bias_.slots(block, at.layer, at.head) + slot;
      for (int64_t i = 0; i < piece; ++i) write_value(k + i, values + i * size_, bias + i);
      k += piece;
    }
  }

  void write_value(int64_t k, T* value_to, float* bias) const {
    if (!merged_[k]) {
      std::copy_n(value(tokens_[k]), size_, value_to);
      *bias = 0.f;
      return;
    }
    const float own = mass(tokens_[k]);
    const Vec factor = simd::set1(1.0f / (own + added_[k]));
    for (int64_t d = 0; d < size_; d += kWidth) {
      simd::store(value_to + d, simd::mul(factor, simd::load(sums_.data() + k * size_ + d)));
    }
    *bias = static_cast<float>(layer_.alpha * std::log1p(static_cast<double>(added_[k]) / own));
  }

  const CacheView<T>& cache_;
  const BiasView& bias_;
  const Layer& layer_;
  int64_t head_, size_;
  const bool* kept_of_;
  const float* mass_;
  int64_t begin_ = 0, length_ = 0, stride_ = 0;
  std::vector<int64_t> tokens_;        // kept tokens of the bucket; `k` counts them
  std::vector<T> rows_;                // [k, D], their keys
  std::vector<Operand<T>> operands_;   // the same as the products take them
  std::vector<float> dots_, squares_;  // [k, t] and [t], t counts the bucket's tokens
  std::vector<float> best_, second_;   // [t]
  std::vector<int32_t> target_;        // [t]
  std::vector<char> merged_;           // [k]
  std::vector<float> sums_;            // [k, D]
  std::vector<float> added_, norms_;   // [k]
};

template <typename T>
std::tuple<at::Tensor, at::Tensor, int64_t> merge_layer(
    const at::Tensor& kv_cache, const at::Tensor& bias, const Layer& layer, int64_t first_cell,
    int64_t num_cells, const at::TensorOptions& options) {
  const CacheView<T> cache(kv_cache);
  const BiasView biases(bias);
  const int64_t step = layer.bucket > 0 ? layer.bucket : kGroupTokens;
  const int64_t group = (kGroupTokens + step - 1) / step * step;
  const int64_t num_groups = (layer.num_tokens + group - 1) / group;
  const int64_t num_tasks = cache.num_kv_heads * num_groups;

  at::Tensor num_entries = at::zeros({cache.num_kv_heads}, options);
  at::Tensor num_merged = at::zeros({cache.num_kv_heads}, options);
  std::vector<int64_t> first_entry(num_tasks), segment(cache.num_kv_heads), merged(num_tasks);
  int64_t cell = first_cell;
  for (int64_t head = 0; head < cache.num_kv_heads; ++head) {
    const bool* kept = layer.kept + head * layer.num_tokens;
    int64_t total = 0;
    for (int64_t g = 0; g < num_groups; ++g) {
      first_entry[head * num_groups + g] = total;
      const int64_t end = std::min(layer.num_tokens, (g + 1) * group);
      total += std::count(kept + g * group, kept + end, true);
    }
    num_entries.mutable_data_ptr<int32_t>()[head] = static_cast<int32_t>(total);
    segment[head] = cell;
    cell += (total + cache.block_size - 1) / cache.block_size;
  }
  if (cell > num_cells) return {num_entries, num_merged, cell};

  at::parallel_for(0, num_tasks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end;) {
      const int64_t head = task / num_groups;
      Merger<T> merger(cache, biases, layer, head);
      for (; task < end && task / num_groups == head; ++task) {
        const int64_t stop = std::min(layer.num_tokens, (task % num_groups + 1) * group);
        int64_t entry = first_entry[task];
        for (int64_t token = task % num_groups * group; token < stop; token += step) {
          const int64_t next = std::min(stop, token + step);
          merged[task] += merger.run(token, next, segment[head], entry);
          const bool* kept = layer.kept + head * layer.num_tokens;
          entry += std::count(kept + token, kept + next, true);
        }
      }
    }
  });
  for (int64_t task = 0; task < num_tasks; ++task) {
    num_merged.mutable_data_ptr<int32_t>()[task / num_groups] +=
        static_cast<int32_t>(merged[task]);
  }
  return {num_entries, num_merged, cell};
}

std::tuple<at::Tensor, at::Tensor, int64_t> select_merge(
    const at::Tensor& kv_cache, const at::Tensor& bias, int64_t layer, const at::Tensor& source,
    const at::Tensor& slab, const at::Tensor& kept, const at::Tensor& mass, int64_t bucket,
    double alpha, int64_t first_cell, int64_t num_cells) {
  const Layer work{
      layer, kept.size(1), bucket, alpha, source.const_data_ptr<int32_t>(),
      slab.const_data_ptr<int32_t>(), kept.const_data_ptr<bool>(),
      mass.const_data_ptr<float>()};
  const at::TensorOptions options = source.options();
  switch (kv_cache.scalar_type()) {
    case at::kBFloat16:
      return merge_layer<c10::BFloat16>(kv_cache, bias, work, first_cell, num_cells, options);
    case at::kHalf:
      return merge_layer<c10::Half>(kv_cache, bias, work, first_cell, num_cells, options);
    default:
      TORCH_CHECK(
          kv_cache.scalar_type() == at::kFloat, "select_merge: unsupported dtype ",
          kv_cache.scalar_type());
      return merge_layer<float>(kv_cache, bias, work, first_cell, num_cells, options);
  }
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(kvcompress, m) {
  m.def(
      "select_merge(Tensor(a!) kv_cache, Tensor(b!) bias, int layer, Tensor source, Tensor slab, "
      "Tensor kept, Tensor mass, int bucket, float alpha, int first_cell, int num_cells) -> "
      "(Tensor, Tensor, int)");
}

TORCH_LIBRARY_IMPL(kvcompress, CPU, m) { m.impl("select_merge", &select_merge); }
