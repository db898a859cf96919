// The decoder as Python sees it. Arguments are checked here; values of index arrays (token ids,
// positions, slots, block ids) are the caller's promise.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <memory>
#include <optional>

#include "cpu.h"
#include "decoder.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace quire {
namespace {

const float* floats(const Array& a, size_t size, const char* name) {
  check_rank(a, 1, name);
  if (a.size() != size)
    throw std::invalid_argument(std::string(name) + " has " + std::to_string(a.size()) +
                                " values instead of " + std::to_string(size));
  return data<float>(a, name);
}

void check_linear(const PackedLinear& linear, int64_t n, int64_t k, const char* name) {
  if (linear.get().n != n || linear.get().k != k)
    throw std::invalid_argument(std::string(name) + " is not [" + std::to_string(n) + ", " +
                                std::to_string(k) + "]");
}

// An adjustment with the arrays that it points into.
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
                  static_cast<int64_t>(banned.size())};
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

using DrawTuple = std::tuple<float, float, int64_t, double, uint64_t, uint64_t, uint64_t,
                             std::optional<BoundAdjustment>>;

std::vector<Draw> checked_draws(const std::vector<DrawTuple>& draws) {
  std::vector<Draw> checked;
  for (const auto& [temperature, min_p, top_k, top_p, seed, index, position, bound] : draws) {
    require(temperature >= 0, "a draw at a temperature that is not 0 or more");
    Draw draw{temperature, min_p, top_k, top_p, seed, index, position, {}};
    if (bound) draw.adjustment = bound->adjustment;
    checked.push_back(draw);
  }
  return checked;
}

// tokens [M] int64, drawn from logits [M, vocab] fp32, which are adjusted in place; -1: not finite.
void sample(const std::string& isa, Array logits, const std::vector<DrawTuple>& draws,
            Array tokens) {
  check_rank(logits, 2, "logits");
  require(logits.shape(0) == draws.size() && tokens.size() == draws.size() && logits.shape(1) > 0,
          "logits, draws and tokens are not of as many rows");
  const std::vector<Draw> checked = checked_draws(draws);
  auto* rows = data<float>(logits, "logits");
  auto* out = data<int64_t>(tokens, "tokens");
  Sampler sampler(kernels_called(isa));
  nb::gil_scoped_release free;
  for (size_t row = 0; row < checked.size(); ++row)
    out[row] = sampler.sample(rows + row * logits.stride(0), static_cast<int64_t>(logits.shape(1)),
                              checked[row]);
}

// token_ids [M, 1 + k] int64, the first of each row asked for; logprobs as many, fp32; ranks [M].
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
  auto* ids = data<int64_t>(token_ids, "token_ids");
  for (size_t row = 0; row < m; ++row)
    require(ids[row * width] >= 0 && ids[row * width] < vocab, "a token outside the vocabulary");
  return {ids, data<float>(logprobs, "logprobs"), data<int64_t>(ranks, "ranks"),
          static_cast<int>(width) - 1};
}

void score(const std::string& isa, Array logits, Array token_ids, Array logprobs, Array ranks) {
  check_rank(logits, 2, "logits");
  const auto vocab = static_cast<int64_t>(logits.shape(1));
  require(vocab > 0 && (logits.shape(0) < 2 || logits.stride(0) == vocab),
          "logits are not a contiguous [M, vocab_size]");
  const Scores scores = checked_scores(token_ids, logprobs, ranks, logits.shape(0), vocab);
  const auto m = static_cast<int64_t>(logits.shape(0));
  const auto* rows = data<float>(logits, "logits");
  Scorer scorer(kernels_called(isa));
  nb::gil_scoped_release free;
  scorer.begin(rows, m, vocab, scores);
  for (int64_t part = 0; part < scorer.num_parts(); ++part) scorer.look(part);
  for (int64_t part = 0; part < scorer.num_parts(); ++part) scorer.add(part);
  for (int64_t row = 0; row < m; ++row) scorer.conclude(row);
}

