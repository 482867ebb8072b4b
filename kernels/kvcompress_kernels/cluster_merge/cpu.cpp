// SemantiCache on CPU: greedy clustering of the keys of each chunk, merging, and writing the
// entries into the slab. `api.py` states the contract, `reference.py` the result.
//
// Work is divided into (head, group of whole chunks). Keys of a group are unpacked into a float32
// buffer [D, tokens], transposed like the cells are, so that one seed is compared with a vector of
// later tokens at a time. Cosines are screened in float32; a pair that float32 cannot decide is
// decided in float64, whose products are exact and whose sums run in the order of the reference.
// The outcome therefore depends on neither vector width nor threads.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "csrc/cells.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <memory>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace {

using kvcompress::BiasView;
using kvcompress::CacheView;
using Vec = at::vec::Vectorized<float>;
constexpr int64_t kLanes = Vec::size();
constexpr int64_t kGroupTokens = 128;  // a float32 buffer [D, 128] stays inside the L2 cache
constexpr int32_t kEnd = -1;
constexpr double kMergeAll = -1.0;

template <typename T>
inline Vec load_float(const T* source) {
  if constexpr (std::is_same_v<T, float>) {
    return Vec::loadu(source);
  } else {
    Vec out;
    at::vec::load_to_float<T>(source, out);
    return out;
  }
}

struct Span {
  int64_t begin, end;
};

int64_t chunk_end(const int32_t* chunk_ids, int64_t begin, int64_t num_tokens) {
  int64_t end = begin + 1;
  while (end < num_tokens && chunk_ids[end] == chunk_ids[begin]) ++end;
  return end;
}

// Spans of about kGroupTokens tokens that cut no chunk.
std::vector<Span> group_tokens(const int32_t* chunk_ids, int64_t num_tokens) {
  std::vector<Span> groups;
  int64_t begin = 0;
  for (int64_t token = 0; token < num_tokens;) {
    token = chunk_ids[token] < 0 ? token + 1 : chunk_end(chunk_ids, token, num_tokens);
    if (token - begin >= kGroupTokens || token == num_tokens) {
      groups.push_back({begin, token});
      begin = token;
    }
  }
  return groups;
}

// Keys of some consecutive tokens of one head as float32, [D, tokens], and their norms.
template <typename T>
class Keys {
 public:
  void load(
      const CacheView<T>& cache, int64_t layer, const int32_t* source, int64_t head, Span span) {
    const int64_t tokens = span.end - span.begin;
    head_size_ = cache.head_size;
    // one vector of padding, because loads and stores below overrun by up to a vector; an odd
    // number of cache lines, because rows a power of two apart would share their cache sets
    stride_ = (tokens + kLanes + 15) / 16 * 16;
    if (stride_ / 16 % 2 == 0) stride_ += 16;
    buffer_.resize(std::max<size_t>(buffer_.size(), stride_ * head_size_));
    norms_.resize(std::max<size_t>(norms_.size(), stride_));
    for (int64_t token = span.begin; token < span.end;) {
      const int64_t slot = token % cache.block_size;
      const int64_t count = std::min(span.end - token, cache.block_size - slot);
      const T* from = cache.keys(source[token / cache.block_size], layer, head) + slot;
      float* to = buffer_.data() + (token - span.begin);
      for (int64_t d = 0; d < head_size_; ++d) {
        // an overrun reads what follows in the same cell, and is overwritten by the next piece
        for (int64_t i = 0; i < count; i += kLanes) {
          load_float(from + d * cache.block_size + i).store(to + d * stride_ + i);
        }
      }
      token += count;
    }
    for (int64_t i = 0; i < tokens; i += kLanes) {
      Vec sum(0.f);
      for (int64_t d = 0; d < head_size_; ++d) {
        const Vec key = Vec::loadu(at(d, i));
        sum = at::vec::fmadd(key, key, sum);
      }
      // outside this range float32 may over- or underflow; NaN sends the pair to float64
      const Vec trusted = (sum > Vec(1e-20f)) & (sum < Vec(1e20f));
      Vec::blendv(Vec(std::numeric_limits<float>::quiet_NaN()), sum.sqrt(), trusted)
          .store(norms_.data() + i);
    }
  }

