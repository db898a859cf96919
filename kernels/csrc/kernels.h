// The table of kernels, which are compiled once for each instruction set. A call computes a slice
// of the work, given by its begin and end arguments. The kernels do not allocate, start threads or
// throw; their callers split the work (threads/thread_pool.h) and check the arguments.
//
// Law: a row's result never depends on how the work was split, nor on the other rows. One thread
// accumulates an output element, in one order.
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

enum class WeightKind : int { f32 = 0, bf16 = 1, int8 = 2, int4 = 3 };

inline constexpr int kPanel = 32;  // columns (outputs) of a panel
inline int64_t panels_of(int64_t num_columns) { return (num_columns + kPanel - 1) / kPanel; }

// The number of K values in the 4 bytes of a vector lane: one float, two bf16, four bytes or eight
// nibbles.
inline constexpr int lane_values(WeightKind kind) {
  return kind == WeightKind::f32    ? 1
         : kind == WeightKind::bf16 ? 2
         : kind == WeightKind::int8 ? 4
                                    : 8;
}

// Whether weights are codes with scales. Their inputs are 16-bit integers with a scale for each
// row, unless the kernels compute with tiles (see `Kernels::input_kind`).
inline constexpr bool is_quantized(WeightKind kind) { return kind >= WeightKind::int8; }

// Bytes of one element of a linear's input.
inline constexpr int input_bytes(WeightKind kind) { return kind == WeightKind::f32 ? 4 : 2; }

// A group of quantized weights: K values of an output that share a scale. int4 has groups of 32, 64
// or 128, with a zero point; int8 has groups of 16 or 32.
inline constexpr int kLeastGroup = 32, kMostGroup = 128;  // of int4

// The K values between two headers of a panel of quantized weights: one group of int4, two of int8.
inline constexpr int run_values(WeightKind kind, int group) {
  return kind == WeightKind::int4 ? group : 2 * group;
}

// Weights [N, K], packed by `kvops.native`, as panels [ceil(N / 32)][ceil(K / values)][32][values],
// padded with zeros, where `values` are the lane_values. One step of one panel is 128 bytes, so
// that a panel is one stream, read from front to back. bias: fp32 [N padded to 32], or null.
//
// Quantized weights lie in runs, and K is padded to whole runs with codes of 0. A run begins with a
// header, a step of its own, of 64 fp16 numbers. int8: weight = scale[n] * group scale * code; the
// header has the scales of the run's first group for each column, then of its second. A
// column's four bytes in a step are the codes of K values 0, 2, 1, 3.
//
// int4: weight = scale[n] * group scale * (code - zero point); the header has 32 scales and 32 zero
// points. A column's eight nibbles in a step, from the lowest, are the codes of K values 0, 2, 4,
// 6, 1, 3, 5, 7. So a shift and a mask give pairs of neighbouring values as 16-bit numbers.
struct Linear {
  WeightKind kind;
  int64_t n;
  int64_t k;
  int group;  // int8 and int4
  const void* panels;
  const float* scales;  // int8 and int4, [N padded]
  const float* bias;
};

// The multiple to which the inputs of a linear are padded.
inline int64_t input_multiple(const Linear& linear) {
  return is_quantized(linear.kind) ? run_values(linear.kind, linear.group)
                                   : lane_values(linear.kind);
}

// The number of steps of a panel, headers included.
inline int64_t panel_steps(WeightKind kind, int64_t k, int group) {
  const int values = lane_values(kind);
  if (!is_quantized(kind)) return (k + values - 1) / values;
  const int run = run_values(kind, group);
  return (k + run - 1) / run * (1 + run / values);
}

// The input of a linear. Row m is K elements at data + m * stride (in elements), padded with 0 to
// the input multiple. Elements are f32 for f32 weights, bf16 for bf16 weights, and signed 16-bit
// integers q for quantized weights, with x = scale[m] * q, or bf16 (see `Kernels::input_kind`).
struct Activations {
  const void* data;
  int64_t stride;
  const float* scales = nullptr;  // of quantized inputs, [M]
  const float* sums = nullptr;    // int4 only: the sums of q over each group, [M, sums_stride]
  int64_t sums_stride = 0;
};

