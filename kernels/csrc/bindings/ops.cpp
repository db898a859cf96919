// The single operations, for `kvops.Backend` and for the tests of the kernels.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <optional>

#include "attention/plan.h"
#include "bindings/arrays.h"
#include "bindings/bound_experts.h"
#include "cpu/instruction_sets.h"
#include "linear/input_rows.h"
#include "linear/split.h"
#include "scratch.h"
#include "threads/thread_pool.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace quire {
namespace {

Epilogue epilogue_called(const std::string& name) {
  if (name == "store") return Epilogue::store;
  if (name == "silu_mul") return Epilogue::silu_mul;
  if (name == "gelu_mul") return Epilogue::gelu_mul;
  if (name == "add") return Epilogue::add;
  throw std::invalid_argument("no epilogue '" + name + "'");
}

}  // namespace

class Ops {
 public:
  Ops(const std::string& isa, ThreadPool& pool) : kernels_(kernels_called(isa)), pool_(pool) {}

  // out [M, N] fp32 or bf16, or [M, N / 2] for "silu_mul" and "gelu_mul" (see Epilogue), from x [M,
  // K] of the weights' dtype (fp32 or bf16 for quantized weights).
  void linear(Array x, const PackedLinear& weights, Array out, const std::string& epilogue) {
    check_rank(x, 2, "x");
    check_rank(out, 2, "out");
    const Linear& w = weights.get();
    const auto m = static_cast<int64_t>(x.shape(0));
    require(static_cast<int64_t>(x.shape(1)) == w.k, "x is not [M, K]");
    const Dtype in = float_type(x, "x"), to = float_type(out, "out");
    const Epilogue last = epilogue_called(epilogue);
    const bool gated = is_gated(last);
    require(!gated || w.n % kPanel == 0, "a gated linear has panels that are not full");
    require(static_cast<int64_t>(out.shape(0)) == m &&
                static_cast<int64_t>(out.shape(1)) == (gated ? w.n / 2 : w.n),
            "out is not [M, N]");
    require(is_quantized(w.kind) || (in == Dtype::f32) == (w.kind == WeightKind::f32),
            "x is not of the weights' dtype");
    nb::gil_scoped_release free;
    LinearCall call{&w, {x.data(), x.stride(0)}, last, to, out.data(), out.stride(0)};
    InputRows inputs;
    const bool copied = is_quantized(w.kind) || w.k % input_multiple(w) != 0;
    if (copied) {
      inputs.prepare(m, w.k);
      call.x = inputs.of(kernels_, w).read();
    }
    pool_.run([&](ThreadPool::Lane& lane) {
      if (copied)
        lane.loop(m, 8, [&](int64_t begin, int64_t end) {
          kernels_.quantize(x.data(), in, x.stride(0), static_cast<int>(w.k),
                            inputs.of(kernels_, w), begin, end);
        });
      run_linear(kernels_, pool_, lane, call, m);
    });
  }

