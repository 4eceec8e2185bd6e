// paged_attention on the CPU: write K/V into the paged cache, then attend from it, grouped by
// request and KV head.
//
// Every output row (token, head) is computed by one fixed recipe that depends on its own position
// only: the context is cut at multiples of kSegment and kChunk of the ABSOLUTE position, chunks
// fold into a segment and segments into the result in order, and every element is one chain of fma,
// of dot products of pairs or of blocks (_matrix_tiles.h), over keys or head dims.  Which rows share a
// tile, the batch, the split over threads: none of it changes a bit.
//
// Rows of a tile: the tokens of one request times the query heads of one KV head, so that K and V
// are read once for all.  Without a value cache a value is the beginning of its key (latents): one
// cell then serves both the scores and the mixing, and is fetched once.
//
// A token with a path (a node of a tree) takes its last keys from this call's own, in the order of
// its path, at the positions that they stand for: the recipe is that of a chain, bit for bit.  What
// the tokens of a tile share, the cache before the tree, they still read together.  The path of a
// token with a first position of its own (a row of a block) follows the cache's last key instead.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <type_traits>
#include <vector>

#include "_matrix_tiles.h"
#include "_threads.h"
#include "_vector.h"

namespace compilespec {
namespace paged_attention {

constexpr int kChunk = 128;    // keys whose scores a tile holds at once
constexpr int kSegment = 256;  // keys of one unit of split work
constexpr int kTileRows = 48;  // rows a tile aims at
constexpr int kGroupRows = kNumRegisters == 32 ? 4 : 3;  // rows of the largest register tile
constexpr int kGroupKeys = 4;  // keys of a register tile
constexpr int kLaneKeys = 16;  // keys of a vector, where a key is a lane
// Bytes that are read between a cell and the one that it asks for, and the cells that these may be.
constexpr int kBytesAhead = 8 << 10, kLeastAhead = 16, kMostAhead = 64;

// Whether scores are computed a key a lane, from keys that are turned round for it; else an element
// a lane, and a score is a sum over lanes.
#if defined(__AVX512F__)
template <class T>
constexpr bool kArranges = std::is_same_v<T, c10::BFloat16>;
#else
template <class T>
constexpr bool kArranges = false;
#endif

// Whether arranged keys are multiplied by pairs as they are stored; else as accumulators.
#if defined(COMPILESPEC_BF16_DOT)
template <class T>
constexpr bool kDotsPairs = kArranges<T>;
#else
template <class T>
constexpr bool kDotsPairs = false;
#endif

// Whether probabilities are rounded to bfloat16, so that one instruction adds the values of two keys.
// Not on levels with matrix tiles: those CPUs take twice as long for it.
#if defined(COMPILESPEC_MATRIX_TILES)
template <class T>
constexpr bool kMixesPairs = false;
#else
template <class T>
constexpr bool kMixesPairs = kDotsPairs<T>;
#endif

template <class T>
constexpr int64_t kMixedKeys = kMixesPairs<T> ? 2 : 1;  // keys that are mixed in one step

struct View {  // q, k, v as [B, N, S, H] with unit stride over H
  const void* data;
  int64_t batch, head, token;
};

// Cells of one position and one head each, with unit stride, in any order of positions and heads.
struct Cache {
  void* data;
  int64_t cell, head;  // elements from a slot's cell to the next slot's, and to the next head's

  template <class T>
  T* at(int64_t slot, int64_t head_index) const {
    return (T*)data + slot * cell + head_index * head;
  }
};

struct Problem {
  View query, key, value;
  Cache key_cache, value_cache;  // value_cache.data: null where values are parts of keys
  void* out;
  const int32_t *slot, *row, *position, *table;
  const void* sinks;    // [N] as Acc, or null
  const int32_t* path;   // [B, S, path_size], or null
  const int32_t* first;  // [B, S], or null
  int64_t path_size, num_keys, keys_per_batch;
  int64_t num_tokens, tokens_per_batch, num_heads, num_kv_heads, head_dim, value_dim;
  int64_t num_blocks, block_size, table_rows, table_blocks;
  int64_t window;
  double scale, softcap;

  bool has_values() const { return value_cache.data; }
};

struct Tile {  // consecutive tokens of one request; the keys that any of them sees
  int64_t first_token, num_tokens, lo, hi;
  int64_t shared;  // the first position at which each has a key of its own
};

template <class T>
const T* token_ptr(const View& view, int64_t per_batch, int64_t token, int64_t head) {
  const int64_t b = token / per_batch, s = token % per_batch;
  return (const T*)view.data + b * view.batch + head * view.head + s * view.token;
}

// Tokens on the path of a token.
int64_t path_length(const Problem& problem, int64_t token) {
  int64_t length = 0;
  if (problem.path)
    for (const int32_t* path = problem.path + token * problem.path_size;
         length < problem.path_size && path[length] >= 0;)
      ++length;
  return length;
}

// The first position that a token sees, and the one after its last; a path may go on past the end of
// the cache.
int64_t first_key(const Problem& problem, int64_t token) {
  const int64_t position = problem.position[token];
  if (problem.first) return std::min<int64_t>(std::max(problem.first[token], 0), position + 1);
  return problem.window > 0 ? std::max<int64_t>(0, position - problem.window + 1) : 0;
}

int64_t end_key(const Problem& problem, int64_t token) {
  return problem.position[token] + 1 + (problem.first ? path_length(problem, token) : 0);
}

template <class T>
void write_cache(const Problem& problem) {
  const int64_t cells = problem.num_blocks * problem.block_size;
  const int64_t bytes =
      problem.num_kv_heads * (problem.head_dim + problem.value_dim) * int64_t(sizeof(T));
  const int64_t grain = (256 << 10) / std::max<int64_t>(bytes, 1) + 1;
  parallel_for(problem.num_keys, grain, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      const int64_t slot = problem.slot[token];
      if (slot < 0) continue;
      TORCH_CHECK(slot < cells, "paged_attention: slot ", slot, " in a cache of ", cells);
      const auto write = [&](const View& from, const Cache& to, int64_t size) {
        for (int64_t n = 0; n < problem.num_kv_heads; ++n)
          std::memcpy(to.at<T>(slot, n), token_ptr<T>(from, problem.keys_per_batch, token, n),
                      size_t(size) * sizeof(T));
      };
      write(problem.key, problem.key_cache, problem.head_dim);
      if (problem.has_values()) write(problem.value, problem.value_cache, problem.value_dim);
    }
  });
}

