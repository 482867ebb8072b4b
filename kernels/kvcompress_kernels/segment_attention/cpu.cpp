// Paged attention over "segment + raw tail"; see api.py for the meaning of the arguments.
//
// The keys of one (row, KV head) form one list of cells: those of the segment, then those of the
// raw tail. The list is cut into items, which threads take in order from a shared counter. How it
// is cut depends on that row alone, and partial results are merged in the order of the cut, so a
// row's result depends neither on the rest of the batch nor on the number of threads.
//
// Query heads that share a KV head and the queries of one row are treated alike, as "lanes":
// lane v of a (row, KV head) is query v / ratio, head v % ratio of the heads that share it.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <limits>
#include <memory>
#include <optional>
#include <type_traits>
#include <vector>

#include "csrc/cells.h"
#include "csrc/checks.h"
#include "csrc/simd.h"
#include "segment_attention/tile.h"

namespace kvcompress {
namespace {

// Lanes of one item, a multiple of kMaxLanes.
constexpr int kItemLanes = 32;
constexpr int kMaxSplits = 64;

// Into how many items the cells of one group are cut: enough for all threads to get equal work,
// also with one short row, but few enough that merging them costs nothing.
inline int64_t num_splits(int64_t num_tiles) {
  return num_tiles <= 16 ? num_tiles : std::clamp<int64_t>(num_tiles / 4, 16, kMaxSplits);
}

struct Row {
  const int32_t* blocks;
  int64_t first_token, query_len, seq_len;
  int64_t gap_end;
  const int32_t* first_cell;   // of this layer, [H]
  const int32_t* num_entries;  // of this layer, [H]; null for a row without state
};

// Lanes of one (row, KV head) that are computed together, over all their keys.
struct Group {
  const Row* row;
  int64_t head;
  int64_t first_lane;
  int num_lanes;
  int64_t segment_cells, segment_entries, first_cell;
  int64_t num_cells;
  int64_t raw_limit;  // raw positions at or past it are visible to no lane
  int num_items;
  float* partial;  // of the first item
};

// A counter on a cache line of its own: threads write it while others read its neighbours.
struct alignas(64) Counter {
  std::atomic<int64_t> value;
};

struct Item {
  const Group* group;
  int64_t begin, end;  // cells
  float* partial;
};

struct alignas(64) CacheLine {
  float floats[16];
};

// Partial result of an item, a whole number of cache lines: sums [lanes, D], maxima [lanes],
// denominators [lanes].
inline int64_t partial_size(int num_lanes, int64_t head_size) {
  return (num_lanes * (head_size + 2) + 15) / 16 * 16;
}

// A partial softmax that rows begin with: outputs [num_tokens, num_heads, D] of keys whose
// exponentials sum to exp(log_sum[num_tokens, num_heads]). Null if there is none.
struct Initial {
  const float* output = nullptr;
  const float* log_sum = nullptr;
  int64_t output_token = 0, output_head = 0, log_sum_token = 0, log_sum_head = 0;
};

template <typename T>
class SegmentAttention {
 public:
  SegmentAttention(
      const at::Tensor& query, const at::Tensor& output, const at::Tensor& kv_cache,
      const at::Tensor& bias, int64_t layer, float scale, const Initial& initial)
      : query_(query.const_data_ptr<T>()),
        output_(output.mutable_data_ptr<T>()),
        query_token_(query.stride(0)),
        query_head_(query.stride(1)),
        output_token_(output.stride(0)),
        output_head_(output.stride(1)),
        cache_(kv_cache),
        bias_(bias),
        layer_(layer),
        ratio_(query.size(1) / kv_cache.size(2)),
        scale_(scale),
        initial_(initial),
        tile_cells_(std::max<int64_t>(1, kTileSlots / cache_.block_size)) {}

  void run(const std::vector<Row>& rows) {
    plan(rows);
    threads_ = std::min<int64_t>(at::get_num_threads(), static_cast<int64_t>(items_.size()));
    if (items_.empty()) return;
    if (threads_ == 1) {
      work();
    } else {
      at::parallel_for(0, threads_, 1, [this](int64_t, int64_t) { work(); });
    }
  }