// A layer's weights; what they point to is kept alive by Python (see `bind_decoder`).
class LayerWeights {
 public:
  LayerWeights(Array input_norm, const PackedLinear& qkv, std::optional<Array> query_norm,
               std::optional<Array> key_norm, const PackedLinear& output, Array mlp_norm,
               const PackedLinear& gate_up, const PackedLinear& down, int window)
      : input_norm(input_norm),
        query_norm(query_norm),
        key_norm(key_norm),
        mlp_norm(mlp_norm),
        qkv(qkv),
        output(output),
        gate_up(gate_up),
        down(down),
        window(window) {
    require(window >= 0, "a window of less than 0 positions");
  }

  Layer checked(const Shape& shape) const {
    check_linear(qkv, shape.qkv_size(), shape.hidden, "qkv");
    check_linear(output, shape.hidden, shape.attention_size(), "output");
    check_linear(gate_up, round_up(shape.intermediate, 16) * 2, shape.hidden, "gate_up");
    check_linear(down, shape.hidden, shape.intermediate, "down");
    const auto heads = static_cast<size_t>(shape.head_dim);
    return {floats(input_norm, shape.hidden, "input_norm"),
            &qkv.get(),
            query_norm ? floats(*query_norm, heads, "query_norm") : nullptr,
            key_norm ? floats(*key_norm, heads, "key_norm") : nullptr,
            &output.get(),
            floats(mlp_norm, shape.hidden, "mlp_norm"),
            &gate_up.get(),
            &down.get(),
            window};
  }

 private:
  Array input_norm;
  std::optional<Array> query_norm, key_norm;
  Array mlp_norm;
  const PackedLinear &qkv, &output, &gate_up, &down;
  int window;
};

class BoundDecoder {
 public:
  BoundDecoder(const std::string& isa, ThreadPool& pool, const Shape& shape,
               const std::vector<const LayerWeights*>& layers, Array embedding, Array final_norm,
               const PackedLinear& head, Array cos, Array sin)
      : shape_(shape),
        num_layers_(layers.size()),
        kind_(head.get().kind),
        embedding_(embedding),
        final_norm_(final_norm),
        cos_(cos),
        sin_(sin) {
    check(shape, head);
    std::vector<Layer> checked;
    for (const LayerWeights* layer : layers) checked.push_back(layer->checked(shape));
    for (const Layer& layer : checked)
      for (const Linear* linear : {layer.qkv, layer.output, layer.gate_up, layer.down})
        require(linear->kind == kind_, "linears of different kinds");
    decoder_ = std::make_unique<Decoder>(
        kernels_called(isa), pool, shape, std::move(checked), embedding.data(),
        float_type(embedding, "embedding"), floats(final_norm, shape.hidden, "final_norm"),
        &head.get(), data<float>(cos, "cos"), data<float>(sin, "sin"));
  }

  void forward(Array token_ids, Array positions, Array slot_mapping, Array block_tables,
               Array cu_query_lens, Array context_lens, Array wanted, Array kv, Array hidden) {
    const Arena arena = arena_of(kv);
    check_rank(block_tables, 2, "block_tables");
    check_rank(hidden, 2, "hidden");
    const Batch batch{static_cast<int64_t>(token_ids.size()),
                      static_cast<int64_t>(context_lens.size()),
                      data<int64_t>(token_ids, "token_ids"),
                      data<int64_t>(positions, "positions"),
                      data<int64_t>(slot_mapping, "slot_mapping"),
                      data<int32_t>(block_tables, "block_tables"),
                      block_tables.stride(0),
                      data<int32_t>(cu_query_lens, "cu_query_lens"),
                      data<int32_t>(context_lens, "context_lens"),
                      data<int64_t>(wanted, "wanted"),
                      static_cast<int64_t>(wanted.size())};
    require(batch.num_tokens > 0 && positions.size() == token_ids.size() &&
                slot_mapping.size() == token_ids.size(),
            "token_ids, positions and slot_mapping are not all [T]");
    require(block_tables.shape(0) == context_lens.size() &&
                cu_query_lens.size() == context_lens.size() + 1,
            "block_tables, cu_query_lens and context_lens are not of as many rows");
    require(hidden.shape(0) == wanted.size() && static_cast<int>(hidden.shape(1)) == shape_.hidden,
            "hidden is not [wanted, hidden_size]");
    auto* out = data<float>(hidden, "hidden");
    nb::gil_scoped_release free;
    decoder_->forward(batch, arena, out);
  }

