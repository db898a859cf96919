#include "decoder/decoder.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "linear/split.h"

namespace quire {
namespace {

constexpr int64_t kTokensAtOnce = 8;  // grain of loops over tokens

float widened(const void* from, Dtype dtype, int64_t i) {
  if (dtype == Dtype::f32) return static_cast<const float*>(from)[i];
  const uint32_t bits = static_cast<uint32_t>(static_cast<const bf16*>(from)[i]) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

}  // namespace

Decoder::Buffers Decoder::buffers(const Batch& batch, const Arena& arena) {
  const int64_t t = batch.num_tokens;
  Buffers b{};
  const AttentionCall attention = attention_call(batch, arena, b);
  auto scratch = static_cast<int64_t>(kernels_.attention_scratch(attention));
  for (const Layer& layer : layers_) {
    const HeadsAtOnce piece = heads_at_once(*layer.qkv, t);
    scratch = std::max(scratch, piece.heads * piece.tokens * shape_.head_dim * 4);
  }
  scratch = round_up(scratch, 64);
  b.num_tokens = t;
  b.residual_stride = spaced(shape_.hidden, sizeof(float));
  b.residual = static_cast<float*>(residual_.get(t * b.residual_stride * sizeof(float)));
  const auto has_outputs = [](const Layer& layer) { return layer.attention_out || layer.mlp_out; };
  if (std::any_of(layers_.begin(), layers_.end(), has_outputs))
    b.outputs = static_cast<float*>(outputs_.get(t * b.residual_stride * sizeof(float)));
  b.qkv_stride = spaced(shape_.qkv_size(), sizeof(float));
  if (shape_.norms_all_heads)
    b.qkv = static_cast<float*>(qkv_.get(t * b.qkv_stride * sizeof(float)));
  b.attention_stride = spaced(shape_.attention_size(), size_of(dtype_));
  b.q = q_.get(t * b.attention_stride * size_of(dtype_));
  b.attended = attended_.get(t * b.attention_stride * size_of(dtype_));
  b.gated_stride = spaced(shape_.intermediate, size_of(dtype_));
  b.gated = gated_.get(t * b.gated_stride * size_of(dtype_));
  inputs_.prepare(t, std::max({shape_.hidden, shape_.attention_size(), shape_.intermediate}));
  if (!batch.adapters.empty())
    b.plain = plain_.get(t * spaced(shape_.hidden, size_of(Dtype::bf16)) * size_of(Dtype::bf16));
  b.scratch = static_cast<char*>(scratch_.get(scratch * pool_.num_lanes()));
  b.scratch_bytes = static_cast<size_t>(scratch);
  return b;
}

// The call for every layer, without the fields that differ between layers: `attend` sets those.
AttentionCall Decoder::attention_call(const Batch& batch, const Arena& arena,
                                      const Buffers& b) const {
  AttentionCall call{};
  call.dtype = dtype_;
  call.num_heads = shape_.num_heads;
  call.num_kv_heads = shape_.num_kv_heads;
  call.head_dim = shape_.head_dim;
  call.block_size = arena.block_size;
  call.scale = shape_.attention_scale;
  call.cap = shape_.attention_cap;
  call.q = b.q;
  call.q_stride = b.attention_stride;
  call.block_tables = batch.block_tables;
  call.table_stride = batch.table_stride;
  call.cu_query_lens = batch.cu_query_lens;
  call.context_lens = batch.context_lens;
  call.out = b.attended;
  call.out_stride = b.attention_stride;
  return call;
}

void Decoder::forward(const Batch& batch, const Arena& arena, float* hidden) {
  const Buffers b = buffers(batch, arena);
  for (const Layer& layer : layers_)
    if (layer.experts) expert_step_.prepare(*layer.experts, batch.num_tokens);
  plan_.make(kernels_, attention_call(batch, arena, b), static_cast<int>(batch.num_rows),
             pool_.num_lanes());
  adapters_.begin(batch.adapters, batch.num_tokens);
  pool_.run([&](Lane& lane) {
    int64_t m = batch.num_tokens;
    embed(lane, batch, b);
    for (size_t i = 0; i < layers_.size(); ++i) {
      const Layer& layer = layers_[i];
      const Inputs x = enter(lane, layer.attention_in, m, *layer.qkv, b);
      project(lane, x, i, batch, arena, b);
      attend(lane, i, batch, arena, b);
      if (i + 1 == layers_.size() && batch.num_wanted < m) {
        // All KV is stored, so only the wanted tokens are needed from here on.
        keep_wanted(lane, batch, b);
        m = batch.num_wanted;
      }
      finish_layer(lane, i, m, b);
    }
    lane.loop(m, kTokensAtOnce, [&](int64_t begin, int64_t end) {
      const NormCall call{b.residual,    b.residual_stride,
                          shape_.hidden, final_norm_,
                          shape_.eps,    {WeightKind::f32, 0, hidden, shape_.hidden}};
      kernels_.rms_norm(call, begin, end);
    });
  });
}

void Decoder::embed(Lane& lane, const Batch& batch, const Buffers& b) {
  const int64_t width = shape_.hidden;
  lane.loop(batch.num_tokens, kTokensAtOnce, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t)
      for (int64_t i = 0; i < width; ++i)
        b.residual[t * b.residual_stride + i] =
            widened(embedding_, embedding_dtype_, batch.token_ids[t] * width + i) *
            shape_.embedding_scale;
  });
}