 private:
  void plan(const std::vector<Row>& rows) {
    const int64_t block_size = cache_.block_size, head_size = cache_.head_size;
    int64_t scratch = 0;
    for (const Row& row : rows) {
      const int64_t num_lanes = row.query_len * ratio_;
      const int64_t num_groups = (num_lanes + kItemLanes - 1) / kItemLanes;
      // long queries keep every thread busy without cutting the keys
      const int64_t max_splits = std::max<int64_t>(1, kMaxSplits / num_groups);
      for (int64_t head = 0; head < cache_.num_kv_heads; ++head) {
        for (int64_t first = 0; first < num_lanes; first += kItemLanes) {
          Group group{};
          group.row = &row;
          group.head = head;
          group.first_lane = first;
          group.num_lanes = static_cast<int>(std::min<int64_t>(kItemLanes, num_lanes - first));
          if (row.num_entries) {
            group.segment_entries = row.num_entries[head];
            group.segment_cells = (group.segment_entries + block_size - 1) / block_size;
            group.first_cell = row.first_cell[head];
          }
          const int64_t last_query = (first + group.num_lanes - 1) / ratio_;
          group.raw_limit = row.seq_len - row.query_len + last_query + 1;
          const int64_t raw = std::max<int64_t>(0, group.raw_limit - row.gap_end);
          group.num_cells = group.segment_cells + (raw + block_size - 1) / block_size;
          const int64_t num_tiles = (group.num_cells + tile_cells_ - 1) / tile_cells_;
          group.num_items =
              static_cast<int>(std::clamp<int64_t>(num_splits(num_tiles), 1, max_splits));
          scratch += group.num_items * partial_size(group.num_lanes, head_size);
          groups_.push_back(group);
        }
      }
    }

    // kept between calls: fresh pages cost more than the arithmetic of a short batch
    thread_local std::unique_ptr<CacheLine[]> buffer;
    thread_local int64_t capacity = 0;
    if (scratch > capacity) {
      buffer = std::make_unique_for_overwrite<CacheLine[]>((scratch + 15) / 16);
      capacity = scratch;
    }
    pending_ = std::make_unique<Counter[]>(groups_.size());
    float* partial = buffer[0].floats;
    for (size_t g = 0; g < groups_.size(); ++g) {
      Group& group = groups_[g];
      group.partial = partial;
      pending_[g].value.store(group.num_items, std::memory_order_relaxed);
      for (int64_t i = 0; i < group.num_items; ++i) {
        items_.push_back(
            {&group, group.num_cells * i / group.num_items,
             group.num_cells * (i + 1) / group.num_items, partial});
        partial += partial_size(group.num_lanes, head_size);
      }
    }
  }

  Cell<T> cell(const Group& group, int64_t index) const {
    static const float no_bias[kMaxBlockSize] = {};
    const int64_t block_size = cache_.block_size;
    if (index < group.segment_cells) {
      const CellIndex at = cache_.locate(group.first_cell + index);
      const int64_t block = group.row->blocks[at.block];
      const int64_t left = group.segment_entries - index * block_size;
      return {
          cache_.keys(block, at.layer, at.head), bias_.slots(block, at.layer, at.head),
          static_cast<int>(std::min(left, block_size)), -1};
    }
    const int64_t logical = group.row->gap_end / block_size + index - group.segment_cells;
    const int64_t position = logical * block_size;
    return {
        cache_.keys(group.row->blocks[logical], layer_, group.head), no_bias,
        static_cast<int>(std::min(group.raw_limit - position, block_size)), position};
  }

  int load_tile(const Item& item, int64_t begin, Cell<T>* cells) const {
    const int count = static_cast<int>(std::min(item.end - begin, tile_cells_));
    for (int c = 0; c < count; ++c) {
      cells[c] = cell(*item.group, begin + c);
      // the pages are touched before the rest of the cell is fetched
      prefetch(cells[c].bias);
      prefetch(cells[c].keys);
      prefetch(cells[c].keys + cache_.block_size * cache_.head_size);
      prefetch(cells[c].keys + 2 * cache_.block_size * cache_.head_size - 1);
    }
    return count;
  }

