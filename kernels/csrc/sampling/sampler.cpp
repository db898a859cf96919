#include "sampling/sampler.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>

namespace quire {
namespace {

constexpr float kNone = -std::numeric_limits<float>::infinity();

constexpr int64_t kFew = 32;
constexpr int kWeights = 1024;

// Bounds of the rounding errors of fp32: of a quotient or a weight, as a share, and of a scaled
// logit.
constexpr float kSlack = 1e-5f;
constexpr double kScaledSlack = 1e-4;

}  // namespace

// As `services/engine/sampling/arithmetic.py` defines it, operation
// for operation.
float exponential(float u) {
  const bool is_small = u < 0.25f;
  const float w = 1.0f - u;
  int32_t bits;
  std::memcpy(&bits, &w, sizeof bits);
  const int32_t k = (bits - 0x3F3504F3) >> 23;
  bits -= k * (1 << 23);
  float m;
  std::memcpy(&m, &bits, sizeof m);
  const float z = (is_small ? u : 1.0f - m) / (is_small ? 2.0f - u : 1.0f + m);
  const float square = z * z, twice = z + z;
  float sum = 1.0f / 11;
  for (float factor : {1.0f / 9, 1.0f / 7, 1.0f / 5, 1.0f / 3}) sum = sum * square + factor;
  const float powers_of_two = (is_small ? 0.0f : -static_cast<float>(k)) * 0.693147180559945309f;
  return powers_of_two + (twice + twice * (square * sum));
}

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
  if (adjustment.allowed)
    std::fill(chunks_.begin(), chunks_.end(), kNone);
  else if (adjustment.mask)
    kernels_.largest(logits_, vocab_, chunks_.data());
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
  const bool is_ranked = draw_.top_k > 0 && draw_.top_k < vocab_;
  if (!is_ranked) return draw_.top_p < 1 ? nucleus(draw_.least) : draw_.least;
  keep_likeliest(draw_.least);
  int64_t whole = 0;
  float last = 0;
  for (const Kept& kept : kept_) {
    whole += static_cast<int64_t>(kept.weight);
    last = std::min(last, kept.scaled);
  }
  return draw_.top_p < 1 ? nucleus_threshold(share_of(whole)) : last;
}

int64_t Sampler::share_of(int64_t whole) const {
  return static_cast<int64_t>(std::ceil(draw_.top_p * static_cast<double>(whole)));
}

float Sampler::scaled_of(float logit) const { return (logit - largest_) / draw_.temperature; }

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
    kernels_.weigh(kept_logits_.data() + begin, size, largest_, draw_.temperature, part.scaled,
                   part.weights);
    for (int64_t i = 0; i < size; ++i) {
      kept_[num_left] = {part.scaled[i], part.weights[i]};
      num_left += part.scaled[i] >= least;
    }
  }
  kept_.resize(num_left);
}

// The top_k of what is not below `least`, and what ties with the last of them. A chunk's largest is
// a member of the row, so that the k-th largest of them bounds the k-th largest of all from below.
// Logits that differ may have the same scaled logit.
void Sampler::keep_likeliest(float least) {
  float bound = logit_below(least);
  if (draw_.top_k < num_chunks()) {
    ranks_ = chunks_;
    const auto kth = ranks_.begin() + (draw_.top_k - 1);
    std::nth_element(ranks_.begin(), kth, ranks_.end(), std::greater<>());
    bound = std::max(bound, logit_below(scaled_of(*kth)));
  }
  keep(bound);
  if (num_kept_ > draw_.top_k) {
    const auto begin = kept_logits_.begin();
    std::nth_element(begin, begin + (draw_.top_k - 1), begin + num_kept_, std::greater<>());
    least = std::max(least, scaled_of(begin[draw_.top_k - 1]));
  }
  expand_kept(least);
}