// Runs of tokens with the same live row, cut to kTileRows; padded and blind tokens get zeros here.
template <class T>
void make_tiles(const Problem& problem, std::vector<Tile>& tiles) {
  const int64_t group = problem.num_heads / problem.num_kv_heads;
  const int64_t most = std::max<int64_t>(1, kTileRows / group);
  tiles.clear();
  for (int64_t token = 0; token < problem.num_tokens; ++token) {
    const int64_t row = problem.row[token], position = problem.position[token];
    if (row < 0 || position < 0) {
      std::memset((T*)problem.out + token * problem.num_heads * problem.value_dim, 0,
                  size_t(problem.num_heads * problem.value_dim) * sizeof(T));
      continue;
    }
    TORCH_CHECK(row < problem.table_rows, "paged_attention: row ", row, " in a block table of ",
                problem.table_rows);
    const int64_t lo = first_key(problem, token), hi = end_key(problem, token);
    const int64_t shared = problem.path ? hi - path_length(problem, token)
                                        : std::numeric_limits<int64_t>::max();
    Tile* last = tiles.empty() ? nullptr : &tiles.back();
    if (last && last->num_tokens < most && last->first_token + last->num_tokens == token &&
        problem.row[last->first_token] == row && last->shared == shared) {
      last->num_tokens++;
      last->lo = std::min(last->lo, lo);
      last->hi = std::max(last->hi, hi);
    } else {
      tiles.push_back({token, 1, lo, hi, shared});
    }
  }
}

template <class T>
struct Worker {
  using Acc = typename Storage<T>::Acc;
  using Vec = Vector<Acc>;
  static constexpr int kPair = Storage<T>::kPair;
  static constexpr int kL = kLanes<Acc>;

  Problem problem;
  int64_t group, key_pad,
      value_pad;  // query heads of a KV head; head dims rounded up to whole pairs of vectors
  // Of the tile at hand: rows are token-major, row = token * group + head in group.
  int64_t kv_head = 0, num_rows = 0;
  const Tile* tile = nullptr;
  std::vector<int64_t> lo, hi;  // visible keys of each row
  Aligned<Acc> query, scores, alpha, growth;
  Aligned<uint32_t> query_pairs, key_pairs;  // the latter [key_pad / 2][kChunk]
  Aligned<uint32_t> factor_pairs;  // probabilities of pairs of keys, [num_rows][kChunk / 2]
  Aligned<T> key_copy, value_copy, zeros;
  Aligned<Acc> sum, top, out, seg_sum, seg_top, seg_out;
  const T *segment_keys[kSegment], *segment_values[kSegment];  // cells of the segment at hand
  bool segment_present[kSegment];
  const T **keys, **values;  // of the chunk at hand, in those
  const bool* present;
  int64_t first_key_read = 0, num_next = 0;  // of the chunk; keys of the segment's next one
  int64_t ahead = 0;  // cells that are read between one and the one that it asks for

  // The worker of this thread, whose scratch outlives the call.
  static Worker& start(const Problem& problem) {
    static thread_local Worker worker;
    worker.problem = problem;
    worker.group = problem.num_heads / problem.num_kv_heads;
    worker.key_pad = (problem.head_dim + kPair - 1) / kPair * kPair;
    worker.value_pad = (problem.value_dim + kPair - 1) / kPair * kPair;
    worker.ahead = std::clamp<int64_t>(kBytesAhead / (worker.key_pad * int64_t(sizeof(T))),
                                       kLeastAhead, kMostAhead);
    worker.zeros.assign(size_t(std::max(worker.key_pad, worker.value_pad)), T(0));
    if (worker.key_pad != problem.head_dim) worker.key_copy.resize(size_t(kSegment * worker.key_pad));
    if (problem.has_values() && worker.value_pad != problem.value_dim)
      worker.value_copy.resize(size_t(kSegment * worker.value_pad));
    return worker;
  }

  // Bind a tile: ranges, and the queries: as they are, or widened and permuted as Storage<T> splits
  // the keys.
  void bind(const Tile& next, int64_t head) {
    tile = &next;
    kv_head = head;
    num_rows = next.num_tokens * group;
    lo.resize(size_t(num_rows));
    hi.resize(size_t(num_rows));
    if constexpr (kDotsPairs<T>)
      query_pairs.resize(size_t(num_rows * key_pad / 2));
    else
      query.resize(size_t(num_rows * key_pad));
    scores.resize(size_t(num_rows * kChunk));
    if constexpr (kMixesPairs<T>) factor_pairs.resize(size_t(num_rows * kChunk / 2));
    alpha.resize(size_t(num_rows));
    growth.resize(size_t(num_rows));
    for (int64_t r = 0; r < num_rows; ++r) {
      const int64_t token = next.first_token + r / group;
      lo[r] = first_key(problem, token);
      hi[r] = end_key(problem, token);
      const T* source = token_ptr<T>(problem.query, problem.tokens_per_batch, token,
                                     head * group + r % group);
      if constexpr (kDotsPairs<T>) {
        uint32_t* pairs = query_pairs.data() + r * key_pad / 2;
        std::fill_n(pairs, key_pad / 2, 0u);
        std::memcpy(pairs, source, size_t(problem.head_dim) * sizeof(T));
        continue;
      }
      Acc* target = query.data() + r * key_pad;
      T last[kPair] = {};
      for (int64_t h = 0; h < key_pad; h += kPair) {
        const T* pair = source + h;
        if (h + kPair > problem.head_dim) {
          std::copy_n(pair, problem.head_dim - h, last);
          pair = last;
        }
        store(target + h, Storage<T>::lo(pair));
        store(target + h + kL, Storage<T>::hi(pair));
      }
    }
  }

