// y = x W^T: some rows and one panel at a time, their sums in registers.
//
// An output element is one lane of one register, to which the K steps are added from front to back.
// Rows, panels and calls only choose which elements lie side by side: hence the law that an element
// does not know what it was computed with.
//
// A panel is read from memory once and serves all rows of the call: what limits few rows is memory,
// what limits many is arithmetic. So the fetching goes on steadily beside the arithmetic: a panel's
// only tile fetches a little ahead of itself; of several tiles, each fetches a part of the next
// panel.
//
// Quantized weights are multiplied as whole numbers by inputs of 16 bits, group by group: exact, in
// any order. Bytes would not do: a few channels of a real model's states are a hundred times larger
// than the others, which bytes with one scale would round away.
//
// Tables with tiles multiply bf16 and quantized weights by them instead (linear/linear_tiles.h).
//
// See ADR 43.
#pragma once

#include "isa/dot.h"
#include "isa/simd.h"
#include "kernels.h"
#include "linear/epilogue.h"

#if defined(QUIRE_TILES)
#include "linear/linear_tiles.h"
#endif

namespace quire::QUIRE_ISA {

inline constexpr int kVectors = kPanel / kWide;  // of a panel's step

// As many rows as the register file has room for, beside a step's weights and one activation (of
// 16 registers, what has more than one operation a step may spill some).
inline constexpr int tile_rows(WeightKind kind) {
  return kWide == 16 ? 12 : is_quantized(kind) || (kWide == 8 && kind != WeightKind::f32) ? 4 : 3;
}

// As many rows of quantized weights as have room there for the sums of a group and of all groups:
// if these are in memory, each group writes them. A single tile of more rows is still
// faster than two, which both take the codes apart.
inline constexpr int grouped_rows(WeightKind kind) {
  return kWide == 16 && is_quantized(kind) ? 6 : tile_rows(kind);
}

// Up to here the loop asks for lines faster than memory has them, which keeps the CPU's own
// prefetching ahead of it at all that one core can read. Hints into L2 cost it a third of that; one
// into L1, two steps ahead, costs nothing.
inline constexpr int64_t kStreamedRows = 5;
inline constexpr int64_t kNextBytes = 256;

// Up to here a linear waits for memory and for arithmetic: what is fetched goes into L2, far ahead,
// since that may have more lines on their way than L1, and from there into L1. Behind it,
// arithmetic is what is scarce, and reads from L1 cost less.
inline constexpr int64_t kMemoryBoundRows = 18;
inline constexpr int64_t kFarBytes = 12 * 1024;
inline constexpr int64_t kNearBytes = 2 * 1024;

struct Tile {
  const char* x;        // its first row
  int64_t x_stride;     // bytes
  const float* x_sums;  // int4 only
  int64_t x_sums_stride;
  const char* panel;
  int64_t num_steps;
  const char* fetched;  // what will be needed next, `fetched_step` bytes of it each step
  int64_t fetched_step;
  bool is_far;   // into L2, not L1
  bool is_near;  // and its own panel from there into L1
};

inline void fetch(const char* line, bool is_far) {
  if (is_far)
    __builtin_prefetch(line, 0, 2);
  else
    __builtin_prefetch(line);
}

// sums[row] += the products of all K with the columns of a panel.
template <WeightKind kind, int rows>
inline void accumulate(const Tile& tile, vf32 (&sums)[rows][kVectors]) {
  const char* weights = tile.panel;
  const char* fetched = tile.fetched;
  for (int64_t step = 0; step < tile.num_steps; ++step) {
    fetch(fetched, tile.is_far);
    if (tile.fetched_step > kCacheLine) fetch(fetched + kCacheLine, tile.is_far);
    if (tile.is_near) {
      fetch(weights + kNearBytes, false);
      fetch(weights + kNearBytes + kCacheLine, false);
    }
    vu32 w[kVectors];
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) w[i] = load<vu32>(weights + i * sizeof(vu32));
#pragma GCC unroll 16
    for (int row = 0; row < rows; ++row) {
      const vu32 x = load<uint32_t>(tile.x + row * tile.x_stride + 4 * step) - vu32{};
#pragma GCC unroll 8
      for (int i = 0; i < kVectors; ++i) sums[row][i] = Dot<kind>::step(sums[row][i], x, w[i]);
    }
    weights += kStepBytes;
    fetched += tile.fetched_step;
  }
}

