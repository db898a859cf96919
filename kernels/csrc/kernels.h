// The kernels that exist once per instruction set, as a table of functions: what each computes,
// over which memory, and which slice of it one call does. Nothing here allocates, starts threads or
// throws; whoever calls splits the work (thread_pool.h) and has checked the arguments.
//
// Law: a row's result never depends on how the work was split, nor on the other rows. Every output
// element is accumulated by one thread, in one order.
//
// Letters: M rows (tokens), N outputs, K inputs of a linear; T tokens, H query heads, G key/value
// heads, D head size.
#pragma once

#include <cstddef>
#include <cstdint>

namespace quire {

using bf16 = uint16_t;

enum class Dtype : int { f32 = 0, bf16 = 1 };
inline size_t size_of(Dtype dtype) { return dtype == Dtype::f32 ? 4 : 2; }

// ---- linear ------------------------------------------------------------------------------------

enum class WeightKind : int { f32 = 0, bf16 = 1, int8 = 2 };

inline constexpr int kPanel = 32;  // columns (outputs) of a panel

// K values that a lane takes at once: one float, a pair of bf16, four bytes.
inline int group_of(WeightKind kind) {
  return kind == WeightKind::f32 ? 1 : kind == WeightKind::bf16 ? 2 : 4;
}

// Weights [N, K] as panels [ceil(N / 32)][ceil(K / group)][32][group]; what is behind N or K is 0.
// One step of one panel is 128 bytes, so that a panel is one stream, read from front to back.
// int8: weight = scale[n] * value; `sums[n]` is the sum of the values over K, because activations
// are stored with an offset of 128. bias: fp32 [N padded to 32], or null.
struct Linear {
  WeightKind kind;
  int64_t n;
  int64_t k;
  const void* panels;
  const float* scales;  // int8 only, [N padded]
  const int32_t* sums;  // int8 only, [N padded]
  const float* bias;
};

// Row m of the input: K elements at data + m * stride (elements, padded with 0 to a multiple of the
// group). f32 for f32 weights, bf16 for bf16, and for int8: unsigned bytes q with
// x = scale[m] * (q - 128).
struct Activations {
  const void* data;
  int64_t stride;
  const float* scales;  // int8 only, [M]
};

// What becomes of y = x W^T + bias (fp32).
enum class Epilogue : int {
  store_f32 = 0,  // out[m, n] = y
  store_bf16 = 1,
  add_f32 = 2,  // out[m, n] += y: the residual stream
  // Panels are 16 columns of `gate` and the same 16 of `up`:
  silu_mul_f32 = 3,  // out[m, j] = silu(gate_j) * up_j
  silu_mul_bf16 = 4,
  // Of rows below `num_best`: best[m] = the largest y of the columns of this call and its column,
  // of equal ones the first (a NaN is larger than anything, as for torch.argmax). Of the others:
  // out[m - num_best, n] = y.
  best_or_f32 = 5,
};

struct Best {
  float value;
  int32_t index;
};

struct LinearCall {
  const Linear* weights;
  Activations x;
  Epilogue epilogue;
  void* out;           // see Epilogue
  int64_t out_stride;  // elements
  Best* best = nullptr;
  int64_t num_best = 0;
};

// ---- attention ---------------------------------------------------------------------------------

// Shapes and meaning as `kvops.ops.Backend.paged_attention`; strides in elements, heads and head
// dimensions contiguous. A step of the online softmax is `kTile` positions, aligned at position 0,
// whatever the block size: block by block in block order, the same for every query.
inline constexpr int kTile = 64;
inline constexpr int kMostHeadDim = 256;  // and even

struct AttentionCall {
  Dtype dtype;  // of q, kv and out
  int num_heads, num_kv_heads, head_dim, block_size;
  int window;     // positions that a query sees, its own included; 0: all
  float scale;    // positive
  const void* q;  // [T, H, D]
  int64_t q_stride;
  const void* kv;                      // keys of block 0 of this layer
  int64_t block_stride, value_offset;  // to the next block; from a block's keys to its values
  const int32_t* block_tables;         // [B, table_stride]
  int64_t table_stride;
  const int32_t* cu_query_lens;  // [B + 1]
  const int32_t* context_lens;   // [B]
  void* out;                     // [T, H, D]
  int64_t out_stride;
};

// Queries [query_begin, query_end) of one row, counted from its first. Or several rows of one query
// each, whose positions below `shared`, a multiple of kTile, lie in the same blocks.
struct AttentionPiece {
  const int* rows;
  int num_rows, shared;
  int query_begin, query_end;
};

// (Query, head) pairs that are kept beside a tile of one head's keys and values: enough that
// reading and reordering the tile is a small part of the work, few enough that their queries and
// sums stay in L2. A multiple of every register block (attention_product.h).
inline constexpr int kAttentionRows = 192;
// And that are kept between what rows share and what each has alone, of all heads of a call.
inline constexpr int kTogetherRows = 512;

// ---- rows --------------------------------------------------------------------------------------

// How the linear that comes next wants its input.
struct Rows {
  WeightKind kind;
  void* data;  // f32, bf16 or bytes, [M, stride]
  int64_t stride;
  float* scales;  // int8 only, [M]
};

struct NormCall {
  const float* x;  // [M, width]: the residual stream
  int64_t stride;
  int width;
  const float* weight;
  float eps;
  Rows out;
};

// From the output of the fused query/key/value linear, fp32 [T, (H + 2 G) * D], to queries as
// attention takes them and keys and values in their slots: norm of queries and keys (weights may be
// null), rotation (GPT-NeoX halves), store. Slot -1: nowhere.
struct QkvCall {
  Dtype dtype;  // of q and kv
  int num_heads, num_kv_heads, head_dim, block_size;
  const float* qkv;
  int64_t qkv_stride;
  const float* query_norm;  // [D], or null
  const float* key_norm;
  float eps;
  const float* cos;  // [positions, D / 2]
  const float* sin;
  const int64_t* positions;     // [T]
  const int64_t* slot_mapping;  // [T]
  void* q;                      // [T, H, D]
  int64_t q_stride;
  void* kv;  // as in AttentionCall
  int64_t block_stride, value_offset;
};

// ---- sampling ----------------------------------------------------------------------------------

inline constexpr int kLogitChunk = 64;
inline constexpr int kUniforms = 64;  // made at once

// What a draw's random numbers are a function of.
struct DrawKey {
  uint64_t seed, sequence_index, position;
};

struct Kernels {
  const char* name;

