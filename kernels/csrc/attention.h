#pragma once
#include "kernels.h"
#include "simd.h"
namespace quire::QUIRE_ISA {
inline void attention(const AttentionCall&, int, int, int, int, void*) {}
inline size_t attention_scratch(const AttentionCall&) { return 0; }
}
