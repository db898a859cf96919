#include "decoder/experts.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "linear/packed_linear.h"
#include "linear/split.h"

namespace quire {
namespace {

constexpr int64_t kRowsAtOnce = 8;  // grain of loops over rows

Dtype gated_type(const Linear& down) {
  return down.kind == WeightKind::f32 ? Dtype::f32 : Dtype::bf16;
}

// Row `index` of `rows` as the only one.
Rows row_at(const Rows& rows, int64_t index) {
  Rows row = rows;
  row.data = static_cast<char*>(rows.data) + index * rows.stride * input_bytes(rows.kind);
  row.scales += index;
  row.sums += index * rows.sums_stride;
  return row;
}

}  // namespace

void ExpertStep::prepare(const Experts& experts, int64_t m) {
  const int64_t num = experts.num_experts(), places = m * experts.top_k;
  const int64_t hidden = experts.hidden(), intermediate = experts.intermediate();
  chosen_.resize(places);
  weights_.resize(places);
  places_.resize(places);
  row_of_.resize(places);
  begin_of_.resize(num + 1);
  const auto floats = [&](int memory, int64_t size) {
    return static_cast<float*>(memory_[memory].get(size * sizeof(float)));
  };
  inputs_.prepare(places, std::max(hidden, intermediate));
  logits_stride_ = spaced(num, sizeof(float));
  logits_ = floats(0, m * logits_stride_);
  gated_stride_ = spaced(intermediate, size_of(gated_type(*experts.down.front())));
  gated_ = floats(1, places * gated_stride_);
  out_stride_ = spaced(hidden, sizeof(float));
  outputs_ = floats(2, places * out_stride_);
}

void ExpertStep::add(Lane& lane, const Experts& experts, const NormCall& norm, int64_t m,
                     float* out, int64_t out_stride) {
  const int64_t top_k = experts.top_k, places = m * top_k, hidden = experts.hidden();
  route(lane, experts, norm, m);
  const Linear &up = *experts.gate_up.front(), &down = *experts.down.front();
  const Rows inputs = inputs_.of(kernels_, up);
  lane.loop(places, kRowsAtOnce, [&](int64_t begin, int64_t end) {
    for (int64_t place = begin; place < end; ++place) {
      // The norm again instead of a copy: it is small beside an expert.
      NormCall call = norm;
      call.x += row_of_[place] * norm.stride;
      call.out = row_at(inputs, place);
      kernels_.rms_norm(call, 0, 1);
    }
  });
  const Dtype gated = gated_type(down);
  const Epilogue gate = experts.limit > 0.0f ? Epilogue::swiglu : Epilogue::silu_mul;
  LinearCall up_call{&up, inputs.read(), gate, gated, gated_, gated_stride_};
  up_call.alpha = experts.alpha;
  up_call.limit = experts.limit;
  compute(lane, experts.gate_up, up_, up_call);
  Activations x{gated_, gated_stride_};
  if (is_quantized(kernels_.input_kind(down.kind))) {
    const Rows rows = inputs_.of(kernels_, down);
    lane.loop(places, kRowsAtOnce, [&](int64_t begin, int64_t end) {
      kernels_.quantize(gated_, gated, gated_stride_, static_cast<int>(down.k), rows, begin, end);
    });
    x = rows.read();
  }
  compute(lane, experts.down, down_,
          {&down, x, Epilogue::store, Dtype::f32, outputs_, out_stride_});
  lane.loop(m, kRowsAtOnce, [&](int64_t begin, int64_t end) {
    for (int64_t choice = begin * top_k; choice < end * top_k; ++choice) {
      const float* from = outputs_ + places_[choice] * out_stride_;
      float* to = out + choice / top_k * out_stride;
      for (int64_t i = 0; i < hidden; ++i) to[i] += weights_[choice] * from[i];
    }
  });
}

// From rows to places: which experts compute them, and in which order they lie.
void ExpertStep::route(Lane& lane, const Experts& experts, const NormCall& norm, int64_t m) {
  const Rows rows = inputs_.of(kernels_, *experts.router);
  NormCall call = norm;
  call.out = rows;
  lane.loop(m, kRowsAtOnce,
            [&](int64_t begin, int64_t end) { kernels_.rms_norm(call, begin, end); });
  run_linear(kernels_, pool_, lane,
             {experts.router, rows.read(), Epilogue::store, Dtype::f32, logits_, logits_stride_},
             m);
  lane.loop(m, kRowsAtOnce, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) choose(experts, row);
  });
  lane.loop(1, 1, [&](int64_t, int64_t) {
    group(experts, m);
    divide(experts.gate_up, up_);
    divide(experts.down, down_);
  });
}

