// What becomes of a finished row of a panel, while it is still in registers.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace quire::QUIRE_ISA {

// The sums of 16 columns as y = x W^T + bias.
inline f32x16 scaled(const LinearCall& call, int64_t, int64_t column, f32x16 sums) {
  return call.weights->bias ? sums + load_f32(call.weights->bias + column) : sums;
}

// Activations are stored with an offset of 128, which every column has multiplied with its weights:
// sum((q - 128) * w) = sum(q * w) - 128 * sum(w).
inline f32x16 scaled(const LinearCall& call, int64_t row, int64_t column, i32x16 sums) {
  const Linear& w = *call.weights;
  const i32x16 exact = sums - (load<i32x16>(w.sums + column) << 7);
  const f32x16 scale = splat(call.x.scales[row]) * load_f32(w.scales + column);
  return scaled(call, row, column, __builtin_convertvector(exact, f32x16) * scale);
}

// x / (1 + e^-x), from e^-|x|, which never overflows.
inline f32x16 silu(f32x16 x) {
  const f32x16 small = exp_nonpositive(x > 0.0f ? -x : x);
  const f32x16 one = splat(1.0f);
  return x * ((x > 0.0f ? one : small) / (one + small));
}

// Up to 16 values: the last panel may reach behind the last column.
template <typename T>
inline void store_some(T* to, f32x16 values, int64_t count) {
  if (count >= kLanes) return store_f32(to, values);
  T all[kLanes];
  store_f32(all, values);
  for (int64_t i = 0; i < count; ++i) to[i] = all[i];
}

inline f32x16 load_some(const float* from, int64_t count) {
  if (count >= kLanes) return load_f32(from);
  float all[kLanes] = {};
  for (int64_t i = 0; i < count; ++i) all[i] = from[i];
  return load_f32(all);
}

template <typename T>
inline void store_row(T* to, f32x16 low, f32x16 high, int64_t count) {
  store_some(to, low, count);
  if (count > kLanes) store_some(to + kLanes, high, count - kLanes);
}

inline void add_row(float* to, f32x16 low, f32x16 high, int64_t count) {
  store_some(to, load_some(to, count) + low, count);
  if (count > kLanes) store_some(to + kLanes, load_some(to + kLanes, count - kLanes) + high,
                                 count - kLanes);
}

inline bool all(i32x16 condition) {
  uint64_t words[8];
  store(words, condition);
  uint64_t every = words[0];
  for (int i = 1; i < 8; ++i) every &= words[i];
  return every == ~uint64_t{0};
}

// Before the first panel of a call: anything that comes is better, except -inf, and of those the
// first column is the answer.
inline void no_best(const LinearCall& call, int64_t panel_begin, int64_t row_begin,
                    int64_t row_end) {
  for (int64_t row = row_begin; row < row_end; ++row)
    static_cast<Best*>(call.out)[row] = {-__builtin_inff(),
                                         static_cast<int32_t>(panel_begin * kPanel)};
}

inline void keep_best(Best& best, f32x16 low, f32x16 high, int64_t column, int64_t count) {
  const f32x16 limit = splat(best.value);
  if (all((i32x16)(low <= limit) & (i32x16)(high <= limit))) return;
  float values[kPanel];
  store_row(values, low, high, kPanel);
  for (int64_t i = 0; i < count; ++i) {
    const bool is_first_nan = values[i] != values[i] && best.value == best.value;
    if (values[i] > best.value || is_first_nan)
      best = {values[i], static_cast<int32_t>(column + i)};
  }
}

inline void finish(const LinearCall& call, int64_t row, int64_t panel, f32x16 low, f32x16 high) {
  const int64_t column = panel * kPanel;
  const int64_t rest = call.weights->n - column;
  const int64_t count = rest < kPanel ? rest : kPanel;
  const int64_t at = row * call.out_stride + column;
  const int64_t at_pair = row * call.out_stride + panel * kLanes;
  auto* out_f32 = static_cast<float*>(call.out);
  auto* out_bf16 = static_cast<bf16*>(call.out);
  switch (call.epilogue) {
    case Epilogue::store_f32:
      return store_row(out_f32 + at, low, high, count);
    case Epilogue::store_bf16:
      return store_row(out_bf16 + at, low, high, count);
    case Epilogue::add_f32:
      return add_row(out_f32 + at, low, high, count);
    case Epilogue::silu_mul_f32:
      return store_f32(out_f32 + at_pair, silu(low) * high);
    case Epilogue::silu_mul_bf16:
      return store_f32(out_bf16 + at_pair, silu(low) * high);
    case Epilogue::argmax:
      return keep_best(static_cast<Best*>(call.out)[row], low, high, column, count);
  }
}

}  // namespace quire::QUIRE_ISA