  // One linear over panels [panel_begin, panel_end) and rows [row_begin, row_end).
  void (*linear)(const LinearCall&, int64_t panel_begin, int64_t panel_end, int64_t row_begin,
                 int64_t row_end);
  // Weights into panels [panel_begin, panel_end): row n is the K values, f32 or bf16, at rows[n],
  // zeros where that is null. int8 fills scales and sums too: scale = largest |w| / 127.
  void (*pack)(const Linear&, const void* const* rows, Dtype dtype, int64_t panel_begin,
               int64_t panel_end);

  // A piece, of all query heads of the key/value heads [head_begin, head_end): together at most
  // kAttentionRows query heads, and kTogetherRows times the piece's rows, if those are several.
  // `scratch` has `attention_scratch` bytes, 64-byte aligned.
  void (*attention)(const AttentionCall&, const AttentionPiece&, int head_begin, int head_end,
                    void* scratch);
  size_t (*attention_scratch)(const AttentionCall&);

  void (*rms_norm)(const NormCall&, int64_t row_begin, int64_t row_end);
  // fp32 or bf16 rows into bytes with a scale per row: q = round(x / scale) + 128,
  // scale = largest |x| / 127.
  void (*quantize)(const void* x, Dtype dtype, int64_t stride, int width, const Rows& out,
                   int64_t row_begin, int64_t row_end);
  void (*qkv)(const QkvCall&, int64_t token_begin, int64_t token_end);

  // Of a row of n logits: the largest of each chunk (NaN if there is one). Of one chunk of n of
  // them: scaled = (x - largest) / temperature and powers = e^scaled, [kLogitChunk] each; -inf and
  // 0 behind n.
  void (*largest)(const float* x, int64_t n, float* chunks);
  void (*exp_scaled)(const float* x, int64_t n, float largest, float temperature, float* scaled,
                     float* powers);
  // Of a row of n logits: the sum of powers of each chunk, without those of less than `threshold`
  // scaled.
  void (*masses)(const float* x, int64_t n, float largest, float temperature, float threshold,
                 float* chunks);
  // Of a row of n logits those not below `bound`, in their order, and how many they are; `chunks`:
  // the largest of each chunk. `kept` has room for n and a chunk.
  int64_t (*keep)(const float* x, int64_t n, const float* chunks, float bound, float* kept);
  // Numbers [kUniforms * block, kUniforms * (block + 1)) of a draw, in (0, 1).
  void (*uniforms)(const DrawKey&, int64_t block, float* numbers);
};

// The table for each instruction set that this build has; null where it has not.
const Kernels* portable_kernels();
const Kernels* avx2_kernels();
const Kernels* avx512_kernels();
const Kernels* avx512_bf16_kernels();

}  // namespace quire
