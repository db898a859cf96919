// How a linear is divided among lanes.
#pragma once

#include <algorithm>
#include <cstdint>

namespace quire {

// The number of panels that a lane takes at once, for m rows. A call begins with weights that were
// not prefetched, so few rows, which wait for memory, are computed in few calls. Many rows are
// computed in more calls, so that the lanes end together. No call is so long that a lent lane could
// not leave soon: wide layers take a millisecond.
inline int64_t linear_grain(int64_t num_panels, int64_t m, int num_lanes) {
  constexpr int64_t kFewRows = 48, kMostPanels = 64, kMostPanelRows = 1024;
  const bool is_few = m <= kFewRows;
  const int64_t num_calls = num_lanes * (is_few ? 2 : 4);
  const int64_t most = is_few ? kMostPanels : kMostPanelRows / m;
  return std::max(int64_t{1}, std::min((num_panels + num_calls - 1) / num_calls, most));
}

}  // namespace quire
