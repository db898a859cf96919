// Changes a row's logits (penalties, biases, allowed tokens, bans) before a token is chosen.
// `services/engine/sampling/adjustment.py` is the reference, which defines the computation.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace quire {

// Token ids are not checked; the caller ensures that they are less than the vocabulary's size.
struct Adjustment {
  const int64_t* biased;  // each once
  const float* biases;
  int64_t num_biased;
  const int64_t* seen;  // each once
  const float* counts;
  int64_t num_seen;
  float repetition, frequency, presence;
  const int64_t* allowed;  // null: all tokens are allowed
  int64_t num_allowed;
  const int64_t* banned;
  int64_t num_banned;
  const int32_t* mask;  // bit i % 32 of word i / 32: token i may come; null: all may
};

// Applies an adjustment to one row at a time, and keeps its memory from row to row. It changes the
// logits in place and restores them, so that a few tokens cost no writes of the vocabulary's size.
// If only some tokens are allowed, or a mask is there, it writes their logits into a row of its
// own, which is -inf elsewhere.
class Adjuster {
 public:
  // Returns the row to choose from, without the bans; it is valid until `restore`. `touched` gets
  // the ids of tokens whose logits changed, except those that are not allowed, which are -inf, and
  // those that the mask excludes.
  float* apply(const Adjustment& adjustment, float* logits, int64_t vocab,
               std::vector<int64_t>& touched);

  // Applies the bans; `lift` undoes them.
  void ban(const Adjustment& adjustment);
  void lift() { undo(num_before_bans_); }

  // Restores all logits.
  void restore() { undo(0); }

 private:
  struct Change {
    int64_t token_id;
    float before;
  };

  void mask(const int32_t* words, const float* logits, int64_t vocab);
  void put(int64_t token_id, float logit);
  void undo(size_t num_kept);

  float* row_ = nullptr;
  std::vector<float> allowed_row_;  // all -inf, except between `apply` and `restore`
  std::vector<float> masked_row_;
  std::vector<Change> changes_;
  size_t num_before_bans_ = 0;
};

}  // namespace quire