// The products of a group, of some vectors of columns from `codes` on, with `num_steps` steps of
// it.
template <WeightKind kind, int rows, int part>
inline void add_group(const char* codes, const char* x, int64_t x_stride, int num_steps,
                      vi32 (&dots)[rows][part]) {
  constexpr int kPairs = Codes<kind>::kPairs;
#pragma GCC unroll 1  // unrolled, GCC would first compute all products, and keep them in memory
  for (int step = 0; step < num_steps; ++step, codes += kStepBytes, x += 4 * kPairs) {
    Codes<kind> weights[part];
#pragma GCC unroll 2
    for (int j = 0; j < part; ++j) weights[j] = {load<vu32>(codes + j * sizeof(vu32))};
#pragma GCC unroll 4
    for (int i = 0; i < kPairs; ++i) {
      vi16 pairs[part];
#pragma GCC unroll 2
      for (int j = 0; j < part; ++j) pairs[j] = weights[j].pair(i);
#pragma GCC unroll 16
      for (int row = 0; row < rows; ++row) {
        const vu32 values = load<uint32_t>(x + row * x_stride + 4 * i) - vu32{};
#pragma GCC unroll 2
        for (int j = 0; j < part; ++j)
          dots[row][j] = add_pairs(dots[row][j], (vi16)values, pairs[j]);
      }
    }
  }
}

// The sums of a group are whole numbers, of some vectors of columns at a time: more would not leave
// registers for the codes. The sums over the groups are fp32: sum += scale * (dot - zero * x_sum),
// where only int4 has zero points.
template <WeightKind kind, int rows>
inline void accumulate_groups(const Tile& tile, int group, vf32 (&sums)[rows][kVectors]) {
  constexpr int kPart = kWide == 16 ? 2 : 1;
  constexpr bool has_zeros = kind == WeightKind::int4;
  const int num_steps = group / lane_values(kind);  // of a group
  const int num_groups = run_values(kind, group) / group;
  const int run_steps = 1 + num_groups * num_steps;
  const char* weights = tile.panel;
  const char* fetched = tile.fetched;
  const char* x = tile.x;
  for (int64_t run = 0; run * run_steps < tile.num_steps;
       ++run, weights += run_steps * kStepBytes) {
    for (int step = 0; step < run_steps; ++step, fetched += tile.fetched_step) {
      fetch(fetched, tile.is_far);
      if (tile.fetched_step > kCacheLine) fetch(fetched + kCacheLine, tile.is_far);
      if (tile.is_near) {
        fetch(weights + step * kStepBytes + kNearBytes, false);
        fetch(weights + step * kStepBytes + kNearBytes + kCacheLine, false);
      }
    }
    const auto* header = reinterpret_cast<const uint16_t*>(weights);
    for (int i = 0; i < num_groups; ++i, x += group * sizeof(int16_t)) {
      const char* codes = weights + (1 + i * num_steps) * kStepBytes;
      for (int part = 0; part < kVectors; part += kPart) {
        vi32 dots[rows][kPart] = {};
        add_group<kind, rows, kPart>(codes + part * sizeof(vu32), x, tile.x_stride, num_steps,
                                     dots);
#pragma GCC unroll 2
        for (int j = 0; j < kPart; ++j) {
          const vf32 scale = load_half(header + i * kPanel + (part + j) * kWide);
          const vf32 zero = has_zeros ? load_half(header + kPanel + (part + j) * kWide) : vf32{};
#pragma GCC unroll 16
          for (int row = 0; row < rows; ++row) {
            vf32 dot = __builtin_convertvector(dots[row][j], vf32);
            if constexpr (has_zeros)
              dot = multiply_add(-zero, tile.x_sums[row * tile.x_sums_stride + run] - vf32{}, dot);
            sums[row][part + j] = multiply_add(scale, dot, sums[row][part + j]);
          }
        }
      }
    }
  }
}

template <WeightKind kind, int rows>
inline void compute_tile(const LinearCall& call, const Tile& tile, int64_t row, int64_t panel) {
  vf32 sums[rows][kVectors] = {};
  if constexpr (is_quantized(kind))
    accumulate_groups<kind, rows>(tile, call.weights->group, sums);
  else
    accumulate<kind, rows>(tile, sums);
  f32x16 lanes[rows][2];
  std::memcpy(lanes, sums, sizeof lanes);
  finish<kind>(call, row, rows, panel, lanes);
}

