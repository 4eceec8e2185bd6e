// packed_grouped_linear on the CPU: weights of 4 or 8 bits in groups, rows of x as int8 in blocks.
//
// Weights are stored unsigned (plus 8, or plus 128), so that one instruction multiplies them with the
// signed integers of x; the sum of a block of x times what was added, and times the zero point, is taken
// off.  A block of 32 k steps is summed in integers, which are exact in any order; its float32 sum is
// one link of a chain over the blocks, so rows are bitwise what they are alone.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <cmath>
#include <cstring>

#include "_panels.h"
#include "_threads.h"
#include "_vector.h"

namespace compilespec {
namespace grouped_linear {

using packed_linear::kPanel;

constexpr int kBlock = 32;  // k steps that share a scale of x
constexpr int kQuad = 4;    // k steps of a dot product
constexpr int kQuads = kBlock / kQuad;
constexpr int kLine = kPanel * kQuad;  // bytes of a panel's quad
constexpr int kColumns = kLanes<float>;  // of a vector: its bytes are their quads
constexpr int kVectors = kPanel / kColumns;

using Bytes = Vector<int32_t>;  // a quad of each column

// A quad of x for every column, loaded here: the compiler would load all rows' first, and spill them.
COMPILESPEC_INLINE Bytes spread(const uint32_t* quad) {
#if defined(__AVX2__)
  Bytes x;
  asm volatile("vpbroadcastd %1, %0" : "=v"(x) : "m"(*quad));
  return x;
#else
  return splat(int32_t(*quad));
#endif
}

// Integer sums of a block, and what a load of 64 stored bytes holds: two quads of 4 bits (`low` and
// `high`), or one of 8.
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
COMPILESPEC_INLINE Bytes dot(Bytes sum, Bytes weight, Bytes x) {
#if defined(__AVX512VNNI__)
  // As in _integer_dot.h: the intrinsic would be compiled to copies of the sums.
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(weight), "v"(x));
#else
  asm("{vex} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(weight), "x"(x));
#endif
  return sum;
}
template <int Bits>
struct Sum {
  Bytes sum;
  COMPILESPEC_INLINE void add(Bytes weight, Bytes x) { sum = dot(sum, weight, x); }
  COMPILESPEC_INLINE Bytes total() const { return sum; }
};
constexpr bool kSplitsBytes = false;
#elif defined(__AVX2__)
#if defined(__AVX512BW__)
COMPILESPEC_INLINE Bytes multiply(Bytes weight, Bytes x) {
  return (Bytes)_mm512_maddubs_epi16((__m512i)weight, (__m512i)x);
}
COMPILESPEC_INLINE Bytes add_pairs(Bytes words) {
  return (Bytes)_mm512_madd_epi16((__m512i)words, _mm512_set1_epi16(1));
}
#else
COMPILESPEC_INLINE Bytes multiply(Bytes weight, Bytes x) {
  return (Bytes)_mm256_maddubs_epi16((__m256i)weight, (__m256i)x);
}
COMPILESPEC_INLINE Bytes add_pairs(Bytes words) {
  return (Bytes)_mm256_madd_epi16((__m256i)words, _mm256_set1_epi16(1));
}
#endif
// In the order written: the compiler would gather products, and keep them in memory.
COMPILESPEC_INLINE Bytes add_words(Bytes sum, Bytes words) {
  asm volatile("vpaddw %1, %0, %0" : "+v"(sum) : "v"(words));
  return sum;
}
// Words hold a block: 16 products of 15 * 127 are 30,480 at most.  So bytes are added up as halves.
template <int Bits>
struct Sum {
  Bytes words;
  COMPILESPEC_INLINE void add(Bytes weight, Bytes x) { words = add_words(words, multiply(weight, x)); }
  COMPILESPEC_INLINE Bytes total() const { return add_pairs(words); }
};
template <>
struct Sum<8> {
  Bytes low, high;
  COMPILESPEC_INLINE void add(Bytes weight_low, Bytes weight_high, Bytes x) {
    low = add_words(low, multiply(weight_low, x));
    high = add_words(high, multiply(weight_high, x));
  }
  COMPILESPEC_INLINE Bytes total() const { return add_pairs(low) + (add_pairs(high) << 4); }
};
constexpr bool kSplitsBytes = true;
#else
template <int Bits>
struct Sum {
  Bytes sum;
  COMPILESPEC_INLINE void add(Bytes weight, Bytes x) {
    const auto w = (const uint8_t*)&weight;
    const auto factor = (const int8_t*)&x;
    for (int c = 0; c < kColumns; ++c)
      for (int u = 0; u < kQuad; ++u) sum[c] += int32_t(w[c * kQuad + u]) * factor[c * kQuad + u];
  }
  COMPILESPEC_INLINE Bytes total() const { return sum; }
};
constexpr bool kSplitsBytes = false;
#endif

// Rows of the largest tile.
constexpr int most_rows(int bits) { return kNumRegisters == 16 && bits == 8 ? 5 : 8; }

// Rows of x: integers [blocks][8][rows] a quad each, scales [blocks][rows], and the sums of each
// `part` of a block, which is what shares a scale of the weight, [blocks][parts][rows].
struct Rows {
  const uint32_t* quads;
  const float *scales, *sums;
};

template <class Scale>
struct Weight {
  const uint8_t* stored;
  const Scale *scale, *zero;  // [panels][groups][16]; zero: or null
  int64_t num_blocks, num_groups;
  int group_shift;  // blocks of a group, as a power of two
};

// 16 numbers of a group, as float32.
template <class Scale>
COMPILESPEC_INLINE Vector<float> widen(const Scale* source, int v) {
  if constexpr (std::is_same_v<Scale, float>) return load(source + v * kColumns);
  Vector<float> value;
#pragma GCC unroll 16
  for (int i = 0; i < kColumns; ++i) value[i] = float(source[v * kColumns + i]);
  return value;
}
#if defined(__AVX2__)
template <>
COMPILESPEC_INLINE Vector<float> widen(const c10::BFloat16* source, int v) {
#if defined(__AVX512F__)
  return (Vector<float>)_mm512_slli_epi32(
      _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)source)), 16);
