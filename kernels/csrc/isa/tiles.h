// Matrix products of bf16 by tiles: up to 32 rows of sums times 32 columns, 64 bytes of K at a
// time.
//
// `DecodeTiles` are the two products of a decode step's attention, of one query's heads that share
// a key/value head: keys times queries, without transposing keys, and weights times values.
//
// The table `amx_emulated`, for tests on CPUs without AMX, has the same code on a model of the
// instructions (tests/kernels/amx_model.h).
//
// The order of the sums of a product of bf16 pairs, as AMX defines it: for the 32 values of K, the
// products of even k and of odd k are two chains of 16 fused multiply-adds from 0, in order
// of k; then sum += even + odd. Each operation reads denormals as 0 and writes 0 for a denormal
// (DAZ and FTZ).
#pragma once

#include <immintrin.h>

#include "isa/simd.h"
#include "kernels.h"

namespace quire::QUIRE_ISA {

inline constexpr int kTileRows = 32;      // of sums
inline constexpr int kTileColumns = 32;   // of sums
inline constexpr int kTileBytes = 64;     // of K in a product
inline constexpr int kTileSteps = 16;     // words of 4 bytes in them
inline constexpr int kRegisterRows = 16;  // of one tile register
inline constexpr int kRegisterBytes = 64;

// The memory operand of LDTILECFG.
struct alignas(64) TileConfig {
  uint8_t palette, first_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};
static_assert(sizeof(TileConfig) == 64);

// GCC's intrinsics do not say that they read memory: it must not move writes across them.
inline void tile_barrier() { asm volatile("" : : : "memory"); }

inline void configure_tiles(const int (&rows)[8], const int (&row_bytes)[8]) {
  TileConfig config = {};
  config.palette = 1;
  for (int tile = 0; tile < 8; ++tile) {
    config.row_bytes[tile] = static_cast<uint16_t>(rows[tile] > 0 ? row_bytes[tile] : 0);
    config.rows[tile] = static_cast<uint8_t>(rows[tile]);
  }
  tile_barrier();
  _tile_loadconfig(&config);
  tile_barrier();
}

// Registers 0 and 1 are the sums of the first 16 rows, 2 and 3 of the others; 4 and 5 are
// rows of `a`, 6 and 7 columns of `b`.
//
// A kernel configures the registers when it first needs them and releases them when it ends:
// between calls, the operating system has no tiles to save for this thread, and a CPU core that
// holds no tiles can sleep.
class Tiles {
 public:
  Tiles() = default;
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
  ~Tiles() {
    if (num_rows_ > 0) _tile_release();
  }

  void shape(int num_rows) {
    if (num_rows == num_rows_) return;
    num_rows_ = num_rows;
    const int first = num_rows < kRegisterRows ? num_rows : kRegisterRows;
    const int second = num_rows - first;
    constexpr int k = kRegisterBytes;
    configure_tiles({first, first, second, second, first, second, kTileSteps, kTileSteps},
                    {k, k, k, k, k, k, k, k});
  }

  void clear() {
    _tile_zero(0);
    _tile_zero(1);
    if (!has_second()) return;
    _tile_zero(2);
    _tile_zero(3);
  }

  void load(const void* sums, int64_t stride) {
    const char* from = static_cast<const char*>(sums);
    tile_barrier();
    _tile_loadd(0, from, stride);
    _tile_loadd(1, from + kRegisterBytes, stride);
    if (has_second()) {
      _tile_loadd(2, from + kRegisterRows * stride, stride);
      _tile_loadd(3, from + kRegisterRows * stride + kRegisterBytes, stride);
    }
    tile_barrier();
  }

  void store(void* sums, int64_t stride) const {
    char* to = static_cast<char*>(sums);
    _tile_stored(0, to, stride);
    _tile_stored(1, to + kRegisterBytes, stride);
    if (!has_second()) return;
    _tile_stored(2, to + kRegisterRows * stride, stride);
    _tile_stored(3, to + kRegisterRows * stride + kRegisterBytes, stride);
  }

  void multiply(const void* a, int64_t a_stride, const void* b, int64_t b_stride) {
    const char *rows = static_cast<const char*>(a), *columns = static_cast<const char*>(b);
    tile_barrier();
    _tile_loadd(4, rows, a_stride);
    _tile_loadd(6, columns, b_stride);
    _tile_loadd(7, columns + kRegisterBytes, b_stride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (has_second()) multiply_second(rows + kRegisterRows * a_stride, a_stride);
    tile_barrier();
  }

 private:
  static void multiply_second(const char* rows, int64_t a_stride) {
    _tile_loadd(5, rows, a_stride);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }

  bool has_second() const { return num_rows_ > kRegisterRows; }

  int num_rows_ = 0;
};

// Registers 0 to 2 are scores, keys and queries; 3 and 4 are sums, 5 weights, 6 and 7 values. One
// configuration serves both products, because to configure the registers costs as much as several
// products.
class DecodeTiles {
 public:
  explicit DecodeTiles(int num_heads) : num_heads_(num_heads) {
    constexpr int k = kRegisterBytes, rows = kRegisterRows;
    configure_tiles(
        {rows, rows, kTileSteps, num_heads, num_heads, num_heads, kTileSteps, kTileSteps},
        {4 * num_heads, k, 4 * num_heads, k, k, k, k, k});
  }
  DecodeTiles(const DecodeTiles&) = delete;
  DecodeTiles& operator=(const DecodeTiles&) = delete;
  ~DecodeTiles() { _tile_release(); }

  void clear_scores() { _tile_zero(0); }
  // Adds the products of 64 bytes of 16 positions' keys, as they lie in the arena, and the queries
  // [16 words, heads].
  void add_scores(const void* keys, int64_t stride, const uint32_t* queries) {
    tile_barrier();
    _tile_loadd(1, keys, stride);
    _tile_loadd(2, queries, 4 * num_heads_);
    _tile_dpbf16ps(0, 1, 2);
    tile_barrier();
  }
  // Writes the scores as [16 positions, heads].
  void store_scores(float* scores) const {
    _tile_stored(0, scores, 4 * num_heads_);
    tile_barrier();
  }

  // Adds the products of weights [heads, 16 words] and values [16 words, columns] to sums
  // [heads, columns]. `weights_stride`: bytes. The number of columns is a multiple of 32.
  void add_values(const uint32_t* weights, int64_t weights_stride, const uint32_t* values,
                  int num_columns, float* sums) {
    const int64_t stride = int64_t{4} * num_columns;
    tile_barrier();
    _tile_loadd(5, weights, weights_stride);
    for (int i = 0; i < num_columns; i += kTileColumns) {
      _tile_loadd(3, sums + i, stride);
      _tile_loadd(6, values + i, stride);
      _tile_dpbf16ps(3, 5, 6);
      _tile_stored(3, sums + i, stride);
      _tile_loadd(4, sums + i + 16, stride);
      _tile_loadd(7, values + i + 16, stride);
      _tile_dpbf16ps(4, 5, 7);
      _tile_stored(4, sums + i + 16, stride);
    }
    tile_barrier();
  }

 private:
  const int num_heads_;
};

}  // namespace quire::QUIRE_ISA
