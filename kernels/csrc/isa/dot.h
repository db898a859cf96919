// The K step of each kind of weights.
#pragma once

#include "isa/simd.h"
#include "kernels.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace quire::QUIRE_ISA {

// Lanes of two 16-bit numbers: their dot product, exact.
inline vi32 multiply_pairs(vi16 a, vi16 b) {
#if defined(__AVX512BW__)
  return (vi32)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return (vi32)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
  return (vi32)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
  const vi32 x = (vi32)a, y = (vi32)b;
  return (x << 16 >> 16) * (y << 16 >> 16) + (x >> 16) * (y >> 16);
#endif
}

// Adds to `sum` the products of a step's activations, the same 4 bytes in every lane, and weights
// in floating point.
template <WeightKind>
struct Dot;

template <>
struct Dot<WeightKind::f32> {
  static vf32 step(vf32 sum, vu32 x, vu32 weights) {
    return multiply_add((vf32)x, (vf32)weights, sum);
  }
};

template <>
struct Dot<WeightKind::bf16> {
  static vf32 step(vf32 sum, vu32 x, vu32 weights) {
#if defined(__AVX512BF16__)
    return (vf32)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)weights);
#else
    const vu32 high = 0xffff0000u - vu32{};
    sum = multiply_add((vf32)(x << 16), (vf32)(weights << 16), sum);
    return multiply_add((vf32)(x & high), (vf32)(weights & high), sum);
#endif
  }
};

// Adds to each lane of `sum` the dot product of a pair of 16-bit numbers.
inline vi32 add_pairs(vi32 sum, vi16 a, vi16 b) {
#if defined(__AVX512VNNI__)
  return (vi32)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#else
  return sum + multiply_pairs(a, b);
#endif
}

// The pairs of K values in a vector of quantized weights: `pair(i)` has values 2 i and 2 i + 1.
template <WeightKind>
struct Codes;

template <>
struct Codes<WeightKind::int8> {
  static constexpr int kPairs = 2;
  vu32 words;

  vi16 pair(int i) const { return i == 0 ? (vi16)words << 8 >> 8 : (vi16)words >> 8; }
};

template <>
struct Codes<WeightKind::int4> {
  static constexpr int kPairs = 4;
  vu32 words;

  vi16 pair(int i) const { return (vi16)(words >> 4 * i & (0x000f000fu - vu32{})); }
};

// One vector of fp16 numbers.
inline vf32 load_half(const uint16_t* from) {
#if defined(__AVX512F__)
  return (vf32)_mm512_cvtph_ps(load<__m256i>(from));
#elif defined(__F16C__)
  return (vf32)_mm256_cvtph_ps(load<__m128i>(from));
#else
  typedef uint16_t halves __attribute__((vector_size(2 * kWide)));
  const vu32 bits = __builtin_convertvector(load<halves>(from), vu32);
  const vu32 sign = (bits & 0x8000u) << 16, size = (bits & 0x7fffu) << 13;
  const vf32 scaled = (vf32)size * 0x1p112f;  // the exponent's bias is 127, not 15
  const vu32 is_special = (vu32)(size >= 0x0f800000u);
  return (vf32)(sign | (is_special & (size | 0x7f800000u)) | (~is_special & (vu32)scaled));
#endif
}

}  // namespace quire::QUIRE_ISA
