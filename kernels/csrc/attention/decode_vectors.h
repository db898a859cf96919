// The products of a decode step by AVX-512: keys and values go from the arena straight into
// registers. Prefetching is one piece ahead.
#pragma once

#include "attention/decode_query.h"

namespace quire::QUIRE_ISA {

inline u32x16 splat_u32(uint32_t value) { return value - u32x16{}; }

// ---- four words of 16 positions, transposed in registers ---------------------------------------

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

// ---- products ----------------------------------------------------------------------------------

template <int group, bool is_int8>
class DecodeProducts : public DecodeQuery {
 public:
  using DecodeQuery::DecodeQuery;

  void begin() const {}

  // Computes the scores of the tile's positions.
  void score(int tile, Span seen) const {
    const int end = tile + seen.end;
    for (int piece = tile + seen.begin / kPiece * kPiece; piece < end; piece += kPiece) {
      const char* from = keys(piece);
      // after the last piece of keys comes the tile's first piece of values
      const char* next =
          piece + kPiece < end ? keys(piece + kPiece) : values(tile + seen.begin / kPiece * kPiece);
      Fetch fetch{next, stride_, num_heads_ * head_bytes_};
      float* scores = at_.scores + piece - tile;
      int head = 0;
      for (; head + kHeads <= num_heads_; head += kHeads)
        score_piece<kHeads>(from, fetch, head, scores);
      for (; head < num_heads_; ++head) score_piece<1>(from, fetch, head, scores);
    }
  }

  // Adds the tile's values.
  void add_values(int tile, Span seen) const {
    for (int row = 0; row < num_rows_; ++row) {
      float* sums = at_.sums + row * call_.head_dim;
      for (int i = 0; i < call_.head_dim; i += kLanes)
        store_f32(sums + i, load_f32(sums + i) * at_.corrections[row]);
    }
    for (int piece = seen.begin / kPiece * kPiece; piece < seen.end; piece += kPiece) {
      const char* from = values(tile + piece);
      const char* next =
          piece + kPiece < seen.end ? values(tile + piece + kPiece) : keys(tile + kTile);
      const Span some = {seen.begin > piece ? seen.begin - piece : 0,
                         seen.end - piece < kPiece ? seen.end - piece : kPiece};
      Fetch fetch{next, stride_, num_heads_ * head_bytes_};
      for (int head = 0; head < num_heads_; ++head)
        add<8 / group>(from + head * head_bytes_, fetch, some,
                       at_.probabilities + head * group * (kTile / 2) + piece / 2,
                       at_.sums + head * group * call_.head_dim);
    }
  }

 private:
  using Words = HeadWords<Dtype::bf16, is_int8>;

  static constexpr int kHeads = group <= 3 ? 2 : 1;  // at once, so that no sum waits for itself
  static constexpr int kWords = is_int8 ? 8 : 4;     // of a row, at once

  // Computes a piece's scores for some heads.
  template <int heads>
  void score_piece(const char* piece, Fetch& fetch, int head, float* scores) const {
    const uint32_t* queries = queries_ + head * group * num_words_;
    piece += head * head_bytes_;
    f32x16 sums[heads][group] = {};
    for (int word = 0; word < num_words_; word += kWords) {
#pragma GCC unroll 4
      for (int i = 0; i < heads; ++i) {
        fetch.some(4);
        u32x16 words[kWords];
        words_of<is_int8>(piece + i * head_bytes_ + Words::kBytes * word, stride_, words);
#pragma GCC unroll 8
        for (int k = 0; k < kWords; ++k)
#pragma GCC unroll 8
          for (int g = 0; g < group; ++g)
            sums[i][g] = dot_bf16(sums[i][g], words[k],
                                  splat_u32(queries[(i * group + g) * num_words_ + word + k]));
      }
    }
#pragma GCC unroll 4
    for (int i = 0; i < heads; ++i)
#pragma GCC unroll 8
      for (int g = 0; g < group; ++g)
        store_f32(scores + ((head + i) * group + g) * kTile, sums[i][g]);
  }

  // sums += probabilities * values, over the visible positions of a piece; `vectors` vectors of 16
  // words at a time.
  template <int vectors>
  void add(const char* piece, Fetch& fetch, Span seen, const uint32_t* probabilities, float* sums,
           int word = 0) const {
    for (; word + vectors * kLanes <= num_words_; word += vectors * kLanes)
      add_columns<vectors>(piece, fetch, seen, probabilities, sums, word);
    if constexpr (vectors > 1) add<vectors / 2>(piece, fetch, seen, probabilities, sums, word);
  }

  template <int vectors>
  void add_columns(const char* piece, Fetch& fetch, Span seen, const uint32_t* probabilities,
                   float* sums, int word) const {
    f32x16 all[group][2 * vectors];
    sums += 2 * word;
#pragma GCC unroll 8
    for (int g = 0; g < group; ++g)
#pragma GCC unroll 16
      for (int i = 0; i < 2 * vectors; ++i)
        all[g][i] = load_f32(sums + g * call_.head_dim + i * kLanes);
    for (int pair = seen.begin / 2; 2 * pair < seen.end; ++pair) {
      const char* row = piece + 2 * pair * stride_;
      const bool sees_first = 2 * pair >= seen.begin, sees_second = 2 * pair + 1 < seen.end;
      u32x16 weights[group];
#pragma GCC unroll 8
      for (int g = 0; g < group; ++g) weights[g] = splat_u32(probabilities[g * (kTile / 2) + pair]);
#pragma GCC unroll 8
      for (int i = 0; i < vectors; ++i) {
        const char* from = row + Words::kBytes * (word + kLanes * i);
        auto a = load<typename Words::Sixteen>(from);
        auto b = load<typename Words::Sixteen>(from + stride_);
        fetch.some(is_int8 ? 1 : 2);
        if (!sees_first) a = typename Words::Sixteen{};  // it may be NaN, and 0 * NaN is NaN
        if (!sees_second) b = typename Words::Sixteen{};
        u32x16 lower, upper;
        Words::interleave(a, b, lower, upper);
#pragma GCC unroll 8
        for (int g = 0; g < group; ++g) {
          all[g][2 * i] = dot_bf16(all[g][2 * i], weights[g], lower);
          all[g][2 * i + 1] = dot_bf16(all[g][2 * i + 1], weights[g], upper);
        }
      }
    }
#pragma GCC unroll 8
    for (int g = 0; g < group; ++g)
#pragma GCC unroll 16
      for (int i = 0; i < 2 * vectors; ++i)
        store_f32(sums + g * call_.head_dim + i * kLanes, all[g][i]);
  }
};

}  // namespace quire::QUIRE_ISA
