#include "sampler.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

namespace quire {
namespace {

constexpr float kNone = -std::numeric_limits<float>::infinity();

constexpr int64_t kFew = 32;
constexpr int kWeights = 1024;

// What fp32 may make of a quotient or a power, as a share, and of a scaled logit.
constexpr float kSlack = 1e-5f;
constexpr double kScaledSlack = 1e-4;

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

int64_t Sampler::choose() { return draw_.temperature == 0 ? first_largest() : race(threshold()); }

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
    kernels_.largest(logits_ + i * kLogitChunk, size_of_chunk(i), &chunks_[i]);
  }
}

int64_t Sampler::first_largest() const {
  const auto chunk = std::find(chunks_.begin(), chunks_.end(), largest_) - chunks_.begin();
  return std::find(logits_ + chunk * kLogitChunk, logits_ + vocab_, largest_) - logits_;
}

int64_t Sampler::size_of_chunk(int64_t chunk) const {
  return std::min<int64_t>(kLogitChunk, vocab_ - chunk * kLogitChunk);
}

// ---- filters -----------------------------------------------------------------------------------

// The smallest scaled logit that min_p, top_k and top_p leave, each of what the one before has
// left.
float Sampler::threshold() {
  const float by_min_p = draw_.min_p > 0 ? std::log(draw_.min_p) : kNone;
  const bool is_ranked = draw_.top_k > 0 && draw_.top_k < vocab_;
  if (!is_ranked) return draw_.top_p < 1 ? nucleus(by_min_p) : by_min_p;
  keep_likeliest(by_min_p);
  double whole = 0;
  float last = 0;
  for (const Kept& kept : kept_) {
    whole += kept.power;
    last = std::min(last, kept.scaled);
  }
  return draw_.top_p < 1 ? nucleus_threshold(draw_.top_p * whole) : last;
}

// All tokens that are not below `scaled`, and few others, have such a logit or a larger one.
float Sampler::logit_below(double scaled) const {
  const double logit = largest_ + (scaled - kScaledSlack) * draw_.temperature;
  return std::nextafter(static_cast<float>(logit), kNone);
}

void Sampler::keep(float bound) {
  kept_logits_.resize(vocab_ + kLogitChunk);
  num_kept_ = kernels_.keep(logits_, vocab_, chunks_.data(), bound, kept_logits_.data());
}

// Of what was kept, that which is not below `least`.
void Sampler::expand_kept(float least) {
  kept_.resize(num_kept_);
  Part part;
  int64_t num_left = 0;
  for (int64_t begin = 0; begin < num_kept_; begin += kLogitChunk) {
    const int64_t size = std::min<int64_t>(kLogitChunk, num_kept_ - begin);
    kernels_.exp_scaled(kept_logits_.data() + begin, size, largest_, draw_.temperature, part.scaled,
                        part.powers);
    for (int64_t i = 0; i < size; ++i) {
      kept_[num_left] = {part.scaled[i], part.powers[i]};
      num_left += part.scaled[i] >= least;
    }
  }
  kept_.resize(num_left);
}

// The top_k of what is not below `least`. A chunk's largest is a member of the row, so that the
// k-th largest of them bounds the k-th largest of all from below.
void Sampler::keep_likeliest(float least) {
  float bound = logit_below(least);
  if (draw_.top_k < num_chunks()) {
    ranks_ = chunks_;
    const auto kth = ranks_.begin() + (draw_.top_k - 1);
    std::nth_element(ranks_.begin(), kth, ranks_.end(), std::greater<>());
    bound = std::max(bound, *kth);
  }
  keep(bound);
  if (num_kept_ > draw_.top_k) {
    const auto begin = kept_logits_.begin();
    std::nth_element(begin, begin + (draw_.top_k - 1), begin + num_kept_, std::greater<>());
    num_kept_ = draw_.top_k;
  }
  expand_kept(least);
}

