#include "threads/thread_pool.h"

#include <pthread.h>

#include <chrono>
#include <stdexcept>
#include <string>

namespace quire {
namespace {

// A lent lane sleeps at most this long: its owner may die without waking it, or the lanes may be
// assigned anew.
constexpr auto kLongestSleep = std::chrono::milliseconds(100);

// Pinning may fail, because the CPU may no longer be allowed for this process. The lane then
// computes without being pinned.
void pin(pthread_t thread, int cpu) {
  if (cpu < 0) return;
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  pthread_setaffinity_np(thread, sizeof set, &set);
}

}  // namespace

ThreadPool::ThreadPool(int num_threads) {
  assign(std::vector<LaneSpec>(num_threads < 0 ? 0 : num_threads, LaneSpec{-1, {}}));
}

ThreadPool::~ThreadPool() {
  is_ending_ = true;
  for (auto& group : groups_) group->started.set(group->started.value() + 1);
  for (std::thread& thread : threads_) thread.join();
}

void ThreadPool::assign(std::vector<LaneSpec> lanes) {
  if (lanes.empty()) throw std::invalid_argument("a thread pool without threads");
  if (!lanes[0].owners.empty()) throw std::invalid_argument("the first lane cannot be lent");
  for (const LaneSpec& lane : lanes)
    if (lane.cpu < -1 || lane.cpu >= CPU_SETSIZE)
      throw std::invalid_argument("no CPU " + std::to_string(lane.cpu));
  {
    std::lock_guard<std::mutex> lock(mutex_);
    lanes_ = std::make_shared<const Lanes>(std::move(lanes));
    ++version_;
  }
  num_groups_ = static_cast<int>((lanes_->size() + kGroupLanes - 1) / kGroupLanes);
  while (static_cast<int>(groups_.size()) < num_groups_)
    groups_.push_back(std::make_unique<Group>());
  for (int i = 0; i < num_groups_; ++i) groups_[i]->gate.set(generation_.load());
  while (threads_.size() + 1 < lanes_->size()) start();
  for (size_t i = 1; i < lanes_->size(); ++i)
    pin(threads_[i - 1].native_handle(), (*lanes_)[i].cpu);
  is_pinned_ = false;
}

void ThreadPool::run(const std::function<void(Lane&)>& body) {
  if (!is_pinned_) {
    pin(pthread_self(), lanes_->front().cpu);
    is_pinned_ = true;
  }
  body_ = &body;
  first_ = generation_.load();
  groups_.front()->presence.store(kWorking);
  root_.store(kRunning + 1);
  if (lanes_->size() > 1)
    for (int i = 0; i < num_groups_; ++i) groups_[i]->started.set(groups_[i]->started.value() + 1);
  Lane lane(*this, 0, lanes_->front(), first_, first_);
  body(lane);
  is_over_ = true;
  meet(lane);
}

void ThreadPool::start() {
  const int index = static_cast<int>(threads_.size()) + 1;
  Group& group = *groups_[index / kGroupLanes];
  threads_.emplace_back([this, index, &group] { work(index, group); });
}

void ThreadPool::work(int index, Group& group) {
  std::shared_ptr<const Lanes> lanes;
  uint32_t version = 0;
  for (;;) {
    // Read first: the pool's end is one more start, behind the flag, and must not become the step
    // whose successor is waited for.
    const uint32_t step = group.started.value();
    if (is_ending_) return;
    if (version != version_.load()) {
      std::lock_guard<std::mutex> lock(mutex_);
      lanes = lanes_;
      version = version_.load();
    }
    if (index >= static_cast<int>(lanes->size())) {
      group.started.wait_for(step + 1);
      continue;
    }
    const LaneSpec& spec = (*lanes)[index];
    if (const Backlog* owner = spec.busy_owner()) {
      if (const int32_t backlog = owner->value()) owner->wait_past(backlog, kLongestSleep);
    } else if (!join(group)) {
      group.started.wait_for(step + 1);
    } else {
      Lane lane(*this, index, spec, generation_.load(), first_);
      try {
        if (version != version_.load()) leave(lane);  // the step has other lanes
        (*body_)(lane);
        meet(lane);
      } catch (const Left&) {
      }
    }
  }
}

// False: no step is running.
bool ThreadPool::join(Group& group) {
  uint32_t presence = group.presence.load();
  bool has_entered = false;
  for (;;) {
    if (presence % kMet == 0 && !has_entered) {
      if (!enter_root()) return false;
      has_entered = true;
      presence = group.presence.load();
    }
    if (!group.presence.compare_exchange_weak(presence, presence + kWorking)) continue;
    // Another lane has brought the group into the root: once is enough.
    if (presence % kMet > 0 && has_entered) root_.fetch_sub(1);
    return true;
  }
}

// Counts one more group in the root. False: no step is running. Waits while a loop is being closed:
// it may be the step's last one.
bool ThreadPool::enter_root() {
  uint32_t root = root_.load();
  for (;;) {
    if (root == 0) return false;
    if (root == kRunning) {
      std::this_thread::yield();  // the lane that closes may need this CPU
      root = root_.load();
    } else if (root_.compare_exchange_weak(root, root + 1)) {
      return true;
    }
  }
}

// Takes the lane out of those at work, by this change of its group's presence. True: it was the
// last one of all, and has to close the loop.
bool ThreadPool::depart(Group& group, uint32_t change) {
  const uint32_t presence = group.presence.fetch_add(change) + change;
  return presence % kMet == 0 && root_.fetch_sub(1) == kRunning + 1;
}

void ThreadPool::meet(Lane& lane) {
  const uint32_t next = ++lane.generation_;
  Group& group = *groups_[lane.group_];
  if (depart(group, kMet - kWorking)) return close(next);
  group.gate.wait_for(next);
}

// A lane that has left must not touch anything of the step: the others may finish it at any time.
void ThreadPool::leave(const Lane& lane) {
  if (depart(*groups_[lane.group_], -kWorking)) close(lane.generation_ + 1);
  throw Left{};
}

// Opens the next loop to the lanes that have met, or ends the step. A lane can join as soon as its
// group or the root says that lanes are at work, so all else is set before.
void ThreadPool::close(uint32_t next_generation) {
  const bool is_last = is_over_.exchange(false);
  for (int i = 0; i < num_groups_; ++i) groups_[i]->next.store(0, std::memory_order_relaxed);
  generation_.store(next_generation);
  uint32_t num_at_work = 0;
  for (int i = 0; i < num_groups_; ++i) {
    const uint32_t num_met = groups_[i]->presence.load() / kMet;
    groups_[i]->presence.store(is_last ? 0 : num_met * kWorking);
    num_at_work += num_met > 0;
  }
  root_.store(is_last ? 0 : kRunning + num_at_work);
  // Lane 0 may begin the next step as soon as its gate is open, so that one comes last.
  for (int i = num_groups_; i-- > 0;) groups_[i]->gate.set(next_generation);
}

}  // namespace quire
