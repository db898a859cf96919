// A decoder-only transformer without its head: one call computes one step of a batch, all layers,
// without Python in between. A feature that a family of models lacks is null, 0 or 1 here.
//
// The residual stream is fp32. A linear's input is rounded to the weights' kind (fp32, bf16, or
// bytes with a scale for each token); queries are fp32 beside fp32 weights and otherwise bf16, as
// keys and values are unless the arena has them in int8. Buffers grow to the largest batch so far
// and are kept.
#pragma once

#include <vector>

#include "attention/plan.h"
#include "decoder/adapters.h"
#include "decoder/experts.h"
#include "kernels.h"
#include "linear/input_rows.h"
#include "scratch.h"
#include "threads/thread_pool.h"

namespace quire {

// Norms are [hidden], or null: `attention_in` and `mlp_in` of a sublayer's inputs, the others of
// its outputs before they are added to the residual stream.
struct Layer {
  const float* attention_in;
  const Linear* qkv;        // [(H + 2 G) * D, hidden]
  const float* query_norm;  // see QkvCall
  const float* key_norm;
  const Linear* output;  // [hidden, H * D]
  const float* attention_out;
  const float* mlp_in;
  const Linear* gate_up;   // panels of 16 gate and 16 up columns, see Epilogue::silu_mul
  const Linear* down;      // [hidden, intermediate]
  const Experts* experts;  // instead of gate_up and down, which are null then; or null
  const float* mlp_out;
  const float* sinks;  // [H], see AttentionCall; or null
  int window;          // positions that a query sees; 0: all
  int rotated;         // dimensions of a head; 0: none
  const float* cos;    // [positions, rotated / 2]
  const float* sin;
};

struct Shape {
  int hidden, num_heads, num_kv_heads, head_dim, intermediate, vocab;
  float eps;
  float attention_scale, attention_cap;   // see AttentionCall
  float embedding_scale, residual_scale;  // factors of embeddings and of sublayers' outputs
  bool norms_all_heads, uses_gelu;        // see QkvCall and Epilogue

  int num_all_heads() const { return num_heads + 2 * num_kv_heads; }
  int qkv_size() const { return num_all_heads() * head_dim; }
  int attention_size() const { return num_heads * head_dim; }
};

// [num_blocks, num_layers, 2, block_size, G, D], or with D + kScaleBytes bytes in int8.
struct Arena {
  KvLayer first;  // layer
  int64_t layer_bytes;
  int block_size;

  KvLayer layer(int64_t index) const {
    KvLayer layer = first;
    layer.data += index * layer_bytes;
    return layer;
  }
};

// T tokens of B rows, as in `services.engine.models.Batch`.
struct Batch {
  int64_t num_tokens, num_rows;
  const int64_t* token_ids;     // [T]
  const int64_t* positions;     // [T]
  const int64_t* slot_mapping;  // [T]
  const int32_t* block_tables;  // [B, table_stride]
  int64_t table_stride;
  const int32_t* cu_query_lens;  // [B + 1]
  const int32_t* context_lens;   // [B]
  const int64_t* wanted;         // [num_wanted], ascending: tokens whose final states are needed
  int64_t num_wanted;
  std::vector<AdapterRun> adapters;  // of the last tokens; those before have none
};

class Decoder {
 public:
  Decoder(const Kernels& kernels, ThreadPool& pool, Shape shape, std::vector<Layer> layers,
          const void* embedding, Dtype embedding_dtype, const float* final_norm)
      : kernels_(kernels),
        pool_(pool),
        shape_(shape),
        layers_(std::move(layers)),
        dtype_(layers_[0].qkv->kind == WeightKind::f32 ? Dtype::f32 : Dtype::bf16),
        embedding_(embedding),
        embedding_dtype_(embedding_dtype),
        final_norm_(final_norm),
        expert_step_(kernels, pool) {}

  // Writes the final, normed states, fp32 [num_wanted, hidden], to `hidden`, and the new tokens' KV
  // to the arena.
  void forward(const Batch& batch, const Arena& arena, float* hidden);

 private:
  using Lane = ThreadPool::Lane;

  struct Buffers {
    int64_t num_tokens;
    int64_t residual_stride, qkv_stride, attention_stride, gated_stride;
    float* residual;  // [T, hidden]
    float* outputs;   // [T, hidden], as the residual stream: a sublayer's, before their norm
    float* qkv;       // [T, qkv_size], if a token's heads have one norm together
    void* q;          // [T, H * D], fp32 or bf16
    void* attended;   // [T, H * D], fp32 or bf16
    void* gated;      // [T, intermediate], fp32 or bf16
    void* plain;      // [T, hidden], bf16: beside `inputs_` that are quantized, for adapters
    char* scratch;    // per lane
    size_t scratch_bytes;
  };

  // A piece of the computation of queries, keys and values.
  struct HeadsAtOnce {
    int64_t heads, tokens;
  };

  // The input of a linear, and what adapters read of it: the same, unless it is quantized.
  struct Inputs {
    Activations x, plain;
  };

  Buffers buffers(const Batch& batch, const Arena& arena);
  AttentionCall attention_call(const Batch& batch, const Arena& arena, const Buffers& b) const;
  void embed(Lane& lane, const Batch& batch, const Buffers& b);
  HeadsAtOnce heads_at_once(const Linear& weights, int64_t m) const;
  void project(Lane& lane, const Inputs& x, size_t index, const Batch& batch, const Arena& arena,
               const Buffers& b);
  void attend(Lane& lane, size_t index, const Batch& batch, const Arena& arena, const Buffers& b);
  void keep_wanted(Lane& lane, const Batch& batch, const Buffers& b);
  void finish_layer(Lane& lane, size_t index, int64_t m, const Buffers& b);
  template <typename Fill>
  Inputs filled(const Linear& next, const Buffers& b, const Fill& fill) const;
  Inputs enter(Lane& lane, const float* norm, int64_t m, const Linear& next, const Buffers& b);
  // `layer`, `site`: which linear it is, for adapters.
  void add(Lane& lane, size_t layer, Site site, const Linear& weights, const Inputs& x,
           const float* norm, int64_t m, const Buffers& b);
  void linear(Lane& lane, size_t layer, Site site, const Linear& weights, const Inputs& x,
              int64_t m, Epilogue epilogue, void* out, int64_t out_stride);
  Inputs taken(Lane& lane, const void* x, Dtype dtype, int64_t stride, int64_t m,
               const Linear& next, const Buffers& b);

  const Kernels& kernels_;
  ThreadPool& pool_;
  const Shape shape_;
  const std::vector<Layer> layers_;
  const Dtype dtype_;      // of queries and of what linears take from attention and the gate
  const void* embedding_;  // [vocab, hidden]
  const Dtype embedding_dtype_;
  const float* final_norm_;
  AttentionPlan plan_;
  ExpertStep expert_step_;
  Adapters adapters_;
  InputRows inputs_;  // of the next linear
  Scratch residual_, outputs_, qkv_, q_, attended_, gated_, plain_, scratch_;
};

}  // namespace quire
