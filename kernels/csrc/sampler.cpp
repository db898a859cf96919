#include "sampler.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "philox.h"

namespace quire {
namespace {

constexpr float kNone = -std::numeric_limits<float>::infinity();

// Where a nucleus ends is looked for among the tokens that are at most e^8 times less likely than
// the likeliest, and among all only when it does not end there.
constexpr float kNucleus = -8.0f;

double power_of(float scaled) { return std::exp(static_cast<double>(scaled)); }

}  // namespace

int64_t Sampler::sample(const float* logits, int64_t vocab, const Draw& draw) {
  logits_ = logits;
  vocab_ = vocab;
  draw_ = draw;
  chunks_.resize((vocab + kLogitChunk - 1) / kLogitChunk);
  kernels_.largest(logits, vocab, chunks_.data());
  largest_ = chunks_[0];
  for (float chunk : chunks_) {
    if (std::isnan(chunk)) return -1;
    largest_ = std::max(largest_, chunk);
  }
  if (!std::isfinite(largest_)) return -1;
  for (float& chunk : chunks_) chunk = (chunk - largest_) / draw.temperature;
  return race(threshold());
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
  if (ranked) {
    keep_likeliest(by_min_p);
    if (draw_.top_p >= 1) return std::max(by_min_p, *std::min_element(kept_.begin(), kept_.end()));
    double whole = 0;
    for (float value : kept_) whole += power_of(value);
    return nucleus_threshold(draw_.top_p * whole);
  }
  const double whole = keep_above(by_min_p, kNucleus);
  double near = 0;
  for (float value : kept_) near += power_of(value);
  if (near < draw_.top_p * whole) keep_above(by_min_p, kNone);
  return nucleus_threshold(draw_.top_p * whole);
}

// The top_k of what is not below `bound`. A chunk's largest is a member of the row, so that the
// k-th largest of them bounds the k-th largest of all from below.
void Sampler::keep_likeliest(float bound) {
  if (draw_.top_k < num_chunks()) {
    kept_ = chunks_;
    const auto kth = kept_.begin() + (draw_.top_k - 1);
    std::nth_element(kept_.begin(), kth, kept_.end(), std::greater<>());
    bound = std::max(bound, *kth);
  }
  kept_.clear();
  Chunk chunk;
  for (int64_t i = 0; i < num_chunks(); ++i) {
    if (chunks_[i] < bound) continue;
    expand(i, chunk);
    for (float value : chunk.scaled)
      if (value >= bound && value > kNone) kept_.push_back(value);
  }
  if (static_cast<int64_t>(kept_.size()) <= draw_.top_k) return;
  std::nth_element(kept_.begin(), kept_.begin() + (draw_.top_k - 1), kept_.end(), std::greater<>());
  kept_.resize(draw_.top_k);
}

// The sum of the powers of what is not below `bound`; keeps of it what is not below `nucleus`.
double Sampler::keep_above(float bound, float nucleus) {
  kept_.clear();
  double sums[4] = {};  // independent chains of additions
  Chunk chunk;
  for (int64_t i = 0; i < num_chunks(); ++i) {
    if (chunks_[i] < bound) continue;
    expand(i, chunk);
    for (int j = 0; j < kLogitChunk; ++j)
      sums[j % 4] += chunk.scaled[j] >= bound ? chunk.powers[j] : 0.0f;
    if (chunks_[i] < nucleus) continue;
    for (float value : chunk.scaled)
      if (value >= bound && value >= nucleus && value > kNone) kept_.push_back(value);
  }
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// The last of `kept_` that is needed, likeliest first, until their powers sum up to `wanted`.
float Sampler::nucleus_threshold(double wanted) const {
  std::vector<float> sorted = kept_;
  std::sort(sorted.begin(), sorted.end(), std::greater<>());
  double before = 0;
  float found = 0;
  for (float value : sorted) {
    if (before >= wanted) break;
    before += power_of(value);
    found = value;
  }
  return found;
}

// Token i finishes at E / p, E = -log(1 - u) exponential; as E >= u, most need no logarithm.
int64_t Sampler::race(float threshold) const {
  double first = std::numeric_limits<double>::infinity();
  int64_t winner = 0;
  Chunk chunk;
  for (int64_t i = 0; i < num_chunks(); ++i) {
    if (chunks_[i] < threshold) continue;
    expand(i, chunk);
    for (int group = 0; group < kLogitChunk; group += 8) {
      float powers[8], numbers[8];
      float any = 0;
      for (int j = 0; j < 8; ++j) {
        powers[j] = chunk.scaled[group + j] >= threshold ? chunk.powers[group + j] : 0.0f;
        any += powers[j];
      }
      if (any == 0) continue;
      const int64_t begin = i * kLogitChunk + group;
      uniforms(draw_.seed, draw_.sequence_index, draw_.position, static_cast<uint64_t>(begin / 8),
               numbers);
      for (int j = 0; j < 8; ++j) {
        const double power = powers[j];
        if (!(numbers[j] < first * power)) continue;
        const double time = -std::log1p(-static_cast<double>(numbers[j])) / power;
        if (time < first) {
          first = time;
          winner = begin + j;
        }
      }
    }
  }
  return winner;
}

}  // namespace quire
