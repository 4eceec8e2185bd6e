// Products of a few rows with a packed weight: the weights are streamed once, sums are float32.
//
// A packed weight is [num_panels, K, columns of a panel], so a k step reads one contiguous strip:
// 16 columns, or 32 of bfloat16, which fill a cache line.  Each output element is a single chain of
// fma over k = 0..K-1, or of dot products of pairs, whatever the tile, the number of rows or the
// threads: rows of a batch are bitwise what they are alone.  Kernels that include this say how a
// strip becomes factors (`Strip`); a tile may take a panel in parts.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <functional>
#include <type_traits>
#include <vector>

#include "_threads.h"
#include "_vector.h"

namespace compilespec {

// W beside bfloat16, where an instruction multiplies pairs: two k steps at once.  A pair of x is as it
// lies in memory; those of a weight are put together from the strips of the two steps.
#if defined(COMPILESPEC_BF16_DOT)
template <class W>
struct Pairs {
  W stored;
};
template <class W>
struct Storage<Pairs<W>> : Storage<W> {};
#endif

namespace packed_linear {

constexpr int kPanel = 16;  // columns of a panel, but of a bfloat16 one
constexpr int64_t kDepth =
    768;  // k steps per pass when several row tiles reuse a panel: the piece stays in L1

// Reads the kColumns columns of a part, of which a panel has kParts, in one k step, which is kStride
// stored elements, as accumulator vectors; column() is where a lane belongs.  Quantised weights are
// scaled: by column (kScaled: the finished sum times the scale) or by group of k steps (kGrouped:
// each strip times its group's scales, less their zero points first if it kHasZero).
struct PlainStrip {
  static constexpr int kColumns = kPanel, kParts = 1, kStride = kPanel;
  static constexpr int kSteps = 1;  // k steps that are multiplied at once
  static constexpr bool kScaled = false, kGrouped = false, kHasZero = false;
  static constexpr int column(int lane) { return lane; }
};
template <class W>
struct Strip : PlainStrip {
  using Acc = typename Storage<W>::Acc;
  static constexpr int kVectors = kPanel / kLanes<Acc>;
  static COMPILESPEC_INLINE Vector<Acc> read(const W* strip, int v) {
    if constexpr (std::is_same_v<W, c10::Half>)
      return Storage<c10::Half>::lo(strip + v * kLanes<float>);
    else
      return load(strip + v * kLanes<Acc>);
  }
};

// A bfloat16 strip is 0 8 1 9 ... 7 15 16 24 ... 23 31: the low halves of the first eight 32-bit
// words are columns 0..7, the high ones 8..15.  A register of 64 bytes takes both halves of the
// strip at once, smaller ones take one after the other.
template <>
struct Strip<c10::BFloat16> : PlainStrip {
  using Acc = float;
  static constexpr int kStride = 32, kColumns = kVectorBytes == 64 ? 32 : 16,
                       kParts = kStride / kColumns, kVectors = kColumns / kLanes<float>;
  static COMPILESPEC_INLINE Vector<float> read(const c10::BFloat16* strip, int v) {
    const int half = kVectors / 2;
    return v < half ? Storage<c10::BFloat16>::lo(strip + v * kColumns / half)
                    : Storage<c10::BFloat16>::hi(strip + (v - half) * kColumns / half);
  }
  static constexpr int column(int lane) {
    return kParts == 2 ? lane : lane % 8 + lane / 8 % 2 * 16 + lane / 16 * 8;
  }
};

// What a row of x and a strip hold of an element, or of a pair.
template <class W>
struct FactorOf {
  using type = typename Storage<W>::Acc;
};
template <class W>
using Factor = typename FactorOf<W>::type;

template <class V>
COMPILESPEC_INLINE V multiply_add(V factor, V strip, V sum) {
  return fma(factor, strip, sum);
}

#if defined(COMPILESPEC_BF16_DOT)
template <class W>
struct FactorOf<Pairs<W>> {
  using type = uint32_t;
};

// Words with the low half of `low` and the high half of `high`.
COMPILESPEC_INLINE VectorU32 join_halves(VectorU32 low, VectorU32 high) {
  return (VectorU32)_mm512_mask_blend_epi16(0xaaaaaaaau, (__m512i)low, (__m512i)high);
}

// What a strip of W widens to are bfloat16 numbers, the high halves of float32 words.  `next`: the
// strip after it, or null.
template <class W>
struct Strip<Pairs<W>> : Strip<W> {
  static constexpr int kSteps = 2;
  static COMPILESPEC_INLINE VectorU32 read(const Pairs<W>* strip, const Pairs<W>* next, int v) {
    const VectorU32 first = (VectorU32)Strip<W>::read(&strip->stored, v),
                    second = next ? (VectorU32)Strip<W>::read(&next->stored, v) : VectorU32{};
    return join_halves(first >> 16, second);
  }
};

// A strip of bfloat16 has those of two vectors in the low and the high halves of its words.
template <>
struct Strip<Pairs<c10::BFloat16>> : Strip<c10::BFloat16> {
  static constexpr int kSteps = 2;
  static COMPILESPEC_INLINE VectorU32 read(const Pairs<c10::BFloat16>* strip,
                                           const Pairs<c10::BFloat16>* next, int v) {
    const VectorU32 first = Storage<c10::BFloat16>::words(&strip->stored),
                    second = next ? Storage<c10::BFloat16>::words(&next->stored) : VectorU32{};
    return v == 0 ? join_halves(first, second << 16) : join_halves(first >> 16, second);
  }
};

COMPILESPEC_INLINE Vector<float> multiply_add(VectorU32 factor, VectorU32 strip,
                                              Vector<float> sum) {
  return dot_pairs(factor, strip, sum);
}
#endif

// Accumulator vectors that the register file holds beside a strip and a factor.
constexpr int kBudget = kNumRegisters * 3 / 4;

// Rows of the largest register tile, and parts side by side in a tile of `rows` rows.
template <class W>
constexpr int kTileRows = std::min(6, kBudget / Strip<W>::kVectors);
template <class W>
constexpr int tile_parts(int rows) {
  // Measured: with 16 registers, beyond a row or two one prefetched part beats several that are
  // not.
  if (kNumRegisters == 16 && rows * 4 > 2 * int(sizeof(W))) return 1;
  constexpr int kMost = 4 * kPanel / Strip<W>::kColumns;
  const int parts = std::clamp(kBudget / (rows * Strip<W>::kVectors), 1, kMost);
  return parts == 1 ? 1 : parts / Strip<W>::kParts * Strip<W>::kParts;  // whole panels
}

// Scales and zero points of a tile's columns, [groups][16] a panel; k steps are counted from first_k.
struct Scales {
  const float *data, *zero;
  int64_t panel_stride, first_k;
  int shift;  // a group is 2^shift k steps
};

// k steps of a panel that share a cache line.
template <class W>
constexpr int steps_per_line = std::max(1, 64 / int(Strip<W>::kStride * sizeof(W)));

// Streams of memory that a tile fetches ahead: its panels, or four quarters of a lone one, which is
// too few to hide latency.
template <class W>
constexpr int num_streams(int parts) {
  return parts == 1 ? 4 : parts / Strip<W>::kParts;
}

// What a tile fetches while it computes: of streams that lie `stride` bytes apart, every four cache
// lines of a panel `lines` lines of each, `step` bytes further than before.  Its share of what comes
// after its panels goes into L2.  A tile alone on its panels fetches into L1 what it needs itself
// kNear bytes later (`near`), and from k step `turn` on, `jump` bytes further, the panels after them.
struct Ahead {
  const char* from;
  int64_t stride, step, lines;
  bool near = false;
  int64_t turn = 0, jump = 0;
};
constexpr int64_t kNear = 2048;  // bytes: of 1 to 8 KiB the fastest, by a little

// Whether memory bounds a few rows.  Weights of four bits take longer to be widened, and fetching
// them only costs time.
template <class W>
constexpr bool kReadsMost = Strip<W>::kStride * sizeof(W) >= kPanel;

// sum[rows][parts * kColumns] (+)= x[rows][depth] times `Parts` parts of panels that lie
// panel_stride apart.
template <class W, int Rows, int Parts>
void tile(const Factor<W>* x, int64_t x_stride, const W* weight, int64_t panel_stride,
          int64_t depth, typename Storage<W>::Acc* sum, int64_t sum_stride, bool first,
          const Ahead& ahead, const Scales& scales) {
  using Acc = typename Storage<W>::Acc;
  using Factors = Vector<Factor<W>>;
  constexpr int kVectors = Strip<W>::kVectors, kParts = Strip<W>::kParts;
  constexpr int kSteps = Strip<W>::kSteps;
  Vector<Acc> acc[Rows][Parts * kVectors];
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 16
    for (int v = 0; v < Parts * kVectors; ++v)
      acc[r][v] = first ? Vector<Acc>{} : load(sum + r * sum_stride + v * kLanes<Acc>);
  const auto read = [&](int64_t k, int p, bool has_next, Factors* strip)
                        __attribute__((always_inline)) {
    const W* part = weight + p / kParts * panel_stride + p % kParts * Strip<W>::kColumns +
                    k * Strip<W>::kStride;
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) {
      if constexpr (kSteps == 2)
        strip[v] = Strip<W>::read(part, has_next ? part + Strip<W>::kStride : nullptr, v);
      else
        strip[v] = Strip<W>::read(part, v);
    }
    if constexpr (Strip<W>::kGrouped) {
      const int64_t group =
          p * scales.panel_stride + ((scales.first_k + k) >> scales.shift) * kPanel;
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) {
        if constexpr (Strip<W>::kHasZero) strip[v] -= load(scales.zero + group + v * kLanes<float>);
        strip[v] *= load(scales.data + group + v * kLanes<float>);
      }
    }
  };
  // All strips of a k step, or two, first where registers hold them: each factor is then read once.
  constexpr bool kTogether = (Rows + 1) * Parts * kVectors + 2 <= kNumRegisters;
  constexpr int kWide = kTogether ? Parts : 1;
  const auto step = [&](int64_t k, bool has_next) __attribute__((always_inline)) {
#pragma GCC unroll 16
    for (int p = 0; p < Parts; p += kWide) {
      Factors strip[kWide * kVectors];
#pragma GCC unroll 16
      for (int q = 0; q < kWide; ++q) read(k, p + q, has_next, strip + q * kVectors);
#pragma GCC unroll 16
      for (int r = 0; r < Rows; ++r) {
        const Factors factor = splat(x[r * x_stride + k / kSteps]);
#pragma GCC unroll 16
        for (int v = 0; v < kWide * kVectors; ++v)
          acc[r][p * kVectors + v] = multiply_add(factor, strip[v], acc[r][p * kVectors + v]);
      }
    }
  };
  constexpr int kStreams = num_streams<W>(Parts), kSteps4 = 4 * steps_per_line<W>;
  constexpr int kLines = kSteps4 * Strip<W>::kStride * int(sizeof(W)) / 64;
  const char* from = ahead.from;
  int64_t k = 0;
  for (; k + kSteps4 <= depth; k += kSteps4, from += ahead.step) {
    if (ahead.near) {
      if (k == ahead.turn) from += ahead.jump;
#pragma GCC unroll 4
      for (int i = 0; i < kStreams; ++i)
#pragma GCC unroll 8
        for (int line = 0; line < kLines; ++line)
          __builtin_prefetch(from + i * ahead.stride + line * 64, 0, 3);
    } else {
      for (int64_t line = 0; line < ahead.lines; ++line)
#pragma GCC unroll 4
        for (int i = 0; i < kStreams; ++i)
          __builtin_prefetch(from + i * ahead.stride + line * 64, 0, 2);
    }
#pragma GCC unroll 8
    for (int u = 0; u < kSteps4; u += kSteps) step(k + u, true);
  }
  for (; k + kSteps <= depth; k += kSteps) step(k, true);
  if (kSteps == 2 && k < depth) step(k, false);
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 16
    for (int v = 0; v < Parts * kVectors; ++v)
      store(sum + r * sum_stride + v * kLanes<Acc>, acc[r][v]);
}

