// Arrays from Python (torch tensors and numpy arrays, by DLPack), and checks of their shapes and
// dtypes.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <stdexcept>
#include <string>

#include "kernels.h"

namespace quire {

namespace nb = nanobind;

// Any array in CPU memory; `check_rank` requires a contiguous last dimension.
using Array = nb::ndarray<nb::device::cpu>;

inline bool is_f32(const Array& a) { return a.dtype() == nb::dtype<float>(); }
inline bool is_bf16(const Array& a) {
  return a.dtype().code == static_cast<uint8_t>(nb::dlpack::dtype_code::Bfloat) &&
         a.dtype().bits == 16;
}

inline void require(bool condition, const char* what) {
  if (!condition) throw std::invalid_argument(what);
}

inline Dtype float_type(const Array& a, const char* name) {
  if (is_f32(a)) return Dtype::f32;
  if (is_bf16(a)) return Dtype::bf16;
  throw std::invalid_argument(std::string(name) + " is neither float32 nor bfloat16");
}

inline void check_rank(const Array& a, size_t rank, const char* name) {
  if (a.ndim() != rank)
    throw std::invalid_argument(std::string(name) + " has " + std::to_string(a.ndim()) +
                                " dimensions instead of " + std::to_string(rank));
  if (rank > 0 && a.shape(rank - 1) > 1 && a.stride(rank - 1) != 1)
    throw std::invalid_argument(std::string(name) + " is not contiguous in its last dimension");
}

template <typename T>
inline T* data(const Array& a, const char* name) {
  if (a.dtype() != nb::dtype<T>())
    throw std::invalid_argument(std::string(name) + " has the wrong dtype");
  return static_cast<T*>(a.data());
}

// Returns the values of an fp32 array [size].
inline const float* floats(const Array& a, size_t size, const char* name) {
  check_rank(a, 1, name);
  if (a.size() != size)
    throw std::invalid_argument(std::string(name) + " has " + std::to_string(a.size()) +
                                " values instead of " + std::to_string(size));
  return data<float>(a, name);
}

}  // namespace quire