// As above, for a number of rows that is known only now.
template <WeightKind kind, int rows>
inline void compute_rows(const LinearCall& call, const Tile& tile, int64_t row, int64_t panel,
                         int64_t num_rows) {
  if (num_rows == rows) return compute_tile<kind, rows>(call, tile, row, panel);
  if constexpr (rows > 1) compute_rows<kind, rows - 1>(call, tile, row, panel, num_rows);
}

// One panel with all rows of the call.
template <WeightKind kind>
inline void compute_panel(const LinearCall& call, int64_t panel, bool is_first, bool is_last,
                          int64_t row_begin, int64_t row_end) {
  const int64_t num_steps = panel_steps(kind, call.weights->k, call.weights->group);
  const int64_t x_stride = call.x.stride * input_bytes(kind);
  const char* weights =
      static_cast<const char*>(call.weights->panels) + panel * num_steps * kStepBytes;

  // Tiles of equal size: a tile of few rows waits for its own sums.
  const int64_t num_rows = row_end - row_begin;
  constexpr int kRows = tile_rows(kind);
  const int64_t most = num_rows <= kRows ? kRows : grouped_rows(kind);
  const int64_t num_tiles = (num_rows + most - 1) / most;
  // Nobody has fetched the first panel: its first tile streams it as if it were the only one.
  const int64_t num_streaming = num_tiles == 1 || is_first ? 1 : 0;
  const int64_t num_fetching = num_tiles - num_streaming;
  const bool is_streamed = num_rows <= kStreamedRows;
  const bool is_far = !is_streamed && num_rows <= kMemoryBoundRows;
  if (call.added.of_row && num_rows <= kMemoryBoundRows)
    fetch_added(call.added, panel, row_begin, row_end);
  int64_t row = row_begin;
  for (int64_t i = 0; i < num_tiles; ++i) {
    Tile tile = {static_cast<const char*>(call.x.data) + row * x_stride,
                 x_stride,
                 call.x.sums + row * call.x.sums_stride,
                 call.x.sums_stride,
                 weights,
                 num_steps,
                 weights,
                 0,
                 is_far,
                 is_far && i < num_streaming};
    if (i < num_streaming) {
      tile.fetched = weights + (is_streamed ? kNextBytes : kFarBytes);
      tile.fetched_step = kStepBytes;
    } else if (!is_last) {
      tile.fetched_step = (kStepBytes + num_fetching - 1) / num_fetching;
      tile.fetched += num_steps * (kStepBytes + (i - num_streaming) * tile.fetched_step);
    }
    const int64_t end = row_begin + num_rows * (i + 1) / num_tiles;
    if (num_rows > kMemoryBoundRows) fetch_outputs(call, row, end - row, panel);
    compute_rows<kind, kRows>(call, tile, row, panel, end - row);
    row = end;
  }
}

// Panels times rows that take about a millisecond.
inline int64_t most_panel_rows([[maybe_unused]] WeightKind kind) {
#if defined(QUIRE_TILES)
  if (kind != WeightKind::f32) return 8192;
#endif
  return 1024;
}

inline WeightKind input_kind(WeightKind kind) {
#if defined(QUIRE_TILES)
  if (is_quantized(kind)) return WeightKind::bf16;
#endif
  return kind;
}

template <WeightKind kind>
inline void compute(const LinearCall& call, int64_t panel_begin, int64_t panel_end,
                    int64_t row_begin, int64_t row_end) {
#if defined(QUIRE_TILES)
  if constexpr (kind != WeightKind::f32)
    return compute_tiled<kind>(call, panel_begin, panel_end, row_begin, row_end);
#endif
  for (int64_t panel = panel_begin; panel < panel_end; ++panel)
    compute_panel<kind>(call, panel, panel == panel_begin, panel + 1 == panel_end, row_begin,
                        row_end);
}

inline void linear(const LinearCall& call, int64_t panel_begin, int64_t panel_end,
                   int64_t row_begin, int64_t row_end) {
  if (call.epilogue == Epilogue::best_or_store) forget_best(call, panel_begin, row_begin, row_end);
  switch (call.weights->kind) {
    case WeightKind::f32:
      return compute<WeightKind::f32>(call, panel_begin, panel_end, row_begin, row_end);
    case WeightKind::bf16:
      return compute<WeightKind::bf16>(call, panel_begin, panel_end, row_begin, row_end);
    case WeightKind::int8:
      return compute<WeightKind::int8>(call, panel_begin, panel_end, row_begin, row_end);
    case WeightKind::int4:
      return compute<WeightKind::int4>(call, panel_begin, panel_end, row_begin, row_end);
  }
}

}  // namespace quire::QUIRE_ISA