template <class W>
struct Problem {
  using Acc = typename Storage<W>::Acc;
  const void* x;
  int64_t x_stride;
  c10::ScalarType x_type;
  const W* weight;
  const Acc* bias;  // or null
  void* out;
  int64_t num_rows, depth, num_columns, num_panels;
  const float* scale = nullptr;  // [num_panels][num_groups][16], where the strips are scaled
  const float* zero = nullptr;   // the same, where they have zero points
  int64_t num_groups = 1;
  int group_shift = 0;
};

// Rows of x as factors: x itself when it already is what it takes, else a copy in scratch.
template <class W>
const Factor<W>* factors(const Problem<W>& problem, int64_t first, int64_t rows,
                         std::vector<Factor<W>>& scratch, int64_t* out_stride) {
  const int64_t stride = problem.x_stride, depth = problem.depth;
  const int64_t size = (depth + Strip<W>::kSteps - 1) / Strip<W>::kSteps;
  const auto copy = [&](auto* source) {
    *out_stride = size;
    // It only grows: what a vector gains it sets to zero first.
    if (scratch.size() < size_t(rows * size)) scratch.resize(size_t(rows * size));
    for (int64_t r = 0; r < rows; ++r) {
      auto* from = source + (first + r) * stride;
      Factor<W>* to = scratch.data() + r * size;
      if constexpr (Strip<W>::kSteps == 2) {
        if (size) to[size - 1] = 0;
        std::memcpy(to, from, size_t(depth) * sizeof(*from));
      } else {
        for (int64_t k = 0; k < depth; ++k) to[k] = float(from[k]);
      }
    }
    return (const Factor<W>*)scratch.data();
  };
  if constexpr (Strip<W>::kSteps == 2) {
    auto* x = (const c10::BFloat16*)problem.x;
    if (depth % 2 || stride % 2 || (uintptr_t)x % sizeof(Factor<W>)) return copy(x);
    *out_stride = stride / 2;
    return (const Factor<W>*)(x + first * stride);
  } else {
    if (problem.x_type == c10::ScalarType::BFloat16) return copy((const c10::BFloat16*)problem.x);
    if (problem.x_type == c10::ScalarType::Half) return copy((const c10::Half*)problem.x);
    *out_stride = stride;
    return (const Factor<W>*)problem.x + first * stride;
  }
}