  // Point segment_keys/segment_values at the cells of [begin, end) in the segment at base; absent
  // ones, and the rest of the first and the last group of keys, at zeros.  Returns whether all are
  // present.
  bool gather(int64_t base, int64_t begin, int64_t end) {
    const int64_t first = begin - base, last = end - base;
    constexpr int kGroup = kArranges<T> ? kLaneKeys : kGroupKeys;
    std::fill(segment_keys + first / kGroup * kGroup, segment_keys + first, zeros.data());
    std::fill(segment_keys + last, segment_keys + (last + kGroup - 1) / kGroup * kGroup,
              zeros.data());
    const int32_t* table = problem.table + problem.row[tile->first_token] * problem.table_blocks;
    bool all_present = true;
    for (int64_t key = begin; key < end;) {
      const int64_t index = key / problem.block_size,
                    stop = std::min(end, (index + 1) * problem.block_size);
      const int64_t block = index < problem.table_blocks ? table[index] : -1;
      if (block < 0 || block >= problem.num_blocks) {
        for (; key < stop; ++key) {
          segment_present[key - base] = all_present = false;
          segment_keys[key - base] = segment_values[key - base] = zeros.data();
        }
        continue;
      }
      const int64_t slot = block * problem.block_size + key % problem.block_size;
      const int64_t i = key - base, count = stop - key;
      std::fill_n(segment_present + i, count, true);
      point(segment_keys + i, problem.key_cache, slot, count, problem.head_dim, key_pad, key_copy, i);
      if (problem.has_values()) {
        point(segment_values + i, problem.value_cache, slot, count, problem.value_dim, value_pad,
              value_copy, i);
      } else {
        // Of a value that is part of its key, what lies past value_dim is never stored.
        std::copy_n(segment_keys + i, count, segment_values + i);
      }
      key = stop;
    }
    for (int64_t i = first; i < std::min(last, first + ahead); ++i)
      fetch(segment_keys[i], key_pad);
    return all_present;
  }

  // Point at `count` cells of the head from a slot on, or at their padded copies from the i-th on.
  void point(const T** cells, const Cache& cache, int64_t slot, int64_t count, int64_t size,
             int64_t padded, Aligned<T>& copy, int64_t i) const {
    const T* source = cache.at<const T>(slot, kv_head);
    if (size == padded)
      for (int64_t c = 0; c < count; ++c) cells[c] = source + c * cache.cell;
    else
      for (int64_t c = 0; c < count; ++c)
        cells[c] = pad(source + c * cache.cell, size, padded, copy, i + c);
  }

  static const T* pad(const T* source, int64_t size, int64_t padded, Aligned<T>& copy,
                      int64_t i) {
    if (size == padded) return source;
    T* target = copy.data() + i * padded;
    std::copy_n(source, size, target);
    std::fill(target + size, target + padded, T(0));
    return target;
  }

  // Point the keys of a segment's positions [begin, end) at those on a token's path, where it has
  // some.
  void follow_path(int64_t token, int64_t from, int64_t begin, int64_t end) {
    const int64_t stop = end_key(problem, token), root = stop - path_length(problem, token);
    const int64_t b = token / problem.tokens_per_batch;
    const int32_t* path = problem.path + token * problem.path_size;
    for (int64_t key = std::max(begin, root); key < std::min(end, stop); ++key) {
      const int64_t index = path[key - root], i = key - from;
      TORCH_CHECK(index < problem.keys_per_batch, "paged_attention: key ", index, " on a path of ",
                  problem.keys_per_batch, " keys");
      const int64_t place = b * problem.keys_per_batch + index;
      const T* own = token_ptr<T>(problem.key, problem.keys_per_batch, place, kv_head);
      segment_keys[i] = segment_values[i] = pad(own, problem.head_dim, key_pad, key_copy, i);
      if (problem.has_values()) {
        own = token_ptr<T>(problem.value, problem.keys_per_batch, place, kv_head);
        segment_values[i] = pad(own, problem.value_dim, value_pad, value_copy, i);
      }
      segment_present[i] = true;
    }
  }

  // Ask for the cache lines of a cell.  (What does nothing but this is inlined by force: GCC takes a call
  // of it for one without effect, and drops it.)
  static COMPILESPEC_INLINE void fetch(const T* cell, int64_t size) {
    for (int64_t h = 0; h < size; h += 64 / int64_t(sizeof(T))) __builtin_prefetch(cell + h);
  }

  // Cells are read in this order: a chunk's keys, its values, the keys of the segment's next chunk.  Ask
  // for the ones that come `ahead` after the keys, or the values, [j, j + count) of a range of the
  // chunk that ends at `end`.  What ragged ranges and chunks shorter than that miss is read unasked.
  COMPILESPEC_INLINE void fetch_after_keys(int64_t j, int64_t count, int64_t end) const {
    for (int64_t i = j + ahead; i < j + ahead + count; ++i) {
      const int64_t value = first_key_read + i - end;
      if (i < end)
        fetch(keys[i], key_pad);
      else if (value < end && problem.has_values())
        fetch(values[value], value_pad);
    }
  }
  COMPILESPEC_INLINE void fetch_after_values(int64_t j, int64_t count, int64_t end) const {
    for (int64_t i = j + ahead; i < j + ahead + count; ++i) {
      if (i < end && problem.has_values())
        fetch(values[i], value_pad);
      else if (i >= end && i - end < num_next)
        fetch(keys[kChunk + i - end], key_pad);
    }
  }

  // Scores of keys [begin, end) of the chunk; the first group of rows fetches ahead.
  template <int Rows>
  void score(int64_t row, int64_t begin, int64_t end) {
    const Acc scale = Acc(problem.scale);
    const Acc* q = query.data() + row * key_pad;
    for (int64_t j = begin; j < end; j += kGroupKeys) {
      Vec acc[Rows][kGroupKeys] = {};
      const T* const* k = keys + j;
      if (row == 0) fetch_after_keys(j, kGroupKeys, end);
      for (int64_t h = 0; h < key_pad; h += kPair) {
        Vec part[Rows];
#pragma GCC unroll 4
        for (int r = 0; r < Rows; ++r) part[r] = in_register(load(q + r * key_pad + h));
#pragma GCC unroll 4
        for (int i = 0; i < kGroupKeys; ++i) {
          const Vec key = in_register(Storage<T>::lo(k[i] + h));
#pragma GCC unroll 4
          for (int r = 0; r < Rows; ++r) acc[r][i] = fma(part[r], key, acc[r][i]);
        }
#pragma GCC unroll 4
        for (int r = 0; r < Rows; ++r) part[r] = in_register(load(q + r * key_pad + h + kL));
#pragma GCC unroll 4
        for (int i = 0; i < kGroupKeys; ++i) {
          const Vec key = in_register(Storage<T>::hi(k[i] + h));
#pragma GCC unroll 4
          for (int r = 0; r < Rows; ++r) acc[r][i] = fma(part[r], key, acc[r][i]);
        }
      }
      Acc sums[Rows][kGroupKeys];
      if constexpr (Rows == 4)
        sum_lanes_16<Acc>(acc, sums);
      else
        for (int r = 0; r < Rows; ++r) sum_lanes_4<Acc>(acc[r], sums[r]);
      for (int r = 0; r < Rows; ++r)
        for (int i = 0; i < kGroupKeys; ++i)
          scores[(row + r) * kChunk + j + i] = sums[r][i] * scale;
    }
  }

#if defined(__AVX512F__)
  // The pairs of keys [begin, end) of the chunk, a key a lane; fetches later keys, and their values.
  void arrange(int64_t begin, int64_t end) {
    key_pairs.resize(size_t(key_pad / 2 * kChunk));
    for (int64_t j = begin; j < end; j += kLaneKeys) {
      fetch_after_keys(j, kLaneKeys, end);
      for (int64_t h = 0; h < key_pad; h += kPair) {
        __m512i word[kLaneKeys];
#pragma GCC unroll 16
        for (int i = 0; i < kLaneKeys; ++i) word[i] = _mm512_loadu_si512(keys[j + i] + h);
        transpose(word);
        uint32_t* target = key_pairs.data() + h / 2 * kChunk + j;
#pragma GCC unroll 16
        for (int i = 0; i < kLaneKeys; ++i) _mm512_storeu_si512(target + i * kChunk, word[i]);
      }
    }
  }

