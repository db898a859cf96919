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

// Looks at a row chunk by chunk, at most of them only at their largest logit. Its memory is kept
// from draw to draw.
class Sampler {
 public:
  explicit Sampler(const Kernels& kernels) : kernels_(kernels) {}

  // -1: the logits are not finite.
  int64_t sample(const float* logits, int64_t vocab, const Draw& draw);

 private:
  // A chunk's (logit - largest) / temperature, and e^ that.
  struct Chunk {
    float scaled[kLogitChunk];
    float powers[kLogitChunk];
  };

  int64_t num_chunks() const { return static_cast<int64_t>(chunks_.size()); }
  void expand(int64_t index, Chunk& chunk) const;
  float threshold();
  void keep_likeliest(float bound);
  double keep_above(float bound, float nucleus);
  float nucleus_threshold(double wanted) const;
  int64_t race(float threshold) const;

  const Kernels& kernels_;
  const float* logits_ = nullptr;
  int64_t vocab_ = 0;
  float largest_ = 0;
  Draw draw_{};
  std::vector<float> chunks_;  // each chunk's largest scaled logit
  std::vector<float> kept_;    // scaled logits that the filters have left so far
};

}  // namespace quire