#else
  return (Vector<float>)_mm256_slli_epi32(
      _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)(source + v * kColumns))), 16);
#endif
}
#endif

// out[NumRows][16] = rows times a panel.  `Parts`: groups of the weight in a block, 1 or 2.
template <int NumRows, int Bits, int Parts, class Scale>
void tile(const Rows& x, const Weight<Scale>& weight, int64_t panel, float* out) {
  constexpr int kLines = kQuads * Bits / 8;  // of 64 bytes, in a block
  constexpr float kAdded = Bits == 4 ? 8.f : 128.f;
  const uint8_t* stored = weight.stored + panel * weight.num_blocks * kLines * kLine;
  const int64_t groups = panel * weight.num_groups;
  Vector<float> total[kVectors][NumRows] = {};
  for (int64_t block = 0; block < weight.num_blocks; ++block, stored += kLines * kLine) {
#pragma GCC unroll 8
    for (int line = 0; line < kLines; ++line)
      __builtin_prefetch(stored + packed_linear::kNear + line * kLine, 0, 3);
    const uint32_t* quads = x.quads + block * kQuads * NumRows;
#pragma GCC unroll 1
    for (int v = 0; v < kVectors; ++v) {
#pragma GCC unroll 2
      for (int part = 0; part < Parts; ++part) {
        Sum<Bits> sum[NumRows] = {};
        constexpr int kOwn = kLines / Parts;
#pragma GCC unroll 8
        for (int i = part * kOwn; i < (part + 1) * kOwn; ++i) {
          Bytes bytes;
          std::memcpy(&bytes, stored + i * kLine + v * kVectorBytes, sizeof(bytes));
          if constexpr (Bits == 4 || kSplitsBytes) {
            const Bytes mask = splat(int32_t(0x0f0f0f0f)), low = bytes & mask,
                        high = (Bytes)((VectorU32)bytes >> 4) & mask;
#pragma GCC unroll 8
            for (int r = 0; r < NumRows; ++r) {
              const Bytes first = spread(quads + i * NumRows + r);
              if constexpr (Bits == 4) {
                sum[r].add(low, first);
                sum[r].add(high, spread(quads + (i + kQuads / 2) * NumRows + r));
              } else if constexpr (kSplitsBytes) {
                sum[r].add(low, high, first);
              }
            }
          } else {
#pragma GCC unroll 8
            for (int r = 0; r < NumRows; ++r)
              sum[r].add(bytes, spread(quads + i * NumRows + r));
          }
        }
        const int64_t group =
            groups + (Parts == 2 ? 2 * block + part : block >> weight.group_shift);
        const Vector<float> scale = widen(weight.scale + group * kPanel, v);
        Vector<float> zero = splat(kAdded);
        if (weight.zero) zero += widen(weight.zero + group * kPanel, v);
#pragma GCC unroll 8
        for (int r = 0; r < NumRows; ++r) {
          const auto wide = __builtin_convertvector(sum[r].total(), Vector<float>);
          const float of_x = x.sums[(block * Parts + part) * NumRows + r];
          const Vector<float> less = fma(-zero, splat(of_x), wide);
          total[v][r] = fma(less, scale * x.scales[block * NumRows + r], total[v][r]);
        }
      }
    }
  }
  for (int r = 0; r < NumRows; ++r)
    for (int v = 0; v < kVectors; ++v) store(out + r * kPanel + v * kColumns, total[v][r]);
}