template <class W>
using Tile = void (*)(const Factor<W>*, int64_t, const W*, int64_t, int64_t,
                      typename Storage<W>::Acc*, int64_t, bool, const Ahead&, const Scales&);

// The register tile of `rows` rows (at most kTileRows) that is `parts` parts wide: 1, what suits
// these rows, or what suits the largest tile, which all tiles of a block share.
template <class W, int Rows>
Tile<W> pick_width(int64_t parts) {
  constexpr int kOwn = tile_parts<W>(Rows), kShared = tile_parts<W>(kTileRows<W>);
  if (parts == kOwn) return tile<W, Rows, kOwn>;
  if (parts == kShared) return tile<W, Rows, kShared>;
  TORCH_INTERNAL_ASSERT(parts == 1);
  return tile<W, Rows, 1>;
}

template <class W>
Tile<W> pick_tile(int64_t rows, int64_t parts) {
  switch (rows) {
    case 1: return pick_width<W, 1>(parts);
    case 2: return pick_width<W, 2>(parts);
    case 3: return pick_width<W, 3>(parts);
    case 4: return pick_width<W, 4>(parts);
    case 5: return pick_width<W, 5>(parts);
    default: return pick_width<W, 6>(parts);
  }
}

// 16 numbers in the registers that they take.  (One vector wider than a register would be compared
// number by number.)
constexpr int kNumLanes = 16;
template <class T>
struct Lanes {
  static constexpr int kParts = kNumLanes / kLanes<T>;
  Vector<T> part[kParts];
};

