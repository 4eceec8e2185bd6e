// Products of a few rows with a packed weight: the weights are streamed once, sums are float32.
//
// A packed weight is [num_panels, K, 16]: one panel holds 16 output columns, k-major, so a k step
// reads one contiguous 16-column strip.  Each output element is a single chain of fma over k =
// 0..K-1, whatever the tile, the number of rows or the threads: rows of a batch are bitwise what
// they are alone.  Kernels that include this say how a strip becomes accumulators (`Strip`).
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <type_traits>
#include <vector>

#include "_vector.h"

namespace compilespec {
namespace packed_linear {

constexpr int kPanel = 16;  // columns of a panel
constexpr int64_t kDepth =
    768;  // k steps per pass when several row tiles reuse a panel: the piece stays in L1

// Reads the 16 columns of one k step, which are kStride stored elements, as accumulator vectors.
// Quantised weights are scaled: by column (kScaled: the finished sum times the scale) or by group of
// k steps (kGrouped: each strip times its group's scales).
struct PlainStrip {
  static constexpr int kStride = kPanel;
  static constexpr bool kScaled = false, kGrouped = false;
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
  static constexpr int column(int lane) { return lane; }
};

// bfloat16 columns are stored interleaved, 0 8 1 9 ...: the low halves of the 32-bit words are
// columns 0..7.
template <>
struct Strip<c10::BFloat16> : PlainStrip {
  using Acc = float;
  static constexpr int kVectors = kPanel / kLanes<float>;
#if defined(__AVX512F__)
  static COMPILESPEC_INLINE Vector<float> read(const c10::BFloat16* strip, int) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)strip));
    return (Vector<float>)_mm512_slli_epi32(wide, 16);
  }
  static constexpr int column(int lane) { return lane / 2 + (lane % 2) * 8; }
#else
  static COMPILESPEC_INLINE Vector<float> read(const c10::BFloat16* strip, int v) {
    const int half = kVectors / 2;
    return v < half ? Storage<c10::BFloat16>::lo(strip + v * kPanel / half)
                    : Storage<c10::BFloat16>::hi(strip + (v - half) * kPanel / half);
  }
  static constexpr int column(int lane) { return lane; }
#endif
};

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

// Scales of a tile's columns, [groups][16] a panel; k steps are counted from first_k.
struct Scales {
  const float* data;
  int64_t panel_stride, first_k;
  int shift;  // a group is 2^shift k steps
};

// sum[rows][panels * 16] (+)= x[rows][depth] times `Panels` panels, which lie panel_stride apart.
//
// One panel is one stream of memory, too few to hide its latency, so a one-panel tile fetches what
// comes after it into L2 as four streams: a quarter apart, from ahead, each ahead_step bytes
// further every four cache lines.  Wide tiles read as many streams as they have panels anyway.
template <class W, int Rows, int Panels>
void tile(const typename Storage<W>::Acc* x, int64_t x_stride, const W* weight,
          int64_t panel_stride, int64_t depth, typename Storage<W>::Acc* sum, int64_t sum_stride,
          const char* ahead, int64_t ahead_step, int64_t quarter, bool first,
          const Scales& scales) {
  using Acc = typename Storage<W>::Acc;
  constexpr int kVectors = Strip<W>::kVectors;
  Vector<Acc> acc[Rows][Panels * kVectors];
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 16
    for (int v = 0; v < Panels * kVectors; ++v)
      acc[r][v] = first ? Vector<Acc>{} : load(sum + r * sum_stride + v * kLanes<Acc>);
  auto step = [&](int64_t k) __attribute__((always_inline)) {
#pragma GCC unroll 16
    for (int p = 0; p < Panels; ++p) {
      Vector<Acc> strip[kVectors];
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v)
        strip[v] = Strip<W>::read(weight + p * panel_stride + k * Strip<W>::kStride, v);
      if constexpr (Strip<W>::kGrouped) {
        const float* group =
            scales.data + p * scales.panel_stride + ((scales.first_k + k) >> scales.shift) * kPanel;
#pragma GCC unroll 16
        for (int v = 0; v < kVectors; ++v) strip[v] *= load(group + v * kLanes<float>);
      }
#pragma GCC unroll 16
      for (int r = 0; r < Rows; ++r) {
        const Vector<Acc> factor = splat(x[r * x_stride + k]);
#pragma GCC unroll 16
        for (int v = 0; v < kVectors; ++v)
          acc[r][p * kVectors + v] = fma(factor, strip[v], acc[r][p * kVectors + v]);
      }
    }
  };
  int64_t k = 0;
  if constexpr (Panels == 1) {
    constexpr int kPerLine = std::max(1, 64 / int(Strip<W>::kStride * sizeof(W)));  // k steps of a cache line
    for (; k + 4 * kPerLine <= depth; k += 4 * kPerLine, ahead += ahead_step) {
#pragma GCC unroll 8
      for (int u = 0; u < 4 * kPerLine; ++u) {
        if (u % kPerLine == 0) __builtin_prefetch(ahead + u / kPerLine * quarter, 0, 2);
        step(k + u);
      }
    }
  }
  for (; k < depth; ++k) step(k);
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
  int64_t num_groups = 1;
  int group_shift = 0;
};

