// Python bindings of the head, the sampler and the scorer. They check their arguments, except the
// token ids of adjustments.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <optional>

#include "cpu/instruction_sets.h"
#include "linear/packed_linear.h"
#include "sampling/head.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace quire {
namespace {

// An adjustment together with the arrays into which it points.
class BoundAdjustment {
 public:
  BoundAdjustment(Array biased, Array biases, Array seen, Array counts, float repetition,
                  float frequency, float presence, std::optional<Array> allowed, Array banned)
      : arrays_{biased, biases, seen, counts, banned, allowed.value_or(Array())} {
    require(biased.size() == biases.size() && seen.size() == counts.size(),
            "not a bias for each biased token, or a count for each seen one");
    require(repetition > 0, "a repetition penalty that is not above 0");
    adjustment = {ids(biased, "biased"),
                  floats(biases, biases.size(), "biases"),
                  static_cast<int64_t>(biased.size()),
                  ids(seen, "seen"),
                  floats(counts, counts.size(), "counts"),
                  static_cast<int64_t>(seen.size()),
                  repetition,
                  frequency,
                  presence,
                  allowed ? ids(*allowed, "allowed") : nullptr,
                  allowed ? static_cast<int64_t>(allowed->size()) : 0,
                  ids(banned, "banned"),
                  static_cast<int64_t>(banned.size()),
                  nullptr};
    require(!allowed || allowed->size() > 0, "no token is allowed");
  }

  Adjustment adjustment;

 private:
  static const int64_t* ids(const Array& a, const char* name) {
    check_rank(a, 1, name);
    return data<int64_t>(a, name);
  }

  std::array<Array, 6> arrays_;
};

// D draws: arrays [D] of parameters, as `kvops.draws` describes them, and for each draw its
// adjustment and the mask of its grammar.
class BoundDraws {
 public:
  using Adjustments = std::vector<std::optional<BoundAdjustment>>;
  using Masks = std::vector<std::optional<Array>>;

  BoundDraws(Array temperature, Array least, Array top_k, Array top_p, Array seed,
             Array sequence_index, Array position, Adjustments adjustments, Masks masks)
      : columns_{temperature, least, top_k, top_p, seed, sequence_index, position},
        adjustments_(std::move(adjustments)),
        masks_(std::move(masks)) {
    for (const Array& column : columns_) {
      check_rank(column, 1, "a parameter of draws");
      require(column.size() == size(), "parameters of draws that are not all [D]");
    }
    require(masks_.size() == size(), "not a mask, or none, for each draw");
  }

  size_t size() const { return adjustments_.size(); }

  // The draws; none for a draw of the likeliest token.
  std::vector<std::optional<Draw>> checked(int64_t vocab) const {
    const auto *heat = data<float>(columns_[0], "temperature"),
               *least = data<float>(columns_[1], "least");
    const auto* top_k = data<int32_t>(columns_[2], "top_k");
    const auto* top_p = data<double>(columns_[3], "top_p");
    const auto *seed = data<int64_t>(columns_[4], "seed"),
               *index = data<int64_t>(columns_[5], "sequence_index"),
               *position = data<int64_t>(columns_[6], "position");
    std::vector<std::optional<Draw>> draws(size());
    for (size_t i = 0; i < size(); ++i) {
      require(heat[i] >= 0, "a draw at a temperature that is not 0 or more");
      if (heat[i] == 0 && !adjustments_[i] && !masks_[i]) continue;
      draws[i] = Draw{heat[i],
                      least[i],
                      top_k[i],
                      top_p[i],
                      {static_cast<uint64_t>(seed[i]), static_cast<uint64_t>(index[i]),
                       static_cast<uint64_t>(position[i])},
                      {}};
      if (adjustments_[i]) draws[i]->adjustment = adjustments_[i]->adjustment;
      if (masks_[i]) add_mask(*draws[i], *masks_[i], vocab);
    }
    return draws;
  }

 private:
  static void add_mask(Draw& draw, const Array& mask, int64_t vocab) {
    check_rank(mask, 1, "mask");
    require(32 * static_cast<int64_t>(mask.size()) >= vocab,
            "a mask that is shorter than the vocabulary");
    if (!draw.adjustment) draw.adjustment.emplace();
    draw.adjustment->mask = data<int32_t>(mask, "mask");
  }

