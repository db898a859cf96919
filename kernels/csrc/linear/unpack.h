// Quantized panels into steps of bf16 pairs, as tiles read them: group scale * (code - zero point),
// rounded once. The scale of an output is left to the epilogue.
#pragma once

#include "isa/dot.h"
#include "isa/simd.h"
#include "kernels.h"

namespace quire::QUIRE_ISA {

// Pairs of bf16: the even values in the low halves.
inline u32x16 bf16_pairs(f32x16 even, f32x16 odd) {
  uint16_t halves[2][kLanes];
  store_bf16(halves[0], even);
  store_bf16(halves[1], odd);
  const auto wide = [](const uint16_t* from) {
    return __builtin_convertvector(load<u16x16>(from), u32x16);
  };
  return wide(halves[0]) | wide(halves[1]) << 16;
}

inline f32x16 half_lanes(const uint16_t* from) {
  vf32 parts[kLanes / kWide];
  for (int i = 0; i < kLanes / kWide; ++i) parts[i] = load_half(from + i * kWide);
  f32x16 lanes;
  std::memcpy(&lanes, parts, sizeof lanes);
  return lanes;
}

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

// Writes the K values [begin, end) of a panel: `begin` is a multiple of a run, and the last run is
// written whole.
template <WeightKind kind>
inline void unpack(const Linear& linear, int64_t panel, int64_t begin, int64_t end, char* to) {
  constexpr int kPairs = lane_values(kind) / 2;
  const int run = run_values(kind, linear.group), num_groups = run / linear.group;
  const int num_steps = linear.group / lane_values(kind);
  const int64_t run_bytes = (1 + num_groups * num_steps) * kStepBytes;
  const int64_t panel_bytes = (linear.k + run - 1) / run * run_bytes;
  const char* from =
      static_cast<const char*>(linear.panels) + panel * panel_bytes + begin / run * run_bytes;
  for (int64_t k = begin; k < end; k += run, from += run_bytes) {
    __builtin_prefetch(from + 2 * run_bytes);
    const auto* header = reinterpret_cast<const uint16_t*>(from);
    for (int group = 0; group < num_groups; ++group) {
      for (int half = 0; half < 2; ++half) {
        const f32x16 scale = half_lanes(header + group * kPanel + half * kLanes);
        const f32x16 zero =
            kind == WeightKind::int4 ? half_lanes(header + kPanel + half * kLanes) : f32x16{};
        const char* codes = from + (1 + group * num_steps) * kStepBytes + half * sizeof(u32x16);
        char* out = to + half * sizeof(u32x16);
        for (int step = 0; step < num_steps; ++step, codes += kStepBytes)
          for (int i = 0; i < kPairs; ++i, out += kStepBytes) {
            f32x16 even, odd;
            take_pair<kind>(load<u32x16>(codes), i, even, odd);
            if constexpr (kind == WeightKind::int4) even -= zero, odd -= zero;
            store(out, bf16_pairs(even * scale, odd * scale));
          }
      }
      to += num_steps * kPairs * kStepBytes;
    }
  }
}

}  // namespace quire::QUIRE_ISA