  const float* at(int64_t d, int64_t token) const { return buffer_.data() + d * stride_ + token; }
  const float* norms() const { return norms_.data(); }
  int64_t head_size() const { return head_size_; }

  // Products of token `seed` with the `V` vectors of tokens from `token` on.
  template <int V>
  void dots(int64_t seed, int64_t token, Vec* out) const {
    Vec even[V], odd[V];
    for (int v = 0; v < V; ++v) even[v] = odd[v] = Vec(0.f);
    const float* seeds = at(0, seed);
    const float* others = at(0, token);
    for (int64_t d = 0; d < head_size_; d += 2) {
      const Vec first(seeds[d * stride_]);
      const Vec second(seeds[(d + 1) * stride_]);
      for (int v = 0; v < V; ++v) {
        even[v] = at::vec::fmadd(first, Vec::loadu(others + d * stride_ + v * kLanes), even[v]);
        odd[v] =
            at::vec::fmadd(second, Vec::loadu(others + (d + 1) * stride_ + v * kLanes), odd[v]);
      }
    }
    for (int v = 0; v < V; ++v) out[v] = even[v] + odd[v];
  }

  // The definition: cos > threshold in float64; false for zero and for non-finite keys.
  bool similar(int64_t first, int64_t second, double threshold) const {
    double dot = 0, first_square = 0, second_square = 0;
    for (int64_t d = 0; d < head_size_; ++d) {
      const double a = *at(d, first);
      const double b = *at(d, second);
      dot += a * b;
      first_square += a * a;
      second_square += b * b;
    }
    return dot > threshold * std::sqrt(first_square * second_square);
  }

 private:
  std::vector<float> buffer_, norms_;
  int64_t stride_ = 0, head_size_ = 0;
};

// Greedy seed clustering inside one chunk. Clusters become linked lists in token order.
template <typename T>
class Clusterer {
 public:
  explicit Clusterer(double threshold) : threshold_(threshold) {}

  // Args: the chunk's first column in `keys`, its length, and for each token of the chunk the
  // next member of its cluster (relative to the chunk) and whether it starts one.
  // Returns the number of clusters.
  int64_t run(const Keys<T>& keys, int64_t first, int64_t length, int32_t* next, bool* seed) {
    std::fill_n(next, length, kEnd);
    std::fill_n(seed, length, false);
    const int64_t vectors = (length + kLanes - 1) / kLanes;
    alive_.assign(vectors, (1u << kLanes) - 1);
    alive_.back() = (1u << (length - (vectors - 1) * kLanes)) - 1;
    int64_t clusters = 0;
    for (int64_t i = 0; i < length; ++i) {
      // tokens before i are all taken, so that `alive_` holds later tokens only
      if (!(alive_[i / kLanes] >> (i % kLanes) & 1u)) continue;
      alive_[i / kLanes] &= ~(1u << (i % kLanes));
      seed[i] = true;
      ++clusters;
      int64_t tail = i;
      for (int64_t v = i / kLanes; v < vectors;) {
        if (alive_[v] == 0) {
          ++v;
        } else if (threshold_ <= kMergeAll) {
          join(next, v, alive_[v], tail);
          ++v;
        } else if (vectors - v >= 4) {
          compare<4>(keys, first, i, v, next, tail);
          v += 4;
        } else if (vectors - v >= 2) {
          compare<2>(keys, first, i, v, next, tail);
          v += 2;
        } else {
          compare<1>(keys, first, i, v, next, tail);
          ++v;
        }
      }
    }
    return clusters;
  }

 private:
  void join(int32_t* next, int64_t v, uint32_t lanes, int64_t& tail) {
    alive_[v] &= ~lanes;
    for (; lanes != 0; lanes &= lanes - 1) {
      const int64_t token = v * kLanes + std::countr_zero(lanes);
      next[tail] = static_cast<int32_t>(token);
      tail = token;
    }
  }