// f of each register of one or several Lanes.
template <class F, class First, class... Rest>
COMPILESPEC_INLINE auto map_lanes(const F& f, const First& first, const Rest&... rest) {
  using Result = decltype(f(first.part[0], rest.part[0]...));
  Lanes<std::remove_cvref_t<decltype(Result{}[0])>> result;
#pragma GCC unroll 8
  for (int p = 0; p < First::kParts; ++p) result.part[p] = f(first.part[p], rest.part[p]...);
  return result;
}

template <class T>
COMPILESPEC_INLINE Lanes<T> splat_lanes(T value) {
  Lanes<T> result;
  for (auto& part : result.part) part = splat(value);
  return result;
}

// 16 neighbours in memory.
template <class T>
COMPILESPEC_INLINE Lanes<T> load_lanes(const T* source) {
  Lanes<T> result;
  std::memcpy(result.part, source, sizeof(result.part));
  return result;
}
template <class To, class T>
COMPILESPEC_INLINE void convert_lanes(const Lanes<T>& value, To* target) {
  T numbers[kNumLanes];
  std::memcpy(numbers, value.part, sizeof(numbers));
  for (int i = 0; i < kNumLanes; ++i) target[i] = To(numbers[i]);
}

// Rounded to the type of the target, and written there.
COMPILESPEC_INLINE void store_lanes(const Lanes<float>& value, c10::BFloat16* target) {
  const auto halves = map_lanes(
      [](Vector<float> part) { return round_to_bfloat16((VectorU32)part) >> 16; }, value);
  uint16_t bits[kNumLanes];
  convert_lanes(halves, bits);
  std::memcpy(target, bits, sizeof(bits));
}
COMPILESPEC_INLINE void store_lanes(const Lanes<float>& value, c10::Half* target) {
  convert_lanes(value, target);
}
template <class Acc>
COMPILESPEC_INLINE void store_lanes(const Lanes<Acc>& value, Acc* target) {
  std::memcpy(target, value.part, sizeof(value.part));
}