template <int Bits, int Parts, class Scale>
using Tile = void (*)(const Rows&, const Weight<Scale>&, int64_t, float*);

template <int Bits, int Parts, class Scale, int NumRows = most_rows(Bits)>
Tile<Bits, Parts, Scale> pick_tile(int64_t rows) {
  if constexpr (NumRows > 1)
    if (rows < NumRows) return pick_tile<Bits, Parts, Scale, NumRows - 1>(rows);
  return tile<NumRows, Bits, Parts, Scale>;
}

// A block of a row as integers, in `quads` a row of the tile apart, its scale and the sums of its parts.
template <class T>
void quantise_block(const T* x, int64_t parts, int64_t rows, uint32_t* quads, float* scale,
                    float* sums) {
  float wide[kBlock], most = 0;
  bool is_finite = true;
  for (int i = 0; i < kBlock; ++i) {
    wide[i] = float(x[i]);
    const float magnitude = std::fabs(wide[i]);
    is_finite &= magnitude <= std::numeric_limits<float>::max();
    most = magnitude > most ? magnitude : most;
  }
  const float step = is_finite ? most / 127.f : std::numeric_limits<float>::quiet_NaN();
  const float inverse = step > 0 ? 1.f / step : 0.f, magic = 12582912.f;  // 1.5 * 2^23: it rounds
  *scale = step;
  int8_t ints[kBlock];
  int32_t total[2] = {};
  for (int i = 0; i < kBlock; ++i) {
    float value = is_finite ? wide[i] * inverse : 0.f;
    value = value > 127.f ? 127.f : value < -127.f ? -127.f : value;
    int32_t bits;
    const float moved = value + magic;
    std::memcpy(&bits, &moved, sizeof(bits));
    ints[i] = int8_t(bits - 0x4b400000);
    total[parts == 2 ? i / (kBlock / 2) : 0] += ints[i];
  }
  for (int64_t part = 0; part < parts; ++part) sums[part * rows] = float(total[part]);
  for (int q = 0; q < kQuads; ++q) std::memcpy(quads + q * rows, ints + q * kQuad, kQuad);
}

struct Call {
  at::Tensor x, out;
  const float* bias = nullptr;
  at::Tensor kept_bias;
  int64_t depth, num_rows, num_columns, num_panels;
};

