// Products of a few rows with a packed weight: the weights are streamed once, sums are float32.
//
// A packed weight is [num_panels, K, 16], so a k step reads one contiguous strip of 16 columns;
// bfloat16 is [num_panels, K / 2, 16, 2], whose strips are pairs of k steps, a cache line each.  Each
// output element is a single chain of fma over k = 0..K-1, or of dot products of pairs, whatever the
// tile, the number of rows or the threads: rows of a batch are bitwise what they are alone.  Kernels
// that include this say how a strip becomes factors (`Strip`).
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
// lies in memory, and so is one of a bfloat16 weight; those of other weights are put together from the
// strips of the two steps.
#if defined(COMPILESPEC_BF16_DOT)
template <class W>
struct Pairs {
  W stored;
};
template <class W>
struct Storage<Pairs<W>> : Storage<W> {};
#endif

namespace packed_linear {

constexpr int kPanel = 16;  // columns of a panel
constexpr int64_t kDepth =
    768;  // k steps per pass when several row tiles reuse a panel: the piece stays in L1

// Reads the 16 columns of a panel in one k step as kVectors accumulator vectors.  A strip is kStride
// stored elements and holds kHeld steps, of which read() is told the place; kSteps steps are
// multiplied at once.  Quantised weights are scaled: by column (kScaled: the finished sum times the
// scale) or by group of k steps (kGrouped: each strip times its group's scales, less their zero points
// first if it kHasZero).
struct PlainStrip {
  static constexpr int kStride = kPanel, kHeld = 1, kSteps = 1;
  static constexpr bool kScaled = false, kGrouped = false, kHasZero = false;
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

// The low halves of a bfloat16 strip's words are a k step, the high halves the next.
template <>
struct Strip<c10::BFloat16> : PlainStrip {
  using Acc = float;
  static constexpr int kStride = 2 * kPanel, kHeld = 2, kVectors = kPanel / kLanes<float>;
  static COMPILESPEC_INLINE Vector<float> read(const c10::BFloat16* strip, int v, int64_t step) {
    const c10::BFloat16* words = strip + v * 2 * kLanes<float>;
    return step == 0 ? Storage<c10::BFloat16>::lo(words) : Storage<c10::BFloat16>::hi(words);
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

template <>
struct Strip<Pairs<c10::BFloat16>> : Strip<c10::BFloat16> {
  static constexpr int kSteps = 2;
  static COMPILESPEC_INLINE VectorU32 read(const Pairs<c10::BFloat16>* strip,
                                           const Pairs<c10::BFloat16>*, int) {
    return Storage<c10::BFloat16>::words(&strip->stored);
  }
};

COMPILESPEC_INLINE Vector<float> multiply_add(VectorU32 factor, VectorU32 strip,
                                              Vector<float> sum) {
  return dot_pairs(factor, strip, sum);
}
#endif

// Accumulator vectors that the register file holds beside a strip and a factor.
constexpr int kBudget = kNumRegisters * 3 / 4;

// Rows of the largest register tile, and panels side by side in a tile of `rows` rows.
template <class W>
constexpr int kTileRows = std::min(6, kBudget / Strip<W>::kVectors);
template <class W>
constexpr int tile_panels(int rows) {
  // Measured: with 16 registers, beyond a row or two one prefetched panel beats several that are
  // not.
  if (kNumRegisters == 16 && rows * 4 > 2 * int(sizeof(W))) return 1;
  return std::clamp(kBudget / (rows * Strip<W>::kVectors), 1, 4);
}

// Scales and zero points of a tile's columns, [groups][16] a panel; k steps are counted from first_k.
struct Scales {
  const float *data, *zero;
  int64_t panel_stride, first_k;
  int shift;  // a group is 2^shift k steps
};

// Bytes of a panel's k step, and k steps that share a cache line.
template <class W>
constexpr int step_bytes = Strip<W>::kStride * int(sizeof(W)) / Strip<W>::kHeld;
template <class W>
constexpr int steps_per_line = std::max(1, 64 / step_bytes<W>);

// Streams of memory that a tile fetches ahead: its panels, or four quarters of a lone one, which is
// too few to hide latency.
constexpr int num_streams(int panels) { return panels == 1 ? 4 : panels; }

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
constexpr bool kReadsMost = step_bytes<W> >= kPanel;

// Elements of W from a panel to the next.
template <class W>
constexpr int64_t panel_elements(int64_t depth) {
  return (depth + Strip<W>::kHeld - 1) / Strip<W>::kHeld * Strip<W>::kStride;
}

// sum[rows][Panels * 16] (+)= x[rows][depth] times `Panels` panels that lie panel_stride apart.
template <class W, int Rows, int Panels>
void tile(const Factor<W>* x, int64_t x_stride, const W* weight, int64_t panel_stride,
          int64_t depth, typename Storage<W>::Acc* sum, int64_t sum_stride, bool first,
          const Ahead& ahead, const Scales& scales) {
  using Acc = typename Storage<W>::Acc;
  using Factors = Vector<Factor<W>>;
  constexpr int kVectors = Strip<W>::kVectors, kHeld = Strip<W>::kHeld;
  constexpr int kSteps = Strip<W>::kSteps;
  Vector<Acc> acc[Rows][Panels * kVectors];
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 16
    for (int v = 0; v < Panels * kVectors; ++v)
      acc[r][v] = first ? Vector<Acc>{} : load(sum + r * sum_stride + v * kLanes<Acc>);
  // Of the strip that holds k steps from k on, the one at `place`, or two.
  const auto read = [&](int64_t k, int64_t place, int p, bool has_next, Factors* strip)
                        __attribute__((always_inline)) {
    const W* from = weight + p * panel_stride + k / kHeld * Strip<W>::kStride;
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) {
      if constexpr (kSteps == 2)
        strip[v] = Strip<W>::read(from, has_next ? from + Strip<W>::kStride : nullptr, v);
      else if constexpr (kHeld == 2)
        // Registers do not hold the words from one step to the next.
        strip[v] = Strip<W>::read(forget_value(from), v, place);
      else
        strip[v] = Strip<W>::read(from, v);
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
  constexpr bool kTogether = (Rows + 1) * Panels * kVectors + 2 <= kNumRegisters;
  constexpr int kWide = kTogether ? Panels : 1;
  const auto step = [&](int64_t k, int64_t place, bool has_next) __attribute__((always_inline)) {
#pragma GCC unroll 16
    for (int p = 0; p < Panels; p += kWide) {
      Factors strip[kWide * kVectors];
#pragma GCC unroll 16
      for (int q = 0; q < kWide; ++q) read(k, place, p + q, has_next, strip + q * kVectors);
#pragma GCC unroll 16
      for (int r = 0; r < Rows; ++r) {
        const Factors factor = splat(x[r * x_stride + (k + place) / kSteps]);
#pragma GCC unroll 16
        for (int v = 0; v < kWide * kVectors; ++v)
          acc[r][p * kVectors + v] = multiply_add(factor, strip[v], acc[r][p * kVectors + v]);
      }
    }
  };
  constexpr int kStreams = num_streams(Panels), kSteps4 = 4 * steps_per_line<W>;
  constexpr int kLines = kSteps4 * step_bytes<W> / 64, kAtOnce = std::max(kHeld, kSteps);
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
    for (int u = 0; u < kSteps4; u += kAtOnce)
#pragma GCC unroll 2
      for (int place = 0; place < kAtOnce; place += kSteps) step(k + u, place, true);
  }
  for (; k < depth; k += kAtOnce)
    for (int64_t place = 0; place < std::min<int64_t>(kAtOnce, depth - k); place += kSteps)
      step(k, place, k + 1 < depth);
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 16
    for (int v = 0; v < Panels * kVectors; ++v)
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

// The register tile of `rows` rows (at most kTileRows) and `panels` panels: 1, what suits these rows,
// or what suits the largest tile, which all tiles of a block share.
template <class W, int Rows>
Tile<W> pick_width(int64_t panels) {
  constexpr int kOwn = tile_panels<W>(Rows), kShared = tile_panels<W>(kTileRows<W>);
  if (panels == kOwn) return tile<W, Rows, kOwn>;
  if (panels == kShared) return tile<W, Rows, kShared>;
  TORCH_INTERNAL_ASSERT(panels == 1);
  return tile<W, Rows, 1>;
}

template <class W>
Tile<W> pick_tile(int64_t rows, int64_t panels) {
  switch (rows) {
    case 1: return pick_width<W, 1>(panels);
    case 2: return pick_width<W, 2>(panels);
    case 3: return pick_width<W, 3>(panels);
    case 4: return pick_width<W, 4>(panels);
    case 5: return pick_width<W, 5>(panels);
    default: return pick_width<W, 6>(panels);
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

// 16 neighbours in memory, register by register: copied whole they would go through memory.
template <class T>
COMPILESPEC_INLINE Lanes<T> load_lanes(const T* source) {
  Lanes<T> result;
#pragma GCC unroll 8
  for (int p = 0; p < Lanes<T>::kParts; ++p) result.part[p] = load(source + p * kLanes<T>);
  return result;
}
template <class Acc>
COMPILESPEC_INLINE void store_lanes(const Lanes<Acc>& value, Acc* target) {
#pragma GCC unroll 8
  for (int p = 0; p < Lanes<Acc>::kParts; ++p) store(target + p * kLanes<Acc>, value.part[p]);
}

// Rounded to the type of the target, and written there.
template <class From, class To>
COMPILESPEC_INLINE void convert_lanes(const Lanes<From>& value, To* target) {
  From numbers[kNumLanes];
  store_lanes(value, numbers);
  for (int i = 0; i < kNumLanes; ++i) target[i] = To(numbers[i]);
}
COMPILESPEC_INLINE void store_lanes(const Lanes<float>& value, c10::BFloat16* target) {
  const auto halves = map_lanes(
      [](Vector<float> part) { return round_to_bfloat16((VectorU32)part) >> 16; }, value);
#if defined(__AVX2__) && !defined(__AVX512F__)
  const __m256i mixed = _mm256_packus_epi32((__m256i)halves.part[0], (__m256i)halves.part[1]);
  _mm256_storeu_si256((__m256i*)target, _mm256_permute4x64_epi64(mixed, 0b11'01'10'00));
#else
  uint16_t bits[kNumLanes];
  convert_lanes(halves, bits);
  std::memcpy(target, bits, sizeof(bits));
#endif
}
COMPILESPEC_INLINE void store_lanes(const Lanes<float>& value, c10::Half* target) {
  convert_lanes(value, target);
}

// Of them, rounded likewise, the columns of a panel that exist.
template <class Acc, class To>
COMPILESPEC_INLINE void store_columns(const Lanes<Acc>& value, int64_t width, To* target) {
  if (width == kPanel) return store_lanes(value, target);
  To results[kNumLanes];
  store_lanes(value, results);
  std::copy_n(results, width, target);
}

// Two of them, neighbours: a cache line of bfloat16 is written at once, which spares its reading.
template <class Acc, class To>
COMPILESPEC_INLINE void store_two(const Lanes<Acc>& first, const Lanes<Acc>& second, To* target) {
#if defined(__AVX512BW__)
  if constexpr (std::is_same_v<To, c10::BFloat16>) {
    __m512i high_halves;
    for (int i = 0; i < 32; ++i) ((int16_t*)&high_halves)[i] = int16_t(2 * i + 1);
    const VectorU32 low = round_to_bfloat16((VectorU32)first.part[0]),
                    high = round_to_bfloat16((VectorU32)second.part[0]);
    const __m512i line = _mm512_permutex2var_epi16((__m512i)low, high_halves, (__m512i)high);
    std::memcpy(target, &line, sizeof(line));
    return;
  }
#endif
  store_lanes(first, target);
  store_lanes(second, target + kNumLanes);
}

// Scale, add the bias, round once, write the columns that exist.
template <class W, class Out, bool kBias>
void finish(const Problem<W>& problem, const typename Storage<W>::Acc* sum, int64_t sum_stride,
            int64_t first_row, int64_t rows, int64_t panel, int64_t panels) {
  using Acc = typename Storage<W>::Acc;
  constexpr int kMostPanels = 4;  // of a tile
  Lanes<Acc> scale[kMostPanels], bias[kMostPanels];
  int64_t width[kMostPanels];  // columns that exist
  for (int64_t p = 0; p < panels; ++p) {
    const int64_t column = (panel + p) * kPanel;
    width[p] = std::min<int64_t>(kPanel, problem.num_columns - column);
    if constexpr (Strip<W>::kScaled)
      scale[p] = map_lanes([](auto part) { return part * Strip<W>::kFactor; },
                           load_lanes(problem.scale + column));
    if constexpr (kBias) {
      Acc numbers[kNumLanes] = {};
      std::copy_n(problem.bias + column, width[p], numbers);
      bias[p] = load_lanes(numbers);
    }
  }
  for (int64_t r = 0; r < rows; ++r) {
    const auto result = [&](int64_t p) __attribute__((always_inline)) {
      Lanes<Acc> value = load_lanes(sum + r * sum_stride + p * kPanel);
      if constexpr (Strip<W>::kScaled) value = map_lanes(std::multiplies(), value, scale[p]);
      if constexpr (kBias) value = map_lanes(std::plus(), value, bias[p]);
      return value;
    };
    Out* to = (Out*)problem.out + (first_row + r) * problem.num_columns + panel * kPanel;
    int64_t p = 0;
    for (; p + 1 < panels && width[p + 1] == kPanel; p += 2)
      store_two(result(p), result(p + 1), to + p * kPanel);
    for (; p < panels; ++p) store_columns(result(p), width[p], to + p * kPanel);
  }
}

template <class W, class Out>
void finish(const Problem<W>& problem, const typename Storage<W>::Acc* sum, int64_t sum_stride,
            int64_t first_row, int64_t rows, int64_t panel, int64_t panels) {
  if (problem.bias)
    finish<W, Out, true>(problem, sum, sum_stride, first_row, rows, panel, panels);
  else
    finish<W, Out, false>(problem, sum, sum_stride, first_row, rows, panel, panels);
}

template <class W>
void finish_any(const Problem<W>& problem, const typename Storage<W>::Acc* sum, int64_t sum_stride,
                int64_t first_row, int64_t rows, int64_t panel, int64_t panels) {
  if constexpr (std::is_same_v<W, double>) {
    finish<W, double>(problem, sum, sum_stride, first_row, rows, panel, panels);
  } else if (problem.x_type == c10::ScalarType::Float) {
    finish<W, float>(problem, sum, sum_stride, first_row, rows, panel, panels);
  } else if (problem.x_type == c10::ScalarType::BFloat16) {
    finish<W, c10::BFloat16>(problem, sum, sum_stride, first_row, rows, panel, panels);
  } else {
    finish<W, c10::Half>(problem, sum, sum_stride, first_row, rows, panel, panels);
  }
}

// One row block against panels [panel, end): a block of one register tile runs through the whole
// depth at once; several tiles share each piece of a panel while it is in L1, their sums waiting in
// scratch (the chain of sums is the same).
template <class W>
void run_block(const Problem<W>& problem, const Factor<W>* x, int64_t x_stride,
               int64_t first_row, int64_t rows, int64_t panel, int64_t end,
               Aligned<typename Storage<W>::Acc>& sums) {
  constexpr int kRows = kTileRows<W>;
  constexpr int64_t kBytes = step_bytes<W>;
  const int64_t num_tiles = (rows + kRows - 1) / kRows, short_tile = rows / num_tiles,
                num_long = rows % num_tiles;
  const int width = tile_panels<W>(num_tiles == 1 ? int(rows) : kRows);
  const int64_t piece = num_tiles == 1 && width > 1 ? problem.depth : kDepth,
                panel_stride = panel_elements<W>(problem.depth);
  const bool is_whole = piece >= problem.depth;  // else sums wait for the next piece
  while (panel < end) {
    const int64_t panels = end - panel >= width ? width : 1, sum_stride = panels * kPanel;
    sums.resize(size_t(rows * sum_stride));
    const Tile<W> kernel = pick_tile<W>(short_tile, panels),
                  long_kernel = num_long ? pick_tile<W>(short_tile + 1, panels) : kernel;
    for (int64_t k = 0; k < std::max<int64_t>(problem.depth, 1); k += piece) {
      const W* from = problem.weight + panel * panel_stride + panel_elements<W>(k);
      const int64_t scale_stride = problem.num_groups * kPanel;
      const Scales scales{problem.scale + panel * scale_stride,
                          problem.zero ? problem.zero + panel * scale_stride : nullptr,
                          scale_stride, k, problem.group_shift};
      const int64_t depth = std::min(piece, problem.depth - k);
      // What comes next is fetched by all the tiles.
      const bool lone = panels == 1;
      const W* next = k + depth < problem.depth ? from + panel_elements<W>(depth)
                                                : problem.weight + (panel + panels) * panel_stride;
      const int64_t length = lone ? depth * kBytes / 4 : depth * kBytes,
                    step = std::max<int64_t>(kBytes, 64) * (lone ? 1 : 4) / num_tiles;
      Ahead ahead{nullptr, lone ? length : panel_stride * int64_t(sizeof(W)), step, (step + 63) / 64};
      if (num_tiles == 1 && !lone) {
        constexpr int64_t kSteps4 = 4 * steps_per_line<W>;
        ahead.near = kReadsMost<W>;
        ahead.lines = 0;
        ahead.turn = (depth - kNear / kBytes) / kSteps4 * kSteps4;
        ahead.jump = (panels - 1) * ahead.stride;
      }
      for (int64_t t = 0, r = 0; t < num_tiles; ++t) {
        const bool is_long = t < num_long;
        const int64_t tile_rows = short_tile + is_long;
        auto* sum = sums.data() + (is_whole ? 0 : r * sum_stride);
        ahead.from = ahead.near ? (const char*)from + kNear
                                : (const char*)next + length * t / num_tiles;
        (is_long ? long_kernel : kernel)(x + r * x_stride + k / Strip<W>::kSteps, x_stride, from,
                                         panel_stride, depth, sum, sum_stride, k == 0, ahead,
                                         scales);
        if (is_whole) finish_any(problem, sum, sum_stride, first_row + r, tile_rows, panel, panels);
        r += tile_rows;
      }
      if (problem.depth == 0) break;
    }
    if (!is_whole) finish_any(problem, sums.data(), sum_stride, first_row, rows, panel, panels);
    panel += panels;
  }
}

// body(first row, rows, first panel, end) for blocks of at most `block` rows, of like numbers of tiles,
// times all panels, shared out among threads.  row_ns: what a row takes with a panel; `width`: panels
// of a tile.
template <class F>
void share_blocks(int64_t num_rows, int64_t tile_rows, int64_t block, double row_ns, int64_t width,
                  const Reading& panels, const F& body) {
  const int64_t num_blocks = (num_rows + block - 1) / block,
                num_tiles = (num_rows + tile_rows - 1) / tile_rows;
  const auto begin_of = [&](int64_t index) {
    return std::min(num_tiles * index / num_blocks * tile_rows, num_rows);
  };
  const double read_ns = double(panels.bytes) / 12,
               compute_ns = double(std::min(block, num_rows)) * row_ns;
  const auto pays =
      int64_t(8000 / (std::max(read_ns, compute_ns) + 50)) + 1;  // 8 us pays for waking a thread
  const int64_t grain = (pays + width - 1) / width * width;  // of whole tiles: lone panels are slower
  parallel_for(num_blocks * panels.count, grain, panels, [&](int64_t unit, int64_t end) {
    while (unit < end) {
      const int64_t index = unit / panels.count, panel = unit % panels.count;
      const int64_t last = std::min(panels.count, panel + end - unit);
      const int64_t first = begin_of(index);
      body(first, begin_of(index + 1) - first, panel, last);
      unit += last - panel;
    }
  });
}

template <class W>
void run(const Problem<W>& problem) {
  using Acc = typename Storage<W>::Acc;
  constexpr int kBytes = sizeof(Factor<W>) / Strip<W>::kSteps;  // of an element of x
  const int64_t fit = (256 << 10) / kBytes / std::max<int64_t>(problem.depth, 1);
  const int64_t block = std::clamp<int64_t>(fit, 24, 192);  // rows whose x stays in L2
  const auto tile_rows = int(std::clamp<int64_t>(problem.num_rows, 1, kTileRows<W>));
  const int64_t panel_bytes = panel_elements<W>(problem.depth) * int64_t(sizeof(W));
  // A step's rows are one block, of which threads take many small shares: its factors are made once.
  static thread_local std::vector<Factor<W>> copied;
  int64_t shared_stride = 0;
  const Factor<W>* shared = problem.num_rows && problem.num_rows <= block
                                ? factors(problem, 0, problem.num_rows, copied, &shared_stride)
                                : nullptr;
  share_blocks(
      problem.num_rows, kTileRows<W>, block, double(problem.depth * kPanel) / 30,
      tile_panels<W>(tile_rows), {(const char*)problem.weight, problem.num_panels, panel_bytes},
      [&](int64_t first_row, int64_t rows, int64_t panel, int64_t end) {
        static thread_local Aligned<Acc> sums;
        int64_t stride = shared_stride;
        const Factor<W>* x = shared ? shared : factors(problem, first_row, rows, copied, &stride);
        run_block(problem, x, stride, first_row, rows, panel, end, sums);
      });
}

}  // namespace packed_linear
}  // namespace compilespec