// Scale, add the bias, round once, write the columns that exist.
template <class W, class Out, bool kBias>
void finish(const Problem<W>& problem, const typename Storage<W>::Acc* sum, int64_t sum_stride,
            int64_t first_row, int64_t rows, int64_t part, int64_t parts) {
  using Acc = typename Storage<W>::Acc;
  constexpr int kRun = 8;      // lanes that are neighbouring columns
  constexpr int kMostSets = 4;  // of lanes, in the widest tile
  const int num_sets = int(parts) * Strip<W>::kColumns / kNumLanes;
  const auto column = [&](int set, int i) {
    const int lane = set * kNumLanes + i, inside = lane % Strip<W>::kColumns;
    return part * Strip<W>::kColumns + (lane - inside) + Strip<W>::column(inside);
  };
  Acc scale[kMostSets][kNumLanes] = {}, bias[kMostSets][kNumLanes] = {};
  for (int set = 0; set < num_sets; ++set)
    for (int i = 0; i < kNumLanes; ++i) {
      const int64_t c = column(set, i);
      if constexpr (Strip<W>::kScaled) scale[set][i] = problem.scale[c] * Strip<W>::kFactor;
      if (kBias && c < problem.num_columns) bias[set][i] = problem.bias[c];
    }
  const bool whole = (part + parts) * Strip<W>::kColumns <= problem.num_columns;
  for (int64_t r = 0; r < rows; ++r) {
    Out* to = (Out*)problem.out + (first_row + r) * problem.num_columns;
    for (int set = 0; set < num_sets; ++set) {
      Lanes<Acc> value = load_lanes(sum + r * sum_stride + set * kNumLanes);
      if constexpr (Strip<W>::kScaled)
        value = map_lanes(std::multiplies(), value, load_lanes(scale[set]));
      if constexpr (kBias) value = map_lanes(std::plus(), value, load_lanes(bias[set]));
      Out results[kNumLanes];
      store_lanes(value, results);
      if (whole)
        for (int i = 0; i < kNumLanes; i += kRun)
          std::memcpy(to + column(set, i), results + i, kRun * sizeof(Out));
      else
        for (int i = 0; i < kNumLanes; ++i)
          if (column(set, i) < problem.num_columns) to[column(set, i)] = results[i];
    }
  }
}

