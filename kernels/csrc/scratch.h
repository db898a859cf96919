// Memory that grows and is kept: no allocation in a step of a size that was seen before.
#pragma once

#include <cstdlib>
#include <new>

namespace quire {

class Scratch {
 public:
  Scratch() = default;
  ~Scratch() { std::free(memory_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  // At least `size` bytes, 64-byte aligned; what was in it is lost. std::bad_alloc.
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

}  // namespace quire
