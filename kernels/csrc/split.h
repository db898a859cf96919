// How a linear is shared out among lanes.
#pragma once

#include <algorithm>
#include <cstdint>

namespace quire {

// Panels that a lane takes at once, for m rows. A call begins with weights that nobody has fetched,
// so few rows, which wait for memory, want few calls; many rows want lanes that end together. And
// no call is so long that a lent lane could not leave.
inline int64_t linear_grain(int64_t num_panels, int64_t m, int num_lanes) {
  constexpr int64_t kMostPanels = 64, kFewRows = 48;
  const int64_t num_calls = num_lanes * (m <= kFewRows ? 2 : 4);
  return std::clamp((num_panels + num_calls - 1) / num_calls, int64_t{1}, kMostPanels);
}

}  // namespace quire
