#include "threads/signal.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <climits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace quire {
namespace {

constexpr auto kSpin = std::chrono::microseconds(50);

bool is_past(uint32_t value, uint32_t wanted) { return static_cast<int32_t>(value - wanted) >= 0; }

// One turn of a loop that waits for another thread.
void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

void Signal::set(uint32_t value) {
  value_.store(value);
  if (num_sleeping_.load() > 0)
    syscall(SYS_futex, &value_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

void Signal::wait_for(uint32_t value) {
  const auto limit = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < 64; ++i) {
      if (is_past(this->value(), value)) return;
      relax();
    }
  } while (std::chrono::steady_clock::now() < limit);
  num_sleeping_.fetch_add(1);
  for (uint32_t seen; !is_past(seen = value_.load(), value);)
    // The kernel lets a thread sleep only while the word is what the thread has seen.
    syscall(SYS_futex, &value_, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
  num_sleeping_.fetch_sub(1);
}

}  // namespace quire
