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

struct DecodeScratch {
  uint32_t* tile;           // by tiles: [16, head_dim / 2] keys of int8, then [16, head_dim] values
  uint32_t* queries;        // by tiles: [heads, words, group]
  float* scores;            // [heads, group, kTile]
  uint32_t* probabilities;  // [heads, group, kTile / 2], pairs of bf16
  float* sums;              // [heads, group, head_dim]
  SoftmaxState* states;     // [heads, group]
  float* corrections;       // [heads, group]
};

template <int group, bool is_int8>
class DecodeQuery {
 public:
  DecodeQuery(const AttentionCall& call, int row, int head_begin, int head_end,
              const DecodeScratch& scratch)
      : call_(call),
        at_(scratch),
        num_heads_(head_end - head_begin),
        first_head_(head_begin * group),
        num_words_(call.head_dim / 2),
        head_bytes_(kv_head_bytes(is_int8, Dtype::bf16, call.head_dim)),
        stride_(int64_t{call.num_kv_heads} * head_bytes_),
        table_(call.block_tables + row * call.table_stride),
        end_(call.context_lens[row]),
        begin_(call.window > 0 && end_ > call.window ? end_ - call.window : 0),
        kv_(call.kv.data + head_begin * head_bytes_),
        queries_(reinterpret_cast<const uint32_t*>(static_cast<const bf16*>(call.q) +
                                                   call.cu_query_lens[row] * call.q_stride +
                                                   head_begin * group * call.head_dim)),
        out_(static_cast<bf16*>(call.out) + call.cu_query_lens[row] * call.out_stride +
             head_begin * group * call.head_dim) {}

 protected:
  using Words = HeadWords<Dtype::bf16, is_int8>;

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
    const int num_rows = num_heads_ * group, at_once = is_int8 ? group : kLanes;
    TileScales scales;
    for (int row = 0; row < num_rows; row += at_once) {
      if constexpr (is_int8) read_scales(tile, seen, row / group, scales);
      softmax_step<Dtype::bf16>(at_.scores + row * kTile, is_int8 ? &scales : nullptr,
                                score_scale(call_), spans, at_.states + row,
                                num_rows - row < at_once ? num_rows - row : at_once, seen.end,
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
  const DecodeScratch at_;
  const int num_heads_, first_head_, num_words_;  // first_head_: of the queries
  const int64_t head_bytes_, stride_;             // from head to head, from position to position
  const int32_t* table_;
  const int end_, begin_;  // the query sees positions [begin_, end_)
  const char* kv_;
  const uint32_t* queries_;
  bf16* out_;
};

}  // namespace quire::QUIRE_ISA