  void attention(Array q, Array kv_layer, Array block_tables, Array cu_query_lens,
                 Array context_lens, float scale, int window, Array out, float cap,
                 std::optional<Array> sinks) {
    check_rank(q, 3, "q");
    check_rank(out, 3, "out");
    check_rank(kv_layer, 5, "kv_layer");
    check_rank(block_tables, 2, "block_tables");
    AttentionCall call{};
    call.dtype = float_type(q, "q");
    require(float_type(out, "out") == call.dtype, "q and out differ in dtype");
    call.num_heads = static_cast<int>(q.shape(1));
    call.head_dim = static_cast<int>(q.shape(2));
    call.block_size = static_cast<int>(kv_layer.shape(2));
    call.num_kv_heads = static_cast<int>(kv_layer.shape(3));
    call.kv = kv_layer_of(kv_layer, call.dtype, call.num_kv_heads, call.head_dim);
    require(call.head_dim % 2 == 0 && call.head_dim <= kMostHeadDim,
            "heads of an odd size or of more than 256");
    require(call.num_heads / call.num_kv_heads <= kernels_.attention_rows,
            "more query heads of a KV head than one piece of attention has");
    require(q.stride(1) == call.head_dim && out.stride(1) == call.head_dim,
            "q's or out's heads are not contiguous");
    call.window = window;
    call.scale = scale;
    call.cap = cap;
    call.sinks = sinks ? floats(*sinks, call.num_heads, "sinks") : nullptr;
    call.q = q.data();
    call.q_stride = q.stride(0);
    call.block_tables = data<int32_t>(block_tables, "block_tables");
    call.table_stride = block_tables.stride(0);
    call.cu_query_lens = data<int32_t>(cu_query_lens, "cu_query_lens");
    call.context_lens = data<int32_t>(context_lens, "context_lens");
    call.out = out.data();
    call.out_stride = out.stride(0);
    const auto num_rows = static_cast<int64_t>(context_lens.size());
    nb::gil_scoped_release free;
    const size_t scratch_bytes = round_up(kernels_.attention_scratch(call), 64);
    Scratch scratch;
    auto* bytes = static_cast<char*>(scratch.get(scratch_bytes * pool_.num_lanes()));
    AttentionPlan plan;
    plan.make(kernels_, call, static_cast<int>(num_rows), pool_.num_lanes());
    pool_.run([&](ThreadPool::Lane& lane) {
      lane.loop(plan.num_tasks(), 1, [&](int64_t task, int64_t) {
        plan.attend(kernels_, call, task, bytes + scratch_bytes * lane.index);
      });
    });
  }

  // out = x [M, width] fp32 normed, as fp32 or bf16.
  void rms_norm(Array x, Array weight, float eps, Array out) {
    check_rank(x, 2, "x");
    check_rank(out, 2, "out");
    const Dtype to = float_type(out, "out");
    NormCall call{
        data<float>(x, "x"),
        x.stride(0),
        static_cast<int>(x.shape(1)),
        data<float>(weight, "weight"),
        eps,
        {to == Dtype::f32 ? WeightKind::f32 : WeightKind::bf16, 0, out.data(), out.stride(0)}};
    require(weight.size() == x.shape(1) && out.shape(0) == x.shape(0) && out.shape(1) == x.shape(1),
            "x, weight and out do not fit");
    nb::gil_scoped_release free;
    pool_.run([&](ThreadPool::Lane& lane) {
      lane.loop(static_cast<int64_t>(x.shape(0)), 16,
                [&](int64_t begin, int64_t end) { kernels_.rms_norm(call, begin, end); });
    });
  }

  // qkv fp32 [T, (H + 2 G) * D] -> q [T, H, D], keys and values in their slots.
  void qkv(Array qkv, std::optional<Array> query_norm, std::optional<Array> key_norm, float eps,
           Array cos, Array sin, Array positions, Array slot_mapping, Array q, Array kv_layer) {
    check_rank(qkv, 2, "qkv");
    check_rank(q, 3, "q");
    check_rank(kv_layer, 5, "kv_layer");
    QkvCall call{};
    call.dtype = float_type(q, "q");
    call.num_heads = static_cast<int>(q.shape(1));
    call.head_dim = static_cast<int>(q.shape(2));
    call.block_size = static_cast<int>(kv_layer.shape(2));
    call.num_kv_heads = static_cast<int>(kv_layer.shape(3));
    require(
        static_cast<int>(qkv.shape(1)) == (call.num_heads + 2 * call.num_kv_heads) * call.head_dim,
        "qkv is not [T, (H + 2 G) * D]");
    call.kv = kv_layer_of(kv_layer, call.dtype, call.num_kv_heads, call.head_dim);
    call.qkv = data<float>(qkv, "qkv");
    call.qkv_stride = qkv.stride(0);
    call.query_norm = query_norm ? data<float>(*query_norm, "query_norm") : nullptr;
    call.key_norm = key_norm ? data<float>(*key_norm, "key_norm") : nullptr;
    call.eps = eps;
    check_rank(cos, 2, "cos");
    call.rotated = 2 * static_cast<int>(cos.shape(1));
    call.cos = data<float>(cos, "cos");
    call.sin = data<float>(sin, "sin");
    call.positions = data<int64_t>(positions, "positions");
    call.slot_mapping = data<int64_t>(slot_mapping, "slot_mapping");
    call.q = q.data();
    call.q_stride = q.stride(0);
    nb::gil_scoped_release free;
    pool_.run([&](ThreadPool::Lane& lane) {
      lane.loop(static_cast<int64_t>(qkv.shape(0)), 4, [&](int64_t begin, int64_t end) {
        kernels_.qkv(call, begin, end, 0, call.num_heads + 2 * call.num_kv_heads);
      });
    });
  }

