#include "sampler.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "philox.h"

namespace quire {
namespace {

constexpr float kNone = -std::numeric_limits<float>::infinity();

// Where a nucleus ends is found in two steps: among buckets of the scaled logit, then by sorting
// the one bucket where it ends, instead of the whole vocabulary.
constexpr int kBuckets = 4096;
constexpr float kRange = 32.0f;  // what lies further below the largest is in the last bucket

int bucket_of(float scaled) {
  const float at = -scaled * (kBuckets / kRange);
  return at < kBuckets - 1 ? static_cast<int>(at) : kBuckets - 1;
}

double power_of(float scaled) { return std::exp(static_cast<double>(scaled)); }

}  // namespace

int64_t Sampler::sample(const float* logits, int64_t vocab, const Draw& draw) {
  const float largest = kernels_.largest(logits, vocab);
  if (!std::isfinite(largest)) return -1;
  scaled_.resize(vocab);
  powers_.resize(vocab);
  kernels_.exp_scaled(logits, vocab, largest, draw.temperature, scaled_.data(), powers_.data());
  return race(draw, vocab, threshold(draw, vocab));
}

// The smallest scaled logit that min_p, top_k and top_p leave, each of what the one before has
// left.
float Sampler::threshold(const Draw& draw, int64_t vocab) {
  const float by_min_p = draw.min_p > 0 ? std::log(draw.min_p) : kNone;
  const bool ranked = draw.top_k > 0 && draw.top_k < vocab;
  if (!ranked && draw.top_p >= 1) return by_min_p;
  kept_.clear();
  for (int64_t i = 0; i < vocab; ++i)
    if (scaled_[i] >= by_min_p && scaled_[i] > kNone) kept_.push_back(scaled_[i]);
  float found = kNone;
  double whole = 0;
  if (ranked && draw.top_k < static_cast<int64_t>(kept_.size())) {
    found = rank_threshold(draw);
    kept_.resize(draw.top_k);
  }
  if (draw.top_p < 1) {
    for (float value : kept_) whole += power_of(value);
    found = nucleus_threshold(draw.top_p * whole);
  }
  return std::max(found, by_min_p);
}

// The k-th largest; of those that tie with it, some are among the first k and some behind.
float Sampler::rank_threshold(const Draw& draw) {
  const auto kth = kept_.begin() + (draw.top_k - 1);
  std::nth_element(kept_.begin(), kth, kept_.end(), std::greater<>());
  return *kth;
}

// The last that is needed, likeliest first, until their powers sum up to `wanted`.
float Sampler::nucleus_threshold(double wanted) {
  std::vector<double> mass(kBuckets);
  for (float value : kept_) mass[bucket_of(value)] += power_of(value);
  double before = 0;
  int last = 0;
  while (last + 1 < kBuckets && before + mass[last] < wanted) before += mass[last++];
  std::vector<float> edge;
  for (float value : kept_)
    if (bucket_of(value) == last) edge.push_back(value);
  std::sort(edge.begin(), edge.end(), std::greater<>());
  float found = 0;
  for (float value : edge) {
    if (before >= wanted) break;
    before += power_of(value);
    found = value;
  }
  if (!edge.empty()) return found;
  return *std::min_element(kept_.begin(), kept_.end());
}

// Token i finishes at E / p, E = -log(1 - u) exponential; as E >= u, most need no logarithm.
int64_t Sampler::race(const Draw& draw, int64_t vocab, float threshold) const {
  double first = std::numeric_limits<double>::infinity();
  int64_t winner = 0;
  float numbers[8];
  for (int64_t begin = 0; begin < vocab; begin += 8) {
    const int size = static_cast<int>(std::min<int64_t>(8, vocab - begin));
    bool any = false;
    for (int i = 0; i < size; ++i) any |= scaled_[begin + i] >= threshold;
    if (!any) continue;
    uniforms(draw.seed, draw.sequence_index, draw.position, static_cast<uint64_t>(begin / 8),
             numbers);
    for (int i = 0; i < size; ++i) {
      const double power = powers_[begin + i];
      if (scaled_[begin + i] < threshold || !(numbers[i] < first * power)) continue;
      const double time = -std::log1p(-static_cast<double>(numbers[i])) / power;
      if (time < first) {
        first = time;
        winner = begin + i;
      }
    }
  }
  return winner;
}

}  // namespace quire
