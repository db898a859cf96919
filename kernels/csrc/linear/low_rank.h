// Adapters add to a linear: y += B (A x), with the A and B of each row's own adapter.
//
// A is as in its file, a row for each rank; an element of A x is summed in 16 lanes over K, from
// front to back, and these are added in one tree. B is packed as the linear is:
// when a tile of the linear is finished, the sums of its rows and columns are computed, rank after
// rank. Neither depends on other rows.
#pragma once

#include "isa/dot.h"
#include "isa/simd.h"
#include "kernels.h"

namespace quire::QUIRE_ISA {

inline constexpr int64_t kStepBytes = 4 * kPanel;  // of a panel
inline constexpr int64_t kCacheLine = 64;

struct Columns {  // of a panel
  f32x16 low, high;
};

inline constexpr int kRowsAtOnce = kWide == 16 ? 4 : 1;  // whose sums fit in registers
inline constexpr int kMostRows = 32;                     // of a tile of a linear

// 4 bytes a lane: one float, or two bf16.
template <typename T>
inline f32x16 add_products(f32x16 sum, u32x16 a, u32x16 b) {
  if constexpr (sizeof(T) == sizeof(bf16))
    return dot_bf16(sum, a, b);
  else
    return fma((f32x16)a, (f32x16)b, sum);
}

// The first `count` values; behind them are zeros.
template <typename T>
inline u32x16 load_first(const T* from, int64_t count) {
  T values[sizeof(u32x16) / sizeof(T)] = {};
  std::memcpy(values, from, count * sizeof(T));
  return load<u32x16>(values);
}

// A step's values in every lane: one float, or two bf16. GCC 12 cannot compile all kernels for AVX2
// if a float is splat as an integer.
inline u32x16 splat_step(const float* from) { return (u32x16)splat(*from); }
inline u32x16 splat_step(const bf16* from) { return load<uint32_t>(from) - u32x16{}; }

inline void store_value(float* to, float value) { *to = value; }
inline void store_value(bf16* to, float value) { *to = to_bf16(value); }

template <typename T, int rows>
inline void shrink_tile(const LowRank& one, const T* x, int64_t x_stride, int64_t rank, T* z,
                        int64_t z_stride) {
  constexpr int64_t kValues = sizeof(u32x16) / sizeof(T);
  const T* down = static_cast<const T*>(one.down) + rank * one.k;
  f32x16 sums[rows][kRanks] = {};
  const auto add = [&](int64_t k, auto loaded) {
    u32x16 a[kRanks];
#pragma GCC unroll 4
    for (int i = 0; i < kRanks; ++i) a[i] = loaded(down + i * one.k + k);
#pragma GCC unroll 4
    for (int row = 0; row < rows; ++row) {
      const u32x16 values = loaded(x + row * x_stride + k);
#pragma GCC unroll 4
      for (int i = 0; i < kRanks; ++i) sums[row][i] = add_products<T>(sums[row][i], a[i], values);
    }
  };
  int64_t k = 0;
  for (; k + kValues <= one.k; k += kValues)
    add(k, [](const T* from) { return load<u32x16>(from); });
  if (k < one.k) add(k, [&](const T* from) { return load_first(from, one.k - k); });
  f32x16 lanes[rows][kRanks];  // a copy: the loop's sums stay in registers
  std::memcpy(lanes, sums, sizeof lanes);
  for (int row = 0; row < rows; ++row)
    for (int i = 0; i < kRanks; ++i)
      store_value(z + row * z_stride + rank + i, reduce_add(lanes[row][i]));
}

template <typename T>
inline void shrink_rows(const LowRank& one, const Activations& x, int64_t rank, void* z,
                        int64_t z_stride, int64_t row, int64_t row_end) {
  const T* from = static_cast<const T*>(x.data);
  T* to = static_cast<T*>(z);
  for (; row + kRowsAtOnce <= row_end; row += kRowsAtOnce)
    shrink_tile<T, kRowsAtOnce>(one, from + row * x.stride, x.stride, rank, to + row * z_stride,
                                z_stride);
  for (; row < row_end; ++row)
    shrink_tile<T, 1>(one, from + row * x.stride, x.stride, rank, to + row * z_stride, z_stride);
}

inline void shrink(const LowRank& one, const Activations& x, int64_t rank, void* z,
                   int64_t z_stride, int64_t row_begin, int64_t row_end) {
  if (one.up->kind == WeightKind::f32)
    shrink_rows<float>(one, x, rank, z, z_stride, row_begin, row_end);
  else
    shrink_rows<bf16>(one, x, rank, z, z_stride, row_begin, row_end);
}

// B (A x) of some rows for the columns of a panel.
template <typename T, int rows>
inline void expand_tile(const LowRank& one, const T* z, int64_t z_stride, int64_t panel,
                        Columns* out) {
  constexpr int64_t kValues = sizeof(uint32_t) / sizeof(T);
  const int64_t num_steps = one.up->k / kValues;
  const char* weights = static_cast<const char*>(one.up->panels) + panel * num_steps * kStepBytes;
  const T* low = z + one.firsts[2 * panel];
  const T* high = z + one.firsts[2 * panel + 1];
  Columns sums[rows] = {};
  for (int64_t step = 0; step < num_steps; ++step, weights += kStepBytes) {
    const u32x16 left = load<u32x16>(weights), right = load<u32x16>(weights + kStepBytes / 2);
#pragma GCC unroll 4
    for (int row = 0; row < rows; ++row) {
      const int64_t at = row * z_stride + step * kValues;
      const u32x16 a = splat_step(low + at);
      const u32x16 b = splat_step(high + at);
      sums[row].low = add_products<T>(sums[row].low, a, left);
      sums[row].high = add_products<T>(sums[row].high, b, right);
    }
  }
  std::memcpy(out, sums, sizeof sums);
}

template <typename T>
inline void expand_rows(const LowRank& one, const LowRanks& added, int64_t row, int64_t num_rows,
                        int64_t panel, Columns* out) {
  const T* z = static_cast<const T*>(added.z) + row * added.z_stride;
  if (num_rows == kRowsAtOnce)
    return expand_tile<T, kRowsAtOnce>(one, z, added.z_stride, panel, out);
  for (int64_t i = 0; i < num_rows; ++i)
    expand_tile<T, 1>(one, z + i * added.z_stride, added.z_stride, panel, out + i);
}

// Computes the additions to some rows for the columns of a panel. Not inlined: each kind of sums
// would have a copy.
[[gnu::noinline]] inline void expand(const LowRanks& added, int64_t row, int64_t num_rows,
                                     int64_t panel, Columns* out) {
  const Columns nothing = {splat(-0.0f), splat(-0.0f)};  // 0 would change -0 to 0
  for (int64_t begin = 0, end = 0; begin < num_rows; begin = end) {
    const LowRank* one = added.of(row + begin);
    while (end < num_rows && end < begin + kRowsAtOnce && added.of(row + end) == one) ++end;
    if (!one)
      for (int64_t i = begin; i < end; ++i) out[i] = nothing;
    else if (one->up->kind == WeightKind::f32)
      expand_rows<float>(*one, added, row + begin, end - begin, panel, out + begin);
    else
      expand_rows<bf16>(*one, added, row + begin, end - begin, panel, out + begin);
  }
}

// Asks for the B of a panel, which nobody has read before.
inline void fetch_added(const LowRanks& added, int64_t panel, int64_t row, int64_t row_end) {
  const LowRank* last = nullptr;
  for (; row < row_end; ++row) {
    const LowRank* one = added.of(row);
    if (!one || one == last) continue;
    last = one;
    const int64_t size = panel_steps(one->up->kind, one->up->k, 0) * kStepBytes;
    const char* panels = static_cast<const char*>(one->up->panels) + panel * size;
    for (int64_t i = 0; i < size; i += kCacheLine) __builtin_prefetch(panels + i, 0, 2);
  }
}

}  // namespace quire::QUIRE_ISA