// An adapter's part in a linear (LoRA): y += B (A x). Both are fp32 beside fp32 linears, else bf16.
struct LowRank {
  const void* down;       // A [rank, k]
  int64_t rank, k;        // a multiple of kRanks; the linear's inputs
  const Linear* up;       // B [N, a part of the ranks]; null: the adapter has no part in it
  const int32_t* firsts;  // of each 16 columns of a panel: the first rank that their B is for
};
inline constexpr int kRanks = 4;  // of A that are computed at once

// The parts of several adapters in a linear.
struct LowRanks {
  const LowRank* const* of_row = nullptr;  // the parts that a row's adapter has, or null; or null
  int64_t site = 0;                        // which of these is the one in the linear
  const void* z = nullptr;                 // A x: fp32 or bf16 [M, z_stride]
  int64_t z_stride = 0;

  const LowRank* of(int64_t row) const {
    if (!of_row || !of_row[row] || !of_row[row][site].up) return nullptr;
    return &of_row[row][site];
  }
};

// The ways in which a linear uses its result y = x W^T + bias (fp32).
enum class Epilogue : int {
  store,  // out[m, n] = y
  add,    // out[m, n] += y: the residual stream
  // With panels of 16 columns of `gate` and the same 16 of `up`:
  silu_mul,  // out[m, j] = silu(gate_j) * up_j
  gelu_mul,  // out[m, j] = gelu(gate_j) * up_j, gelu by its approximation with tanh
  // g = min(gate_j, limit), u = clamp(up_j, -limit, limit): out[m, j] = g / (1 + e^(-alpha g)) (u +
  // 1)
  swiglu,
  // For rows below `num_best`: best[m] = the largest y among the columns of this call, and its
  // column; the first of equal ones (a NaN is larger than all numbers, as in torch.argmax). For the
  // other rows: out[m - num_best, n] = y.
  best_or_store,
};

inline constexpr bool is_gated(Epilogue e) {
  return e == Epilogue::silu_mul || e == Epilogue::gelu_mul || e == Epilogue::swiglu;
}

struct Best {
  float value;
  int32_t index;
};

struct LinearCall {
  const Linear* weights;
  Activations x;
  Epilogue epilogue;
  Dtype out_dtype;
  void* out;           // see Epilogue
  int64_t out_stride;  // elements
  Best* best = nullptr;
  int64_t num_best = 0;
  // store, add and best_or_store multiply y by `factor`, and then bound it by the soft cap `cap`
  // (0: none): cap * tanh(y / cap).
  float factor = 1.0f, cap = 0.0f;
  float alpha = 0.0f, limit = 0.0f;  // of swiglu
  LowRanks added = {};
};

// ---- keys and values ---------------------------------------------------------------------------

// A layer's keys and values in the arena. A position's heads are contiguous. A head is its D
// elements, of the dtype of the queries; or, if `is_int8`, D signed bytes q and an fp32 scale, with
// x = scale * q.
struct KvLayer {
  char* data;  // keys of block 0
  bool is_int8;
  int64_t block_bytes;  // from block to block
  int64_t value_bytes;  // from a block's keys to its values
};
inline constexpr int kScaleBytes = 4;

// Bytes from head to head.
inline int64_t kv_head_bytes(bool is_int8, Dtype dtype, int head_dim) {
  return is_int8 ? head_dim + kScaleBytes : head_dim * static_cast<int64_t>(size_of(dtype));
}

// ---- attention ---------------------------------------------------------------------------------

// Shapes and meaning are as in `kvops.ops.Backend.paged_attention`; strides are in elements,
// heads and head dimensions contiguous. A step of the online softmax takes a tile of positions,
// aligned at position 0 for every block size, in order and alike for every query.
inline constexpr int kMostHeadDim = 256;  // head sizes are also even

