// The inputs of linears, in the form that their kernels read.
#pragma once

#include "kernels.h"
#include "linear/packed_linear.h"
#include "scratch.h"

namespace quire {

// Memory for the input rows of a linear. The next linear uses it again; it grows as needed.
class InputRows {
 public:
  // Makes room for m rows of up to `width` elements, before the lanes run.
  void prepare(int64_t m, int64_t width) {
    width_ = round_up(width, kMostGroup);
    data_ = memory_[0].get(m * spaced(width_, sizeof(float)) * sizeof(float));
    scales_ = static_cast<float*>(memory_[1].get(m * sizeof(float)));
    sums_ = static_cast<float*>(memory_[2].get(m * (width_ / kLeastGroup) * sizeof(float)));
  }

  // The rows as `next` reads them.
  Rows of(const Kernels& kernels, const Linear& next) const {
    const WeightKind kind = kernels.input_kind(next.kind);
    const int64_t stride = spaced(width_, static_cast<size_t>(input_bytes(kind)));
    return {kind, next.group, data_, stride, scales_, sums_, width_ / kLeastGroup};
  }

 private:
  int64_t width_ = 0;
  void* data_ = nullptr;     // [M, width_]
  float* scales_ = nullptr;  // [M]
  float* sums_ = nullptr;    // [M, width_ / kLeastGroup]
  Scratch memory_[3];
};

}  // namespace quire