// Rows of x as accumulators: x itself when it already has that type, else a converted copy in
// scratch.
template <class Acc>
const Acc* widen(const void* x, c10::ScalarType type, int64_t stride, int64_t first, int64_t rows,
                 int64_t depth, std::vector<Acc>& scratch, int64_t* out_stride) {
  *out_stride = depth;
  auto copy = [&](auto* source) -> const Acc* {
    scratch.resize(size_t(rows * depth));
    for (int64_t r = 0; r < rows; ++r) {
      auto* from = source + (first + r) * stride;
      Acc* to = scratch.data() + r * depth;
      for (int64_t k = 0; k < depth; ++k) to[k] = float(from[k]);
    }
    return scratch.data();
  };
  if (type == c10::ScalarType::BFloat16) return copy((const c10::BFloat16*)x);
  if (type == c10::ScalarType::Half) return copy((const c10::Half*)x);
  *out_stride = stride;
  return (const Acc*)x + first * stride;
}

template <class W>
using Tile = void (*)(const typename Storage<W>::Acc*, int64_t, const W*, int64_t, int64_t,
                      typename Storage<W>::Acc*, int64_t, const char*, int64_t, int64_t, bool,
                      const Scales&);

// The register tile of `rows` rows (at most kTileRows) that is `panels` panels wide: 1, what suits
// these rows, or what suits the largest tile, which all tiles of a block share.
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

// The 16 results of a strip, by lane, in whatever registers there are.
template <class T>
struct LanesOf {
  typedef T type __attribute__((vector_size(kPanel * sizeof(T))));
};
template <class T>
using Lanes = typename LanesOf<T>::type;