  template <int V>
  void compare(
      const Keys<T>& keys,
      int64_t first,
      int64_t seed,
      int64_t begin,
      int32_t* next,
      int64_t& tail) {
    Vec dots[V];
    keys.template dots<V>(first + seed, first + begin * kLanes, dots);
    // float32 rounding of the product, of both norms and of the lines below, in units of
    // |a| * |b|: at most (2 * D + 16) * 2^-24
    const float guard = static_cast<float>(2 * keys.head_size() + 64) * 0x1p-24f;
    const float threshold = static_cast<float>(threshold_);
    const float norm = keys.norms()[first + seed];
    for (int v = 0; v < V; ++v) {
      const int64_t token = (begin + v) * kLanes;
      const Vec norms = Vec::loadu(keys.norms() + first + token) * Vec(norm);
      // lanes where a comparison with NaN fails are candidates too
      uint32_t open = (dots[v] < norms * Vec(threshold - guard)).zero_mask() & alive_[begin + v];
      if (open == 0) continue;
      const uint32_t unsure = (dots[v] > norms * Vec(threshold + guard)).zero_mask() & open;
      for (uint32_t rest = unsure; rest != 0; rest &= rest - 1) {
        const int lane = std::countr_zero(rest);
        if (!keys.similar(first + seed, first + token + lane, threshold_)) open &= ~(1u << lane);
      }
      join(next, begin + v, open, tail);
    }
  }

  double threshold_;
  std::vector<uint32_t> alive_;
};

// Writes the entries of one head, one after another, into the cells of a slab.
template <typename T>
class Writer {
 public:
  Writer(
      const CacheView<T>& cache,
      const at::Tensor& bias,
      const int32_t* source,
      const int32_t* slab,
      int64_t layer,
      int64_t head)
      : cache_(cache),
        bias_(bias),
        source_(source),
        slab_(slab),
        layer_(layer),
        head_(head),
        sums_(cache.head_size) {}

  // Go to entry `entry` of the segment that starts at `first_cell`.
  void seek(int64_t first_cell, int64_t entry) {
    cell_ = first_cell + entry / cache_.block_size;
    slot_ = entry % cache_.block_size;
    open();
  }

  void copy(int64_t token) {
    const T* from = source_cell(token);
    const int64_t slot = token % cache_.block_size;
    T* to = next_slot();
    for (int64_t d = 0; d < cache_.head_size; ++d) {
      to[d * cache_.block_size] = from[d * cache_.block_size + slot];
    }
    std::copy_n(from + values_at(slot), cache_.head_size, target_ + values_at(written_));
    target_bias_[written_] = 0.f;
  }

  // `next` leads from each member to the next, counted from token `base`.
  void merge(int64_t token, int64_t base, const int32_t* next) {
    members_.clear();
    for (int64_t member = token - base; member != kEnd; member = next[member]) {
      members_.push_back(source_cell(base + member));
      slots_of_.push_back((base + member) % cache_.block_size);
    }
    const int64_t size = members_.size();
    const float divisor = static_cast<float>(size);
    T* to = next_slot();
    for (int64_t d = 0; d < cache_.head_size; ++d) {
      float sum = members_[0][d * cache_.block_size + slots_of_[0]];
      for (int64_t m = 1; m < size; ++m) {
        sum += static_cast<float>(members_[m][d * cache_.block_size + slots_of_[m]]);
      }
      to[d * cache_.block_size] = static_cast<T>(sum / divisor);
    }
    for (int64_t m = 0; m < size; ++m) {
      const T* values = members_[m] + values_at(slots_of_[m]);
      for (int64_t d = 0; d < cache_.head_size; d += kLanes) {
        const Vec value = load_float(values + d);
        (m == 0 ? value : Vec::loadu(sums_.data() + d) + value).store(sums_.data() + d);
      }
    }
    T* values = target_ + values_at(written_);
    for (int64_t d = 0; d < cache_.head_size; ++d) values[d] = static_cast<T>(sums_[d] / divisor);
    target_bias_[written_] = static_cast<float>(std::log(static_cast<double>(size)));
    slots_of_.clear();
  }

 private:
  int64_t values_at(int64_t slot) const { return (cache_.block_size + slot) * cache_.head_size; }

