// The model's head: from final states to logits, tokens and logprobs. The head's weights are the
// largest of a model; a step reads them once for all its questions.
#pragma once

#include <optional>
#include <vector>

#include "kernels.h"
#include "linear/input_rows.h"
#include "sampling/sampler.h"
#include "sampling/scorer.h"
#include "scratch.h"
#include "threads/thread_pool.h"

namespace quire {

// D draws, each of the token that follows one of M states.
struct Draws {
  int64_t num;
  const int64_t* states;             // [D]
  const std::optional<Draw>* draws;  // [D]; none: the likeliest token
  int64_t* tokens;                   // [D], the results; -1: the logits are not finite
  const int64_t* scored;             // [S]: indices of draws whose tokens get scores
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

  // Draws all tokens. Only states whose draws need logits get them in memory.
  void draw(const float* hidden, int64_t m, const Draws& asked);

 private:
  using Lane = ThreadPool::Lane;

  void plan(int64_t m, const Draws& asked);
  const float* gathered(const float* hidden);
  Activations input(Lane& lane, const float* hidden, int64_t m);
  LinearCall call(const Activations& x, Epilogue epilogue, float* out) const;
  void draw_at(Sampler& sampler, float* logits, int64_t place, const Draws& asked);
  void keep_likeliest(int64_t num_parts, const Draws& asked);

  const Kernels& kernels_;
  ThreadPool& pool_;
  const Linear& weights_;
  const float factor_, cap_;
  InputRows inputs_;
  std::vector<Sampler> samplers_;  // one for each lane
  Scorer scorer_;

  // A state's place is its position in the order of computation: those without logits are first.
  std::vector<char> needs_logits_;  // by state
  std::vector<int64_t> order_;      // states by place
  std::vector<int64_t> first_;      // by place: the index of its first draw in `draws_`
  std::vector<int64_t> draws_;      // indices of draws, by place
  std::vector<int64_t> slots_;      // by draw: its slot in `scores`, or -1
  int64_t num_best_ = 0;            // states without logits
  Scratch gathered_, logits_, bests_;
};

}  // namespace quire
