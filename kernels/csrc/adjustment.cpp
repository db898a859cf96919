#include "adjustment.h"

#include <algorithm>
#include <limits>

namespace quire {
namespace {

constexpr float kNone = -std::numeric_limits<float>::infinity();
constexpr float kLargest = std::numeric_limits<float>::max();

float penalized(float logit, float count, const Adjustment& a) {
  if (logit == kNone) return logit;
  float value = logit > 0 ? logit / a.repetition : logit * a.repetition;
  value = std::min(std::max(value, -kLargest), kLargest);
  value -= a.frequency * count;
  return count > 0 ? value - a.presence : value;
}

}  // namespace

void Adjuster::apply(const Adjustment& a, float* logits, int64_t vocab,
                     std::vector<int64_t>& touched) {
  for (int64_t i = 0; i < a.num_biased; ++i) logits[a.biased[i]] += a.biases[i];
  for (int64_t i = 0; i < a.num_seen; ++i)
    logits[a.seen[i]] = penalized(logits[a.seen[i]], a.counts[i], a);
  touched.clear();
  if (a.allowed) {
    saved_.resize(a.num_allowed);
    for (int64_t i = 0; i < a.num_allowed; ++i) saved_[i] = logits[a.allowed[i]];
    std::fill(logits, logits + vocab, kNone);
    for (int64_t i = 0; i < a.num_allowed; ++i) logits[a.allowed[i]] = saved_[i];
    touched.assign(a.allowed, a.allowed + a.num_allowed);
    return;
  }
  touched.insert(touched.end(), a.biased, a.biased + a.num_biased);
  touched.insert(touched.end(), a.seen, a.seen + a.num_seen);
}

void Adjuster::ban(const Adjustment& a, float* logits) {
  saved_.resize(a.num_banned);
  for (int64_t i = 0; i < a.num_banned; ++i) {
    saved_[i] = logits[a.banned[i]];
    logits[a.banned[i]] = kNone;
  }
}

// Backwards: of a token that is banned twice, the first has its logit.
void Adjuster::lift(const Adjustment& a, float* logits) const {
  for (int64_t i = a.num_banned; i-- > 0;) logits[a.banned[i]] = saved_[i];
}

}  // namespace quire
