#include "thread_pool.h"

#include <pthread.h>

#include <chrono>
#include <stdexcept>
#include <string>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace quire {
namespace {

constexpr auto kSpin = std::chrono::microseconds(50);

void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// A CPU may have been taken from us since it was assigned: not pinned, the lane still computes.
void pin(pthread_t thread, int cpu) {
  if (cpu < 0) return;
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  pthread_setaffinity_np(thread, sizeof set, &set);
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

ThreadPool::ThreadPool(int num_threads) {
  assign(std::vector<LaneSpec>(num_threads < 0 ? 0 : num_threads, LaneSpec{-1, {}}));
}

ThreadPool::~ThreadPool() {
  is_ending_ = true;
  for (auto& lane : threads_) {
    lane->step.set(lane->step.value() + 1);
    lane->thread.join();
  }
}

void ThreadPool::assign(std::vector<LaneSpec> lanes) {
  if (lanes.empty()) throw std::invalid_argument("a thread pool without threads");
  if (!lanes[0].owners.empty()) throw std::invalid_argument("the first lane cannot be lent");
  for (const LaneSpec& lane : lanes)
    if (lane.cpu < -1 || lane.cpu >= CPU_SETSIZE)
      throw std::invalid_argument("no CPU " + std::to_string(lane.cpu));
  lanes_ = std::move(lanes);
  while (threads_.size() + 1 < lanes_.size()) start();
  for (size_t i = 1; i < lanes_.size(); ++i)
    pin(threads_[i - 1]->thread.native_handle(), lanes_[i].cpu);
  is_pinned_ = false;
}

void ThreadPool::run(const std::function<void(Lane&)>& body) {
  if (!is_pinned_) {
    pin(pthread_self(), lanes_[0].cpu);
    is_pinned_ = true;
  }
  body_ = &body;
  next_.store(0, std::memory_order_relaxed);
  std::vector<Thread*> called;
  for (size_t i = 1; i < lanes_.size(); ++i)
    if (lanes_[i].is_free()) called.push_back(threads_[i - 1].get());
  num_active_ = 1 + static_cast<int>(called.size());
  for (Thread* thread : called) thread->step.set(thread->step.value() + 1);
  Lane lane(*this, 0, lanes_[0]);
  body(lane);
  if (num_active_ > 1) meet();
}

void ThreadPool::start() {
  threads_.push_back(std::make_unique<Thread>());
  Thread& thread = *threads_.back();
  const int index = static_cast<int>(threads_.size());
  thread.thread = std::thread([this, &thread, index] {
    for (uint32_t seen = 0;;) {
      thread.step.wait_past(seen);
      ++seen;
      if (is_ending_) return;
      work(index);
    }
  });
}

void ThreadPool::work(int index) {
  try {
    Lane lane(*this, index, lanes_[index]);
    (*body_)(lane);
    meet();
  } catch (const Left&) {
  }
}

void ThreadPool::meet() {
  const uint32_t generation = gate_.value();
  arrive();
  gate_.wait_past(generation);
}

// Nothing of the step may be touched after the others were let on.
void ThreadPool::leave() {
  num_leaving_.fetch_add(1);
  arrive();
  throw Left{};
}

void ThreadPool::arrive() {
  // Read first: once counted in, the last one may change it, and this one would take itself for the
  // last too.
  const int num_active = num_active_;
  if (num_met_.fetch_add(1) + 1 < num_active) return;
  num_active_ -= num_leaving_.exchange(0);
  num_met_.store(0, std::memory_order_relaxed);
  next_.store(0, std::memory_order_relaxed);
  gate_.set(gate_.value() + 1);
}

}  // namespace quire
