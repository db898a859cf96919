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

// Whether this path is faster than a reordered tile: on Zen 4, groups of 6 and 7 heads over int8 KV
// take 1.1 to 1.4 of the tile's time.
inline constexpr bool is_faster(int group, bool is_int8) {
  return !is_int8 || group <= 4 || group == 8;
}

template <bool is_int8, int group = 8>
inline bool decode_of(const AttentionCall& call, int row, int head_begin, int head_end,
                      const Begun& begun, const AttentionScratch& scratch) {
  if constexpr (group == 0) {
    return false;
  } else {
    if (call.num_heads / call.num_kv_heads != group || !is_faster(group, is_int8))
      return decode_of<is_int8, group - 1>(call, row, head_begin, head_end, begun, scratch);
    DecodeProducts<group, is_int8> query(call, row, head_begin, head_end, scratch);
    query.attend(query, begun);
    return true;
  }
}

// Computes the row and returns true, if it is one query of a shape that this path supports;
// otherwise returns false.
inline bool decode(const AttentionCall& call, int row, int head_begin, int head_end,
                   const Begun& begun, const AttentionScratch& scratch) {
  if (call.dtype != Dtype::bf16 || call.head_dim % (2 * kLanes) || call.block_size % kPiece ||
      call.cu_query_lens[row + 1] - call.cu_query_lens[row] != 1)
    return false;
  return call.kv.is_int8 ? decode_of<true>(call, row, head_begin, head_end, begun, scratch)
                         : decode_of<false>(call, row, head_begin, head_end, begun, scratch);
}

#else

inline bool decode(const AttentionCall&, int, int, int, const Begun&, const AttentionScratch&) {
  return false;
}

#endif

}  // namespace quire::QUIRE_ISA
