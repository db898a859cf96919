// One token of a row of logits: `services/engine/sampler.py` in native code, which says what is
// computed and why, and is what this is tested against.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "adjustment.h"
#include "kernels.h"

namespace quire {

struct Draw {
  float temperature;  // 0: the largest logit, of equal ones the first
  float min_p;        // 0: off
  int64_t top_k;      // 0: off
  double top_p;       // 1: off
  uint64_t seed;
  uint64_t sequence_index;
  uint64_t position;
  std::optional<Adjustment> adjustment;
};

// Looks at a row chunk by chunk, at most of them only at their largest logit. Its memory is kept
// from draw to draw.
class Sampler {
 public:
  explicit Sampler(const Kernels& kernels) : kernels_(kernels) {}

  // -1: the logits are not finite. An adjustment changes them meanwhile; they are as they were
  // afterwards.
  int64_t sample(float* logits, int64_t vocab, const Draw& draw);

 private:
  // A chunk's (logit - largest) / temperature, and e^ that.
  struct Chunk {
    float scaled[kLogitChunk];
    float powers[kLogitChunk];
  };

  // A token that the filters have left so far.
  struct Kept {
    float scaled;
    float power;
  };
  static bool likelier(const Kept& a, const Kept& b) { return a.scaled > b.scaled; }

  int64_t num_chunks() const { return static_cast<int64_t>(chunks_.size()); }
  bool find_largest();
  int64_t choose();
  void adjust(float* logits);
  void look_again(const int64_t* token_ids, int64_t count);
  int64_t first_largest() const;
  void expand(int64_t index, Chunk& chunk) const;
  float threshold();
  void keep_likeliest(float bound);
  float nucleus(float bound);
  double weigh(float bound);
  void keep_weight(float bound, int weight);
  float nucleus_threshold(double wanted);
  int64_t race(float threshold) const;

  const Kernels& kernels_;
  Adjuster adjuster_;
  const float* logits_ = nullptr;
  int64_t vocab_ = 0;
  float largest_ = 0;
  Draw draw_{};
  std::vector<float> chunks_;     // each chunk's largest logit, then scaled
  std::vector<float> ranks_;      // of chunks
  std::vector<char> changed_;     // chunks to look at again
  std::vector<int64_t> touched_;  // tokens whose logits were adjusted
  std::vector<Kept> kept_;
  std::vector<double> weights_;  // sums of powers of tokens that are about as likely
};

}  // namespace quire
