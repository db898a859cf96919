#include "sampling/head.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "linear/split.h"

namespace quire {
namespace {

constexpr int64_t kStatesAtOnce = 8;  // grain of loops over states
const Draw kLikeliest{};              // temperature 0

// Whether a later value replaces the best one so far: NaN is the largest, the first of equals
// stays.
bool beats(const Best& challenger, const Best& holder) {
  if (holder.value != holder.value) return false;
  return challenger.value > holder.value || challenger.value != challenger.value;
}

}  // namespace

void Head::logits(const float* hidden, int64_t m, float* out) {
  inputs_.prepare(m, hidden_size());
  pool_.run([&](Lane& lane) {
    run_linear(kernels_, pool_, lane, call(input(lane, hidden, m), Epilogue::store, out), m);
  });
}

void Head::plan(int64_t m, const Draws& asked) {
  slots_.assign(asked.num, -1);
  for (int64_t slot = 0; slot < asked.num_scored; ++slot) slots_[asked.scored[slot]] = slot;
  needs_logits_.assign(m, false);
  for (int64_t i = 0; i < asked.num; ++i)
    if (asked.draws[i] || slots_[i] >= 0) needs_logits_[asked.states[i]] = true;
  num_best_ = std::count(needs_logits_.begin(), needs_logits_.end(), false);

  order_.resize(m);
  std::iota(order_.begin(), order_.end(), 0);
  std::stable_sort(order_.begin(), order_.end(),
                   [&](int64_t a, int64_t b) { return needs_logits_[a] < needs_logits_[b]; });
  std::vector<int64_t> places(m);
  for (int64_t place = 0; place < m; ++place) places[order_[place]] = place;
  draws_.resize(asked.num);
  std::iota(draws_.begin(), draws_.end(), 0);
  const auto place_of = [&](int64_t i) { return places[asked.states[i]]; };
  std::stable_sort(draws_.begin(), draws_.end(),
                   [&](int64_t a, int64_t b) { return place_of(a) < place_of(b); });
  first_.assign(m + 1, 0);
  for (int64_t i = 0; i < asked.num; ++i) ++first_[place_of(i) + 1];
  std::partial_sum(first_.begin(), first_.end(), first_.begin());
}

void Head::draw(const float* hidden, int64_t m, const Draws& asked) {
  plan(m, asked);
  auto* rows = static_cast<float*>(logits_.get((m - num_best_) * vocab() * sizeof(float)));
  const auto logits_at = [&](int64_t place) { return rows + (place - num_best_) * vocab(); };
  std::vector<ScoredRow> scored;
  for (int64_t place = num_best_; place < m; ++place)
    for (int64_t at = first_[place]; at < first_[place + 1]; ++at)
      if (slots_[draws_[at]] >= 0) scored.push_back({logits_at(place), slots_[draws_[at]]});
  scorer_.begin(std::move(scored), vocab(), asked.scores);
  while (static_cast<int>(samplers_.size()) < pool_.num_lanes()) samplers_.emplace_back(kernels_);

  const float* states = gathered(hidden);
  inputs_.prepare(m, hidden_size());
  const int64_t num_panels = panels_of(weights_.n);
  const int64_t grain = linear_grain(kernels_, weights_, m, pool_.num_lanes());
  const int64_t num_parts = (num_panels + grain - 1) / grain;
  auto* bests = static_cast<Best*>(bests_.get(num_parts * num_best_ * sizeof(Best)));
  pool_.run([&](Lane& lane) {
    LinearCall all = call(input(lane, states, m), Epilogue::best_or_store, rows);
    all.num_best = num_best_;
    lane.loop(num_panels, grain, [&](int64_t first, int64_t last) {
      all.best = bests + first / grain * num_best_;
      kernels_.linear(all, first, last, 0, m);
    });
    if (num_best_ == m) return;
    lane.loop(m - num_best_, 1, [&](int64_t i, int64_t) {
      draw_at(samplers_[lane.index], logits_at(num_best_ + i), num_best_ + i, asked);
    });
    scorer_.run(lane);
  });
  keep_likeliest(num_parts, asked);
}

// One lane draws all tokens of a state: each draw temporarily changes the state's logits.
void Head::draw_at(Sampler& sampler, float* logits, int64_t place, const Draws& asked) {
  for (int64_t at = first_[place]; at < first_[place + 1]; ++at) {
    const int64_t i = draws_[at];
    const auto& draw = asked.draws[i];
    asked.tokens[i] = sampler.sample(logits, vocab(), draw ? *draw : kLikeliest);
    if (slots_[i] >= 0) asked.scores.asked(slots_[i]) = asked.tokens[i];
  }
}

void Head::keep_likeliest(int64_t num_parts, const Draws& asked) {
  const auto* parts = static_cast<const Best*>(bests_.get(0));
  for (int64_t row = 0; row < num_best_; ++row) {
    Best best = parts[row];
    for (int64_t part = 1; part < num_parts; ++part)
      if (beats(parts[part * num_best_ + row], best)) best = parts[part * num_best_ + row];
    for (int64_t at = first_[row]; at < first_[row + 1]; ++at)
      asked.tokens[draws_[at]] = std::isfinite(best.value) ? best.index : -1;
  }
}

// Returns the states by place in contiguous memory; copies them only if necessary.
const float* Head::gathered(const float* hidden) {
  const auto m = static_cast<int64_t>(order_.size());
  if (num_best_ == 0 || num_best_ == m) return hidden;
  const int64_t width = hidden_size();
  auto* states = static_cast<float*>(gathered_.get(m * width * sizeof(float)));
  for (int64_t place = 0; place < m; ++place)
    std::memcpy(states + place * width, hidden + order_[place] * width, width * sizeof(float));
  return states;
}

LinearCall Head::call(const Activations& x, Epilogue epilogue, float* out) const {
  LinearCall made{&weights_, x, epilogue, Dtype::f32, out, vocab()};
  made.factor = factor_;
  made.cap = cap_;
  return made;
}

Activations Head::input(Lane& lane, const float* hidden, int64_t m) {
  const int64_t width = hidden_size();
  if (weights_.kind == WeightKind::f32) return {hidden, width};
  const Rows rows = inputs_.of(kernels_, weights_);
  lane.loop(m, kStatesAtOnce, [&](int64_t begin, int64_t end) {
    kernels_.quantize(hidden, Dtype::f32, width, static_cast<int>(width), rows, begin, end);
  });
  return rows.read();
}

}  // namespace quire