// The experts of a row and their weights: the softmax of its logits at the largest `top_k`. Equal
// logits are chosen among as torch.topk does on a CPU: it is the same selection by the standard
// library.
void ExpertStep::choose(const Experts& experts, int64_t row) {
  using Candidate = std::pair<float, int32_t>;
  const float* logits = logits_ + row * logits_stride_;
  const int64_t num = experts.num_experts(), top_k = experts.top_k;
  thread_local std::vector<Candidate> candidates;
  candidates.resize(num);
  for (int32_t i = 0; i < num; ++i) candidates[i] = {logits[i], i};
  const auto is_before = [](const Candidate& a, const Candidate& b) {
    return (std::isnan(a.first) && !std::isnan(b.first)) || a.first > b.first;
  };
  const auto first = candidates.begin(), end = first + top_k;
  if (top_k * 64 <= num)
    std::partial_sort(first, end, candidates.end(), is_before);
  else
    std::nth_element(first, end - 1, candidates.end(), is_before);
  const float largest = std::min_element(first, end, is_before)->first;
  std::sort(first, end, [](const Candidate& a, const Candidate& b) { return a.second < b.second; });
  int32_t* chosen = chosen_.data() + row * top_k;
  float* weights = weights_.data() + row * top_k;
  for (int64_t i = 0; i < top_k; ++i) {
    chosen[i] = candidates[i].second;
    weights[i] = candidates[i].first;
  }
  if (!std::isfinite(largest)) {
    std::fill_n(weights, top_k, std::nanf(""));
    return;
  }
  float sum = add_exponentials(weights, top_k, largest, weights);
  if (!experts.normalizes) sum = add_exponentials(logits, num, largest, nullptr);
  for (int64_t i = 0; i < top_k; ++i) weights[i] /= sum;
}

// Writes e^(x - largest) to `out`, unless it is null; returns their sum, in order.
float ExpertStep::add_exponentials(const float* x, int64_t n, float largest, float* out) const {
  float sum = 0, powers[kLogitChunk];
  for (int64_t begin = 0; begin < n; begin += kLogitChunk) {
    const int64_t count = std::min<int64_t>(n - begin, kLogitChunk);
    kernels_.exponentials(x + begin, count, largest, powers);
    for (int64_t i = 0; i < count; ++i) sum += powers[i];
    if (out) std::copy(powers, powers + count, out + begin);
  }
  return sum;
}

// Orders all choices by expert, and the choices of an expert by row.
void ExpertStep::group(const Experts& experts, int64_t m) {
  const int64_t num_places = m * experts.top_k;
  std::fill(begin_of_.begin(), begin_of_.end(), 0);
  for (int64_t i = 0; i < num_places; ++i) ++begin_of_[chosen_[i] + 1];
  std::partial_sum(begin_of_.begin(), begin_of_.end(), begin_of_.begin());
  next_of_ = begin_of_;
  for (int64_t i = 0; i < num_places; ++i) {
    places_[i] = next_of_[chosen_[i]]++;
    row_of_[places_[i]] = i / experts.top_k;
  }
}

// The panels of all experts that have rows, in pieces of about equal work.
void ExpertStep::divide(const std::vector<const Linear*>& linears, Tasks& tasks) const {
  tasks.list.clear();
  int num_used = 0;
  for (size_t i = 0; i < linears.size(); ++i) num_used += begin_of_[i + 1] > begin_of_[i];
  const int num_lanes = std::max(1, pool_.num_lanes() / std::max(1, num_used));
  for (size_t i = 0; i < linears.size(); ++i) {
    const int64_t num_rows = begin_of_[i + 1] - begin_of_[i];
    if (num_rows == 0) continue;
    const int64_t num_panels = panels_of(linears[i]->n);
    const int64_t grain = linear_grain(kernels_, *linears[i], num_rows, num_lanes);
    for (int64_t begin = 0; begin < num_panels; begin += grain)
      tasks.list.push_back({static_cast<int32_t>(i), begin, std::min(begin + grain, num_panels)});
  }
  tasks.size = static_cast<int64_t>(tasks.list.size());
}

// A linear of all experts in one loop: each with its own rows of the call's input and output.
void ExpertStep::compute(Lane& lane, const std::vector<const Linear*>& linears, const Tasks& tasks,
                         const LinearCall& call) {
  lane.loop(tasks.size, 1, [&](int64_t index, int64_t) {
    const Task& task = tasks.list[index];
    LinearCall one = call;
    one.weights = linears[task.expert];
    kernels_.linear(one, task.panel_begin, task.panel_end, begin_of_[task.expert],
                    begin_of_[task.expert + 1]);
  });
}

}  // namespace quire
