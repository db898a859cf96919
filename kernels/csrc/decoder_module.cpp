// Python bindings of the decoder. They check their arguments, except the values of index arrays
// (token ids, positions, slots, block ids).
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>

#include "bound_experts.h"
#include "cpu.h"
#include "decoder.h"

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
class LayerWeights {
 public:
  LayerWeights(Array input_norm, const PackedLinear& qkv, std::optional<Array> query_norm,
               std::optional<Array> key_norm, const PackedLinear& output, Array mlp_norm,
               const PackedLinear* gate_up, const PackedLinear* down, const BoundExperts* experts,
               int window)
      : input_norm(input_norm),
        query_norm(query_norm),
        key_norm(key_norm),
        mlp_norm(mlp_norm),
        qkv(qkv),
        output(output),
        gate_up(gate_up),
        down(down),
        experts(experts),
        window(window) {
    require(experts ? !gate_up && !down : gate_up && down,
            "a layer needs either gate_up and down, or experts");
    require(window >= 0, "a window of less than 0 positions");
  }

  Layer checked(const Shape& shape) const {
    check_linear(qkv, shape.qkv_size(), shape.hidden, "qkv");
    check_linear(output, shape.hidden, shape.attention_size(), "output");
    if (experts) {
      require(experts->get().hidden() == shape.hidden, "experts have another hidden size");
    } else {
      check_linear(*gate_up, round_up(shape.intermediate, 16) * 2, shape.hidden, "gate_up");
      check_linear(*down, shape.hidden, shape.intermediate, "down");
    }
    const auto heads = static_cast<size_t>(shape.head_dim);
    return {floats(input_norm, shape.hidden, "input_norm"),
            &qkv.get(),
            query_norm ? floats(*query_norm, heads, "query_norm") : nullptr,
            key_norm ? floats(*key_norm, heads, "key_norm") : nullptr,
            &output.get(),
            floats(mlp_norm, shape.hidden, "mlp_norm"),
            gate_up ? &gate_up->get() : nullptr,
            down ? &down->get() : nullptr,
            experts ? &experts->get() : nullptr,
            window};
  }

 private:
  Array input_norm;
  std::optional<Array> query_norm, key_norm;
  Array mlp_norm;
  const PackedLinear &qkv, &output;
  const PackedLinear *gate_up, *down;
  const BoundExperts* experts;
  int window;
};

class BoundDecoder {
 public:
  BoundDecoder(const std::string& isa, ThreadPool& pool, const Shape& shape,
               const std::vector<const LayerWeights*>& layers, Array embedding, Array final_norm,
               Array cos, Array sin)
      : shape_(shape),
        num_layers_(layers.size()),
        embedding_(embedding),
        final_norm_(final_norm),
        cos_(cos),
        sin_(sin) {
    check(shape);
    std::vector<Layer> checked;
    for (const LayerWeights* layer : layers) checked.push_back(layer->checked(shape));
    kind_ = checked.front().qkv->kind;
    for (const Layer& layer : checked)
      for (const Linear* linear : linears_of(layer))
        require((linear->kind == WeightKind::f32) == (kind_ == WeightKind::f32),
                "float32 linears beside linears of another kind");
    decoder_ = std::make_unique<Decoder>(kernels_called(isa), pool, shape, std::move(checked),
                                         embedding.data(), float_type(embedding, "embedding"),
                                         floats(final_norm, shape.hidden, "final_norm"),
                                         data<float>(cos, "cos"), data<float>(sin, "sin"));
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
    for (const Array* table : {&cos_, &sin_}) {
      check_rank(*table, 2, "a rotation table");
      require(
          static_cast<int>(table->shape(1)) == s.head_dim / 2 && table->stride(0) == s.head_dim / 2,
          "a rotation table is not a contiguous [positions, head_dim / 2]");
    }
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
  Array embedding_, final_norm_, cos_, sin_;
  std::unique_ptr<Decoder> decoder_;
};

}  // namespace

void bind_decoder(nb::module_& m) {
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
                    const PackedLinear&, Array, const PackedLinear*, const PackedLinear*,
                    const BoundExperts*, int>(),
           nb::kw_only(), "input_norm"_a, "qkv"_a, "query_norm"_a.none(), "key_norm"_a.none(),
           "output"_a, "mlp_norm"_a, "gate_up"_a = nb::none(), "down"_a = nb::none(),
           "experts"_a = nb::none(), "window"_a, nb::keep_alive<1, 3>(), nb::keep_alive<1, 6>(),
           nb::keep_alive<1, 8>(), nb::keep_alive<1, 9>(), nb::keep_alive<1, 10>());
  nb::class_<BoundDecoder>(m, "Decoder",
                           "One call computes a step: all layers of a batch, below the head.")
      .def(nb::init<const std::string&, ThreadPool&, const Shape&,
                    const std::vector<const LayerWeights*>&, Array, Array, Array, Array>(),
           "isa"_a, "pool"_a, "shape"_a, "layers"_a, "embedding"_a, "final_norm"_a, "cos"_a,
           "sin"_a, nb::keep_alive<1, 3>(), nb::keep_alive<1, 5>())
      .def("forward", &BoundDecoder::forward, "token_ids"_a, "positions"_a, "slot_mapping"_a,
           "block_tables"_a, "cu_query_lens"_a, "context_lens"_a, "wanted"_a, "kv"_a, "hidden"_a,
           "Writes `hidden` [wanted, hidden_size] and the new tokens' KV.");
}

}  // namespace quire
