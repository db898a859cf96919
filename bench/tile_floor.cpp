// Products of AMX tiles with their loads, from L1: the most that a core can compute in bf16.
// `bench.engine_kernels` compiles it.
#include <immintrin.h>

#include <cstdint>

// Computes `count` products of 32 rows, 32 columns and 64 bytes of K. The process must have asked
// for AMX.
extern "C" void multiply_tiles(int64_t count) {
  constexpr int kDepth = 8;
  alignas(64) static thread_local char rows[32][64 * kDepth + 64], columns[16 * kDepth][128];
  struct alignas(64) Config {
    uint8_t palette = 1, first_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t num_rows[16] = {};
  } config;
  for (int i = 0; i < 8; ++i) config.row_bytes[i] = 64, config.num_rows[i] = 16;
  asm volatile("" : : : "memory");  // the intrinsic does not say that it reads memory
  _tile_loadconfig(&config);
  for (int64_t i = 0; i < count; ++i) {
    const char *a = rows[0] + i % kDepth * 64, *b = columns[i % kDepth * 16];
    _tile_loadd(4, a, sizeof rows[0]);
    _tile_loadd(5, a + 16 * sizeof rows[0], sizeof rows[0]);
    _tile_loadd(6, b, 128);
    _tile_loadd(7, b + 64, 128);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_release();
}
