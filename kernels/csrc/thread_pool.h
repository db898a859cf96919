// Threads that compute one step together: all run the same body and divide its loops among them.
//
//   pool.run([&](ThreadPool::Lane& lane) {
//     lane.loop(num_panels, 4, [&](int64_t begin, int64_t end) { ... });  // ends in a barrier
//     lane.loop(...);
//   });
//
// The caller is lane 0. The other lanes join when they are awake, and run the body from the first
// loop that is not finished: code between loops must allow a late run. A lane may be lent: it uses
// a CPU that belongs to other workers, and only while all of them are idle. As soon as one of them
// is busy, the lane leaves the step, between two pieces of a loop, and the other lanes do its
// share; when the owners are idle again, the lane joins again. Waiting lanes spin for some
// microseconds and then sleep, so that they do not waste a core that a worker could use.
//
// See ADR 42 and ADR 45.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "backlog.h"

namespace quire {

// A value that only grows (and wraps), and for which threads can wait.
class Signal {
 public:
  uint32_t value() const { return value_.load(std::memory_order_acquire); }
  void set(uint32_t value);
  // Returns when the signal is at `value` or past it: spins, then sleeps.
  void wait_for(uint32_t value);

 private:
  bool has_reached(uint32_t value) const {
    return static_cast<int32_t>(this->value() - value) >= 0;
  }

  std::atomic<uint32_t> value_{0};
  std::atomic<int> num_sleeping_{0};
  std::mutex mutex_;
  std::condition_variable changed_;
};

struct LaneSpec {
  int cpu;                      // -1: the thread is not pinned
  std::vector<Backlog> owners;  // of the CPU; none: the lane is not lent

  // An owner that wants the CPU now, or null.
  const Backlog* busy_owner() const {
    for (const Backlog& owner : owners)
      if (owner.is_there()) return &owner;
    return nullptr;
  }
};

class ThreadPool {
 public:
  // One thread's part in a step.
  class Lane {
   public:
    // `num_over`: the number of this step's loops that are finished.
    Lane(ThreadPool& pool, int index, const LaneSpec& spec, uint32_t num_over)
        : index(index), pool_(pool), spec_(spec), num_over_(num_over) {}

    // Calls body(begin, end) for pieces of [0, size) of at most `grain`, which free lanes take in
    // turn; returns when all pieces of all lanes are done.
    template <typename Body>
    void loop(int64_t size, int64_t grain, const Body& body) {
      if (num_over_ > 0) {
        --num_over_;
        return;
      }
      bool stays = !spec_.busy_owner();
      while (stays) {
        const int64_t begin = pool_.next_.fetch_add(grain, std::memory_order_relaxed);
        if (begin >= size) break;
        body(begin, begin + grain < size ? begin + grain : size);
        stays = !spec_.busy_owner();
      }
      if (!stays) pool_.leave();
      pool_.meet();
    }

    const int index;

   private:
    ThreadPool& pool_;
    const LaneSpec& spec_;
    uint32_t num_over_;
  };

  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  // Sets the lanes from the next step on. The first lane is the calling thread and cannot be lent.
  // Only the thread that calls `run` may call this, or any thread before the first `run`.
  // std::invalid_argument: no lanes, a lent first lane, or no such CPU.
  void assign(std::vector<LaneSpec> lanes);

  int num_lanes() const { return static_cast<int>(lanes_->size()); }

  // Runs one step. One thread may call this at a time; `body` must not throw.
  void run(const std::function<void(Lane&)>& body);

 private:
  using Lanes = std::vector<LaneSpec>;
  struct Left {};  // unwinds a lane that has left its step

  // The lanes that take part, in one word that all change by compare-and-set. When all active lanes
  // have met, no lane joins or leaves until the last one has closed the loop and opened the next.
  struct State {
    uint32_t generation;  // the number of closed loops, over all steps
    uint16_t num_active;  // lanes in the step; 0: no step is running
    uint16_t num_met;     // active lanes that wait for the others

    bool is_closing() const { return num_active == num_met; }
  };

  void start();  // starts one more thread
  void work(int index);
  std::shared_ptr<const Lanes> lanes();
  bool join(State& joined);
  void meet(bool is_last = false);
  [[noreturn]] void leave();
  void close(State state, bool is_last);

  std::mutex mutex_;  // guards lanes_, which the caller changes and the others read
  std::shared_ptr<const Lanes> lanes_;
  std::vector<std::thread> threads_;  // of lanes 1, 2, ...; never shrinks
  bool is_pinned_ = false;
  std::atomic<bool> is_ending_{false};

  const std::function<void(Lane&)>* body_ = nullptr;
  uint32_t first_ = 0;  // the generation at the step's first loop
  std::atomic<State> state_{State{0, 0, 0}};
  Signal started_;  // the number of steps started
  Signal gate_;     // the generation, set just after it is set in state_
  alignas(64) std::atomic<int64_t> next_{0};
};

}  // namespace quire