  const T* source_cell(int64_t token) const {
    return cache_.keys(source_[token / cache_.block_size], layer_, head_);
  }

  void open() {
    const kvcompress::CellIndex at = cache_.locate(cell_);
    const int64_t block = slab_[at.block];
    target_ = cache_.keys(block, at.layer, at.head);
    target_bias_ = bias_.slots(block, at.layer, at.head);
  }

  // Keys column of the next entry; its slot is left in `written_`.
  T* next_slot() {
    if (slot_ == cache_.block_size) {
      slot_ = 0;
      ++cell_;
      open();
    }
    written_ = slot_++;
    return target_ + written_;
  }

  const CacheView<T>& cache_;
  BiasView bias_;
  const int32_t *source_, *slab_;
  int64_t layer_, head_;
  int64_t cell_ = 0, slot_ = 0, written_ = 0;
  T* target_ = nullptr;
  float* target_bias_ = nullptr;
  std::vector<float> sums_;
  std::vector<const T*> members_;
  std::vector<int64_t> slots_of_;
};

template <typename T>
std::tuple<at::Tensor, int64_t> merge_layer(
    const at::Tensor& kv_cache,
    const at::Tensor& bias,
    int64_t layer,
    const at::Tensor& source,
    const at::Tensor& slab,
    const at::Tensor& chunk_ids,
    double threshold,
    int64_t first_cell,
    int64_t num_cells) {
  const CacheView<T> cache(kv_cache);
  const int64_t num_tokens = chunk_ids.numel();
  const int32_t* blocks = source.data_ptr<int32_t>();
  const int32_t* ids = chunk_ids.data_ptr<int32_t>();
  const std::vector<Span> groups = group_tokens(ids, num_tokens);
  const int64_t num_groups = groups.size();
  const int64_t num_tasks = cache.num_kv_heads * num_groups;

  // next[h * num_tokens + t]: next member of the cluster, counted from the start of its chunk
  std::vector<int32_t> next(cache.num_kv_heads * num_tokens);
  const auto seed = std::make_unique<bool[]>(cache.num_kv_heads * num_tokens);
  std::vector<int64_t> first_entry(num_tasks);
  at::parallel_for(0, num_tasks, 1, [&](int64_t begin, int64_t end) {
    Keys<T> keys;
    Clusterer<T> clusterer(threshold);
    for (int64_t task = begin; task < end; ++task) {
      const int64_t head = task / num_groups;
      const Span group = groups[task % num_groups];
      keys.load(cache, layer, blocks, head, group);
      int64_t entries = 0;
      for (int64_t token = group.begin; token < group.end;) {
        const int64_t at = head * num_tokens + token;
        if (ids[token] < 0) {
          next[at] = kEnd;
          seed[at] = true;
          ++entries;
          ++token;
          continue;
        }
        const int64_t stop = chunk_end(ids, token, num_tokens);
        entries +=
            clusterer.run(keys, token - group.begin, stop - token, &next[at], seed.get() + at);
        token = stop;
      }
      first_entry[task] = entries;
    }
  });

  at::Tensor num_entries = at::zeros({cache.num_kv_heads}, source.options());
  std::vector<int64_t> segment(cache.num_kv_heads);
  int64_t cell = first_cell;
  for (int64_t head = 0; head < cache.num_kv_heads; ++head) {
    int64_t total = 0;
    for (int64_t task = head * num_groups; task < (head + 1) * num_groups; ++task) {
      total += std::exchange(first_entry[task], total);
    }
    num_entries.data_ptr<int32_t>()[head] = static_cast<int32_t>(total);
    segment[head] = cell;
    cell += (total + cache.block_size - 1) / cache.block_size;
  }
  if (cell > num_cells) return {num_entries, cell};

  at::parallel_for(0, num_tasks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t head = task / num_groups;
      const Span group = groups[task % num_groups];
      Writer<T> writer(cache, bias, blocks, slab.data_ptr<int32_t>(), layer, head);
      writer.seek(segment[head], first_entry[task]);
      int64_t base = group.begin;
      for (int64_t token = group.begin; token < group.end; ++token) {
        if (ids[token] != ids[base]) base = token;
        const int64_t at = head * num_tokens + token;
        if (!seed[at]) continue;
        if (next[at] == kEnd) {
          writer.copy(token);
        } else {
          writer.merge(token, base, &next[head * num_tokens + base]);
        }
      }
    }
  });
  return {num_entries, cell};
}

