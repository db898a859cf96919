// Attention of one query over some of its key/value heads. One query has too few rows to justify a
// reordered tile in memory, so keys and values go from the arena straight into registers, in the
// order of their addresses: 16 positions of all heads, then the next 16. (The positions of one head
// are a power of two apart and would compete for the same few sets of L1.) Prefetching is one such
// piece ahead.
//
// Each element is computed by the same operations, in the same order, as in attention/attention.h,
// so that both give the same bits.
//
// With AMX, a piece's keys are an operand of the products as they lie in the arena, and pieces are
// fetched two ahead, because a product of values takes two.
//
// This path needs AVX-512 or tiles, bf16, head sizes that are multiples of 32, groups of up to 8
// heads, and block sizes that are multiples of 16.
#pragma once

#include "attention/columns.h"
#include "attention/layout.h"
#include "attention/softmax.h"
#include "attention/tile.h"
#include "isa/simd.h"
#include "kernels.h"

namespace quire::QUIRE_ISA {

#if defined(__AVX512F__) || defined(QUIRE_TILES)
inline constexpr int kPiece = 16;  // positions, all in one block
inline constexpr int kPieces = kTile / kPiece;

// Prefetches a piece line by line, in the order of its addresses. This order also starts the CPU's
// own prefetcher, which can have more requests in flight than a program. The lines go into L2,
// because two pieces of all heads do not fit into L1.
struct Fetch {
  const char* row;
  int64_t stride, num_bytes;  // from row to row; length of a row
  int64_t offset = 0;

  void some(int num_lines) {
    for (int i = 0; i < num_lines; ++i) {
      __builtin_prefetch(row + offset, 0, 2);
      offset += 64;
      if (offset >= num_bytes) {
        offset = 0;
        row += stride;
      }
    }
  }
};

inline u32x16 splat_u32(uint32_t value) { return value - u32x16{}; }

struct DecodeScratch {
#if defined(QUIRE_TILES)
  uint32_t* tile;     // [16, head_dim / 2] keys that were in int8; then [16, head_dim] values
  uint32_t* queries;  // [heads, words, group]
#endif
  float* scores;            // [heads, group, kTile]
  uint32_t* probabilities;  // [heads, group, kTile / 2], pairs of bf16
  float* sums;              // [heads, group, head_dim]
  SoftmaxState* states;     // [heads, group]
  float* corrections;       // [heads, group]
};

template <int group, bool is_int8>
class DecodeQuery {
 public:
  DecodeQuery(const AttentionCall& call, int row, int head_begin, int head_end,
              const DecodeScratch& scratch)
      : call_(call),
        at_(scratch),
        num_heads_(head_end - head_begin),
        first_head_(head_begin * group),
        num_words_(call.head_dim / 2),
        head_bytes_(kv_head_bytes(is_int8, Dtype::bf16, call.head_dim)),
        stride_(int64_t{call.num_kv_heads} * head_bytes_),
        table_(call.block_tables + row * call.table_stride),
        end_(call.context_lens[row]),
        begin_(call.window > 0 && end_ > call.window ? end_ - call.window : 0),
        kv_(call.kv.data + head_begin * head_bytes_),
        queries_(reinterpret_cast<const uint32_t*>(static_cast<const bf16*>(call.q) +
                                                   call.cu_query_lens[row] * call.q_stride +
                                                   head_begin * group * call.head_dim)),
        out_(static_cast<bf16*>(call.out) + call.cu_query_lens[row] * call.out_stride +
             head_begin * group * call.head_dim) {}