  std::array<Array, 7> columns_;
  Adjustments adjustments_;
  Masks masks_;
};

// Draws tokens [M] int64 from logits [M, vocab] fp32; -1: the row's logits are not finite. The
// logits change during the call and are restored.
void sample(const std::string& isa, Array logits, const BoundDraws& draws, Array tokens) {
  check_rank(logits, 2, "logits");
  require(logits.shape(0) == draws.size() && tokens.size() == draws.size() && logits.shape(1) > 0,
          "logits, draws and tokens are not of as many rows");
  const auto vocab = static_cast<int64_t>(logits.shape(1));
  const auto checked = draws.checked(vocab);
  auto* rows = data<float>(logits, "logits");
  auto* out = data<int64_t>(tokens, "tokens");
  Sampler sampler(kernels_called(isa));
  nb::gil_scoped_release free;
  for (size_t row = 0; row < checked.size(); ++row)
    out[row] = sampler.sample(rows + row * logits.stride(0), vocab, checked[row].value_or(Draw{}));
}

// token_ids: [M, 1 + k] int64, each row beginning with the token whose score is asked for;
// logprobs: [M, 1 + k] fp32; ranks: [M].
Scores checked_scores(const Array& token_ids, const Array& logprobs, const Array& ranks, size_t m,
                      int64_t vocab) {
  check_rank(token_ids, 2, "token_ids");
  check_rank(logprobs, 2, "logprobs");
  const size_t width = token_ids.shape(1);
  require(token_ids.shape(0) == m && ranks.size() == m && logprobs.shape(0) == m &&
              logprobs.shape(1) == width,
          "token_ids, logprobs and ranks are not of as many rows as the states or logits");
  require(width > 0 && static_cast<int64_t>(width) <= 1 + vocab,
          "token_ids have no column, or more than the vocabulary");
  require(m < 2 || (token_ids.stride(0) == static_cast<int64_t>(width) &&
                    logprobs.stride(0) == static_cast<int64_t>(width)),
          "token_ids or logprobs are not contiguous");
  return {data<int64_t>(token_ids, "token_ids"), data<float>(logprobs, "logprobs"),
          data<int64_t>(ranks, "ranks"), static_cast<int>(width) - 1};
}

void score(const std::string& isa, ThreadPool& pool, Array logits, Array token_ids, Array logprobs,
           Array ranks) {
  check_rank(logits, 2, "logits");
  const auto vocab = static_cast<int64_t>(logits.shape(1));
  require(vocab > 0 && (logits.shape(0) < 2 || logits.stride(0) == vocab),
          "logits are not a contiguous [M, vocab_size]");
  const Scores scores = checked_scores(token_ids, logprobs, ranks, logits.shape(0), vocab);
  const auto m = static_cast<int64_t>(logits.shape(0));
  const auto* rows = data<float>(logits, "logits");
  std::vector<ScoredRow> scored;
  for (int64_t row = 0; row < m; ++row) {
    require(scores.asked(row) >= 0 && scores.asked(row) < vocab, "a token outside the vocabulary");
    scored.push_back({rows + row * vocab, row});
  }
  Scorer scorer(kernels_called(isa));
  nb::gil_scoped_release free;
  scorer.begin(std::move(scored), vocab, scores);
  pool.run([&](ThreadPool::Lane& lane) { scorer.run(lane); });
}

class BoundHead {
 public:
  BoundHead(const std::string& isa, ThreadPool& pool, const PackedLinear& weights, float factor,
            float cap)
      : head_(kernels_called(isa), pool, weights.get(), factor, cap) {
    require(factor > 0 && cap >= 0, "a factor of logits that is not positive, or a negative cap");
    require(head_.hidden_size() % 4 == 0, "a hidden size that is not a multiple of 4");
  }

  void logits(Array hidden, Array out) {
    const auto m = rows_of(hidden);
    check_rank(out, 2, "out");
    require(static_cast<int64_t>(out.shape(0)) == m &&
                static_cast<int64_t>(out.shape(1)) == head_.vocab() &&
                (m < 2 || out.stride(0) == head_.vocab()),
            "out is not a contiguous [M, vocab_size]");
    const auto* x = data<float>(hidden, "hidden");
    auto* y = data<float>(out, "out");
    nb::gil_scoped_release free;
    head_.logits(x, m, y);
  }