  // Pairs of elements: as they are stored where those are multiplied, else widened.
  using Pairs = std::conditional_t<kDotsPairs<T>, VectorU32, WidePairs>;

  // Pair `h` of a row of the query, the same in every lane.
  COMPILESPEC_INLINE Pairs query_pairs_of(int64_t row, int64_t h) const {
    if constexpr (kDotsPairs<T>) {
      return splat(query_pairs[row * key_pad / 2 + h]);
    } else {
      const Acc* even = query.data() + row * key_pad + h / kL * kPair + h % kL;
      return {splat(even[0]), splat(even[kL])};
    }
  }

  // A pair of each of kLaneKeys arranged keys.
  static COMPILESPEC_INLINE Pairs key_pairs_of(const uint32_t* stored) {
    if constexpr (kDotsPairs<T>)
      return load(stored);
    else
      return {Storage<T>::lo((const T*)stored), Storage<T>::hi((const T*)stored)};
  }

  // Scores of `Vectors` vectors of arranged keys from the chunk's key `begin` on.
  template <int Rows, int Vectors>
  void score_pairs(int64_t row, int64_t begin) {
    Vec acc[Rows][Vectors] = {};
    const uint32_t* pairs = key_pairs.data() + begin;
    for (int64_t h = 0; h < key_pad / 2; ++h, pairs += kChunk) {
      Pairs key[Vectors];
#pragma GCC unroll 4
      for (int v = 0; v < Vectors; ++v) key[v] = key_pairs_of(pairs + v * kLaneKeys);
#pragma GCC unroll 4
      for (int r = 0; r < Rows; ++r) {
        const Pairs pair = query_pairs_of(row + r, h);
#pragma GCC unroll 4
        for (int v = 0; v < Vectors; ++v) acc[r][v] = dot_pairs(pair, key[v], acc[r][v]);
      }
    }
    const Acc scale = Acc(problem.scale);
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < Vectors; ++v)
        store(scores.data() + (row + r) * kChunk + begin + v * kLaneKeys, acc[r][v] * scale);
  }

#if defined(COMPILESPEC_MATRIX_TILES)
  // Scores of rows [first_row, last_row) by tiles: the pairs of 16 arranged keys are a panel.
  void score_tiles(int64_t first_row, int64_t last_row, int64_t begin, int64_t end) {
    const matrix_tiles::Panels panels{(const char*)key_pairs.data(), key_pad / 2, kChunk * 4,
                                      matrix_tiles::kLine};
    const matrix_tiles::RowTiles tiles(last_row - first_row);
    const matrix_tiles::Configured configured(tiles.size);
    const int64_t last = (end + kLaneKeys - 1) / kLaneKeys;
    for (int64_t panel = begin / kLaneKeys, num; panel < last; panel += num) {
      num = last - panel >= 2 ? 2 : 1;
      tiles.in_pairs([&](int64_t count, const int64_t* first) {
        const int64_t rows[2] = {first_row + first[0], first_row + first[1]};
        const uint32_t* query = query_pairs.data();
        const char* const from[2] = {(const char*)(query + rows[0] * key_pad / 2),
                                     (const char*)(query + rows[1] * key_pad / 2)};
        float* to = scores.data() + panel * kLaneKeys;
        float* const sum[2] = {to + rows[0] * kChunk, to + rows[1] * kChunk};
        matrix_tiles::multiply<matrix_tiles::Pairs>(count, num, from, key_pad * 2, panels.from(panel),
                                                    sum, kChunk, false, matrix_tiles::kNothing);
      });
    }
    for (int64_t row = first_row; row < last_row; ++row)
      for (int64_t j = begin; j < last * kLaneKeys; j += kL) {
        Acc* score = scores.data() + row * kChunk + j;
        store(score, load(score) * Acc(problem.scale));
      }
  }
#endif

  template <int Rows>
  void score_arranged(int64_t row, int64_t begin, int64_t end) {
    for (; begin + 3 * kLaneKeys < end; begin += 4 * kLaneKeys) score_pairs<Rows, 4>(row, begin);
    const int64_t left = (end - begin + kLaneKeys - 1) / kLaneKeys;
    if (left == 1) score_pairs<Rows, 1>(row, begin);
    if (left == 2) score_pairs<Rows, 2>(row, begin);
    if (left == 3) score_pairs<Rows, 3>(row, begin);
  }
