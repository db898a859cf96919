// Weights [N, K] into the panels that linear.h reads.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace quire::QUIRE_ISA {

inline float value_at(const float* row, int64_t i) { return row[i]; }
inline float value_at(const uint16_t* row, int64_t i) { return to_f32(row[i]); }

// One column of a panel; what is behind K is 0.
template <typename Source>
inline void pack_column(const Linear& linear, const Source* row, int64_t column) {
  const int64_t group = group_of(linear.kind);
  const int64_t steps = (linear.k + group - 1) / group;
  const int64_t element = 4 / group;
  char* to = static_cast<char*>(const_cast<void*>(linear.panels)) +
             column / kPanel * steps * 4 * kPanel + column % kPanel * 4;
  float scale = 0;
  int32_t sum = 0;
  if (linear.kind == WeightKind::int8) {
    for (int64_t k = 0; k < linear.k; ++k) {
      const float size = __builtin_fabsf(value_at(row, k));
      scale = size > scale ? size : scale;
    }
    scale /= 127.0f;
  }
  for (int64_t k = 0; k < steps * group; ++k) {
    const float value = k < linear.k ? value_at(row, k) : 0.0f;
    char* at = to + k / group * 4 * kPanel + k % group * element;
    if (linear.kind == WeightKind::f32) {
      store(reinterpret_cast<float*>(at), value);
    } else if (linear.kind == WeightKind::bf16) {
      store(reinterpret_cast<uint16_t*>(at), to_bf16(value));
    } else {
      const auto q = static_cast<int8_t>(scale > 0 ? __builtin_rintf(value / scale) : 0.0f);
      *at = static_cast<char>(q);
      sum += q;
    }
  }
  if (linear.kind == WeightKind::int8) {
    const_cast<float*>(linear.scales)[column] = scale;
    const_cast<int32_t*>(linear.sums)[column] = sum;
  }
}

template <typename Source>
inline void pack_panels(const Linear& linear, const Source* source, int64_t stride, int64_t begin,
                        int64_t end) {
  const int64_t group = group_of(linear.kind);
  const int64_t panel_bytes = (linear.k + group - 1) / group * 4 * kPanel;
  for (int64_t panel = begin; panel < end; ++panel) {
    std::memset(static_cast<char*>(const_cast<void*>(linear.panels)) + panel * panel_bytes, 0,
                panel_bytes);
    for (int64_t column = panel * kPanel; column < (panel + 1) * kPanel; ++column) {
      if (column < linear.n) {
        pack_column(linear, source + column * stride, column);
      } else if (linear.kind == WeightKind::int8) {
        const_cast<float*>(linear.scales)[column] = 0;
        const_cast<int32_t*>(linear.sums)[column] = 0;
      }
    }
  }
}

inline void pack(const Linear& linear, const void* source, Dtype dtype, int64_t stride,
                 int64_t panel_begin, int64_t panel_end) {
  if (dtype == Dtype::f32)
    pack_panels(linear, static_cast<const float*>(source), stride, panel_begin, panel_end);
  else
    pack_panels(linear, static_cast<const uint16_t*>(source), stride, panel_begin, panel_end);
}

}  // namespace quire::QUIRE_ISA
