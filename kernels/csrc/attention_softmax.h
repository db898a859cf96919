// One step of the online softmax (Milakov and Gimelshein, 2018) over a tile of scores.
#pragma once

#include "attention_product.h"
#include "kernels.h"
#include "simd.h"

namespace quire::QUIRE_ISA {

// Positions [begin, end) of a tile, relative to it.
struct Span {
  int begin, end;
};

// What a (query, head) pair knows of the positions before. Of nothing: the lowest number as
// maximum, so that the first tile's correction is exactly 0 without a case of its own.
struct SoftmaxState {
  float max;
  float sums[kLanes];  // of lane i: probabilities of positions i, i + 16, ...
};

// What the (query, head) pairs of a query know of the positions before `end`, a multiple of kTile:
// a row of sums and a state for each. Of nothing: end is 0.
struct Begun {
  int end;
  const float* sums;
  const SoftmaxState* states;
};

inline constexpr float kLowest = -3.402823466e+38f;

// Scores of what a row sees, scaled; -inf elsewhere, whatever was there. Returns the largest, lane
// by lane; none is NaN.
inline f32x16 mask_scores(float* scores, float scale, Span visible) {
  const i32x16 lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  f32x16 largest = splat(kLowest);
  for (int i = 0; i < kTile; i += kLanes) {
    f32x16 s = load_f32(scores + i) * scale;
    const i32x16 is_visible = (lanes + i >= visible.begin) & (lanes + i < visible.end);
    s = is_visible ? s : splat(-__builtin_inff());
    store_f32(scores + i, s);
    largest = max(s, largest);
  }
  return largest;
}

// Probabilities are rounded to the dtype of the values before they are summed, so that those that
// weigh the values add up to exactly the sum that divides them.
template <typename T>
inline void exponentiate(const float* scores, SoftmaxState& state, float correction, T* out) {
  f32x16 sum = load_f32(state.sums) * correction;
  for (int i = 0; i < kTile; i += kLanes) {
    store_f32(out + i, exp_nonpositive(load_f32(scores + i) - state.max));
    sum += load_f32(out + i);
  }
  store_f32(state.sums, sum);
}

// From scores [num_rows, kTile] to probabilities of the same shape, not yet divided by their sums;
// `corrections` are the factors of everything summed before. Up to 16 rows.
template <typename T>
inline void softmax_step(float* scores, float scale, const Span* visible, SoftmaxState* states,
                         int num_rows, T* out, float* corrections) {
  float falls[kLanes] = {};
  for (int row = 0; row < num_rows; ++row) {
    const float before = states[row].max;
    const float largest = reduce_max(mask_scores(scores + row * kTile, scale, visible[row]));
    states[row].max = largest > before ? largest : before;
    falls[row] = before - states[row].max;
  }
  float all[kLanes];
  store_f32(all, exp_nonpositive(load_f32(falls)));
  for (int row = 0; row < num_rows; ++row) {
    corrections[row] = all[row];
    exponentiate(scores + row * kTile, states[row], all[row], out + row * kTile);
  }
}

}  // namespace quire::QUIRE_ISA
