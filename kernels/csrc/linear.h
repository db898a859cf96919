// y = x W^T: tiles of some rows and one panel in registers.
//
// An output element is one lane of one accumulator, to which the K steps are added from front to
// back; rows, panels and calls only choose which elements lie side by side in registers. Hence law:
// no element knows what it was computed with.
#pragma once

#include "kernels.h"
#include "linear_dot.h"
#include "linear_epilogue.h"
#include "simd.h"

namespace quire::QUIRE_ISA {

inline constexpr int64_t kStepBytes = 4 * kPanel;  // of a panel
inline constexpr int kVectors = kPanel / kWide;
inline constexpr int kTileRows = kWide == 16 ? 12 : kWide == 8 ? 3 : 2;

struct Tile {
  const char* x;     // its first row
  int64_t x_stride;  // bytes
  const char* panel;
  int64_t num_steps;
};

// The sums of `rows` rows and the columns of a panel.
template <WeightKind kind, int rows>
inline void accumulate(const Tile& tile, typename Dot<kind>::Sum (&sums)[rows][kVectors]) {
  const char* weights = tile.panel;
  for (int64_t step = 0; step < tile.num_steps; ++step, weights += kStepBytes) {
    vu32 w[kVectors];
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) w[i] = load<vu32>(weights + i * sizeof(vu32));
#pragma GCC unroll 16
    for (int row = 0; row < rows; ++row) {
      const vu32 x = load<uint32_t>(tile.x + row * tile.x_stride + 4 * step) - vu32{};
#pragma GCC unroll 8
      for (int i = 0; i < kVectors; ++i) sums[row][i] = Dot<kind>::step(sums[row][i], x, w[i]);
    }
  }
}

template <WeightKind kind, int rows>
inline void compute_tile(const LinearCall& call, const Tile& tile, int64_t row, int64_t panel) {
  using Sums = typename Dot<kind>::Lanes;
  typename Dot<kind>::Sum sums[rows][kVectors] = {};
  accumulate<kind, rows>(tile, sums);
  for (int i = 0; i < rows; ++i) {
    Sums halves[2];
    std::memcpy(halves, sums[i], sizeof halves);
    finish(call, row + i, panel, scaled(call, row + i, panel * kPanel, halves[0]),
           scaled(call, row + i, panel * kPanel + kLanes, halves[1]));
  }
}

// As above, for a number of rows that is known only now.
template <WeightKind kind, int rows>
inline void compute_rows(const LinearCall& call, const Tile& tile, int64_t row, int64_t panel,
                         int64_t num_rows) {
  if (num_rows == rows) return compute_tile<kind, rows>(call, tile, row, panel);
  if constexpr (rows > 1) compute_rows<kind, rows - 1>(call, tile, row, panel, num_rows);
}

template <WeightKind kind>
inline void linear_of(const LinearCall& call, int64_t panel_begin, int64_t panel_end,
                      int64_t row_begin, int64_t row_end) {
  const int64_t group = group_of(kind);
  const int64_t num_steps = (call.weights->k + group - 1) / group;
  const int64_t x_stride = call.x.stride * 4 / group;
  for (int64_t panel = panel_begin; panel < panel_end; ++panel) {
    const char* weights =
        static_cast<const char*>(call.weights->panels) + panel * num_steps * kStepBytes;
    for (int64_t row = row_begin; row < row_end; row += kTileRows) {
      const Tile tile = {static_cast<const char*>(call.x.data) + row * x_stride, x_stride, weights,
                         num_steps};
      compute_rows<kind, kTileRows>(call, tile, row, panel,
                                    row_end - row < kTileRows ? row_end - row : kTileRows);
    }
  }
}

inline void linear(const LinearCall& call, int64_t panel_begin, int64_t panel_end,
                   int64_t row_begin, int64_t row_end) {
  if (call.epilogue == Epilogue::argmax) no_best(call, panel_begin, row_begin, row_end);
  switch (call.weights->kind) {
    case WeightKind::f32:
      return linear_of<WeightKind::f32>(call, panel_begin, panel_end, row_begin, row_end);
    case WeightKind::bf16:
      return linear_of<WeightKind::bf16>(call, panel_begin, panel_end, row_begin, row_end);
    case WeightKind::int8:
      return linear_of<WeightKind::int8>(call, panel_begin, panel_end, row_begin, row_end);
  }
}

}  // namespace quire::QUIRE_ISA
