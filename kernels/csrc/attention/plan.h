// Divides the attention of a batch into pieces, and the pieces into tasks for the lanes.
#pragma once

#include <algorithm>
#include <vector>

#include "kernels.h"

namespace quire {

// A plan is made once for all layers of a step.
class AttentionPlan {
 public:
  // Reads only shapes, tables and lengths from `call`.
  void make(const Kernels& kernels, const AttentionCall& call, int num_rows, int num_lanes);

  // Tasks are ordered longest first, so that no lane starts a long one when the others are done.
  int64_t num_tasks() const { return static_cast<int64_t>(pieces_.size()) * num_parts_; }

  void attend(const Kernels& kernels, const AttentionCall& call, int64_t task,
              void* scratch) const {
    const int head = static_cast<int>(task % num_parts_) * num_heads_;
    kernels.attention(call, pieces_[task / num_parts_], head,
                      std::min(head + num_heads_, call.num_kv_heads), scratch);
  }

 private:
  void cut_prompts(const AttentionCall& call, int num_rows);
  void put_together(const AttentionCall& call, int num_rows, int num_lanes);
  void add_together(int begin, int end, int most, int shared);

  int tile_, most_;    // of the kernels: `attention_tile`, `attention_rows`
  int num_heads_ = 1;  // key/value heads of a task
  int num_parts_ = 1;
  std::vector<int> rows_, shared_;
  std::vector<AttentionPiece> pieces_;
};

}  // namespace quire
