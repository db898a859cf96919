// Causal attention over the paged arena, for decode and prefill alike. A tile of keys and values is
// read once for all queries of the call and all heads that share it.
//
// In this file, a row is one query of one head of the group: row r of a call is query r / group of
// head r % group. A row takes the tiles that it sees in order, and from a tile exactly the
// positions that it sees, whatever the other rows see. So a row's result has the same bits in every
// batch, chunk and call.
//
// A call may also take one query each from several rows of the batch that begin in the same blocks:
// the shared positions are read once for all of them, and then each continues alone.
//
// Head sizes are even and at most kMostHeadDim; multiples of 32 (bf16) or 16 (fp32) are fastest.
#pragma once

#include "attention/decode.h"
#include "attention/layout.h"
#include "attention/product.h"
#include "attention/softmax.h"
#include "attention/tile.h"
#include "isa/simd.h"
#include "kernels.h"

namespace quire::QUIRE_ISA {

inline int smaller(int a, int b) { return a < b ? a : b; }
inline int larger(int a, int b) { return a > b ? a : b; }

// Computes up to kAttentionRows rows of a call.
template <Dtype dtype, bool is_int8>
class AttentionRows {
 public:
  // Reads keys and values by the block table of `row`.
  AttentionRows(const AttentionCall& call, int row, int kv_head, const AttentionScratch& scratch)
      : call_(call),
        at_(scratch),
        row_(row),
        kv_head_(kv_head),
        group_(call.num_heads / call.num_kv_heads),
        num_words_(call.head_dim / kPerWord),
        num_columns_(num_columns(dtype, call.head_dim)),
        num_steps_(kTiled<dtype> ? num_columns_ / kPerWord : num_words_) {}

  // Adds queries [begin, end) of a row of the batch, counted from the row's first; their positions
  // ascend.
  void add(int row, int begin, int end) {
    const int first = call_.cu_query_lens[row];
    const int first_position = call_.context_lens[row] - call_.cu_query_lens[row + 1] + first;
    for (int query = begin; query < end; ++query)
      for (int i = 0; i < group_; ++i, ++num_rows_) {
        tokens_[num_rows_] = first + query;
        positions_[num_rows_] = first_position + query;
      }
  }

  void attend(const Begun& begun) {
    start();
    if (begun.end > 0) {
      std::memcpy(at_.sums, begun.sums, sizeof(float) * num_rows_ * num_columns_);
      std::memcpy(at_.states, begun.states, sizeof(SoftmaxState) * num_rows_);
    }
    pass(larger(first_visible(0), begun.end), position(num_rows_ - 1) + 1);
    for (int row = 0; row < num_rows_; ++row) finish(row);
  }

  // Computes only positions below `end`, which all rows see. The results of the group of heads of
  // the piece's row i go to sums + i * stride vectors of columns, and to states + i * stride.
  void begin(int end, float* sums, SoftmaxState* states, int stride) {
    start();
    pass(0, end);
    for (int row = 0; row < num_rows_; row += group_) {
      const int to = row / group_ * stride;
      std::memcpy(sums + int64_t{to} * num_columns_, at_.sums + int64_t{row} * num_columns_,
                  sizeof(float) * group_ * num_columns_);
      std::memcpy(states + to, at_.states + row, sizeof(SoftmaxState) * group_);
    }
  }

 private:
  static constexpr int kPerWord = per_word(dtype);
  static constexpr int kSteps = kTile / kPerWord;
  using Element = typename Word<dtype>::Element;
  using Words = HeadWords<dtype, is_int8>;

