// y = x W^T by tiles, for bf16 and quantized weights.
//
// Panels of bf16 are the `b` of the tiles as they are; quantized panels are unpacked to
// bf16 first, a part of K at a time. K is taken 64 bytes at a time from front to back; the last
// part is padded with zeros. An output's bits depend on nothing but its row, its column and K: sums
// that are stored and loaded again between two parts of K stay the same.
//
// Up to 32 rows read each panel once, from front to back, and wait for memory. With more rows,
// a product takes one operand from L1, a panel's part of K, and the other from L2, a block's rows:
// both from L2 would take longer than the product. Sums wait in L2 for the next part. Outputs that
// are too many for L2 are written line by line past the caches, since a write to a line that is not
// there would first read it.
#pragma once

#include "isa/tiles.h"
#include "kernels.h"
#include "linear/epilogue.h"
#include "linear/unpack.h"

namespace quire::QUIRE_ISA {

// How far ahead few rows fetch their weights. Up to 16 rows fetch them into L1. More rows read
// their inputs from L2 meanwhile, so they fetch weights into L2, which may have more lines on their
// way, and from there into L1.
inline constexpr int64_t kTiledAheadBytes = 6 * 1024;
inline constexpr int64_t kTiledFarBytes = 12 * 1024, kTiledNearBytes = 2 * 1024;
inline constexpr int64_t kPanelStep = 4 * kPanel;              // bytes of a panel's step
inline constexpr int64_t kTileStep = kTileSteps * kPanelStep;  // bytes of a panel in a product
inline constexpr int64_t kPair = 2;  // panels whose gated outputs in bf16 fill a line

// How a call is divided.
struct TiledBlocks {
  static constexpr int64_t kMostRows = 512, kMostPanels = 4, kUnit = 256;

  int64_t rows, panels;  // of a block
  int64_t depth;         // bytes of K of a row in a part of K: whole groups of quantized weights

  // Few rows: quantized weights are unpacked into L1. More: a panel's part stays in L1, beside the
  // rows that pass.
  static constexpr int64_t most_depth(WeightKind kind, int64_t num_rows) {
    if (num_rows <= kTileRows) return is_quantized(kind) ? 1024 : INT64_MAX / 2;
    return num_rows <= 2 * kTileRows ? 1024 : 512;
  }

  TiledBlocks(WeightKind kind, int64_t num_bytes, int64_t num_rows) {
    const int64_t num_parts = 1 + (num_bytes - 1) / most_depth(kind, num_rows);
    depth = (num_bytes + num_parts * kUnit - 1) / (num_parts * kUnit) * kUnit;
    rows = num_rows <= kTileRows ? kTileRows : kMostRows;
    panels = num_rows <= kTileRows ? 1 : num_rows <= kMostRows / 2 ? kPair : kMostPanels;
  }
};

// Lines to fetch beside the products: `step` bytes with each of them.
struct Ahead {
  const char* at;
  int64_t step;
  bool is_far;         // into L2, not L1
  int64_t behind = 0;  // bytes: the lines so far behind them go from L2 into L1; 0: none

  void fetch() {
    for (int64_t i = 0; i < step; i += 64) {
      if (is_far)
        __builtin_prefetch(at + i, 0, 2);
      else
        __builtin_prefetch(at + i);
      if (behind > 0) __builtin_prefetch(at + i - behind);
    }
    at += step;
  }
};

template <WeightKind kind>
class TiledLinear {
 public:
  TiledLinear(const LinearCall& call, int64_t panel_end, int64_t num_rows)
      : call_(call),
        panels_(static_cast<const char*>(call.weights->panels)),
        x_(static_cast<const char*>(call.x.data)),
        x_stride_(call.x.stride * static_cast<int64_t>(sizeof(bf16))),
        num_bytes_(4 * panel_steps(WeightKind::bf16, call.weights->k, 0)),
        panel_end_(panel_end),
        blocks_(kind, num_bytes_, num_rows),
        streams_(streams(num_rows)) {}
  ~TiledLinear() {
    if (streams_) _mm_sfence();  // other threads read what was streamed
  }