struct AttentionCall {
  Dtype dtype;  // of q and out
  int num_heads, num_kv_heads, head_dim, block_size;
  int window;   // positions that a query sees, its own included; 0: all
  float scale;  // positive
  // [H], or null: a score without a value in each query's softmax, an attention sink.
  const float* sinks;
  float cap;      // soft cap of the scaled scores: cap * tanh(score / cap); 0: none
  const void* q;  // [T, H, D]
  int64_t q_stride;
  KvLayer kv;
  const int32_t* block_tables;  // [B, table_stride]
  int64_t table_stride;
  const int32_t* cu_query_lens;  // [B + 1]
  const int32_t* context_lens;   // [B]
  void* out;                     // [T, H, D]
  int64_t out_stride;
};

// The part of a batch that one call computes: queries [query_begin, query_end) of one row, counted
// from the row's first; or several rows of one query each, whose positions below `shared` are in
// the same blocks.
struct AttentionPiece {
  const int* rows;
  int num_rows, shared;
  int query_begin, query_end;
};

// The most (query, head) pairs of a call, over all its heads, whose sums over the shared positions
// are kept until each row continues alone.
inline constexpr int kTogetherRows = 512;

// ---- rows --------------------------------------------------------------------------------------

// The output of a row kernel, in the form that the next linear reads (see Activations).
struct Rows {
  WeightKind kind;  // as `Kernels::input_kind` says
  int group;        // int8 and int4
  void* data;       // f32, bf16 or 16-bit integers, [M, stride]
  int64_t stride;
  float* scales = nullptr;  // int8 and int4, [M]
  float* sums = nullptr;    // int4 only, [M, sums_stride]
  int64_t sums_stride = 0;

  Activations read() const {
    return {data, stride, is_quantized(kind) ? scales : nullptr, sums, sums_stride};
  }
};

struct NormCall {
  const float* x;  // [M, width]: the residual stream
  int64_t stride;
  int width;
  const float* weight;
  float eps;
  Rows out;
};

// Turns the output of the fused query/key/value linear, fp32 [T, (H + 2 G) * D], into queries for
// attention, and into keys and values in their slots: norm of queries and keys (unless the weights
// are null), rotation of the first `rotated` dimensions of a head (GPT-NeoX halves), store. Slot
// -1: keys and values are not stored.
struct QkvCall {
  Dtype dtype;  // of q
  int num_heads, num_kv_heads, head_dim, block_size;
  const float* qkv;
  int64_t qkv_stride;
  const float* query_norm;  // [D], or null; if `norms_all_heads`, [H * D]
  const float* key_norm;    // [D], or null; if `norms_all_heads`, [G * D]
  float eps;
  bool norms_all_heads;  // a token's heads have one norm together
  int rotated;           // even; 0: no rotation
  const float* cos;      // [positions, rotated / 2]
  const float* sin;
  const int64_t* positions;     // [T]
  const int64_t* slot_mapping;  // [T]
  void* q;                      // [T, H, D]
  int64_t q_stride;
  KvLayer kv;
};

// ---- sampling ----------------------------------------------------------------------------------

inline constexpr int kLogitChunk = 64;
inline constexpr int kUniforms = 64;  // random numbers of one call

// The weight of a token whose logit is x: floor(2^40 * e^scaled), scaled = (x - largest) /
// temperature. It has at most 24 significant bits. Below kLeastScaled it is 0.
inline constexpr int kWeightBits = 40;
inline constexpr float kLeastScaled = -30.0f;

// The key of a draw: the draw's random numbers are a function of it.
struct DrawKey {
  uint64_t seed, sequence_index, position;
};

struct Kernels {
  const char* name;