#endif

  // Scores of rows [first_row, last_row) and of keys [begin, end) of the chunk.
  void score_rows(int64_t first_row, int64_t last_row, int64_t begin, int64_t end) {
#if defined(__AVX512F__)
    if constexpr (kArranges<T>) {
      const int64_t first = begin / kLaneKeys * kLaneKeys;
      arrange(first, end);
#if defined(COMPILESPEC_MATRIX_TILES)
      if (matrix_tiles::available()) return score_tiles(first_row, last_row, first, end);
#endif
      in_groups(first_row, last_row,
                [&](auto rows, int64_t row) { score_arranged<rows()>(row, first, end); });
      return;
    }
#endif
    const int64_t first = begin / kGroupKeys * kGroupKeys;
    in_groups(first_row, last_row,
              [&](auto rows, int64_t row) { score<rows()>(row, first, end); });
  }

  // Scores to probabilities (not normalised, in their place or, rounded, in factor_pairs) against the
  // running maximum; notes what the row's top has changed by in alpha, and what its sum grows by.
  void soften(int64_t row, int64_t base, bool all_present) {
    const int64_t begin = std::max(lo[row] - base, int64_t(0)),
                  end = std::min<int64_t>(hi[row] - base, kChunk);
    alpha[row] = growth[row] = 0;
    if (begin >= end) return;
    Acc* s = scores.data() + row * kChunk;
    const Acc minus_inf = -std::numeric_limits<Acc>::infinity();
    const int64_t first = begin / kL * kL, last = (end + kL - 1) / kL * kL;
    if (problem.softcap > 0)
      for (int64_t j = first; j < last; j += kL) {
        const Acc cap = Acc(problem.softcap);
        store(s + j, tanh(load(s + j) / cap) * cap);
      }
    std::fill(s + first, s + begin, minus_inf);
    std::fill(s + end, s + last, minus_inf);
    if (!all_present)
      for (int64_t j = begin; j < end; ++j)
        if (!present[j]) s[j] = minus_inf;
    Vec best = splat(minus_inf);
    for (int64_t j = first; j < last; j += kL) {
      const Vec value = load(s + j);
      best = value > best ? value : best;
    }
    const Acc old = seg_top[row], now = std::max(old, max_lanes<Acc>(best));
    const Acc base_score = now == minus_inf ? Acc(0) : now;
    Vec total = {};
    for (int64_t j = first; j < last; j += kL) {
      const Vec p = exp(load(s + j) - base_score);
      if constexpr (kMixesPairs<T>)
        store_rounded(factor_pairs.data() + (row * kChunk + j) / 2, p);
      else
        store(s + j, p);
      total += p;
    }
    alpha[row] = old - base_score;
    growth[row] = sum_lanes<Acc>(total);
    seg_top[row] = now;
  }

  // What `soften` noted of rows [first_row, last_row): the factors of what they have, and their sums.
  void rescale(int64_t first_row, int64_t last_row) {
    for (int64_t row = first_row; row < last_row; row += kL) {
      const int64_t count = std::min<int64_t>(kL, last_row - row);
      Acc factors[kL] = {};
      std::copy_n(alpha.data() + row, count, factors);
      store(factors, exp(load(factors)));
      std::copy_n(factors, count, alpha.data() + row);
    }
    for (int64_t row = first_row; row < last_row; ++row)
      seg_sum[row] = seg_sum[row] * alpha[row] + growth[row];
  }

  // Probabilities of the chunk's keys, or of pairs of them: [num_rows][kChunk / kMixedKeys<T>].
  const auto* factors() const {
    if constexpr (kMixesPairs<T>)
      return factor_pairs.data();
    else
      return scores.data();
  }

  // The even and the odd elements of a key's values, in pairs with those of the next key where pairs
  // are mixed.
  static COMPILESPEC_INLINE auto columns_of(const T* value, const T* next) {
    if constexpr (kMixesPairs<T>)
      return interleave(value, next);
    else
      return std::pair(in_register(Storage<T>::lo(value)), in_register(Storage<T>::hi(value)));
  }

  template <class Factor>
  static COMPILESPEC_INLINE Vec add_product(Factor factor, Factor value, Vec sum) {
    if constexpr (kMixesPairs<T>)
      return dot_pairs(factor, value, sum);
    else
      return fma(factor, value, sum);
  }

  // seg_out[rows] = seg_out * alpha + probabilities times values over keys [begin, end) of the
  // chunk.  In pairs, a key outside of them is multiplied as zeros.
  template <int Rows, int Pairs>
  void mix_columns(int64_t row, int64_t begin, int64_t end, int64_t column) {
    Vec acc[Rows][2 * Pairs];
    Acc* target = seg_out.data() + row * value_pad + column;
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < 2 * Pairs; ++v)
        acc[r][v] = load(target + r * value_pad + v * kL) * alpha[row + r];
    constexpr int64_t kStep = kMixedKeys<T>, kStride = kChunk / kStep;
    const auto* p = factors() + row * kStride;
    const bool is_first = row == 0 && column == 0;  // to read the cells
    for (int64_t j = begin / kStep * kStep; j < end; j += kStep) {
      if (is_first) fetch_after_values(j, kStep, end);
      const T* value = (j < begin ? zeros.data() : values[j]) + column;
      const T* next = (j + 1 < end ? values[j + 1] : zeros.data()) + column;
#pragma GCC unroll 4
      for (int pair = 0; pair < Pairs; ++pair) {
        // The factors are read again for every pair: no register is left to keep them in.
        const auto* factor = forget_value(p + j / kStep);
        const auto [even, odd] = columns_of(value + pair * kPair, next + pair * kPair);
#pragma GCC unroll 4
        for (int r = 0; r < Rows; ++r) {
          const auto every = splat(factor[r * kStride]);
          acc[r][2 * pair] = add_product(every, even, acc[r][2 * pair]);
          acc[r][2 * pair + 1] = add_product(every, odd, acc[r][2 * pair + 1]);
        }
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < 2 * Pairs; ++v) store(target + r * value_pad + v * kL, acc[r][v]);
  }

  template <int Rows>
  void mix(int64_t row, int64_t begin, int64_t end) {
    if (begin >= end) return;
    int64_t column = 0;
    for (; column + 2 * kPair <= value_pad; column += 2 * kPair)
      mix_columns<Rows, 2>(row, begin, end, column);
    if (column < value_pad) mix_columns<Rows, 1>(row, begin, end, column);
    std::fill_n(alpha.data() + row, Rows, Acc(1));
  }

  // Keys [from, to) of the chunk: rows of a group together where all of them see the keys, alone at
  // the ragged ends (a masked value may be NaN).  Pairs of keys are whole for each row.
  template <int Rows>
  void mix_group(int64_t row, int64_t base, int64_t from, int64_t to) {
    int64_t first[Rows], last[Rows];
    for (int r = 0; r < Rows; ++r) {
      first[r] = std::max(lo[row + r] - base, from);
      last[r] = std::min<int64_t>(hi[row + r] - base, to);
    }
    const auto [least_first, most_first] = std::minmax_element(first, first + Rows);
    const auto [least_last, most_last] = std::minmax_element(last, last + Rows);
    constexpr int64_t kStep = kMixedKeys<T>;
    int64_t begin = *most_first, end = *least_last;
    if (begin != *least_first) begin = (begin + kStep - 1) / kStep * kStep;
    if (end != *most_last) end = end / kStep * kStep;
    if (begin >= end) begin = end = to;
    for (int r = 0; r < Rows; ++r) mix<1>(row + r, first[r], std::min(last[r], begin));
    mix<Rows>(row, begin, end);
    for (int r = 0; r < Rows; ++r) mix<1>(row + r, std::max(first[r], end), last[r]);
  }

  // body(rows, first row) over rows [row, end), in as few groups as there can be, of as equal
  // sizes.
  template <class F>
  void in_groups(int64_t row, int64_t end, const F& body) {
    int64_t left = (end - row + kGroupRows - 1) / kGroupRows;
    for (int64_t rows; left > 0; row += rows, --left) {
      rows = (end - row + left - 1) / left;
      if (rows == 1) body(std::integral_constant<int, 1>(), row);
      if (rows == 2) body(std::integral_constant<int, 2>(), row);
      if (rows == 3) body(std::integral_constant<int, 3>(), row);
      if constexpr (kGroupRows == 4)
        if (rows == 4) body(std::integral_constant<int, 4>(), row);
    }
  }

  // One segment of the context: seg_top, seg_sum, seg_out of every row (top -inf and sum 0 where it
  // sees nothing).
  void run_segment(int64_t segment) {
    // Where values that each token has of its own begin, or the pair of keys that holds the first.
    const int64_t mixed_alone = tile->shared / kMixedKeys<T> * kMixedKeys<T>;
    seg_top.assign(size_t(num_rows), -std::numeric_limits<Acc>::infinity());
    seg_sum.assign(size_t(num_rows), Acc(0));
    seg_out.assign(size_t(num_rows * value_pad), Acc(0));
    const int64_t from = segment * kSegment, stop = std::min(from + kSegment, tile->hi);
    const bool all_present = gather(from, std::max(from, tile->lo), stop);
    for (int64_t base = from; base < stop; base += kChunk) {
      const int64_t begin = std::max(base, tile->lo), end = std::min(base + kChunk, stop);
      if (begin >= end) continue;
      keys = segment_keys + (base - from);
      values = segment_values + (base - from);
      present = segment_present + (base - from);
      first_key_read = begin - base;
      num_next = std::min<int64_t>(stop - end, kChunk);
      if (begin < tile->shared) score_rows(0, num_rows, begin - base, std::min(end, tile->shared) - base);
      for (int64_t row = 0; row < num_rows; ++row) {
        if (end > tile->shared && row % group == 0) score_own(row, from, begin, end);
        soften(row, base, all_present);
      }
      rescale(0, num_rows);
      mix_rows(0, num_rows, base, 0, std::min<int64_t>(mixed_alone - base, kChunk));
      for (int64_t row = 0; end > mixed_alone && row < num_rows; row += group) {
        if (hi[row] <= std::max(begin, mixed_alone)) continue;
        follow_path(tile->first_token + row / group, from, begin, end);
        mix_rows(row, row + group, base, std::max<int64_t>(mixed_alone - base, 0), kChunk);
      }
    }
  }

  // Scores of a token's rows and the keys of its own in [begin, end).
  void score_own(int64_t row, int64_t from, int64_t begin, int64_t end) {
    const int64_t first = std::max(begin, tile->shared), base = from + (keys - segment_keys);
    if (hi[row] <= first) return;
    follow_path(tile->first_token + row / group, from, begin, end);
    score_rows(row, row + group, first - base, std::min(end, hi[row]) - base);
  }

  void mix_rows(int64_t first_row, int64_t last_row, int64_t base, int64_t from, int64_t to) {
    if (from >= to) return;
    in_groups(first_row, last_row,
              [&](auto rows, int64_t row) { mix_group<rows()>(row, base, from, to); });
  }

  // Fold a segment's result into top, sum, out; the first segment that a row sees is copied.
  void fold(const Acc* other_top, const Acc* other_sum, const Acc* other_out, int64_t segment) {
    for (int64_t r = 0; r < num_rows; ++r) {
      if (hi[r] <= segment * kSegment || lo[r] >= (segment + 1) * kSegment) continue;
      Acc* target = out.data() + r * value_pad;
      const Acc* source = other_out + r * value_pad;
      if (lo[r] >= segment * kSegment || segment == 0) {
        std::copy_n(source, value_pad, target);
        top[r] = other_top[r];
        sum[r] = other_sum[r];
        continue;
      }
      const Acc now = std::max(top[r], other_top[r]);
      const Acc base_score = now == -std::numeric_limits<Acc>::infinity() ? Acc(0) : now;
      const Acc keep = exp(splat(top[r] - base_score))[0],
                add = exp(splat(other_top[r] - base_score))[0];
      for (int64_t h = 0; h < value_pad; h += kL)
        store(target + h, fma(load(source + h), splat(add), load(target + h) * keep));
      sum[r] = sum[r] * keep + other_sum[r] * add;
      top[r] = now;
    }
  }

  void begin_fold() {
    top.resize(size_t(num_rows));
    sum.resize(size_t(num_rows));
    out.resize(size_t(num_rows * value_pad));
  }

  // Normalise (sinks join the sum only), undo the permutation, round, write.
  void finish() {
    for (int64_t r = 0; r < num_rows; ++r) {
      const int64_t token = tile->first_token + r / group, head = kv_head * group + r % group;
      Acc keep = 1, total = sum[r];
      if (problem.sinks) {
        const Acc sink = ((const Acc*)problem.sinks)[head], now = std::max(top[r], sink);
        const Acc base_score = now == -std::numeric_limits<Acc>::infinity() ? Acc(0) : now;
        keep = exp(splat(top[r] - base_score))[0];
        total = total * keep + exp(splat(sink - base_score))[0];
      }
      const Acc factor = total == 0 ? Acc(0) : keep / total;
      T* target = (T*)problem.out + (token * problem.num_heads + head) * problem.value_dim;
      const Acc* source = out.data() + r * value_pad;
      for (int64_t h = 0; h < value_pad; h += kPair) {
        const Vec lo = load(source + h) * factor, hi = load(source + h + kL) * factor;
        if (h + kPair <= problem.value_dim) {
          Storage<T>::store_pair(target + h, lo, hi);
          continue;
        }
        T last[kPair];
        Storage<T>::store_pair(last, lo, hi);
        std::copy_n(last, problem.value_dim - h, target + h);
      }
    }
  }
};