// Few tokens wait for weights, and their pieces are as long as a linear's. More tokens have pieces
// of as few heads as fill whole panels, whose products fit in half of L2 on any CPU.
Decoder::HeadsAtOnce Decoder::heads_at_once(const Linear& weights, int64_t m) const {
  constexpr int64_t kMostNumbers = 1 << 16, kTokens = 32;
  const int64_t size = shape_.head_dim, lanes = pool_.num_lanes();
  const int64_t least = kPanel / std::gcd(size, int64_t{kPanel}),
                num_panels = least * size / kPanel;
  const int64_t grain = linear_grain(kernels_, weights, m, static_cast<int>(lanes));
  if (m <= kFewRows) return {std::max(grain / num_panels, int64_t{1}) * least, m};
  int64_t tokens =
      std::min(kernels_.most_panel_rows(weights.kind) / num_panels, kMostNumbers / (least * size));
  tokens = std::min(tokens, shape_.num_all_heads() / least * m / (4 * lanes));
  const int64_t num_pieces = 1 + (m - 1) / std::max(tokens, kTokens);
  return {least, round_up((m + num_pieces - 1) / num_pieces, kTokens)};
}

// Computes a layer's queries, keys and values. An output of the linear for some heads of some
// tokens stays in a lane's own memory until it is normed and rotated: of many tokens, it would fill
// more than the caches.
void Decoder::project(Lane& lane, const Inputs& x, size_t index, const Batch& batch,
                      const Arena& arena, const Buffers& b) {
  const Layer& layer = layers_[index];
  QkvCall store{dtype_,
                shape_.num_heads,
                shape_.num_kv_heads,
                shape_.head_dim,
                arena.block_size,
                b.qkv,
                b.qkv_stride,
                layer.query_norm,
                layer.key_norm,
                shape_.eps,
                shape_.norms_all_heads,
                layer.rotated,
                layer.cos,
                layer.sin,
                batch.positions,
                batch.slot_mapping,
                b.q,
                b.attention_stride,
                arena.layer(static_cast<int64_t>(index))};
  const int64_t m = batch.num_tokens, num_heads = shape_.num_all_heads(), size = shape_.head_dim;
  if (shape_.norms_all_heads) {
    linear(lane, index, kQkv, *layer.qkv, x, m, Epilogue::store, b.qkv, b.qkv_stride);
    return lane.loop(m, kTokensAtOnce, [&](int64_t begin, int64_t end) {
      kernels_.qkv(store, begin, end, 0, static_cast<int>(num_heads));
    });
  }
  const HeadsAtOnce piece = heads_at_once(*layer.qkv, m);
  LinearCall call{layer.qkv, x.x, Epilogue::store, Dtype::f32, nullptr, piece.heads * size};
  if (!adapters_.empty()) adapters_.add(kernels_, lane, index, kQkv, x.plain, call);
  const int64_t num_parts = (m + piece.tokens - 1) / piece.tokens;
  lane.loop(round_up(num_heads, piece.heads) / piece.heads * num_parts, 1,
            [&](int64_t task, int64_t) {
              const int64_t head = task / num_parts * piece.heads;
              const int64_t end = std::min(head + piece.heads, num_heads);
              const int64_t token = task % num_parts * piece.tokens;
              const int64_t last = std::min(token + piece.tokens, m);
              LinearCall some = call;
              QkvCall stored = store;
              // Where the first head of the first token would be.
              float* products = reinterpret_cast<float*>(b.scratch + b.scratch_bytes * lane.index) -
                                (token * call.out_stride + head * size);
              some.out = products;
              stored.qkv = products;
              stored.qkv_stride = call.out_stride;
              kernels_.linear(some, head * size / kPanel, panels_of(end * size), token, last);
              kernels_.qkv(stored, token, last, static_cast<int>(head), static_cast<int>(end));
            });
}

void Decoder::attend(Lane& lane, size_t index, const Batch& batch, const Arena& arena,
                     const Buffers& b) {
  AttentionCall call = attention_call(batch, arena, b);
  call.window = layers_[index].window;
  call.sinks = layers_[index].sinks;
  call.kv = arena.layer(static_cast<int64_t>(index));
  lane.loop(plan_.num_tasks(), 1, [&](int64_t task, int64_t) {
    plan_.attend(kernels_, call, task, b.scratch + b.scratch_bytes * lane.index);
  });
}

