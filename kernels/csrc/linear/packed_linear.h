// A linear whose packed weights are in memory of another owner (a mapped file).
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "bindings/arrays.h"
#include "kernels.h"

namespace quire {

inline int64_t round_up(int64_t n, int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

// A kind of weights by its name, with the group behind it ("int4-64"); "int8" has groups of 32.
struct NamedKind {
  WeightKind kind;
  int group = 0;
};
NamedKind kind_called(const std::string& name);

// The size of `PackedLinear`'s memory: the panels, then the scales of int8 and int4.
size_t packed_bytes(NamedKind kind, int64_t n, int64_t k);

class PackedLinear {
 public:
  // memory: uint8, packed_bytes long, 64-byte aligned. bias: fp32 [N], or none.
  // std::invalid_argument: they are not as described.
  PackedLinear(const std::string& kind, int64_t n, int64_t k, Array memory,
               std::optional<Array> bias);

  const Linear& get() const { return linear_; }

 private:
  Linear linear_{};
  Array memory_;
  std::vector<float> bias_;
};

}  // namespace quire
