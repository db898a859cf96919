// One step of the online softmax (Milakov and Gimelshein, 2018) over a tile of scores.
#pragma once

#include "attention/product.h"
#include "isa/simd.h"
#include "kernels.h"

namespace quire::QUIRE_ISA {

// The softmax of a (query, head) pair over the positions so far. Before the first position the
// maximum is the lowest number, so that the first tile's correction is exactly 0 without a special
// case.
struct SoftmaxState {
  float max;           // of the scores before scaling
  float sums[kLanes];  // [i]: the sum of the probabilities of words i, i + 16, ... of each tile
};

// The results of a query's (query, head) pairs over the positions before `end`, a multiple of
// kTile: a row of sums and a state for each pair. end = 0: nothing is computed yet.
struct Begun {
  int end;
  const float* sums;
  const SoftmaxState* states;
};

inline constexpr float kLowest = -3.402823466e+38f;

// The scales of a tile's positions, if KV is in int8: a score is a product times the key's scale,
// and a value's weight is its probability times the value's scale.
struct TileScales {
  float keys[kTile];
  float values[kTile];
};

// Adds each word's elements to `sum`.
template <Dtype dtype>
inline f32x16 add_words(f32x16 sum, u32x16 words) {
  if constexpr (dtype == Dtype::f32) return sum + (f32x16)words;
  return dot_bf16(sum, words, 0x3f803f80u - u32x16{});  // a pair of ones
}

// Sets the scores that a row does not see to -inf, even if they are NaN.
inline void mask_scores(float* scores, Span visible, int end) {
  const i32x16 lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  for (int i = 0; i < computed(end); i += kLanes) {
    const i32x16 is_visible = (lanes + i >= visible.begin) & (lanes + i < visible.end);
    store_f32(scores + i, is_visible ? load_f32(scores + i) : splat(-__builtin_inff()));
  }
}

// The largest score; NaN is ignored.
inline float largest_score(const float* scores, int end) {
  f32x16 largest = splat(kLowest);
  for (int i = 0; i < computed(end); i += kLanes) largest = max(load_f32(scores + i), largest);
  return reduce_max(largest);
}

// How products become exponents of 2: score * scale, where a score is a product or, if there is a
// soft cap, the tanh of product * before_tanh.
struct ScoreScale {
  float scale, before_tanh;  // before_tanh is 0 without a cap
};

inline ScoreScale score_scale(const AttentionCall& call) {
  if (call.cap == 0.0f) return {call.scale * kLog2E, 0.0f};
  return {call.cap * kLog2E, call.scale / call.cap};
}

// The sum of a query's probabilities, its sink's included. A sink far above all scores makes
// the sum infinite, and the result 0.
inline float total_of(const AttentionCall& call, const SoftmaxState& state, int64_t head) {
  const float total = reduce_add(load_f32(state.sums));
  if (!call.sinks) return total;
  const float above = call.sinks[head] * kLog2E - state.max * score_scale(call).scale;
  float powers[kLanes];
  store_f32(powers, exp2_nonpositive(splat(above > 0.0f ? -above : above)));
  return total + (above > 0.0f ? 1.0f / powers[0] : powers[0]);
}

inline void cap_scores(float* scores, float before_tanh, int end) {
  for (int i = 0; i < computed(end); i += kLanes)
    store_f32(scores + i, tanh_of(load_f32(scores + i) * before_tanh));
}

inline void scale_scores(float* scores, const float* scales, int end) {
  for (int i = 0; i < computed(end); i += kLanes)
    store_f32(scores + i, load_f32(scores + i) * load_f32(scales + i));
}

// Computes probabilities from scores. They are rounded to the dtype of the values before they are
// summed, so that the weights of the values add up to exactly the sum that divides the output.
template <Dtype dtype>
inline void exponentiate(const float* scores, float scale, SoftmaxState& state, float correction,
                         int end, uint32_t* out) {
  using Element = typename Word<dtype>::Element;
  auto* elements = reinterpret_cast<Element*>(out);
  for (int i = 0; i < computed(end); i += kLanes)
    store_f32(elements + i, exp2_nonpositive((load_f32(scores + i) - state.max) * scale));
  f32x16 sum = load_f32(state.sums) * correction;
  for (int i = 0; i < computed(end) / per_word(dtype); i += kLanes)
    sum = add_words<dtype>(sum, load<u32x16>(out + i));
  store_f32(state.sums, sum);
}

// Computes the weights of values in int8. Probabilities are summed in fp32, because each is
// multiplied by the scale of its value before it is rounded. A position that a row does not see has
// a probability of 0, and a weight of 0 whatever its scale.
template <Dtype dtype>
inline void exponentiate(const float* scores, const float* scales, float scale, SoftmaxState& state,
                         float correction, int end, uint32_t* out) {
  auto* elements = reinterpret_cast<typename Word<dtype>::Element*>(out);
  f32x16 sum = load_f32(state.sums) * correction;
  for (int i = 0; i < computed(end); i += kLanes) {
    const f32x16 power = exp2_nonpositive((load_f32(scores + i) - state.max) * scale);
    const f32x16 weight = power * load_f32(scales + i);
    store_f32(elements + i, power == 0.0f ? f32x16{} : weight);
    sum += power;
  }
  store_f32(state.sums, sum);
}

// Computes the values' weights, not yet divided by the sums of probabilities, from scores
// [num_rows, kTile], for up to 16 rows, which see no positions from `end` on. `corrections`
// gets the factors by which each row's earlier sums must be multiplied. `scales`: null if KV is not
// in int8.
template <Dtype dtype>
inline void softmax_step(float* scores, const TileScales* scales, ScoreScale by,
                         const Span* visible, SoftmaxState* states, int num_rows, int end,
                         uint32_t* out, float* corrections) {
  const float scale = by.scale;
  float falls[kLanes] = {};
  for (int row = 0; row < num_rows; ++row) {
    const Span& seen = visible[row];
    if (scales) scale_scores(scores + row * kTile, scales->keys, end);
    if (by.before_tanh > 0.0f) cap_scores(scores + row * kTile, by.before_tanh, end);
    if (seen.begin > 0 || seen.end < computed(end)) mask_scores(scores + row * kTile, seen, end);
    const float largest = largest_score(scores + row * kTile, end);
    const float before = states[row].max;
    states[row].max = largest > before ? largest : before;
    falls[row] = before - states[row].max;
  }
  float all[kLanes];
  store_f32(all, exp2_nonpositive(load_f32(falls) * scale));
  for (int row = 0; row < num_rows; ++row) {
    corrections[row] = all[row];
    uint32_t* weights = out + row * kTile / per_word(dtype);
    if (scales)
      exponentiate<dtype>(scores + row * kTile, scales->values, scale, states[row], all[row], end,
                          weights);
    else
      exponentiate<dtype>(scores + row * kTile, scale, states[row], all[row], end, weights);
  }
}

}  // namespace quire::QUIRE_ISA