  const Item* take() {
    const int64_t index = next_.value.fetch_add(1, std::memory_order_relaxed);
    const int64_t count = static_cast<int64_t>(items_.size());
    if (index >= count) return nullptr;
    // dealt out from as many regions as there are threads: at equal pace every thread stays in
    // a region of its own, which memory serves faster than neighbouring reads
    const int64_t region = index % threads_, extra = count % threads_;
    const int64_t start = region * (count / threads_) + std::min(region, extra);
    return &items_[start + index / threads_];
  }

  void work() {
    Cell<T> tiles[2][kMaxTileCells];
    const Item* item = take();
    int current = 0;
    int count = item ? load_tile(*item, item->begin, tiles[0]) : 0;
    while (item) {
      // taken one ahead, so that its first tile is on its way when the item starts
      const Item* following = take();
      begin(*item);
      for (int64_t c = item->begin; c < item->end; c += tile_cells_) {
        Cell<T>* next = tiles[1 - current];
        int next_count = 0;
        if (c + tile_cells_ < item->end) {
          next_count = load_tile(*item, c + tile_cells_, next);
        } else if (following) {
          next_count = load_tile(*following, following->begin, next);
        }
        attend(*item, tiles[current], count, next, next_count);
        current = 1 - current;
        count = next_count;
      }
      if (item->begin == item->end && following) {
        count = load_tile(*following, following->begin, tiles[current]);
      }
      Counter& pending = pending_[item->group - groups_.data()];
      if (pending.value.fetch_sub(1, std::memory_order_acq_rel) == 1) finish(*item->group);
      item = following;
    }
  }

  // Buffers of the item that this thread is on.
  struct Workspace {
    alignas(64) Operand<T> query[kItemLanes * kMaxHeadSize];
    int64_t positions[kItemLanes];
  };
  static Workspace& workspace() {
    thread_local Workspace space;
    return space;
  }

  void begin(const Item& item) const {
    const Group& group = *item.group;
    const int64_t head_size = cache_.head_size;
    Workspace& space = workspace();
    for (int v = 0; v < group.num_lanes; ++v) {
      const int64_t index = (group.first_lane + v) / ratio_;
      const T* source = query_ + (group.row->first_token + index) * query_token_ +
          (group.head * ratio_ + (group.first_lane + v) % ratio_) * query_head_;
      Operand<T>* target = space.query + v * head_size;
      if constexpr (std::is_same_v<Operand<T>, T>) {
        std::copy_n(source, head_size, target);
      } else {
        for (int64_t d = 0; d < head_size; d += kWidth) {
          simd::store(target + d, simd::load(source + d));
        }
      }
      space.positions[v] = group.row->seq_len - group.row->query_len + index;
    }
    float* maxima = item.partial + group.num_lanes * head_size;
    std::fill(item.partial, maxima, 0.0f);
    // finite, so that a tile that is masked throughout yields 0 and not NaN
    std::fill_n(maxima, group.num_lanes, std::numeric_limits<float>::lowest());
    std::fill_n(maxima + group.num_lanes, group.num_lanes, 0.0f);
  }

  void attend(
      const Item& item, const Cell<T>* cells, int count, const Cell<T>* next,
      int next_count) const {
    using Attend = void (*)(
        const Cell<T>*, int, int64_t, int64_t, float, const Lanes<T>&, int, const T* const*);
    static constexpr Attend kAttend[] = {
        attend_tile<T, 1>, attend_tile<T, 2>, attend_tile<T, 3>, attend_tile<T, 4>,
#if defined(CPU_CAPABILITY_AVX512)
        attend_tile<T, 5>, attend_tile<T, 6>, attend_tile<T, 7>, attend_tile<T, 8>,
#endif
    };
    static_assert(std::size(kAttend) == kMaxLanes);
    const int num_lanes = item.group->num_lanes;
    const int64_t head_size = cache_.head_size;
    Workspace& space = workspace();
    const Lanes<T> lanes{
        space.query, space.positions, item.partial, item.partial + num_lanes * head_size,
        item.partial + num_lanes * head_size + num_lanes};
    // while the keys of a tile are read its values are fetched, then the keys of the next tile
    const T* ahead[kMaxTileCells];
    for (int c = 0; c < count; ++c) ahead[c] = c < next_count ? next[c].keys : cells[c].keys;
    const int parts = (num_lanes + kMaxLanes - 1) / kMaxLanes;
    for (int i = 0; i < parts; ++i) {
      const int first = num_lanes * i / parts, last = num_lanes * (i + 1) / parts;
      kAttend[last - first - 1](
          cells, count, cache_.block_size, head_size, scale_, lanes, first, ahead);
    }
  }

