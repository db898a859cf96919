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
// share; when the owners are idle again, the lane joins again.
//
// Lanes stand in groups of kGroupLanes, neighbours together. A group has cache lines of its own for
// what its lanes change in every loop, so that many lanes do not queue for one line:
//
//              group 0   group 1
//   root_           2 groups      that have lanes at work; the last one closes the loop
//   presence   3 lanes   1 lane   at work, and those that wait
//   next       5 of 16   7 of 16  pieces of the group's part that were taken
//   gate       31        31       opens the next loop to the group's lanes
//
// See ADR 45.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "threads/backlog.h"
#include "threads/signal.h"

namespace quire {

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
  static constexpr int kGroupLanes = 8;

  // One thread's part in a step.
  class Lane {
   public:
    // `generation`: the loop that runs now; `first`: the first loop of the step.
    Lane(ThreadPool& pool, int index, const LaneSpec& spec, uint32_t generation, uint32_t first)
        : index(index),
          pool_(pool),
          spec_(spec),
          group_(index / kGroupLanes),
          generation_(generation),
          num_over_(generation - first) {}

    // Calls body(begin, end) for pieces of [0, size) of at most `grain`; returns when all pieces of
    // all lanes are done. Each group has an equal part of the pieces; a lane takes pieces of its
    // group's part in turn, and then what other groups have left.
    template <typename Body>
    void loop(int64_t size, int64_t grain, const Body& body) {
      if (num_over_ > 0) {
        --num_over_;
        return;
      }
      const int64_t num_pieces = (size + grain - 1) / grain;
      const auto compute = [&](int64_t piece) {
        body(piece * grain, std::min((piece + 1) * grain, size));
      };
      // A loop of one piece is left to group 0: lane 0 is always there.
      const int num_parts = num_pieces > 1 || group_ == 0 ? pool_.num_groups_ : 0;
      bool stays = !spec_.busy_owner();
      for (int i = 0; stays && i < num_parts; ++i)
        stays = take((group_ + i) % pool_.num_groups_, num_pieces, compute);
      if (!stays) pool_.leave(*this);
      pool_.meet(*this);
    }

    const int index;

   private:
    friend class ThreadPool;

    // Takes pieces of a group's part until none is left. False: the lane has to leave the step.
    template <typename Compute>
    bool take(int group, int64_t num_pieces, const Compute& compute) {
      const auto part_begin = [&](int64_t i) {
        return (num_pieces * i + pool_.num_groups_ - 1) / pool_.num_groups_;
      };
      const int64_t begin = part_begin(group), size = part_begin(group + 1) - begin;
      std::atomic<int64_t>& next = pool_.groups_[group]->next;
      if (size == 0 || (group != group_ && next.load(std::memory_order_relaxed) >= size))
        return true;
      for (;;) {
        const int64_t piece = next.fetch_add(1, std::memory_order_relaxed);
        if (piece >= size) return true;
        compute(begin + piece);
        if (spec_.busy_owner()) return false;
      }
    }

    ThreadPool& pool_;
    const LaneSpec& spec_;
    const int group_;
    uint32_t generation_;
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

  // The barriers of all steps so far: one at the end of each loop and of each step (wraps).
  uint32_t num_loops() const { return generation_.load(); }

  // Runs one step. One thread may call this at a time; `body` must not throw.
  void run(const std::function<void(Lane&)>& body);

 private:
  using Lanes = std::vector<LaneSpec>;
  struct Left {};  // unwinds a lane that has left its step

  struct Group {
    // kWorking for each lane at work, kMet for each lane that waits for the others.
    alignas(64) std::atomic<uint32_t> presence{0};
    alignas(64) std::atomic<int64_t> next{0};  // pieces of its part that were taken
    Signal gate;                               // generation_, set just after it
    Signal started;                            // the number of steps started
  };
  static constexpr uint32_t kWorking = 1, kMet = 1 << 16;

  void start();  // starts one more thread
  void work(int index, Group& group);
  bool join(Group& group);
  bool enter_root();
  bool depart(Group& group, uint32_t change);
  void meet(Lane& lane);
  [[noreturn]] void leave(const Lane& lane);
  void close(uint32_t next_generation);

  std::mutex mutex_;  // guards lanes_, which the caller changes and the others read
  std::shared_ptr<const Lanes> lanes_;
  std::atomic<uint32_t> version_{0};            // of lanes_
  std::vector<std::thread> threads_;            // of lanes 1, 2, ...; never shrinks
  std::vector<std::unique_ptr<Group>> groups_;  // never shrinks
  int num_groups_ = 0;                          // that have lanes
  bool is_pinned_ = false;
  std::atomic<bool> is_ending_{false};

  const std::function<void(Lane&)>* body_ = nullptr;
  std::atomic<bool> is_over_{false};     // lane 0 waits for the others at the step's end
  uint32_t first_ = 0;                   // the generation at the step's first loop
  std::atomic<uint32_t> generation_{0};  // the number of closed loops, over all steps
  // The number of groups with lanes at work, and kRunning while there is a step. If a step runs and
  // the number is 0, a lane closes the loop; until it has opened the next one, no lane can join.
  alignas(64) std::atomic<uint32_t> root_{0};
  static constexpr uint32_t kRunning = 1 << 16;
};

}  // namespace quire
