// Threads that compute one step together: all run the same body, and share out loops within it.
//
//   pool.run([&](ThreadPool::Lane& lane) {
//     lane.loop(num_panels, 4, [&](int64_t begin, int64_t end) { ... });  // ends in a barrier
//     lane.loop(...);
//   });
//
// The caller is lane 0. Between steps, and when a lane waits for another, it spins for a few
// microseconds and then sleeps, so that a core is never burnt beside a worker that could use it.
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

class ThreadPool {
 public:
  // Part of a step that one thread runs.
  class Lane {
   public:
    Lane(ThreadPool& pool, int index) : index(index), pool_(pool) {}

    // Calls body(begin, end) for pieces of [0, size) of at most `grain`, on whichever lane is free;
    // returns when all pieces of all lanes are done.
    template <typename Body>
    void loop(int64_t size, int64_t grain, const Body& body) {
      if (pool_.num_lanes_ == 1) {
        for (int64_t begin = 0; begin < size; begin += grain)
          body(begin, begin + grain < size ? begin + grain : size);
        return;
      }
      for (;;) {
        const int64_t begin = pool_.next_.fetch_add(grain, std::memory_order_relaxed);
        if (begin >= size) break;
        body(begin, begin + grain < size ? begin + grain : size);
      }
      pool_.meet();
    }

    int size() const { return pool_.num_lanes_; }

    const int index;

   private:
    ThreadPool& pool_;
  };

  // As many lanes as `cpus`, each pinned to its own; `num_threads` unpinned ones if it is empty.
  ThreadPool(int num_threads, const std::vector<int>& cpus);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  // From the next step on; at any time, from any thread.
  void assign(int num_threads, const std::vector<int>& cpus);

  int num_threads() const;

  // One caller at a time. `body` must not throw.
  void run(const std::function<void(Lane&)>& body);

 private:
  struct Assignment {
    int num_threads;
    std::vector<int> cpus;
  };

  void adopt();  // the assignment asked for last
  void start(int index);
  void work(int index);
  void meet();

  mutable std::mutex assignment_mutex_;
  Assignment wanted_;
  std::atomic<bool> is_reassigned_{true};

  std::vector<std::thread> threads_;  // lanes 1, 2, ...: as many as were ever wanted
  int num_lanes_ = 1;
  std::atomic<bool> is_ending_{false};
  const std::function<void(Lane&)>* body_ = nullptr;
  Signal step_;                  // changes when a step begins
  Signal gate_;                  // changes when all lanes have met
  std::atomic<int> num_met_{0};
  alignas(64) std::atomic<int64_t> next_{0};
};

}  // namespace quire