template <class T>
void run(const Problem& problem) {
  using Acc = typename Storage<T>::Acc;
  write_cache<T>(problem);
  static thread_local std::vector<Tile> tiles;
  make_tiles<T>(problem, tiles);
  std::sort(tiles.begin(), tiles.end(),  // the longest context is taken first
            [](const Tile& a, const Tile& b) { return a.hi - a.lo > b.hi - b.lo; });
  double cells = 0;
  for (const Tile& tile : tiles)
    cells += double(tile.num_tokens * problem.num_heads * (tile.hi - tile.lo));
  const double total_ns = cells * double(problem.head_dim + problem.value_dim) / 20;
  const int64_t num_units = int64_t(tiles.size()) * problem.num_kv_heads;
  const int64_t longest = tiles.empty() ? 0 : tiles[0].hi - tiles[0].lo;
  const bool split =
      num_units < 2 * at::get_num_threads() && longest > kSegment && total_ns > 16000;
  const std::vector<Tile>& shared = tiles;
  if (!split) {
    share(num_units, total_ns, [&](std::atomic<int64_t>& next) {
      Worker<T>& worker = Worker<T>::start(problem);
      for (int64_t unit; (unit = next++) < num_units;) {
        worker.bind(shared[unit / problem.num_kv_heads], unit % problem.num_kv_heads);
        worker.begin_fold();
        for (int64_t segment = worker.tile->lo / kSegment; segment * kSegment < worker.tile->hi;
             ++segment) {
          worker.run_segment(segment);
          worker.fold(worker.seg_top.data(), worker.seg_sum.data(), worker.seg_out.data(), segment);
        }
        worker.finish();
      }
    });
    return;
  }
  struct Part {
    int64_t unit, segment;
    Aligned<Acc> top, sum, out;
  };
  std::vector<Part> parts;
  for (int64_t unit = 0; unit < num_units; ++unit) {
    const Tile& tile = shared[unit / problem.num_kv_heads];
    for (int64_t segment = tile.lo / kSegment; segment * kSegment < tile.hi; ++segment)
      parts.push_back({unit, segment, {}, {}, {}});
  }
  share(int64_t(parts.size()), total_ns, [&](std::atomic<int64_t>& next) {
    Worker<T>& worker = Worker<T>::start(problem);
    for (int64_t i, bound = -1; (i = next++) < int64_t(parts.size());) {
      Part& part = parts[i];
      if (bound != part.unit) {
        worker.bind(shared[part.unit / problem.num_kv_heads], part.unit % problem.num_kv_heads);
        bound = part.unit;
      }
      worker.run_segment(part.segment);
      part.top.swap(worker.seg_top);
      part.sum.swap(worker.seg_sum);
      part.out.swap(worker.seg_out);
    }
  });
  Worker<T>& worker = Worker<T>::start(problem);
  for (size_t i = 0; i < parts.size(); ++i) {
    const Part& part = parts[i];
    if (i == 0 || parts[i - 1].unit != part.unit) {
      worker.bind(shared[part.unit / problem.num_kv_heads], part.unit % problem.num_kv_heads);
      worker.begin_fold();
    }
    worker.fold(part.top.data(), part.sum.data(), part.out.data(), part.segment);
    if (i + 1 == parts.size() || parts[i + 1].unit != part.unit) worker.finish();
  }
}

