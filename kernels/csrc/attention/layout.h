// The scratch memory of a call of attention.
#pragma once

#include "attention/softmax.h"
#include "attention/tile.h"
#include "kernels.h"

namespace quire::QUIRE_ISA {

// The layout of a call's scratch memory: offsets in bytes.
struct AttentionLayout {
  int64_t tile, queries, scores, probabilities, sums, states, corrections;
  int64_t begun_sums, begun_states;  // over shared positions, of rows that then continue alone
  int64_t bytes;
};

inline AttentionLayout attention_layout(const AttentionCall& call) {
  const int64_t columns = num_columns(call.dtype, call.head_dim);
  AttentionLayout at{};
  int64_t end = 0;
  const auto take = [&end](int64_t num_words) {
    const int64_t begin = end;
    end += (4 * num_words + 63) / 64 * 64;
    return begin;
  };
  at.tile = take(kTile * columns);
  at.queries = take(kAttentionRows * columns / per_word(call.dtype));
  at.scores = take(kAttentionRows * kTile);
  at.probabilities = take(kAttentionRows * kTile / per_word(call.dtype));
  at.sums = take(kAttentionRows * columns);
  at.states = take(kAttentionRows * sizeof(SoftmaxState) / 4);
  at.corrections = take(kAttentionRows);
  at.begun_sums = take(kTogetherRows * columns);
  at.begun_states = take(kTogetherRows * sizeof(SoftmaxState) / 4);
  at.bytes = end;
  return at;
}

}  // namespace quire::QUIRE_ISA
