// Sizes and offsets of coded rows in a cell; the layout is described in code_format.py.
#pragma once

#include <cstdint>

namespace kvcompress {

inline constexpr int kNumWidths = 4;
inline constexpr int kCodeWidths[kNumWidths] = {8, 4, 2, 1};
inline constexpr int64_t kRowStep = 8;

// Bytes of a run of codes.
inline int64_t run_bytes(int64_t num_codes, int width) { return (num_codes * width + 7) / 8; }

// One side of a row, the key or the value.
struct CodeSide {
  int64_t counts[kNumWidths];
  int rms = -1;  // index of the scale of the channels of up to 4 bits; -1 where there are none
  int max = -1;  // likewise of the 8-bit channels

  int64_t num_channels() const { return counts[0] + num_narrow(); }
  int64_t num_narrow() const { return counts[1] + counts[2] + counts[3]; }
};

struct CodeLayout {
  CodeSide key, value;
  int bias = -1;  // index of the scale that is the bias
  int num_scales = 0;
  int64_t key_bits = 0, value_bytes = 0;

  // Key counts, value counts (both by width) and whether there is a bias: 9 numbers.
  template <typename Int>
  explicit CodeLayout(const Int* numbers) {
    for (int k = 0; k < kNumWidths; ++k) {
      key.counts[k] = numbers[k];
      value.counts[k] = numbers[kNumWidths + k];
      key_bits += key.counts[k] * kCodeWidths[k];
      value_bytes += run_bytes(value.counts[k], kCodeWidths[k]);
    }
    for (CodeSide* side : {&key, &value}) {
      if (side->num_narrow()) side->rms = num_scales++;
      if (side->counts[0]) side->max = num_scales++;
    }
    if (numbers[2 * kNumWidths]) bias = num_scales++;
  }

  int64_t row_bits() const { return 16 * num_scales + key_bits + 8 * value_bytes; }
  // Rows that fit a cell; 0 if not even kRowStep of them do.
  int64_t rows_per_cell(int64_t cell_bytes) const {
    return row_bits() ? 8 * cell_bytes / (row_bits() * kRowStep) * kRowStep : 0;
  }
  int64_t key_offset(int64_t rows) const { return 2 * num_scales * rows; }
  int64_t value_offset(int64_t rows) const { return key_offset(rows) + rows * key_bits / 8; }
};

}  // namespace kvcompress
