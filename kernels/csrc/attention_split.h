// How a caller cuts a row's new tokens into calls of `Kernels::attention`.
#pragma once

#include "kernels.h"

namespace quire {

// (Query, head) pairs that one call keeps beside a tile of keys and values: enough that reading and
// reordering the tile is a small part of the work, few enough that their queries and sums stay in
// L2. A multiple of every register block (attention_product.h).
inline constexpr int kAttentionRows = 96;

// Queries of one call, for rows longer than that. More are computed all the same, in several passes
// over the keys and values; fewer share the work out more evenly, at up to a tenth more of it.
inline int attention_queries(const AttentionCall& call) {
  const int queries = kAttentionRows * call.num_kv_heads / call.num_heads;
  return queries > 0 ? queries : 1;
}

// Key/value heads of one call. While decoding, those of a token lie side by side in memory and are
// best read together, unless there are too few rows for the lanes; a prompt's queries are many for
// one head already.
inline int attention_heads(const AttentionCall& call, bool is_decode, int64_t num_rows,
                           int num_lanes) {
  if (!is_decode) return 1;
  const bool is_few = num_rows < 2 * num_lanes;
  const int share = is_few ? (call.num_kv_heads + num_lanes - 1) / num_lanes : call.num_kv_heads;
  const int most = kAttentionRows * call.num_kv_heads / call.num_heads;
  return share < most ? share : most > 0 ? most : 1;
}

}  // namespace quire
