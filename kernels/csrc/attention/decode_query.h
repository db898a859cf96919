// One query that attends to some of its key/value heads: where its keys and values lie, the softmax
// of a tile, and the memory that both kinds of products (decode_vectors.h, decode_tiles.h) work on.
#pragma once

#include "attention/layout.h"
#include "attention/softmax.h"
#include "attention/tile.h"
#include "isa/simd.h"
#include "kernels.h"

namespace quire::QUIRE_ISA {

inline constexpr int kPiece = 16;  // positions, all in one block
inline constexpr int kPieces = kTile / kPiece;

// Prefetches a piece line by line, in the order of its addresses. This order also starts the CPU's
// own prefetcher, which can have more requests in flight than a program. The lines go into L2,
// because two pieces of all heads do not fit into L1.
struct Fetch {
  const char* row;
  int64_t stride, num_bytes;  // from row to row; length of a row
  int64_t offset = 0;

  void some(int num_lines) {
    for (int i = 0; i < num_lines; ++i) {
      __builtin_prefetch(row + offset, 0, 2);
      offset += 64;
      if (offset >= num_bytes) {
        offset = 0;
        row += stride;
      }
    }
  }
};

// Rows of scratch memory are [heads, group]. By tiles, `tile` has [16, head_dim / 2] keys of int8,
// then [16, head_dim] values, and `queries` is [heads, words, group].
class DecodeQuery {
 public:
  DecodeQuery(const AttentionCall& call, int row, int head_begin, int head_end,
              const AttentionScratch& scratch)
      : call_(call),
        at_(scratch),
        group_(call.num_heads / call.num_kv_heads),
        num_heads_(head_end - head_begin),
        num_rows_(num_heads_ * group_),
        first_head_(head_begin * group_),
        num_words_(call.head_dim / 2),
        head_bytes_(kv_head_bytes(call.kv.is_int8, Dtype::bf16, call.head_dim)),
        stride_(int64_t{call.num_kv_heads} * head_bytes_),
        table_(call.block_tables + row * call.table_stride),
        end_(call.context_lens[row]),
        begin_(call.window > 0 && end_ > call.window ? end_ - call.window : 0),
        kv_(call.kv.data + head_begin * head_bytes_),
        queries_(reinterpret_cast<const uint32_t*>(static_cast<const bf16*>(call.q) +
                                                   call.cu_query_lens[row] * call.q_stride +
                                                   first_head_ * call.head_dim)),
        out_(static_cast<bf16*>(call.out) + call.cu_query_lens[row] * call.out_stride +
             first_head_ * call.head_dim) {}

  // Computes the query with its `products`, which are of the class that derives from this one.
  template <typename Products>
  void attend(Products& products, const Begun& begun) const {
    const size_t num_bytes = sizeof(float) * num_rows_ * call_.head_dim;
    products.begin();
    int tile = begin_ / kTile * kTile;
    if (begun.end > 0) {
      std::memcpy(at_.states, begun.states, sizeof(SoftmaxState) * num_rows_);
      std::memcpy(at_.sums, begun.sums, num_bytes);
      tile = begun.end;
    } else {
      for (int row = 0; row < num_rows_; ++row) at_.states[row] = {kLowest, {}};
      std::memset(at_.sums, 0, num_bytes);
    }
    for (; tile < end_; tile += kTile) {
      const Span seen = {begin_ > tile ? begin_ - tile : 0,
                         end_ - tile < kTile ? end_ - tile : kTile};
      products.score(tile, seen);
      soften(tile, seen);
      products.add_values(tile, seen);
    }
    for (int row = 0; row < num_rows_; ++row) {
      float* sums = at_.sums + row * call_.head_dim;
      unsign_zeros(sums, call_.head_dim);
      const float total = total_of(call_, at_.states[row], first_head_ + row);
      for (int i = 0; i < call_.head_dim; i += 2 * kLanes)
        join<Dtype::bf16>(sums + i, total, out_ + row * call_.head_dim + i);
    }
  }

 protected:
  // The address of the keys at `position`, or of the last piece for a position behind the end.
  const char* keys(int position) const {
    if (position >= end_) position = (end_ - 1) / kPiece * kPiece;
    const int64_t block = table_[position / call_.block_size] * call_.kv.block_bytes;
    return kv_ + block + position % call_.block_size * stride_;
  }
  const char* values(int position) const { return keys(position) + call_.kv.value_bytes; }

  // Computes the probabilities of the tile's positions from their scores.
  void soften(int tile, Span seen) const {
    Span spans[kLanes];
    for (Span& span : spans) span = seen;
    // The rows of a head share its scales.
    const bool is_int8 = call_.kv.is_int8;
    const int at_once = is_int8 ? group_ : kLanes;
    TileScales scales;
    for (int row = 0; row < num_rows_; row += at_once) {
      if (is_int8) read_scales(tile, seen, row / group_, scales);
      softmax_step<Dtype::bf16>(at_.scores + row * kTile, is_int8 ? &scales : nullptr,
                                score_scale(call_), spans, at_.states + row,
                                num_rows_ - row < at_once ? num_rows_ - row : at_once, seen.end,
                                at_.probabilities + row * (kTile / 2), at_.corrections + row);
    }
  }

  // Reads the scales of a head at the visible positions of a tile; the others are 0.
  void read_scales(int tile, Span seen, int head, TileScales& scales) const {
    scales = {};
    for (int piece = seen.begin / kPiece * kPiece; piece < seen.end; piece += kPiece) {
      const char* key = keys(tile + piece) + head * head_bytes_ + call_.head_dim;
      for (int i = 0; i < kPiece; ++i, key += stride_) {
        if (piece + i < seen.begin || piece + i >= seen.end) continue;
        scales.keys[piece + i] = load<float>(key);
        scales.values[piece + i] = load<float>(key + call_.kv.value_bytes);
      }
    }
  }

  const AttentionCall& call_;
  const AttentionScratch at_;
  const int group_;                    // query heads of a key/value head
  const int num_heads_, num_rows_;     // key/value heads; queries of all heads
  const int first_head_;               // the first query head
  const int num_words_;                // the words of a head
  const int64_t head_bytes_, stride_;  // from head to head, from position to position
  const int32_t* table_;
  const int end_, begin_;  // the query sees positions [begin_, end_)
  const char* kv_;
  const uint32_t* queries_;
  bf16* out_;
};

}  // namespace quire::QUIRE_ISA
