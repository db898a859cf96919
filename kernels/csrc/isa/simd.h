// Sixteen lanes of fp32, and the dot products that fill them, for the instruction set that the
// including file is compiled for.
//
// GCC's and Clang's vector types are lowered to whatever the target has (AVX-512, AVX2, SSE, NEON),
// so the arithmetic around the dot products is written once. Everything here lives in a namespace
// of its own per instruction set, and what includes it uses no templates of the standard library:
// a function compiled for several instruction sets under one name would be merged by the linker,
// and an old CPU would meet a new one's instructions.
//
// Compiled with -ffp-contract=off: what is fused is written as `fma`, so that an element is rounded
// the same in every loop that computes it.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#ifndef QUIRE_ISA
#error "QUIRE_ISA names the namespace of the instruction set"
#endif

// Tables that multiply bf16 by tiles (isa/tiles.h). The one that emulates AMX also rounds,
// everywhere, as the AVX-512 instructions do that the other one has.
#if defined(__AMX_BF16__) || defined(QUIRE_EMULATES_AMX)
#define QUIRE_TILES
#endif

namespace quire::QUIRE_ISA {

inline constexpr int kLanes = 16;
inline constexpr float kLog2E = 1.44269504088896341f;

typedef float f32x4 __attribute__((vector_size(16)));
typedef float f32x8 __attribute__((vector_size(32)));
typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));
typedef int8_t i8x16 __attribute__((vector_size(16)));

template <typename V, typename T>
inline V load(const T* from) {
  V value;
  std::memcpy(&value, from, sizeof(V));
  return value;
}

template <typename T, typename V>
inline void store(T* to, V value) {
  std::memcpy(to, &value, sizeof(V));
}

inline f32x16 splat(float value) { return value - f32x16{}; }

// Vectors as wide as a register: a tile of a linear fills the register file, which leaves no room
// for vectors that the compiler has to cut.
#if defined(__AVX512F__)
inline constexpr int kWide = 16;  // lanes of 4 bytes
#elif defined(__AVX2__)
inline constexpr int kWide = 8;
#else
inline constexpr int kWide = 4;
#endif

typedef float vf32 __attribute__((vector_size(4 * kWide)));
typedef int32_t vi32 __attribute__((vector_size(4 * kWide)));
typedef uint32_t vu32 __attribute__((vector_size(4 * kWide)));
typedef int16_t vi16 __attribute__((vector_size(4 * kWide)));

// a * b + c, rounded once where the target has a fused multiply-add.
inline vf32 multiply_add(vf32 a, vf32 b, vf32 c) {
#if defined(__AVX512F__)
  return (vf32)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (vf32)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_NEON)
  return (vf32)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}
inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
  vf32 x[kLanes / kWide], y[kLanes / kWide], z[kLanes / kWide];
  std::memcpy(x, &a, sizeof a);
  std::memcpy(y, &b, sizeof b);
  std::memcpy(z, &c, sizeof c);
  for (int i = 0; i < kLanes / kWide; ++i) z[i] = multiply_add(x[i], y[i], z[i]);
  std::memcpy(&c, z, sizeof c);
  return c;
}

inline f32x16 max(f32x16 a, f32x16 b) { return a > b ? a : b; }

// Of all lanes, in one fixed tree.
inline float reduce_add(f32x16 v) {
  f32x8 eight[2];
  f32x4 four[2];
  std::memcpy(eight, &v, sizeof v);
  eight[0] += eight[1];
  std::memcpy(four, &eight[0], sizeof four);
  four[0] += four[1];
  return (four[0][0] + four[0][2]) + (four[0][1] + four[0][3]);
}

