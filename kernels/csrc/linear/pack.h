// Weights [N, K] in floating point into the panels that linear/linear.h reads: 32 rows of the
// source become a panel's 32 columns, some K steps at a time, first rounded to the panel's kind,
// then transposed.
#pragma once

#include "isa/simd.h"
#include "kernels.h"

namespace quire::QUIRE_ISA {

typedef uint32_t u32x4 __attribute__((vector_size(16)));

inline constexpr int kPackedSteps = 16;

// One row of the source on its way into a panel. Values behind its `k` values are 0.
template <typename Source>
struct PackedRow {
  const Source* values;
  int64_t k;

  // 16 steps that begin with value `at`.
  void convert(WeightKind kind, int64_t at, uint32_t* steps) const {
    if (kind == WeightKind::bf16) {
      for (int i = 0; i < 2; ++i)
        store_bf16(reinterpret_cast<uint16_t*>(steps) + i * kLanes,
                   load_some(values + at + i * kLanes, k - at - i * kLanes));
    } else {
      store(steps, load_some(values + at, k - at));
    }
  }
};

// [32][16] -> [16][32], by squares of four.
inline void transpose(const uint32_t (&from)[kPanel][kPackedSteps],
                      uint32_t (&to)[kPackedSteps][kPanel]) {
  for (int column = 0; column < kPanel; column += 4)
    for (int step = 0; step < kPackedSteps; step += 4) {
      u32x4 rows[4];
      for (int i = 0; i < 4; ++i) rows[i] = load<u32x4>(&from[column + i][step]);
      const u32x4 a = __builtin_shufflevector(rows[0], rows[1], 0, 4, 1, 5);
      const u32x4 b = __builtin_shufflevector(rows[2], rows[3], 0, 4, 1, 5);
      const u32x4 c = __builtin_shufflevector(rows[0], rows[1], 2, 6, 3, 7);
      const u32x4 d = __builtin_shufflevector(rows[2], rows[3], 2, 6, 3, 7);
      store(&to[step][column], __builtin_shufflevector(a, b, 0, 1, 4, 5));
      store(&to[step + 1][column], __builtin_shufflevector(a, b, 2, 3, 6, 7));
      store(&to[step + 2][column], __builtin_shufflevector(c, d, 0, 1, 4, 5));
      store(&to[step + 3][column], __builtin_shufflevector(c, d, 2, 3, 6, 7));
    }
}

template <typename Source>
inline void pack_panel(const Linear& linear, const void* const* sources, int64_t panel) {
  const int64_t group = lane_values(linear.kind);
  const int64_t num_steps = (linear.k + group - 1) / group;
  auto* to = static_cast<uint32_t*>(const_cast<void*>(linear.panels)) + panel * num_steps * kPanel;
  PackedRow<Source> rows[kPanel];
  for (int64_t i = 0; i < kPanel; ++i) {
    const int64_t n = panel * kPanel + i;
    const void* source = n < linear.n ? sources[n] : nullptr;
    rows[i] = {static_cast<const Source*>(source), source ? linear.k : 0};
  }
  for (int64_t step = 0; step < num_steps; step += kPackedSteps) {
    uint32_t converted[kPanel][kPackedSteps], transposed[kPackedSteps][kPanel];
    for (int i = 0; i < kPanel; ++i) rows[i].convert(linear.kind, step * group, converted[i]);
    transpose(converted, transposed);
    const int64_t rest = num_steps - step;
    std::memcpy(to + step * kPanel, transposed,
                (rest < kPackedSteps ? rest : kPackedSteps) * sizeof transposed[0]);
  }
}

inline void pack(const Linear& linear, const void* const* rows, Dtype dtype, int64_t panel_begin,
                 int64_t panel_end) {
  for (int64_t panel = panel_begin; panel < panel_end; ++panel) {
    if (dtype == Dtype::f32)
      pack_panel<float>(linear, rows, panel);
    else
      pack_panel<uint16_t>(linear, rows, panel);
  }
}

}  // namespace quire::QUIRE_ISA
