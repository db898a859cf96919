// The thread pool alone, for ThreadSanitizer: lanes are lent, taken back and assigned anew while
// loops run. Its arguments: the most lanes, and the number of steps. Ends with 1 where a piece of a
// loop was not done exactly once, with 2 where a lane did not leave a step, or did not come back to
// it, and with 3 where a lane took no part in a step.
#include <cstdlib>

#include "threads/thread_pool.h"

using quire::Backlog;
using quire::LaneSpec;
using quire::ThreadPool;

constexpr int kLoops = 5;
constexpr int kPieces = 64;

int32_t board[4];

void set_backlog(int owner, int32_t num_sequences) {
  __atomic_store_n(&board[owner], num_sequences, __ATOMIC_RELEASE);
  if (num_sequences == 0) Backlog(&board[owner]).wake();
}

// As other processes do.
void flip(const std::atomic<bool>& is_over) {
  for (uint32_t draw = 7; !is_over;) {
    draw = draw * 1664525u + 1013904223u;
    set_backlog((draw >> 16) & 3, (draw >> 24) & 1);
    for (volatile uint32_t i = 0; i < (draw >> 28);) i = i + 1;
  }
}

// One step: in the first loop both lanes work, each waits for the other one; in the second the lent
// one is gone; before the third it is free again.
bool leaves_and_comes_back() {
  ThreadPool pool(1);
  pool.assign({{-1, {}}, {-1, {Backlog(&board[0])}}});
  std::atomic<int> num_done[3][2] = {};
  std::atomic<bool> is_right{true};
  const auto wait_for = [&](const std::atomic<int>& num) {
    for (int i = 0; i < 10000 && num == 0; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (num == 0) is_right = false;
  };
  pool.run([&](ThreadPool::Lane& lane) {
    for (int i = 0; i < 3; ++i)
      lane.loop(kPieces, 1, [&](int64_t begin, int64_t) {
        ++num_done[i][lane.index];
        if (i != 1) wait_for(num_done[i][1 - lane.index]);
        if (i == 0 && lane.index == 0) set_backlog(0, 1);
        if (i == 1 && begin == kPieces - 1) set_backlog(0, 0);
      });
  });
  return is_right && num_done[1][1] == 0;
}

// In every step each lane takes one piece, and holds it until all lanes have one.
bool all_take_part(int num_lanes) {
  ThreadPool pool(num_lanes);
  for (int step = 0; step < 3; ++step) {
    std::atomic<int> num_begun{0};
    pool.run([&](ThreadPool::Lane& lane) {
      lane.loop(num_lanes, 1, [&](int64_t, int64_t) {
        ++num_begun;
        for (int i = 0; i < 10000 && num_begun < num_lanes; ++i)
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
      });
    });
    if (num_begun != num_lanes) return false;
  }
  return true;
}

std::vector<LaneSpec> own_and_lent(int num_lanes) {
  std::vector<LaneSpec> lanes(num_lanes, LaneSpec{-1, {}});
  for (int i = 2; i < num_lanes; ++i) {
    if (i % 5 == 2) lanes[i].owners = {Backlog(&board[0])};
    if (i % 5 == 3) lanes[i].owners = {Backlog(&board[1]), Backlog(&board[2])};
    if (i % 5 == 4) lanes[i].owners = {Backlog(&board[3])};
  }
  return lanes;
}

// Ends pools whose threads have just begun to look for a step: each has to see the end.
void end_at_once(int num_pools) {
  for (int i = 0; i < num_pools; ++i) {
    ThreadPool pool(3);
    for (volatile int j = 0; j < i % 500; ++j);
  }
}

int main(int, char** arguments) {
  const int most = std::atoi(arguments[1]), num_steps = std::atoi(arguments[2]);
  if (!leaves_and_comes_back()) return 2;
  if (!all_take_part(most)) return 3;
  end_at_once(num_steps);
  const std::vector<LaneSpec> lanes = own_and_lent(most);
  ThreadPool pool(1);
  std::atomic<bool> is_over{false};
  std::thread flipping(flip, std::cref(is_over));
  std::vector<std::atomic<int>> times_done(kPieces);
  bool is_right = true;
  for (int step = 0; step < num_steps; ++step) {
    if (step % 50 == 0) pool.assign({lanes.begin(), lanes.begin() + 1 + step / 50 * 7 % most});
    for (auto& times : times_done) times = 0;
    pool.run([&](ThreadPool::Lane& lane) {
      for (int i = 0; i < kLoops; ++i)
        lane.loop(i == 2 ? 1 : kPieces, 3, [&](int64_t begin, int64_t end) {
          for (; begin < end; ++begin) times_done[begin].fetch_add(1, std::memory_order_relaxed);
        });
    });
    for (auto& times : times_done)
      is_right = is_right && times == kLoops - (&times != &times_done[0]);
  }
  is_over = true;
  flipping.join();
  return is_right ? 0 : 1;
}
