// What rows of logits say of tokens: `services/engine/sampling/logprobs.py` in native code, which
// says what is computed and why, and is what this is tested against.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels.h"

namespace quire {

// Of M slots. The first token of a slot is the one that is asked for; behind it come the `num_top`
// likeliest. A rank of 0: the row's logits are not finite, and nothing else is said of it.
struct Scores {
  int64_t* token_ids;  // [M, 1 + num_top]
  float* logprobs;     // [M, 1 + num_top]
  int64_t* ranks;      // [M]
  int num_top;         // at most the vocabulary

  int64_t& asked(int64_t slot) const { return token_ids[slot * (1 + num_top)]; }
};

// Logits, and where it goes what they say.
struct ScoredRow {
  const float* logits;
  int64_t slot;
};

// Rows are looked at in parts of a fixed size, by any number of threads: all of `look`, then all of
// `add`, then all of `conclude`. A row's sum runs over its parts in order, whoever computed them.
class Scorer {
 public:
  explicit Scorer(const Kernels& kernels) : kernels_(kernels) {}

  void begin(std::vector<ScoredRow> rows, int64_t vocab, const Scores& scores);

  int64_t num_rows() const { return static_cast<int64_t>(rows_.size()); }
  int64_t num_parts() const { return num_rows() * parts_per_row_; }
  void look(int64_t part);  // what its largest logits are
  void add(
      int64_t part);  // its share of the sum, and how many of its tokens go before the one asked
  void conclude(int64_t row);

 private:
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
