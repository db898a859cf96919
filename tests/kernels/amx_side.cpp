// The kernels that use tiles, in the namespace QUIRE_ISA: compiled twice for amx_model.cpp, with
// the modelled instructions and with the emulation.
#include "attention/attention.h"
#include "linear/linear_tiles.h"

namespace quire::QUIRE_ISA {

void run(const LinearCall& call, int64_t num_panels, int64_t num_rows) {
  if (call.weights->kind == WeightKind::bf16)
    compute_tiled<WeightKind::bf16>(call, 0, num_panels, 0, num_rows);
  else if (call.weights->kind == WeightKind::int8)
    compute_tiled<WeightKind::int8>(call, 0, num_panels, 0, num_rows);
  else
    compute_tiled<WeightKind::int4>(call, 0, num_panels, 0, num_rows);
}

size_t scratch_bytes(const AttentionCall& call) { return attention_scratch(call); }

void run(const AttentionCall& call, const AttentionPiece& piece, void* scratch) {
  attention(call, piece, 0, call.num_kv_heads, scratch);
}

}  // namespace quire::QUIRE_ISA
