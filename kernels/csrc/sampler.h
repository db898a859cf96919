// One token of a row of logits: `services/engine/sampler.py` in native code, which says what is
// computed and why, and is what this is tested against.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels.h"

namespace quire {

struct Draw {
  float temperature;  // > 0
  float min_p;        // 0: off
  int64_t top_k;      // 0: off
  double top_p;       // 1: off
  uint64_t seed;
  uint64_t sequence_index;
  uint64_t position;
};

// Memory that a draw needs; kept from draw to draw.
class Sampler {
 public:
  explicit Sampler(const Kernels& kernels) : kernels_(kernels) {}

  // -1: the logits are not finite.
  int64_t sample(const float* logits, int64_t vocab, const Draw& draw);

 private:
  float threshold(const Draw& draw, int64_t vocab);
  float rank_threshold(const Draw& draw);
  float nucleus_threshold(double wanted);
  int64_t race(const Draw& draw, int64_t vocab, float threshold) const;

  const Kernels& kernels_;
  std::vector<float> scaled_, powers_;  // [vocab]: (logit - largest) / temperature, and e^ that
  std::vector<float> kept_;             // scaled logits that the filters have left so far
};

}  // namespace quire
