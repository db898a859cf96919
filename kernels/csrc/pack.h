#pragma once
#include "kernels.h"
#include "simd.h"
namespace quire::QUIRE_ISA {
inline void pack(const Linear&, const void*, Dtype, int64_t, int64_t, int64_t) {}
}