// The smallest scaled logit of the likeliest tokens not below `least` that have top_p of their
// weight. The tokens behind a member of the nucleus, itself included, have more than 1 - top_p of
// all, none of them more than it has: what has less than that by the number of tokens is no member.
// Of the others, first tokens that are about as likely are weighed together, then one by one those
// among which the nucleus ends.
float Sampler::nucleus(float least) {
  masses_.resize(num_chunks());
  kernels_.masses(logits_, vocab_, largest_, draw_.temperature, least, masses_.data());
  int64_t whole = 0;
  for (int64_t mass : masses_) whole += mass;
  const double lightest = (1 - draw_.top_p) * static_cast<double>(whole) /
                          static_cast<double>(vocab_) / static_cast<double>(1ll << kWeightBits);
  const double bound = std::max<double>(std::log(lightest) - kScaledSlack, kLeastScaled);
  keep(logit_below(std::max<double>(bound, least)));
  expand_kept(least);

  const auto per_unit = static_cast<float>(-kWeights / bound);
  const auto weight_of = [&](const Kept& kept) {
    const float weight = kept.scaled * -per_unit;
    return static_cast<int>(weight < kWeights - 1 ? weight : kWeights - 1);
  };
  weights_.assign(kWeights, 0);
  for (const Kept& kept : kept_) weights_[weight_of(kept)] += static_cast<int64_t>(kept.weight);
  const int64_t wanted = share_of(whole);
  int64_t before = 0;
  int weight = 0;
  for (; weight < kWeights - 1 && before + weights_[weight] < wanted; ++weight)
    before += weights_[weight];
  const auto is_other = [&](const Kept& kept) { return weight_of(kept) != weight; };
  kept_.erase(std::remove_if(kept_.begin(), kept_.end(), is_other), kept_.end());
  return nucleus_threshold(wanted - before);
}

// The last of `kept_` that is needed, likeliest first, until their weights sum up to `wanted`.
//
//   kept_  |== needed, `before` in all ==|-------- open --------|== not needed ==|
//                                        begin                 end
float Sampler::nucleus_threshold(int64_t wanted) {
  auto begin = kept_.begin(), end = kept_.end();
  int64_t before = 0;
  while (end - begin > kFew) {
    const auto middle = begin + (end - begin) / 2;
    std::nth_element(begin, middle, end, likelier);
    int64_t sum = before;
    for (auto kept = begin; kept != middle; ++kept) sum += static_cast<int64_t>(kept->weight);
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
    before += static_cast<int64_t>(begin->weight);
    if (before >= wanted) break;
  }
  return found;
}

// ---- the draw ----------------------------------------------------------------------------------

// A chunk finishes at E / mass, E = -log(1 - u) exponential. E is not below u, and the mass not
// above the mass of a chunk of tokens like its largest: so most chunks are behind the first one
// without a look at their tokens.
int64_t Sampler::race(float threshold) {
  bound_times(threshold);
  int64_t winner = std::min_element(earliest_.begin(), earliest_.end()) - earliest_.begin();
  float first = time_of(winner, threshold);
  for (int64_t chunk = 0; chunk < num_chunks(); ++chunk) {
    if (chunk == winner || !(earliest_[chunk] <= first)) continue;
    const float time = time_of(chunk, threshold);
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
    kernels_.weigh(chunks_.data() + begin, size, largest_, draw_.temperature, part.scaled,
                   part.weights);
    bool may_win = false;
    for (int64_t i = 0; i < size; ++i) may_win |= part.scaled[i] >= threshold;
    float* numbers = numbers_.data() + begin;
    if (may_win) kernels_.uniforms(draw_.key, 1 + begin / kUniforms, numbers);
    for (int64_t i = 0; i < size; ++i)
      earliest_[begin + i] = part.scaled[i] >= threshold
                                 ? numbers[i] / (kLogitChunk * part.weights[i]) * (1 - kSlack)
                                 : -kNone;
  }
}

float Sampler::time_of(int64_t chunk, float threshold) const {
  int64_t mass;
  kernels_.masses(logits_ + chunk * kLogitChunk, size_of_chunk(chunk), largest_, draw_.temperature,
                  threshold, &mass);
  return exponential(numbers_[chunk]) / static_cast<float>(mass);
}

// Of its tokens; as between chunks.
int64_t Sampler::winner_of(int64_t chunk, float threshold) const {
  Part part;
  kernels_.weigh(logits_ + chunk * kLogitChunk, size_of_chunk(chunk), largest_, draw_.temperature,
                 part.scaled, part.weights);
  float numbers[kUniforms];
  kernels_.uniforms(draw_.key, 0, numbers);
  float first = -kNone;
  int64_t winner = 0;
  for (int64_t i = 0; i < size_of_chunk(chunk); ++i) {
    const float weight = part.weights[i];
    if (part.scaled[i] < threshold || !(numbers[i] * (1 - kSlack) < first * weight)) continue;
    const float time = exponential(numbers[i]) / weight;
    if (time >= first) continue;
    first = time;
    winner = i;
  }
  return winner;
}

}  // namespace quire
