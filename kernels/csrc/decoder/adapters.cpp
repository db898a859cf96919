#include "decoder/adapters.h"

#include <algorithm>

namespace quire {
namespace {

constexpr int64_t kTokensAtOnce = 32;

}  // namespace

void Adapters::begin(const std::vector<AdapterRun>& runs, int64_t num_tokens) {
  pieces_.clear();
  if (runs.empty()) return;
  of_row_.assign(num_tokens, nullptr);
  int64_t rank = 0;
  for (const AdapterRun& run : runs) {
    const std::vector<LowRank>& parts = run.adapter->parts;
    for (const LowRank& part : parts) rank = std::max(rank, part.rank);
    std::fill(of_row_.begin() + run.begin, of_row_.begin() + run.end, parts.data());
    for (int64_t begin = run.begin; begin < run.end; begin += kTokensAtOnce)
      pieces_.push_back({run.adapter, begin, std::min(begin + kTokensAtOnce, run.end)});
  }
  z_stride_ = spaced(rank, sizeof(float));
  z_ = memory_.get(num_tokens * z_stride_ * sizeof(float));
}

void Adapters::keep(const int64_t* wanted, int64_t num_wanted) {
  if (empty()) return;
  const int64_t* end = wanted + num_wanted;
  for (AdapterRun& piece : pieces_) {
    piece.begin = std::lower_bound(wanted, end, piece.begin) - wanted;
    piece.end = std::lower_bound(wanted, end, piece.end) - wanted;
  }
  for (int64_t i = 0; i < num_wanted; ++i) of_row_[i] = of_row_[wanted[i]];
}

void Adapters::add(const Kernels& kernels, ThreadPool::Lane& lane, size_t layer, Site site,
                   const Activations& x, LinearCall& call) {
  const size_t index = layer * kNumSites + site;
  int64_t most = 0;  // of all tokens of the step: a lane that comes late may read this in `keep`
  for (const AdapterRun& piece : pieces_)
    most = std::max(most, piece.adapter->parts[index].rank / kRanks);
  if (most == 0) return;
  lane.loop(static_cast<int64_t>(pieces_.size()) * most, 1, [&](int64_t i, int64_t) {
    const AdapterRun& piece = pieces_[i / most];
    const LowRank& part = piece.adapter->parts[index];
    const int64_t rank = i % most * kRanks;
    if (rank < part.rank) kernels.shrink(part, x, rank, z_, z_stride_, piece.begin, piece.end);
  });
  call.added = {of_row_.data(), static_cast<int64_t>(index), z_, z_stride_};
}

}  // namespace quire
