// The scratch memory of a call of attention. Its rows are queries of one head, and
// `num_columns` counts its columns.
#pragma once

#include "attention/softmax.h"
#include "attention/tile.h"
#include "kernels.h"

namespace quire::QUIRE_ISA {

// Each part begins at a multiple of 64 bytes.
struct AttentionScratch {
  uint32_t* tile;              // keys [steps, kTile], then values [kTile / per_word, columns]
  uint32_t* queries;           // [rows, steps]
  float* scores;               // [rows, kTile]
  uint32_t* probabilities;     // [rows, kTile / per_word]
  float* sums;                 // [rows, columns]: values times probabilities
  SoftmaxState* states;        // [rows]
  float* corrections;          // [rows]: the current tile's factors of the sums
  float* begun_sums;           // [rows, columns]: the sums over positions that rows share
  SoftmaxState* begun_states;  // [rows]
  size_t num_bytes;            // of the whole memory

  AttentionScratch(const AttentionCall& call, void* memory) {
    const int64_t columns = num_columns(call.dtype, call.head_dim);
    char* const begin = static_cast<char*>(memory);
    char* end = begin;
    const auto take = [&end](auto*& part, int64_t size) {
      part = reinterpret_cast<decltype(+part)>(end);
      end += (size * static_cast<int64_t>(sizeof *part) + 63) / 64 * 64;
    };
    take(tile, kTile * columns);
    take(queries, kAttentionRows * columns / per_word(call.dtype));
    take(scores, kAttentionRows * kTile);
    take(probabilities, kAttentionRows * kTile / per_word(call.dtype));
    take(sums, kAttentionRows * columns);
    take(states, kAttentionRows);
    take(corrections, kAttentionRows);
    take(begun_sums, kTogetherRows * columns);
    take(begun_states, kTogetherRows);
    num_bytes = static_cast<size_t>(end - begin);
  }
};

}  // namespace quire::QUIRE_ISA