template <typename T>
at::Tensor count_layers(
    const at::Tensor& kv_cache,
    const at::Tensor& source,
    const at::Tensor& chunk_ids,
    double threshold,
    int64_t stride) {
  const CacheView<T> cache(kv_cache);
  const int64_t num_tokens = chunk_ids.numel();
  const int32_t* ids = chunk_ids.data_ptr<int32_t>();
  std::vector<Span> chunks;
  for (int64_t token = 0; token < num_tokens;) {
    const int64_t stop = chunk_end(ids, token, num_tokens);
    if (ids[token] >= 0 && ids[token] % stride == 0) chunks.push_back({token, stop});
    token = stop;
  }
  const int64_t num_segments = cache.num_layers * cache.num_kv_heads;
  at::Tensor counts = at::zeros({cache.num_layers, cache.num_kv_heads}, source.options());
  at::parallel_for(0, num_segments, 1, [&](int64_t begin, int64_t end) {
    Keys<T> keys;
    Clusterer<T> clusterer(threshold);
    std::vector<int32_t> next;
    std::unique_ptr<bool[]> seed;
    for (int64_t segment = begin; segment < end; ++segment) {
      const int64_t layer = segment / cache.num_kv_heads;
      const int64_t head = segment % cache.num_kv_heads;
      int64_t clusters = 0;
      for (const Span chunk : chunks) {
        const size_t length = chunk.end - chunk.begin;
        if (next.size() < length) {
          next.resize(length);
          seed = std::make_unique<bool[]>(length);
        }
        keys.load(cache, layer, source.data_ptr<int32_t>(), head, chunk);
        clusters += clusterer.run(keys, 0, length, next.data(), seed.get());
      }
      counts.data_ptr<int32_t>()[segment] = static_cast<int32_t>(clusters);
    }
  });
  return counts;
}

template <typename F>
auto dispatch(at::ScalarType dtype, F&& run) {
  switch (dtype) {
    case at::kBFloat16:
      return run(at::BFloat16());
    case at::kHalf:
      return run(at::Half());
    default:
      TORCH_CHECK(dtype == at::kFloat, "cluster_merge: unsupported dtype ", dtype);
      return run(float());
  }
}

std::tuple<at::Tensor, int64_t> cluster_merge(
    const at::Tensor& kv_cache,
    const at::Tensor& bias,
    int64_t layer,
    const at::Tensor& source,
    const at::Tensor& slab,
    const at::Tensor& chunk_ids,
    double threshold,
    int64_t first_cell,
    int64_t num_cells) {
  return dispatch(kv_cache.scalar_type(), [&](auto zero) {
    return merge_layer<decltype(zero)>(
        kv_cache, bias, layer, source, slab, chunk_ids, threshold, first_cell, num_cells);
  });
}

at::Tensor cluster_count(
    const at::Tensor& kv_cache,
    const at::Tensor& source,
    const at::Tensor& chunk_ids,
    double threshold,
    int64_t stride) {
  return dispatch(kv_cache.scalar_type(), [&](auto zero) {
    return count_layers<decltype(zero)>(kv_cache, source, chunk_ids, threshold, stride);
  });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(kvcompress, m) {
  m.def(
      "cluster_merge(Tensor(a!) kv_cache, Tensor(b!) bias, int layer, Tensor source, Tensor slab, "
      "Tensor chunk_ids, float threshold, int first_cell, int num_cells) -> (Tensor, int)");
  m.def(
      "cluster_count(Tensor kv_cache, Tensor source, Tensor chunk_ids, float threshold, "
      "int stride) -> Tensor");
}

TORCH_LIBRARY_IMPL(kvcompress, CPU, m) {
  m.impl("cluster_merge", &cluster_merge);
  m.impl("cluster_count", &cluster_count);
}
