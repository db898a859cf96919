// Low-rank adapters (LoRA): for some tokens of a step, y = W x + B (A x).
//
// The addition to a token depends on the token's own input alone (law 10).
#pragma once

#include <vector>

#include "kernels.h"
#include "scratch.h"
#include "threads/thread_pool.h"

namespace quire {

enum Site : size_t { kQkv, kOutput, kGateUp, kDown, kNumSites };

struct Adapter {
  std::vector<LowRank> parts;  // kNumSites of each layer
};

struct AdapterRun {
  const Adapter* adapter;
  int64_t begin, end;  // tokens
};

// The adapters of one step.
class Adapters {
 public:
  // `runs` ascend; the other tokens have no adapter.
  void begin(const std::vector<AdapterRun>& runs, int64_t num_tokens);

  // From here on the tokens are the ones in `wanted` only.
  void keep(const int64_t* wanted, int64_t num_wanted);

  bool empty() const { return pieces_.empty(); }

  // Computes A x at `site` of layer `layer`, and has `call` add B (A x). `x`: the linear's input,
  // as A reads it.
  void add(const Kernels& kernels, ThreadPool::Lane& lane, size_t layer, Site site,
           const Activations& x, LinearCall& call);

 private:
  std::vector<AdapterRun> pieces_;      // the runs, cut
  std::vector<const LowRank*> of_row_;  // [T]
  Scratch memory_;
  void* z_ = nullptr;  // [T, z_stride_]: A x
  int64_t z_stride_ = 0;
};

}  // namespace quire
