#include "attention/plan.h"

#include <numeric>

namespace quire {
namespace {

int num_queries(const AttentionCall& call, int row) {
  return call.cu_query_lens[row + 1] - call.cu_query_lens[row];
}

// The number of leading positions, in whole tiles, that are in the same blocks for both rows.
int num_shared(const AttentionCall& call, int tile, int a, int b) {
  const int length = std::min(call.context_lens[a], call.context_lens[b]);
  const int32_t* blocks = call.block_tables + a * call.table_stride;
  const int32_t* others = call.block_tables + b * call.table_stride;
  const int num_blocks = (length + call.block_size - 1) / call.block_size;
  const auto same = std::mismatch(blocks, blocks + num_blocks, others).first - blocks;
  return std::min(static_cast<int>(same) * call.block_size, length) / tile * tile;
}

// The number of positions that a piece reads.
int64_t cost(const AttentionCall& call, const AttentionPiece& piece) {
  const int row = piece.rows[0];
  if (piece.num_rows == 1)
    return static_cast<int64_t>(piece.query_end - piece.query_begin) *
           (call.context_lens[row] - num_queries(call, row) + piece.query_end);
  int64_t positions = piece.shared;
  for (int i = 0; i < piece.num_rows; ++i)
    positions += call.context_lens[piece.rows[i]] - piece.shared;
  return positions;
}

}  // namespace

void AttentionPlan::make(const Kernels& kernels, const AttentionCall& call, int num_rows,
                         int num_lanes) {
  tile_ = kernels.attention_tile;
  most_ = kernels.attention_rows;
  rows_.resize(num_rows);
  std::iota(rows_.begin(), rows_.end(), 0);
  pieces_.clear();
  bool is_decode = true;
  for (int row = 0; row < num_rows; ++row) is_decode &= num_queries(call, row) == 1;
  if (is_decode) {
    put_together(call, num_rows, num_lanes);
  } else {
    num_heads_ = 1;  // one head of a prompt's queries fills a task
    num_parts_ = call.num_kv_heads;
    cut_prompts(call, num_rows);
  }
  std::stable_sort(pieces_.begin(), pieces_.end(),
                   [&](const auto& a, const auto& b) { return cost(call, a) > cost(call, b); });
}

// Cuts prompts into pieces of as many queries as one call computes with a tile. Larger pieces would
// take several passes over the keys and values. Smaller ones would balance the lanes better, but
// cost up to a tenth more.
void AttentionPlan::cut_prompts(const AttentionCall& call, int num_rows) {
  const int most = std::max(1, most_ * call.num_kv_heads / call.num_heads);
  for (int row = 0; row < num_rows; ++row)
    for (int end = num_queries(call, row); end > 0; end -= most)
      pieces_.push_back({&rows_[row], 1, 0, std::max(0, end - most), end});
}

// Groups rows that begin in the same blocks: these are neighbours once rows are sorted by their
// tables. A group ends between two rows that share less than half of what one of them shares with
// its other neighbour.
void AttentionPlan::put_together(const AttentionCall& call, int num_rows, int num_lanes) {
  const auto table = [&](int row) { return call.block_tables + row * call.table_stride; };
  const auto end = [&](int row) {
    return table(row) + (call.context_lens[row] + call.block_size - 1) / call.block_size;
  };
  std::stable_sort(rows_.begin(), rows_.end(), [&](int a, int b) {
    return std::lexicographical_compare(table(a), end(a), table(b), end(b));
  });
  shared_.assign(num_rows + 1, 0);  // [i]: what row i shares with the one before it
  for (int i = 1; i < num_rows; ++i) shared_[i] = num_shared(call, tile_, rows_[i - 1], rows_[i]);
  std::vector<int> ends;
  for (int i = 1; i <= num_rows; ++i) {
    const int before = shared_[i - 1], after = i < num_rows ? shared_[i + 1] : 0;
    if (shared_[i] == 0 || 2 * shared_[i] < std::max(before, after)) ends.push_back(i);
  }
  // The heads of a position are contiguous in memory and are best read together, unless there are
  // too few pieces for the lanes.
  const int group = call.num_heads / call.num_kv_heads;
  const bool is_few = static_cast<int>(ends.size()) < 2 * num_lanes;
  const int share = is_few ? (call.num_kv_heads + num_lanes - 1) / num_lanes : call.num_kv_heads;
  num_heads_ = std::max(1, std::min(share, most_ / group));
  num_parts_ = (call.num_kv_heads + num_heads_ - 1) / num_heads_;
  // Pieces have few enough rows that each lane gets one.
  int most = std::min(most_ / group, kTogetherRows / (group * num_heads_));
  most = std::max(1, std::min(most, num_rows * num_parts_ / num_lanes));
  int begin = 0;
  for (int last : ends) {
    int shared = begin + 1 < last ? shared_[begin + 1] : 0;
    for (int i = begin + 1; i < last; ++i) shared = std::min(shared, shared_[i]);
    add_together(begin, last, most, shared);
    begin = last;
  }
}

// Adds the sorted rows [begin, end) as pieces of nearly equal size, of at most `most` rows.
void AttentionPlan::add_together(int begin, int end, int most, int shared) {
  const int num_pieces = (end - begin + most - 1) / most;
  for (int i = 0; i < num_pieces; ++i) {
    const int first = begin + (end - begin) * i / num_pieces;
    const int last = begin + (end - begin) * (i + 1) / num_pieces;
    pieces_.push_back({&rows_[first], last - first, last - first > 1 ? shared : 0, 0, 1});
  }
}

}  // namespace quire
