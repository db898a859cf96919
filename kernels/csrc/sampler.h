// One token of a row of logits: `services/engine/sampling/sampler.py` in native code, which says
// what is computed and why, and is what this is tested against.
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
  DrawKey key;
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
  // A token that the filters have left so far.
  struct Kept {
    float scaled;  // (logit - largest) / temperature
    float power;   // e^ that
  };
  static bool likelier(const Kept& a, const Kept& b) { return a.scaled > b.scaled; }

  // A part of the row, of chunks or of tokens in a chunk, expanded.
  struct Part {
    float scaled[kLogitChunk];
    float powers[kLogitChunk];
  };

  int64_t num_chunks() const { return static_cast<int64_t>(chunks_.size()); }
  int64_t size_of_chunk(int64_t chunk) const;
  bool find_largest();
  int64_t choose();
  void adjust(float* logits);
  void look_again(const int64_t* token_ids, int64_t count);
  int64_t first_largest() const;

  float threshold();
  float logit_below(double scaled) const;
  void keep(float bound);
  void expand_kept(float least);
  void keep_likeliest(float least);
  float nucleus(float least);
  float nucleus_threshold(double wanted);

  int64_t race(float threshold);
  void bound_times(float threshold);
  double time_of(int64_t chunk, float threshold) const;
  int64_t winner_of(int64_t chunk, float threshold) const;

  const Kernels& kernels_;
  Adjuster adjuster_;
  const float* logits_ = nullptr;
  int64_t vocab_ = 0;
  float largest_ = 0;
  Draw draw_{};
  std::vector<float> chunks_;     // each chunk's largest logit
  std::vector<float> ranks_;      // of chunks
  std::vector<char> changed_;     // chunks to look at again
  std::vector<int64_t> touched_;  // tokens whose logits were adjusted
  std::vector<float> masses_;     // of chunks: their powers in all
  std::vector<float> kept_logits_;
  int64_t num_kept_ = 0;
  std::vector<Kept> kept_;
  std::vector<double> weights_;  // sums of powers of tokens that are about as likely
  std::vector<float> numbers_;   // of chunks: random ones
  std::vector<float> earliest_;  // of chunks: a time that they do not finish before
};

}  // namespace quire
