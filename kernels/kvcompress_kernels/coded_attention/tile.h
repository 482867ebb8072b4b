// The inner loops of `coded_attention`: online softmax of some lanes over the rows of a tile, in
// the space of the codes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "coded_attention/decode.h"
#include "csrc/codes.h"
#include "csrc/simd.h"

namespace kvcompress {
namespace {

using simd::kWidth;
using simd::Vec;

// Lanes that share one load of the codes; bounded by the vector registers.
template <typename O>
constexpr int kMaxLanes = kWidth == 8 ? 4 : std::is_same_v<O, float> ? 6 : 12;
// Lanes of one item.
constexpr int kItemLanes = 32;
// row stride of the buffers of a tile; the odd vector keeps the lanes out of one another's cache
// sets
constexpr int kTileStride = static_cast<int>(Plan::kMaxTile) + kWidth;

template <typename T>
#if defined(KVCOMPRESS_BF16_DOT)
constexpr bool kDot = std::is_same_v<T, c10::BFloat16>;
#else
constexpr bool kDot = false;
#endif

// What folded queries and weights are multiplied as.
template <typename T>
using Operand = std::conditional_t<kDot<T>, T, float>;

// Memory that is fetched while something else is computed.
struct Ahead {
  const uint8_t *begin, *end;

  Ahead from(int64_t offset) const { return {begin + offset, end}; }
  void fetch(int64_t line) const {
    _mm_prefetch(
        reinterpret_cast<const char*>(std::min(begin + 64 * line, end)), _MM_HINT_T0);
  }
};

// sum[g][j] += words[j] . factors[g], for NV vectors of words and the pairs of factors of kLanes
// lanes that are kStride apart.
template <int kStride, typename O, int kLanes, int NV>
[[gnu::always_inline]] inline void add_products(
    const Words (&words)[NV], const O* factors, Vec (&sum)[kLanes][NV]) {
#if defined(KVCOMPRESS_BF16_DOT)
  if constexpr (std::is_same_v<O, c10::BFloat16>) {
#pragma GCC unroll 12
    for (int g = 0; g < kLanes; ++g) {
      int32_t pair;
      std::memcpy(&pair, factors + g * kStride, sizeof(pair));
      const __m512bh factor = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 4
      for (int j = 0; j < NV; ++j) {
        sum[g][j] = _mm512_dpbf16_ps(sum[g][j], (__m512bh)words[j], factor);
      }
    }
    return;
  }
#endif
  if constexpr (std::is_same_v<O, float>) {
    Vec first[NV], second[NV];
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) {
      first[j] = first_levels(words[j]);
      second[j] = second_levels(words[j]);
    }
#pragma GCC unroll 12
    for (int g = 0; g < kLanes; ++g) {
      const Vec a = simd::set1(factors[g * kStride]), b = simd::set1(factors[g * kStride + 1]);
#pragma GCC unroll 4
      for (int j = 0; j < NV; ++j) {
        sum[g][j] = simd::fma(b, second[j], simd::fma(a, first[j], sum[g][j]));
      }
    }
  }
}

template <int kLanes, int NV>
[[gnu::always_inline]] inline void clear(Vec (&sum)[kLanes][NV]) {
#pragma GCC unroll 64
  for (int i = 0; i < kLanes * NV; ++i) (&sum[0][0])[i] = simd::zero();
}

// sum += products of `count` pairs with their factors, which are kNext apart.
template <int kStride, int kNext, typename O, int kLanes, int NV, typename Pairs>
[[gnu::always_inline]] inline void add_pairs(
    const Pairs& pairs, int64_t count, const O* factors, const Ahead& ahead,
    Vec (&sum)[kLanes][NV]) {
  // few lanes are few chains of dependent additions; two sums each keep the units busy
  constexpr int kChains = kLanes <= 4 && kWidth == 16 ? 2 : 1;
  // sums of sums: adding up all of a long row in one chain would cost float32 its last digits
  constexpr bool kBlocks = std::is_same_v<O, float>;
  constexpr int64_t kBlock = 8;
  const auto add_pair = [&](int64_t p, Vec (&target)[kLanes][NV]) __attribute__((always_inline)) {
    Words words[NV];
    ahead.fetch(p);
    pairs.read(p, words);
    add_products<kStride>(words, factors + kNext * p, target);
  };
  const auto add_to_sum = [&](const Vec (&part)[kLanes][NV]) __attribute__((always_inline)) {
#pragma GCC unroll 64
    for (int i = 0; i < kLanes * NV; ++i) {
      (&sum[0][0])[i] = simd::add((&sum[0][0])[i], (&part[0][0])[i]);
    }
  };
  int64_t p = 0;
  if constexpr (kBlocks) {
    while (p < count) {
      Vec part[kLanes][NV];
      clear(part);
      for (const int64_t end = std::min(p + kBlock, count); p < end; ++p) add_pair(p, part);
      add_to_sum(part);
    }
    return;
  }
  if constexpr (kChains == 2) {
    Vec part[kLanes][NV];
    clear(part);
    for (; p + 2 <= count; p += 2) {
      add_pair(p, sum);
      add_pair(p + 1, part);
    }
    add_to_sum(part);
  }
  for (; p < count; ++p) add_pair(p, sum);
}

// The scales and the bias of the rows of a tile; 0 past the valid rows.
struct RowScales {
  alignas(64) float key_rms[Plan::kMaxTile];
  alignas(64) float key_max[Plan::kMaxTile];
  alignas(64) float value_rms[Plan::kMaxTile];
  alignas(64) float value_max[Plan::kMaxTile];
  alignas(64) float bias[Plan::kMaxTile];