  // Merge the partial results of a group and write its lanes.
  void finish(const Group& group) const {
    const int64_t head_size = cache_.head_size;
    const int num_lanes = group.num_lanes;
    const int64_t stride = partial_size(num_lanes, head_size);
    const int64_t maxima = num_lanes * head_size, denominators = maxima + num_lanes;
    for (int v = 0; v < num_lanes; ++v) {
      float top = std::numeric_limits<float>::lowest();
      for (int i = 0; i < group.num_items; ++i) {
        top = std::max(top, group.partial[i * stride + maxima + v]);
      }
      const int64_t lane = group.first_lane + v;
      const int64_t token = group.row->first_token + lane / ratio_;
      const int64_t head = group.head * ratio_ + lane % ratio_;
      float initial_weight = 0.0f;
      if (initial_.output) {
        const float log_sum =
            initial_.log_sum[token * initial_.log_sum_token + head * initial_.log_sum_head];
        top = std::max(top, log_sum);
        initial_weight = simd::exp_nonpositive(log_sum - top);
      }
      const float* initial =
          initial_.output + token * initial_.output_token + head * initial_.output_head;
      float weights[kMaxSplits];
      float total = initial_weight;
      for (int i = 0; i < group.num_items; ++i) {
        weights[i] = simd::exp_nonpositive(group.partial[i * stride + maxima + v] - top);
        total += weights[i] * group.partial[i * stride + denominators + v];
      }
      // nothing visible: 0
      const Vec inverse = simd::set1(total == 0.0f ? 0.0f : 1.0f / total);
      T* target = output_ + token * output_token_ + head * output_head_;
      for (int64_t d = 0; d < head_size; d += kWidth) {
        // what weighs nothing may hold anything
        Vec sum = initial_weight == 0.0f
            ? simd::zero()
            : simd::mul(simd::load(initial + d), simd::set1(initial_weight));
        for (int i = 0; i < group.num_items; ++i) {
          const float* sums = group.partial + i * stride + v * head_size + d;
          sum = simd::fma(simd::load(sums), simd::set1(weights[i]), sum);
        }
        simd::store(target + d, simd::mul(sum, inverse));
      }
    }
  }

