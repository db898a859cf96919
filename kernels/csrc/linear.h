#pragma once
#include "kernels.h"
#include "simd.h"
namespace quire::QUIRE_ISA {
inline void linear(const LinearCall&, int64_t, int64_t, int64_t, int64_t) {}
}