  void attend(const Begun& begun) {
    const int num_rows = num_heads_ * group;
    const size_t num_bytes = sizeof(float) * num_rows * call_.head_dim;
#if defined(QUIRE_TILES)
    arrange_queries();
#endif
    int tile = begin_ / kTile * kTile;
    if (begun.end > 0) {
      std::memcpy(at_.states, begun.states, sizeof(SoftmaxState) * num_rows);
      std::memcpy(at_.sums, begun.sums, num_bytes);
      tile = begun.end;
    } else {
      for (int row = 0; row < num_rows; ++row) at_.states[row] = {kLowest, {}};
      std::memset(at_.sums, 0, num_bytes);
    }
    for (; tile < end_; tile += kTile) {
      const Span seen = {begin_ > tile ? begin_ - tile : 0,
                         end_ - tile < kTile ? end_ - tile : kTile};
      weigh(tile, seen);
      add_values(tile, seen);
    }
    for (int row = 0; row < num_rows; ++row) {
      float* sums = at_.sums + row * call_.head_dim;
      if constexpr (kTiled<Dtype::bf16>) unsign_zeros(sums, call_.head_dim);
      const float total = total_of(call_, at_.states[row], first_head_ + row);
      for (int i = 0; i < call_.head_dim; i += 2 * kLanes)
        join<Dtype::bf16>(sums + i, total, out_ + row * call_.head_dim + i);
    }
  }

 private:
  static constexpr int kHeads = group <= 3 ? 2 : 1;  // at once, so that no sum waits for itself
  static constexpr int kWords = is_int8 ? 8 : 4;     // of a row, at once
  using Words = HeadWords<Dtype::bf16, is_int8>;

  // The address of the keys at `position`, or of the last piece for a position behind the end.
  const char* keys(int position) const {
    if (position >= end_) position = (end_ - 1) / kPiece * kPiece;
    const int64_t block = table_[position / call_.block_size] * call_.kv.block_bytes;
    return kv_ + block + position % call_.block_size * stride_;
  }
  const char* values(int position) const { return keys(position) + call_.kv.value_bytes; }

  // Computes the probabilities of the tile's positions.
  void weigh(int tile, Span seen) {
    const int end = tile + seen.end;
    for (int piece = tile + seen.begin / kPiece * kPiece; piece < end; piece += kPiece) {
      const char* from = keys(piece);
      float* scores = at_.scores + piece - tile;
      int head = 0;
#if defined(QUIRE_TILES)
      Fetch fetch = two_ahead(tile, (piece - tile) / kPiece);
      for (; head < num_heads_; ++head) score(from, fetch, head, scores);
    }
#else
      // after the last piece of keys comes the tile's first piece of values
      const char* next =
          piece + kPiece < end ? keys(piece + kPiece) : values(tile + seen.begin / kPiece * kPiece);
      Fetch fetch{next, stride_, num_heads_ * head_bytes_};
      for (; head + kHeads <= num_heads_; head += kHeads) score<kHeads>(from, fetch, head, scores);
      for (; head < num_heads_; ++head) score<1>(from, fetch, head, scores);
    }
#endif
    Span spans[kLanes];
    for (Span& span : spans) span = seen;
    // The rows of a head share its scales.
    const int num_rows = num_heads_ * group, at_once = is_int8 ? group : kLanes;
    TileScales scales;
    for (int row = 0; row < num_rows; row += at_once) {
      if constexpr (is_int8) read_scales(tile, seen, row / group, scales);
      softmax_step<Dtype::bf16>(at_.scores + row * kTile, is_int8 ? &scales : nullptr,
                                score_scale(call_), spans, at_.states + row,
                                num_rows - row < at_once ? num_rows - row : at_once,
                                at_.probabilities + row * (kTile / 2), at_.corrections + row);
    }
  }

  // Reads the scales of a head at the visible positions of a tile; the others are 0.
  void read_scales(int tile, Span seen, int head, TileScales& scales) const {
    scales = {};
    for (int piece = seen.begin / kPiece * kPiece; piece < seen.end; piece += kPiece) {
      const char* key = keys(tile + piece) + head * head_bytes_ + call_.head_dim;
      for (int i = 0; i < kPiece; ++i, key += stride_) {
        if (piece + i < seen.begin || piece + i >= seen.end) continue;
        scales.keys[piece + i] = load<float>(key);
        scales.values[piece + i] = load<float>(key + call_.kv.value_bytes);
      }
    }
  }

#if defined(QUIRE_TILES)
  // Each 16 words of a head's queries become an operand of a product.
  void arrange_queries() const {
    for (int head = 0; head < num_heads_; ++head)
      for (int g = 0; g < group; ++g)
        for (int word = 0; word < num_words_; ++word)
          at_.queries[(head * num_words_ + word) * group + g] =
              queries_[(head * group + g) * num_words_ + word];
  }

