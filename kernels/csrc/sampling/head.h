// The model's head: from final states to logits, tokens and logprobs. The head's weights are the
// largest of a model; a step reads them once for all its questions.
#pragma once

#include <optional>
#include <vector>

#include "kernels.h"
#include "sampling/sampler.h"
#include "sampling/scorer.h"
#include "scratch.h"
#include "threads/thread_pool.h"

namespace quire {

// Q questions, each about the token that follows one of M states. The token is given, or is chosen
// by the draw.
struct Questions {
  int64_t num;
  const int64_t* states;             // [Q]
  const std::optional<Draw>* draws;  // [Q]; none: the likeliest token, or a given one
  int64_t* tokens;        // [Q]; in: given tokens, else -1; out: chosen ones, -1: not finite logits
  const int64_t* scored;  // [S]: indices of questions whose tokens get scores
  int64_t num_scored;
  Scores scores;  // [S]
};

class Head {
 public:
  // `factor`, `cap`: of the logits, see LinearCall.
  Head(const Kernels& kernels, ThreadPool& pool, const Linear& weights, float factor, float cap)
      : kernels_(kernels),
        pool_(pool),
        weights_(weights),
        factor_(factor),
        cap_(cap),
        scorer_(kernels) {}

  int64_t vocab() const { return weights_.n; }
  int64_t hidden_size() const { return weights_.k; }

  // Computes fp32 logits [M, vocab] from states [M, hidden].
  void logits(const float* hidden, int64_t m, float* out);

  // Answers all questions. Only states whose questions need logits get them in memory, and the
  // states of a long prompt get them some at a time.
  void answer(const float* hidden, int64_t m, const Questions& asked);

 private:
  using Lane = ThreadPool::Lane;

  // What a state's questions need; states are computed in this order.
  enum class Need : char { likeliest, draws, scores };

  void plan(int64_t m, const Questions& asked);
  void compute(const float* hidden, int64_t begin, int64_t end, const Questions& asked);
  const float* gathered(const float* hidden, int64_t begin, int64_t end);
  void prepare(int64_t m);
  Activations input(Lane& lane, const float* hidden, int64_t m);
  LinearCall call(const Activations& x, Epilogue epilogue, float* out) const;
  void draw(Sampler& sampler, float* logits, int64_t place, const Questions& asked);
  void keep_likeliest(int64_t begin, int64_t num_best, int64_t num_parts, const Questions& asked);

  const Kernels& kernels_;
  ThreadPool& pool_;
  const Linear& weights_;
  const float factor_, cap_;
  Rows inputs_{};
  std::vector<Sampler> samplers_;  // one for each lane
  Scorer scorer_;

  // A state's place is its position in the order of computation (see Need).
  std::vector<Need> needs_;         // by state
  std::vector<int64_t> order_;      // states by place
  std::vector<int64_t> first_;      // by place: the index of its first question in `questions_`
  std::vector<int64_t> questions_;  // indices of questions, by place
  std::vector<int64_t> slots_;      // by question: its slot in `scores`, or -1
  int64_t num_likeliest_ = 0, num_drawing_ = 0;
  Scratch gathered_, rounded_, scales_, sums_, logits_, bests_;
};

}  // namespace quire
