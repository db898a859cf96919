// y = x W^T by tiles, for bf16 and quantized weights.
//
// Panels of bf16 are the `b` of the tiles as they are; those of quantized weights are unpacked to
// bf16 first, 1 KiB of K at a time. K is taken 64 bytes at a time from front to back; the last part
// is padded with zeros. An output's bits depend on nothing but its row, its column and K: sums that
// are stored and loaded again between two parts of K stay the same.
//
// Up to 32 rows read each panel once, from front to back, and wait for memory. Of more rows, a
// block of 256 rows and 256 columns keeps its sums in L2 and takes K 1 KiB at a time, so that a
// panel's part (32 KiB) stays in L1 for all rows, and the rows' part (256 KiB) in L2 for all
// panels.
#pragma once

#include "isa/tiles.h"
#include "kernels.h"
#include "linear/epilogue.h"
#include "linear/unpack.h"

namespace quire::QUIRE_ISA {

inline constexpr int64_t kBlockedRows = 256;
inline constexpr int64_t kBlockedPanels = 8;
inline constexpr int64_t kDepth = 1024;                        // bytes of K of each row
inline constexpr int64_t kTiledFarBytes = 6 * 1024;            // how far ahead few rows fetch
inline constexpr int64_t kPanelStep = 4 * kPanel;              // bytes of a panel's step
inline constexpr int64_t kTileStep = kTileSteps * kPanelStep;  // bytes of a panel in a product

// Lines to fetch beside the products: `step` bytes with each of them.
struct Ahead {
  const char* at;
  int64_t step;
  bool is_far;  // into L2, not L1

  void fetch() {
    for (int64_t i = 0; i < step; i += 64)
      if (is_far)
        __builtin_prefetch(at + i, 0, 2);
      else
        __builtin_prefetch(at + i);
    at += step;
  }
};

template <WeightKind kind>
class TiledLinear {
 public:
  TiledLinear(const LinearCall& call, int64_t panel_end)
      : call_(call),
        panels_(static_cast<const char*>(call.weights->panels)),
        x_(static_cast<const char*>(call.x.data)),
        x_stride_(call.x.stride * static_cast<int64_t>(sizeof(bf16))),
        num_bytes_(4 * panel_steps(WeightKind::bf16, call.weights->k, 0)),
        panel_end_(panel_end) {}

  // Computes up to kBlockedPanels panels with up to kBlockedRows rows.
  void compute(int64_t panel, int64_t end, int64_t row, int64_t row_end) {
    const bool is_few = row_end - row <= kTileRows;
    const int64_t depth = is_few && !is_quantized(kind) ? num_bytes_ : kDepth;
    for (int64_t begin = 0; begin < num_bytes_; begin += depth) {
      const Part part = {begin, begin + depth < num_bytes_ ? begin + depth : num_bytes_};
      for (int64_t i = panel; i < end; ++i) {
        Ahead ahead = {};
        if constexpr (is_quantized(kind))
          unpack<kind>(*call_.weights, i, begin / 2, (part.end + 1) / 2, unpacked_);
        else
          ahead = is_few ? Ahead{weights(i, 0) + kTiledFarBytes, kTileStep, false}
                         : next_part(part, i, panel, end, row_end - row);
        for (int64_t at = row; at < row_end; at += kTileRows)
          compute_tile(part, i, at, at + kTileRows < row_end ? at + kTileRows : row_end, ahead,
                       sums_[i - panel] + (at - row));
      }
    }
  }

 private:
  static constexpr int64_t kSumsStride = 2 * sizeof(f32x16);

  struct Part {  // of K, in bytes of a row
    int64_t begin, end;
  };

  const char* weights(int64_t panel, int64_t k) const {
    return panels_ + panel * (num_bytes_ * kPanel) + k * kPanel;
  }

  // The steps of a panel in bf16 from byte `k` of a row on.
  const char* steps(int64_t panel, Part part, int64_t k) const {
    if constexpr (is_quantized(kind)) return unpacked_ + (k - part.begin) * kPanel;
    return weights(panel, k);
  }