  // The piece to fetch beside a tile's piece: four of keys, four of values, then the next tile.
  Fetch two_ahead(int tile, int piece) const {
    piece += 2;
    const bool is_value = piece >= kPieces && piece < 2 * kPieces;
    const int position = tile + (piece < 2 * kPieces ? piece % kPieces : piece - kPieces) * kPiece;
    return {is_value ? values(position) : keys(position), stride_, num_heads_ * head_bytes_};
  }

  // Computes a piece's scores for a head.
  void score(const char* piece, Fetch& fetch, int head, float* scores) {
    const char* keys = piece + head * head_bytes_;
    const uint32_t* queries = queries_of(head);
    int64_t stride = stride_;
    if constexpr (is_int8) {
      for (int i = 0; i < kPiece; ++i, keys += stride_)
        for (int word = 0; word < num_words_; word += kLanes)
          store(at_.tile + i * num_words_ + word,
                Words::words(load<typename Words::Sixteen>(keys + Words::kBytes * word)));
      keys = reinterpret_cast<const char*>(at_.tile);
      stride = 4 * num_words_;
    }
    tiles_.clear_scores();
    for (int word = 0; word < num_words_; word += kTileSteps) {
      fetch.some(is_int8 ? kPiece / 2 : kPiece);
      tiles_.add_scores(keys + 4 * word, stride, queries + word * group);
    }
    float all[kPiece * group];
    tiles_.store_scores(all);
    for (int g = 0; g < group; ++g)
      for (int i = 0; i < kPiece; ++i) scores[(head * group + g) * kTile + i] = all[i * group + g];
  }

  // Adds the tile's values, 32 positions at a time. A position that is hidden may hold NaN, so its
  // value is 0, as its weight is.
  void add_values(int tile, Span seen) {
    for (int row = 0; row < num_heads_ * group; ++row) {
      float* sums = at_.sums + row * call_.head_dim;
      for (int i = 0; i < call_.head_dim; i += kLanes)
        store_f32(sums + i, without_denormals(load_f32(sums + i) * at_.corrections[row]));
    }
    for (int half = 0; half < kTile; half += 2 * kPiece) {
      if (seen.end <= half || seen.begin >= half + 2 * kPiece) continue;
      Fetch fetch[2];
      const char* from[2];
      for (int i = 0; i < 2; ++i) {
        fetch[i] = two_ahead(tile, kPieces + half / kPiece + i);
        from[i] = values(tile + half + i * kPiece);
      }
      for (int head = 0; head < num_heads_; ++head) {
        for (int pair = 0; pair < kPiece; ++pair) {
          const int which = pair / (kPiece / 2), position = half + 2 * pair;
          const bool sees_first = position >= seen.begin && position < seen.end;
          const bool sees_second = position + 1 >= seen.begin && position + 1 < seen.end;
          interleave(from[which] + (2 * pair - which * kPiece) * stride_ + head * head_bytes_,
                     sees_first, sees_second, fetch[which], at_.tile + pair * call_.head_dim);
        }
        const int row = head * group;
        tiles_.add_values(at_.probabilities + row * (kTile / 2) + half / 2, 2 * kTile, at_.tile,
                          call_.head_dim, at_.sums + row * call_.head_dim);
      }
    }
  }

  // Writes the pairs of two positions' values as [head_dim].
  void interleave(const char* row, bool sees_first, bool sees_second, Fetch& fetch,
                  uint32_t* out) const {
    for (int word = 0; word < num_words_; word += kLanes, out += 2 * kLanes) {
      typename Words::Sixteen a = {}, b = {};
      if (sees_first) a = load<typename Words::Sixteen>(row + Words::kBytes * word);
      if (sees_second) b = load<typename Words::Sixteen>(row + stride_ + Words::kBytes * word);
      fetch.some(is_int8 ? 1 : 2);
      u32x16 lower, upper;
      Words::interleave(a, b, lower, upper);
      store(out, lower);
      store(out + kLanes, upper);
    }
  }

