// Memory that grows and is kept: a step allocates only if it is larger than all before it.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <new>

namespace quire {

class Scratch {
 public:
  Scratch() = default;
  ~Scratch() { std::free(memory_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  // Returns at least `size` bytes, 64-byte aligned; growing loses the content. std::bad_alloc.
  void* get(size_t size) {
    if (size <= size_) return memory_;
    std::free(memory_);
    size_ = 0;
    const size_t rounded = (size + 63) / 64 * 64;
    memory_ = std::aligned_alloc(64, rounded);
    if (memory_ == nullptr) throw std::bad_alloc();
    size_ = rounded;
    return memory_;
  }

 private:
  void* memory_ = nullptr;
  size_t size_ = 0;
};

// The stride of rows, in elements: an odd number of cache lines. At a stride of a power of two, the
// rows of a tile would compete for the same few cache sets of L1.
inline int64_t spaced(int64_t width, size_t size) {
  const int64_t line = 64 / static_cast<int64_t>(size);
  return ((width + line - 1) / line | 1) * line;
}

}  // namespace quire
