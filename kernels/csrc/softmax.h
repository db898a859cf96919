// Over a row of logits, for the sampler.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace quire::QUIRE_ISA {

// Of any logits; NaN if there is one.
inline float largest_of_some(const float* x, int64_t n) {
  float most = -__builtin_inff();
  for (int64_t i = 0; i < n; ++i) {
    if (x[i] != x[i]) return x[i];
    most = x[i] > most ? x[i] : most;
  }
  return most;
}

inline float largest_lane(f32x16 v) {
  typedef float f32x8 __attribute__((vector_size(32)));
  typedef float f32x4 __attribute__((vector_size(16)));
  f32x8 eight[2];
  f32x4 four[2];
  std::memcpy(eight, &v, sizeof v);
  eight[0] = eight[0] > eight[1] ? eight[0] : eight[1];
  std::memcpy(four, &eight[0], sizeof four);
  four[0] = four[0] > four[1] ? four[0] : four[1];
  const float a = four[0][0] > four[0][1] ? four[0][0] : four[0][1];
  const float b = four[0][2] > four[0][3] ? four[0][2] : four[0][3];
  return a > b ? a : b;
}

inline void largest(const float* x, int64_t n, float* chunks) {
  const int64_t num_whole = n / kLogitChunk;
  i32x16 nan{};
  for (int64_t chunk = 0; chunk < num_whole; ++chunk) {
    f32x16 v[4];
    for (int i = 0; i < 4; ++i) {
      v[i] = load<f32x16>(x + chunk * kLogitChunk + i * kLanes);
      nan |= v[i] != v[i];
    }
    chunks[chunk] = largest_lane(max(max(v[0], v[1]), max(v[2], v[3])));
  }
  if (any_lane(nan))
    for (int64_t chunk = 0; chunk < num_whole; ++chunk)
      chunks[chunk] = largest_of_some(x + chunk * kLogitChunk, kLogitChunk);
  if (const int64_t rest = n % kLogitChunk)
    chunks[num_whole] = largest_of_some(x + num_whole * kLogitChunk, rest);
}

inline void exp_scaled(const float* x, int64_t n, float largest, float temperature, float* scaled,
                       float* powers) {
  float logits[kLogitChunk];
  for (int64_t i = 0; i < kLogitChunk; ++i) logits[i] = i < n ? x[i] : -__builtin_inff();
  for (int i = 0; i < kLogitChunk; i += kLanes) {
    const f32x16 v = (load<f32x16>(logits + i) - largest) / temperature;
    store(scaled + i, v);
    store(powers + i, exp_nonpositive(v));
  }
}

}  // namespace quire::QUIRE_ISA
