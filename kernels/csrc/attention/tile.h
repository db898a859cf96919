// Reads a tile of keys or values from its blocks into the order that the products need.
//
// Positions that no query of the call sees become zeros, whatever the arena contains. KV in int8
// becomes words of the queries' dtype, which has every byte exactly; its scales multiply scores and
// probabilities (attention/softmax.h).
#pragma once

#include "attention/kv_words.h"
#include "attention/product.h"
#include "isa/simd.h"
#include "kernels.h"

namespace quire::QUIRE_ISA {

inline constexpr int kMaxColumns = kMostHeadDim;  // a multiple of 32, see num_columns

alignas(64) inline constexpr uint32_t kZeros[kMostHeadDim] = {};

// The addresses of a tile's keys and values, by position.
struct TileRows {
  const char* keys[kTile];
  const char* values[kTile];
};

// Locates positions [begin, end) of the tile that begins at `tile`; the others point to kZeros.
inline void locate(const AttentionCall& call, int row, int kv_head, int64_t tile, int64_t begin,
                   int64_t end, TileRows& rows) {
  const int64_t head_bytes = kv_head_bytes(call.kv.is_int8, call.dtype, call.head_dim);
  const int64_t slot_bytes = call.num_kv_heads * head_bytes;
  const int32_t* table = call.block_tables + row * call.table_stride;
  const char* kv = call.kv.data + kv_head * head_bytes;
  if (begin < tile) begin = tile;
  if (end > tile + kTile) end = tile + kTile;
  for (int i = 0; i < kTile; ++i) rows.keys[i] = rows.values[i] = (const char*)kZeros;
  int64_t block = begin / call.block_size;
  int64_t offset = begin % call.block_size;
  for (int64_t position = begin; position < end; ++block, offset = 0) {
    const char* keys = kv + table[block] * call.kv.block_bytes;
    for (; offset < call.block_size && position < end; ++offset, ++position) {
      rows.keys[position - tile] = keys + offset * slot_bytes;
      rows.values[position - tile] = rows.keys[position - tile] + call.kv.value_bytes;
    }
  }
}

// Reads a tile's scales of keys or values; a position that points to kZeros has a scale of 0.
inline void read_scales(const char* const* rows, int head_dim, float* scales) {
  for (int i = 0; i < kTile; ++i) scales[i] = load<float>(rows[i] + head_dim);
}

template <int half, int lane>
inline constexpr int kEven = (lane & half) ? 16 + lane - half : lane;
template <int half, int lane>
inline constexpr int kOdd = (lane & half) ? 16 + lane : lane + half;

#define QUIRE_LANES(select)                                                                     \
  select<half, 0>, select<half, 1>, select<half, 2>, select<half, 3>, select<half, 4>,          \
      select<half, 5>, select<half, 6>, select<half, 7>, select<half, 8>, select<half, 9>,      \
      select<half, 10>, select<half, 11>, select<half, 12>, select<half, 13>, select<half, 14>, \
      select<half, 15>

// A step of transposing 16 x 16 words: in each block of 2 half x 2 half, exchanges the two
// quadrants off the diagonal.
template <int half>
inline void exchange(u32x16 (&rows)[kLanes]) {
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) {
    if (i & half) continue;
    const u32x16 a = rows[i], b = rows[i + half];
    rows[i] = __builtin_shufflevector(a, b, QUIRE_LANES(kEven));
    rows[i + half] = __builtin_shufflevector(a, b, QUIRE_LANES(kOdd));
  }
}
#undef QUIRE_LANES

// Decode is bound by memory, and the rows of one head are too far apart for the CPU's prefetcher.
// So with each line of this tile, the same line of the next tile is prefetched into L2.
inline void prefetch(const char* from) { __builtin_prefetch(from, 0, 2); }

// Reads 16 words of a head; those behind the last one are 0.
template <typename Words>
inline typename Words::Sixteen load_words(const char* head, int word, int num_words) {
  head += Words::kBytes * word;
  if (word + kLanes <= num_words) return load<typename Words::Sixteen>(head);
  typename Words::Sixteen some = {};
  std::memcpy(&some, head, Words::kBytes * (num_words - word));
  return some;
}