// Moves the wanted rows of the residual stream and of the attention's output to the front.
void Decoder::keep_wanted(Lane& lane, const Batch& batch, const Buffers& b) {
  lane.loop(1, 1, [&](int64_t, int64_t) {
    const size_t stream = shape_.hidden * sizeof(float);
    const int64_t row = b.attention_stride * static_cast<int64_t>(size_of(dtype_));
    char* attended = static_cast<char*>(b.attended);
    for (int64_t i = 0; i < batch.num_wanted; ++i) {
      const int64_t from = batch.wanted[i];
      std::memmove(b.residual + i * b.residual_stride, b.residual + from * b.residual_stride,
                   stream);
      std::memmove(attended + i * row, attended + from * row, row);
    }
    adapters_.keep(batch.wanted, batch.num_wanted);
  });
}

void Decoder::finish_layer(Lane& lane, size_t index, int64_t m, const Buffers& b) {
  const Layer& layer = layers_[index];
  Inputs x = taken(lane, b.attended, dtype_, b.attention_stride, m, *layer.output, b);
  add(lane, index, kOutput, *layer.output, x, layer.attention_out, m, b);
  if (layer.experts) {
    const NormCall call{b.residual, b.residual_stride, shape_.hidden, layer.mlp_in, shape_.eps, {}};
    return expert_step_.add(lane, *layer.experts, call, m, b.residual, b.residual_stride);
  }
  x = enter(lane, layer.mlp_in, m, *layer.gate_up, b);
  const Epilogue gate = shape_.uses_gelu ? Epilogue::gelu_mul : Epilogue::silu_mul;
  linear(lane, index, kGateUp, *layer.gate_up, x, m, gate, b.gated, b.gated_stride);
  x = taken(lane, b.gated, dtype_, b.gated_stride, m, *layer.down, b);
  add(lane, index, kDown, *layer.down, x, layer.mlp_out, m, b);
}

// The input of the next linear, which `fill` writes to the rows that it is given.
template <typename Fill>
Decoder::Inputs Decoder::filled(const Linear& next, const Buffers& b, const Fill& fill) const {
  const Rows rows = inputs_.of(kernels_, next);
  fill(rows);
  if (adapters_.empty() || !is_quantized(rows.kind)) return {rows.read(), rows.read()};
  const Rows plain{WeightKind::bf16, 0, b.plain, spaced(shape_.hidden, size_of(Dtype::bf16))};
  fill(plain);
  return {rows.read(), plain.read()};
}

// Returns the residual stream, normed if there is a norm, as the input of the next linear.
Decoder::Inputs Decoder::enter(Lane& lane, const float* norm, int64_t m, const Linear& next,
                               const Buffers& b) {
  if (!norm) return taken(lane, b.residual, Dtype::f32, b.residual_stride, m, next, b);
  return filled(next, b, [&](const Rows& rows) {
    const NormCall call{b.residual, b.residual_stride, shape_.hidden, norm, shape_.eps, rows};
    lane.loop(m, kTokensAtOnce,
              [&](int64_t begin, int64_t end) { kernels_.rms_norm(call, begin, end); });
  });
}

// Adds a linear's output to the residual stream, after its norm if there is one.
void Decoder::add(Lane& lane, size_t layer, Site site, const Linear& weights, const Inputs& x,
                  const float* norm, int64_t m, const Buffers& b) {
  if (!norm)
    return linear(lane, layer, site, weights, x, m, Epilogue::add, b.residual, b.residual_stride);
  linear(lane, layer, site, weights, x, m, Epilogue::store, b.outputs, b.residual_stride);
  const NormCall call{b.outputs, b.residual_stride, shape_.hidden, norm, shape_.eps, {}};
  lane.loop(m, kTokensAtOnce, [&](int64_t begin, int64_t end) {
    kernels_.add_normed(call, b.residual, b.residual_stride, begin, end);
  });
}

void Decoder::linear(Lane& lane, size_t layer, Site site, const Linear& weights, const Inputs& x,
                     int64_t m, Epilogue epilogue, void* out, int64_t out_stride) {
  const Dtype out_dtype = is_gated(epilogue) ? dtype_ : Dtype::f32;
  LinearCall call{&weights, x.x, epilogue, out_dtype, out, out_stride};
  if (!adapters_.empty()) adapters_.add(kernels_, lane, layer, site, x.plain, call);
  if (epilogue == Epilogue::add) call.factor = shape_.residual_scale;
  run_linear(kernels_, pool_, lane, call, m);
}

// Returns x as the input of the next linear: as it is, or rounded or quantized if the linear reads
// another type.
Decoder::Inputs Decoder::taken(Lane& lane, const void* x, Dtype dtype, int64_t stride, int64_t m,
                               const Linear& next, const Buffers& b) {
  const bool is_f32 = dtype == Dtype::f32;
  const Activations plain{x, stride};
  if (kernels_.input_kind(next.kind) == (is_f32 ? WeightKind::f32 : WeightKind::bf16))
    return {plain, plain};
  const auto fill = [&](const Rows& rows) {
    lane.loop(m, kTokensAtOnce, [&](int64_t begin, int64_t end) {
      kernels_.quantize(x, dtype, stride, static_cast<int>(next.k), rows, begin, end);
    });
  };
  if (is_f32) return filled(next, b, fill);
  const Rows rows = inputs_.of(kernels_, next);
  fill(rows);
  return {rows.read(), plain};
}

}  // namespace quire