  void load(const Plan& plan, const uint8_t* cell, int64_t first, int64_t valid) {
    const CodeLayout& layout = plan.layout;
    const auto plane = [&](int index, float* target) {
      const int64_t size = round_up(valid, kWindow);
      if (index < 0) {
        std::fill_n(target, size, 0.0f);
        return;
      }
      alignas(64) c10::Half raw[Plan::kMaxTile];
      std::memcpy(raw, cell + 2 * (index * plan.rows + first), 2 * valid);
      std::fill_n(raw + valid, size - valid, c10::Half(0.0f));
      for (int64_t i = 0; i < size; i += kWidth) simd::store(target + i, simd::load(raw + i));
    };
    plane(layout.key.rms, key_rms);
    plane(layout.key.max, key_max);
    plane(layout.value.rms, value_rms);
    plane(layout.value.max, value_max);
    plane(layout.bias, bias);
  }
};

// What is common to the tiles of an item. Folded queries and weights are multiplied as O.
template <typename O>
struct Lanes {
  const Plan* plan;
  const Levels* levels;
  // folded and scaled: of every part of the lanes that is treated at once, for each pair of
  // channels, the two factors of each lane
  const O* query;
  const float* constants;  // of the logits, [lanes]
  float* sums;             // [lanes, value_width]
  float* maxima;           // [lanes]
  float* denominators;     // [lanes]
};

// Some rows of a cell.
struct Tile {
  const uint8_t* cell;
  int64_t first, valid;  // rows; the first is a multiple of kWindow
  const uint32_t* words;  // decoded keys or values, where they are decoded beforehand
};

// Weights of the lanes for the rows of a tile, times the scales of the values.
template <typename O>
struct Weights {
  alignas(64) O narrow[kItemLanes * kTileStride];
  alignas(64) O wide[kItemLanes * kTileStride];
  alignas(64) float corrections[kItemLanes];  // of what was summed before this tile
};

// Logits of kLanes lanes for NV * kWidth rows of a tile from `row` on.
// Not inlined: on its own, the compiler keeps the whole inner loop in registers.
template <typename O, int kLanes, int NV>
[[gnu::noinline]] void score_rows(
    const Tile& tile, int64_t row, const RowScales& scales, const Lanes<O>& lanes, int lane,
    const Ahead& ahead, float* scores) {
  const Plan& plan = *lanes.plan;
  const O* query = lanes.query + lane * plan.key_width;
#pragma GCC unroll 4
  for (int j = 0; j < NV; ++j) {
    const Vec bias = simd::load(scales.bias + row + j * kWidth);
#pragma GCC unroll 12
    for (int g = 0; g < kLanes; ++g) {
      simd::store(
          scores + g * kTileStride + row + j * kWidth,
          simd::add(bias, simd::set1(lanes.constants[lane + g])));
    }
  }
  Vec sum[kLanes][NV];
  const auto add = [&](const float* factors) __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) {
      const Vec factor = simd::load(factors + row + j * kWidth);
#pragma GCC unroll 12
      for (int g = 0; g < kLanes; ++g) {
        float* target = scores + g * kTileStride + row + j * kWidth;
        simd::store(target, simd::fma(sum[g][j], factor, simd::load(target)));
      }
    }
  };
  const int64_t wide = plan.key_starts[1] / 2, all = plan.key_starts[kNumWidths] / 2;
