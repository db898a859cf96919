// Python bindings of the decoder. They check their arguments, except the values of index arrays
// (token ids, positions, slots, block ids).
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>

#include "bindings/bound_experts.h"
#include "cpu/instruction_sets.h"
#include "decoder/decoder.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace quire {
namespace {

void check_linear(const PackedLinear& linear, int64_t n, int64_t k, const char* name) {
  if (linear.get().n != n || linear.get().k != k)
    throw std::invalid_argument(std::string(name) + " is not [" + std::to_string(n) + ", " +
                                std::to_string(k) + "]");
}

std::vector<const Linear*> linears_of(const Layer& layer) {
  if (!layer.experts) return {layer.qkv, layer.output, layer.gate_up, layer.down};
  return {layer.qkv, layer.output, layer.experts->gate_up[0], layer.experts->down[0]};
}

// A layer's weights; Python keeps the packed linears alive (`keep_alive` in `bind_decoder`).
struct LayerWeights {
  using Values = std::optional<Array>;

  Values attention_in;
  const PackedLinear& qkv;
  Values query_norm, key_norm;
  const PackedLinear& output;
  Values attention_out, mlp_in;
  const PackedLinear *gate_up, *down;
  const BoundExperts* experts;
  Values mlp_out, sinks;
  int window;
  Values cos, sin;

  std::array<const Linear*, kNumSites> linears() const {
    return {&qkv.get(), &output.get(), gate_up ? &gate_up->get() : nullptr,
            down ? &down->get() : nullptr};
  }

  Layer checked(const Shape& shape) const {
    require(experts ? !gate_up && !down : gate_up && down,
            "a layer needs either gate_up and down, or experts");
    require(window >= 0, "a window of less than 0 positions");
    require(cos.has_value() == sin.has_value(), "one rotation table without the other");
    check_linear(qkv, shape.qkv_size(), shape.hidden, "qkv");
    check_linear(output, shape.hidden, shape.attention_size(), "output");
    if (experts) {
      require(experts->get().hidden() == shape.hidden, "experts have another hidden size");
      require(mlp_in && !mlp_out && shape.residual_scale == 1.0f && !shape.uses_gelu,
              "experts have a norm of their inputs, silu, and neither norm nor factor of outputs");
    } else {
      check_linear(*gate_up, round_up(shape.intermediate, 16) * 2, shape.hidden, "gate_up");
      check_linear(*down, shape.hidden, shape.intermediate, "down");
    }
    const int rotated = cos ? 2 * static_cast<int>(table(*cos, shape)) : 0;
    require(!sin || 2 * static_cast<int>(table(*sin, shape)) == rotated,
            "the rotation tables differ in width");
    const auto norm = [](const Values& weight, int width, const char* name) {
      return weight ? floats(*weight, static_cast<size_t>(width), name) : nullptr;
    };
    const int hidden = shape.hidden;
    const int q_width = shape.norms_all_heads ? shape.attention_size() : shape.head_dim;
    const int k_width = shape.head_dim * (shape.norms_all_heads ? shape.num_kv_heads : 1);
    return {norm(attention_in, hidden, "attention_in"),
            &qkv.get(),
            norm(query_norm, q_width, "query_norm"),
            norm(key_norm, k_width, "key_norm"),
            &output.get(),
            norm(attention_out, hidden, "attention_out"),
            norm(mlp_in, hidden, "mlp_in"),
            gate_up ? &gate_up->get() : nullptr,
            down ? &down->get() : nullptr,
            experts ? &experts->get() : nullptr,
            norm(mlp_out, hidden, "mlp_out"),
            norm(sinks, shape.num_heads, "sinks"),
            window,
            rotated,
            cos ? data<float>(*cos, "cos") : nullptr,
            sin ? data<float>(*sin, "sin") : nullptr};
  }

  // Returns a rotation table's width.
  static size_t table(const Array& table, const Shape& shape) {
    check_rank(table, 2, "a rotation table");
    require(table.shape(1) > 0 && 2 * static_cast<int>(table.shape(1)) <= shape.head_dim &&
                table.stride(0) == static_cast<int64_t>(table.shape(1)),
            "a rotation table is not a contiguous [positions, at most head_dim / 2]");
    return table.shape(1);
  }
};

// An adapter; Python keeps its weights alive (`keep_alive` in `bind_decoder`).
class BoundAdapter {
 public:
  // A, B, and `LowRank::firsts`.
  using Part = std::optional<std::tuple<Array, const PackedLinear*, Array>>;

