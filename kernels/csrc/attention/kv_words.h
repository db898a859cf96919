// The words of keys and values, from the arena's elements or from its bytes in int8.
//
// A word is what a lane of a dot product takes: one fp32 or a pair of bf16. bf16 has every byte
// exactly, so all instruction sets make the same words of int8.
#pragma once

#include "isa/simd.h"
#include "kernels.h"

namespace quire::QUIRE_ISA {

#if defined(__AVX512VBMI__)

// The lower and the upper byte of the bf16 of each number from 0 to 127.
struct Bf16Tables {
  alignas(64) uint8_t lower[128] = {};
  alignas(64) uint8_t upper[128] = {};

  constexpr Bf16Tables() {
    for (int value = 1; value < 128; ++value) {
      int exponent = 0;
      while (value >> (exponent + 1)) ++exponent;
      const int bits = (127 + exponent) << 7 | (value << (7 - exponent) & 0x7f);
      lower[value] = static_cast<uint8_t>(bits & 0xff);
      upper[value] = static_cast<uint8_t>(bits >> 8);
    }
  }
};
inline constexpr Bf16Tables kBf16Tables;

// Which bytes become the pair of lane i: first + i * stride and second + i * stride.
struct PairIndex {
  alignas(64) uint8_t of_bytes[64] = {};

  constexpr PairIndex(int first, int second, int stride) {
    for (int i = 0; i < 16; ++i)
      for (int half = 0; half < 2; ++half) {
        const int byte = (half ? second : first) + i * stride;
        of_bytes[4 * i + 2 * half] = static_cast<uint8_t>(byte);
        of_bytes[4 * i + 2 * half + 1] = static_cast<uint8_t>(64 + byte);
      }
  }
};
inline constexpr PairIndex kNeighbours{0, 1, 2};
inline constexpr PairIndex kFirstOfFour{0, 1, 4}, kLastOfFour{2, 3, 4};
inline constexpr PairIndex kEvenOfHalves{0, 32, 2}, kOddOfHalves{1, 33, 2};

// 64 bytes, all of them above -128, as bf16: the lower bytes and the upper bytes.
struct Bf16Bytes {
  __m512i lower, upper;

  explicit Bf16Bytes(__m512i values) {
    const __m512i sizes = _mm512_abs_epi8(values);
    const auto look_up = [&](const uint8_t* table) {
      return _mm512_permutex2var_epi8(load<__m512i>(table), sizes, load<__m512i>(table + 64));
    };
    const __m512i signs = _mm512_and_si512(values, _mm512_set1_epi8(-128));
    lower = look_up(kBf16Tables.lower);
    upper = _mm512_or_si512(look_up(kBf16Tables.upper), signs);
  }

  u32x16 pairs(const PairIndex& index) const {
    return (u32x16)_mm512_permutex2var_epi8(lower, load<__m512i>(index.of_bytes), upper);
  }
};

// Bytes 2 i and 2 i + 1 of 32.
inline u32x16 neighbours(u16x16 bytes) {
  return Bf16Bytes(_mm512_castsi256_si512((__m256i)bytes)).pairs(kNeighbours);
}

// The first two and the last two of each lane's four bytes.
inline void pairs_of_four(u32x16 bytes, u32x16& first, u32x16& last) {
  const Bf16Bytes all((__m512i)bytes);
  first = all.pairs(kFirstOfFour);
  last = all.pairs(kLastOfFour);
}

// A byte of a and the same one of b: bytes 2 i, and bytes 2 i + 1.
inline void pairs_of_two(u16x16 a, u16x16 b, u32x16& even, u32x16& odd) {
  const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512((__m256i)a), (__m256i)b, 1);
  const Bf16Bytes all(both);
  even = all.pairs(kEvenOfHalves);
  odd = all.pairs(kOddOfHalves);
}

#else

// The signed bytes 0 and 1 of each lane.
inline f32x16 first_byte(i32x16 lanes) {
  return __builtin_convertvector((lanes << 24) >> 24, f32x16);
}
inline f32x16 second_byte(i32x16 lanes) {
  return __builtin_convertvector((lanes << 16) >> 24, f32x16);
}
inline u32x16 pair_of(f32x16 first, f32x16 second) {
  return ((u32x16)first >> 16) | (u32x16)second;
}

inline u32x16 neighbours(u16x16 bytes) {
  const i32x16 lanes = (i32x16) __builtin_convertvector(bytes, u32x16);
  return pair_of(first_byte(lanes), second_byte(lanes));
}

inline void pairs_of_four(u32x16 bytes, u32x16& first, u32x16& last) {
  const i32x16 lanes = (i32x16)bytes;
  first = pair_of(first_byte(lanes), second_byte(lanes));
  last = pair_of(first_byte(lanes >> 16), second_byte(lanes >> 16));
}

inline void pairs_of_two(u16x16 a, u16x16 b, u32x16& even, u32x16& odd) {
  const i32x16 x = (i32x16) __builtin_convertvector(a, u32x16);
  const i32x16 y = (i32x16) __builtin_convertvector(b, u32x16);
  even = pair_of(first_byte(x), first_byte(y));
  odd = pair_of(second_byte(x), second_byte(y));
}

#endif

// `Sixteen`: 16 words as the arena has them. `interleave` makes pairs of the words of two
// positions: of their lower halves, and of their upper ones.
template <Dtype dtype, bool is_int8>
struct HeadWords {
  static constexpr int kBytes = 4;  // of a word in the arena
  using Sixteen = u32x16;

  static u32x16 words(Sixteen in_arena) { return in_arena; }
  static void interleave(Sixteen a, Sixteen b, u32x16& lower, u32x16& upper) {
    lower = (a & 0xffffu) | (b << 16);
    upper = (a >> 16) | (b & 0xffff0000u);
  }
};

template <>
struct HeadWords<Dtype::f32, true> {
  static constexpr int kBytes = 1;
  using Sixteen = i8x16;

  static u32x16 words(Sixteen in_arena) {
    return (u32x16) __builtin_convertvector(in_arena, f32x16);
  }
};

template <>
struct HeadWords<Dtype::bf16, true> {
  static constexpr int kBytes = 2;
  using Sixteen = u16x16;

  static u32x16 words(Sixteen in_arena) { return neighbours(in_arena); }
  static void interleave(Sixteen a, Sixteen b, u32x16& lower, u32x16& upper) {
    pairs_of_two(a, b, lower, upper);
  }
};

}  // namespace quire::QUIRE_ISA