// The cells of a cache [num_blocks, block_size, Nkv, H] whose slots lie evenly apart, each in a place of
// its own.
Cache cache_of(const at::Tensor& cache, const char* name) {
  const int64_t cell = cache.size(1) == 1 ? cache.stride(0) : cache.stride(1);
  TORCH_CHECK((cache.size(3) == 1 || cache.stride(3) == 1) &&
                  (cache.size(0) <= 1 || cache.stride(0) == cache.size(1) * cell),
              "paged_attention: ", name, " must have a unit stride over its last dim, and blocks "
              "that follow each other, got strides ", cache.strides(), " of ", cache.sizes());
  int64_t inner = cell, num_inner = cache.size(0) * cache.size(1), outer = cache.stride(2),
          num_outer = cache.size(2);
  if (num_outer > 1 && (num_inner <= 1 || outer < inner)) {
    std::swap(inner, outer);
    std::swap(num_inner, num_outer);
  }
  TORCH_CHECK(cache.numel() == 0 ||
                  ((num_inner <= 1 || inner >= cache.size(3)) &&
                   (num_outer <= 1 || outer >= inner * (num_inner - 1) + cache.size(3))),
              "paged_attention: cells of ", name, " overlap, with strides ", cache.strides(), " of ",
              cache.sizes());
  return {cache.mutable_data_ptr(), cell, cache.stride(2)};
}

// q, k or v with unit stride over the head dim (a copy only when it has another).
View view_of(const at::Tensor& tensor, at::Tensor& keep) {
  keep = tensor.stride(3) == 1 || tensor.size(3) == 1 ? tensor : tensor.contiguous();
  return {keep.const_data_ptr(), keep.stride(0), keep.stride(1), keep.stride(2)};
}

const int32_t* int32_ptr(const at::Tensor& tensor, const char* name, at::Tensor& keep,
                         int64_t dims = 2) {
  TORCH_CHECK(tensor.scalar_type() == c10::ScalarType::Int && tensor.dim() == dims,
              "paged_attention: ", name, " must be a ", dims, "-d int32 tensor, got ",
              tensor.scalar_type(), " ", tensor.sizes());
  keep = tensor.is_contiguous() ? tensor : tensor.contiguous();
  return (const int32_t*)keep.const_data_ptr();
}

// Values of their own must fit the keys, and their cache the keys' one.
void check_values(const Problem& p, const at::Tensor& key, const at::Tensor& value,
                  const at::Tensor& key_cache, const at::Tensor& value_cache) {
  TORCH_CHECK(value.dim() == 4 && value_cache.dim() == 4,
              "paged_attention: v and its cache have four dims");
  TORCH_CHECK(value.scalar_type() == key.scalar_type() &&
                  value_cache.scalar_type() == key.scalar_type(),
              "paged_attention: q, k, v and the caches share one dtype, got ", key.scalar_type(),
              ", ", value.scalar_type(), " and ", value_cache.scalar_type());
  TORCH_CHECK(value.size(0) == key.size(0) && value.size(1) == key.size(1) &&
                  value.size(2) == key.size(2),
              "paged_attention: k ", key.sizes(), " and v ", value.sizes(), " do not fit");
  TORCH_CHECK(value_cache.size(0) == p.num_blocks && value_cache.size(1) == p.block_size &&
                  value_cache.size(2) == p.num_kv_heads && value_cache.size(3) == p.value_dim,
              "paged_attention: caches ", key_cache.sizes(), " and ", value_cache.sizes(),
              " do not fit k ", key.sizes(), " and v ", value.sizes());
}

