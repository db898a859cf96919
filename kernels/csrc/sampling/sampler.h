// Chooses one token from a row of logits. `services/engine/sampling/sampler.py` is the reference:
// it defines and explains the computation, and the tests compare this implementation with it.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "kernels.h"
#include "sampling/adjustment.h"

namespace quire {

struct Draw {
  float temperature;  // 0: the largest logit, the first of equal ones
  float least;        // the least scaled logit that min_p leaves; -inf: min_p is off
  int64_t top_k;      // 0: off
  double top_p;       // 1: off
  DrawKey key;
  std::optional<Adjustment> adjustment;
};

// -log(1 - u) for u in (0, 1).
float exponential(float u);

// Reads a row chunk by chunk; of most chunks a draw needs only the largest logit. The sampler keeps
// its memory from draw to draw.
class Sampler {
 public:
  explicit Sampler(const Kernels& kernels) : kernels_(kernels) {}

  // Returns a token, or -1: the logits are not finite. An adjustment changes the logits during the
  // call; they are restored.
  int64_t sample(float* logits, int64_t vocab, const Draw& draw);

 private:
  // A token that has passed the filters so far.
  struct Kept {
    float scaled;  // (logit - largest) / temperature
    float weight;
  };
  static bool likelier(const Kept& a, const Kept& b) { return a.scaled > b.scaled; }

  // Scaled logits and weights of some chunks' largest logits, or of the tokens of a chunk.
  struct Part {
    float scaled[kLogitChunk];
    float weights[kLogitChunk];
  };

  int64_t num_chunks() const { return static_cast<int64_t>(chunks_.size()); }
  int64_t size_of_chunk(int64_t chunk) const;
  bool find_largest();
  int64_t choose();
  void adjust(float* logits);
  void look_again(const int64_t* token_ids, int64_t count);
  int64_t first_largest() const;

  float threshold();
  float scaled_of(float logit) const;
  float logit_below(double scaled) const;
  void keep(float bound);
  void expand_kept(float least);
  void keep_likeliest(float least);
  float nucleus(float least);
  float nucleus_threshold(int64_t wanted);
  int64_t share_of(int64_t whole) const;

  int64_t race(float threshold);
  void bound_times(float threshold);
  float time_of(int64_t chunk, float threshold) const;
  int64_t winner_of(int64_t chunk, float threshold) const;

  const Kernels& kernels_;
  Adjuster adjuster_;
  const float* logits_ = nullptr;
  int64_t vocab_ = 0;
  float largest_ = 0;
  Draw draw_{};
  std::vector<float> chunks_;     // each chunk's largest logit
  std::vector<float> ranks_;      // a copy of chunks_, partly sorted
  std::vector<char> changed_;     // by chunk: whether to compute its largest logit again
  std::vector<int64_t> touched_;  // tokens whose logits were adjusted
  std::vector<int64_t> masses_;   // by chunk: the sum of its weights
  std::vector<float> kept_logits_;
  int64_t num_kept_ = 0;
  std::vector<Kept> kept_;
  std::vector<int64_t> weights_;  // sums of weights of tokens that are about equally likely
  std::vector<float> numbers_;    // by chunk: its random number
  std::vector<float> earliest_;   // by chunk: a lower bound of its finishing time
};

}  // namespace quire
