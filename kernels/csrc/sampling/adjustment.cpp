#include "sampling/adjustment.h"

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

float* Adjuster::apply(const Adjustment& a, float* logits, int64_t vocab,
                       std::vector<int64_t>& touched) {
  touched.clear();
  row_ = logits;
  if (a.mask) {
    mask(a.mask, logits, vocab);
    row_ = logits = masked_row_.data();
  }
  if (a.allowed) {
    allowed_row_.resize(vocab, kNone);
    row_ = allowed_row_.data();
    for (int64_t i = 0; i < a.num_allowed; ++i) put(a.allowed[i], logits[a.allowed[i]]);
    touched.assign(a.allowed, a.allowed + a.num_allowed);
  } else {
    touched.assign(a.biased, a.biased + a.num_biased);
    touched.insert(touched.end(), a.seen, a.seen + a.num_seen);
  }
  // Biases and penalties leave -inf as it is.
  for (int64_t i = 0; i < a.num_biased; ++i) put(a.biased[i], row_[a.biased[i]] + a.biases[i]);
  for (int64_t i = 0; i < a.num_seen; ++i)
    put(a.seen[i], penalized(row_[a.seen[i]], a.counts[i], a));
  return row_;
}

// Most words of a mask are all 0 or all 1.
void Adjuster::mask(const int32_t* words, const float* logits, int64_t vocab) {
  masked_row_.resize(vocab);
  for (int64_t begin = 0; begin < vocab; begin += 32) {
    const auto word = static_cast<uint32_t>(words[begin / 32]);
    const int64_t size = std::min<int64_t>(32, vocab - begin);
    float* row = masked_row_.data() + begin;
    if (word == 0)
      std::fill_n(row, size, kNone);
    else if (word == ~0u)
      std::copy_n(logits + begin, size, row);
    else
      for (int64_t i = 0; i < size; ++i) row[i] = word >> i & 1 ? logits[begin + i] : kNone;
  }
}

void Adjuster::ban(const Adjustment& a) {
  num_before_bans_ = changes_.size();
  for (int64_t i = 0; i < a.num_banned; ++i) put(a.banned[i], kNone);
}

void Adjuster::put(int64_t token_id, float logit) {
  changes_.push_back({token_id, row_[token_id]});
  row_[token_id] = logit;
}

// Undoes changes in reverse order: for a token that changed twice, the first change has its logit.
void Adjuster::undo(size_t num_kept) {
  for (; changes_.size() > num_kept; changes_.pop_back())
    row_[changes_.back().token_id] = changes_.back().before;
}

}  // namespace quire
