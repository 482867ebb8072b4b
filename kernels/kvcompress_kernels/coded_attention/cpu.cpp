// Attention over coded rows; see api.py for the meaning of the arguments.
//
// Three steps, with no work of one before the last is done:
// 1. Queries are folded: multiplied by the decoding matrix of the keys, they meet codes.
// 2. The rows of one (row of the batch, group) form one list of tiles. The list is cut into items,
//    which threads take in order from a shared counter. How it is cut depends on that row alone,
//    and partial results are merged in the order of the cut, so a row's result depends neither on
//    the rest of the batch nor on the number of threads.
// 3. Sums of value codes are unfolded: multiplied by the decoding matrix of the values.
// The matrices are read once for the whole batch, whatever its size.
//
// The query heads of a group and the queries of one row are treated alike, as "lanes": lane v of a
// (row, group) is query v / group_lanes, head v % group_lanes of the heads that share the group.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <immintrin.h>
#include <sched.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <limits>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "coded_attention/decode.h"
#include "coded_attention/tile.h"
#include "csrc/cells.h"
#include "csrc/checks.h"
#include "csrc/codes.h"
#include "csrc/simd.h"

namespace kvcompress {
namespace {

constexpr int kMaxSplits = 64;
constexpr int kMaxHeadSize = 256;
// Tiles, each about a microsecond, for which a thread is worth waiting for twice.
constexpr int64_t kThreadWork = 4;
// Columns of a decoding matrix, and lanes that share a load of them, in steps 1 and 3.
constexpr int64_t kTaskColumns = 64;
constexpr int kTaskLanes = kWidth == 16 ? 6 : 4;

// Into how many items the tiles of one group are cut: enough for all threads to get equal work,
// also with one short row, but few enough that merging them costs little.
inline int64_t num_splits(int64_t num_tiles) {
  return num_tiles <= 16 ? num_tiles : std::clamp<int64_t>(num_tiles / 4, 16, kMaxSplits);
}

struct Row {
  const int32_t* blocks;
  int64_t first_token, query_len;
  int64_t first_active;       // of its queries, counted over the rows with state
  const int32_t* first_cell;  // of this layer, [groups]
  const int32_t* num_rows;    // of this layer, [groups]
};

// A group of KV heads and its codec.
struct Group {
  const Plan* plan;
  int64_t first_head;     // KV head
  int64_t fold, unfold;   // of its first head, in the matrices
  int64_t query, latent;  // of its first lane, in the buffers
};

// Lanes of one (row, group) that are computed together, over all their rows of codes.
struct Job {
  const Row* row;
  int64_t group;
  int64_t first_lane;
  int num_lanes;
  int64_t num_rows, num_tiles;
  int num_items;
  float* partial;  // of the first item
};

// A counter on a cache line of its own: threads write it while others read its neighbours.
struct alignas(64) Counter {
  std::atomic<int64_t> value{0};

  int64_t take() { return value.fetch_add(1, std::memory_order_relaxed); }
  void finish() { value.fetch_add(1, std::memory_order_release); }
  // Until it has counted `total`; whoever counts is running.
  void wait(int64_t total) const {
    for (int spins = 0; value.load(std::memory_order_acquire) < total; ++spins) {
      if (spins < 2000) {
        _mm_pause();
      } else {
        sched_yield();
      }
    }
  }
};

struct Item {
  const Job* job;
  int64_t begin, end;  // tiles
  float* partial;
};

struct alignas(64) CacheLine {
  float floats[16];
};

inline int64_t whole_lines(int64_t floats) { return round_up(floats, 16); }

// Partial result of an item, a whole number of cache lines: sums [lanes, value_width], maxima
// [lanes], denominators [lanes].
inline int64_t partial_size(int64_t num_lanes, int64_t value_width) {
  return whole_lines(num_lanes * (value_width + 2));
}

// The decoding matrices of a layer, group by group and head by head, in the order and with the
// padding of `Plan`.
template <typename M>
struct Matrices {
  const M* fold;            // [D, key_width] of each head
  const M* unfold;          // [value_width, D] of each head
  const float* key_mean;    // [H, D]
  const float* value_mean;  // [H, D]
};

template <typename T>
class CodedAttention {
 public:
  // Matrices are held in bfloat16 where the pool is, else in float32.
  using M = std::conditional_t<std::is_same_v<T, c10::BFloat16>, T, float>;
  using O = Operand<T>;

