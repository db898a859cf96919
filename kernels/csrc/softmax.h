// Over a row of logits, for the sampler.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace quire::QUIRE_ISA {

// Of up to kLogitChunk logits; NaN if there is one.
inline float largest_of_chunk(const float* x, int64_t n) {
  float most = -__builtin_inff();
  if (n == kLogitChunk) {
    f32x16 v[4], nan{};
    for (int i = 0; i < 4; ++i) {
      v[i] = load<f32x16>(x + i * kLanes);
      nan = v[i] == v[i] ? nan : v[i];
    }
    most = reduce_max(max(max(v[0], v[1]), max(v[2], v[3])));
    const float poison = reduce_add(nan);
    return poison == poison ? most : poison;
  }
  for (int64_t i = 0; i < n; ++i) {
    if (x[i] != x[i]) return x[i];
    most = x[i] > most ? x[i] : most;
  }
  return most;
}

inline void largest(const float* x, int64_t n, float* chunks) {
  for (int64_t begin = 0; begin < n; begin += kLogitChunk, ++chunks)
    *chunks = largest_of_chunk(x + begin, n - begin < kLogitChunk ? n - begin : kLogitChunk);
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
