// The MLP of a layer with experts: a router chooses `top_k` experts for each row, and the row's
// output is the weighted sum of theirs.
//
//   rows         0      1      2         norm, router: fp32 logits [M, E]
//   choices    1 3    0 3    1 2         the top_k largest logits, in the order of experts
//   places     1 4    0 5    2 3         in the list of all choices, ordered by expert, then by row
//   experts    0: row 1 | 1: rows 0 2 | 2: row 2 | 3: rows 0 1
//
// Each expert computes its rows together, and all experts are one loop, so that an expert's weights
// are read once a step. A row's outputs are added in the order of experts: its sum does not depend
// on the other rows.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "kernels.h"
#include "linear/input_rows.h"
#include "scratch.h"
#include "threads/thread_pool.h"

namespace quire {

struct Experts {
  const Linear* router;                // [E, hidden], fp32
  std::vector<const Linear*> gate_up;  // of each expert, as `Layer` has one
  std::vector<const Linear*> down;
  int top_k;
  bool normalizes;     // the weights of a row's experts are divided by their sum
  float alpha, limit;  // of swiglu; limit 0: the gate is SiLU

  int64_t num_experts() const { return static_cast<int64_t>(gate_up.size()); }
  int64_t hidden() const { return router->k; }
  int64_t intermediate() const { return down.front()->k; }
};

class ExpertStep {
 public:
  using Lane = ThreadPool::Lane;

  ExpertStep(const Kernels& kernels, ThreadPool& pool) : kernels_(kernels), pool_(pool) {}

  // Makes room for `m` rows, before the lanes run.
  void prepare(const Experts& experts, int64_t m);

  // out[m, hidden] += the experts' output for the norm of x; `out` may be x. `norm.out` is not
  // used. Every lane calls this.
  void add(Lane& lane, const Experts& experts, const NormCall& norm, int64_t m, float* out,
           int64_t out_stride);

 private:
  struct Task {  // panels of one expert's linear, with all rows of the expert
    int32_t expert;
    int64_t panel_begin, panel_end;
  };
  struct Tasks {
    std::vector<Task> list;
    std::atomic<int64_t> size{0};  // a lane that comes late reads it while another one counts
  };

  void route(Lane& lane, const Experts& experts, const NormCall& norm, int64_t m);
  void choose(const Experts& experts, int64_t row);
  float add_exponentials(const float* x, int64_t n, float largest, float* out) const;
  void group(const Experts& experts, int64_t m);
  void divide(const std::vector<const Linear*>& linears, Tasks& tasks) const;
  void compute(Lane& lane, const std::vector<const Linear*>& linears, const Tasks& tasks,
               const LinearCall& call);

  const Kernels& kernels_;
  ThreadPool& pool_;
  std::vector<int32_t> chosen_;    // [M, top_k]: experts
  std::vector<float> weights_;     // [M, top_k]
  std::vector<int64_t> places_;    // [M, top_k]
  std::vector<int64_t> row_of_;    // [places]
  std::vector<int64_t> begin_of_;  // [E + 1]: the first place of each expert
  std::vector<int64_t> next_of_;
  Tasks up_, down_;
  InputRows inputs_;  // of a linear, at most one row for each place
  int64_t logits_stride_ = 0, gated_stride_ = 0, out_stride_ = 0;
  float* logits_ = nullptr;
  void* gated_ = nullptr;
  float* outputs_ = nullptr;
  Scratch memory_[3];
};

}  // namespace quire
