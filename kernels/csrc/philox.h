// Counter-based random numbers (Salmon et al., 2011: Philox4x64-10), laid out as
// `services/engine/philox.py` says.
#pragma once

#include <cstdint>

namespace quire {

// Uniforms 8n .. 8n + 7 of a draw, in (0, 1).
inline void uniforms(uint64_t seed, uint64_t sequence_index, uint64_t position, uint64_t n,
                     float out[8]) {
  constexpr uint64_t kMultiplier[2] = {0xD2E7470EE14C6C93u, 0xCA5A826395121157u};
  constexpr uint64_t kWeyl[2] = {0x9E3779B97F4A7C15u, 0xBB67AE8584CAA73Bu};
  constexpr float kClosestBelowOne = 1.0f - 1.0f / (1 << 24);
  uint64_t counter[4] = {n, 0, sequence_index, position};
  uint64_t key[2] = {seed, 0};
  for (int round = 0; round < 10; ++round) {
    const auto a = static_cast<unsigned __int128>(kMultiplier[0]) * counter[0];
    const auto b = static_cast<unsigned __int128>(kMultiplier[1]) * counter[2];
    counter[0] = static_cast<uint64_t>(b >> 64) ^ counter[1] ^ key[0];
    counter[1] = static_cast<uint64_t>(b);
    counter[2] = static_cast<uint64_t>(a >> 64) ^ counter[3] ^ key[1];
    counter[3] = static_cast<uint64_t>(a);
    key[0] += kWeyl[0];
    key[1] += kWeyl[1];
  }
  for (int i = 0; i < 8; ++i) {
    const auto half = static_cast<uint32_t>(counter[i / 2] >> (32 * (i % 2)));
    const float number = (static_cast<float>(half) + 0.5f) * 0x1p-32f;
    out[i] = number < kClosestBelowOne ? number : kClosestBelowOne;
  }
}

}  // namespace quire
