// From final states to tokens: the product with the head, and all that is asked of it. Its weights
// are the largest of a model's; a step reads them once, whatever its rows want to know.
//
// See ADR 85.
#pragma once

#include <optional>
#include <vector>

#include "kernels.h"
#include "sampler.h"
#include "scorer.h"
#include "scratch.h"
#include "thread_pool.h"

namespace quire {

// Q tokens, each of one of M states: they come after it, or are there already (given).
struct Questions {
  int64_t num;
  const int64_t* states;             // [Q]
  const std::optional<Draw>* draws;  // [Q]; none: the likeliest token, or one that is given
  int64_t* tokens;        // [Q]: given ones; -1 for others, and in the end: logits not finite
  const int64_t* scored;  // [S]: indices of questions whose tokens have scores
  int64_t num_scored;
  Scores scores;  // [S]
};

class Head {
 public:
  Head(const Kernels& kernels, ThreadPool& pool, const Linear& weights)
      : kernels_(kernels), pool_(pool), weights_(weights), scorer_(kernels) {}

  int64_t vocab() const { return weights_.n; }
  int64_t hidden_size() const { return weights_.k; }

  // From states [M, hidden] to fp32 logits [M, vocab].
  void logits(const float* hidden, int64_t m, float* out);

  // Logits are in memory for states alone that need them, and of a long prompt's states for some at
  // a time.
  void answer(const float* hidden, int64_t m, const Questions& asked);

 private:
  using Lane = ThreadPool::Lane;

  // What a state's questions need, in the order in which states are computed.
  enum class Need : char { likeliest, draws, scores };

  void plan(int64_t m, const Questions& asked);
  void compute(const float* hidden, int64_t begin, int64_t end, const Questions& asked);
  const float* gathered(const float* hidden, int64_t begin, int64_t end);
  void prepare(int64_t m);
  Activations input(Lane& lane, const float* hidden, int64_t m);
  void draw(Sampler& sampler, float* logits, int64_t place, const Questions& asked);
  void keep_likeliest(int64_t begin, int64_t num_best, int64_t num_parts, const Questions& asked);

  const Kernels& kernels_;
  ThreadPool& pool_;
  const Linear& weights_;
  Rows inputs_{};
  std::vector<Sampler> samplers_;  // one a lane
  Scorer scorer_;

  // A state's place is where it is computed: first those that need no logits, then those that draw.
  std::vector<Need> needs_;         // of states
  std::vector<int64_t> order_;      // states by place
  std::vector<int64_t> first_;      // by place: the first of its questions in `questions_`
  std::vector<int64_t> questions_;  // their indices, by place
  std::vector<int64_t> slots_;      // of questions: where in `scores`; -1: nowhere
  int64_t num_likeliest_ = 0, num_drawing_ = 0;
  Scratch gathered_, rounded_, scales_, logits_, bests_;
};

}  // namespace quire