  void logits(Array hidden, Array out) {
    const auto m = rows_of(hidden);
    check_rank(out, 2, "out");
    require(
        static_cast<int64_t>(out.shape(0)) == m && static_cast<int>(out.shape(1)) == shape_.vocab,
        "out is not [M, vocab_size]");
    const auto* x = data<float>(hidden, "hidden");
    auto* y = data<float>(out, "out");
    nb::gil_scoped_release free;
    decoder_->logits(x, m, y);
  }

  void sample(Array hidden, const std::vector<DrawTuple>& draws, Array tokens) {
    const auto m = rows_of(hidden);
    require(static_cast<int64_t>(draws.size()) == m && static_cast<int64_t>(tokens.size()) == m,
            "draws and tokens are not [M]");
    const auto* x = data<float>(hidden, "hidden");
    auto* out = data<int64_t>(tokens, "tokens");
    const std::vector<Draw> checked = checked_draws(draws);
    nb::gil_scoped_release free;
    decoder_->sample(x, m, checked.data(), out);
  }

  void best(Array hidden, Array values, Array indices) {
    const auto m = rows_of(hidden);
    require(static_cast<int64_t>(values.size()) == m && static_cast<int64_t>(indices.size()) == m,
            "values and indices are not [M]");
    const auto* x = data<float>(hidden, "hidden");
    auto* value = data<float>(values, "values");
    auto* index = data<int64_t>(indices, "indices");
    nb::gil_scoped_release free;
    std::vector<Best> found(m);
    decoder_->best(x, m, found.data());
    for (int64_t row = 0; row < m; ++row) {
      value[row] = found[row].value;
      index[row] = found[row].index;
    }
  }

  void score(Array hidden, Array token_ids, Array logprobs, Array ranks) {
    const auto m = rows_of(hidden);
    const Scores scores = checked_scores(token_ids, logprobs, ranks, m, shape_.vocab);
    const auto* x = data<float>(hidden, "hidden");
    nb::gil_scoped_release free;
    decoder_->score(x, m, scores);
  }

 private:
  void check(const Shape& s, const PackedLinear& head) const {
    require(num_layers_ > 0 && s.num_kv_heads > 0 && s.num_heads % s.num_kv_heads == 0 &&
                s.head_dim > 0 && s.head_dim % 2 == 0 && s.head_dim <= kMostHeadDim,
            "a shape that is no decoder's, or heads of an odd size or of more than 256");
    require(s.hidden % 4 == 0 && s.attention_size() % 4 == 0,
            "hidden size and heads * head size must be multiples of 4");
    check_linear(head, s.vocab, s.hidden, "head");
    check_rank(embedding_, 2, "embedding");
    require(static_cast<int>(embedding_.shape(0)) == s.vocab &&
                static_cast<int>(embedding_.shape(1)) == s.hidden &&
                embedding_.stride(0) == s.hidden,
            "embedding is not a contiguous [vocab_size, hidden_size]");
    for (const Array* table : {&cos_, &sin_}) {
      check_rank(*table, 2, "a rotation table");
      require(
          static_cast<int>(table->shape(1)) == s.head_dim / 2 && table->stride(0) == s.head_dim / 2,
          "a rotation table is not a contiguous [positions, head_dim / 2]");
    }
  }

  Arena arena_of(const Array& kv) const {
    check_rank(kv, 6, "kv");
    const Dtype dtype = float_type(kv, "kv");
    require((dtype == Dtype::f32) == (kind_ == WeightKind::f32),
            "the KV of bfloat16 and int8 weights is bfloat16, that of float32 weights float32");
    require(kv.shape(1) == num_layers_ && kv.shape(2) == 2 &&
                static_cast<int>(kv.shape(4)) == shape_.num_kv_heads &&
                static_cast<int>(kv.shape(5)) == shape_.head_dim &&
                kv.stride(4) == shape_.head_dim &&
                kv.stride(3) == shape_.head_dim * shape_.num_kv_heads,
            "kv is not [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]");
    return {kv.data(),    dtype,        kv.stride(0),
            kv.stride(1), kv.stride(2), static_cast<int>(kv.shape(3))};
  }

