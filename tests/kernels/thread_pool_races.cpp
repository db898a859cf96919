// The thread pool alone, for ThreadSanitizer: lanes are lent, taken back and assigned anew while
// loops run. Ends with 1 where a piece of a loop was not done exactly once.
#include "thread_pool.h"

using quire::LaneSpec;
using quire::ThreadPool;

constexpr int kSteps = 5000;
constexpr int kLoops = 5;
constexpr int kPieces = 64;

volatile uint8_t board[4];

// Other processes write the bytes that lanes watch: no race, and nothing to be ordered by.
__attribute__((no_sanitize("thread"))) void flip(const std::atomic<bool>& is_over) {
  for (uint32_t draw = 7; !is_over;) {
    draw = draw * 1664525u + 1013904223u;
    board[(draw >> 16) & 3] = (draw >> 24) & 1;
    for (volatile uint32_t i = 0; i < (draw >> 28);) i = i + 1;
  }
}

int main() {
  const std::vector<LaneSpec> lanes{
      {-1, {}}, {-1, {}}, {-1, {&board[0]}}, {-1, {&board[1], &board[2]}}, {-1, {&board[3]}}};
  ThreadPool pool(1);
  std::atomic<bool> is_over{false};
  std::thread flipping(flip, std::cref(is_over));
  std::vector<std::atomic<int>> times_done(kPieces);
  bool is_right = true;
  for (int step = 0; step < kSteps; ++step) {
    if (step % 50 == 0) pool.assign({lanes.begin(), lanes.begin() + 1 + step / 50 % 5});
    for (auto& times : times_done) times = 0;
    pool.run([&](ThreadPool::Lane& lane) {
      for (int i = 0; i < kLoops; ++i)
        lane.loop(kPieces, 3, [&](int64_t begin, int64_t end) {
          for (; begin < end; ++begin) times_done[begin].fetch_add(1, std::memory_order_relaxed);
        });
    });
    for (auto& times : times_done) is_right = is_right && times == kLoops;
  }
  is_over = true;
  flipping.join();
  return is_right ? 0 : 1;
}
