// What changes a row's logits before anything is chosen from them:
// `services/engine/sampling/adjustment.py` in native code, which says what it is.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace quire {

// Token ids are the caller's promise: they are below the vocabulary's size.
struct Adjustment {
  const int64_t* biased;  // each once
  const float* biases;
  int64_t num_biased;
  const int64_t* seen;  // each once
  const float* counts;
  int64_t num_seen;
  float repetition, frequency, presence;
  const int64_t* allowed;  // null: all
  int64_t num_allowed;
  const int64_t* banned;
  int64_t num_banned;
};

// One row at a time; its memory is kept from row to row. The logits are changed where they are and
// changed back, so that nothing of the vocabulary's size is written for a few tokens: where only
// some tokens are allowed, they go into a row of its own, which is -inf otherwise.
class Adjuster {
 public:
  // The row to choose from, without the bans; it holds until `restore`. Token ids whose logits
  // changed are in `touched`, but for those that are not allowed any more: they are -inf.
  float* apply(const Adjustment& adjustment, float* logits, int64_t vocab,
               std::vector<int64_t>& touched);

  // The bans, which `lift` takes back.
  void ban(const Adjustment& adjustment);
  void lift() { undo(num_before_bans_); }

  // All logits are what they were.
  void restore() { undo(0); }

 private:
  struct Change {
    int64_t token_id;
    float before;
  };

  void put(int64_t token_id, float logit);
  void undo(size_t num_kept);

  float* row_ = nullptr;
  std::vector<float> allowed_row_;  // -inf, but between `apply` and `restore`
  std::vector<Change> changes_;
  size_t num_before_bans_ = 0;
};

}  // namespace quire