  BoundAdapter(const std::vector<const LayerWeights*>& layers,
               const std::vector<std::vector<Part>>& added)
      : num_layers_(layers.size()) {
    require(layers.size() == added.size(), "an adapter of other layers");
    for (size_t i = 0; i < num_layers_; ++i) {
      const auto bases = layers[i]->linears();
      require(added[i].size() == kNumSites, "an adapter has a part or none for each linear");
      for (size_t site = 0; site < kNumSites; ++site) {
        require(!added[i][site] || bases[site], "an adapter of experts");
        adapter_.parts.push_back(added[i][site] ? checked(*added[i][site], *bases[site])
                                                : LowRank{});
      }
    }
  }

  const Adapter& get() const { return adapter_; }
  size_t num_layers() const { return num_layers_; }

 private:
  static LowRank checked(const std::tuple<Array, const PackedLinear*, Array>& part,
                         const Linear& base) {
    const auto& [down, packed, firsts] = part;
    const Linear& up = packed->get();
    const WeightKind kind = base.kind == WeightKind::f32 ? WeightKind::f32 : WeightKind::bf16;
    check_rank(down, 2, "A");
    require(up.kind == kind && is_f32(down) == (kind == WeightKind::f32) &&
                is_bf16(down) == (kind == WeightKind::bf16),
            "an adapter's A and B are fp32 beside fp32 linears, else bf16");
    const auto rank = static_cast<int64_t>(down.shape(0)), k = static_cast<int64_t>(down.shape(1));
    require(k == base.k && down.stride(0) == k && rank % kRanks == 0 && up.k % kRanks == 0,
            "A is not a contiguous [ranks, inputs] of whole groups of ranks");
    check_linear(*packed, base.n, up.k, "B");
    check_rank(firsts, 1, "firsts");
    const int32_t* values = data<int32_t>(firsts, "firsts");
    require(static_cast<int64_t>(firsts.size()) == 2 * panels_of(up.n),
            "firsts is not of each 16 columns");
    for (size_t i = 0; i < firsts.size(); ++i)
      require(values[i] >= 0 && values[i] + up.k <= rank, "firsts are not ranks of A");
    return {down.data(), rank, k, &up, values};
  }

  size_t num_layers_;
  Adapter adapter_;
};

using Run = std::tuple<const BoundAdapter*, int64_t, int64_t>;

class BoundDecoder {
 public:
  BoundDecoder(const std::string& isa, ThreadPool& pool, const Shape& shape,
               const std::vector<const LayerWeights*>& layers, Array embedding, Array final_norm)
      : shape_(shape), num_layers_(layers.size()), embedding_(embedding), final_norm_(final_norm) {
    check(shape);
    const Kernels& kernels = kernels_called(isa);
    require(shape.num_heads / shape.num_kv_heads <= kernels.attention_rows,
            "more query heads of a KV head than one piece of attention has");
    std::vector<Layer> checked;
    for (const LayerWeights* layer : layers) checked.push_back(layer->checked(shape));
    kind_ = checked.front().qkv->kind;
    for (const Layer& layer : checked)
      for (const Linear* linear : linears_of(layer))
        require((linear->kind == WeightKind::f32) == (kind_ == WeightKind::f32),
                "float32 linears beside linears of another kind");
    decoder_ = std::make_unique<Decoder>(kernels, pool, shape, std::move(checked), embedding.data(),
                                         float_type(embedding, "embedding"),
                                         floats(final_norm, shape.hidden, "final_norm"));
  }

  void forward(const std::vector<Run>& adapters, Array token_ids, Array positions,
               Array slot_mapping, Array block_tables, Array cu_query_lens, Array context_lens,
               Array wanted, Array kv, Array hidden) {
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
                      static_cast<int64_t>(wanted.size()),
                      runs_of(adapters, static_cast<int64_t>(token_ids.size()))};
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

 private:
  void check(const Shape& s) const {
    require(num_layers_ > 0 && s.num_kv_heads > 0 && s.num_heads % s.num_kv_heads == 0 &&
                s.head_dim > 0 && s.head_dim % 2 == 0 && s.head_dim <= kMostHeadDim,
            "a shape that is no decoder's, or heads of an odd size or of more than 256");
    require(s.hidden % 4 == 0 && s.attention_size() % 4 == 0,
            "hidden size and heads * head size must be multiples of 4");
    check_rank(embedding_, 2, "embedding");
    require(static_cast<int>(embedding_.shape(0)) == s.vocab &&
                static_cast<int>(embedding_.shape(1)) == s.hidden &&
                embedding_.stride(0) == s.hidden,
            "embedding is not a contiguous [vocab_size, hidden_size]");
    require(s.attention_scale > 0 && s.attention_cap >= 0,
            "an attention scale that is not positive, or a negative cap");
  }