COMPILESPEC_INLINE Lanes<uint16_t> round_lanes(Lanes<float> value, c10::BFloat16*) {
  Lanes<uint32_t> bits;
  std::memcpy(&bits, &value, sizeof(bits));
  const Lanes<uint32_t> rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const Lanes<uint32_t> nan = Lanes<uint32_t>{} + 0x7fc0u;
  return __builtin_convertvector((bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded,
                                 Lanes<uint16_t>);
}
COMPILESPEC_INLINE Lanes<uint16_t> round_lanes(Lanes<float> value, c10::Half*) {
  Lanes<uint16_t> result;
  for (int i = 0; i < kPanel; ++i) result[i] = c10::Half(value[i]).x;
  return result;
}
template <class Acc>
COMPILESPEC_INLINE Lanes<Acc> round_lanes(Lanes<Acc> value, Acc*) {
  return value;
}

// From the order of a strip's lanes to that of the columns.
template <class W, class T>
COMPILESPEC_INLINE auto to_columns(T value) {
  if constexpr (Strip<W>::column(1) == 1) {
    return value;
  } else {
    static_assert(Strip<W>::column(1) == 8 && Strip<W>::column(2) == 1);
#if defined(__clang__)
    return __builtin_shufflevector(value, value, 0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13,
                                   15);
#else
    using Index = std::conditional_t<sizeof(T) == kPanel * 2, uint16_t, uint32_t>;
    return __builtin_shuffle(
        value, Lanes<Index>{0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15});
#endif
  }
}

// Scale, add the bias, round once, write the columns that exist.
template <class W, class Out, bool kBias>
void finish(const Problem<W>& problem, const typename Storage<W>::Acc* sum, int64_t sum_stride,
            int64_t first_row, int64_t rows, int64_t panel, int64_t panels) {
  using Acc = typename Storage<W>::Acc;
  for (int64_t p = 0; p < panels; ++p) {
    const int64_t first = (panel + p) * kPanel,
                  columns = std::min<int64_t>(kPanel, problem.num_columns - first);
    Lanes<Acc> scale = {}, bias = {};
    for (int i = 0; i < kPanel; ++i) {
      const int64_t c = Strip<W>::column(i);
      if constexpr (Strip<W>::kScaled) scale[i] = problem.scale[first + c] * Strip<W>::kFactor;
      if (kBias && c < columns) bias[i] = problem.bias[first + c];
    }
    for (int64_t r = 0; r < rows; ++r) {
      const Acc* from = sum + r * sum_stride + p * kPanel;
      Out* to = (Out*)problem.out + (first_row + r) * problem.num_columns + first;
      Lanes<Acc> value;
      std::memcpy(&value, from, sizeof(value));
      if constexpr (Strip<W>::kScaled) value *= scale;
      if constexpr (kBias) value += bias;
      const auto ordered = to_columns<W>(round_lanes(value, (Out*)nullptr));
      Out rounded[kPanel];
      std::memcpy(rounded, &ordered, sizeof(rounded));
      if (columns == kPanel)
        std::memcpy(to, rounded, sizeof(rounded));
      else
        std::copy_n(rounded, columns, to);
    }
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
// scratch (the chain of fma is the same).
template <class W>
void run_block(const Problem<W>& problem, const typename Storage<W>::Acc* x, int64_t x_stride,
               int64_t first_row, int64_t rows, int64_t panel, int64_t end,
               std::vector<typename Storage<W>::Acc>& sums) {
  constexpr int kRows = kTileRows<W>;
  const int64_t num_tiles = (rows + kRows - 1) / kRows, short_tile = rows / num_tiles,
                num_long = rows % num_tiles;
  const int width = tile_panels<W>(num_tiles == 1 ? int(rows) : kRows);
  const int64_t piece = num_tiles == 1 && width > 1 ? problem.depth : kDepth,
                panel_stride = problem.depth * Strip<W>::kStride;
  while (panel < end) {
    const bool wide = end - panel >= width;
    const int64_t panels = wide ? width : 1, sum_stride = panels * kPanel;
    sums.resize(size_t(rows * sum_stride));
    const Tile<W> kernel = pick_tile<W>(short_tile, panels),
                  long_kernel = num_long ? pick_tile<W>(short_tile + 1, panels) : kernel;
    for (int64_t k = 0; k < std::max<int64_t>(problem.depth, 1); k += piece) {
      const W* weight = problem.weight + panel * panel_stride + k * Strip<W>::kStride;
      const Scales scales{problem.scale + panel * problem.num_groups * kPanel,
                          problem.num_groups * kPanel, k, problem.group_shift};
      const int64_t depth = std::min(piece, problem.depth - k);
      for (int64_t t = 0, r = 0; t < num_tiles; ++t) {
        const bool is_long = t < num_long;
        const int64_t quarter = depth * Strip<W>::kStride * int64_t(sizeof(W)) / 4,
                      step = std::max<int64_t>(Strip<W>::kStride * sizeof(W), 64) / num_tiles;
        const char* ahead = (const char*)(weight + depth * Strip<W>::kStride) + quarter * t / num_tiles;
        (is_long ? long_kernel : kernel)(x + r * x_stride + k, x_stride, weight, panel_stride,
                                         depth, sums.data() + r * sum_stride, sum_stride, ahead,
                                         step, quarter, k == 0, scales);
        r += short_tile + is_long;
      }
      if (problem.depth == 0) break;
    }
    finish_any(problem, sums.data(), sum_stride, first_row, rows, panel, panels);
    panel += panels;
  }
}

template <class W>
void run(const Problem<W>& problem) {
  using Acc = typename Storage<W>::Acc;
  const int64_t fit = (256 << 10) / int64_t(sizeof(Acc)) / std::max<int64_t>(problem.depth, 1);
  const int64_t block = std::clamp<int64_t>(fit, 24, 192);  // rows whose x stays in L2
  const int64_t num_blocks = (problem.num_rows + block - 1) / block;
  const double read_ns = double(problem.depth * Strip<W>::kStride * sizeof(W)) / 12;
  const double compute_ns = double(std::min(block, problem.num_rows) * problem.depth * kPanel) / 30;
  const auto grain =
      int64_t(8000 / (std::max(read_ns, compute_ns) + 50)) + 1;  // 8 us pays for waking a thread
  at::parallel_for(0, num_blocks * problem.num_panels, grain, [&](int64_t unit, int64_t end) {
    static thread_local std::vector<Acc> wide_x, sums;
    while (unit < end) {
      const int64_t first_row = unit / problem.num_panels * block,
                    panel = unit % problem.num_panels;
      const int64_t last = std::min(problem.num_panels, panel + end - unit);
      const int64_t rows = std::min(block, problem.num_rows - first_row);
      int64_t stride;
      const Acc* x = widen<Acc>(problem.x, problem.x_type, problem.x_stride, first_row, rows,
                                problem.depth, wide_x, &stride);
      run_block(problem, x, stride, first_row, rows, panel, last, sums);
      unit += last - panel;
    }
  });
}

}  // namespace packed_linear
}  // namespace compilespec
