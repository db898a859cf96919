// Threads that compute one step together: all run the same body, and share out loops within it.
//
//   pool.run([&](ThreadPool::Lane& lane) {
//     lane.loop(num_panels, 4, [&](int64_t begin, int64_t end) { ... });  // ends in a barrier
//     lane.loop(...);
//   });
//
// The caller is lane 0. A lane may be lent: it works on a CPU that belongs to other workers, and
// only while all of them are idle; as soon as one is busy it leaves the step, between two pieces of
// a loop, and the others do its share. Lanes that wait spin for some microseconds, then sleep, so
// that a core is never burnt beside a worker that could use it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace quire {

// A value that others wait for to change.
class Signal {
 public:
  uint32_t value() const { return value_.load(std::memory_order_acquire); }
  void set(uint32_t value);
  // Until the value is not `old`: spins, then sleeps.
  void wait_past(uint32_t old);

 private:
  std::atomic<uint32_t> value_{0};
  std::atomic<int> num_sleeping_{0};
  std::mutex mutex_;
  std::condition_variable changed_;
};

struct LaneSpec {
  int cpu;  // -1: wherever the system puts it
  // Bytes that are not 0 while the CPU's owners are busy; empty: the lane is never lent.
  std::vector<const volatile uint8_t*> owners;

  bool is_free() const {
    for (const volatile uint8_t* busy : owners)
      if (*busy != 0) return false;
    return true;
  }
};

class ThreadPool {
 public:
  // One thread's part in a step.
  class Lane {
   public:
    Lane(ThreadPool& pool, int index, const LaneSpec& spec)
        : index(index), pool_(pool), spec_(spec), is_alone_(pool.num_active_ == 1) {}

    // Calls body(begin, end) for pieces of [0, size) of at most `grain`, on whichever lane is free;
    // returns when all pieces of all lanes are done.
    template <typename Body>
    void loop(int64_t size, int64_t grain, const Body& body) {
      if (is_alone_) {
        for (int64_t begin = 0; begin < size; begin += grain)
          body(begin, begin + grain < size ? begin + grain : size);
        return;
      }
      bool stays = spec_.is_free();
      while (stays) {
        const int64_t begin = pool_.next_.fetch_add(grain, std::memory_order_relaxed);
        if (begin >= size) break;
        body(begin, begin + grain < size ? begin + grain : size);
        stays = spec_.is_free();
      }
      if (!stays) pool_.leave();
      pool_.meet();
    }

    const int index;

   private:
    ThreadPool& pool_;
    const LaneSpec& spec_;
    const bool is_alone_;
  };

  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  // From the next step on. The first lane is the caller's and never lent. By the thread that calls
  // `run`, or before it has. std::invalid_argument: no lanes, or no such CPU.
  void assign(std::vector<LaneSpec> lanes);

  int num_lanes() const { return static_cast<int>(lanes_.size()); }

  // One caller at a time. `body` must not throw.
  void run(const std::function<void(Lane&)>& body);

 private:
  struct Left {};  // unwinds a lane that has left its step

  struct Thread {
    Signal step;  // changes when a step begins in which the thread has a part
    std::thread thread;
  };

  void start();  // one more thread
  void work(int index);
  void meet();
  [[noreturn]] void leave();
  void arrive();  // counted in; the last one opens the gate

  std::vector<LaneSpec> lanes_;
  std::vector<std::unique_ptr<Thread>>
      threads_;  // of lanes 1, 2, ...; never fewer than once needed
  bool is_pinned_ = false;
  std::atomic<bool> is_ending_{false};
  const std::function<void(Lane&)>* body_ = nullptr;

  int num_active_ = 1;  // lanes of this step that have not left; changes at the gate only
  std::atomic<int> num_leaving_{0};
  std::atomic<int> num_met_{0};
  Signal gate_;  // changes when all active lanes have met
  alignas(64) std::atomic<int64_t> next_{0};
};

}  // namespace quire
