// Runs the kernels for AMX on the model of its instructions (amx_model.h) and on the emulation, and
// compares all outputs bit by bit. Memory is exactly as large as the kernels' interface says.
#include "amx_model.h"

#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "kernels.h"

namespace quire {

#define QUIRE_SIDE(isa)                                              \
  namespace isa {                                                    \
  void run(const LinearCall&, int64_t num_panels, int64_t num_rows); \
  void run(const AttentionCall&, const AttentionPiece&, void*);      \
  size_t scratch_bytes(const AttentionCall&);                        \
  }
QUIRE_SIDE(modelled)
QUIRE_SIDE(emulated)
#undef QUIRE_SIDE

namespace {

std::mt19937 generator(1);
int num_different = 0;

bf16 random_bf16() {
  std::normal_distribution<float> normal;
  const float value = normal(generator) * std::exp2(4 * normal(generator));
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return static_cast<bf16>(bits >> 16);
}

template <typename T>
void compare(const std::vector<T>& a, const std::vector<T>& b, const char* what, int size) {
  if (std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0) return;
  std::fprintf(stderr, "%s of %d rows differs\n", what, size);
  ++num_different;
}

// Positive fp16 numbers below 1.
uint32_t random_halves() { return generator() & 0x3aff3affu; }

// `group`: of quantized weights, which become tiles of bf16; so their inputs are bf16 too.
void check_linear(WeightKind kind, int group, int m, int n, int k) {
  const int64_t num_panels = (n + kPanel - 1) / kPanel, steps = panel_steps(kind, k, group);
  std::vector<uint32_t> panels(num_panels * steps * kPanel);
  const int run_steps = is_quantized(kind) ? 1 + run_values(kind, group) / lane_values(kind) : 0;
  for (size_t i = 0; i < panels.size(); ++i) {
    const bool is_header = run_steps && i / kPanel % run_steps == 0;
    panels[i] = is_header            ? random_halves()
                : is_quantized(kind) ? generator()
                                     : random_bf16() | random_bf16() << 16;
  }
  const std::vector<float> scales(num_panels * kPanel, 0.01f);
  const Linear weights{kind, n, k, group, panels.data(), scales.data(), scales.data()};
  const int64_t multiple = input_multiple(weights);
  const int64_t num_values = (k + multiple - 1) / multiple * multiple;  // of a row
  std::vector<bf16> x(m * num_values);
  for (bf16& value : x) value = random_bf16();
  std::vector<float> out[2];
  for (int side = 0; side < 2; ++side) {
    out[side].assign(size_t{1} * m * n, 1.0f);
    const LinearCall call{&weights, {x.data(), num_values}, Epilogue::add_f32, out[side].data(), n};
    side == 0 ? modelled::run(call, num_panels, m) : emulated::run(call, num_panels, m);
  }
  const char* names[] = {"an fp32 linear", "a bf16 linear", "an int8 linear", "an int4 linear"};
  compare(out[0], out[1], names[static_cast<int>(kind)], m);
}

struct Heads {
  int num, num_kv, dim, block_size;
};

// `queries` new tokens at the end of `context` positions. The value before the last is NaN if
// `is_spoilt`: only the last two queries see it.
void check_attention(Heads heads, int queries, int context, int window, bool is_spoilt) {
  const int num_blocks = (context + heads.block_size - 1) / heads.block_size;
  const int64_t slot = int64_t{heads.num_kv} * heads.dim, width = int64_t{heads.num} * heads.dim;
  const int64_t values = heads.block_size * slot, block = 2 * values;
  std::vector<bf16> kv(num_blocks * block), q(queries * width);
  for (auto* all : {&kv, &q})
    for (bf16& value : *all) value = random_bf16();
  const int last = context - 2;
  if (is_spoilt)
    for (int i = 0; i < slot; ++i)
      kv[last / heads.block_size * block + values + last % heads.block_size * slot + i] = 0x7fc0;
  std::vector<int32_t> table(num_blocks);
  for (int i = 0; i < num_blocks; ++i) table[i] = i;
  const int32_t query_lens[] = {0, queries}, context_len = context;
  std::vector<bf16> out[2];
  for (int side = 0; side < 2; ++side) {
    out[side].assign(queries * width, 0);
    const AttentionCall call{Dtype::bf16,
                             heads.num,
                             heads.num_kv,
                             heads.dim,
                             heads.block_size,
                             window,
                             0.01f,
                             nullptr,
                             0.0f,
                             q.data(),
                             width,
                             {reinterpret_cast<char*>(kv.data()), false, 2 * block, 2 * values},
                             table.data(),
                             num_blocks,
                             query_lens,
                             &context_len,
                             out[side].data(),
                             width};
    const size_t size = side == 0 ? modelled::scratch_bytes(call) : emulated::scratch_bytes(call);
    void* scratch = std::aligned_alloc(64, (size + 63) / 64 * 64);
    std::memset(scratch, 0xff, size);  // NaN
    const int row = 0;
    const AttentionPiece piece{&row, 1, 0, 0, queries};
    side == 0 ? modelled::run(call, piece, scratch) : emulated::run(call, piece, scratch);
    std::free(scratch);
  }
  compare(out[0], out[1], "attention", queries);
  for (int64_t i = 0; i < (queries - 2) * width; ++i)
    if ((out[0][i] & 0x7fff) > 0x7f80) {
      std::fprintf(stderr, "a query sees NaN behind it\n");
      ++num_different;
      return;
    }
}

}  // namespace
}  // namespace quire

int main() {
  using namespace quire;
  const std::pair<WeightKind, int> kinds[] = {{WeightKind::bf16, 0},
                                              {WeightKind::int8, 16},
                                              {WeightKind::int8, 32},
                                              {WeightKind::int4, 64}};
  for (const auto& [kind, group] : kinds) {
    for (int m : {1, 2, 15, 16, 17, 31, 32, 33, 48, 65})
      for (int k : {1, 33, 64, 77, 600, 1037}) check_linear(kind, group, m, 70, k);
    for (int m : {255, 257, 290}) check_linear(kind, group, m, 290, 1037);
  }
  check_attention({4, 2, 128, 16}, 60, 200, 0, false);
  check_attention({8, 1, 20, 16}, 40, 130, 50, false);
  check_attention({3, 3, 96, 7}, 1, 150, 0, false);
  check_attention({4, 1, 64, 16}, 30, 100, 0, true);
  check_attention({8, 1, 64, 16}, 70, 600, 0, false);  // several tiles of positions and of rows
  check_attention({2, 1, 32, 16}, 10, 520, 300, true);
  for (int context : {2, 31, 64, 97, 150, 550})  // decode steps
    for (int group = 1; group <= 8; ++group) {
      check_attention({2 * group, 2, 32, 16}, 1, context, 0, false);
      check_attention({group, 1, 128, 32}, 1, context, 50, context > 60);
    }
  std::printf("%ld configurations, %ld products\n", amx_model::num_configured,
              amx_model::num_products);
  return num_different == 0 && amx_model::num_products > 0 && !amx_model::is_configured ? 0 : 1;
}