  void compute(int64_t panel_begin, int64_t row_begin, int64_t row_end) {
    for (int64_t row = row_begin; row < row_end; row += blocks_.rows)
      for (int64_t panel = panel_begin; panel < panel_end_; panel += blocks_.panels)
        compute_block(panel, least(panel + blocks_.panels, panel_end_), row,
                      least(row + blocks_.rows, row_end));
  }

 private:
  static constexpr int64_t kSumsStride = 2 * sizeof(f32x16);
  static constexpr int64_t kStreamedBytes = 2 << 20;                     // L2
  static constexpr int64_t kMostBytes = kPair * kPanel * sizeof(float);  // of a row of a pair

  struct Part {  // of K, in bytes of a row
    int64_t begin, end;
  };

  static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

  void compute_block(int64_t panel, int64_t end, int64_t row, int64_t row_end) {
    // Sums of one tile of rows stay in the tiles, whatever happens between two parts of K.
    const bool is_few = blocks_.panels == 1;
    for (int64_t begin = 0; begin < num_bytes_; begin += blocks_.depth) {
      const Part part = {begin, least(begin + blocks_.depth, num_bytes_)};
      for (int64_t i = panel; i < end; ++i) {
        if constexpr (is_quantized(kind))
          unpack<kind>(*call_.weights, i, begin / 2, (part.end + 1) / 2, unpacked_);
        Ahead ahead = {};
        if constexpr (!is_quantized(kind))
          ahead =
              is_few ? next_steps(i, row_end - row) : next_part(part, i, panel, end, row_end - row);
        const int64_t in_pair = (i - panel) % kPair;
        for (int64_t at = row; at < row_end; at += kTileRows) {
          const int num_rows = static_cast<int>(least(kTileRows, row_end - at));
          f32x16(*sums)[2] = sums_ + (i - panel) * blocks_.rows + (at - row);
          add_part(part, i, at, num_rows, is_few, ahead, sums);
          if (part.end == num_bytes_ && (in_pair + 1 == kPair || i + 1 == end))
            finish_pair(i - in_pair, in_pair + 1, at, num_rows, sums - in_pair * blocks_.rows);
        }
      }
    }
  }

  const char* weights(int64_t panel, int64_t k) const {
    return panels_ + panel * (num_bytes_ * kPanel) + k * kPanel;
  }

  // The steps of a panel in bf16 from byte `k` of a row on.
  const char* steps(int64_t panel, Part part, int64_t k) const {
    if constexpr (is_quantized(kind)) return unpacked_ + (k - part.begin) * kPanel;
    return weights(panel, k);
  }

  // The bytes that few rows read soon after those of a product.
  Ahead next_steps(int64_t panel, int64_t num_rows) const {
    if (num_rows <= kRegisterRows) return {weights(panel, 0) + kTiledAheadBytes, kTileStep, false};
    return {weights(panel, 0) + kTiledFarBytes, kTileStep, true, kTiledFarBytes - kTiledNearBytes};
  }

  // The bytes that are read after the part of this panel: the same part of the next panel, the next
  // part of the first panel, or the first panel of the next block.
  Ahead next_part(Part part, int64_t panel, int64_t first, int64_t end, int64_t num_rows) const {
    const int64_t num_tiles = (num_rows + kTileRows - 1) / kTileRows;
    const int64_t step = (kTileStep / 64 + num_tiles - 1) / num_tiles * 64;  // of each product
    if (panel + 1 < end) return {weights(panel + 1, part.begin), step, true};
    if (part.end < num_bytes_) return {weights(first, part.end), step, true};
    return {weights(end, 0), end < panel_end_ ? step : 0, true};
  }

