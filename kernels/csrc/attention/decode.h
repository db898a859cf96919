// Attention of one query over some of its key/value heads. One query has too few rows to justify a
// reordered tile in memory, so keys and values are read in the order of their addresses: 16
// positions of all heads, then the next 16. (The positions of one head are a power of two apart and
// would compete for the same few sets of L1.)
//
// Each element is computed by the same operations, in the same order, as in attention/attention.h,
// so that both give the same bits.
//
// This path needs AVX-512 or tiles, bf16, head sizes that are multiples of 32, groups of up to 8
// heads, and block sizes that are multiples of 16.
#pragma once

#include "isa/simd.h"  // which defines QUIRE_TILES

#if defined(QUIRE_TILES)
#include "attention/decode_tiles.h"
#elif defined(__AVX512F__)
#include "attention/decode_vectors.h"
#endif
#include "attention/layout.h"
#include "attention/softmax.h"
#include "kernels.h"

namespace quire::QUIRE_ISA {

#if defined(__AVX512F__) || defined(QUIRE_TILES)

template <int group, bool is_int8>
class DecodeRow : DecodeProducts<group, is_int8> {
  using Products = DecodeProducts<group, is_int8>;

 public:
  using Products::Products;

  void attend(const Begun& begun) {
    const int num_rows = num_heads_ * group;
    const size_t num_bytes = sizeof(float) * num_rows * call_.head_dim;
    begin();
    int tile = begin_ / kTile * kTile;
    if (begun.end > 0) {
      std::memcpy(at_.states, begun.states, sizeof(SoftmaxState) * num_rows);
      std::memcpy(at_.sums, begun.sums, num_bytes);
      tile = begun.end;
    } else {
      for (int row = 0; row < num_rows; ++row) at_.states[row] = {kLowest, {}};
      std::memset(at_.sums, 0, num_bytes);
    }
    for (; tile < end_; tile += kTile) {
      const Span seen = {begin_ > tile ? begin_ - tile : 0,
                         end_ - tile < kTile ? end_ - tile : kTile};
      score(tile, seen);
      soften(tile, seen);
      add_values(tile, seen);
    }
    for (int row = 0; row < num_rows; ++row) {
      float* sums = at_.sums + row * call_.head_dim;
      if constexpr (kTiled<Dtype::bf16>) unsign_zeros(sums, call_.head_dim);
      const float total = total_of(call_, at_.states[row], first_head_ + row);
      for (int i = 0; i < call_.head_dim; i += 2 * kLanes)
        join<Dtype::bf16>(sums + i, total, out_ + row * call_.head_dim + i);
    }
  }

 private:
  using Products::add_values, Products::begin, Products::score, Products::soften;
  using Products::at_, Products::begin_, Products::call_, Products::end_, Products::first_head_,
      Products::num_heads_, Products::out_;
};

// Whether this path is faster than a reordered tile: on Zen 4, groups of 6 and 7 heads over int8 KV
// take 1.1 to 1.4 of the tile's time.
inline constexpr bool is_faster(int group, bool is_int8) {
  return !is_int8 || group <= 4 || group == 8;
}

template <bool is_int8, int group = 8>
inline bool decode_of(const AttentionCall& call, int row, int head_begin, int head_end,
                      const Begun& begun, const DecodeScratch& scratch) {
  if constexpr (group == 0) {
    return false;
  } else {
    if (call.num_heads / call.num_kv_heads != group || !is_faster(group, is_int8))
      return decode_of<is_int8, group - 1>(call, row, head_begin, head_end, begun, scratch);
    DecodeRow<group, is_int8>(call, row, head_begin, head_end, scratch).attend(begun);
    return true;
  }
}

// Computes the row and returns true, if it is one query of a shape that DecodeRow supports;
// otherwise returns false.
inline bool decode(const AttentionCall& call, int row, int head_begin, int head_end,
                   const Begun& begun, const DecodeScratch& scratch) {
  if (call.dtype != Dtype::bf16 || call.head_dim % (2 * kLanes) || call.block_size % kPiece ||
      call.cu_query_lens[row + 1] - call.cu_query_lens[row] != 1)
    return false;
  return call.kv.is_int8 ? decode_of<true>(call, row, head_begin, head_end, begun, scratch)
                         : decode_of<false>(call, row, head_begin, head_end, begun, scratch);
}

inline bool decode(const AttentionCall& call, int row, int head_begin, int head_end,
                   const Begun& begun, void* scratch) {
  const AttentionLayout at = attention_layout(call);
  char* memory = static_cast<char*>(scratch);
  return decode(call, row, head_begin, head_end, begun,
                DecodeScratch{reinterpret_cast<uint32_t*>(memory + at.tile),
                              reinterpret_cast<uint32_t*>(memory + at.queries),
                              reinterpret_cast<float*>(memory + at.scores),
                              reinterpret_cast<uint32_t*>(memory + at.probabilities),
                              reinterpret_cast<float*>(memory + at.sums),
                              reinterpret_cast<SoftmaxState*>(memory + at.states),
                              reinterpret_cast<float*>(memory + at.corrections)});
}

#else

inline bool decode(const AttentionCall&, int, int, int, const Begun&, void*) { return false; }

#endif

}  // namespace quire::QUIRE_ISA
