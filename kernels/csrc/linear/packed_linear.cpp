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

}  // namespace quire
