// Runs the kernels for AMX on the model of its instructions (amx_model.h), with memory that is
// exactly as large as the kernels' interface says. Scratch memory is NaN at first, and no output
// may be.
#define QUIRE_ISA modelled
#define QUIRE_EMULATES_AMX
#include "amx_model.h"

#include <cmath>
#include <limits>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "attention/attention.h"
#include "linear/linear_tiles.h"

namespace quire {
namespace {

std::mt19937 generator(1);
int num_wrong = 0;

bf16 random_bf16() {
  std::normal_distribution<float> normal;
  const float value = normal(generator) * std::exp2(4 * normal(generator));
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return static_cast<bf16>(bits >> 16);
}

void expect(bool is_right, const char* what, int size) {
  if (is_right) return;
  std::fprintf(stderr, "%s of %d rows is not finite\n", what, size);
  ++num_wrong;
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
  std::vector<float> out(size_t{1} * m * n, 1.0f);
  const LinearCall call{&weights, {x.data(), num_values}, Epilogue::add, Dtype::f32, out.data(), n};
  if (kind == WeightKind::bf16)
    modelled::compute_tiled<WeightKind::bf16>(call, 0, num_panels, 0, m);
  else if (kind == WeightKind::int8)
    modelled::compute_tiled<WeightKind::int8>(call, 0, num_panels, 0, m);
  else
    modelled::compute_tiled<WeightKind::int4>(call, 0, num_panels, 0, m);
  bool is_finite = true;
  for (float value : out) is_finite &= std::isfinite(value);
  const char* names[] = {"an fp32 linear", "a bf16 linear", "an int8 linear", "an int4 linear"};
  expect(is_finite, names[static_cast<int>(kind)], m);
}

// The number that a product with denormals flushed to 0 reads or writes.
float flushed(float value) {
  return std::fabs(value) < std::numeric_limits<float>::min() ? std::copysign(0.0f, value) : value;
}

float flushed(bf16 value) {
  const uint32_t bits = uint32_t{value} << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof wide);
  return flushed(wide);
}

// One product of tiles has the bits of the order in isa/tiles.h, written out for one sum at a time.
void check_product(int rows, int columns, int steps) {
  uint8_t config[64] = {1};
  const int shapes[][2] = {{rows, 4 * columns}, {rows, 4 * steps}, {steps, 4 * columns}};
  for (int i = 0; i < 3; ++i) {
    config[48 + i] = static_cast<uint8_t>(shapes[i][0]);
    config[16 + 2 * i] = static_cast<uint8_t>(shapes[i][1]);
  }
  std::vector<bf16> x(rows * steps * 2), w(steps * columns * 2);
  for (auto* all : {&x, &w})
    for (size_t i = 0; i < all->size(); ++i)
      (*all)[i] = i % 16 == 5 ? generator() & 0x807f : random_bf16();  // some are denormal
  std::vector<float> sums(rows * columns, 0.1f), expected = sums;
  modelled::amx_model::load_config(config);
  modelled::amx_model::load(0, sums.data(), 4 * columns);
  modelled::amx_model::load(1, x.data(), 4 * steps);
  modelled::amx_model::load(2, w.data(), 4 * columns);
  modelled::amx_model::multiply_bf16(0, 1, 2);
  modelled::amx_model::store(0, sums.data(), 4 * columns);
  modelled::amx_model::release();
  for (int row = 0; row < rows; ++row)
    for (int column = 0; column < columns; ++column) {
      float chains[2] = {0.0f, 0.0f};
      for (int step = 0; step < steps; ++step)
        for (int half = 0; half < 2; ++half)
          chains[half] =
              flushed(std::fmaf(flushed(x[(row * steps + step) * 2 + half]),
                                flushed(w[(step * columns + column) * 2 + half]), chains[half]));
      float& sum = expected[row * columns + column];
      sum = flushed(sum + flushed(chains[0] + chains[1]));
    }
  if (std::memcmp(sums.data(), expected.data(), sums.size() * sizeof(float)) == 0) return;
  std::fprintf(stderr, "a product of %d steps has other bits\n", steps);
  ++num_wrong;
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
  std::vector<bf16> out(queries * width);
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
                           out.data(),
                           width};
  const size_t size = modelled::attention_scratch(call);
  void* scratch = std::aligned_alloc(64, (size + 63) / 64 * 64);
  std::memset(scratch, 0xff, size);  // NaN
  const int row = 0;
  modelled::attention(call, {&row, 1, 0, 0, queries}, 0, heads.num_kv, scratch);
  std::free(scratch);
  bool is_finite = true;
  for (int64_t i = 0; i < (is_spoilt ? queries - 2 : queries) * width; ++i)
    is_finite &= (out[i] & 0x7f80) != 0x7f80;
  expect(is_finite, "attention", queries);
}

}  // namespace
}  // namespace quire

int main() {
  using namespace quire;
  for (int steps = 1; steps <= 16; ++steps)
    check_product(16 - steps / 3, 8 + steps / 16 * 8, steps);
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
  return num_wrong == 0 && !modelled::amx_model::is_configured ? 0 : 1;
}
