// The matrix product C += A B of attention; its inputs are the 4-byte words that a lane of a dot
// product takes.
//
// Scores are queries times transposed keys; outputs are probabilities times values. An element of C
// is one lane of one accumulator, to which the steps are added in order. Its bits depend neither on
// the elements beside it nor on where the steps were divided between calls (by tiles: between
// multiples of 16 steps).
#pragma once

#include "isa/dot.h"
#include "isa/simd.h"
#include "kernels.h"

#if defined(QUIRE_TILES)
#include "isa/tiles.h"
#endif

namespace quire::QUIRE_ISA {

#if defined(QUIRE_TILES)
template <Dtype dtype>
inline constexpr bool kTiled = dtype == Dtype::bf16;
#else
template <Dtype>
inline constexpr bool kTiled = false;
#endif

// kTile: the positions of a step of the softmax. By tiles, to load, correct and store the sums
// would cost more than the products of 64 positions. kAttentionRows: so many that reading and
// reordering a tile's keys and values is a small part of the work, so few that queries and sums
// stay in L2.
#if defined(QUIRE_TILES)
inline constexpr int kTile = 256, kAttentionRows = 512;
#else
inline constexpr int kTile = 64, kAttentionRows = 192;
#endif

// The first positions of a tile that are computed if those before `end` are seen: multiples of 32,
// two steps of a product by tiles. A short tile is computed whole, whose loops have a fixed length.
inline int computed(int end) { return kTile > 64 ? (end + 31) / 32 * 32 : kTile; }

// Positions [begin, end) of a tile, relative to it.
struct Span {
  int begin, end;
};

// A word is 4 bytes: one float, or a pair of bf16.
inline constexpr int per_word(Dtype dtype) { return dtype == Dtype::f32 ? 1 : 2; }

template <Dtype dtype>
struct Word : Dot<WeightKind::f32> {
  using Element = float;
};
template <>
struct Word<Dtype::bf16> : Dot<WeightKind::bf16> {
  using Element = bf16;
};

struct Product {
  const uint32_t* a;  // [rows, steps]
  int64_t a_stride;
  const uint32_t* b;  // [steps, columns]
  int64_t b_stride;
  float* c;  // [rows, columns]
  int64_t c_stride;
  const float* keep;  // [rows]: factors of C's old values; null: C is overwritten
  int64_t num_steps;
};

// The size of a register block. 6 x 4 sums, 4 columns of B and one broadcast value fill the 32
// registers of AVX-512; 2 x 4 sums fill the 16 registers of the others. Tiles have 32 rows.
template <Dtype dtype>
inline constexpr int kBlockRows = kTiled<dtype> ? 32
                                  : kWide == 16 ? 6
                                                : 2;
inline constexpr int kBlockVectors = 4;

template <Dtype dtype, int rows, int vectors>
inline void multiply_block(const Product& product, int64_t column) {
  vf32 sums[rows][vectors] = {};
  float* c = product.c + column;
  if (product.keep) {
#pragma GCC unroll 8
    for (int row = 0; row < rows; ++row)
#pragma GCC unroll 4
      for (int i = 0; i < vectors; ++i)
        sums[row][i] = load<vf32>(c + row * product.c_stride + i * kWide) * product.keep[row];
  }
  const uint32_t* b = product.b + column;
  for (int64_t step = 0; step < product.num_steps; ++step, b += product.b_stride) {
    vu32 words[vectors];
#pragma GCC unroll 4
    for (int i = 0; i < vectors; ++i) words[i] = load<vu32>(b + i * kWide);
#pragma GCC unroll 8
    for (int row = 0; row < rows; ++row) {
      const vu32 a = product.a[row * product.a_stride + step] - vu32{};
#pragma GCC unroll 4
      for (int i = 0; i < vectors; ++i) sums[row][i] = Word<dtype>::step(sums[row][i], a, words[i]);
    }
  }
#pragma GCC unroll 8
  for (int row = 0; row < rows; ++row)
#pragma GCC unroll 4
    for (int i = 0; i < vectors; ++i) store(c + row * product.c_stride + i * kWide, sums[row][i]);
}

// Computes columns [begin, end); their number is a multiple of a vector's lanes.
template <Dtype dtype, int rows, int vectors = kBlockVectors>
inline void multiply_columns(const Product& product, int64_t begin, int64_t end) {
  for (; begin + vectors * kWide <= end; begin += vectors * kWide)
    multiply_block<dtype, rows, vectors>(product, begin);
  if constexpr (vectors > 1) multiply_columns<dtype, rows, vectors / 2>(product, begin, end);
}

// Computes up to kBlockRows rows.
template <Dtype dtype, int rows = kBlockRows<dtype>>
inline void multiply(const Product& product, int num_rows, int64_t num_columns) {
  if (num_rows == rows) return multiply_columns<dtype, rows>(product, 0, num_columns);
  if constexpr (rows > 1) multiply<dtype, rows - 1>(product, num_rows, num_columns);
}

// Computes the products of a call, each of up to kBlockRows rows.
template <Dtype dtype>
class Multiplier {
 public:
  void operator()(const Product& product, int num_rows, int64_t num_columns) {
    multiply<dtype>(product, num_rows, num_columns);
  }
};

#if defined(QUIRE_TILES)

// By tiles: the number of steps is a multiple of 16, the number of columns is rounded up to one of
// 32. C's old values have no denormals when they are added to, so that adding zeros changes none.
template <>
class Multiplier<Dtype::bf16> {
 public:
  void operator()(const Product& product, int num_rows, int64_t num_columns) {
    tiles_.shape(num_rows);
    for (int64_t column = 0; column < num_columns; column += kTileColumns) {
      float* c = product.c + column;
      tiles_.clear();
      if (product.keep) {
        correct(product, c, num_rows);
        tiles_.load(c, 4 * product.c_stride);
      }
      for (int64_t step = 0; step < product.num_steps; step += kTileSteps)
        tiles_.multiply(product.a + step, 4 * product.a_stride,
                        product.b + step * product.b_stride + column, 4 * product.b_stride);
      tiles_.store(c, 4 * product.c_stride);
    }
  }

 private:
  static void correct(const Product& product, float* c, int num_rows) {
    for (int row = 0; row < num_rows; ++row, c += product.c_stride) {
      if (product.keep[row] == 1.0f) continue;
      for (int i = 0; i < kTileColumns; i += kLanes)
        store_f32(c + i, without_denormals(load_f32(c + i) * product.keep[row]));
    }
  }

  Tiles tiles_;
};

#endif

}  // namespace quire::QUIRE_ISA
