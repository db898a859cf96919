// The products of a decode step by tiles: a piece's keys are an operand as they lie in the arena.
// Pieces are fetched two ahead, because a product of values takes two.
#pragma once

#include "attention/decode_query.h"
#include "isa/tiles.h"

namespace quire::QUIRE_ISA {

template <int group, bool is_int8>
class DecodeProducts : public DecodeQuery {
 public:
  using DecodeQuery::DecodeQuery;

  // Arranges the queries: each 16 words of a head become an operand of a product.
  void begin() const {
    for (int head = 0; head < num_heads_; ++head)
      for (int g = 0; g < group; ++g)
        for (int word = 0; word < num_words_; ++word)
          at_.queries[(head * num_words_ + word) * group + g] =
              queries_[(head * group + g) * num_words_ + word];
  }

  // Computes the scores of the tile's positions.
  void score(int tile, Span seen) {
    for (int piece = seen.begin / kPiece; piece * kPiece < seen.end; ++piece) {
      Fetch fetch = two_ahead(tile, piece);
      for (int head = 0; head < num_heads_; ++head)
        score_piece(keys(tile + piece * kPiece), fetch, head, at_.scores + piece * kPiece);
    }
  }

  // Adds the tile's values, 32 positions at a time. A position that is hidden may hold NaN, so its
  // value is 0, as its weight is.
  void add_values(int tile, Span seen) {
    for (int row = 0; row < num_rows_; ++row) {
      float* sums = at_.sums + row * call_.head_dim;
      for (int i = 0; at_.corrections[row] != 1.0f && i < call_.head_dim; i += kLanes)
        store_f32(sums + i, without_denormals(load_f32(sums + i) * at_.corrections[row]));
    }
    for (int half = 0; half < kTile; half += 2 * kPiece) {
      if (seen.end <= half || seen.begin >= half + 2 * kPiece) continue;
      Fetch fetch[2];
      const char* from[2];
      for (int i = 0; i < 2; ++i) {
        fetch[i] = two_ahead(tile, kPieces + half / kPiece + i);
        from[i] = values(tile + half + i * kPiece);
      }
      for (int head = 0; head < num_heads_; ++head) {
        for (int pair = 0; pair < kPiece; ++pair) {
          const int which = pair / (kPiece / 2), position = half + 2 * pair;
          const bool sees_first = position >= seen.begin && position < seen.end;
          const bool sees_second = position + 1 >= seen.begin && position + 1 < seen.end;
          interleave(from[which] + (2 * pair - which * kPiece) * stride_ + head * head_bytes_,
                     sees_first, sees_second, fetch[which], at_.tile + pair * call_.head_dim);
        }
        const int row = head * group;
        tiles_.add_values(at_.probabilities + row * (kTile / 2) + half / 2, 2 * kTile, at_.tile,
                          call_.head_dim, at_.sums + row * call_.head_dim);
      }
    }
  }

 private:
  using Words = HeadWords<Dtype::bf16, is_int8>;

  // The piece to fetch beside a tile's piece: four of keys, four of values, then the next tile.
  Fetch two_ahead(int tile, int piece) const {
    piece += 2;
    const bool is_value = piece >= kPieces && piece < 2 * kPieces;
    const int position = tile + (piece < 2 * kPieces ? piece % kPieces : piece - kPieces) * kPiece;
    return {is_value ? values(position) : keys(position), stride_, num_heads_ * head_bytes_};
  }

  // Computes a piece's scores for a head.
  void score_piece(const char* piece, Fetch& fetch, int head, float* scores) {
    const char* keys = piece + head * head_bytes_;
    const uint32_t* queries = queries_of(head);
    int64_t stride = stride_;
    if constexpr (is_int8) {
      for (int i = 0; i < kPiece; ++i, keys += stride_)
        for (int word = 0; word < num_words_; word += kLanes)
          store(at_.tile + i * num_words_ + word,
                Words::words(load<typename Words::Sixteen>(keys + Words::kBytes * word)));
      keys = reinterpret_cast<const char*>(at_.tile);
      stride = 4 * num_words_;
    }
    tiles_.clear_scores();
    for (int word = 0; word < num_words_; word += kTileSteps) {
      fetch.some(is_int8 ? kPiece / 2 : kPiece);
      tiles_.add_scores(keys + 4 * word, stride, queries + word * group);
    }
    float all[kPiece * group];
    tiles_.store_scores(all);
    for (int g = 0; g < group; ++g)
      for (int i = 0; i < kPiece; ++i) scores[(head * group + g) * kTile + i] = all[i * group + g];
  }

  // Writes the pairs of two positions' values as [head_dim].
  void interleave(const char* row, bool sees_first, bool sees_second, Fetch& fetch,
                  uint32_t* out) const {
    for (int word = 0; word < num_words_; word += kLanes, out += 2 * kLanes) {
      typename Words::Sixteen a = {}, b = {};
      if (sees_first) a = load<typename Words::Sixteen>(row + Words::kBytes * word);
      if (sees_second) b = load<typename Words::Sixteen>(row + stride_ + Words::kBytes * word);
      fetch.some(is_int8 ? 1 : 2);
      u32x16 lower, upper;
      Words::interleave(a, b, lower, upper);
      store(out, lower);
      store(out + kLanes, upper);
    }
  }

  const uint32_t* queries_of(int head) const { return at_.queries + head * num_words_ * group; }

  DecodeTiles tiles_{group};
};

}  // namespace quire::QUIRE_ISA