  const uint32_t* queries_of(int head) const { return at_.queries + head * num_words_ * group; }

#else
  // Computes a piece's scores for some heads.
  template <int heads>
  void score(const char* piece, Fetch& fetch, int head, float* scores) const {
    const uint32_t* queries = queries_ + head * group * num_words_;
    piece += head * head_bytes_;
    f32x16 sums[heads][group] = {};
    for (int word = 0; word < num_words_; word += kWords) {
#pragma GCC unroll 4
      for (int i = 0; i < heads; ++i) {
        fetch.some(4);
        u32x16 words[kWords];
        words_of<is_int8>(piece + i * head_bytes_ + Words::kBytes * word, stride_, words);
#pragma GCC unroll 8
        for (int k = 0; k < kWords; ++k)
#pragma GCC unroll 8
          for (int g = 0; g < group; ++g)
            sums[i][g] = dot_bf16(sums[i][g], words[k],
                                  splat_u32(queries[(i * group + g) * num_words_ + word + k]));
      }
    }
#pragma GCC unroll 4
    for (int i = 0; i < heads; ++i)
#pragma GCC unroll 8
      for (int g = 0; g < group; ++g)
        store_f32(scores + ((head + i) * group + g) * kTile, sums[i][g]);
  }

  void add_values(int tile, Span seen) const {
    const int num_rows = num_heads_ * group;
    for (int row = 0; row < num_rows; ++row) {
      float* sums = at_.sums + row * call_.head_dim;
      for (int i = 0; i < call_.head_dim; i += kLanes)
        store_f32(sums + i, load_f32(sums + i) * at_.corrections[row]);
    }
    for (int piece = seen.begin / kPiece * kPiece; piece < seen.end; piece += kPiece) {
      const char* from = values(tile + piece);
      const char* next =
          piece + kPiece < seen.end ? values(tile + piece + kPiece) : keys(tile + kTile);
      const Span some = {seen.begin > piece ? seen.begin - piece : 0,
                         seen.end - piece < kPiece ? seen.end - piece : kPiece};
      Fetch fetch{next, stride_, num_heads_ * head_bytes_};
      for (int head = 0; head < num_heads_; ++head)
        add<8 / group>(from + head * head_bytes_, fetch, some,
                       at_.probabilities + head * group * (kTile / 2) + piece / 2,
                       at_.sums + head * group * call_.head_dim);
    }
  }

  // sums += probabilities * values, over the visible positions of a piece; `vectors` vectors of 16
  // words at a time.
  template <int vectors>
  void add(const char* piece, Fetch& fetch, Span seen, const uint32_t* probabilities, float* sums,
           int word = 0) const {
    for (; word + vectors * kLanes <= num_words_; word += vectors * kLanes)
      add_columns<vectors>(piece, fetch, seen, probabilities, sums, word);
    if constexpr (vectors > 1) add<vectors / 2>(piece, fetch, seen, probabilities, sums, word);
  }