  CodedAttention(
      const at::Tensor& query, const at::Tensor& output, const at::Tensor& log_sum,
      const at::Tensor& kv_cache, const Levels& levels, const Matrices<M>& matrices, float scale)
      : query_(query.const_data_ptr<T>()),
        output_(output.mutable_data_ptr<float>()),
        log_sum_(log_sum.mutable_data_ptr<float>()),
        query_token_(query.stride(0)),
        query_head_(query.stride(1)),
        output_token_(output.stride(0)),
        output_head_(output.stride(1)),
        log_sum_token_(log_sum.stride(0)),
        cache_(kv_cache),
        pool_end_(
            static_cast<const uint8_t*>(kv_cache.storage().data()) + kv_cache.storage().nbytes()),
        levels_(levels),
        matrices_(matrices),
        ratio_(query.size(1) / kv_cache.size(2)),
        scale_(scale) {}

  void run(const std::vector<Row>& rows, const std::vector<const Plan*>& plans) {
    if (rows.empty()) return;
    plan(rows, plans);
    threads_ = std::clamp<int64_t>(work_ / kThreadWork, 1, at::get_num_threads());
    if (threads_ == 1) {
      steps();
    } else {
      at::parallel_for(0, threads_, 1, [this](int64_t, int64_t) { steps(); });
    }
  }

 private:
  void plan(const std::vector<Row>& rows, const std::vector<const Plan*>& plans) {
    num_active_ = rows.back().first_active + rows.back().query_len;
    group_size_ = cache_.num_kv_heads / static_cast<int64_t>(plans.size());
    group_lanes_ = group_size_ * ratio_;
    int64_t fold = 0, unfold = 0, query = 0, latent = 0, partial = 0;
    num_folds_ = num_unfolds_ = 0;
    for (const Plan* plan : plans) {
      groups_.push_back({plan, static_cast<int64_t>(groups_.size()) * group_size_, fold, unfold,
                         query, latent});
      fold += group_size_ * cache_.head_size * plan->key_width;
      unfold += group_size_ * cache_.head_size * plan->value_width;
      query += round_up(num_active_ * group_lanes_ * plan->key_width, 64);
      latent += whole_lines(num_active_ * group_lanes_ * plan->value_width);
      max_columns_ = std::max(max_columns_, plan->key_width);
    }
    fold_blocks_ = std::max<int64_t>(1, (max_columns_ + kTaskColumns - 1) / kTaskColumns);
    num_folds_ = cache_.num_kv_heads * fold_blocks_;
    unfold_blocks_ = (cache_.head_size + kTaskColumns - 1) / kTaskColumns;
    num_unfolds_ = cache_.num_kv_heads * unfold_blocks_;

    for (const Row& row : rows) {
      const int64_t num_lanes = row.query_len * group_lanes_;
      const int64_t num_parts = (num_lanes + kItemLanes - 1) / kItemLanes;
      // long queries keep every thread busy without cutting the rows
      const int64_t max_splits = std::max<int64_t>(1, kMaxSplits / num_parts);
      for (size_t g = 0; g < groups_.size(); ++g) {
        const Plan& plan = *groups_[g].plan;
        for (int64_t part = 0; part < num_parts; ++part) {
          Job job{};
          job.row = &row;
          job.group = static_cast<int64_t>(g);
          // parts of equal size
          job.first_lane = num_lanes * part / num_parts;
          job.num_lanes = static_cast<int>(num_lanes * (part + 1) / num_parts - job.first_lane);
          job.num_rows = row.num_rows[g];
          const int64_t full = job.num_rows / plan.rows, rest = job.num_rows % plan.rows;
          job.num_tiles = full * plan.cell_tiles + (rest + plan.tile - 1) / plan.tile;
          job.num_items =
              static_cast<int>(std::clamp<int64_t>(num_splits(job.num_tiles), 1, max_splits));
          partial += job.num_items * partial_size(job.num_lanes, plan.value_width);
          work_ += job.num_tiles + group_size_;
          jobs_.push_back(job);
        }
      }
    }

    // kept between calls: fresh pages cost more than the arithmetic of a short batch
    const int64_t constants = whole_lines(num_active_ * cache_.num_kv_heads * ratio_);
    const int64_t operands = whole_lines(
        (query * static_cast<int64_t>(sizeof(O)) + 3) / 4);
    const int64_t size = operands + 2 * constants + latent + partial;
    thread_local std::unique_ptr<CacheLine[]> buffer;
    thread_local int64_t capacity = 0;
    if (size > capacity) {
      buffer = std::make_unique_for_overwrite<CacheLine[]>((size + 15) / 16);
      capacity = size;
    }
    float* next = buffer[0].floats;
    folded_ = reinterpret_cast<O*>(next);
    constants_ = next + operands;
    totals_ = constants_ + constants;
    latents_ = totals_ + constants;
    float* partials = latents_ + latent;
    pending_ = std::make_unique<Counter[]>(jobs_.size());
    for (size_t j = 0; j < jobs_.size(); ++j) {
      Job& job = jobs_[j];
      job.partial = partials;
      pending_[j].value.store(job.num_items, std::memory_order_relaxed);
      for (int64_t i = 0; i < job.num_items; ++i) {
        items_.push_back(
            {&job, job.num_tiles * i / job.num_items, job.num_tiles * (i + 1) / job.num_items,
             partials});
        partials += partial_size(job.num_lanes, groups_[job.group].plan->value_width);
      }
    }
    active_rows_.resize(num_active_);
    for (const Row& row : rows) {
      std::fill_n(active_rows_.begin() + row.first_active, row.query_len, &row);
    }
  }

