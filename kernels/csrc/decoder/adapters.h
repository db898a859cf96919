// Low-rank adapters (LoRA): for some tokens of a step, y = W x + B (A x).
//
// Tokens of one adapter follow one another (a run), and those without one come first. What a token
// gets depends on its own input alone: both linears have one order of accumulation (law 10).
//
// See ADR 172.
#pragma once

#include <array>
#include <vector>

#include "kernels.h"
#include "scratch.h"
#include "threads/thread_pool.h"

namespace quire {

enum Site : size_t { kQkv, kOutput, kGateUp, kDown, kNumSites };

// The addition to one linear; null: none. `up` is fp32 and has the scale in it.
struct LowRank {
  const Linear* down;  // A [rank, K], fp32 beside fp32 linears, else bf16
  const Linear* up;    // B [N, rank]
};

struct Adapter {
  std::vector<std::array<LowRank, kNumSites>> layers;
};

struct AdapterRun {
  const Adapter* adapter;
  int64_t begin, end;  // tokens
};

// The adapters of one step.
class Adapters {
 public:
  // `runs` ascend and end with the last token; `width`: the most outputs of a linear.
  void begin(std::vector<AdapterRun> runs, int64_t num_tokens, int64_t width);

  // From here on the tokens are those of `wanted` only.
  void keep(const int64_t* wanted, int64_t num_wanted);

  bool empty() const { return runs_.empty(); }

  // Computes the additions to the linear at `site` of layer `layer`, and has `call` add them. `x`:
  // the linear's input, as A reads it.
  void add(const Kernels& kernels, ThreadPool::Lane& lane, size_t layer, Site site,
           const Activations& x, LinearCall& call);

 private:
  // Calls body(run, panel) for all panels of the runs' linears, several lanes at a time.
  template <typename Body>
  void each_panel(ThreadPool::Lane& lane, size_t layer, Site site, bool up, const Body& body);

  std::vector<AdapterRun> runs_;
  Scratch ranks_, added_;
  float* z_ = nullptr;     // [T, z_stride_]: A x
  float* sums_ = nullptr;  // [T, stride_]: B (A x)
  int64_t z_stride_ = 0, stride_ = 0;
};

}  // namespace quire