  std::vector<AdapterRun> runs_of(const std::vector<Run>& runs, int64_t num_tokens) const {
    std::vector<AdapterRun> found;
    for (const auto& [adapter, begin, end] : runs) {
      require(adapter->num_layers() == num_layers_, "an adapter of other layers");
      require(begin >= 0 && begin < end && (found.empty() || begin == found.back().end),
              "runs of adapters that do not follow one another");
      found.push_back({&adapter->get(), begin, end});
    }
    require(found.empty() || found.back().end == num_tokens,
            "tokens without an adapter behind one with an adapter");
    return found;
  }

  Arena arena_of(const Array& kv) const {
    check_rank(kv, 6, "kv");
    require(kv.shape(1) == num_layers_, "kv is not of as many layers");
    const Dtype dtype = kind_ == WeightKind::f32 ? Dtype::f32 : Dtype::bf16;
    const KvLayer first = kv_layer_of(kv, dtype, shape_.num_kv_heads, shape_.head_dim);
    const int64_t layer_bytes = kv.stride(1) * static_cast<int64_t>(kv.itemsize());
    return {first, layer_bytes, static_cast<int>(kv.shape(3))};
  }

  const Shape shape_;
  const size_t num_layers_;
  WeightKind kind_{};
  Array embedding_, final_norm_;
  std::unique_ptr<Decoder> decoder_;
};

}  // namespace

void bind_decoder(nb::module_& m) {
  nb::class_<Shape>(m, "Shape")
      .def(nb::init<int, int, int, int, int, int, float, float, float, float, float, bool, bool>(),
           nb::kw_only(), "hidden"_a, "num_heads"_a, "num_kv_heads"_a, "head_dim"_a,
           "intermediate"_a, "vocab"_a, "eps"_a, "attention_scale"_a, "attention_cap"_a,
           "embedding_scale"_a, "residual_scale"_a, "norms_all_heads"_a, "uses_gelu"_a);
  using Values = LayerWeights::Values;
  nb::class_<LayerWeights>(m, "Layer")
      .def(nb::init<Values, const PackedLinear&, Values, Values, const PackedLinear&, Values,
                    Values, const PackedLinear*, const PackedLinear*, const BoundExperts*, Values,
                    Values, int, Values, Values>(),
           nb::kw_only(), "attention_in"_a.none(), "qkv"_a, "query_norm"_a.none(),
           "key_norm"_a.none(), "output"_a, "attention_out"_a.none(), "mlp_in"_a.none(),
           "gate_up"_a = nb::none(), "down"_a = nb::none(), "experts"_a = nb::none(),
           "mlp_out"_a.none(), "sinks"_a = nb::none(), "window"_a, "cos"_a.none(), "sin"_a.none(),
           nb::keep_alive<1, 3>(), nb::keep_alive<1, 6>(), nb::keep_alive<1, 9>(),
           nb::keep_alive<1, 10>(), nb::keep_alive<1, 11>());
  nb::class_<BoundAdapter>(m, "Adapter")
      .def(nb::init<const std::vector<const LayerWeights*>&,
                    const std::vector<std::vector<BoundAdapter::Part>>&>(),
           "layers"_a, "added"_a, nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>());
  nb::class_<BoundDecoder>(m, "Decoder",
                           "One call computes a step: all layers of a batch, below the head.")
      .def(nb::init<const std::string&, ThreadPool&, const Shape&,
                    const std::vector<const LayerWeights*>&, Array, Array>(),
           "isa"_a, "pool"_a, "shape"_a, "layers"_a, "embedding"_a, "final_norm"_a,
           nb::keep_alive<1, 3>(), nb::keep_alive<1, 5>())
      .def("forward", &BoundDecoder::forward, "adapters"_a, "token_ids"_a, "positions"_a,
           "slot_mapping"_a, "block_tables"_a, "cu_query_lens"_a, "context_lens"_a, "wanted"_a,
           "kv"_a, "hidden"_a, "Writes `hidden` [wanted, hidden_size] and the new tokens' KV.");
}

}  // namespace quire