  // Lane of a KV head (query `active`, head `of` the head's query heads) within its group.
  int64_t lane_of(const Group& group, int64_t head, int64_t active, int64_t of) const {
    return active * group_lanes_ + (head - group.first_head) * ratio_ + of;
  }
  int64_t token_of(int64_t active) const {
    const Row& row = *active_rows_[active];
    return row.first_token + active - row.first_active;
  }
  // Index into constants_ and totals_.
  int64_t number_of(int64_t head, int64_t active, int64_t of) const {
    const int64_t group = head / group_size_;
    return group * group_lanes_ * num_active_ + lane_of(groups_[group], head, active, of);
  }

  void steps() {
    for (int64_t i; (i = next_fold_.take()) < num_folds_;) {
      fold(i / fold_blocks_, i % fold_blocks_ * kTaskColumns);
      folds_done_.finish();
    }
    folds_done_.wait(num_folds_);
    attend_items();
    jobs_done_.wait(static_cast<int64_t>(jobs_.size()));
    for (int64_t i; (i = next_unfold_.take()) < num_unfolds_;) {
      unfold(i / unfold_blocks_, i % unfold_blocks_ * kTaskColumns);
    }
  }

  // Step 1: columns [column, column + kTaskColumns) of the queries of one KV head, and the part of
  // their logits that is the same for all rows.
  void fold(int64_t head, int64_t column) {
    const Group& group = groups_[head / group_size_];
    const int64_t width = group.plan->key_width, head_size = cache_.head_size;
    const M* matrix =
        matrices_.fold + group.fold + (head - group.first_head) * head_size * width + column;
    const int64_t columns = std::min(kTaskColumns, width - column);
    const Vec scale = simd::set1(scale_);
    alignas(64) float queries[kTaskLanes * kMaxHeadSize];
    const float* in[kTaskLanes];
    O* out[kTaskLanes];
    const int64_t num_lanes = num_active_ * ratio_;
    for (int64_t lane = 0; lane < num_lanes; lane += kTaskLanes) {
      for (int g = 0; g < kTaskLanes; ++g) {
        // past the end the last lane is computed again
        const int64_t at = std::min(lane + g, num_lanes - 1), active = at / ratio_;
        const T* source = query_ + token_of(active) * query_token_ +
            (head * ratio_ + at % ratio_) * query_head_;
        float* target = queries + g * kMaxHeadSize;
        for (int64_t d = 0; d < head_size; d += kWidth) {
          simd::store(target + d, simd::load(source + d));
        }
        in[g] = target;
        out[g] = folded_ + group.query + lane_of(group, head, active, at % ratio_) * width + column;
        if (column == 0) {
          Vec sum = simd::zero();
          for (int64_t d = 0; d < head_size; d += kWidth) {
            const Vec mean = simd::load(matrices_.key_mean + head * head_size + d);
            sum = simd::fma(simd::load(target + d), mean, sum);
          }
          constants_[number_of(head, active, at % ratio_)] = simd::reduce_add(sum) * scale_;
        }
      }
      const auto block = [&]<int NV>(std::integral_constant<int, NV>, int64_t c)
          __attribute__((always_inline)) {
        Vec sum[kTaskLanes][NV];
        multiply<M, kTaskLanes, NV>(in, head_size, matrix + c, width, sum);
        for (int g = 0; g < kTaskLanes; ++g) {
          for (int j = 0; j < NV; ++j) {
            simd::store(out[g] + c + j * kWidth, simd::mul(sum[g][j], scale));
          }
        }
      };
      int64_t c = 0;
      for (; c + 2 * kWidth <= columns; c += 2 * kWidth) {
        block(std::integral_constant<int, 2>{}, c);
      }
      for (; c < columns; c += kWidth) block(std::integral_constant<int, 1>{}, c);
    }
  }