// What keys, values, slots and caches say, checked.
void describe_keys(Problem& p, const at::Tensor& key, const c10::optional<at::Tensor>& value,
                   at::Tensor& key_cache, const c10::optional<at::Tensor>& value_cache,
                   const at::Tensor& slot, int64_t value_dim, at::Tensor* keep) {
  const bool has_values = value && value->defined();
  TORCH_CHECK(has_values == (value_cache && value_cache->defined()),
              "paged_attention: v and its cache go together");
  TORCH_CHECK(key.dim() == 4 && key_cache.dim() == 4,
              "paged_attention: q, k, v and the caches have four dims");
  TORCH_CHECK(key_cache.scalar_type() == key.scalar_type(),
              "paged_attention: q, k, v and the caches share one dtype, got ", key.scalar_type(),
              " and ", key_cache.scalar_type());
  p.num_kv_heads = key.size(1);
  p.head_dim = key.size(3);
  p.value_dim = has_values ? value->size(3) : value_dim;
  p.keys_per_batch = key.size(2);
  p.num_keys = key.size(0) * p.keys_per_batch;
  p.num_blocks = key_cache.size(0);
  p.block_size = key_cache.size(1);
  TORCH_CHECK(key_cache.size(2) == p.num_kv_heads && key_cache.size(3) == p.head_dim,
              "paged_attention: cache ", key_cache.sizes(), " does not fit k ", key.sizes());
  if (has_values) check_values(p, key, *value, key_cache, *value_cache);
  p.key = view_of(key, keep[0]);
  if (has_values) p.value = view_of(*value, keep[1]);
  p.slot = int32_ptr(slot, "slot", keep[2]);
  TORCH_CHECK(slot.numel() == p.num_keys, "paged_attention: slot is [", key.size(0), ", ",
              p.keys_per_batch, "], got ", slot.sizes());
  p.key_cache = cache_of(key_cache, "the cache of keys");
  if (has_values) p.value_cache = cache_of(*value_cache, "the cache of values");
}

template <class F>
void with_dtype(c10::ScalarType type, const F& body) {
  switch (type) {
    case c10::ScalarType::Float: body(float()); break;
    case c10::ScalarType::Double: body(double()); break;
    case c10::ScalarType::BFloat16: body(c10::BFloat16()); break;
    case c10::ScalarType::Half: body(c10::Half()); break;
    default: TORCH_CHECK(false, "paged_attention: unsupported dtype ", type);
  }
}

void write_cache_op(const at::Tensor& key, const c10::optional<at::Tensor>& value,
                    at::Tensor& key_cache, const c10::optional<at::Tensor>& value_cache,
                    const at::Tensor& slot) {
  Problem p{};
  at::Tensor keep[3];
  describe_keys(p, key, value, key_cache, value_cache, slot, 0, keep);
  with_dtype(key.scalar_type(), [&](auto zero) { write_cache<decltype(zero)>(p); });
}

at::Tensor paged_attention(const at::Tensor& query, const at::Tensor& key,
                           const c10::optional<at::Tensor>& value, at::Tensor& key_cache,
                           const c10::optional<at::Tensor>& value_cache, const at::Tensor& slot,
                           const at::Tensor& row, const at::Tensor& position,
                           const at::Tensor& block_table, double scale, int64_t window,
                           double softcap, const c10::optional<at::Tensor>& sinks,
                           int64_t value_dim, const c10::optional<at::Tensor>& path,
                           const c10::optional<at::Tensor>& first) {
  using c10::ScalarType;
  TORCH_CHECK(query.dim() == 4, "paged_attention: q, k, v and the caches have four dims");
  const auto type = query.scalar_type();
  TORCH_CHECK(key.scalar_type() == type,
              "paged_attention: q, k, v and the caches share one dtype, got ", type, " and ",
              key.scalar_type());
  Problem p{};
  at::Tensor keep[10];
  describe_keys(p, key, value, key_cache, value_cache, slot, value_dim, keep);
  const int64_t batch = query.size(0);
  p.num_heads = query.size(1);
  p.tokens_per_batch = query.size(2);
  p.num_tokens = batch * p.tokens_per_batch;
  TORCH_CHECK(p.num_kv_heads > 0 && p.num_heads % p.num_kv_heads == 0,
              "paged_attention: ", p.num_heads, " query heads cannot share ", p.num_kv_heads,
              " KV heads");
  const bool has_path = path && path->defined();
  TORCH_CHECK(key.size(0) == batch && (has_path || key.size(2) == p.tokens_per_batch) &&
                  query.size(3) == p.head_dim,
              "paged_attention: q ", query.sizes(), " and k ", key.sizes(), " do not fit");
  TORCH_CHECK(p.has_values() || (p.value_dim > 0 && p.value_dim <= p.head_dim),
              "paged_attention: a value is the first 1 to ", p.head_dim, " numbers of its key, got ",
              p.value_dim);
  at::Tensor out =
      at::empty({batch, p.tokens_per_batch, p.num_heads, p.value_dim}, query.options());
  if (p.num_tokens == 0) return out;
  p.query = view_of(query, keep[3]);
  p.row = int32_ptr(row, "row", keep[4]);
  p.position = int32_ptr(position, "position", keep[5]);
  p.table = int32_ptr(block_table, "block_table", keep[6]);
  TORCH_CHECK(row.numel() == p.num_tokens && position.numel() == p.num_tokens,
              "paged_attention: row and position are [", batch, ", ", p.tokens_per_batch, "]");
  if (has_path) {
    p.path = int32_ptr(*path, "path", keep[8], 3);
    p.path_size = path->size(2);
    TORCH_CHECK(path->numel() == p.num_tokens * p.path_size, "paged_attention: path is [", batch,
                ", ", p.tokens_per_batch, ", ..], got ", path->sizes());
  }
  if (first && first->defined()) {
    p.first = int32_ptr(*first, "first", keep[9]);
    TORCH_CHECK(has_path && first->numel() == p.num_tokens, "paged_attention: first is [", batch,
                ", ", p.tokens_per_batch, "], with a path; got ", first->sizes());
  }
  p.table_rows = block_table.size(0);
  p.table_blocks = block_table.size(1);
  p.out = out.mutable_data_ptr();
  p.window = window;
  p.scale = scale;
  p.softcap = softcap;
  if (sinks && sinks->defined()) {
    TORCH_CHECK(sinks->numel() == p.num_heads, "paged_attention: expected sinks [", p.num_heads,
                "]");
    keep[7] =
        sinks->to(type == ScalarType::Double ? ScalarType::Double : ScalarType::Float).contiguous();
    p.sinks = keep[7].const_data_ptr();
  }
  with_dtype(type, [&](auto zero) { run<decltype(zero)>(p); });
  return out;
}

TORCH_LIBRARY_IMPL(compilespec, CPU, m) {
  m.impl("paged_attention", paged_attention);
  m.impl("write_cache", write_cache_op);
}

}  // namespace paged_attention
}  // namespace compilespec
