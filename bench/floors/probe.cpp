// What this machine can do at most, as one line of JSON: bytes a second read from memory, and
// multiply-adds a second of bf16 pairs and of bytes with everything in registers, of N threads.
//
//     probe 2    ->    {"read": 4.1e10, "bf16": 1.0e12, "int8": 2.1e12}
//
// Rates are the best of several runs, by vectors or by tiles (AMX), whichever are faster;
// operations count a multiplication and an addition as two. An instruction set without dot products
// of a kind has 0 of it.
#include <immintrin.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;

constexpr int kRuns = 7;
constexpr size_t kBytes = size_t{256} << 20;  // a thread; more than any cache
// Sums at once: enough that none waits for itself, few enough for GCC to keep them in registers.
constexpr int kPairChains = 16, kByteChains = 12;
constexpr long kSteps = 4'000'000;
constexpr int kTileSums = 4;  // registers of 16 x 16 sums
constexpr long kTileProducts = 1'000'000;

volatile float sink;  // results go here, or the compiler would leave the work out

// Seconds of the fastest of several runs of `work(thread)` on all threads at once.
double fastest(int num_threads, const std::function<void(int)>& work) {
  double best = 1e9;
  for (int run = 0; run < kRuns; ++run) {
    std::atomic<int> ready{0};
    std::atomic<bool> go{false};
    std::vector<std::thread> threads;
    for (int i = 0; i < num_threads; ++i)
      threads.emplace_back([&, i] {
        ++ready;
        while (!go) std::this_thread::yield();
        work(i);
      });
    while (ready < num_threads) std::this_thread::yield();
    const auto began = Clock::now();
    go = true;
    for (auto& thread : threads) thread.join();
    best = std::min(best, std::chrono::duration<double>(Clock::now() - began).count());
  }
  return best;
}

double read_rate(int num_threads) {
  void* memory = mmap(nullptr, kBytes * num_threads, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) std::abort();
  madvise(memory, kBytes * num_threads, MADV_HUGEPAGE);  // as weights lie, where they may
  std::memset(memory, 1, kBytes * num_threads);
  const double seconds = fastest(num_threads, [&](int thread) {
    const char* from = static_cast<const char*>(memory) + kBytes * thread;
    __m256i sums[4] = {};
    for (size_t i = 0; i < kBytes; i += 128) {
      _mm_prefetch(from + i + 8192, _MM_HINT_T0);
      _mm_prefetch(from + i + 8256, _MM_HINT_T0);
      for (int k = 0; k < 4; ++k)
        sums[k] = _mm256_add_epi64(
            sums[k], _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i + 32 * k)));
    }
    const __m256i all =
        _mm256_add_epi64(_mm256_add_epi64(sums[0], sums[1]), _mm256_add_epi64(sums[2], sums[3]));
    sink = static_cast<float>(_mm256_extract_epi64(all, 0));
  });
  munmap(memory, kBytes * num_threads);
  return kBytes * num_threads / seconds;
}

#if defined(__AMX_BF16__) && defined(__AMX_INT8__)

bool may_use_tiles() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

// Products of 16 rows of 64 bytes and 64 bytes of 16 columns a second.
template <bool is_bf16>
double tile_products(int num_threads) {
  if (!may_use_tiles()) return 0;
  const double seconds = fastest(num_threads, [](int) {
    struct alignas(64) {
      uint8_t palette = 1, first_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16};
    } config;
    asm volatile("" : : "r"(&config) : "memory");  // the intrinsic does not say what it reads
    _tile_loadconfig(&config);
    for (long i = 0; i < kTileProducts; ++i) {
      if constexpr (is_bf16) {
        _tile_dpbf16ps(0, 4, 5);
        _tile_dpbf16ps(1, 4, 5);
        _tile_dpbf16ps(2, 4, 5);
        _tile_dpbf16ps(3, 4, 5);
      } else {
        _tile_dpbusd(0, 4, 5);
        _tile_dpbusd(1, 4, 5);
        _tile_dpbusd(2, 4, 5);
        _tile_dpbusd(3, 4, 5);
      }
    }
    _tile_release();
  });
  return static_cast<double>(kTileSums) * kTileProducts * num_threads / seconds;
}

double bf16_tile_rate(int num_threads) {
  return 2.0 * 16 * 16 * 32 * tile_products<true>(num_threads);
}
double int8_tile_rate(int num_threads) {
  return 2.0 * 16 * 16 * 64 * tile_products<false>(num_threads);
}

#else

double bf16_tile_rate(int) { return 0; }
double int8_tile_rate(int) { return 0; }

#endif

double bf16_vector_rate(int num_threads) {
#if defined(__AVX512BF16__)
  const double seconds = fastest(num_threads, [](int) {
    __m512 sums[kPairChains];
    for (int i = 0; i < kPairChains; ++i)
      sums[i] = _mm512_set1_ps(i);  // equal ones would be merged
    const auto x = (__m512bh)_mm512_set1_epi32(0x3c003c00);
    for (long step = 0; step < kSteps; ++step) {
#pragma GCC unroll 16
      for (int i = 0; i < kPairChains; ++i) sums[i] = _mm512_dpbf16_ps(sums[i], x, x);
    }
    for (int i = 1; i < kPairChains; ++i) sums[0] = _mm512_add_ps(sums[0], sums[i]);
    sink = _mm512_reduce_add_ps(sums[0]);
  });
  return 64.0 * kPairChains * kSteps * num_threads / seconds;
#else
  return 0 * num_threads;
#endif
}

double int8_vector_rate(int num_threads) {
#if defined(__AVX512VNNI__)
  const double seconds = fastest(num_threads, [](int) {
    __m512i sums[kByteChains];
    for (int i = 0; i < kByteChains; ++i) sums[i] = _mm512_set1_epi32(i);
    const __m512i x = _mm512_set1_epi32(0x01010101);
    for (long step = 0; step < kSteps; ++step) {
#pragma GCC unroll 16
      for (int i = 0; i < kByteChains; ++i) sums[i] = _mm512_dpbusd_epi32(sums[i], x, x);
    }
    for (int i = 1; i < kByteChains; ++i) sums[0] = _mm512_add_epi32(sums[0], sums[i]);
    sink = static_cast<float>(_mm512_reduce_add_epi32(sums[0]));
  });
  return 128.0 * kByteChains * kSteps * num_threads / seconds;
#else
  return 0 * num_threads;
#endif
}

}  // namespace

int main(int argc, char** argv) {
  const int num_threads = argc > 1 ? std::max(1, std::atoi(argv[1])) : 1;
  std::printf("{\"read\": %.4g, \"bf16\": %.4g, \"int8\": %.4g}\n", read_rate(num_threads),
              std::max(bf16_vector_rate(num_threads), bf16_tile_rate(num_threads)),
              std::max(int8_vector_rate(num_threads), int8_tile_rate(num_threads)));
}