#if defined(KVCOMPRESS_BYTE_SHUFFLE)
  const auto windows = [&](int k) {
    return plan.key_windows[k].data() + (tile.first + row) / kWindow;
  };
  const auto multiply = [&]<Reach kReach>(std::integral_constant<Reach, kReach>, int k)
      __attribute__((always_inline)) {
    // an odd class ends with a pair whose second plane is whatever follows; its factor is 0
    const int64_t start = plan.key_starts[k] / 2, plane = run_bytes(plan.rows, kCodeWidths[k]);
    const PackedPairs<kReach, NV> pairs(
        tile.cell + plan.key_bytes[k], 2 * plane, plane, windows(k), *lanes.levels);
    add_pairs<2, 2 * kLanes>(
        pairs, plan.key_starts[k + 1] / 2 - start, query + 2 * kLanes * start,
        ahead.from(64 * start), sum);
  };
  if (wide > 0) {
    clear(sum);
    multiply(std::integral_constant<Reach, Reach::kWide>{}, 0);
    add(scales.key_max);
  }
  clear(sum);
  for (int k = 1; k < kNumWidths; ++k) {
    if (plan.layout.key.counts[k] == 0) continue;
    if (reach_of<NV>(windows(k)) == Reach::kWhole) {
      multiply(std::integral_constant<Reach, Reach::kWhole>{}, k);
    } else {
      multiply(std::integral_constant<Reach, Reach::kPart>{}, k);
    }
  }
  if (all > wide) add(scales.key_rms);
#else
  const auto multiply = [&](int64_t begin, int64_t end) __attribute__((always_inline)) {
    clear(sum);
    const DecodedPairs<NV> pairs(tile.words + begin * plan.tile + row, plan.tile);
    add_pairs<2, 2 * kLanes>(
        pairs, end - begin, query + 2 * kLanes * begin, ahead.from(64 * begin), sum);
  };
  if (wide > 0) {
    multiply(0, wide);
    add(scales.key_max);
  }
  if (all > wide) {
    multiply(wide, all);
    add(scales.key_rms);
  }
#endif
}

// Logits, maxima and weights of kLanes lanes for the rows of a tile.
template <typename O, int kLanes>
void weigh_rows(
    const Tile& tile, const RowScales& scales, const Lanes<O>& lanes, int lane, const Ahead& ahead,
    Weights<O>& weights) {
  alignas(64) float scores[kLanes * kTileStride];
  const int64_t size = round_up(tile.valid, kWidth);
  int64_t row = 0;
  for (; row + kWidth < size; row += 2 * kWidth) {
    const Ahead part = ahead.from(row / (2 * kWidth) * 32 * lanes.plan->key_width);
    score_rows<O, kLanes, 2>(tile, row, scales, lanes, lane, part, scores);
  }
  if (row < size) {
    const Ahead part = ahead.from(row / (2 * kWidth) * 32 * lanes.plan->key_width);
    score_rows<O, kLanes, 1>(tile, row, scales, lanes, lane, part, scores);
  }
  const bool has_wide = lanes.plan->layout.value.max >= 0;
  const Vec masked = simd::set1(-std::numeric_limits<float>::infinity());
  const int64_t last = size - kWidth;
  for (int g = 0; g < kLanes; ++g) {
    float* s = scores + g * kTileStride;
    Vec top = simd::keep_first(
        simd::load(s + last), static_cast<int>(tile.valid - last), masked);
    simd::store(s + last, top);
    for (int64_t n = 0; n < last; n += kWidth) top = simd::max(top, simd::load(s + n));
    const float old_max = lanes.maxima[lane + g];
    const float new_max = std::max(old_max, simd::reduce_max(top));
    const Vec shift = simd::set1(new_max);
    Vec total = simd::zero();
    O* narrow = weights.narrow + (lane + g) * kTileStride;
    O* wide = weights.wide + (lane + g) * kTileStride;
    for (int64_t n = 0; n < size; n += kWidth) {
      const Vec p = simd::exp_nonpositive(simd::sub(simd::load(s + n), shift));
      total = simd::add(total, p);
      simd::store(narrow + n, simd::mul(p, simd::load(scales.value_rms + n)));
      if (has_wide) simd::store(wide + n, simd::mul(p, simd::load(scales.value_max + n)));
    }
    const float correction = simd::exp_nonpositive(old_max - new_max);
    weights.corrections[lane + g] = correction;
    lanes.maxima[lane + g] = new_max;
    lanes.denominators[lane + g] =
        lanes.denominators[lane + g] * correction + simd::reduce_add(total);
  }
}