  // What will be read after the part of this panel: the next panel's, or the next part of the first
  // one, or the panel of the next block.
  Ahead next_part(Part part, int64_t panel, int64_t first, int64_t end, int64_t num_rows) const {
    const int64_t num_products = (num_rows + kTileRows - 1) / kTileRows * products(part);
    const int64_t num_lines = (products(part) * (kTileStep / 64) + num_products - 1) / num_products;
    if (panel + 1 < end) return {weights(panel + 1, part.begin), 64 * num_lines, true};
    if (part.end < num_bytes_) return {weights(first, part.end), 64 * num_lines, true};
    return {weights(panel + 1, 0), panel + 1 < panel_end_ ? 64 * num_lines : 0, true};
  }
  static int64_t products(Part part) {
    return (part.end - part.begin + kTileBytes - 1) / kTileBytes;
  }

  // Adds a part of K to the sums of up to 32 rows of a panel; the last part finishes them.
  void compute_tile(Part part, int64_t panel, int64_t row, int64_t row_end, Ahead& ahead,
                    f32x16 (*sums)[2]) {
    const int num_rows = static_cast<int>(row_end - row);
    const bool is_last = part.end == num_bytes_;
    const char* x = x_ + row * x_stride_;
    tiles_.shape(num_rows);
    if (part.begin == 0)
      tiles_.clear();
    else
      tiles_.load(sums, kSumsStride);
    if (is_last && ahead.is_far) fetch_outputs(call_, row, num_rows, panel);
    int64_t k = part.begin;
    for (; k + kTileBytes <= part.end; k += kTileBytes) {
      ahead.fetch();
      tiles_.multiply(x + k, x_stride_, steps(panel, part, k), kPanelStep);
    }
    if (k < part.end) multiply_rest(x + k, steps(panel, part, k), num_rows, part.end - k);
    tiles_.store(sums, kSumsStride);
    if (is_last) finish<kind>(call_, row, num_rows, panel, sums);
  }

  // The end of K, where less than 64 bytes of a row, and of a panel's steps, are left.
  void multiply_rest(const char* x, const char* weights, int num_rows, int64_t num_bytes) {
    alignas(64) char rows[kTileRows][kTileBytes] = {}, steps[kTileStep] = {};
    for (int row = 0; row < num_rows; ++row) std::memcpy(rows[row], x + row * x_stride_, num_bytes);
    std::memcpy(steps, weights, num_bytes * kPanel);
    tiles_.multiply(rows, kTileBytes, steps, kPanelStep);
  }

  const LinearCall& call_;
  const char* panels_;
  const char* x_;
  const int64_t x_stride_;   // bytes
  const int64_t num_bytes_;  // of K of a row, and 1 / 32 of a panel's
  const int64_t panel_end_;  // of the call
  Tiles tiles_;
  f32x16 sums_[kBlockedPanels][kBlockedRows][2];  // 256 KiB of the caller's stack
  // A panel's part, of quantized weights only.
  alignas(64) char unpacked_[is_quantized(kind) ? kDepth * kPanel : 64];
};

template <WeightKind kind>
inline void compute_tiled(const LinearCall& call, int64_t panel_begin, int64_t panel_end,
                          int64_t row_begin, int64_t row_end) {
  TiledLinear<kind> linear(call, panel_end);
  for (int64_t row = row_begin; row < row_end; row += kBlockedRows) {
    const int64_t last_row = row + kBlockedRows < row_end ? row + kBlockedRows : row_end;
    for (int64_t panel = panel_begin; panel < panel_end; panel += kBlockedPanels) {
      const int64_t last = panel + kBlockedPanels < panel_end ? panel + kBlockedPanels : panel_end;
      linear.compute(panel, last, row, last_row);
    }
  }
}

}  // namespace quire::QUIRE_ISA