// None of them may be NaN.
inline float reduce_max(f32x16 v) {
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

// Whether any lane of a comparison holds.
inline bool any_lane(i32x16 v) {
  uint64_t lanes[kLanes / 2], any = 0;
  std::memcpy(lanes, &v, sizeof v);
  for (uint64_t lane : lanes) any |= lane;
  return any != 0;
}

// Denormals become 0 of the same sign.
inline f32x16 without_denormals(f32x16 value) {
  const u32x16 bits = (u32x16)value;
  return (f32x16)(bits & ((u32x16)((bits & 0x7f800000u) > 0u) | 0x80000000u));
}

// bf16 is the upper half of fp32; rounding is to nearest, ties to even, NaN stays NaN.
inline uint16_t to_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
inline f32x16 load_bf16(const uint16_t* from) {
  return (f32x16)(__builtin_convertvector(load<u16x16>(from), u32x16) << 16);
}
inline void store_bf16(uint16_t* to, f32x16 value) {
#if defined(__AVX512BF16__)
  store(to, (__m256i)_mm512_cvtneps_pbh((__m512)value));
#else
#if defined(QUIRE_EMULATES_AMX)  // as the instruction above does
  value = without_denormals(value);
#endif
  u32x16 bits = (u32x16)value;
  u32x16 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  u32x16 nan = (bits >> 16) | 0x40u;
  u32x16 is_nan = (u32x16)((bits & 0x7fffffffu) > 0x7f800000u);
  store(to, __builtin_convertvector((rounded & ~is_nan) | (nan & is_nan), u16x16));
#endif
}

// Pairs of bf16, the first one in the lower half.
inline u32x16 bf16_pairs(f32x16 first, f32x16 second) {
  uint16_t halves[2][kLanes];
  store_bf16(halves[0], first);
  store_bf16(halves[1], second);
  const u32x16 lower = __builtin_convertvector(load<u16x16>(halves[0]), u32x16);
  return lower | (__builtin_convertvector(load<u16x16>(halves[1]), u32x16) << 16);
}

inline f32x16 load_f32(const float* from) { return load<f32x16>(from); }
inline f32x16 load_f32(const uint16_t* from) { return load_bf16(from); }
inline void store_f32(float* to, f32x16 value) { store(to, value); }
inline void store_f32(uint16_t* to, f32x16 value) { store_bf16(to, value); }

// The first `count` of 16 values, for ends that are not a whole vector; behind them are zeros. T:
// float, or uint16_t as bf16.
template <typename T>
inline f32x16 load_some(const T* from, int64_t count) {
  if (count >= kLanes) return load_f32(from);
  T values[kLanes] = {};
  for (int64_t i = 0; i < count; ++i) values[i] = from[i];
  return load_f32(values);
}
template <typename T>
inline void store_some(T* to, f32x16 value, int64_t count) {
  if (count >= kLanes) return store_f32(to, value);
  T values[kLanes];
  store_f32(values, value);
  for (int64_t i = 0; i < count; ++i) to[i] = values[i];
}

// Every lane of `a` and `b` is a pair of bf16 (lower half first): acc + a0 * b0 + a1 * b1.
inline f32x16 dot_bf16(f32x16 acc, u32x16 a, u32x16 b) {
#if defined(__AVX512BF16__) && !defined(QUIRE_TILES)
  return (f32x16)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
#else
  const u32x16 high = 0xffff0000u - u32x16{};
  acc = fma((f32x16)(a << 16), (f32x16)(b << 16), acc);
  return fma((f32x16)(a & high), (f32x16)(b & high), acc);
#endif
}

// The whole number below x <= 0; of a whole x itself, or the one below it where that takes fewer
// operations. Behind -127 something below it; NaN stays NaN.
inline f32x16 floor_nonpositive(f32x16 x) {
#if defined(__AVX512F__)
  return (f32x16)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
#elif defined(QUIRE_EMULATES_AMX)
  f32x16 whole;
  for (int i = 0; i < kLanes; ++i) whole[i] = __builtin_floorf(x[i]);
  return whole;
#else
  const i32x16 towards_zero = __builtin_convertvector(max(x, splat(-127.0f)), i32x16);
  return x == x ? __builtin_convertvector(towards_zero, f32x16) - 1.0f : x;
#endif
}

// 2^(n + f) for 0 <= f <= 1: a minimax polynomial, exact at both ends, so that 2^0 is 1; error
// below 3 ulp. From n = -127 down exactly 0; of NaN it is NaN.
inline f32x16 power_of_two(f32x16 n, f32x16 f) {
  f32x16 p = splat(1.8793186e-3f);
  p = fma(p, f, splat(8.990995e-3f));
  p = fma(p, f, splat(5.5818677e-2f));
  p = fma(p, f, splat(2.4015927e-1f));
  p = fma(p, f, splat(6.931517e-1f));
  p = fma(p, f, splat(1.0f));
#if defined(__AVX512F__)
  const __mmask16 is_zero = _mm512_cmp_ps_mask((__m512)n, _mm512_set1_ps(-127.0f), _CMP_LE_OQ);
  return (f32x16)_mm512_maskz_scalef_ps(~is_zero, (__m512)p, (__m512)n);
#else
  const i32x16 exponent = (__builtin_convertvector(n, i32x16) + 127) << 23;
  const f32x16 value = p * (f32x16)exponent;
  return n <= -127.0f ? f32x16{} : value;
#endif
}

// 2^x and e^x for x <= 0, also for -inf; error below 3 and 4 ulp.
inline f32x16 exp2_nonpositive(f32x16 x) {
  const f32x16 n = floor_nonpositive(x);
  return power_of_two(n, x - n);
}
inline f32x16 exp_nonpositive(f32x16 x) {
  const f32x16 n = floor_nonpositive(x * kLog2E);
  // n ln 2 in two parts; the first part times n is exact.
  const f32x16 r = fma(n, splat(2.12194440e-4f), fma(n, splat(-0.693359375f), x));
  return power_of_two(n, r * kLog2E);
}

// tanh x; error below 2^-22 of 1.
inline f32x16 tanh_of(f32x16 x) {
  const f32x16 power = exp_nonpositive((x > 0.0f ? -x : x) * 2.0f);
  const f32x16 size = (1.0f - power) / (1.0f + power);
  return x > 0.0f ? size : -size;
}

}  // namespace quire::QUIRE_ISA