// Writes the keys before `end` as [words, kTile]: lanes are positions.
template <typename Words>
inline void transpose_keys(const TileRows& rows, const TileRows& next, int end, int num_words,
                           uint32_t* out) {
  for (int begin = 0; begin < computed(end); begin += kLanes) {
    const char* const* keys = rows.keys + begin;
    int word = 0;
    for (; word + kLanes <= num_words; word += kLanes) {
      u32x16 block[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
        block[i] = Words::words(load<typename Words::Sixteen>(keys[i] + Words::kBytes * word));
        prefetch(next.keys[begin + i] + Words::kBytes * word);
      }
      exchange<8>(block);
      exchange<4>(block);
      exchange<2>(block);
      exchange<1>(block);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) store(out + (word + i) * kTile + begin, block[i]);
    }
    for (int i = 0; word < num_words && i < kLanes; ++i) {
      uint32_t last[kLanes];
      store(last, Words::words(load_words<Words>(keys[i], word, num_words)));
      for (int k = 0; word + k < num_words; ++k) out[(word + k) * kTile + begin + i] = last[k];
    }
  }
}

// The number of columns of a tile of values, and of the sums of outputs. Columns are head
// dimensions, padded with zeros. In fp32 they are in order; in bf16 each 16 words give first their
// lower halves, then their upper ones.
inline int num_columns(Dtype dtype, int head_dim) {
  const int width = kLanes * per_word(dtype);
  return (head_dim + width - 1) / width * width;
}

// Writes the values before `end` as [kTile / per_word, columns]; in bf16, a word has two positions.
template <Dtype dtype, typename Words>
inline void interleave_values(const TileRows& rows, const TileRows& next, int end, int num_words,
                              uint32_t* out) {
  for (int i = 0; i < computed(end); i += per_word(dtype)) {
    for (int word = 0; word < num_words; word += kLanes) {
      const auto first = load_words<Words>(rows.values[i], word, num_words);
      prefetch(next.values[i] + Words::kBytes * word);
      if constexpr (dtype == Dtype::f32) {
        store(out, Words::words(first));
        out += kLanes;
      } else {
        const auto second = load_words<Words>(rows.values[i + 1], word, num_words);
        prefetch(next.values[i + 1] + Words::kBytes * word);
        u32x16 lower, upper;
        Words::interleave(first, second, lower, upper);
        store(out, lower);
        store(out + kLanes, upper);
        out += 2 * kLanes;
      }
    }
  }
}

// Whether no number of the words is an infinity or NaN, whose exponents are all ones. `count` is a
// multiple of 16.
template <Dtype dtype>
inline bool all_finite(const uint32_t* words, int64_t count) {
  constexpr uint32_t kEach = dtype == Dtype::f32 ? 1u << 16 : 0x10001u;  // of a word's numbers
  u32x16 carries = {};
  for (int64_t i = 0; i < count; i += kLanes)
    carries |= (load<u32x16>(words + i) & 0x7f80u * kEach) + 0x0080u * kEach;
  return !any_lane((i32x16)(carries & 0x8000u * kEach));
}

// Copies a tile of values, with 0 for positions that are not visible.
template <Dtype dtype>
inline void copy_visible(const uint32_t* values, Span visible, int num_columns, uint32_t* out) {
  constexpr int kPerWord = per_word(dtype), kBits = 32 / kPerWord;
  for (int position = 0; position < kTile; position += kPerWord) {
    uint32_t mask = 0;
    for (int i = 0; i < kPerWord; ++i)
      if (position + i >= visible.begin && position + i < visible.end)
        mask |= ~0u >> (32 - kBits) << i * kBits;
    for (int i = 0; i < num_columns; ++i) *out++ = *values++ & mask;
  }
}

// Makes every 0 positive: whether a sum of 0 is negative depends on values that its row does not
// see.
inline void unsign_zeros(float* sums, int num_columns) {
  for (int i = 0; i < num_columns; i += kLanes) store_f32(sums + i, load_f32(sums + i) + 0.0f);
}

// Divides 16 words of columns by `total` and writes them in the order of head dimensions.
template <Dtype dtype>
inline void join(const float* columns, float total, typename Word<dtype>::Element* out) {
  const f32x16 first = load_f32(columns) / total;
  if constexpr (dtype == Dtype::f32)
    store_f32(out, first);
  else
    store(out, bf16_pairs(first, load_f32(columns + kLanes) / total));
}

}  // namespace quire::QUIRE_ISA
