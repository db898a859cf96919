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

// A lent lane sleeps at most this long: its owner may die without waking it, or the lanes may be
// assigned anew.
constexpr auto kLongestSleep = std::chrono::milliseconds(100);

void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

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

void Signal::set(uint32_t value) {
  value_.store(value);
  if (num_sleeping_.load() == 0) return;
  std::lock_guard<std::mutex> lock(mutex_);
  changed_.notify_all();
}

void Signal::wait_for(uint32_t value) {
  const auto limit = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < 64; ++i) {
      if (has_reached(value)) return;
      relax();
    }
  } while (std::chrono::steady_clock::now() < limit);
  std::unique_lock<std::mutex> lock(mutex_);
  num_sleeping_.fetch_add(1);
  changed_.wait(lock, [&] { return has_reached(value); });
  num_sleeping_.fetch_sub(1);
}

ThreadPool::ThreadPool(int num_threads) {
  assign(std::vector<LaneSpec>(num_threads < 0 ? 0 : num_threads, LaneSpec{-1, {}}));
}

ThreadPool::~ThreadPool() {
  is_ending_ = true;
  started_.set(started_.value() + 1);
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
  }
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
  first_ = state_.load().generation;
  next_.store(0, std::memory_order_relaxed);
  state_.store(State{first_, 1, 0});
  if (lanes_->size() > 1) started_.set(started_.value() + 1);
  Lane lane(*this, 0, lanes_->front(), 0);
  body(lane);
  meet(true);
}

void ThreadPool::start() {
  const int index = static_cast<int>(threads_.size()) + 1;
  threads_.emplace_back([this, index] { work(index); });
}

void ThreadPool::work(int index) {
  while (!is_ending_) {
    const uint32_t step = started_.value();
    const std::shared_ptr<const Lanes> lanes = this->lanes();
    if (index >= static_cast<int>(lanes->size())) {
      started_.wait_for(step + 1);
      continue;
    }
    const LaneSpec& spec = (*lanes)[index];
    State joined;
    if (const Backlog* owner = spec.busy_owner()) {
      if (const int32_t backlog = owner->value()) owner->wait_past(backlog, kLongestSleep);
    } else if (!join(joined)) {
      started_.wait_for(step + 1);
    } else {
      try {
        Lane lane(*this, index, spec, joined.generation - first_);
        (*body_)(lane);
        meet(true);
      } catch (const Left&) {
      }
    }
  }
}

std::shared_ptr<const ThreadPool::Lanes> ThreadPool::lanes() {
  std::lock_guard<std::mutex> lock(mutex_);
  return lanes_;
}

// False: no step is running. Waits while a loop is being closed: it may be the step's last one.
bool ThreadPool::join(State& joined) {
  State state = state_.load();
  for (;;) {
    if (state.num_active == 0) return false;
    if (state.is_closing()) {
      relax();
      state = state_.load();
      continue;
    }
    joined = {state.generation, static_cast<uint16_t>(state.num_active + 1), state.num_met};
    if (state_.compare_exchange_weak(state, joined)) return true;
  }
}

void ThreadPool::meet(bool is_last) {
  State state = state_.load(), met;
  do {
    met = {state.generation, state.num_active, static_cast<uint16_t>(state.num_met + 1)};
  } while (!state_.compare_exchange_weak(state, met));
  if (met.is_closing()) return close(met, is_last);
  gate_.wait_for(met.generation + 1);
}

// A lane that has left must not touch anything of the step: the others may finish it at any time.
void ThreadPool::leave() {
  State state = state_.load(), left;
  do {
    left = {state.generation, static_cast<uint16_t>(state.num_active - 1), state.num_met};
  } while (!state_.compare_exchange_weak(state, left));
  if (left.is_closing()) close(left, false);
  throw Left{};
}

// The last lane for which the others wait calls this.
void ThreadPool::close(State state, bool is_last) {
  const uint32_t next = state.generation + 1;
  next_.store(0, std::memory_order_relaxed);
  const uint16_t num_active = is_last ? 0 : state.num_active;
  state_.store(State{next, num_active, 0});
  gate_.set(next);
}

}  // namespace quire