template <class W, class Out>
void finish(const Problem<W>& problem, const typename Storage<W>::Acc* sum, int64_t sum_stride,
            int64_t first_row, int64_t rows, int64_t part, int64_t parts) {
  if (problem.bias)
    finish<W, Out, true>(problem, sum, sum_stride, first_row, rows, part, parts);
  else
    finish<W, Out, false>(problem, sum, sum_stride, first_row, rows, part, parts);
}

template <class W>
void finish_any(const Problem<W>& problem, const typename Storage<W>::Acc* sum, int64_t sum_stride,
                int64_t first_row, int64_t rows, int64_t part, int64_t parts) {
  if constexpr (std::is_same_v<W, double>) {
    finish<W, double>(problem, sum, sum_stride, first_row, rows, part, parts);
  } else if (problem.x_type == c10::ScalarType::Float) {
    finish<W, float>(problem, sum, sum_stride, first_row, rows, part, parts);
  } else if (problem.x_type == c10::ScalarType::BFloat16) {
    finish<W, c10::BFloat16>(problem, sum, sum_stride, first_row, rows, part, parts);
  } else {
    finish<W, c10::Half>(problem, sum, sum_stride, first_row, rows, part, parts);
  }
}

// One row block against parts [part, end): a block of one register tile runs through the whole
// depth at once; several tiles share each piece of a panel while it is in L1, their sums waiting in
// scratch (the chain of sums is the same).
template <class W>
void run_block(const Problem<W>& problem, const Factor<W>* x, int64_t x_stride,
               int64_t first_row, int64_t rows, int64_t part, int64_t end,
               Aligned<typename Storage<W>::Acc>& sums) {
  constexpr int kRows = kTileRows<W>, kStride = Strip<W>::kStride, kParts = Strip<W>::kParts;
  const int64_t num_tiles = (rows + kRows - 1) / kRows, short_tile = rows / num_tiles,
                num_long = rows % num_tiles;
  const int width = tile_parts<W>(num_tiles == 1 ? int(rows) : kRows);
  const int64_t piece = num_tiles == 1 && width > 1 ? problem.depth : kDepth,
                panel_stride = problem.depth * kStride;
  const bool is_whole = piece >= problem.depth;  // else sums wait for the next piece
  while (part < end) {
    const int64_t parts = end - part >= width ? width : 1, sum_stride = parts * Strip<W>::kColumns,
                  place = part % kParts,  // in its panel
                  num_panels = std::max<int64_t>(parts / kParts, 1);
    sums.resize(size_t(rows * sum_stride));
    const Tile<W> kernel = pick_tile<W>(short_tile, parts),
                  long_kernel = num_long ? pick_tile<W>(short_tile + 1, parts) : kernel;
    for (int64_t k = 0; k < std::max<int64_t>(problem.depth, 1); k += piece) {
      const W* panel = problem.weight + part / kParts * panel_stride + k * kStride;
      const int64_t scale_stride = problem.num_groups * kPanel;
      const Scales scales{problem.scale + part * scale_stride,
                          problem.zero ? problem.zero + part * scale_stride : nullptr,
                          scale_stride, k, problem.group_shift};
      const int64_t depth = std::min(piece, problem.depth - k);
      // What comes next is fetched by all the tiles, and by both parts of a panel taken in parts.
      const bool lone = parts == 1;
      const W* next = k + depth < problem.depth
                          ? panel + depth * kStride
                          : problem.weight + (part / kParts + num_panels) * panel_stride;
      const int64_t num_runs = lone ? num_tiles * kParts : num_tiles, bytes = kStride * int64_t(sizeof(W)),
                    length = lone ? depth * bytes / 4 : depth * bytes,
                    step = std::max<int64_t>(bytes, 64) * (lone ? 1 : 4) / num_runs;
      Ahead ahead{nullptr, lone ? length : panel_stride * int64_t(sizeof(W)), step, (step + 63) / 64};
      if (num_tiles == 1 && !lone) {
        constexpr int64_t kSteps4 = 4 * steps_per_line<W>;
        ahead.near = kReadsMost<W>;
        ahead.lines = 0;
        ahead.turn = (depth - kNear / bytes) / kSteps4 * kSteps4;
        ahead.jump = (num_panels - 1) * ahead.stride;
      }
      for (int64_t t = 0, r = 0; t < num_tiles; ++t) {
        const bool is_long = t < num_long;
        const int64_t tile_rows = short_tile + is_long;
        auto* sum = sums.data() + (is_whole ? 0 : r * sum_stride);
        ahead.from = ahead.near ? (const char*)panel + kNear
                                : (const char*)next + length * (place * num_tiles + t) / num_runs;
        (is_long ? long_kernel : kernel)(x + r * x_stride + k / Strip<W>::kSteps, x_stride,
                                         panel + place * Strip<W>::kColumns, panel_stride, depth,
                                         sum, sum_stride, k == 0, ahead, scales);
        if (is_whole) finish_any(problem, sum, sum_stride, first_row + r, tile_rows, part, parts);
        r += tile_rows;
      }
      if (problem.depth == 0) break;
    }
    if (!is_whole) finish_any(problem, sums.data(), sum_stride, first_row, rows, part, parts);
    part += parts;
  }
}