template <class T, int Bits, int Parts, class Scale>
void run(const Call& call, const Weight<Scale>& weight) {
  constexpr int kMost = most_rows(Bits);
  constexpr int64_t kTiles = 8;  // tiles that share what L1 holds of a panel
  const int64_t rows = call.num_rows, blocks = weight.num_blocks, panels = call.num_panels;
  const int64_t num_tiles = (rows + kMost - 1) / kMost;
  const auto first_row = [=](int64_t tile) { return tile * rows / num_tiles; };
  static thread_local Aligned<uint32_t> kept_quads;
  static thread_local std::vector<float> kept_scales, kept_sums;
  kept_quads.resize(size_t(rows * blocks * kQuads));
  kept_scales.resize(size_t(rows * blocks));
  kept_sums.resize(size_t(rows * blocks * Parts));
  uint32_t* quads = kept_quads.data();
  float *scales = kept_scales.data(), *sums = kept_sums.data();
  const auto rows_of = [=](int64_t first) {
    return Rows{quads + first * blocks * kQuads, scales + first * blocks, sums + first * blocks * Parts};
  };
  const T* x = (const T*)call.x.const_data_ptr();
  parallel_for(num_tiles, 65536 / std::max<int64_t>(kMost * call.depth, 1) + 1,
               [&](int64_t tile, int64_t end) {
    for (; tile < end; ++tile) {
      const int64_t first = first_row(tile), count = first_row(tile + 1) - first;
      for (int64_t r = 0; r < count; ++r)
        for (int64_t block = 0; block < blocks; ++block) {
          const int64_t place = first * blocks + block * count + r;
          quantise_block(x + (first + r) * call.depth + block * kBlock, Parts, count,
                         quads + first * blocks * kQuads + block * kQuads * count + r,
                         scales + place,
                         sums + first * blocks * Parts + block * Parts * count + r);
        }
    }
  });
  T* out = (T*)call.out.mutable_data_ptr();
  const int64_t panel_bytes = blocks * kBlock * kPanel * Bits / 8;
  const int64_t groups = (num_tiles + kTiles - 1) / kTiles;
  const double work_ns = double(panel_bytes) / 10 +
                         double(std::min(rows, kTiles * kMost) * call.depth * kPanel) / 60 + 50;
  const Reading reading{(const char*)weight.stored, panels, panel_bytes};
  parallel_for(groups * panels, int64_t(8000 / work_ns) + 1, reading, [&](int64_t unit, int64_t end) {
    float sum[most_rows(Bits) * kPanel];
    for (; unit < end; ++unit) {
      const int64_t group = unit / panels * kTiles, panel = unit % panels;
      const int64_t column = panel * kPanel,
                    width = std::min<int64_t>(kPanel, call.num_columns - column);
      for (int64_t t = group; t < std::min(num_tiles, group + kTiles); ++t) {
        const int64_t first = first_row(t), count = first_row(t + 1) - first;
        pick_tile<Bits, Parts, Scale>(count)(rows_of(first), weight, panel, sum);
        for (int64_t r = 0; r < count; ++r)
          for (int64_t c = 0; c < width; ++c) {
            const float bias = call.bias ? call.bias[column + c] : 0.f;
            out[(first + r) * call.num_columns + column + c] = T(sum[r * kPanel + c] + bias);
          }
      }
    }
  });
}

template <class T, class Scale>
void choose(const Call& call, int bits, const at::Tensor& packed, const at::Tensor& scale,
            const c10::optional<at::Tensor>& zero) {
  Weight<Scale> weight{};
  weight.stored = (const uint8_t*)packed.const_data_ptr();
  weight.scale = (const Scale*)scale.const_data_ptr();
  weight.zero = zero ? (const Scale*)zero->const_data_ptr() : nullptr;
  weight.num_blocks = call.depth / kBlock;
  weight.num_groups = scale.size(1);
  const int64_t group = call.depth / std::max<int64_t>(weight.num_groups, 1);
  while ((kBlock << weight.group_shift) < group) ++weight.group_shift;
  const bool halves = 2 * group == kBlock;
  TORCH_CHECK(group * weight.num_groups == call.depth &&
                  (halves ? bits == 8
                          : weight.num_groups == 1 || (kBlock << weight.group_shift) == group),
              "packed_grouped_linear: expected groups of 16 (8 bits), 32, 64, ... input features, got ",
              weight.num_groups, " groups of ", call.depth);
  if (bits == 4)
    run<T, 4, 1>(call, weight);
  else if (halves)
    run<T, 8, 2>(call, weight);
  else
    run<T, 8, 1>(call, weight);
}

