// What changes a row's logits before anything is chosen from them:
// `services/engine/adjustment.py` in native code, which says what it is.
#pragma once

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

// Its memory is kept from row to row.
class Adjuster {
 public:
  // All but the bans. Token ids whose logits changed are in `touched`, but for those that are not
  // allowed any more: they are -inf.
  void apply(const Adjustment& adjustment, float* logits, int64_t vocab,
             std::vector<int64_t>& touched);

  // The bans, which `lift` takes back.
  void ban(const Adjustment& adjustment, float* logits);
  void lift(const Adjustment& adjustment, float* logits) const;

 private:
  std::vector<float> saved_;
};

}  // namespace quire