  // Step 3: columns of the outputs of one KV head.
  void unfold(int64_t head, int64_t column) const {
    const Group& group = groups_[head / group_size_];
    const int64_t width = group.plan->value_width, head_size = cache_.head_size;
    const M* matrix =
        matrices_.unfold + group.unfold + (head - group.first_head) * head_size * width + column;
    const float* mean = matrices_.value_mean + head * head_size + column;
    const int64_t columns = std::min(kTaskColumns, head_size - column);
    const float* in[kTaskLanes];
    float* out[kTaskLanes];
    bool empty[kTaskLanes];
    const int64_t num_lanes = num_active_ * ratio_;
    for (int64_t lane = 0; lane < num_lanes; lane += kTaskLanes) {
      for (int g = 0; g < kTaskLanes; ++g) {
        const int64_t at = std::min(lane + g, num_lanes - 1), active = at / ratio_;
        in[g] = latents_ + group.latent + lane_of(group, head, active, at % ratio_) * width;
        out[g] = output_ + token_of(active) * output_token_ +
            (head * ratio_ + at % ratio_) * output_head_ + column;
        empty[g] = totals_[number_of(head, active, at % ratio_)] == 0.0f;
      }
      const auto block = [&]<int NV>(std::integral_constant<int, NV>, int64_t c)
          __attribute__((always_inline)) {
        Vec sum[kTaskLanes][NV];
        multiply<M, kTaskLanes, NV>(in, width, matrix + c, head_size, sum);
        for (int g = 0; g < kTaskLanes; ++g) {
          for (int j = 0; j < NV; ++j) {
            const Vec result = simd::add(sum[g][j], simd::load(mean + c + j * kWidth));
            simd::store(out[g] + c + j * kWidth, empty[g] ? simd::zero() : result);
          }
        }
      };
      int64_t c = 0;
      for (; c + 2 * kWidth <= columns; c += 2 * kWidth) {
        block(std::integral_constant<int, 2>{}, c);
      }
      for (; c < columns; c += kWidth) block(std::integral_constant<int, 1>{}, c);
    }
  }

  Tile tile(const Job& job, int64_t index) const {
    const Plan& plan = *groups_[job.group].plan;
    const int64_t cell = index / plan.cell_tiles, first = index % plan.cell_tiles * plan.tile;
    const CellIndex at = cache_.locate(job.row->first_cell[job.group] + cell);
    const auto* bytes =
        reinterpret_cast<const uint8_t*>(cache_.keys(job.row->blocks[at.block], at.layer, at.head));
    const int64_t left = std::min(job.num_rows - cell * plan.rows, plan.rows) - first;
    return {bytes, first, std::min(left, plan.tile), nullptr};
  }

  const Item* take() {
    const int64_t index = next_item_.take();
    const int64_t count = static_cast<int64_t>(items_.size());
    if (index >= count) return nullptr;
    // dealt out from as many regions as there are threads: at equal pace every thread stays in
    // a region of its own, which memory serves faster than neighbouring reads
    const int64_t region = index % threads_, extra = count % threads_;
    const int64_t start = region * (count / threads_) + std::min(region, extra);
    return &items_[start + index / threads_];
  }

  // Buffers of the tile that this thread is on.
  struct Workspace {
    RowScales scales;
    Weights<O> weights;
    std::vector<O> query;  // see `Lanes`
    std::vector<uint8_t> cell;  // copy of a cell that must not be read past
#if !defined(KVCOMPRESS_BYTE_SHUFFLE)
    std::unique_ptr<CacheLine[]> words;
    int64_t num_words = 0;
#endif
  };
  static Workspace& workspace() {
    thread_local Workspace space;
    return space;
  }

  // Step 2.
  void attend_items() {
    Workspace& space = workspace();
#if !defined(KVCOMPRESS_BYTE_SHUFFLE)
    int64_t num_words = 0;
    for (const Group& group : groups_) {
      num_words = std::max(num_words, group.plan->scratch_words());
    }
    if (num_words > space.num_words) {
      space.words = std::make_unique_for_overwrite<CacheLine[]>((num_words + 15) / 16);
      space.num_words = num_words;
    }
#endif
    const Item* item = take();
    while (item) {
      // taken one ahead, so that its first tile is on its way when the item starts
      const Item* following = take();
      attend_item(*item, following, space);
      if (pending_[item->job - jobs_.data()].value.fetch_sub(1, std::memory_order_acq_rel) == 1) {
        finish(*item->job);
        jobs_done_.finish();
      }
      item = following;
    }
  }