  const T* query_;
  T* output_;
  int64_t query_token_, query_head_, output_token_, output_head_;
  CacheView<T> cache_;
  BiasView bias_;
  int64_t layer_;
  int64_t ratio_;
  float scale_;
  Initial initial_;
  int64_t tile_cells_;
  int64_t threads_ = 1;
  std::vector<Group> groups_;
  std::vector<Item> items_;
  std::unique_ptr<Counter[]> pending_;  // items of each group that are not done
  Counter next_{0};
};

void segment_attention(
    const at::Tensor& query, const at::Tensor& output, const at::Tensor& kv_cache,
    const at::Tensor& bias, int64_t layer, const at::Tensor& block_table,
    const at::Tensor& seq_lens, const at::Tensor& query_start_loc, const at::Tensor& rows,
    const at::Tensor& slot_of_block, const at::Tensor& gap_end, const at::Tensor& first_cell,
    const at::Tensor& num_entries, double scale, const std::optional<at::Tensor>& partial_output,
    const std::optional<at::Tensor>& partial_log_sum) {
  check_pool(kv_cache, bias);
  const int64_t num_layers = kv_cache.size(0), num_blocks = kv_cache.size(1),
                num_kv_heads = kv_cache.size(2), block_size = kv_cache.size(3),
                head_size = kv_cache.size(4) / 2;
  TORCH_CHECK_VALUE(
      block_size > 0 && block_size % 16 == 0 && block_size <= kMaxBlockSize,
      "kv_cache: expected a block size that is a multiple of 16 up to ", kMaxBlockSize, ", got ",
      block_size);
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
      output.sizes() == query.sizes(),
      "output: expected [num_tokens, num_heads, head_size] = ", query.sizes(), ", got ",
      output.sizes());
  TORCH_CHECK_VALUE(
      query.scalar_type() == kv_cache.scalar_type() && output.scalar_type() == query.scalar_type(),
      "query, output and kv_cache: expected one dtype, got ", query.scalar_type(), ", ",
      output.scalar_type(), " and ", kv_cache.scalar_type());
  TORCH_CHECK_VALUE(
      query.stride(2) == 1 && output.stride(2) == 1 && query.device().is_cpu() &&
          output.device().is_cpu(),
      "query and output: expected CPU tensors with the last dimension contiguous, got strides ",
      query.strides(), " and ", output.strides());
  TORCH_CHECK_VALUE(
      layer >= 0 && layer < num_layers, "layer: expected 0 <= layer < ", num_layers, ", got ",
      layer);
  TORCH_CHECK_VALUE(
      block_table.dim() == 2 && block_table.scalar_type() == at::kInt &&
          block_table.stride(1) == 1 && block_table.device().is_cpu(),
      "block_table: expected int32 [num_rows, max_blocks] with contiguous rows, got ",
      block_table.scalar_type(), " ", block_table.sizes(), " with strides ",
      block_table.strides());
  const int64_t num_rows = block_table.size(0), max_blocks = block_table.size(1);
  check_index("seq_lens", seq_lens, "[num_rows]", {num_rows});
  check_index("query_start_loc", query_start_loc, "[num_rows + 1]", {num_rows + 1});
  TORCH_CHECK_VALUE(
      rows.dim() == 1, "rows: expected [num_selected_rows], got ", rows.sizes());
  check_index("rows", rows, "[num_selected_rows]", {rows.size(0)});
  check_index("slot_of_block", slot_of_block, "[num_blocks]", {num_blocks});
  TORCH_CHECK_VALUE(gap_end.dim() == 1, "gap_end: expected [num_slots], got ", gap_end.sizes());
  const int64_t num_slots = gap_end.size(0);
  check_index("gap_end", gap_end, "[num_slots]", {num_slots});
  check_index(
      "first_cell", first_cell, "[num_slots, num_layers, num_kv_heads]",
      {num_slots, num_layers, num_kv_heads});
  check_index(
      "num_entries", num_entries, "[num_slots, num_layers, num_kv_heads]",
      {num_slots, num_layers, num_kv_heads});

  TORCH_CHECK_VALUE(
      partial_output.has_value() == partial_log_sum.has_value(),
      "partial_output and partial_log_sum: expected both or neither");
  Initial initial;
  if (partial_output) {
    const at::Tensor &sums = *partial_output, &log_sums = *partial_log_sum;
    TORCH_CHECK_VALUE(
        sums.sizes() == query.sizes() && sums.scalar_type() == at::kFloat && sums.stride(2) == 1 &&
            sums.device().is_cpu(),
        "partial_output: expected float32 [num_tokens, num_heads, head_size] = ", query.sizes(),
        " on the CPU with the last dimension contiguous, got ", sums.scalar_type(), " ",
        sums.sizes(), " with strides ", sums.strides());
    TORCH_CHECK_VALUE(
        log_sums.sizes() == query.sizes().slice(0, 2) && log_sums.scalar_type() == at::kFloat &&
            log_sums.device().is_cpu(),
        "partial_log_sum: expected float32 [num_tokens, num_heads] = ",
        query.sizes().slice(0, 2), " on the CPU, got ", log_sums.scalar_type(), " ",
        log_sums.sizes());
    initial = {
        sums.const_data_ptr<float>(), log_sums.const_data_ptr<float>(), sums.stride(0),
        sums.stride(1), log_sums.stride(0), log_sums.stride(1)};
  }

