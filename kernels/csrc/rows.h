#pragma once
#include "kernels.h"
#include "simd.h"
namespace quire::QUIRE_ISA {
inline void rms_norm(const NormCall&, int64_t, int64_t) {}
inline void quantize(const void*, Dtype, int64_t, int, const Rows&, int64_t, int64_t) {}
inline void qkv(const QkvCall&, int64_t, int64_t) {}
}
