// The work on rows between linears and attention: norms, rotation, quantization.
//
// A row's sums run over lanes and vectors in an order that only its width decides. A value that is
// not finite stays so: a quantized row that held an infinity or a NaN has a scale that is not
// finite, and every integer is 0 there, so that all products with it are NaN.
#pragma once

#include "isa/simd.h"
#include "kernels.h"

namespace quire::QUIRE_ISA {

// 1 / sqrt(mean(x^2) + eps)
inline float rms_factor(const float* x, int width, float eps) {
  f32x16 sums[4] = {};
  for (int i = 0; i < width; i += 4 * kLanes)
    for (int j = 0; j < 4 && i + j * kLanes < width; ++j) {
      const f32x16 values = load_some(x + i + j * kLanes, width - i - j * kLanes);
      sums[j] = fma(values, values, sums[j]);
    }
  const float sum = reduce_add((sums[0] + sums[1]) + (sums[2] + sums[3]));
  return 1.0f / __builtin_sqrtf(sum / static_cast<float>(width) + eps);
}

// Rows as the functions below read them: `at(i)` is elements i to i + 15, behind the last one 0.
template <typename T>
struct PlainRow {
  const T* x;
  int width;

  f32x16 at(int i) const { return load_some(x + i, width - i); }
};

struct NormedRow {
  const float* x;
  const float* weight;
  float factor;
  int width;

