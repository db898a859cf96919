// Computes logprobs and ranks of tokens from rows of logits. `services/engine/sampling/logprobs.py`
// is the reference: it defines and explains the computation, and the tests compare this
// implementation with it.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels.h"
#include "threads/thread_pool.h"

namespace quire {

// The results, in M slots. The first token of a slot is the one that is asked for; the `num_top`
// likeliest follow. A rank of 0: the row's logits are not finite, and nothing else is written.
struct Scores {
  int64_t* token_ids;  // [M, 1 + num_top]
  float* logprobs;     // [M, 1 + num_top]
  int64_t* ranks;      // [M]
  int num_top;         // at most the vocabulary

  int64_t& asked(int64_t slot) const { return token_ids[slot * (1 + num_top)]; }
};

// A row of logits, and the slot of its results.
struct ScoredRow {
  const float* logits;
  int64_t slot;
};

// All lanes compute the rows in parts of a fixed size. A row's sum adds its parts in order,
// whichever lane computed them.
class Scorer {
 public:
  explicit Scorer(const Kernels& kernels) : kernels_(kernels) {}

  void begin(std::vector<ScoredRow> rows, int64_t vocab, const Scores& scores);

  // Computes the rows; all lanes of a pool call it.
  void run(ThreadPool::Lane& lane);

 private:
  int64_t num_rows() const { return static_cast<int64_t>(rows_.size()); }
  int64_t num_parts() const { return num_rows() * parts_per_row_; }
  void look(int64_t part);  // finds the largest logits of a part
  void add(
      int64_t part);  // sums a part's powers, and counts its tokens likelier than the one asked for
  void conclude(int64_t row);

  struct Part {
    float largest;
    double sum;
    int64_t num_larger;
  };

  float largest_of(int64_t row) const;
  void find_top(int64_t row, float largest, double log_sum);

  const Kernels& kernels_;
  std::vector<ScoredRow> rows_;
  int64_t vocab_ = 0, parts_per_row_ = 0, chunks_per_row_ = 0;
  Scores scores_{};
  std::vector<float> chunks_;  // [rows, chunks_per_row_]: each chunk's largest logit
  std::vector<Part> parts_;    // [rows, parts_per_row_]
};

}  // namespace quire