  // out [M, hidden] fp32 += the experts' output for the norm of x [M, hidden] fp32.
  void experts(Array x, Array weight, float eps, const BoundExperts& bound, Array out) {
    check_rank(x, 2, "x");
    check_rank(out, 2, "out");
    const Experts& experts = bound.get();
    const auto m = static_cast<int64_t>(x.shape(0)), width = static_cast<int64_t>(x.shape(1));
    require(width == experts.hidden() && out.shape(0) == x.shape(0) && out.shape(1) == x.shape(1),
            "x, out and experts do not fit");
    const NormCall norm{data<float>(x, "x"),
                        x.stride(0),
                        static_cast<int>(width),
                        floats(weight, width, "weight"),
                        eps,
                        {}};
    auto* to = data<float>(out, "out");
    nb::gil_scoped_release free;
    ExpertStep step(kernels_, pool_);
    step.prepare(experts, m);
    pool_.run([&](ThreadPool::Lane& lane) { step.add(lane, experts, norm, m, to, out.stride(0)); });
  }

 private:
  const Kernels& kernels_;
  ThreadPool& pool_;
};

void bind_ops(nb::module_& m) {
  m.def(
      "packed_bytes",
      [](const std::string& kind, int64_t n, int64_t k) {
        return packed_bytes(kind_called(kind), n, k);
      },
      "kind"_a, "n"_a, "k"_a);
  nb::class_<PackedLinear>(m, "PackedLinear")
      .def(nb::init<const std::string&, int64_t, int64_t, Array, std::optional<Array>>(), "kind"_a,
           "n"_a, "k"_a, "memory"_a, "bias"_a = nb::none());
  nb::class_<BoundExperts>(m, "Experts")
      .def(nb::init<const PackedLinear&, const std::vector<const PackedLinear*>&,
                    const std::vector<const PackedLinear*>&, int, bool, float, float>(),
           nb::kw_only(), "router"_a, "gate_up"_a, "down"_a, "top_k"_a, "normalizes"_a,
           "alpha"_a = 0.0f, "limit"_a = 0.0f, nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(),
           nb::keep_alive<1, 4>());
  nb::class_<Ops>(m, "Ops")
      .def(nb::init<const std::string&, ThreadPool&>(), "isa"_a, "pool"_a, nb::keep_alive<1, 3>())
      .def("linear", &Ops::linear, "x"_a, "weights"_a, "out"_a, "epilogue"_a = "store")
      .def("attention", &Ops::attention, "q"_a, "kv_layer"_a, "block_tables"_a, "cu_query_lens"_a,
           "context_lens"_a, "scale"_a, "window"_a, "out"_a, "cap"_a = 0.0f, "sinks"_a = nb::none())
      .def("experts", &Ops::experts, "x"_a, "weight"_a, "eps"_a, "experts"_a, "out"_a)
      .def("rms_norm", &Ops::rms_norm, "x"_a, "weight"_a, "eps"_a, "out"_a)
      .def("qkv", &Ops::qkv, "qkv"_a, "query_norm"_a.none(), "key_norm"_a.none(), "eps"_a, "cos"_a,
           "sin"_a, "positions"_a, "slot_mapping"_a, "q"_a, "kv_layer"_a);
}

}  // namespace quire
