// Transposes four words of 16 positions in registers, for decode attention.
#pragma once

#include "attention/kv_words.h"
#include "isa/simd.h"

namespace quire::QUIRE_ISA {

#if defined(__AVX512F__)

// Returns a vector whose lane 4 j + k is word k of the four words at rows + 4 j strides.
inline u32x16 four_words(const char* rows, int64_t stride) {
  const auto words = [&](int row) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows + row * stride));
  };
  __m512i all = _mm512_castsi128_si512(words(0));
  all = _mm512_mask_broadcast_i32x4(all, 0x00f0, words(4));
  all = _mm512_mask_broadcast_i32x4(all, 0x0f00, words(8));
  return (u32x16)_mm512_mask_broadcast_i32x4(all, 0xf000, words(12));
}

typedef uint64_t u64x8 __attribute__((vector_size(64)));

// For every 16 bytes: the lower (upper) two words of a and b, interleaved.
inline u64x8 lower_words(u32x16 a, u32x16 b) {
  return (u64x8)__builtin_shufflevector(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13,
                                        29);
}
inline u64x8 upper_words(u32x16 a, u32x16 b) {
  return (u64x8)__builtin_shufflevector(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30,
                                        15, 31);
}
inline u32x16 lower_pairs(u64x8 a, u64x8 b) {
  return (u32x16)__builtin_shufflevector(a, b, 0, 8, 2, 10, 4, 12, 6, 14);
}
inline u32x16 upper_pairs(u64x8 a, u64x8 b) {
  return (u32x16)__builtin_shufflevector(a, b, 1, 9, 3, 11, 5, 13, 7, 15);
}

// Loads four words of each of a piece's rows, transposed: columns[k] has word k, its lanes are
// rows.
inline void four_columns(const char* rows, int64_t stride, u32x16 (&columns)[4]) {
  const u32x16 a = four_words(rows, stride), b = four_words(rows + stride, stride);
  const u32x16 c = four_words(rows + 2 * stride, stride);
  const u32x16 d = four_words(rows + 3 * stride, stride);
  columns[0] = lower_pairs(lower_words(a, b), lower_words(c, d));
  columns[1] = upper_pairs(lower_words(a, b), lower_words(c, d));
  columns[2] = lower_pairs(upper_words(a, b), upper_words(c, d));
  columns[3] = upper_pairs(upper_words(a, b), upper_words(c, d));
}

// Computes the words of four columns of a piece's rows: of bf16 one each, of int8 two each.
template <bool is_int8>
inline void words_of(const char* rows, int64_t stride, u32x16 (&words)[is_int8 ? 8 : 4]) {
  if constexpr (is_int8) {
    u32x16 columns[4];
    four_columns(rows, stride, columns);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) pairs_of_four(columns[i], words[2 * i], words[2 * i + 1]);
  } else {
    four_columns(rows, stride, words);
  }
}

#endif

}  // namespace quire::QUIRE_ISA
