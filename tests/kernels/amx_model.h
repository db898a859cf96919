// The instructions of AMX, modelled in C++ from Intel's manual (Software Developer's Manual, volume
// 2, LDTILECFG to TILEZERO): included before the code that uses the intrinsics, it replaces them.
// What raises a fault on a CPU ends the program.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace amx_model {

inline constexpr int kNumTiles = 8, kMostRows = 16, kMostBytes = 64;

struct Tile {
  int rows = 0, row_bytes = 0;
  uint8_t data[kMostRows][kMostBytes] = {};
};

inline Tile tiles[kNumTiles];
inline bool is_configured = false;
inline long num_configured = 0, num_products = 0;

inline void require(bool condition, const char* fault) {
  if (condition) return;
  std::fprintf(stderr, "fault: %s\n", fault);
  std::abort();
}

inline void load_config(const void* memory) {
  uint8_t bytes[64];
  std::memcpy(bytes, memory, sizeof bytes);
  require(bytes[0] == 1 && bytes[1] == 0, "the palette is not 1, or the first row is not 0");
  for (int i = 2; i < 16; ++i) require(bytes[i] == 0, "reserved bytes are not 0");
  for (int i = 0; i < 16; ++i) {
    uint16_t row_bytes;
    std::memcpy(&row_bytes, bytes + 16 + 2 * i, sizeof row_bytes);
    const int rows = bytes[48 + i];
    require(rows <= kMostRows && row_bytes <= kMostBytes, "a tile is too large");
    require((rows == 0) == (row_bytes == 0), "a tile has rows or bytes alone");
    require(i < kNumTiles || rows == 0, "there are eight tiles");
    if (i >= kNumTiles) continue;
    tiles[i] = Tile{};
    tiles[i].rows = rows;
    tiles[i].row_bytes = row_bytes;
  }
  is_configured = true;
  ++num_configured;
}

inline void release() { is_configured = false; }

inline Tile& tile(int index) {
  require(is_configured && tiles[index].rows > 0, "the tile is not configured");
  return tiles[index];
}

inline void zero(int to) { std::memset(tile(to).data, 0, sizeof tile(to).data); }

inline void load(int to, const void* from, int64_t stride) {
  zero(to);
  for (int row = 0; row < tile(to).rows; ++row)
    std::memcpy(tile(to).data[row], static_cast<const char*>(from) + row * stride,
                tile(to).row_bytes);
}

inline void store(int from, void* to, int64_t stride) {
  for (int row = 0; row < tile(from).rows; ++row)
    std::memcpy(static_cast<char*>(to) + row * stride, tile(from).data[row], tile(from).row_bytes);
}

template <typename T>
T element(const Tile& tile, int row, int index) {
  T value;
  std::memcpy(&value, tile.data[row] + index * sizeof(T), sizeof(T));
  return value;
}

// sum = body(sum, row, column) for every element of `to`.
template <typename T, typename Body>
void update(int to, int a, int b, Body body) {
  Tile& sums = tile(to);
  require(to != a && to != b && a != b, "operands are the same tile");
  require(tile(a).row_bytes == 4 * tile(b).rows, "K of both factors differs");
  require(sums.rows == tile(a).rows && sums.row_bytes == tile(b).row_bytes, "sums of another size");
  ++num_products;
  for (int row = 0; row < sums.rows; ++row)
    for (int column = 0; column < sums.row_bytes / 4; ++column) {
      const T sum = body(element<T>(sums, row, column), row, column);
      std::memcpy(sums.data[row] + column * sizeof(T), &sum, sizeof(T));
    }
}

inline float pair_half(uint32_t pair, int half) {
  const uint32_t bits = half == 0 ? pair << 16 : pair & 0xffff0000u;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

[[gnu::noinline]] inline float add_pairs(float sum, const Tile& a, const Tile& b, int row,
                                         int column) {
  float halves[2] = {};
  for (int k = 0; k < b.rows; ++k)
    for (int half = 0; half < 2; ++half)
      halves[half] = std::fmaf(pair_half(element<uint32_t>(a, row, k), half),
                               pair_half(element<uint32_t>(b, k, column), half), halves[half]);
  return sum + (halves[0] + halves[1]);
}

inline void multiply_bf16(int to, int a, int b) {
  const unsigned before = _mm_getcsr();
  _mm_setcsr(0x9fc0);  // denormals are 0
  update<float>(to, a, b, [&](float sum, int row, int column) {
    return add_pairs(sum, tile(a), tile(b), row, column);
  });
  _mm_setcsr(before);
}

inline void multiply_bytes(int to, int a, int b) {
  update<int32_t>(to, a, b, [&](int32_t sum, int row, int column) {
    for (int k = 0; k < tile(b).rows; ++k)
      for (int i = 0; i < 4; ++i)
        sum +=
            element<uint8_t>(tile(a), row, 4 * k + i) * element<int8_t>(tile(b), k, 4 * column + i);
    return sum;
  });
}

}  // namespace amx_model

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#undef _tile_dpbusd
#define _tile_loadd amx_model::load
#define _tile_stored amx_model::store
#define _tile_zero amx_model::zero
#define _tile_dpbf16ps amx_model::multiply_bf16
#define _tile_dpbusd amx_model::multiply_bytes
#define _tile_loadconfig amx_model::load_config
#define _tile_release amx_model::release