  void attend_item(const Item& item, const Item* following, Workspace& space) const {
    const Job& job = *item.job;
    const Group& group = groups_[job.group];
    const Plan& plan = *group.plan;
    const int64_t first = job.row->first_active * group_lanes_ + job.first_lane;
    float* maxima = item.partial + job.num_lanes * plan.value_width;
    interleave(folded_ + group.query + first * plan.key_width, job.num_lanes, plan, space.query);
    const Lanes<O> lanes{
        &plan,
        &levels_,
        space.query.data(),
        constants_ + job.group * group_lanes_ * num_active_ + first,
        item.partial,
        maxima,
        maxima + job.num_lanes};
    std::fill(item.partial, maxima, 0.0f);
    // finite, so that rows that are masked throughout yield 0 and not NaN
    std::fill_n(maxima, job.num_lanes, std::numeric_limits<float>::lowest());
    std::fill_n(lanes.denominators, job.num_lanes, 0.0f);
    for (int64_t t = item.begin; t < item.end; ++t) {
      const Tile current = tile(job, t);
      // the part of the next cell that this tile is of its own
      Ahead ahead{current.cell, current.cell};
      const int64_t next = (t / plan.cell_tiles + 1) * plan.cell_tiles;
      if (next < item.end) {
        ahead = part_of(plan, tile(job, next).cell, t % plan.cell_tiles);
      } else if (following && following->begin < following->end) {
        const Plan& next_plan = *groups_[following->job->group].plan;
        const int64_t part =
            (t - item.begin) % plan.cell_tiles * next_plan.cell_tiles / plan.cell_tiles;
        ahead = part_of(next_plan, tile(*following->job, following->begin).cell, part);
      }
      attend_tile(lanes, job.num_lanes, current, ahead, space);
    }
  }

  // Of num_lanes lanes those that are treated at once, part by part.
  static int num_parts(int num_lanes) { return (num_lanes + kMaxLanes<O> - 1) / kMaxLanes<O>; }
  static int part_start(int num_lanes, int part) { return num_lanes * part / num_parts(num_lanes); }

  // Folded queries [lanes, key_width] as `Lanes` has them.
  static void interleave(const O* folded, int num_lanes, const Plan& plan, std::vector<O>& query) {
    query.resize(std::max<size_t>(query.size(), num_lanes * plan.key_width));
    for (int i = 0; i < num_parts(num_lanes); ++i) {
      const int first = part_start(num_lanes, i), count = part_start(num_lanes, i + 1) - first;
      O* target = query.data() + first * plan.key_width;
      for (int64_t c = 0; c < plan.key_width; c += 2) {
        for (int g = 0; g < count; ++g, target += 2) {
          std::copy_n(folded + (first + g) * plan.key_width + c, 2, target);
        }
      }
    }
  }

  static Ahead part_of(const Plan& plan, const uint8_t* cell, int64_t part) {
    return {
        cell + plan.content * part / plan.cell_tiles,
        cell + plan.content * (part + 1) / plan.cell_tiles};
  }

  void attend_tile(
      const Lanes<O>& lanes, int num_lanes, Tile tile, const Ahead& ahead, Workspace& space) const {
    using Weigh = void (*)(
        const Tile&, const RowScales&, const Lanes<O>&, int, const Ahead&, Weights<O>&);
    using Sum = void (*)(const Tile&, const Lanes<O>&, int, const Weights<O>&);
    static constexpr auto kTables = []<int... I>(std::integer_sequence<int, I...>) {
      return std::pair{
          std::array<Weigh, kMaxLanes<O>>{weigh_rows<O, I + 1>...},
          std::array<Sum, kMaxLanes<O>>{sum_rows<O, I + 1>...}};
    }(std::make_integer_sequence<int, kMaxLanes<O>>{});
    const Plan& plan = *lanes.plan;
    if (tile.cell + plan.content + plan.overrun > pool_end_) {
      space.cell.resize(plan.content + plan.overrun);
      std::copy_n(tile.cell, plan.content, space.cell.data());
      tile.cell = space.cell.data();
    }
    const int parts = num_parts(num_lanes);
    space.scales.load(plan, tile.cell, tile.first, tile.valid);
#if !defined(KVCOMPRESS_BYTE_SHUFFLE)
    auto* words = reinterpret_cast<uint32_t*>(space.words.get());
    tile.words = words;
    plan.decode_keys(tile.cell, tile.first, tile.valid, levels_, words);
#endif
    for (int i = 0; i < parts; ++i) {
      const int first = part_start(num_lanes, i), last = part_start(num_lanes, i + 1);
      kTables.first[last - first - 1](tile, space.scales, lanes, first, ahead, space.weights);
    }
#if !defined(KVCOMPRESS_BYTE_SHUFFLE)
    plan.decode_values(tile.cell, tile.first, tile.valid, levels_, words);
#endif
    for (int i = 0; i < parts; ++i) {
      const int first = part_start(num_lanes, i), last = part_start(num_lanes, i + 1);
      kTables.second[last - first - 1](tile, lanes, first, space.weights);
    }
  }