  f32x16 at(int i) const {
    return load_some(x + i, width - i) * factor * load_some(weight + i, width - i);
  }
};

inline int64_t padded(int width, int multiple) {
  return (static_cast<int64_t>(width) + multiple - 1) / multiple * multiple;
}

template <typename T, typename Row>
inline void write_floats(const Row& row, int64_t width, T* out) {
  for (int64_t i = 0; i < width; i += kLanes)
    store_some(out + i, row.at(static_cast<int>(i)), width - i);
}

// The largest magnitude, compared as an integer, in which NaN is above infinity.
template <typename Row>
inline float largest_magnitude(const Row& row) {
  i32x16 largest = {};
  for (int i = 0; i < row.width; i += kLanes) {
    const i32x16 bits = (i32x16)row.at(i) & 0x7fffffff;
    largest = bits > largest ? bits : largest;
  }
  int32_t lanes[kLanes];
  store(lanes, largest);
  for (int i = 1; i < kLanes; ++i) lanes[0] = lanes[i] > lanes[0] ? lanes[i] : lanes[0];
  float value;
  std::memcpy(&value, lanes, sizeof value);
  return value;
}

// Writes whole numbers of a type's width, and returns their scale: largest magnitude / most. A row
// too small for a scale that has a reciprocal (below 1.2e-38 * most) is a row of zeros.
template <typename Integer, typename Row>
inline float write_integers(const Row& row, int64_t width, Integer* out) {
  typedef Integer Integers __attribute__((vector_size(kLanes * sizeof(Integer))));
  const float scale = largest_magnitude(row) / (sizeof(Integer) == 1 ? 127.0f : 32767.0f);
  const bool is_zero = scale < 1.17549435e-38f;
  const bool is_finite = scale < __builtin_inff();
  const float factor = is_zero || !is_finite ? 0.0f : 1.0f / scale;
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  for (int64_t i = 0; i < width; i += kLanes) {
    const f32x16 rounded = row.at(static_cast<int>(i)) * factor + magic;
    const auto values = __builtin_convertvector((u32x16)rounded - 0x4b400000u, Integers);
    if (width - i >= kLanes)
      store(out + i, values);
    else
      std::memcpy(out + i, &values, (width - i) * sizeof(Integer));
  }
  return is_zero ? 0.0f : scale;
}

// The sums of a row's integers over each group; padding is 0.
inline void write_sums(const int16_t* integers, int64_t width, int group, float* sums) {
  for (int64_t begin = 0; begin < width; begin += group) {
    int32_t sum = 0;
    for (int i = 0; i < group; ++i) sum += integers[begin + i];
    *sums++ = static_cast<float>(sum);
  }
}

template <typename Row>
inline void write_row(const Row& row, const Rows& out, int64_t index) {
  const int64_t at = index * out.stride;
  switch (out.kind) {
    case WeightKind::f32:
      return write_floats(row, row.width, static_cast<float*>(out.data) + at);
    case WeightKind::bf16:
      return write_floats(row, padded(row.width, 2), static_cast<bf16*>(out.data) + at);
    case WeightKind::int8:
    case WeightKind::int4: {
      const int64_t width = padded(row.width, run_values(out.kind, out.group));
      auto* integers = static_cast<int16_t*>(out.data) + at;
      out.scales[index] = write_integers(row, width, integers);
      if (out.kind == WeightKind::int4)
        write_sums(integers, width, out.group, out.sums + index * out.sums_stride);
    }
  }
}

inline void rms_norm(const NormCall& call, int64_t row_begin, int64_t row_end) {
  for (int64_t row = row_begin; row < row_end; ++row) {
    const float* x = call.x + row * call.stride;
    const float factor = rms_factor(x, call.width, call.eps);
    write_row(NormedRow{x, call.weight, factor, call.width}, call.out, row);
  }
}

inline void add_normed(const NormCall& call, float* sums, int64_t stride, int64_t row_begin,
                       int64_t row_end) {
  for (int64_t row = row_begin; row < row_end; ++row) {
    const float* x = call.x + row * call.stride;
    const NormedRow normed = {x, call.weight, rms_factor(x, call.width, call.eps), call.width};
    float* to = sums + row * stride;
    for (int i = 0; i < call.width; i += kLanes)
      store_some(to + i, load_some(to + i, call.width - i) + normed.at(i), call.width - i);
  }
}

inline void quantize(const void* x, Dtype dtype, int64_t stride, int width, const Rows& out,
                     int64_t row_begin, int64_t row_end) {
  for (int64_t row = row_begin; row < row_end; ++row) {
    if (dtype == Dtype::f32)
      write_row(PlainRow<float>{static_cast<const float*>(x) + row * stride, width}, out, row);
    else
      write_row(PlainRow<bf16>{static_cast<const bf16*>(x) + row * stride, width}, out, row);
  }
}

// ---- queries, keys and values ------------------------------------------------------------------

// A head's rotation: the pairs (x[i], x[i + half]) by the angles of a position (Su et al., 2021).
struct Rotation {
  const float* cos;  // [half]
  const float* sin;
  int half;  // 0: none
};

// A head's norm: x * factor * weight; no weight: x.
struct HeadNorm {
  const float* weight;
  float factor;
};

// A row whose halves are rotated; of either, `at(i)` is a vector of the row before that.
template <typename Row, typename T>
inline void write_rotated(const Row& first, const Row& second, const Rotation& rotation, T* out) {
  for (int i = 0; i < rotation.half; i += kLanes) {
    const int count = rotation.half - i;
    const f32x16 a = first.at(i), b = second.at(i);
    const f32x16 cos = load_some(rotation.cos + i, count);
    const f32x16 sin = load_some(rotation.sin + i, count);
    store_some(out + i, fma(-b, sin, a * cos), count);
    store_some(out + rotation.half + i, fma(a, sin, b * cos), count);
  }
}

template <typename T>
inline void write_head(const float* x, int head_dim, const HeadNorm& norm, const Rotation& rotation,
                       T* out) {
  const int half = rotation.half, rest = head_dim - 2 * half;
  const auto write = [&](auto part) {  // of the head, from a dimension on
    write_rotated(part(0, half), part(half, half), rotation, out);
    if (rest > 0) write_floats(part(2 * half, rest), rest, out + 2 * half);
  };
  if (norm.weight)
    write([&](int i, int width) { return NormedRow{x + i, norm.weight + i, norm.factor, width}; });
  else
    write([&](int i, int width) { return PlainRow<float>{x + i, width}; });
}

// Writes a head of fp32 values as signed bytes and a scale.
inline void write_int8_head(const float* x, int head_dim, char* out) {
  const float scale =
      write_integers(PlainRow<float>{x, head_dim}, head_dim, reinterpret_cast<int8_t*>(out));
  std::memcpy(out + head_dim, &scale, sizeof scale);
}

// Writes the heads [head_begin, head_end) of a token, which has queries, keys and values in order.
template <typename T>
inline void qkv_token(const QkvCall& call, int64_t token, int head_begin, int head_end) {
  const int width = call.head_dim, half = call.rotated / 2;
  const int num_queries = call.num_heads, num_turned = num_queries + call.num_kv_heads;
  const int64_t angles = call.positions[token] * half, slot = call.slot_mapping[token];
  const Rotation rotation = {call.cos + angles, call.sin + angles, half};
  const int64_t head_bytes = kv_head_bytes(call.kv.is_int8, call.dtype, width);
  if (slot == -1 && head_end > num_queries) head_end = num_queries;
  const int64_t place = slot / call.block_size * call.kv.block_bytes +
                        slot % call.block_size * call.num_kv_heads * head_bytes;
  float factor = 0.0f;
  for (int head = head_begin; head < head_end; ++head) {
    const float* x = call.qkv + token * call.qkv_stride + head * width;
    const bool is_query = head < num_queries, is_value = head >= num_turned;
    const int index = is_query ? head : is_value ? head - num_turned : head - num_queries;
    const float* weight = is_value ? nullptr : is_query ? call.query_norm : call.key_norm;
    if (weight && !call.norms_all_heads) factor = rms_factor(x, width, call.eps);
    if (weight && call.norms_all_heads && index == 0)
      factor = rms_factor(x, (is_query ? num_queries : call.num_kv_heads) * width, call.eps);
    if (weight && call.norms_all_heads) weight += index * width;
    const HeadNorm norm = {weight, factor};
    const Rotation turn = is_value ? Rotation{} : rotation;
    if (is_query) {
      T* q = static_cast<T*>(call.q) + token * call.q_stride;
      write_head(x, width, norm, turn, q + head * width);
      continue;
    }
    char* out = call.kv.data + place + index * head_bytes + (is_value ? call.kv.value_bytes : 0);
    if (call.kv.is_int8) {
      float values[kMostHeadDim];
      write_head(x, width, norm, turn, values);
      write_int8_head(values, width, out);
    } else {
      write_head(x, width, norm, turn, reinterpret_cast<T*>(out));
    }
  }
}

inline void qkv(const QkvCall& call, int64_t token_begin, int64_t token_end, int head_begin,
                int head_end) {
  for (int64_t token = token_begin; token < token_end; ++token) {
    if (call.dtype == Dtype::f32)
      qkv_token<float>(call, token, head_begin, head_end);
    else
      qkv_token<bf16>(call, token, head_begin, head_end);
  }
}

}  // namespace quire::QUIRE_ISA
