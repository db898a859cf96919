// A word in memory that processes share: the number of sequences that a worker wants to compute
// now. Lent lanes on the worker's CPUs sleep until the word is 0.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <ctime>

namespace quire {

class Backlog {
 public:
  explicit Backlog(int32_t* word) : word_(word) {}

  int32_t value() const { return __atomic_load_n(word_, __ATOMIC_ACQUIRE); }
  bool is_there() const { return value() != 0; }

  void wake() const { futex(FUTEX_WAKE, INT32_MAX, nullptr); }

  // Sleeps until `wake` is called, but not if the value is not `old`, and at most for `limit`: a
  // worker that dies does not call `wake`.
  void wait_past(int32_t old, std::chrono::milliseconds limit) const {
    const timespec time{limit.count() / 1000, limit.count() % 1000 * 1000000};
    futex(FUTEX_WAIT, old, &time);
  }

 private:
  void futex(int operation, int32_t value, const timespec* time) const {
    syscall(SYS_futex, word_, operation, value, time, nullptr, 0);
  }

  int32_t* word_;
};

}  // namespace quire
