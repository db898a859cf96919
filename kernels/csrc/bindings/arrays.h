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

inline bool is_int8(const Array& a) { return a.dtype() == nb::dtype<int8_t>(); }

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

// A layer's keys and values from `kv`, an arena (6 dimensions) or one layer of it (5), in the dtype
// of the queries or in int8. Its last dimensions are [2, block_size, kv heads, head].
inline KvLayer kv_layer_of(const Array& kv, Dtype dtype, int num_kv_heads, int head_dim) {
  const size_t rank = kv.ndim();
  const bool in_int8 = is_int8(kv);
  require(in_int8 || float_type(kv, "kv") == dtype,
          "the KV of float32 queries is float32 or int8, the KV of others bfloat16 or int8");
  const int64_t head_bytes = kv_head_bytes(in_int8, dtype, head_dim);
  const int64_t size = in_int8 ? 1 : static_cast<int64_t>(size_of(dtype));
  require(kv.shape(rank - 4) == 2 && static_cast<int>(kv.shape(rank - 2)) == num_kv_heads &&
              static_cast<int64_t>(kv.shape(rank - 1)) * size == head_bytes &&
              kv.stride(rank - 2) * size == head_bytes &&
              kv.stride(rank - 3) * size == head_bytes * num_kv_heads,
          "kv is not [..., 2, block_size, num_kv_heads, head_dim], with 4 bytes more for the scale "
          "of a head in int8");
  return {static_cast<char*>(kv.data()), in_int8, kv.stride(0) * size, kv.stride(rank - 4) * size};
}

}  // namespace quire
