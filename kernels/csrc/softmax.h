// Over a whole row of logits, for the sampler.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace quire::QUIRE_ISA {

// NaN if there is one.
inline float largest(const float* x, int64_t n) {
  f32x16 most = splat(-__builtin_inff()), nan{};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const f32x16 v = load<f32x16>(x + i);
    most = max(v, most);
    nan = v == v ? nan : v;
  }
  float found = reduce_max(most);
  for (; i < n; ++i) {
    if (x[i] != x[i]) return x[i];
    found = x[i] > found ? x[i] : found;
  }
  for (int lane = 0; lane < kLanes; ++lane)
    if (nan[lane] != nan[lane]) return nan[lane];
  return found;
}

inline void exp_scaled(const float* x, int64_t n, float largest, float temperature, float* scaled,
                       float* powers) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const f32x16 v = (load<f32x16>(x + i) - largest) / temperature;
    store(scaled + i, v);
    store(powers + i, exp_nonpositive(v));
  }
  if (i == n) return;
  float tail[kLanes] = {};
  std::memcpy(tail, x + i, (n - i) * sizeof(float));
  const f32x16 v = (load<f32x16>(tail) - largest) / temperature;
  const f32x16 power = exp_nonpositive(v > 0.0f ? f32x16{} : v);
  std::memcpy(scaled + i, &v, (n - i) * sizeof(float));
  std::memcpy(powers + i, &power, (n - i) * sizeof(float));
}

}  // namespace quire::QUIRE_ISA