template <class W>
void run(const Problem<W>& problem) {
  using Acc = typename Storage<W>::Acc;
  constexpr int kParts = Strip<W>::kParts, kColumns = Strip<W>::kColumns;
  constexpr int kBytes = sizeof(Factor<W>) / Strip<W>::kSteps;  // of an element of x
  const int64_t fit = (256 << 10) / kBytes / std::max<int64_t>(problem.depth, 1);
  const int64_t block = std::clamp<int64_t>(fit, 24, 192);  // rows whose x stays in L2
  const int64_t num_blocks = (problem.num_rows + block - 1) / block;  // of like numbers of tiles
  const auto block_begin = [&](int64_t index) {
    const int64_t num_tiles = (problem.num_rows + kTileRows<W> - 1) / kTileRows<W>;
    return std::min(num_tiles * index / num_blocks * kTileRows<W>, problem.num_rows);
  };
  const int64_t num_parts = (problem.num_columns + kColumns - 1) / kColumns;
  const double read_ns = double(problem.depth * Strip<W>::kStride * sizeof(W)) / 12;
  const double compute_ns =
      double(std::min(block, problem.num_rows) * problem.depth * kColumns * kParts) / 30;
  const auto tile_rows = int(std::clamp<int64_t>(problem.num_rows, 1, kTileRows<W>));
  const int64_t width = std::max(tile_parts<W>(tile_rows) / kParts, 1);  // panels of a tile
  const auto pays =
      int64_t(8000 / (std::max(read_ns, compute_ns) + 50)) + 1;  // 8 us pays for waking a thread
  const int64_t grain = (pays + width - 1) / width * width;  // of whole tiles: lone panels are slower
  const int64_t panel_bytes = problem.depth * Strip<W>::kStride * int64_t(sizeof(W));
  const Reading reading{(const char*)problem.weight, problem.num_panels, panel_bytes};
  // A step's rows are one block, of which threads take many small shares: its factors are made once.
  static thread_local std::vector<Factor<W>> copied;
  int64_t shared_stride = 0;
  const Factor<W>* shared =
      num_blocks == 1 ? factors(problem, 0, problem.num_rows, copied, &shared_stride) : nullptr;
  parallel_for(num_blocks * problem.num_panels, grain, reading, [&](int64_t unit, int64_t end) {
    static thread_local Aligned<Acc> sums;
    while (unit < end) {
      const int64_t index = unit / problem.num_panels, panel = unit % problem.num_panels;
      const int64_t last = std::min(problem.num_panels, panel + end - unit);
      const int64_t first_row = block_begin(index), rows = block_begin(index + 1) - first_row;
      int64_t stride = shared_stride;
      const Factor<W>* x = shared ? shared : factors(problem, first_row, rows, copied, &stride);
      run_block(problem, x, stride, first_row, rows, panel * kParts,
                std::min(num_parts, last * kParts), sums);
      unit += last - panel;
    }
  });
}

}  // namespace packed_linear
}  // namespace compilespec