  void draw(Array hidden, Array states, const BoundDraws& draws, Array tokens, Array scored,
            Array token_ids, Array logprobs, Array ranks) {
    const auto m = rows_of(hidden);
    const size_t num = draws.size();
    require(states.size() == num && tokens.size() == num,
            "states, draws and tokens are not all [D]");
    const auto checked = draws.checked(head_.vocab());
    const Draws asked{static_cast<int64_t>(num),
                      data<int64_t>(states, "states"),
                      checked.data(),
                      data<int64_t>(tokens, "tokens"),
                      data<int64_t>(scored, "scored"),
                      static_cast<int64_t>(scored.size()),
                      checked_scores(token_ids, logprobs, ranks, scored.size(), head_.vocab())};
    for (int64_t i = 0; i < asked.num; ++i)
      require(asked.states[i] >= 0 && asked.states[i] < m, "a draw after no state");
    for (int64_t slot = 0; slot < asked.num_scored; ++slot)
      require(asked.scored[slot] >= 0 && asked.scored[slot] < asked.num, "a score of no draw");
    const auto* x = data<float>(hidden, "hidden");
    nb::gil_scoped_release free;
    head_.draw(x, m, asked);
  }

 private:
  int64_t rows_of(const Array& hidden) const {
    check_rank(hidden, 2, "hidden");
    require(static_cast<int64_t>(hidden.shape(1)) == head_.hidden_size() && hidden.shape(0) > 0 &&
                hidden.stride(0) == head_.hidden_size(),
            "hidden is not a contiguous [M, hidden_size]");
    return static_cast<int64_t>(hidden.shape(0));
  }

  Head head_;
};

}  // namespace

void bind_head(nb::module_& m) {
  nb::class_<BoundAdjustment>(m, "Adjustment", "What a draw makes of its row's logits first.")
      .def(nb::init<Array, Array, Array, Array, float, float, float, std::optional<Array>, Array>(),
           nb::kw_only(), "biased"_a, "biases"_a, "seen"_a, "counts"_a, "repetition"_a,
           "frequency"_a, "presence"_a, "allowed"_a.none(), "banned"_a);
  nb::class_<BoundDraws>(m, "Draws", "The parameters of draws, an entry each.")
      .def(nb::init<Array, Array, Array, Array, Array, Array, Array, BoundDraws::Adjustments,
                    BoundDraws::Masks>(),
           nb::kw_only(), "temperature"_a, "least"_a, "top_k"_a, "top_p"_a, "seed"_a,
           "sequence_index"_a, "position"_a, "adjustments"_a, "masks"_a);
  m.def("sample", &sample, "isa"_a, "logits"_a, "draws"_a, "tokens"_a,
        "Draws from logits that are there already, row by row; -1: logits that are not finite.");
  m.def("score", &score, "isa"_a, "pool"_a, "logits"_a, "token_ids"_a, "logprobs"_a, "ranks"_a,
        "Scores of logits that are there already. Of the first of each row of `token_ids` "
        "[M, 1 + k]: its logprob and rank (0: logits that are not finite); behind it come the k "
        "likeliest.");
  nb::class_<BoundHead>(m, "Head", "From final states to tokens, in one pass over the weights.")
      .def(nb::init<const std::string&, ThreadPool&, const PackedLinear&, float, float>(), "isa"_a,
           "pool"_a, "weights"_a, "factor"_a = 1.0f, "cap"_a = 0.0f, nb::keep_alive<1, 3>(),
           nb::keep_alive<1, 4>())
      .def("logits", &BoundHead::logits, "hidden"_a, "out"_a)
      .def(
          "draw", &BoundHead::draw, "hidden"_a, "states"_a, "draws"_a, "tokens"_a, "scored"_a,
          "token_ids"_a, "logprobs"_a, "ranks"_a,
          "Writes the tokens [D] that `draws` draws after the states `states` [D], -1: logits that "
          "are not finite; and the scores of the tokens that `scored` [S] names, as `score`.");
}

}  // namespace quire
