// The instructions of AMX, modelled in C++ from Intel's manual (Software Developer's Manual, volume
// 2, LDTILECFG to TILEZERO): included before the code that uses the intrinsics, it replaces them.
// An instruction that raises a fault on a CPU ends the program. The order of the sums is in
// isa/tiles.h.
#pragma once

#include <immintrin.h>

#include <cstdio>
#include <cstdlib>

#include "isa/dot.h"

namespace quire::QUIRE_ISA::amx_model {

inline constexpr int kNumTiles = 8, kMostRows = 16, kMostBytes = 64;

struct Tile {
  int rows = 0, row_bytes = 0;
  alignas(64) uint8_t data[kMostRows][kMostBytes] = {};
};

static thread_local Tile tiles[kNumTiles];
static thread_local bool is_configured = false;

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
}

inline void release() { is_configured = false; }

inline Tile& tile(int index) {
  require(is_configured && tiles[index].rows > 0, "the tile is not configured");
  return tiles[index];
}

inline void zero(int to) { std::memset(tile(to).data, 0, sizeof tile(to).data); }

inline void load(int to, const void* from, int64_t stride) {
  zero(to);
  Tile& into = tile(to);
  for (int row = 0; row < into.rows; ++row)
    std::memcpy(into.data[row], static_cast<const char*>(from) + row * stride, into.row_bytes);
}

inline void store(int from, void* to, int64_t stride) {
  const Tile& stored = tile(from);
  for (int row = 0; row < stored.rows; ++row)
    std::memcpy(static_cast<char*>(to) + row * stride, stored.data[row], stored.row_bytes);
}

// Not inlined: the compiler would move arithmetic across the changes of the control register.
[[gnu::noinline]] inline void add_products(Tile& sums, const Tile& a, const Tile& b) {
  const vu32 high = 0xffff0000u - vu32{};
  for (int row = 0; row < sums.rows; ++row)
    for (int at = 0; at < sums.row_bytes; at += static_cast<int>(sizeof(vu32))) {
      vf32 even = {}, odd = {};
      for (int k = 0; k < b.rows; ++k) {
        const vu32 x = QUIRE_ISA::load<uint32_t>(a.data[row] + 4 * k) - vu32{};
        const vu32 w = QUIRE_ISA::load<vu32>(b.data[k] + at);
        even = multiply_add((vf32)(x << 16), (vf32)(w << 16), even);
        odd = multiply_add((vf32)(x & high), (vf32)(w & high), odd);
      }
      uint8_t* sum = sums.data[row] + at;
      QUIRE_ISA::store(sum, QUIRE_ISA::load<vf32>(sum) + (even + odd));
    }
}

inline void multiply_bf16(int to, int a, int b) {
  require(to != a && to != b && a != b, "operands are the same tile");
  require(tile(a).row_bytes == 4 * tile(b).rows, "K of both factors differs");
  require(tile(to).rows == tile(a).rows && tile(to).row_bytes == tile(b).row_bytes,
          "sums of another size");
  constexpr unsigned kFlushDenormals = 0x9fc0;  // round to nearest, no exceptions, DAZ and FTZ
  const unsigned before = _mm_getcsr();
  _mm_setcsr(kFlushDenormals);
  add_products(tile(to), tile(a), tile(b));
  _mm_setcsr(before);
}

}  // namespace quire::QUIRE_ISA::amx_model

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#define _tile_loadd amx_model::load
#define _tile_stored amx_model::store
#define _tile_zero amx_model::zero
#define _tile_dpbf16ps amx_model::multiply_bf16
#define _tile_loadconfig amx_model::load_config
#define _tile_release amx_model::release
