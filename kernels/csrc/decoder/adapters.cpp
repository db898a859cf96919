#include "decoder/adapters.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "linear/packed_linear.h"

namespace quire {

void Adapters::begin(std::vector<AdapterRun> runs, int64_t num_tokens, int64_t width) {
  runs_ = std::move(runs);
  if (runs_.empty()) return;
  int64_t rank = 0;
  for (const AdapterRun& run : runs_)
    for (const auto& layer : run.adapter->layers)
      for (const LowRank& one : layer) rank = std::max<int64_t>(rank, one.down ? one.down->n : 0);
  z_stride_ = round_up(rank, kPanel);
  stride_ = round_up(width, kPanel);
  z_ = static_cast<float*>(ranks_.get(num_tokens * z_stride_ * sizeof(float)));
  sums_ = static_cast<float*>(added_.get(num_tokens * stride_ * sizeof(float)));
}

void Adapters::keep(const int64_t* wanted, int64_t num_wanted) {
  const int64_t* end = wanted + num_wanted;
  for (AdapterRun& run : runs_) {
    run.begin = std::lower_bound(wanted, end, run.begin) - wanted;
    run.end = std::lower_bound(wanted, end, run.end) - wanted;
  }
}

template <typename Body>
void Adapters::each_panel(ThreadPool::Lane& lane, size_t layer, Site site, bool up,
                          const Body& body) {
  const auto num_panels = [&](const AdapterRun& run) {
    const LowRank& one = run.adapter->layers[layer][site];
    const Linear* linear = up ? one.up : one.down;
    return linear ? round_up(linear->n, kPanel) / kPanel : int64_t{1};
  };
  int64_t total = 0;
  for (const AdapterRun& run : runs_) total += num_panels(run);
  const int64_t grain = std::max<int64_t>(1, total / 64);
  lane.loop(total, grain, [&](int64_t begin, int64_t end) {
    for (const AdapterRun& run : runs_) {
      const int64_t count = num_panels(run), last = std::min(end, count);
      if (begin < last && run.begin < run.end) body(run, std::max<int64_t>(begin, 0), last);
      begin -= count;
      end -= count;
      if (end <= 0) return;
    }
  });
}

void Adapters::add(const Kernels& kernels, ThreadPool::Lane& lane, size_t layer, Site site,
                   const Activations& x, LinearCall& call) {
  each_panel(lane, layer, site, false, [&](const AdapterRun& run, int64_t begin, int64_t end) {
    if (const Linear* down = run.adapter->layers[layer][site].down)
      kernels.linear({down, x, Epilogue::store_f32, z_, z_stride_}, begin, end, run.begin, run.end);
  });
  each_panel(lane, layer, site, true, [&](const AdapterRun& run, int64_t begin, int64_t end) {
    const Linear* up = run.adapter->layers[layer][site].up;
    if (up)
      kernels.linear({up, {z_, z_stride_}, Epilogue::store_f32, sums_, stride_}, begin, end,
                     run.begin, run.end);
    else
      std::memset(sums_ + run.begin * stride_, 0,
                  static_cast<size_t>((run.end - run.begin) * stride_) * sizeof(float));
  });
  call.added = sums_;
  call.added_stride = stride_;
  call.added_from = runs_.front().begin;
}

}  // namespace quire