template <class T>
void choose_scale(const Call& call, int bits, const at::Tensor& packed, const at::Tensor& scale,
                  const c10::optional<at::Tensor>& zero) {
  switch (scale.scalar_type()) {
    case c10::ScalarType::Float: return choose<T, float>(call, bits, packed, scale, zero);
    case c10::ScalarType::BFloat16:
      return choose<T, c10::BFloat16>(call, bits, packed, scale, zero);
    default: TORCH_CHECK(false, "packed_grouped_linear: scales of ", scale.scalar_type());
  }
}

at::Tensor packed_grouped_linear(const at::Tensor& given, const at::Tensor& packed,
                                 const at::Tensor& scale, const c10::optional<at::Tensor>& bias,
                                 int64_t out_features, const c10::optional<at::Tensor>& zero) {
  using c10::ScalarType;
  Call call;
  call.x = given.contiguous();
  TORCH_CHECK(call.x.dim() >= 1 && call.x.size(-1) % kBlock == 0,
              "packed_grouped_linear: expected x [..., K], K a multiple of 32, got ", given.sizes());
  call.depth = call.x.size(-1);
  call.num_columns = out_features;
  call.num_panels = (out_features + kPanel - 1) / kPanel;
  const int bits = packed.dim() == 4 && packed.size(1) * 2 * kQuad == call.depth ? 4 : 8;
  TORCH_CHECK(packed.dim() == 4 && packed.scalar_type() == ScalarType::Byte &&
                  packed.is_contiguous() && packed.size(0) == call.num_panels &&
                  packed.size(1) * kQuad * 8 / bits == call.depth && packed.size(2) == kPanel &&
                  packed.size(3) == kQuad,
              "packed_grouped_linear: expected a packed weight [", call.num_panels, ", ",
              call.depth / 4, " (8 bits) or ", call.depth / 8, " (4 bits), 16, 4], got ",
              packed.sizes());
  TORCH_CHECK(scale.dim() == 3 && scale.is_contiguous() && scale.size(0) == call.num_panels &&
                  scale.size(2) == kPanel,
              "packed_grouped_linear: expected scales [", call.num_panels, ", groups, 16], got ",
              scale.sizes());
  TORCH_CHECK(!zero || (zero->sizes() == scale.sizes() && zero->is_contiguous() &&
                        zero->scalar_type() == scale.scalar_type()),
              "packed_grouped_linear: expected zero points like the scales, ", scale.sizes());
  TORCH_CHECK(!bias || (bias->dim() == 1 && bias->size(0) == out_features),
              "packed_grouped_linear: expected bias [", out_features, "]");
  if (bias) {
    call.kept_bias = bias->to(ScalarType::Float).contiguous();
    call.bias = (const float*)call.kept_bias.const_data_ptr();
  }
  auto sizes = call.x.sizes().vec();
  sizes.back() = out_features;
  call.out = at::empty(sizes, call.x.options());
  call.num_rows = out_features ? call.out.numel() / out_features : 0;
  if (call.num_rows == 0) return call.out;
  switch (call.x.scalar_type()) {
    case ScalarType::Float: choose_scale<float>(call, bits, packed, scale, zero); break;
    case ScalarType::BFloat16: choose_scale<c10::BFloat16>(call, bits, packed, scale, zero); break;
    case ScalarType::Half: choose_scale<c10::Half>(call, bits, packed, scale, zero); break;
    default: TORCH_CHECK(false, "packed_grouped_linear: x of ", call.x.scalar_type());
  }
  return call.out;
}

TORCH_LIBRARY_IMPL(compilespec, CPU, m) { m.impl("packed_grouped_linear", packed_grouped_linear); }

}  // namespace grouped_linear
}  // namespace compilespec