  const int32_t* row_ids = rows.const_data_ptr<int32_t>();
  const int32_t* starts = query_start_loc.const_data_ptr<int32_t>();
  const int32_t* lens = seq_lens.const_data_ptr<int32_t>();
  const int32_t* slots = slot_of_block.const_data_ptr<int32_t>();
  std::vector<Row> selected;
  selected.reserve(rows.size(0));
  for (int64_t k = 0; k < rows.size(0); ++k) {
    const int64_t r = row_ids[k];
    TORCH_CHECK_VALUE(
        r >= 0 && r < num_rows, "rows[", k, "]: expected 0 <= row < ", num_rows, ", got ", r);
    const int64_t query_len = starts[r + 1] - starts[r];
    TORCH_CHECK_VALUE(
        query_len >= 0 && starts[r] >= 0 && starts[r + 1] <= query.size(0) &&
            query_len <= lens[r] && lens[r] <= max_blocks * block_size,
        "row ", r, ": expected 0 <= query_len <= seq_len <= max_blocks * block_size = ",
        max_blocks * block_size, " within ", query.size(0), " tokens, got tokens ", starts[r],
        " to ", starts[r + 1], " and seq_len ", lens[r]);
    if (query_len == 0) continue;
    Row row{};
    row.blocks = block_table.const_data_ptr<int32_t>() + r * block_table.stride(0);
    row.first_token = starts[r];
    row.query_len = query_len;
    row.seq_len = lens[r];
    TORCH_CHECK_VALUE(
        row.blocks[0] >= 0 && row.blocks[0] < num_blocks, "block_table[", r,
        ", 0]: expected a block below ", num_blocks, ", got ", row.blocks[0]);
    const int64_t slot = slots[row.blocks[0]];
    TORCH_CHECK_VALUE(
        slot >= 0 && slot < num_slots, "slot_of_block[", row.blocks[0],
        "]: expected 0 <= slot < ", num_slots, ", got ", slot);
    if (slot > 0) {
      row.gap_end = gap_end.const_data_ptr<int32_t>()[slot];
      TORCH_CHECK_VALUE(
          row.gap_end >= 0 && row.gap_end % block_size == 0, "gap_end[", slot,
          "]: expected a multiple of the block size ", block_size, ", got ", row.gap_end);
      const int64_t offset = (slot * num_layers + layer) * num_kv_heads;
      row.first_cell = first_cell.const_data_ptr<int32_t>() + offset;
      row.num_entries = num_entries.const_data_ptr<int32_t>() + offset;
      const int64_t limit = max_blocks * num_layers * num_kv_heads;
      for (int64_t h = 0; h < num_kv_heads; ++h) {
        const int64_t first = row.first_cell[h], count = row.num_entries[h];
        TORCH_CHECK_VALUE(
            first >= 0 && count >= 0 && first + (count + block_size - 1) / block_size <= limit,
            "segment of slot ", slot, ", layer ", layer, ", head ", h,
            ": expected cells within the ", limit, " of a row of block_table, got ", count,
            " entries from cell ", first);
      }
    }
    selected.push_back(row);
  }

  const auto run = [&]<typename T>(T) {
    SegmentAttention<T>(query, output, kv_cache, bias, layer, static_cast<float>(scale), initial)
        .run(selected);
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
      "segment_attention(Tensor query, Tensor(a!) output, Tensor kv_cache, Tensor bias, int layer, "
      "Tensor block_table, Tensor seq_lens, Tensor query_start_loc, Tensor rows, "
      "Tensor slot_of_block, Tensor gap_end, Tensor first_cell, Tensor num_entries, "
      "float scale, Tensor? partial_output, Tensor? partial_log_sum) -> ()");
}

TORCH_LIBRARY_IMPL(kvcompress, CPU, m) {
  m.impl("segment_attention", &kvcompress::segment_attention);
}