  // Merge the partial results of a job.
  void finish(const Job& job) const {
    const Group& group = groups_[job.group];
    const int64_t width = group.plan->value_width;
    const int num_lanes = job.num_lanes;
    const int64_t stride = partial_size(num_lanes, width);
    const int64_t maxima = num_lanes * width, denominators = maxima + num_lanes;
    const int64_t start = job.row->first_active * group_lanes_ + job.first_lane;
    for (int v = 0; v < num_lanes; ++v) {
      float top = std::numeric_limits<float>::lowest();
      for (int i = 0; i < job.num_items; ++i) {
        top = std::max(top, job.partial[i * stride + maxima + v]);
      }
      float weights[kMaxSplits];
      float total = 0.0f;
      for (int i = 0; i < job.num_items; ++i) {
        weights[i] = simd::exp_nonpositive(job.partial[i * stride + maxima + v] - top);
        total += weights[i] * job.partial[i * stride + denominators + v];
      }
      const Vec inverse = simd::set1(total == 0.0f ? 0.0f : 1.0f / total);
      float* target = latents_ + group.latent + (start + v) * width;
      for (int64_t d = 0; d < width; d += kWidth) {
        Vec sum = simd::zero();
        for (int i = 0; i < job.num_items; ++i) {
          const float* sums = job.partial + i * stride + v * width + d;
          sum = simd::fma(simd::load(sums), simd::set1(weights[i]), sum);
        }
        simd::store(target + d, simd::mul(sum, inverse));
      }
      totals_[job.group * group_lanes_ * num_active_ + start + v] = total;
      const int64_t lane = job.first_lane + v;
      const int64_t token = job.row->first_token + lane / group_lanes_;
      const int64_t head = group.first_head * ratio_ + lane % group_lanes_;
      log_sum_[token * log_sum_token_ + head] =
          total == 0.0f ? -std::numeric_limits<float>::infinity() : top + std::log(total);
    }
  }

