// The last part of a linear: it takes the finished sums of some rows of a panel.
#pragma once

#include "isa/simd.h"
#include "kernels.h"
#include "linear/low_rank.h"

namespace quire::QUIRE_ISA {

// From sums to y = x W^T + bias, for the columns of one panel.
struct Scaling {
  Columns bias, scales;

  Scaling(const Linear& w, int64_t column) : bias{}, scales{} {
    if (w.bias) bias = {load_f32(w.bias + column), load_f32(w.bias + column + kLanes)};
    if (!is_quantized(w.kind)) return;
    scales = {load_f32(w.scales + column), load_f32(w.scales + column + kLanes)};
  }

  template <WeightKind kind>
  Columns apply(const LinearCall& call, int64_t row, const f32x16 (&sums)[2]) const {
    if constexpr (!is_quantized(kind)) return {sums[0] + bias.low, sums[1] + bias.high};
    const f32x16 scale = splat(call.x.scales ? call.x.scales[row] : 1.0f);
    return {sums[0] * (scale * scales.low) + bias.low, sums[1] * (scale * scales.high) + bias.high};
  }
};

// 1 / (1 + e^-x), from e^-|x|, which does not overflow.
inline f32x16 logistic(f32x16 x) {
  const f32x16 one = splat(1.0f);
  const f32x16 power = exp_nonpositive(x > 0.0f ? -x : x);
  return (x > 0.0f ? one : power) / (one + power);
}

inline f32x16 silu(f32x16 x) { return x * logistic(x); }

// x / 2 * (1 + tanh(y)) = x * logistic(2 y), with y = sqrt(2 / pi) * (x + 0.044715 x^3).
inline f32x16 gelu(f32x16 x) {
  return x * logistic(x * (1.5957691216057308f + 0.0713548162726009f * (x * x)));
}

inline f32x16 swiglu(f32x16 gate, f32x16 up, float alpha, float limit) {
  const f32x16 most = splat(limit);
  const f32x16 g = gate > most ? most : gate;
  const f32x16 above = up > most ? most : up;
  const f32x16 u = above < -most ? -most : above;
  return g * logistic(g * alpha) * (u + 1.0f);
}

// The soft cap of a call's results.
inline Columns capped(const Columns& y, float cap) {
  return {tanh_of(y.low / cap) * cap, tanh_of(y.high / cap) * cap};
}

// The first `count` of 32 values: the last panel may reach behind the last column.
template <typename T>
inline void store_columns(T* to, const Columns& y, int64_t count) {
  store_some(to, y.low, count);
  store_some(to + kLanes, y.high, count - kLanes);
}

template <typename T>
inline void add_columns(T* to, const Columns& y, int64_t count) {
  store_some(to, load_some(to, count) + y.low, count);
  store_some(to + kLanes, load_some(to + kLanes, count - kLanes) + y.high, count - kLanes);
}

inline bool all(i32x16 condition) {
#if defined(__AVX512DQ__)
  return _mm512_movepi32_mask((__m512i)condition) == 0xffff;
#else
  uint64_t words[8];
  store(words, condition);
  uint64_t every = words[0];
  for (int i = 1; i < 8; ++i) every &= words[i];
  return every == ~uint64_t{0};
#endif
}

// Before the first panel of a call: whatever comes is larger, but for -inf, and if there is nothing
// else, the first column is the answer.
inline void forget_best(const LinearCall& call, int64_t panel_begin, int64_t row_begin,
                        int64_t row_end) {
  for (int64_t row = row_begin; row < row_end && row < call.num_best; ++row)
    call.best[row] = {-__builtin_inff(), static_cast<int32_t>(panel_begin * kPanel)};
}

inline void keep_best(Best& best, const Columns& y, int64_t column, int64_t count) {
  const f32x16 limit = splat(best.value);
  if (all((i32x16)(y.low <= limit) & (i32x16)(y.high <= limit))) return;
  float values[kPanel];
  store_columns(values, y, kPanel);
  for (int64_t i = 0; i < count; ++i) {
    const bool is_first_nan = values[i] != values[i] && best.value == best.value;
    if (values[i] > best.value || is_first_nan)
      best = {values[i], static_cast<int32_t>(column + i)};
  }
}

// Outputs of many rows lie in no near cache, a whole number of pages apart, where no CPU expects
// the next: asked for before the sums are computed, they are there when these are finished.
// (To GCC a function that only prefetches has no effect, and its calls go: hence the `asm`.)
[[gnu::noinline]] inline void fetch_outputs(const LinearCall& call, int64_t row, int64_t num_rows,
                                            int64_t panel) {
  asm volatile("");
  if (call.epilogue == Epilogue::best_or_store) return;
  const auto size = static_cast<int64_t>(size_of(call.out_dtype));
  const int64_t num_bytes = (is_gated(call.epilogue) ? kLanes : kPanel) * size;
  const int64_t stride = call.out_stride * size;
  const char* out = static_cast<const char*>(call.out) + row * stride + panel * num_bytes;
  for (int64_t i = 0; i < num_rows; ++i, out += stride) {
    __builtin_prefetch(out, 1);
    __builtin_prefetch(out + num_bytes - 1, 1);
  }
}

template <WeightKind kind, typename T>
inline void finish_as(const LinearCall& call, int64_t row, int64_t num_rows, int64_t panel,
                      const f32x16 (*sums)[2]) {
  const int64_t column = panel * kPanel;
  const int64_t rest = call.weights->n - column;
  const int64_t count = rest < kPanel ? rest : kPanel;
  const Scaling scaling(*call.weights, column);
  Columns added[kMostRows];
  if (call.added.of_row) expand(call.added, row, num_rows, panel, added);
  const auto each_row = [&](auto body) {
    for (int64_t i = 0; i < num_rows; ++i) {
      const Columns y = scaling.apply<kind>(call, row + i, sums[i]);
      if (!call.added.of_row)
        body(row + i, y);
      else
        body(row + i, Columns{y.low + added[i].low, y.high + added[i].high});
    }
  };
  auto* out = static_cast<T*>(call.out);
  const int64_t stride = call.out_stride;
  const float factor = call.factor, cap = call.cap;
  const auto scaled = [=](const Columns& y) {
    const Columns product = {y.low * factor, y.high * factor};
    return cap > 0.0f ? capped(product, cap) : product;
  };
  const auto store_gated = [&](auto gated) {
    each_row([=](int64_t m, const Columns& y) {
      store_f32(out + m * stride + panel * kLanes, gated(y.low, y.high));
    });
  };
  switch (call.epilogue) {
    case Epilogue::store:
      return each_row([=](int64_t m, const Columns& y) {
        store_columns(out + m * stride + column, scaled(y), count);
      });
    case Epilogue::add:
      return each_row([=](int64_t m, const Columns& y) {
        add_columns(out + m * stride + column, scaled(y), count);
      });
    case Epilogue::silu_mul:
      return store_gated([](f32x16 gate, f32x16 up) { return silu(gate) * up; });
    case Epilogue::gelu_mul:
      return store_gated([](f32x16 gate, f32x16 up) { return gelu(gate) * up; });
    case Epilogue::swiglu:
      return store_gated([alpha = call.alpha, limit = call.limit](f32x16 gate, f32x16 up) {
        return swiglu(gate, up, alpha, limit);
      });
    case Epilogue::best_or_store:
      return each_row([&](int64_t m, const Columns& sums) {
        const Columns y = scaled(sums);
        if (m < call.num_best)
          keep_best(call.best[m], y, column, count);
        else
          store_columns(out + (m - call.num_best) * stride + column, y, count);
      });
  }
}

template <WeightKind kind>
inline void finish(const LinearCall& call, int64_t row, int64_t num_rows, int64_t panel,
                   const f32x16 (*sums)[2]) {
  if (call.out_dtype == Dtype::f32)
    finish_as<kind, float>(call, row, num_rows, panel, sums);
  else
    finish_as<kind, bf16>(call, row, num_rows, panel, sums);
}

}  // namespace quire::QUIRE_ISA
