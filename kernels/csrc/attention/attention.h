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
// Head sizes are even and at most kMaxHeadDim; multiples of 32 (bf16) or 16 (fp32) are fastest.
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
  AttentionRows(const AttentionCall& call, int row, int kv_head, int begin, int end, void* scratch)
      : call_(call),
        row_(row),
        kv_head_(kv_head),
        begin_(begin),
        num_rows_(end - begin),
        group_(call.num_heads / call.num_kv_heads),
        num_words_(call.head_dim / kPerWord),
        num_columns_(num_columns(dtype, call.head_dim)),
        num_steps_(kTiled<dtype> ? num_columns_ / kPerWord : num_words_) {
    use(scratch);
    const int first = call.cu_query_lens[row];
    const int first_position = call.context_lens[row] - call.cu_query_lens[row + 1] + first;
    for (int i = 0; i < num_rows_; ++i) {
      tokens_[i] = first + (begin + i) / group_;
      positions_[i] = first_position + (begin + i) / group_;
    }
  }

  // Takes one query of each of the piece's rows.
  AttentionRows(const AttentionCall& call, const AttentionPiece& piece, int kv_head, void* scratch)
      : call_(call),
        row_(piece.rows[0]),
        kv_head_(kv_head),
        begin_(0),
        num_rows_(piece.num_rows * (call.num_heads / call.num_kv_heads)),
        group_(call.num_heads / call.num_kv_heads),
        num_words_(call.head_dim / kPerWord),
        num_columns_(num_columns(dtype, call.head_dim)),
        num_steps_(kTiled<dtype> ? num_columns_ / kPerWord : num_words_) {
    use(scratch);
    for (int i = 0; i < num_rows_; ++i) {
      const int row = piece.rows[i / group_];
      tokens_[i] = call.cu_query_lens[row];
      positions_[i] = call.context_lens[row] - 1;
    }
  }

  void attend(const Begun& begun) {
    start();
    if (begun.end > 0) {
      std::memcpy(sums_, begun.sums, sizeof(float) * num_rows_ * num_columns_);
      std::memcpy(states_, begun.states, sizeof(SoftmaxState) * num_rows_);
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
      std::memcpy(sums + int64_t{to} * num_columns_, sums_ + int64_t{row} * num_columns_,
                  sizeof(float) * group_ * num_columns_);
      std::memcpy(states + to, states_ + row, sizeof(SoftmaxState) * group_);
    }
  }

 private:
  static constexpr int kPerWord = per_word(dtype);
  static constexpr int kSteps = kTile / kPerWord;
  using Element = typename Word<dtype>::Element;
  using Words = HeadWords<dtype, is_int8>;

  void use(void* scratch) {
    const AttentionLayout at = attention_layout(call_);
    char* memory = static_cast<char*>(scratch);
    tile_ = reinterpret_cast<uint32_t*>(memory + at.tile);
    queries_ = reinterpret_cast<uint32_t*>(memory + at.queries);
    scores_ = reinterpret_cast<float*>(memory + at.scores);
    probabilities_ = reinterpret_cast<uint32_t*>(memory + at.probabilities);
    sums_ = reinterpret_cast<float*>(memory + at.sums);
    states_ = reinterpret_cast<SoftmaxState*>(memory + at.states);
    corrections_ = reinterpret_cast<float*>(memory + at.corrections);
  }

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
      transpose_keys<Words>(rows, next, seen, num_words_, tile_);
      std::memset(tile_ + num_words_ * kTile, 0, 4 * kTile * (num_steps_ - num_words_));
      for (int row = first; row < last; row += kBlockRows<dtype>)
        weigh(tile, row, smaller(kBlockRows<dtype>, last - row));
      interleave_values<dtype, Words>(rows, next, seen, num_words_, tile_);
      if constexpr (kTiled<dtype> && !is_int8)
        is_finite_ = all_finite(tile_, computed(seen) / kPerWord * num_columns_);
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
  int64_t head_of(int row) const { return int64_t{kv_head_} * group_ + (begin_ + row) % group_; }
  int64_t place(int row, int64_t stride) const {
    return tokens_[row] * stride + head_of(row) * call_.head_dim;
  }

  void start() {
    const auto* q = static_cast<const Element*>(call_.q);
    for (int row = 0; row < num_rows_; ++row) {
      uint32_t* query = queries_ + int64_t{row} * num_steps_;
      std::memcpy(query, q + place(row, call_.q_stride), 4 * num_words_);
      std::memset(query + num_words_, 0, 4 * (num_steps_ - num_words_));
      states_[row] = {kLowest, {}};
    }
    std::memset(sums_, 0, sizeof(float) * num_rows_ * num_columns_);
  }

  // Computes the probabilities of a block of rows over the tile of keys.
  void weigh(int tile, int row, int num_rows) {
    Span spans[kBlockRows<dtype>];
    for (int i = 0; i < num_rows; ++i) spans[i] = visible(tile, row + i);
    // No row sees positions behind those that the last row sees.
    const int seen = (spans[num_rows - 1].end + kLanes - 1) / kLanes * kLanes;
    multiply_({queries_ + int64_t{row} * num_steps_, num_steps_, tile_, kTile, scores_, kTile,
               nullptr, num_steps_},
              num_rows, seen);
    for (int i = 0; i < num_rows; i += kLanes)
      softmax_step<dtype>(scores_ + i * kTile, is_int8 ? &scales_ : nullptr, score_scale(call_),
                          spans + i, states_ + row + i, smaller(kLanes, num_rows - i),
                          spans[num_rows - 1].end, probabilities_ + (row + i) * kSteps,
                          corrections_ + row + i);
  }

  // Adds the tile of values to the outputs of a block of rows: the positions that all rows see in
  // one product, those before and behind them for each row alone.
  void add_values(int tile, int row, int num_rows) {
    if constexpr (kTiled<dtype>) return add_whole(tile, row, num_rows);
    Span spans[kBlockRows<dtype>];
    Span common = {0, kTile};
    for (int i = 0; i < num_rows; ++i) {
      spans[i] = visible(tile, row + i);
      common = {larger(common.begin, spans[i].begin), smaller(common.end, spans[i].end)};
    }
    const int first = (common.begin + kPerWord - 1) / kPerWord;
    const int last = larger(first, common.end / kPerWord);
    if (first > 0)
      for (int i = 0; i < num_rows; ++i) {
        correct(row + i);
        add_alone(row + i, spans[i], 0, first);
      }
    multiply_({probabilities_ + row * kSteps + first, kSteps, tile_ + int64_t{first} * num_columns_,
               num_columns_, sums_ + int64_t{row} * num_columns_, num_columns_, corrections_ + row,
               last - first},
              num_rows, num_columns_);
    if (last < kSteps)
      for (int i = 0; i < num_rows; ++i) add_alone(row + i, spans[i], last, kSteps);
  }

  // Adds what the last of the rows sees of the tile. A hidden position has a probability of 0,
  // which hides all values but those that are not finite.
  void add_whole(int tile, int row, int num_rows) {
    const int num_steps = computed(visible(tile, row + num_rows - 1).end) / kPerWord;
    if (is_finite_) return add_tile(tile_, row, num_rows, num_steps);
    for (int i = row; i < row + num_rows; ++i) {
      alignas(64) uint32_t seen[kSteps * kMaxColumns];
      const Span span = visible(tile, i);
      copy_visible(tile_, span.begin, span.end, num_columns_, seen);
      add_tile(seen, i, 1, num_steps);
    }
  }

  void add_tile(const uint32_t* values, int row, int num_rows, int num_steps) {
    multiply_({probabilities_ + row * kSteps, kSteps, values, num_columns_,
               sums_ + int64_t{row} * num_columns_, num_columns_, corrections_ + row, num_steps},
              num_rows, num_columns_);
  }

  void correct(int row) {
    float* sums = sums_ + int64_t{row} * num_columns_;
    for (int i = 0; i < num_columns_; i += kLanes)
      store_f32(sums + i, load_f32(sums + i) * corrections_[row]);
    corrections_[row] = 1.0f;
  }

  // Adds the steps in [begin, end) where the row sees a position. A hidden position of a pair is
  // masked: it may be NaN, and a probability of 0 times NaN is NaN.
  void add_alone(int row, Span span, int begin, int end) {
    const float one = 1.0f;
    for (int step = begin; step < end; ++step) {
      const int position = step * kPerWord;
      if (position + kPerWord <= span.begin || position >= span.end) continue;
      const uint32_t* values = tile_ + int64_t{step} * num_columns_;
      uint32_t masked[kMaxColumns];
      if (position < span.begin || position + kPerWord > span.end) {
        const uint32_t mask = position < span.begin ? 0xffff0000u : 0x0000ffffu;
        for (int i = 0; i < num_columns_; ++i) masked[i] = values[i] & mask;
        values = masked;
      }
      multiply_({probabilities_ + row * kSteps + step, kSteps, values, num_columns_,
                 sums_ + int64_t{row} * num_columns_, num_columns_, &one, 1},
                1, num_columns_);
    }
  }

  void finish(int row) const {
    float* sums = sums_ + int64_t{row} * num_columns_;
    if constexpr (kTiled<dtype>) unsign_zeros(sums, num_columns_);
    const float total = total_of(call_, states_[row], head_of(row));
    Element all[kMaxColumns];
    for (int i = 0; i < num_columns_; i += kLanes * kPerWord) join<dtype>(sums + i, total, all + i);
    std::memcpy(static_cast<Element*>(call_.out) + place(row, call_.out_stride), all,
                call_.head_dim * sizeof(Element));
  }

  const AttentionCall& call_;
  const int row_, kv_head_;
  const int begin_, num_rows_;  // in (query, head) pairs
  const int group_;
  const int num_words_, num_columns_;
  const int num_steps_;  // words, for tiles padded with zeros
  Multiplier<dtype> multiply_;
  bool is_finite_ = true;           // the tile of values
  TileScales scales_;               // if KV is in int8
  uint32_t* tile_;                  // keys [steps, kTile], then values [kSteps, columns]
  uint32_t* queries_;               // [rows, steps]
  float* scores_;                   // [kBlockRows, kTile]
  uint32_t* probabilities_;         // [rows, kSteps]
  float* sums_;                     // [rows, columns]: values times probabilities
  SoftmaxState* states_;            // [rows]
  float* corrections_;              // [rows]: the current tile's factors of the sums
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
  const AttentionLayout at = attention_layout(call);
  char* memory = static_cast<char*>(scratch);
  auto* sums = reinterpret_cast<float*>(memory + at.begun_sums);
  auto* states = reinterpret_cast<SoftmaxState*>(memory + at.begun_states);
  const int64_t columns = num_columns(dtype, call.head_dim);
  const int group = call.num_heads / call.num_kv_heads;
  const int stride = (head_end - head_begin) * group;  // from row to row, in sums and states
  const int shared = sees_all(call, piece) ? piece.shared : 0;
  for (int head = head_begin; shared > 0 && head < head_end; ++head) {
    const int first = (head - head_begin) * group;
    AttentionRows<dtype, is_int8>(call, piece, head, scratch)
        .begin(shared, sums + first * columns, states + first, stride);
  }
  for (int i = 0; i < piece.num_rows; ++i) {
    Begun begun{shared, sums + i * stride * columns, states + i * stride};
    if (decode(call, piece.rows[i], head_begin, head_end, begun, scratch)) continue;
    for (int head = head_begin; head < head_end; ++head) {
      const int end = piece.query_end * group;
      for (int begin = piece.query_begin * group; begin < end; begin += kAttentionRows)
        AttentionRows<dtype, is_int8>(call, piece.rows[i], head, begin,
                                      smaller(begin + kAttentionRows, end), scratch)
            .attend(begun);
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
  return static_cast<size_t>(attention_layout(call).bytes);
}

}  // namespace quire::QUIRE_ISA
