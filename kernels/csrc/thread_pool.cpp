#include "thread_pool.h"

#include <pthread.h>

#include <chrono>
#include <stdexcept>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace quire {
namespace {

// A step's number and its lanes are one value, so that a lane that sleeps through steps in which it
// has no part never takes one for another.
constexpr uint32_t kOneStep = 1u << 10;
constexpr int kMostLanes = kOneStep - 1;

constexpr auto kSpin = std::chrono::microseconds(50);

void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

void pin(pthread_t thread, int cpu) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  // A CPU may have been taken from us since it was assigned; unpinned, the lane still computes.
  pthread_setaffinity_np(thread, sizeof set, &set);
}

void check(int num_threads, const std::vector<int>& cpus) {
  if (cpus.empty() ? num_threads < 1 || num_threads > kMostLanes : cpus.size() > kMostLanes)
    throw std::invalid_argument("a thread pool of " + std::to_string(num_threads) + " threads");
  for (int cpu : cpus)
    if (cpu < 0 || cpu >= CPU_SETSIZE)
      throw std::invalid_argument("no CPU " + std::to_string(cpu));
}

}  // namespace

void Signal::set(uint32_t value) {
  value_.store(value);
  if (num_sleeping_.load() == 0) return;
  std::lock_guard<std::mutex> lock(mutex_);
  changed_.notify_all();
}

void Signal::wait_past(uint32_t old) {
  const auto limit = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < 64; ++i) {
      if (value() != old) return;
      relax();
    }
  } while (std::chrono::steady_clock::now() < limit);
  std::unique_lock<std::mutex> lock(mutex_);
  num_sleeping_.fetch_add(1);
  changed_.wait(lock, [&] { return value_.load() != old; });
  num_sleeping_.fetch_sub(1);
}

ThreadPool::ThreadPool(int num_threads, const std::vector<int>& cpus) {
  assign(num_threads, cpus);
}

ThreadPool::~ThreadPool() {
  is_ending_ = true;
  step_.set(step_.value() + kOneStep);
  for (std::thread& thread : threads_) thread.join();
}

void ThreadPool::assign(int num_threads, const std::vector<int>& cpus) {
  check(num_threads, cpus);
  std::lock_guard<std::mutex> lock(assignment_mutex_);
  wanted_ = {cpus.empty() ? num_threads : static_cast<int>(cpus.size()), cpus};
  is_reassigned_ = true;
}

int ThreadPool::num_threads() const {
  std::lock_guard<std::mutex> lock(assignment_mutex_);
  return wanted_.num_threads;
}

void ThreadPool::run(const std::function<void(Lane&)>& body) {
  if (is_reassigned_.exchange(false)) adopt();
  body_ = &body;
  next_.store(0, std::memory_order_relaxed);
  if (num_lanes_ > 1) {
    const uint32_t number = step_.value() / kOneStep + 1;
    step_.set(number * kOneStep + static_cast<uint32_t>(num_lanes_));
  }
  Lane lane(*this, 0);
  body(lane);
  if (num_lanes_ > 1) meet();
}

void ThreadPool::adopt() {
  std::lock_guard<std::mutex> lock(assignment_mutex_);
  num_lanes_ = wanted_.num_threads;
  for (int index = static_cast<int>(threads_.size()) + 1; index < num_lanes_; ++index)
    start(index);
  for (size_t i = 0; i < wanted_.cpus.size(); ++i)
    pin(i == 0 ? pthread_self() : threads_[i - 1].native_handle(), wanted_.cpus[i]);
}

void ThreadPool::start(int index) {
  threads_.emplace_back([this, index, seen = step_.value()]() mutable {
    for (;;) {
      step_.wait_past(seen);
      seen = step_.value();
      if (is_ending_) return;
      if (index < static_cast<int>(seen % kOneStep)) work(index);
    }
  });
}

void ThreadPool::work(int index) {
  Lane lane(*this, index);
  (*body_)(lane);
  meet();
}

// The last to come resets what the others share before it lets them go.
void ThreadPool::meet() {
  const uint32_t generation = gate_.value();
  if (num_met_.fetch_add(1) + 1 < num_lanes_) {
    gate_.wait_past(generation);
    return;
  }
  num_met_.store(0, std::memory_order_relaxed);
  next_.store(0, std::memory_order_relaxed);
  gate_.set(generation + 1);
}

}  // namespace quire