// The smallest scaled logit of the likeliest tokens not below `least` that have top_p of their
// powers. The tokens behind a member of the nucleus, itself included, have more than 1 - top_p of
// all, none of them more than it has: what has less than that by the number of tokens is no member.
// Of the others, first tokens that are about as likely are weighed together, then one by one those
// among which the nucleus ends.
float Sampler::nucleus(float least) {
  masses_.resize(num_chunks());
  kernels_.masses(logits_, vocab_, largest_, draw_.temperature, least, masses_.data());
  double whole = 0;
  for (float mass : masses_) whole += mass;
  const double bound =
      std::log((1 - draw_.top_p) * whole / static_cast<double>(vocab_)) - kScaledSlack;
  keep(logit_below(std::max<double>(bound, least)));
  expand_kept(least);

  const auto per_unit = static_cast<float>(-kWeights / bound);
  const auto weight_of = [&](const Kept& kept) {
    const float weight = kept.scaled * -per_unit;
    return static_cast<int>(weight < kWeights - 1 ? weight : kWeights - 1);
  };
  weights_.assign(kWeights, 0);
  for (const Kept& kept : kept_) weights_[weight_of(kept)] += kept.power;
  double in_all = 0;
  for (double weight : weights_) in_all += weight;
  const double wanted = std::min(draw_.top_p * whole, in_all);
  double before = 0;
  int weight = 0;
  for (; weight < kWeights - 1 && before + weights_[weight] < wanted; ++weight)
    before += weights_[weight];
  const auto is_other = [&](const Kept& kept) { return weight_of(kept) != weight; };
  kept_.erase(std::remove_if(kept_.begin(), kept_.end(), is_other), kept_.end());
  return nucleus_threshold(wanted - before);
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

// ---- the draw ----------------------------------------------------------------------------------

// A chunk finishes at E / mass, E = -log(1 - u) exponential. It is not below u, and the mass not
// above that of a chunk of tokens like its largest: so most chunks are behind the first one
// without a look at their tokens.
int64_t Sampler::race(float threshold) {
  bound_times(threshold);
  int64_t winner = std::min_element(earliest_.begin(), earliest_.end()) - earliest_.begin();
  double first = time_of(winner, threshold);
  for (int64_t chunk = 0; chunk < num_chunks(); ++chunk) {
    if (chunk == winner || !(earliest_[chunk] <= first)) continue;
    const double time = time_of(chunk, threshold);
    if (time > first || (time == first && chunk > winner)) continue;
    first = time;
    winner = chunk;
  }
  return winner * kLogitChunk + winner_of(winner, threshold);
}

void Sampler::bound_times(float threshold) {
  numbers_.resize(num_chunks() + kUniforms);
  earliest_.resize(num_chunks());
  Part part;
  for (int64_t begin = 0; begin < num_chunks(); begin += kUniforms) {
    const int64_t size = std::min<int64_t>(kUniforms, num_chunks() - begin);
    kernels_.exp_scaled(chunks_.data() + begin, size, largest_, draw_.temperature, part.scaled,
                        part.powers);
    bool may_win = false;
    for (int64_t i = 0; i < size; ++i) may_win |= part.scaled[i] >= threshold;
    float* numbers = numbers_.data() + begin;
    if (may_win) kernels_.uniforms(draw_.key, 1 + begin / kUniforms, numbers);
    for (int64_t i = 0; i < size; ++i)
      earliest_[begin + i] = part.scaled[i] >= threshold
                                 ? numbers[i] / (kLogitChunk * part.powers[i]) * (1 - kSlack)
                                 : -kNone;
  }
}

double Sampler::time_of(int64_t chunk, float threshold) const {
  float mass;
  kernels_.masses(logits_ + chunk * kLogitChunk, size_of_chunk(chunk), largest_, draw_.temperature,
                  threshold, &mass);
  return -std::log1p(-static_cast<double>(numbers_[chunk])) / mass;
}

// Of its tokens; as between chunks.
int64_t Sampler::winner_of(int64_t chunk, float threshold) const {
  Part part;
  kernels_.exp_scaled(logits_ + chunk * kLogitChunk, size_of_chunk(chunk), largest_,
                      draw_.temperature, part.scaled, part.powers);
  float numbers[kUniforms];
  kernels_.uniforms(draw_.key, 0, numbers);
  double first = -kNone;
  int64_t winner = 0;
  for (int64_t i = 0; i < size_of_chunk(chunk); ++i) {
    const double power = part.powers[i];
    if (part.scaled[i] < threshold || !(numbers[i] < first * power)) continue;
    const double time = -std::log1p(-static_cast<double>(numbers[i])) / power;
    if (time >= first) continue;
    first = time;
    winner = i;
  }
  return winner;
}

}  // namespace quire
