// A value that only grows (and wraps), and for which threads can wait.
#pragma once

#include <atomic>
#include <cstdint>

namespace quire {

// A waiting thread spins for some microseconds and then sleeps, so that it does not waste a core
// that a worker could use. Threads may wait for different values.
class alignas(64) Signal {
 public:
  uint32_t value() const { return value_.load(std::memory_order_acquire); }
  void set(uint32_t value);
  // Returns when the signal is at `value` or past it: spins, then sleeps.
  void wait_for(uint32_t value);

 private:
  std::atomic<uint32_t> value_{0};
  std::atomic<int> num_sleeping_{0};
};

}  // namespace quire
