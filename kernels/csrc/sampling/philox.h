// Random numbers (Salmon et al., 2011: Philox4x64-10), laid out as
// `services/engine/sampling/philox.py` says.
#pragma once

#include "isa/simd.h"
#include "kernels.h"

namespace quire::QUIRE_ISA {

typedef uint64_t u64x8 __attribute__((vector_size(64)));

inline u64x8 splat_u64(uint64_t value) { return value - u64x8{}; }

// The products of the lower halves of each lane.
inline u64x8 mul_halves(u64x8 a, u64x8 b) {
#if defined(__AVX512F__)
  return (u64x8)_mm512_mul_epu32((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  __m256i x[2], y[2];
  std::memcpy(x, &a, sizeof a);
  std::memcpy(y, &b, sizeof b);
  for (int i = 0; i < 2; ++i) x[i] = _mm256_mul_epu32(x[i], y[i]);
  std::memcpy(&a, x, sizeof a);
  return a;
#else
  return (a & 0xffffffffu) * (b & 0xffffffffu);
#endif
}

// a * b, 128 bits a lane.
inline void mul_wide(u64x8 a, u64x8 b, u64x8& high, u64x8& low) {
  const u64x8 half = splat_u64(0xffffffffu);
  const u64x8 ll = mul_halves(a, b), lh = mul_halves(a, b >> 32);
  const u64x8 hl = mul_halves(a >> 32, b), hh = mul_halves(a >> 32, b >> 32);
  const u64x8 middle = (ll >> 32) + (lh & half) + (hl & half);
  high = hh + (lh >> 32) + (hl >> 32) + (middle >> 32);
  low = (middle << 32) | (ll & half);
}

// Eight counters side by side, from counter 8 * block on, make 64 numbers.
inline void uniforms(const DrawKey& key, int64_t block, float* numbers) {
  const u64x8 multiplier0 = splat_u64(0xD2E7470EE14C6C93u);
  const u64x8 multiplier1 = splat_u64(0xCA5A826395121157u);
  u64x8 c0 = splat_u64(static_cast<uint64_t>(block) * 8) + u64x8{0, 1, 2, 3, 4, 5, 6, 7};
  u64x8 c1{}, c2 = splat_u64(key.sequence_index), c3 = splat_u64(key.position);
  uint64_t key0 = key.seed, key1 = 0;
  for (int round = 0; round < 10; ++round) {
    u64x8 high0, low0, high1, low1;
    mul_wide(c0, multiplier0, high0, low0);
    mul_wide(c2, multiplier1, high1, low1);
    c0 = high1 ^ c1 ^ splat_u64(key0);
    c1 = low1;
    c2 = high0 ^ c3 ^ splat_u64(key1);
    c3 = low0;
    key0 += 0x9E3779B97F4A7C15u;
    key1 += 0xBB67AE8584CAA73Bu;
  }
  uint64_t outputs[4][8], in_order[32];
  store(outputs[0], c0);
  store(outputs[1], c1);
  store(outputs[2], c2);
  store(outputs[3], c3);
  for (int counter = 0; counter < 8; ++counter)
    for (int i = 0; i < 4; ++i) in_order[counter * 4 + i] = outputs[i][counter];
  const f32x16 closest_below_one = splat(1.0f - 1.0f / (1 << 24));
  for (int i = 0; i < kUniforms; i += kLanes) {
    const u32x16 halves = load<u32x16>(reinterpret_cast<const uint32_t*>(in_order) + i);
    const f32x16 number = (__builtin_convertvector(halves, f32x16) + 0.5f) * 0x1p-32f;
    store(numbers + i, number < closest_below_one ? number : closest_below_one);
  }
}

}  // namespace quire::QUIRE_ISA