  const T* query_;
  float *output_, *log_sum_;
  int64_t query_token_, query_head_, output_token_, output_head_, log_sum_token_;
  CacheView<T> cache_;
  const uint8_t* pool_end_;
  const Levels& levels_;
  Matrices<M> matrices_;
  int64_t ratio_, group_size_ = 0, group_lanes_ = 0;
  float scale_;
  int64_t num_active_ = 0;  // queries of all rows with state
  std::vector<const Row*> active_rows_;
  std::vector<Group> groups_;
  std::vector<Job> jobs_;
  std::vector<Item> items_;
  int64_t threads_ = 1, max_columns_ = 0;
  int64_t work_ = 0;  // tiles, and KV heads to fold and unfold
  int64_t fold_blocks_ = 0, num_folds_ = 0, unfold_blocks_ = 0, num_unfolds_ = 0;
  // of every lane, group by group
  O* folded_ = nullptr;
  float *constants_ = nullptr, *totals_ = nullptr, *latents_ = nullptr;
  std::unique_ptr<Counter[]> pending_;  // items of each job that are not done
  Counter next_fold_, folds_done_, next_item_, jobs_done_, next_unfold_;
};

// Counts of the groups' layouts: int64 [groups, 9].
constexpr int64_t kLayoutNumbers = 2 * kNumWidths + 1;
constexpr int64_t kNumLevels = 16 + 4 + 2;

template <typename M>
const M* matrix_of(const char* name, const at::Tensor& matrix, int64_t size) {
  TORCH_CHECK_VALUE(
      matrix.numel() == size && matrix.is_contiguous() &&
          matrix.scalar_type() == c10::CppTypeToScalarType<M>::value && matrix.device().is_cpu(),
      "codecs: expected ", name, " to be contiguous ", c10::CppTypeToScalarType<M>::value, " of ",
      size, " numbers, got ", matrix.scalar_type(), " of ", matrix.numel(),
      "; build LayerCodecs with the number of KV heads and the dtype of this pool");
  return matrix.const_data_ptr<M>();
}

void coded_attention(
    const at::Tensor& query, const at::Tensor& output, const at::Tensor& log_sum,
    const at::Tensor& kv_cache, int64_t layer, const at::Tensor& block_table,
    const at::Tensor& query_start_loc, const at::Tensor& rows, const at::Tensor& slot_of_block,
    const at::Tensor& first_cell, const at::Tensor& num_rows, const at::Tensor& layouts,
    const at::Tensor& level_tables, const at::Tensor& fold, const at::Tensor& unfold,
    const at::Tensor& means, double scale) {
  TORCH_CHECK_VALUE(
      kv_cache.dim() == 5 && kv_cache.size(4) % 2 == 0 && kv_cache.stride(4) == 1 &&
          kv_cache.stride(3) == kv_cache.size(4) && kv_cache.device().is_cpu(),
      "kv_cache: expected [num_layers, num_blocks, num_kv_heads, block_size, 2 * head_size] on the "
      "CPU with the last two dimensions contiguous, got ", kv_cache.sizes(), " with strides ",
      kv_cache.strides(), " on ", kv_cache.device());
  const int64_t num_layers = kv_cache.size(0), num_blocks = kv_cache.size(1),
                num_kv_heads = kv_cache.size(2), head_size = kv_cache.size(4) / 2;
  TORCH_CHECK_VALUE(
      head_size > 0 && head_size % 16 == 0 && head_size <= kMaxHeadSize,
      "kv_cache: expected a head size that is a multiple of 16 up to ", kMaxHeadSize, ", got ",
      head_size);
  TORCH_CHECK_VALUE(
      query.dim() == 3 && query.size(2) == head_size && query.size(1) > 0 &&
          query.size(1) % num_kv_heads == 0,
      "query: expected [num_tokens, num_heads, head_size] with head_size = ", head_size,
      " and num_heads a multiple of num_kv_heads = ", num_kv_heads, ", got ", query.sizes());
  TORCH_CHECK_VALUE(
      query.scalar_type() == kv_cache.scalar_type(), "query and kv_cache: expected one dtype, got ",
      query.scalar_type(), " and ", kv_cache.scalar_type());
  TORCH_CHECK_VALUE(
      output.sizes() == query.sizes() && output.scalar_type() == at::kFloat,
      "output: expected float32 [num_tokens, num_heads, head_size] = ", query.sizes(), ", got ",
      output.scalar_type(), " ", output.sizes());
  TORCH_CHECK_VALUE(
      log_sum.dim() == 2 && log_sum.size(0) == query.size(0) && log_sum.size(1) == query.size(1) &&
          log_sum.scalar_type() == at::kFloat,
      "log_sum: expected float32 [num_tokens, num_heads] = [", query.size(0), ", ", query.size(1),
      "], got ", log_sum.scalar_type(), " ", log_sum.sizes());
  TORCH_CHECK_VALUE(
      query.stride(2) == 1 && output.stride(2) == 1 && log_sum.stride(1) == 1 &&
          query.device().is_cpu() && output.device().is_cpu() && log_sum.device().is_cpu(),
      "query, output and log_sum: expected CPU tensors with the last dimension contiguous, got "
      "strides ", query.strides(), ", ", output.strides(), " and ", log_sum.strides());
  TORCH_CHECK_VALUE(
      layer >= 0 && layer < num_layers, "layer: expected 0 <= layer < ", num_layers, ", got ",
      layer);
  TORCH_CHECK_VALUE(
      block_table.dim() == 2 && block_table.scalar_type() == at::kInt &&
          block_table.stride(1) == 1 && block_table.device().is_cpu(),
      "block_table: expected int32 [num_rows, max_blocks] with contiguous rows, got ",
      block_table.scalar_type(), " ", block_table.sizes(), " with strides ",
      block_table.strides());
  const int64_t table_rows = block_table.size(0), max_blocks = block_table.size(1);
  check_index("query_start_loc", query_start_loc, "[num_rows + 1]", {table_rows + 1});
  TORCH_CHECK_VALUE(rows.dim() == 1, "rows: expected [num_selected_rows], got ", rows.sizes());
  check_index("rows", rows, "[num_selected_rows]", {rows.size(0)});
  check_index("slot_of_block", slot_of_block, "[num_blocks]", {num_blocks});

  // what LayerCodecs made
  const int64_t num_groups = layouts.size(0);
  TORCH_CHECK_VALUE(
      layouts.dim() == 2 && layouts.size(1) == kLayoutNumbers && num_groups > 0 &&
          layouts.scalar_type() == at::kLong && layouts.is_contiguous() &&
          num_kv_heads % num_groups == 0,
      "codecs: expected groups of equal size of the ", num_kv_heads, " KV heads, got ",
      layouts.sizes());
  const int64_t cell_bytes = kv_cache.size(3) * kv_cache.size(4) * kv_cache.element_size();
  std::vector<const Plan*> plans;
  int64_t key_width = 0, value_width = 0;
  for (int64_t g = 0; g < num_groups; ++g) {
    const CodeLayout layout(layouts.const_data_ptr<int64_t>() + g * kLayoutNumbers);
    const int64_t cell_rows = layout.rows_per_cell(cell_bytes);
    TORCH_CHECK_VALUE(
        cell_rows > 0, "codecs: rows of ", layout.row_bits(), " bits in group ", g, "; ", kRowStep,
        " of them must fit a cell of ", cell_bytes, " bytes");
    plans.push_back(&plan_for(layout, cell_rows));
    key_width += plans.back()->key_width;
    value_width += plans.back()->value_width;
  }
  const int64_t group_size = num_kv_heads / num_groups;
  const auto* level_values = matrix_of<float>("levels", level_tables, kNumLevels);
  const auto* mean_values = matrix_of<float>("means", means, 2 * num_kv_heads * head_size);

  check_index(
      "first_cell", first_cell, "[num_slots, num_layers, num_groups]",
      {first_cell.dim() ? first_cell.size(0) : 0, num_layers, num_groups});
  const int64_t num_slots = first_cell.size(0);
  check_index(
      "num_rows", num_rows, "[num_slots, num_layers, num_groups]",
      {num_slots, num_layers, num_groups});

  const int32_t* row_ids = rows.const_data_ptr<int32_t>();
  const int32_t* starts = query_start_loc.const_data_ptr<int32_t>();
  const int32_t* slots = slot_of_block.const_data_ptr<int32_t>();
  std::vector<Row> selected;
  selected.reserve(rows.size(0));
  int64_t num_active = 0;
  for (int64_t k = 0; k < rows.size(0); ++k) {
    const int64_t r = row_ids[k];
    TORCH_CHECK_VALUE(
        r >= 0 && r < table_rows, "rows[", k, "]: expected 0 <= row < ", table_rows, ", got ", r);
    const int64_t query_len = starts[r + 1] - starts[r];
    TORCH_CHECK_VALUE(
        query_len >= 0 && starts[r] >= 0 && starts[r + 1] <= query.size(0), "row ", r,
        ": expected tokens within the ", query.size(0), " of query, got ", starts[r], " to ",
        starts[r + 1]);
    if (query_len == 0) continue;
    const int32_t* blocks = block_table.const_data_ptr<int32_t>() + r * block_table.stride(0);
    TORCH_CHECK_VALUE(
        max_blocks > 0 && blocks[0] >= 0 && blocks[0] < num_blocks, "block_table[", r,
        ", 0]: expected a block below ", num_blocks);
    const int64_t slot = slots[blocks[0]];
    TORCH_CHECK_VALUE(
        slot >= 0 && slot < num_slots, "slot_of_block[", blocks[0], "]: expected 0 <= slot < ",
        num_slots, ", got ", slot);
    const int64_t offset = (slot * num_layers + layer) * num_groups;
    const int32_t* cells = first_cell.const_data_ptr<int32_t>() + offset;
    const int32_t* counts = num_rows.const_data_ptr<int32_t>() + offset;
    bool any = false;
    for (int64_t g = 0; slot > 0 && g < num_groups; ++g) {
      const int64_t limit = max_blocks * num_layers * num_kv_heads, cell_rows = plans[g]->rows;
      TORCH_CHECK_VALUE(
          cells[g] >= 0 && counts[g] >= 0 &&
              cells[g] + (counts[g] + cell_rows - 1) / cell_rows <= limit,
          "coded rows of slot ", slot, ", layer ", layer, ", group ", g,
          ": expected cells within the ", limit, " of a row of block_table, got ", counts[g],
          " rows, ", cell_rows, " to a cell, from cell ", cells[g]);
      any |= counts[g] > 0;
    }
    if (any) {
      selected.push_back({blocks, starts[r], query_len, num_active, cells, counts});
      num_active += query_len;
      continue;
    }
    for (int64_t t = starts[r]; t < starts[r + 1]; ++t) {
      float* sums = log_sum.mutable_data_ptr<float>() + t * log_sum.stride(0);
      std::fill_n(sums, query.size(1), -std::numeric_limits<float>::infinity());
      for (int64_t h = 0; h < query.size(1); ++h) {
        float* target =
            output.mutable_data_ptr<float>() + t * output.stride(0) + h * output.stride(1);
        std::fill_n(target, head_size, 0.0f);
      }
    }
  }

  const Levels levels(level_values);
  const auto run = [&]<typename T>(T) {
    using Op = CodedAttention<T>;
    using M = typename Op::M;
    const int64_t numbers = group_size * head_size;
    const Matrices<M> matrices{
        matrix_of<M>("fold", fold, key_width * numbers),
        matrix_of<M>("unfold", unfold, value_width * numbers), mean_values,
        mean_values + num_kv_heads * head_size};
    Op(query, output, log_sum, kv_cache, levels, matrices, static_cast<float>(scale))
        .run(selected, plans);
  };
  switch (query.scalar_type()) {
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
          false, "query: expected float32, bfloat16 or float16, got ", query.scalar_type());
  }
}

}  // namespace
}  // namespace kvcompress

TORCH_LIBRARY_FRAGMENT(kvcompress, m) {
  m.def(
      "coded_attention(Tensor query, Tensor(a!) output, Tensor(b!) log_sum, Tensor kv_cache, "
      "int layer, Tensor block_table, Tensor query_start_loc, Tensor rows, Tensor slot_of_block, "
      "Tensor first_cell, Tensor num_rows, Tensor layouts, Tensor levels, Tensor fold, "
      "Tensor unfold, Tensor means, float scale) -> ()");
}

TORCH_LIBRARY_IMPL(kvcompress, CPU, m) {
  m.impl("coded_attention", &kvcompress::coded_attention);
}
