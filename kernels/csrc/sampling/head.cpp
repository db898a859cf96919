#include "sampling/head.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "linear/packed_linear.h"
#include "linear/split.h"

namespace quire {
namespace {

constexpr int64_t kStatesAtOnce = 8;   // grain of loops over states
constexpr int64_t kLogitsAtOnce = 64;  // rows; 39 MB with a vocabulary of 150,000
const Draw kLikeliest{};               // temperature 0

// Rounds to nearest, ties to even; NaN stays NaN.
bf16 narrowed(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  if (value != value) return static_cast<bf16>((bits >> 16) | 0x40u);
  return static_cast<bf16>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// Whether a later value replaces the best one so far: NaN is the largest, the first of equals
// stays.
bool beats(const Best& challenger, const Best& holder) {
  if (holder.value != holder.value) return false;
  return challenger.value > holder.value || challenger.value != challenger.value;
}

}  // namespace

void Head::logits(const float* hidden, int64_t m, float* out) {
  prepare(m);
  const int64_t num_panels = round_up(weights_.n, kPanel) / kPanel;
  const int64_t grain = linear_grain(kernels_, weights_, m, pool_.num_lanes());
  pool_.run([&](Lane& lane) {
    const LinearCall all = call(input(lane, hidden, m), Epilogue::store_f32, out);
    lane.loop(num_panels, grain,
              [&](int64_t begin, int64_t end) { kernels_.linear(all, begin, end, 0, m); });
  });
}

// States with draws are few and computed together. States with scores alone may be as many as a
// prompt's chunk has tokens, and are computed kLogitsAtOnce at a time.
void Head::answer(const float* hidden, int64_t m, const Questions& asked) {
  plan(m, asked);
  int64_t size = num_likeliest_ + std::max(num_drawing_, kLogitsAtOnce);
  for (int64_t begin = 0; begin < m; begin += size, size = kLogitsAtOnce)
    compute(hidden, begin, std::min(begin + size, m), asked);
}

void Head::plan(int64_t m, const Questions& asked) {
  slots_.assign(asked.num, -1);
  for (int64_t slot = 0; slot < asked.num_scored; ++slot) slots_[asked.scored[slot]] = slot;
  needs_.assign(m, Need::likeliest);
  const auto is_scored = [&](int64_t i) { return slots_[i] >= 0; };
  for (int64_t i = 0; i < asked.num; ++i)
    if (asked.tokens[i] >= 0) needs_[asked.states[i]] = Need::scores;
  for (int64_t i = 0; i < asked.num; ++i)
    if (asked.tokens[i] < 0 &&
        (asked.draws[i] || is_scored(i) || needs_[asked.states[i]] == Need::scores))
      needs_[asked.states[i]] = Need::draws;
  num_likeliest_ = std::count(needs_.begin(), needs_.end(), Need::likeliest);
  num_drawing_ = std::count(needs_.begin(), needs_.end(), Need::draws);

  order_.resize(m);
  std::iota(order_.begin(), order_.end(), 0);
  std::stable_sort(order_.begin(), order_.end(),
                   [&](int64_t a, int64_t b) { return needs_[a] < needs_[b]; });
  std::vector<int64_t> places(m);
  for (int64_t place = 0; place < m; ++place) places[order_[place]] = place;
  questions_.resize(asked.num);
  std::iota(questions_.begin(), questions_.end(), 0);
  const auto place_of = [&](int64_t i) { return places[asked.states[i]]; };
  std::stable_sort(questions_.begin(), questions_.end(),
                   [&](int64_t a, int64_t b) { return place_of(a) < place_of(b); });
  first_.assign(m + 1, 0);
  for (int64_t i = 0; i < asked.num; ++i) ++first_[place_of(i) + 1];
  std::partial_sum(first_.begin(), first_.end(), first_.begin());
}

// Computes the states at places [begin, end).
//
//   begin |== likeliest alone ==|======= draws =======|======= scores =======| end
//         0                     num_best              num_best + num_drawing m
//                               |--------------- rows of logits -------------|
void Head::compute(const float* hidden, int64_t begin, int64_t end, const Questions& asked) {
  const int64_t m = end - begin;
  const int64_t num_best = std::clamp<int64_t>(num_likeliest_ - begin, 0, m);
  const int64_t num_drawing =
      std::clamp<int64_t>(num_likeliest_ + num_drawing_ - begin, 0, m) - num_best;
  auto* rows = static_cast<float*>(logits_.get((m - num_best) * vocab() * sizeof(float)));
  const auto logits_at = [&](int64_t i) { return rows + (i - num_best) * vocab(); };

  std::vector<ScoredRow> scored;
  for (int64_t i = num_best; i < m; ++i)
    for (int64_t at = first_[begin + i]; at < first_[begin + i + 1]; ++at) {
      const int64_t question = questions_[at], slot = slots_[question];
      if (slot < 0) continue;
      scored.push_back({logits_at(i), slot});
      asked.scores.asked(slot) = asked.tokens[question];
    }
  scorer_.begin(std::move(scored), vocab(), asked.scores);
  while (static_cast<int>(samplers_.size()) < pool_.num_lanes()) samplers_.emplace_back(kernels_);

  const float* states = gathered(hidden, begin, end);
  prepare(m);
  const int64_t num_panels = round_up(weights_.n, kPanel) / kPanel;
  const int64_t grain = linear_grain(kernels_, weights_, m, pool_.num_lanes());
  const int64_t num_parts = (num_panels + grain - 1) / grain;
  auto* bests = static_cast<Best*>(bests_.get(num_parts * num_best * sizeof(Best)));
  pool_.run([&](Lane& lane) {
    LinearCall all = call(input(lane, states, m), Epilogue::best_or_f32, rows);
    all.num_best = num_best;
    lane.loop(num_panels, grain, [&](int64_t first, int64_t last) {
      all.best = bests + first / grain * num_best;
      kernels_.linear(all, first, last, 0, m);
    });
    if (num_drawing > 0)
      lane.loop(num_drawing, 1, [&](int64_t i, int64_t) {
        draw(samplers_[lane.index], logits_at(num_best + i), begin + num_best + i, asked);
      });
    if (scorer_.num_rows() == 0) return;
    lane.loop(scorer_.num_parts(), 1, [&](int64_t part, int64_t) { scorer_.look(part); });
    lane.loop(scorer_.num_parts(), 1, [&](int64_t part, int64_t) { scorer_.add(part); });
    lane.loop(scorer_.num_rows(), 1, [&](int64_t row, int64_t) { scorer_.conclude(row); });
  });
  keep_likeliest(begin, num_best, num_parts, asked);
}

// One lane draws all tokens of a state: each draw temporarily changes the state's logits.
void Head::draw(Sampler& sampler, float* logits, int64_t place, const Questions& asked) {
  for (int64_t at = first_[place]; at < first_[place + 1]; ++at) {
    const int64_t question = questions_[at], slot = slots_[question];
    if (asked.tokens[question] >= 0) continue;
    const auto& draw = asked.draws[question];
    asked.tokens[question] = sampler.sample(logits, vocab(), draw ? *draw : kLikeliest);
    if (slot >= 0) asked.scores.asked(slot) = asked.tokens[question];
  }
}

void Head::keep_likeliest(int64_t begin, int64_t num_best, int64_t num_parts,
                          const Questions& asked) {
  const auto* parts = static_cast<const Best*>(bests_.get(0));
  for (int64_t row = 0; row < num_best; ++row) {
    Best best = parts[row];
    for (int64_t part = 1; part < num_parts; ++part)
      if (beats(parts[part * num_best + row], best)) best = parts[part * num_best + row];
    for (int64_t at = first_[begin + row]; at < first_[begin + row + 1]; ++at)
      asked.tokens[questions_[at]] = std::isfinite(best.value) ? best.index : -1;
  }
}

// Returns the states at places [begin, end) in contiguous memory; copies them only if necessary.
const float* Head::gathered(const float* hidden, int64_t begin, int64_t end) {
  const int64_t width = hidden_size(), first = order_[begin];
  bool is_there = true;
  for (int64_t place = begin; place < end; ++place)
    is_there = is_there && order_[place] == first + place - begin;
  if (is_there) return hidden + first * width;
  auto* states = static_cast<float*>(gathered_.get((end - begin) * width * sizeof(float)));
  for (int64_t place = begin; place < end; ++place)
    std::memcpy(states + (place - begin) * width, hidden + order_[place] * width,
                width * sizeof(float));
  return states;
}

void Head::prepare(int64_t m) {
  const int64_t width = round_up(hidden_size(), kMostGroup);
  inputs_ = {kernels_.input_kind(weights_.kind),
             weights_.group,
             rounded_.get(m * width * sizeof(bf16)),
             width,
             static_cast<float*>(scales_.get(m * sizeof(float))),
             static_cast<float*>(sums_.get(m * num_groups(weights_) * sizeof(float))),
             num_groups(weights_)};
}

LinearCall Head::call(const Activations& x, Epilogue epilogue, float* out) const {
  LinearCall made{&weights_, x, epilogue, out, vocab()};
  made.factor = factor_;
  made.cap = cap_;
  return made;
}

Activations Head::input(Lane& lane, const float* hidden, int64_t m) {
  const int64_t width = hidden_size();
  if (weights_.kind == WeightKind::f32) return {hidden, width};
  lane.loop(m, kStatesAtOnce, [&](int64_t begin, int64_t end) {
    if (is_quantized(weights_.kind))
      return kernels_.quantize(hidden, Dtype::f32, width, static_cast<int>(width), inputs_, begin,
                               end);
    auto* rounded = static_cast<bf16*>(inputs_.data);
    for (int64_t row = begin; row < end; ++row)
      for (int64_t i = 0; i < width; ++i)
        rounded[row * inputs_.stride + i] = narrowed(hidden[row * width + i]);
  });
  return inputs_.read();
}

}  // namespace quire
