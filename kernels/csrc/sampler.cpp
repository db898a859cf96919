#include "sampler.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

namespace quire {
namespace {

constexpr float kNone = -std::numeric_limits<float>::infinity();

constexpr int kWeights = 1024;
constexpr float kWeightsPerUnit = 32.0f;
constexpr int64_t kFew = 32;

int weight_of(float scaled) {
  const float index = scaled * -kWeightsPerUnit;
  constexpr float kLast = kWeights - 1;
  return static_cast<int>(index < kLast ? index : kLast);
}

}  // namespace

int64_t Sampler::sample(float* logits, int64_t vocab, const Draw& draw) {
  logits_ = logits;
  vocab_ = vocab;
  draw_ = draw;
  chunks_.resize((vocab + kLogitChunk - 1) / kLogitChunk);
  kernels_.largest(logits, vocab, chunks_.data());
  if (!find_largest()) return -1;
  if (!draw.adjustment) return choose();
  adjust(logits);
  const int64_t token = find_largest() ? choose() : -1;
  adjuster_.restore();
  return token;
}

int64_t Sampler::choose() {
  if (draw_.temperature == 0) return first_largest();
  for (float& chunk : chunks_) chunk = (chunk - largest_) / draw_.temperature;
  return race(threshold());
}

// False: it is not finite.
bool Sampler::find_largest() {
  largest_ = chunks_[0];
  for (float chunk : chunks_) {
    if (std::isnan(chunk)) return false;
    largest_ = std::max(largest_, chunk);
  }
  return std::isfinite(largest_);
}

void Sampler::adjust(float* logits) {
  const Adjustment& adjustment = *draw_.adjustment;
  logits_ = adjuster_.apply(adjustment, logits, vocab_, touched_);
  if (adjustment.allowed) std::fill(chunks_.begin(), chunks_.end(), kNone);
  adjuster_.ban(adjustment);
  look_again(touched_.data(), static_cast<int64_t>(touched_.size()));
  look_again(adjustment.banned, adjustment.num_banned);
  if (find_largest()) return;
  adjuster_.lift();
  look_again(adjustment.banned, adjustment.num_banned);
}

// At the chunks of tokens whose logits have changed.
void Sampler::look_again(const int64_t* token_ids, int64_t count) {
  changed_.assign(chunks_.size(), false);
  for (int64_t i = 0; i < count; ++i) changed_[token_ids[i] / kLogitChunk] = true;
  for (int64_t i = 0; i < num_chunks(); ++i) {
    if (!changed_[i]) continue;
    const int64_t begin = i * kLogitChunk;
    kernels_.largest(logits_ + begin, std::min<int64_t>(kLogitChunk, vocab_ - begin), &chunks_[i]);
  }
}

int64_t Sampler::first_largest() const {
  const auto chunk = std::find(chunks_.begin(), chunks_.end(), largest_) - chunks_.begin();
  return std::find(logits_ + chunk * kLogitChunk, logits_ + vocab_, largest_) - logits_;
}

void Sampler::expand(int64_t index, Chunk& chunk) const {
  const int64_t begin = index * kLogitChunk;
  kernels_.exp_scaled(logits_ + begin, std::min<int64_t>(kLogitChunk, vocab_ - begin), largest_,
                      draw_.temperature, chunk.scaled, chunk.powers);
}

// The smallest scaled logit that min_p, top_k and top_p leave, each of what the one before has
// left.
float Sampler::threshold() {
  const float by_min_p = draw_.min_p > 0 ? std::log(draw_.min_p) : kNone;
  const bool ranked = draw_.top_k > 0 && draw_.top_k < vocab_;
  if (!ranked && draw_.top_p >= 1) return by_min_p;
  if (!ranked) return nucleus(by_min_p);
  keep_likeliest(by_min_p);
  double whole = 0;
  float last = 0;
  for (const Kept& kept : kept_) {
    whole += kept.power;
    last = std::min(last, kept.scaled);
  }
  return draw_.top_p >= 1 ? std::max(by_min_p, last) : nucleus_threshold(draw_.top_p * whole);
}

// The top_k of what is not below `bound`. A chunk's largest is a member of the row, so that the
// k-th largest of them bounds the k-th largest of all from below.
void Sampler::keep_likeliest(float bound) {
  if (draw_.top_k < num_chunks()) {
    ranks_ = chunks_;
    const auto kth = ranks_.begin() + (draw_.top_k - 1);
    std::nth_element(ranks_.begin(), kth, ranks_.end(), std::greater<>());
    bound = std::max(bound, *kth);
  }
  kept_.clear();
  Chunk chunk;
  for (int64_t i = 0; i < num_chunks(); ++i) {
    if (chunks_[i] < bound) continue;
    expand(i, chunk);
    for (int j = 0; j < kLogitChunk; ++j)
      if (chunk.scaled[j] >= bound && chunk.scaled[j] > kNone)
        kept_.push_back({chunk.scaled[j], chunk.powers[j]});
  }
  if (static_cast<int64_t>(kept_.size()) <= draw_.top_k) return;
  std::nth_element(kept_.begin(), kept_.begin() + (draw_.top_k - 1), kept_.end(), likelier);
  kept_.resize(draw_.top_k);
}

// The smallest scaled logit of the likeliest tokens not below `bound` that have top_p of their
// powers: first by weight (tokens that are about as likely), then token by token within one.
float Sampler::nucleus(float bound) {
  const double wanted = draw_.top_p * weigh(bound);
  double before = 0;
  for (int weight = 0; weight < kWeights; ++weight) {
    if (before + weights_[weight] >= wanted) {
      keep_weight(bound, weight);
      return nucleus_threshold(wanted - before);
    }
    before += weights_[weight];
  }
  return bound;
}

// The powers of what is not below `bound`, summed up by weight, and all of them.
double Sampler::weigh(float bound) {
  weights_.assign(kWeights, 0);
  Chunk chunk;
  int weights[kLogitChunk];
  for (int64_t i = 0; i < num_chunks(); ++i) {
    if (chunks_[i] < bound) continue;
    expand(i, chunk);
    for (int j = 0; j < kLogitChunk; ++j) weights[j] = weight_of(chunk.scaled[j]);
    for (int j = 0; j < kLogitChunk; ++j)
      chunk.powers[j] = chunk.scaled[j] >= bound ? chunk.powers[j] : 0.0f;
    for (int j = 0; j < kLogitChunk; ++j) weights_[weights[j]] += chunk.powers[j];
  }
  double whole = 0;
  for (double weight : weights_) whole += weight;
  return whole;
}

void Sampler::keep_weight(float bound, int weight) {
  kept_.clear();
  Chunk chunk;
  for (int64_t i = 0; i < num_chunks(); ++i) {
    if (chunks_[i] < bound || weight_of(chunks_[i]) > weight) continue;
    expand(i, chunk);
    int is_there = 0;
    for (int j = 0; j < kLogitChunk; ++j) is_there |= weight_of(chunk.scaled[j]) == weight;
    if (!is_there) continue;
    for (int j = 0; j < kLogitChunk; ++j)
      if (chunk.powers[j] > 0 && chunk.scaled[j] >= bound && weight_of(chunk.scaled[j]) == weight)
        kept_.push_back({chunk.scaled[j], chunk.powers[j]});
  }
}

// The last of `kept_` that is needed, likeliest first, until their powers sum up to `wanted`.
//
//   kept_  |== needed, `before` in all ==|-------- open --------|== not needed ==|
//                                        begin                 end
float Sampler::nucleus_threshold(double wanted) {
  auto begin = kept_.begin(), end = kept_.end();
  double before = 0;
  while (end - begin > kFew) {
    const auto middle = begin + (end - begin) / 2;
    std::nth_element(begin, middle, end, likelier);
    double sum = before;
    for (auto kept = begin; kept != middle; ++kept) sum += kept->power;
    if (sum >= wanted) {
      end = middle;
    } else {
      before = sum;
      begin = middle;
    }
  }
  std::sort(begin, end, likelier);
  float found = 0;
  for (; begin != end; ++begin) {
    found = begin->scaled;
    before += begin->power;
    if (before >= wanted) break;
  }
  return found;
}

// Token i finishes at E / p, E = -log(1 - u) exponential, which is not below u.
int64_t Sampler::race(float threshold) const {
  const RaceCall call{logits_,       largest_,   draw_.temperature,
                      threshold,     draw_.seed, draw_.sequence_index,
                      draw_.position};
  double first = std::numeric_limits<double>::infinity();
  int64_t winner = 0;
  float powers[kLogitChunk], numbers[kLogitChunk];
  for (int64_t i = 0; i < num_chunks(); ++i) {
    if (chunks_[i] < threshold) continue;
    const int64_t begin = i * kLogitChunk;
    const int64_t size = std::min<int64_t>(kLogitChunk, vocab_ - begin);
    const auto late = static_cast<float>(first * (1 + 1e-6));  // whatever fp32 rounds
    if (!kernels_.race(call, i, size, late, powers, numbers)) continue;
    for (int j = 0; j < kLogitChunk; ++j) {
      const double power = powers[j];
      if (!(numbers[j] < first * power)) continue;
      const double time = -std::log1p(-static_cast<double>(numbers[j])) / power;
      if (time < first) {
        first = time;
        winner = begin + j;
      }
    }
  }
  return winner;
}

}  // namespace quire