  // Computes all rows over the positions [begin, end).
  void pass(int begin, int end) {
    int tile = begin / kTile * kTile;
    TileRows where[2];  // addresses of this tile and the next
    locate(call_, row_, kv_head_, tile, begin, end, where[0]);
    for (int parity = 0; tile < end; tile += kTile, parity ^= 1) {
      int first = 0, last = num_rows_;  // rows that see some of the tile
      while (position(first) < tile) ++first;
      while (first_visible(last - 1) >= tile + kTile) --last;
      TileRows &rows = where[parity], &next = where[parity ^ 1];
      locate_next(tile + kTile, begin, end, next);
      if constexpr (is_int8) {
        read_scales(rows.keys, call_.head_dim, scales_.keys);
        read_scales(rows.values, call_.head_dim, scales_.values);
      }
      const int seen = smaller(kTile, end - tile);
      transpose_keys<Words>(rows, next, seen, num_words_, at_.tile);
      std::memset(at_.tile + num_words_ * kTile, 0, 4 * kTile * (num_steps_ - num_words_));
      for (int row = first; row < last; row += kBlockRows<dtype>)
        weigh(tile, row, smaller(kBlockRows<dtype>, last - row));
      interleave_values<dtype, Words>(rows, next, seen, num_words_, at_.tile);
      const bool is_seen_whole =
          first_visible(last - 1) <= larger(tile, begin) && position(first) + 1 >= tile + seen;
      takes_whole_ = is_int8 || is_seen_whole ||
                     all_finite<dtype>(at_.tile, computed(seen) / kPerWord * num_columns_);
      for (int row = first; row < last; row += kBlockRows<dtype>)
        add_values(tile, row, smaller(kBlockRows<dtype>, last - row));
    }
  }

  // Locates the tile to prefetch: the next one, or behind the last one the first tile of the next
  // head, with which the caller usually continues.
  void locate_next(int tile, int begin, int end, TileRows& rows) const {
    if (tile < end) return locate(call_, row_, kv_head_, tile, begin, end, rows);
    const int visible_end = kv_head_ + 1 < call_.num_kv_heads ? end : 0;
    locate(call_, row_, kv_head_ + 1, begin / kTile * kTile, begin, visible_end, rows);
  }

  int position(int row) const { return positions_[row]; }
  int first_visible(int row) const {
    return call_.window > 0 ? larger(0, position(row) - call_.window + 1) : 0;
  }
  Span visible(int tile, int row) const {
    return {larger(0, first_visible(row) - tile), smaller(kTile, position(row) + 1 - tile)};
  }

  // The offset of a row's query or output, in elements.
  int64_t head_of(int row) const { return int64_t{kv_head_} * group_ + row % group_; }
  int64_t place(int row, int64_t stride) const {
    return tokens_[row] * stride + head_of(row) * call_.head_dim;
  }

  void start() {
    const auto* q = static_cast<const Element*>(call_.q);
    for (int row = 0; row < num_rows_; ++row) {
      uint32_t* query = at_.queries + int64_t{row} * num_steps_;
      std::memcpy(query, q + place(row, call_.q_stride), 4 * num_words_);
      std::memset(query + num_words_, 0, 4 * (num_steps_ - num_words_));
      at_.states[row] = {kLowest, {}};
    }
    std::memset(at_.sums, 0, sizeof(float) * num_rows_ * num_columns_);
  }

  // Computes the probabilities of a block of rows over the tile of keys.
  void weigh(int tile, int row, int num_rows) {
    Span spans[kBlockRows<dtype>];
    for (int i = 0; i < num_rows; ++i) spans[i] = visible(tile, row + i);
    // No row sees positions behind those that the last row sees.
    const int seen = (spans[num_rows - 1].end + kLanes - 1) / kLanes * kLanes;
    multiply_({at_.queries + int64_t{row} * num_steps_, num_steps_, at_.tile, kTile, at_.scores,
               kTile, nullptr, num_steps_},
              num_rows, seen);
    for (int i = 0; i < num_rows; i += kLanes)
      softmax_step<dtype>(at_.scores + i * kTile, is_int8 ? &scales_ : nullptr, score_scale(call_),
                          spans + i, at_.states + row + i, smaller(kLanes, num_rows - i),
                          spans[num_rows - 1].end, at_.probabilities + (row + i) * kSteps,
                          at_.corrections + row + i);
  }

  // Adds the tile of values to the outputs of a block of rows. A hidden position has a probability
  // of 0, which hides all values but those that are not finite.
  void add_values(int tile, int row, int num_rows) {
    if (takes_whole_)
      return add_steps(at_.tile, row, num_rows,
                       {visible(tile, row).begin, visible(tile, row + num_rows - 1).end});
    for (int i = row; i < row + num_rows; ++i) {
      alignas(64) uint32_t seen[kSteps * kMaxColumns];
      copy_visible<dtype>(at_.tile, visible(tile, i), num_columns_, seen);
      add_steps(seen, i, 1, visible(tile, i));
    }
  }