  template <int vectors>
  void add_columns(const char* piece, Fetch& fetch, Span seen, const uint32_t* probabilities,
                   float* sums, int word) const {
    f32x16 all[group][2 * vectors];
    sums += 2 * word;
#pragma GCC unroll 8
    for (int g = 0; g < group; ++g)
#pragma GCC unroll 16
      for (int i = 0; i < 2 * vectors; ++i)
        all[g][i] = load_f32(sums + g * call_.head_dim + i * kLanes);
    for (int pair = seen.begin / 2; 2 * pair < seen.end; ++pair) {
      const char* row = piece + 2 * pair * stride_;
      const bool sees_first = 2 * pair >= seen.begin, sees_second = 2 * pair + 1 < seen.end;
      u32x16 weights[group];
#pragma GCC unroll 8
      for (int g = 0; g < group; ++g) weights[g] = splat_u32(probabilities[g * (kTile / 2) + pair]);
#pragma GCC unroll 8
      for (int i = 0; i < vectors; ++i) {
        const char* from = row + Words::kBytes * (word + kLanes * i);
        auto a = load<typename Words::Sixteen>(from);
        auto b = load<typename Words::Sixteen>(from + stride_);
        fetch.some(is_int8 ? 1 : 2);
        if (!sees_first) a = typename Words::Sixteen{};  // it may be NaN, and 0 * NaN is NaN
        if (!sees_second) b = typename Words::Sixteen{};
        u32x16 lower, upper;
        Words::interleave(a, b, lower, upper);
#pragma GCC unroll 8
        for (int g = 0; g < group; ++g) {
          all[g][2 * i] = dot_bf16(all[g][2 * i], weights[g], lower);
          all[g][2 * i + 1] = dot_bf16(all[g][2 * i + 1], weights[g], upper);
        }
      }
    }
#pragma GCC unroll 8
    for (int g = 0; g < group; ++g)
#pragma GCC unroll 16
      for (int i = 0; i < 2 * vectors; ++i)
        store_f32(sums + g * call_.head_dim + i * kLanes, all[g][i]);
  }
#endif

  const AttentionCall& call_;
  const DecodeScratch at_;
  const int num_heads_, first_head_, num_words_;  // first_head_: of the queries
  const int64_t head_bytes_, stride_;             // from head to head, from position to position
  const int32_t* table_;
  const int end_, begin_;  // the query sees positions [begin_, end_)
  const char* kv_;
  const uint32_t* queries_;
  bf16* out_;
#if defined(QUIRE_TILES)
  DecodeTiles tiles_{group};
#endif
};

template <bool is_int8, int group = 8>
inline bool decode_of(const AttentionCall& call, int row, int head_begin, int head_end,
                      const Begun& begun, const DecodeScratch& scratch) {
  if constexpr (group == 0) {
    return false;
  } else {
    if (call.num_heads / call.num_kv_heads != group)
      return decode_of<is_int8, group - 1>(call, row, head_begin, head_end, begun, scratch);
    DecodeQuery<group, is_int8>(call, row, head_begin, head_end, scratch).attend(begun);
    return true;
  }
}

// Computes the row and returns true, if it is one query of a shape that DecodeQuery supports;
// otherwise returns false.
inline bool decode(const AttentionCall& call, int row, int head_begin, int head_end,
                   const Begun& begun, const DecodeScratch& scratch) {
  if (call.dtype != Dtype::bf16 || call.head_dim % (2 * kLanes) || call.block_size % kPiece ||
      call.cu_query_lens[row + 1] - call.cu_query_lens[row] != 1)
    return false;
  return call.kv.is_int8 ? decode_of<true>(call, row, head_begin, head_end, begun, scratch)
                         : decode_of<false>(call, row, head_begin, head_end, begun, scratch);
}

inline bool decode(const AttentionCall& call, int row, int head_begin, int head_end,
                   const Begun& begun, void* scratch) {
  const AttentionLayout at = attention_layout(call);
  char* memory = static_cast<char*>(scratch);
  return decode(call, row, head_begin, head_end, begun,
                DecodeScratch{
#if defined(QUIRE_TILES)
                    reinterpret_cast<uint32_t*>(memory + at.tile),
                    reinterpret_cast<uint32_t*>(memory + at.queries),
#endif
                    reinterpret_cast<float*>(memory + at.scores),
                    reinterpret_cast<uint32_t*>(memory + at.probabilities),
                    reinterpret_cast<float*>(memory + at.sums),
                    reinterpret_cast<SoftmaxState*>(memory + at.states),
                    reinterpret_cast<float*>(memory + at.corrections)});
}

#else

inline bool decode(const AttentionCall&, int, int, int, const Begun&, void*) { return false; }

#endif

}  // namespace quire::QUIRE_ISA
