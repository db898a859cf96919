#include "linear/packed_linear.h"

#include <algorithm>

namespace quire {
namespace {

size_t panel_bytes(NamedKind named, int64_t n, int64_t k) {
  return static_cast<size_t>(panels_of(n) * panel_steps(named.kind, k, named.group)) * 128;
}

}  // namespace

NamedKind kind_called(const std::string& name) {
  if (name == "float32") return {WeightKind::f32};
  if (name == "bfloat16") return {WeightKind::bf16};
  if (name == "int8") return {WeightKind::int8, 32};
  if (name == "int8-16") return {WeightKind::int8, 16};
  for (int group = kLeastGroup; group <= kMostGroup; group *= 2)
    if (name == "int4-" + std::to_string(group)) return {WeightKind::int4, group};
  throw std::invalid_argument("no weights of kind '" + name + "'");
}

size_t packed_bytes(NamedKind named, int64_t n, int64_t k) {
  const size_t columns = static_cast<size_t>(round_up(n, kPanel));
  const size_t scales = is_quantized(named.kind) ? columns * sizeof(float) : 0;
  return panel_bytes(named, n, k) + scales;
}

PackedLinear::PackedLinear(const std::string& kind, int64_t n, int64_t k, Array memory,
                           std::optional<Array> bias)
    : memory_(memory) {
  require(n > 0 && k > 0, "a linear without inputs or outputs");
  const NamedKind named = kind_called(kind);
  linear_.kind = named.kind;
  linear_.group = named.group;
  linear_.n = n;
  linear_.k = k;
  check_rank(memory, 1, "memory");
  auto* bytes = data<uint8_t>(memory, "memory");
  require(memory.size() == packed_bytes(named, n, k), "memory is not packed_bytes long");
  require(reinterpret_cast<uintptr_t>(bytes) % 64 == 0, "memory is not 64-byte aligned");
  linear_.panels = bytes;
  if (is_quantized(named.kind)) {
    const uint8_t* scales = bytes + panel_bytes(named, n, k);
    linear_.scales = reinterpret_cast<const float*>(scales);
  }
  if (bias) {
    check_rank(*bias, 1, "bias");
    require(static_cast<int64_t>(bias->size()) == n, "bias is not [n]");
    const float* values = data<float>(*bias, "bias");
    bias_.assign(round_up(n, kPanel), 0.0f);
    std::copy(values, values + n, bias_.begin());
    linear_.bias = bias_.data();
  }
}

Outputs::Outputs(const std::vector<Array>& weights, int64_t turn) {
  require(!weights.empty() && turn >= 0, "no weights, or turns that cannot be");
  int64_t longest = 0;
  for (const Array& weight : weights) {
    check_rank(weight, 2, "weight");
    longest = std::max(longest, static_cast<int64_t>(weight.shape(0)));
  }
  dtype = float_type(weights[0], "weight");
  k = static_cast<int64_t>(weights[0].shape(1));
  for (int64_t first = 0; first < longest; first += turn ? turn : longest)
    for (const Array& weight : weights) {
      require(float_type(weight, "weight") == dtype && static_cast<int64_t>(weight.shape(1)) == k,
              "weights differ in dtype or K");
      const auto n = static_cast<int64_t>(weight.shape(0));
      const auto* data = static_cast<const char*>(weight.data());
      for (int64_t row = first; row < (turn ? first + turn : n); ++row)
        rows.push_back(row < n ? data + row * weight.stride(0) * size_of(dtype) : nullptr);
    }
}

}  // namespace quire
