// Quantized panels into steps of bf16 pairs, as tiles read them: group scale * (code - zero point),
// rounded once. The scale of an output is left to the epilogue.
#pragma once

#include "isa/dot.h"
#include "isa/simd.h"
#include "kernels.h"

namespace quire::QUIRE_ISA {

inline f32x16 half_lanes(const uint16_t* from) {
  vf32 parts[kLanes / kWide];
  for (int i = 0; i < kLanes / kWide; ++i) parts[i] = load_half(from + i * kWide);
  f32x16 lanes;
  std::memcpy(&lanes, parts, sizeof lanes);
  return lanes;
}

#if defined(__AVX512VBMI__)

// The bytes of a step that become lanes: for each of 8 columns from `first` on, the two bytes that
// have a pair's codes. A code becomes byte `place` of its lane.
struct PairBytes {
  alignas(64) uint8_t of_lanes[64] = {};

  constexpr PairBytes(int first, int pair, int place) {
    for (int lane = 0; lane < kLanes; ++lane)
      of_lanes[4 * lane + place] =
          static_cast<uint8_t>(4 * (first + lane / 2) + pair + 2 * (lane % 2));
  }
};

// The weights of 16 columns of a step: lanes are the two K values of a pair of one column, then
// of the next, so that a rounded vector is what a product takes.
template <WeightKind kind>
class PairedWeights {
 public:
  PairedWeights(f32x16 scale, f32x16 zero)
      : scales_{doubled(scale, 0), doubled(scale, 8)}, zeros_{doubled(zero, 0), doubled(zero, 8)} {
    // A code of int8 is the highest byte of a lane, which keeps its sign.
    if constexpr (kind == WeightKind::int8)
      for (f32x16& each : scales_) each *= 0x1p-24f;
  }

  // Writes the pairs of a step's codes, kStepBytes apart.
  void write(u32x16 codes, char* to) const {
    if constexpr (kind == WeightKind::int8) {
      write_pair<0>(codes, to);
      write_pair<1>(codes, to + kStepBytes);
    } else {
      const u32x16 low = codes & 0x0f0f0f0fu, high = codes >> 4 & 0x0f0f0f0fu;
      write_pair<0>(low, to);
      write_pair<0>(high, to + kStepBytes);
      write_pair<1>(low, to + 2 * kStepBytes);
      write_pair<1>(high, to + 3 * kStepBytes);
    }
  }

 private:
  static constexpr int kPlace = kind == WeightKind::int8 ? 3 : 0;

  static f32x16 doubled(f32x16 columns, int first) {
    const i32x16 lanes = {0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7};
    return (f32x16)_mm512_permutexvar_ps((__m512i)(lanes + first), (__m512)columns);
  }

  template <int pair>
  void write_pair(u32x16 codes, char* to) const {
    static constexpr PairBytes kFirst(0, pair, kPlace), kSecond(8, pair, kPlace);
    const f32x16 first = weights(codes, kFirst, 0), second = weights(codes, kSecond, 1);
    store(to, (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first));
  }

  f32x16 weights(u32x16 codes, const PairBytes& bytes, int half) const {
    const __m512i lanes = _mm512_maskz_permutexvar_epi8(
        0x1111111111111111u << kPlace, load<__m512i>(bytes.of_lanes), (__m512i)codes);
    const f32x16 code = __builtin_convertvector((i32x16)lanes, f32x16);
    return (kind == WeightKind::int4 ? code - zeros_[half] : code) * scales_[half];
  }

  f32x16 scales_[2], zeros_[2];
};

#else

// The codes of K values 2 i and 2 i + 1 of 16 columns, from the 4 bytes of each.
template <WeightKind kind>
inline void take_pair(u32x16 words, int i, f32x16& even, f32x16& odd) {
  i32x16 low, high;
  if constexpr (kind == WeightKind::int8) {
    low = (i32x16)(words << (i == 0 ? 24 : 16)) >> 24;
    high = (i32x16)(words << (i == 0 ? 8 : 0)) >> 24;
  } else {
    low = (i32x16)(words >> 4 * i & 15u);
    high = (i32x16)(words >> (4 * i + 16) & 15u);
  }
  even = __builtin_convertvector(low, f32x16);
  odd = __builtin_convertvector(high, f32x16);
}

template <WeightKind kind>
class PairedWeights {
 public:
  PairedWeights(f32x16 scale, f32x16 zero) : scale_(scale), zero_(zero) {}

  void write(u32x16 codes, char* to) const {
    for (int i = 0; i < lane_values(kind) / 2; ++i, to += kStepBytes) {
      f32x16 even, odd;
      take_pair<kind>(codes, i, even, odd);
      store(to, bf16_pairs((even - zero_) * scale_, (odd - zero_) * scale_));
    }
  }

 private:
  const f32x16 scale_, zero_;
};

#endif

// Writes the K values [begin, end) of a panel: `begin` is a multiple of a run, and the last run is
// written whole.
template <WeightKind kind>
inline void unpack(const Linear& linear, int64_t panel, int64_t begin, int64_t end, char* to) {
  constexpr int64_t kStepPairBytes = lane_values(kind) / 2 * kStepBytes;
  constexpr int64_t kFarBytes = 4096, kNearBytes = 1024;  // fetched ahead into L2 and L1
  const int run = run_values(kind, linear.group), num_groups = run / linear.group;
  const int num_steps = linear.group / lane_values(kind);
  const int64_t run_bytes = (1 + num_groups * num_steps) * kStepBytes;
  const int64_t panel_bytes = (linear.k + run - 1) / run * run_bytes;
  const char* from =
      static_cast<const char*>(linear.panels) + panel * panel_bytes + begin / run * run_bytes;
  for (int64_t k = begin; k < end; k += run, from += run_bytes) {
    const auto* header = reinterpret_cast<const uint16_t*>(from);
    for (int group = 0; group < num_groups; ++group, to += num_steps * kStepPairBytes) {
      for (int half = 0; half < 2; ++half) {
        const PairedWeights<kind> weights(
            half_lanes(header + group * kPanel + half * kLanes),
            kind == WeightKind::int4 ? half_lanes(header + kPanel + half * kLanes) : f32x16{});
        const char* codes = from + (1 + group * num_steps) * kStepBytes + half * sizeof(u32x16);
        for (int step = 0; step < num_steps; ++step, codes += kStepBytes) {
          __builtin_prefetch(codes + kFarBytes, 0, 2);
          __builtin_prefetch(codes + kNearBytes);
          weights.write(load<u32x16>(codes), to + step * kStepPairBytes + half * sizeof(u32x16));
        }
      }
    }
  }
}

}  // namespace quire::QUIRE_ISA