  int64_t rows_of(const Array& hidden) const {
    check_rank(hidden, 2, "hidden");
    require(static_cast<int>(hidden.shape(1)) == shape_.hidden && hidden.shape(0) > 0 &&
                hidden.stride(0) == shape_.hidden,
            "hidden is not a contiguous [M, hidden_size]");
    return static_cast<int64_t>(hidden.shape(0));
  }

  const Shape shape_;
  const size_t num_layers_;
  const WeightKind kind_;
  Array embedding_, final_norm_, cos_, sin_;
  std::unique_ptr<Decoder> decoder_;
};

}  // namespace

void bind_decoder(nb::module_& m) {
  nb::class_<BoundAdjustment>(m, "Adjustment", "What a draw makes of its row's logits first.")
      .def(nb::init<Array, Array, Array, Array, float, float, float, std::optional<Array>, Array>(),
           nb::kw_only(), "biased"_a, "biases"_a, "seen"_a, "counts"_a, "repetition"_a,
           "frequency"_a, "presence"_a, "allowed"_a.none(), "banned"_a);
  m.def("sample", &sample, "isa"_a, "logits"_a, "draws"_a, "tokens"_a,
        "Draws from logits that are there already.");
  m.def("score", &score, "isa"_a, "logits"_a, "token_ids"_a, "logprobs"_a, "ranks"_a,
        "Scores of logits that are there already.");
  nb::class_<Shape>(m, "Shape")
      .def(
          "__init__",
          [](Shape* self, int hidden, int num_heads, int num_kv_heads, int head_dim,
             int intermediate, int vocab, float eps) {
            new (self) Shape{hidden, num_heads, num_kv_heads, head_dim, intermediate, vocab, eps};
          },
          nb::kw_only(), "hidden"_a, "num_heads"_a, "num_kv_heads"_a, "head_dim"_a,
          "intermediate"_a, "vocab"_a, "eps"_a);
  nb::class_<LayerWeights>(m, "Layer")
      .def(nb::init<Array, const PackedLinear&, std::optional<Array>, std::optional<Array>,
                    const PackedLinear&, Array, const PackedLinear&, const PackedLinear&, int>(),
           nb::kw_only(), "input_norm"_a, "qkv"_a, "query_norm"_a.none(), "key_norm"_a.none(),
           "output"_a, "mlp_norm"_a, "gate_up"_a, "down"_a, "window"_a, nb::keep_alive<1, 3>(),
           nb::keep_alive<1, 6>(), nb::keep_alive<1, 8>(), nb::keep_alive<1, 9>());
  nb::class_<BoundDecoder>(m, "Decoder", "One call computes a step: all layers of a batch.")
      .def(nb::init<const std::string&, ThreadPool&, const Shape&,
                    const std::vector<const LayerWeights*>&, Array, Array, const PackedLinear&,
                    Array, Array>(),
           "isa"_a, "pool"_a, "shape"_a, "layers"_a, "embedding"_a, "final_norm"_a, "head"_a,
           "cos"_a, "sin"_a, nb::keep_alive<1, 3>(), nb::keep_alive<1, 5>(), nb::keep_alive<1, 8>())
      .def("forward", &BoundDecoder::forward, "token_ids"_a, "positions"_a, "slot_mapping"_a,
           "block_tables"_a, "cu_query_lens"_a, "context_lens"_a, "wanted"_a, "kv"_a, "hidden"_a,
           "Writes `hidden` [wanted, hidden_size] and the new tokens' KV.")
      .def("logits", &BoundDecoder::logits, "hidden"_a, "out"_a)
      .def("sample", &BoundDecoder::sample, "hidden"_a, "draws"_a, "tokens"_a,
           "Draws of (temperature, min_p, top_k, top_p, seed, sequence index, position, "
           "adjustment); "
           "-1: logits that are not finite.")
      .def("best", &BoundDecoder::best, "hidden"_a, "values"_a, "indices"_a)
      .def("score", &BoundDecoder::score, "hidden"_a, "token_ids"_a, "logprobs"_a, "ranks"_a,
           "Of the first of each row of `token_ids` [M, 1 + k]: its logprob and rank (0: logits "
           "that "
           "are not finite); behind it come the k likeliest.");
}

}  // namespace quire
