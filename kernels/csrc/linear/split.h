// How a linear is divided among lanes.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels.h"
#include "threads/thread_pool.h"

namespace quire {

inline constexpr int64_t kFewRows = 48;  // up to here a linear waits for its weights

// The number of panels that a lane takes at once, for m rows of these weights. A call begins with
// weights that were not prefetched, so few rows, which wait for memory, are computed in few calls.
// Many rows are computed in more calls, so that the lanes end together. No call is so long that a
// lent lane could not leave soon: wide layers take a millisecond.
inline int64_t linear_grain(const Kernels& kernels, const Linear& weights, int64_t m,
                            int num_lanes) {
  constexpr int64_t kMostPanels = 64;
  const bool is_few = m <= kFewRows;
  const int64_t num_calls = num_lanes * (is_few ? 2 : 4);
  const int64_t most = is_few ? kMostPanels : kernels.most_panel_rows(weights.kind) / m;
  const int64_t grain =
      std::max(int64_t{1}, std::min((panels_of(weights.n) + num_calls - 1) / num_calls, most));
  return is_few ? grain : (grain + 1) / 2 * 2;  // tiles take pairs of panels
}

// Computes a linear for m rows; all lanes of the pool call it.
inline void run_linear(const Kernels& kernels, const ThreadPool& pool, ThreadPool::Lane& lane,
                       const LinearCall& call, int64_t m) {
  const Linear& weights = *call.weights;
  lane.loop(panels_of(weights.n), linear_grain(kernels, weights, m, pool.num_lanes()),
            [&](int64_t begin, int64_t end) { kernels.linear(call, begin, end, 0, m); });
}

}  // namespace quire