// sums[g, :NV * kWidth] = sums * correction[g] + weights[g] @ levels, over pairs of rows.
template <typename O, int kLanes, int NV, typename Pairs>
[[gnu::noinline]] void add_values(
    const Pairs& source, int64_t num_pairs, const O* weights, const float* corrections,
    int64_t width, float* sums) {
  const Pairs pairs = source;  // in registers
  Vec sum[kLanes][NV];
  clear(sum);
  add_pairs<kTileStride, 2>(pairs, num_pairs, weights, Ahead{}, sum);
#pragma GCC unroll 12
  for (int g = 0; g < kLanes; ++g) {
    const Vec factor = simd::set1(corrections[g]);
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) {
      float* target = sums + g * width + j * kWidth;
      simd::store(target, simd::fma(simd::load(target), factor, sum[g][j]));
    }
  }
}

// Adds the values of a tile to the sums of kLanes lanes.
template <typename O, int kLanes>
void sum_rows(const Tile& tile, const Lanes<O>& lanes, int lane, const Weights<O>& weights) {
  const Plan& plan = *lanes.plan;
  const int64_t num_pairs = (tile.valid + 1) / 2, width = plan.value_width;
  const float* corrections = weights.corrections + lane;
  for (int k = 0; k < kNumWidths; ++k) {
    const O* factors = (k == 0 ? weights.wide : weights.narrow) + lane * kTileStride;
    int64_t channel = plan.value_starts[k];
    float* sums = lanes.sums + lane * width;
#if defined(KVCOMPRESS_BYTE_SHUFFLE)
    const int64_t row = plan.layout.value_bytes;
    const uint8_t* base = tile.cell + plan.value_bytes[k] + tile.first * row;
    const Window* window = plan.value_windows[k].data();
    const auto add_as = [&]<Reach kReach, int NV>(
        std::integral_constant<Reach, kReach>, std::integral_constant<int, NV>)
        __attribute__((always_inline)) {
      const PackedPairs<kReach, NV> pairs(base, 2 * row, row, window, *lanes.levels);
      add_values<O, kLanes, NV>(pairs, num_pairs, factors, corrections, width, sums + channel);
    };
    const auto add = [&]<int NV>(std::integral_constant<int, NV> count)
        __attribute__((always_inline)) {
      switch (reach_of<NV>(window)) {
        case Reach::kWide:
          add_as(std::integral_constant<Reach, Reach::kWide>{}, count);
          break;
        case Reach::kWhole:
          add_as(std::integral_constant<Reach, Reach::kWhole>{}, count);
          break;
        case Reach::kPart:
          add_as(std::integral_constant<Reach, Reach::kPart>{}, count);
          break;
      }
      channel += NV * kWidth;
      window += NV;
    };
    const int64_t end = plan.value_starts[k + 1];
    while (channel + 2 * kWidth <= end) add(std::integral_constant<int, 2>{});
    if (channel < end) add(std::integral_constant<int, 1>{});
#else
    for (; channel < plan.value_starts[k + 1]; channel += 16) {
      constexpr int kVecs = 16 / kWidth;
      add_values<O, kLanes, kVecs>(
          DecodedPairs<kVecs>(tile.words + channel, width), num_pairs, factors, corrections, width,
          sums + channel);
    }
#endif
  }
}

// out[g, :NV * kWidth] = sum over k of in[g][k] * matrix[k, :], for kLanes vectors.
template <typename M, int kLanes, int NV>
[[gnu::always_inline]] inline void multiply(
    const float* const* in, int64_t depth, const M* matrix, int64_t stride,
    Vec (&sum)[kLanes][NV]) {
#pragma GCC unroll 64
  for (int i = 0; i < kLanes * NV; ++i) (&sum[0][0])[i] = simd::zero();
  for (int64_t k = 0; k < depth; ++k) {
    Vec row[NV];
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) row[j] = simd::load(matrix + k * stride + j * kWidth);
#pragma GCC unroll 12
    for (int g = 0; g < kLanes; ++g) {
      const Vec factor = simd::set1(in[g][k]);
#pragma GCC unroll 4
      for (int j = 0; j < NV; ++j) sum[g][j] = simd::fma(factor, row[j], sum[g][j]);
    }
  }
}

}  // namespace
}  // namespace kvcompress