  // Computes a linear for panels [panel_begin, panel_end) and rows [row_begin, row_end).
  void (*linear)(const LinearCall&, int64_t panel_begin, int64_t panel_end, int64_t row_begin,
                 int64_t row_end);
  // Computes kRanks of A x, from `rank` on, of rows [row_begin, row_end): z as in `LowRanks`.
  void (*shrink)(const LowRank&, const Activations& x, int64_t rank, void* z, int64_t z_stride,
                 int64_t row_begin, int64_t row_end);
  // The most panels times rows of such a call, for many rows: it takes about a millisecond.
  int64_t (*most_panel_rows)(WeightKind);
  // The form in which a linear of this kind reads its inputs: f32 or bf16, or the kind itself,
  // which stands for 16-bit integers. Kernels with tiles read bf16 for quantized weights too.
  WeightKind (*input_kind)(WeightKind);

  // Computes a piece for all query heads of the key/value heads [head_begin, head_end). These are
  // at most `attention_rows` query heads; if the piece has several rows, query heads times rows are
  // at most kTogetherRows. `scratch` has `attention_scratch` bytes, 64-byte aligned.
  void (*attention)(const AttentionCall&, const AttentionPiece&, int head_begin, int head_end,
                    void* scratch);
  size_t (*attention_scratch)(const AttentionCall&);
  // The positions of a tile; pieces share whole ones.
  int attention_tile;
  // The most (query, head) pairs that are computed with one tile of one head's keys and values.
  int attention_rows;

  void (*rms_norm)(const NormCall&, int64_t row_begin, int64_t row_end);
  // Adds the normed rows to rows of `sums` with this stride; `NormCall::out` is not used.
  void (*add_normed)(const NormCall&, float* sums, int64_t stride, int64_t row_begin,
                     int64_t row_end);
  // Converts fp32 or bf16 rows to the kind of the output. 16-bit integers have a scale for each
  // row: q = round(x / scale), with scale = largest |x| / 32,767.
  void (*quantize)(const void* x, Dtype dtype, int64_t stride, int width, const Rows& out,
                   int64_t row_begin, int64_t row_end);
  // Heads [head_begin, head_end) of the H + 2 G; all of them if they have one norm together.
  void (*qkv)(const QkvCall&, int64_t token_begin, int64_t token_end, int head_begin, int head_end);

  // `largest`: the largest logit of each chunk of a row of n logits; NaN if the chunk has one.
  void (*largest)(const float* x, int64_t n, float* chunks);
  // Writes e^(x - largest) of one chunk of n logits to `powers`, [kLogitChunk], and 0 behind n.
  void (*exponentials)(const float* x, int64_t n, float largest, float* powers);
  // Computes `scaled` = (x - largest) / temperature of one chunk of n logits, and its weights. Both
  // are [kLogitChunk], with -inf and 0 behind n.
  void (*weigh)(const float* x, int64_t n, float largest, float temperature, float* scaled,
                float* weights);
  // The sum of the weights of each chunk of a row of n logits, without those whose scaled logit is
  // less than `threshold`.
  void (*masses)(const float* x, int64_t n, float largest, float temperature, float threshold,
                 int64_t* chunks);
  // Writes the logits of a row of n that are not less than `bound` to `kept`, in order, and returns
  // their number. `chunks` has the largest logit of each chunk. `kept` has room for n logits and a
  // chunk.
  int64_t (*keep)(const float* x, int64_t n, const float* chunks, float bound, float* kept);
  // Writes random numbers [kUniforms * block, kUniforms * (block + 1)) of a draw, each in (0, 1).
  void (*uniforms)(const DrawKey&, int64_t block, float* numbers);
};

// The tables, one for each instruction set; the build decides which of them exist.
const Kernels* portable_kernels();
const Kernels* avx2_kernels();
const Kernels* avx512_kernels();
const Kernels* avx512_bf16_kernels();
const Kernels* amx_kernels();
const Kernels* amx_emulated_kernels();  // the same results as `amx`, for tests

}  // namespace quire
