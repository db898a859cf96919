// A layer's experts as Python makes them. Python keeps the packed linears alive.
#pragma once

#include <vector>

#include "decoder/experts.h"
#include "linear/packed_linear.h"

namespace quire {

class BoundExperts {
 public:
  // std::invalid_argument: the linears do not fit together, or there are fewer experts than top_k.
  BoundExperts(const PackedLinear& router, const std::vector<const PackedLinear*>& gate_up,
               const std::vector<const PackedLinear*>& down, int top_k, bool normalizes,
               float alpha, float limit)
      : experts_{&router.get(), linears(gate_up), linears(down), top_k, normalizes, alpha, limit} {
    require(limit >= 0, "a limit of swiglu below 0");
    require(router.get().kind == WeightKind::f32, "the router is not float32");
    require(router.get().n == experts_.num_experts() && gate_up.size() == down.size(),
            "router, gate_up and down are not of as many experts");
    require(top_k > 0 && top_k <= experts_.num_experts(), "top_k is not between 1 and the experts");
    const Linear &up = *experts_.gate_up[0], &out = *experts_.down[0];
    require(up.n == round_up(out.k, 16) * 2 && up.k == router.get().k && out.n == up.k,
            "experts that are not [2 * intermediate, hidden] and [hidden, intermediate]");
    for (size_t i = 1; i < gate_up.size(); ++i)
      require(is_alike(*experts_.gate_up[i], up) && is_alike(*experts_.down[i], out),
              "experts that differ in shape or kind");
  }

  const Experts& get() const { return experts_; }

 private:
  static std::vector<const Linear*> linears(const std::vector<const PackedLinear*>& packed) {
    require(!packed.empty(), "no experts");
    std::vector<const Linear*> found;
    for (const PackedLinear* linear : packed) found.push_back(&linear->get());
    return found;
  }

  static bool is_alike(const Linear& a, const Linear& b) {
    return a.n == b.n && a.k == b.k && a.kind == b.kind && a.group == b.group;
  }

  const Experts experts_;
};

}  // namespace quire