  void add_steps(const uint32_t* values, int row, int num_rows, Span span) {
    const int begin = kTiled<dtype> ? 0 : span.begin / kPerWord;
    const int end = (kTiled<dtype> ? computed(span.end) : span.end + kPerWord - 1) / kPerWord;
    multiply_(
        {at_.probabilities + row * kSteps + begin, kSteps, values + int64_t{begin} * num_columns_,
         num_columns_, at_.sums + int64_t{row} * num_columns_, num_columns_, at_.corrections + row,
         end - begin},
        num_rows, num_columns_);
  }

  void finish(int row) const {
    float* sums = at_.sums + int64_t{row} * num_columns_;
    unsign_zeros(sums, num_columns_);
    const float total = total_of(call_, at_.states[row], head_of(row));
    Element all[kMaxColumns];
    for (int i = 0; i < num_columns_; i += kLanes * kPerWord) join<dtype>(sums + i, total, all + i);
    std::memcpy(static_cast<Element*>(call_.out) + place(row, call_.out_stride), all,
                call_.head_dim * sizeof(Element));
  }

  const AttentionCall& call_;
  const AttentionScratch at_;
  const int row_, kv_head_;
  const int group_;
  const int num_words_, num_columns_;
  const int num_steps_;  // words, for tiles padded with zeros
  int num_rows_ = 0;     // (query, head) pairs
  Multiplier<dtype> multiply_;
  bool takes_whole_ = true;         // whether all values of the tile are taken
  TileScales scales_;               // if KV is in int8
  int64_t tokens_[kAttentionRows];  // token indices of the rows' queries
  int positions_[kAttentionRows];
};

// Whether no window hides positions from a piece's rows. Otherwise their shared positions are not
// computed together.
inline bool sees_all(const AttentionCall& call, const AttentionPiece& piece) {
  if (call.window == 0) return true;
  for (int i = 0; i < piece.num_rows; ++i)
    if (call.context_lens[piece.rows[i]] > call.window) return false;
  return true;
}

template <Dtype dtype, bool is_int8>
inline void attention_of(const AttentionCall& call, const AttentionPiece& piece, int head_begin,
                         int head_end, void* scratch) {
  const AttentionScratch at(call, scratch);
  const int64_t columns = num_columns(dtype, call.head_dim);
  const int group = call.num_heads / call.num_kv_heads;
  const int stride = (head_end - head_begin) * group;  // from row to row, in sums and states
  const int shared = sees_all(call, piece) ? piece.shared : 0;
  for (int head = head_begin; shared > 0 && head < head_end; ++head) {
    const int first = (head - head_begin) * group;
    AttentionRows<dtype, is_int8> rows(call, piece.rows[0], head, at);
    for (int i = 0; i < piece.num_rows; ++i) rows.add(piece.rows[i], 0, 1);
    rows.begin(shared, at.begun_sums + first * columns, at.begun_states + first, stride);
  }
  const int most = kAttentionRows / group;
  for (int i = 0; i < piece.num_rows; ++i) {
    Begun begun{shared, at.begun_sums + i * stride * columns, at.begun_states + i * stride};
    if (decode(call, piece.rows[i], head_begin, head_end, begun, at)) continue;
    for (int head = head_begin; head < head_end; ++head) {
      for (int query = piece.query_begin; query < piece.query_end; query += most) {
        AttentionRows<dtype, is_int8> rows(call, piece.rows[i], head, at);
        rows.add(piece.rows[i], query, smaller(query + most, piece.query_end));
        rows.attend(begun);
      }
      begun.sums += group * columns;
      begun.states += group;
    }
  }
}

inline void attention(const AttentionCall& call, const AttentionPiece& piece, int head_begin,
                      int head_end, void* scratch) {
  const auto attend = call.kv.is_int8
                          ? (call.dtype == Dtype::f32 ? attention_of<Dtype::f32, true>
                                                      : attention_of<Dtype::bf16, true>)
                          : (call.dtype == Dtype::f32 ? attention_of<Dtype::f32, false>
                                                      : attention_of<Dtype::bf16, false>);
  attend(call, piece, head_begin, head_end, scratch);
}

inline size_t attention_scratch(const AttentionCall& call) {
  return AttentionScratch(call, nullptr).num_bytes;
}

}  // namespace quire::QUIRE_ISA
