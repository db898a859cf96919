// Over a row of logits, for the sampler.
#pragma once

#include "isa/simd.h"
#include "kernels.h"

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

inline void largest(const float* x, int64_t n, float* chunks) {
  const int64_t num_whole = n / kLogitChunk;
  i32x16 nan{};
  for (int64_t chunk = 0; chunk < num_whole; ++chunk) {
    f32x16 v[4];
    for (int i = 0; i < 4; ++i) {
      v[i] = load<f32x16>(x + chunk * kLogitChunk + i * kLanes);
      nan |= v[i] != v[i];
    }
    chunks[chunk] = reduce_max(max(max(v[0], v[1]), max(v[2], v[3])));
  }
  if (any_lane(nan))
    for (int64_t chunk = 0; chunk < num_whole; ++chunk)
      chunks[chunk] = largest_of_some(x + chunk * kLogitChunk, kLogitChunk);
  if (const int64_t rest = n % kLogitChunk)
    chunks[num_whole] = largest_of_some(x + num_whole * kLogitChunk, rest);
}

// Sixteen of a chunk's scaled logits.
inline f32x16 scaled_at(const float* x, float largest, float temperature) {
  return (load<f32x16>(x) - largest) / temperature;
}

// A chunk of n logits, and -inf behind them: where they are if it is whole, else in `padded`.
inline const float* whole_chunk(const float* x, int64_t n, float* padded) {
  if (n >= kLogitChunk) return x;
  for (int64_t i = 0; i < kLogitChunk; ++i) padded[i] = i < n ? x[i] : -__builtin_inff();
  return padded;
}

inline void exponentials(const float* x, int64_t n, float largest, float* powers) {
  float padded[kLogitChunk];
  x = whole_chunk(x, n, padded);
  for (int i = 0; i < kLogitChunk; i += kLanes)
    store(powers + i, exp_nonpositive(load<f32x16>(x + i) - largest));
}

// The weights of sixteen scaled logits, before they are rounded down to whole numbers: as
// `services/engine/sampling/arithmetic.py` defines them, operation for operation.
inline f32x16 weight_of(f32x16 x) {
  constexpr float to_whole = 0x1.8p23f + kWeightBits;
  const float factors[] = {0.00132647273f, 0.00967151299f, 0.0555073358f,
                           0.240222424f,   0.693147004f,   1.0f};
  const f32x16 binary = max(x, splat(kLeastScaled)) * kLog2E;
  const f32x16 shifted = binary + to_whole;
  const f32x16 rest = binary - (shifted - to_whole);
  f32x16 power = splat(factors[0]);
  for (int i = 1; i < 6; ++i) power = power * rest + factors[i];
  return (f32x16)((u32x16)power + ((u32x16)shifted << 23));
}

// Sixteen weights as whole numbers in two parts of 20 bits.
struct Halves {
  i32x16 high, low;
};
inline Halves halves_of(f32x16 weight) {
  const i32x16 high = __builtin_convertvector(weight * 0x1p-20f, i32x16);
  const f32x16 rest = weight - __builtin_convertvector(high, f32x16) * 0x1p20f;
  return {high, __builtin_convertvector(rest, i32x16)};
}

inline int64_t sum_of(const Halves& halves) {
  uint64_t sums[2][kLanes / 2];
  store(sums[0], halves.high);
  store(sums[1], halves.low);
  // Two 32-bit sums at once: no sum of 64 halves of 20 bits overflows.
  uint64_t high = 0, low = 0;
  for (int i = 0; i < kLanes / 2; ++i) high += sums[0][i], low += sums[1][i];
  const uint64_t mask = 0xffffffffu;
  return static_cast<int64_t>((((high & mask) + (high >> 32)) << 20) + (low & mask) + (low >> 32));
}

inline void weigh(const float* x, int64_t n, float largest, float temperature, float* scaled,
                  float* weights) {
  float padded[kLogitChunk];
  x = whole_chunk(x, n, padded);
  for (int i = 0; i < kLogitChunk; i += kLanes) {
    const f32x16 v = scaled_at(x + i, largest, temperature);
    const Halves halves = halves_of(weight_of(v));
    store(scaled + i, v);
    store(weights + i, __builtin_convertvector(halves.high, f32x16) * 0x1p20f +
                           __builtin_convertvector(halves.low, f32x16));
  }
}

inline void masses(const float* x, int64_t n, float largest, float temperature, float threshold,
                   int64_t* chunks) {
  float padded[kLogitChunk];
  for (int64_t begin = 0; begin < n; begin += kLogitChunk) {
    const float* chunk = whole_chunk(x + begin, n - begin, padded);
    Halves sums{};
    for (int i = 0; i < kLogitChunk; i += kLanes) {
      const f32x16 v = scaled_at(chunk + i, largest, temperature);
      const f32x16 weight = weight_of(v);
      const Halves halves = halves_of(v >= threshold ? weight : f32x16{});
      sums.high += halves.high;
      sums.low += halves.low;
    }
    chunks[begin / kLogitChunk] = sum_of(sums);
  }
}

// Appends the ones of sixteen that are not below the bound; writes sixteen.
inline int64_t keep_some(f32x16 v, float bound, float* kept) {
#if defined(__AVX512F__)
  const __mmask16 mask = _mm512_cmp_ps_mask((__m512)v, _mm512_set1_ps(bound), _CMP_GE_OQ);
  _mm512_storeu_ps(kept, _mm512_maskz_compress_ps(mask, (__m512)v));
  return __builtin_popcount(mask);
#else
  float lanes[kLanes];
  store(lanes, v);
  int64_t num_kept = 0;
  for (int i = 0; i < kLanes; ++i) {
    kept[num_kept] = lanes[i];
    num_kept += lanes[i] >= bound;
  }
  return num_kept;
#endif
}

inline int64_t keep(const float* x, int64_t n, const float* chunks, float bound, float* kept) {
  float padded[kLogitChunk];
  int64_t num_kept = 0;
  for (int64_t begin = 0; begin < n; begin += kLogitChunk) {
    if (!(chunks[begin / kLogitChunk] >= bound)) continue;
    const float* chunk = whole_chunk(x + begin, n - begin, padded);
    for (int i = 0; i < kLogitChunk; i += kLanes)
      num_kept += keep_some(load<f32x16>(chunk + i), bound, kept + num_kept);
  }
  return num_kept;
}

}  // namespace quire::QUIRE_ISA