  // Adds a part of K to the sums of up to 32 rows of a panel.
  void add_part(Part part, int64_t panel, int64_t row, int num_rows, bool is_few, Ahead& ahead,
                f32x16 (*sums)[2]) {
    const bool is_last = part.end == num_bytes_;
    const char* x = x_ + row * x_stride_;
    tiles_.shape(num_rows);
    if (part.begin == 0)
      tiles_.clear();
    else if (!is_few)
      tiles_.load(sums, kSumsStride);
    if (is_last && !is_few && !streams_) fetch_outputs(call_, row, num_rows, panel);
    int64_t k = part.begin;
    for (; k + kTileBytes <= part.end; k += kTileBytes) {
      ahead.fetch();
      tiles_.multiply(x + k, x_stride_, steps(panel, part, k), kPanelStep);
    }
    if (k < part.end) multiply_rest(x + k, steps(panel, part, k), num_rows, part.end - k);
    if (is_last || !is_few) tiles_.store(sums, kSumsStride);
  }

  // The end of K, where less than 64 bytes of a row, and of a panel's steps, are left.
  void multiply_rest(const char* x, const char* weights, int num_rows, int64_t num_bytes) {
    alignas(64) char rows[kTileRows][kTileBytes] = {}, steps[kTileStep] = {};
    for (int row = 0; row < num_rows; ++row) std::memcpy(rows[row], x + row * x_stride_, num_bytes);
    std::memcpy(steps, weights, num_bytes * kPanel);
    tiles_.multiply(rows, kTileBytes, steps, kPanelStep);
  }

  // Whether outputs are written past the caches.
  bool streams(int64_t num_rows) const {
    const int64_t stride = call_.out_stride * static_cast<int64_t>(size_of(call_.out_dtype));
    return call_.epilogue != Epilogue::add && call_.epilogue != Epilogue::best_or_store &&
           num_rows * stride > kStreamedBytes && stride % 64 == 0 &&
           reinterpret_cast<uintptr_t>(call_.out) % 64 == 0;
  }

  void finish_pair(int64_t panel, int64_t num_panels, int64_t row, int num_rows,
                   const f32x16 (*sums)[2]) {
    LinearCall call = call_;
    const auto size = static_cast<int64_t>(size_of(call.out_dtype));
    const int64_t width = (is_gated(call.epilogue) ? kLanes : kPanel) * size;  // of a panel
    const bool is_whole = num_panels == kPair && (panel + kPair) * kPanel <= call.weights->n;
    const int64_t from = row * call.out_stride * size + panel * width;
    if (streams_ && is_whole) {  // the place in `staged_` of the call's first output
      call.out_stride = kMostBytes / size;
      call.out = staged_ - row * kMostBytes - panel * width;
    }
    for (int64_t i = 0; i < num_panels; ++i)
      finish<kind>(call, row, num_rows, panel + i, sums + i * blocks_.rows);
    if (!streams_ || !is_whole) return;
    char* to = static_cast<char*>(call_.out) + from;
    for (int i = 0; i < num_rows; ++i, to += call_.out_stride * size)
      for (int64_t at = 0; at < kPair * width; at += sizeof(__m256i))
        _mm256_stream_si256(reinterpret_cast<__m256i*>(to + at),
                            load<__m256i>(staged_ + i * kMostBytes + at));
  }

  const LinearCall& call_;
  const char* panels_;
  const char* x_;
  const int64_t x_stride_;   // bytes
  const int64_t num_bytes_;  // of K of a row, and 1 / 32 of a panel's
  const int64_t panel_end_;  // of the call
  const TiledBlocks blocks_;
  const bool streams_;
  Tiles tiles_;
  f32x16 sums_[TiledBlocks::kMostRows * TiledBlocks::kMostPanels]
              [2];                                   // 256 KiB of the caller's stack
  alignas(64) char staged_[kTileRows * kMostBytes];  // outputs of a pair, on their way to memory
  // A panel's part of K, of quantized weights only.
  alignas(64) char unpacked_[is_quantized(kind) ? TiledBlocks::most_depth(kind, 1) * kPanel : 64];
};

template <WeightKind kind>
inline void compute_tiled(const LinearCall& call, int64_t panel_begin, int64_t panel_end,
                          int64_t row_begin, int64_t row_end) {
  TiledLinear<kind>(call, panel_end, row_end - row_begin).compute(panel_begin, row_begin, row_end);
}

}  // namespace quire::QUIRE_ISA
