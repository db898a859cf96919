#include "sampling/scorer.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <utility>

namespace quire {
namespace {

constexpr int64_t kPartChunks = 128;
constexpr int64_t kPart = kPartChunks * kLogitChunk;

struct Candidate {
  float logit;
  int64_t token_id;

  bool operator<(const Candidate& other) const {  // likelier; of equal logits the lower id
    return logit != other.logit ? logit > other.logit : token_id < other.token_id;
  }
};

int64_t ceil_div(int64_t size, int64_t step) { return (size + step - 1) / step; }

float logprob(float logit, float largest, double log_sum) {
  return static_cast<float>(static_cast<double>(logit - largest) - log_sum);
}

}  // namespace

void Scorer::begin(std::vector<ScoredRow> rows, int64_t vocab, const Scores& scores) {
  rows_ = std::move(rows);
  vocab_ = vocab;
  scores_ = scores;
  parts_per_row_ = ceil_div(vocab, kPart);
  chunks_per_row_ = ceil_div(vocab, kLogitChunk);
  chunks_.resize(num_rows() * chunks_per_row_);
  parts_.resize(num_parts());
}

void Scorer::run(ThreadPool::Lane& lane) {
  if (rows_.empty()) return;
  lane.loop(num_parts(), 1, [&](int64_t part, int64_t) { look(part); });
  lane.loop(num_parts(), 1, [&](int64_t part, int64_t) { add(part); });
  lane.loop(num_rows(), 1, [&](int64_t row, int64_t) { conclude(row); });
}

void Scorer::look(int64_t part) {
  const int64_t row = part / parts_per_row_, begin = part % parts_per_row_ * kPart;
  const int64_t size = std::min(kPart, vocab_ - begin);
  float* chunks = chunks_.data() + row * chunks_per_row_ + begin / kLogitChunk;
  kernels_.largest(rows_[row].logits + begin, size, chunks);
  float largest = -std::numeric_limits<float>::infinity();
  for (int64_t i = 0; i < ceil_div(size, kLogitChunk) && !std::isnan(largest); ++i)
    largest = chunks[i] > largest || std::isnan(chunks[i]) ? chunks[i] : largest;
  parts_[part].largest = largest;
}

// NaN if the row has one.
float Scorer::largest_of(int64_t row) const {
  const Part* parts = parts_.data() + row * parts_per_row_;
  float largest = parts[0].largest;
  for (int64_t i = 1; i < parts_per_row_ && !std::isnan(largest); ++i)
    largest =
        parts[i].largest > largest || std::isnan(parts[i].largest) ? parts[i].largest : largest;
  return largest;
}

void Scorer::add(int64_t part) {
  const int64_t row = part / parts_per_row_, begin = part % parts_per_row_ * kPart;
  const float* logits = rows_[row].logits;
  const float largest = largest_of(row);
  Part& found = parts_[part];
  found.sum = 0;
  found.num_larger = 0;
  if (!std::isfinite(largest)) return;  // the asked token may be -1
  const float asked = logits[scores_.asked(rows_[row].slot)];
  const int64_t end = std::min(begin + kPart, vocab_);
  double sums[4] = {};  // independent chains of additions
  float powers[kLogitChunk];
  for (int64_t at = begin; at < end; at += kLogitChunk) {
    const int64_t size = std::min<int64_t>(kLogitChunk, end - at);
    kernels_.exponentials(logits + at, size, largest, powers);
    for (int j = 0; j < kLogitChunk; ++j) sums[j % 4] += powers[j];
    int num_larger = 0;
    for (int64_t j = 0; j < size; ++j) num_larger += logits[at + j] > asked;
    found.num_larger += num_larger;
  }
  found.sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

void Scorer::conclude(int64_t row) {
  const auto [logits, slot] = rows_[row];
  const float largest = largest_of(row);
  if (!std::isfinite(largest)) {
    scores_.ranks[slot] = 0;
    return;
  }
  double sum = 0;
  int64_t rank = 1;
  for (int64_t i = row * parts_per_row_; i < (row + 1) * parts_per_row_; ++i) {
    sum += parts_[i].sum;
    rank += parts_[i].num_larger;
  }
  const double log_sum = std::log(sum);
  scores_.ranks[slot] = rank;
  scores_.logprobs[slot * (1 + scores_.num_top)] =
      logprob(logits[scores_.asked(slot)], largest, log_sum);
  if (scores_.num_top > 0) find_top(row, largest, log_sum);
}

// Finds the num_top likeliest tokens. Each chunk's largest logit is in the row, so the k-th largest
// of them is a lower bound of the row's k-th largest logit.
void Scorer::find_top(int64_t row, float largest, double log_sum) {
  const int64_t num_top = scores_.num_top;
  const float* chunks = chunks_.data() + row * chunks_per_row_;
  float bound = -std::numeric_limits<float>::infinity();
  if (num_top < chunks_per_row_) {
    std::vector<float> kept(chunks, chunks + chunks_per_row_);
    std::nth_element(kept.begin(), kept.begin() + (num_top - 1), kept.end(), std::greater<>());
    bound = kept[num_top - 1];
  }
  std::vector<Candidate> candidates;
  for (int64_t i = 0; i < chunks_per_row_; ++i) {
    if (chunks[i] < bound) continue;
    const int64_t end = std::min((i + 1) * kLogitChunk, vocab_);
    for (int64_t id = i * kLogitChunk; id < end; ++id) {
      const float logit = rows_[row].logits[id];
      if (logit >= bound) candidates.push_back({logit, id});
    }
  }
  std::partial_sort(candidates.begin(), candidates.begin() + num_top, candidates.end());
  const int64_t at = rows_[row].slot * (1 + num_top) + 1;
  for (int64_t i = 0; i < num_top; ++i) {
    scores_.token_ids[at + i] = candidates[i].token_id;
    scores_.logprobs[at + i] = logprob(candidates[i].logit, largest, log_sum);
  }
}

}  // namespace quire
