// Products with quantised weights on the CPU: packed_quantized_linear and
// packed_dynamic_int8_linear.
//
// The first widens what is stored to float32, or to bfloat16, and goes through the tiles of _panels.h
// or of _matrix_tiles.h, so that rows are bitwise what they are alone.  The second quantises the rows
// of x as well and sums in integers, which are exact in any order.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <cmath>
#include <cstring>

#include "_integer_dot.h"
#include "_matrix_tiles.h"
#include "_panels.h"
#include "_threads.h"

namespace compilespec {

// Stored weights: int8 with a scale a column, int8 and 4-bit integers with a scale a group of k
// steps, and float8 e4m3 with a scale a column.
struct Int8 {
  int8_t value;
};
struct GroupedInt8 {
  int8_t value;
};
struct GroupedInt4 {
  uint8_t pair;  // columns j (low half) and j + 8 (high half), two's complement
};
template <class W>
struct ZeroPoints {  // W, and the number that stands for 0 in each group
  W stored;
};
struct Float8 {
  uint8_t bits;
};
template <>
struct Storage<Int8> {
  using Acc = float;
};
template <>
struct Storage<GroupedInt8> {
  using Acc = float;
};
template <>
struct Storage<GroupedInt4> {
  using Acc = float;
};
template <>
struct Storage<Float8> {
  using Acc = float;
};
template <class W>
struct Storage<ZeroPoints<W>> : Storage<W> {};

namespace packed_linear {

struct QuantisedStrip : PlainStrip {
  using Acc = float;
  static constexpr int kVectors = kPanel / kLanes<float>;
  static constexpr bool kScaled = true;
  static constexpr float kFactor = 1;  // of the scale
};

COMPILESPEC_INLINE Vector<float> widen_int8(const void* source) {
#if defined(__AVX512F__)
  return (Vector<float>)_mm512_cvtepi32_ps(
      _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)source)));
#elif defined(__AVX2__)
  return (Vector<float>)_mm256_cvtepi32_ps(
      _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)source)));
#else
  Vector<float> value;
  for (int i = 0; i < kLanes<float>; ++i) value[i] = float(((const int8_t*)source)[i]);
  return value;
#endif
}

template <>
struct Strip<Int8> : QuantisedStrip {
  static COMPILESPEC_INLINE Vector<float> read(const Int8* strip, int v) {
    return widen_int8(strip + v * kLanes<float>);
  }
};

template <>
struct Strip<GroupedInt8> : QuantisedStrip {
  static constexpr bool kScaled = false, kGrouped = true;
  static COMPILESPEC_INLINE Vector<float> read(const GroupedInt8* strip, int v) {
    return widen_int8(strip + v * kLanes<float>);
  }
};

template <>
struct Strip<GroupedInt4> : QuantisedStrip {
  static constexpr int kStride = kPanel / 2;
  static constexpr bool kScaled = false, kGrouped = true;
  static COMPILESPEC_INLINE Vector<float> read(const GroupedInt4* strip, int v) {
#if defined(__AVX512F__)
    // The lowest four bits of each lane pick one of 16 floats.
    const __m512 values =
        _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1);
    const __m512i bytes =
        _mm512_cvtepu8_epi32(_mm_castpd_si128(_mm_loaddup_pd((const double*)strip)));
    const __m512i shift = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 4, 4, 4, 4, 4, 4, 4, 4);
    return (Vector<float>)_mm512_permutexvar_ps(_mm512_srlv_epi32(bytes, shift), values);
#elif defined(__AVX2__)
    const __m256i bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)strip));
    return (Vector<float>)_mm256_cvtepi32_ps(
        _mm256_srai_epi32(_mm256_slli_epi32(bytes, v == 0 ? 28 : 24), 28));
#else
    Vector<float> value;
    for (int i = 0; i < kLanes<float>; ++i) {
      const int column = v * kLanes<float> + i;
      const int pair = strip[column % 8].pair;
      value[i] = float(int8_t(uint8_t(column < 8 ? pair << 4 : pair & 0xf0)) >> 4);
    }
    return value;
#endif
  }
};

template <class W>
struct Strip<ZeroPoints<W>> : Strip<W> {
  static constexpr bool kHasZero = true;
  static COMPILESPEC_INLINE Vector<float> read(const ZeroPoints<W>* strip, int v) {
    return Strip<W>::read(&strip->stored, v);
  }
};

// The bits of a float8 e4m3, moved to their places in a float16, are its value times 2^-8.
template <>
struct Strip<Float8> : QuantisedStrip {
  static constexpr float kFactor = 256;
  static COMPILESPEC_INLINE Vector<float> read(const Float8* strip, int v) {
#if defined(__AVX512BW__)
    const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)strip));
    const __m256i half =
        _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(int16_t(0xbfff)));
    return (Vector<float>)_mm512_cvtph_ps(half);
#elif defined(__AVX2__) && defined(__F16C__)
    const __m128i wide =
        _mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i*)(strip + v * kLanes<float>)));
    const __m128i half = _mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16(int16_t(0xbfff)));
    return (Vector<float>)_mm256_cvtph_ps(half);
#else
    Vector<float> value;
    for (int i = 0; i < kLanes<float>; ++i) {
      const unsigned bits = strip[v * kLanes<float> + i].bits;
      value[i] = float(c10::Half(uint16_t((bits & 0x80) << 8 | (bits & 0x7f) << 7),
                                 c10::Half::from_bits()));
    }
    return value;
#endif
  }
};

}  // namespace packed_linear

namespace quantized_linear {

using packed_linear::kPanel;
using packed_linear::Problem;
using packed_linear::Strip;

// What x, bias, scale and the result are, whatever the weight is.
struct Call {
  at::Tensor x, scale, bias, out;
  int64_t x_stride, depth, num_rows;

  Call(const at::Tensor& given, const at::Tensor& packed_scale,
       const c10::optional<at::Tensor>& given_bias, int64_t num_columns, const char* name)
      : x(given), scale(packed_scale) {
    const auto type = x.scalar_type();
    TORCH_CHECK(type == c10::ScalarType::Float || type == c10::ScalarType::BFloat16 ||
                    type == c10::ScalarType::Half,
                name, ": expected x of float32, bfloat16 or float16, got ", type);
    TORCH_CHECK(x.dim() >= 1, name, ": expected x [..., K]");
    TORCH_CHECK(scale.dim() == 3 && scale.size(2) == kPanel && scale.is_contiguous() &&
                    scale.scalar_type() == c10::ScalarType::Float,
                name, ": expected contiguous float32 scales [panels, groups, 16], got ",
                scale.sizes());
    TORCH_CHECK((num_columns + kPanel - 1) / kPanel == scale.size(0), name, ": ", scale.size(0),
                " panels do not hold ", num_columns, " output features");
    TORCH_CHECK(!given_bias || (given_bias->dim() == 1 && given_bias->size(0) == num_columns),
                name, ": expected bias [", num_columns, "]");
    depth = x.size(-1);
    x_stride = depth;
    if (x.dim() == 2 && x.stride(1) == 1)
      x_stride = x.stride(0);
    else if (!x.is_contiguous())
      x = x.contiguous();
    if (given_bias) bias = given_bias->to(c10::ScalarType::Float).contiguous();
    auto sizes = x.sizes().vec();
    sizes.back() = num_columns;
    out = at::empty(sizes, x.options());
    num_rows = num_columns ? out.numel() / num_columns : 0;
  }
};

#if defined(COMPILESPEC_MATRIX_TILES)
float sum_of(const c10::BFloat16* x, int64_t size) {
  constexpr int64_t kPair = Storage<c10::BFloat16>::kPair;
  Vector<float> even{}, odd{};
  int64_t k = 0;
  for (; k + kPair <= size; k += kPair) {
    even += Storage<c10::BFloat16>::lo(x + k);
    odd += Storage<c10::BFloat16>::hi(x + k);
  }
  float sum = sum_lanes<float>(even + odd);
  for (; k < size; ++k) sum += float(x[k]);
  return sum;
}

// While it lives, subnormal numbers are zeros to this thread, as they are to tiles.
struct AsTiles {
#if !defined(COMPILESPEC_EMULATE_MATRIX_TILES)
  const unsigned mode = _mm_getcsr();
  AsTiles() { _mm_setcsr(mode | 0x8040); }
  ~AsTiles() { _mm_setcsr(mode); }
#endif
};

// Panels of W that a thread widens to pairs of bfloat16 before it multiplies, as many rows as there
// are: integers of eight bits and float8 lose nothing.  Groups are multiplied one by one, and a sum is
// theirs, each times its scale, as a chain; of its zero point the sum of the group's x is taken off.
template <class W>
struct Widened {
  const Problem<Pairs<W>>& problem;
  const float* sums_of_x = nullptr;  // [rows][groups], where there are zero points
  int64_t first_panel = 0, num_panels = 0;
  bool is_wide = false;  // whether `lines` hold these panels
  matrix_tiles::Panels lines{};

  Widened rows_from(int64_t first) const {
    return {problem, sums_of_x ? sums_of_x + first * problem.num_groups : nullptr};
  }

  using Source = Strip<Pairs<W>>;
  static constexpr int64_t kSteps = packed_linear::steps_per_line<Pairs<W>>;

  // A cache line of stored weights to as many lines of pairs as it has pairs of steps.
  static COMPILESPEC_INLINE void widen_line(const Pairs<W>* strip, uint32_t* to) {
#if defined(__AVX512VBMI__)
    if constexpr (Source::kStride == kPanel / 2) {
      // Of each element the byte, its half in the lowest four bits, and what these stand for.
      const __m512i bytes = _mm512_loadu_si512(strip);
      __m512i place, shift, numbers;
      for (int i = 0; i < 32; ++i) {
        const int column = i / 2, number = i % 16 - (i % 16 < 8 ? 0 : 16);
        ((uint16_t*)&place)[i] = uint16_t(i % 2 * 8 + column % 8);
        ((uint16_t*)&shift)[i] = column < 8 ? 0 : 4;
        ((uint16_t*)&numbers)[i] = uint16_t(std::bit_cast<uint32_t>(float(number)) >> 16);
      }
#pragma GCC unroll 4
      for (int line = 0; line < 4; ++line) {
        const __m512i from = _mm512_add_epi16(place, _mm512_set1_epi16(int16_t(line * 16)));
        const __m512i halves = _mm512_srlv_epi16(_mm512_permutexvar_epi8(from, bytes), shift);
        _mm512_storeu_si512(to + line * kPanel, _mm512_permutexvar_epi16(halves, numbers));
      }
      return;
    }
#endif
#pragma GCC unroll 4
    for (int64_t k = 0; k < kSteps; k += 2, strip += 2 * Source::kStride, to += kPanel)
      store(to, Source::read(strip, strip + Source::kStride, 0));
  }

  // For one product each piece of the panels is widened just before it is multiplied, in L1.
  void take(int64_t panel, int64_t num, bool once) {
    first_panel = panel;
    num_panels = num;
    is_wide = !once;
    if (is_wide) widen(0, problem.depth);
  }

  // k steps [begin, end) of the panels.  Fetches the piece after that.
  void widen(int64_t begin, int64_t end) {
    const int64_t num_lines = (end - begin + 31) / 32 * 16,
                  stride = packed_linear::panel_elements<Pairs<W>>(problem.depth),
                  ahead = end < problem.depth ? (end - begin) * Source::kStride
                                              : num_panels * stride - begin * Source::kStride;
    static thread_local Aligned<uint32_t> widened;
    if (int64_t(widened.size()) < num_panels * num_lines * kPanel)
      widened.resize(size_t(num_panels * num_lines * kPanel));
    for (int64_t p = 0; p < num_panels; ++p) {
      const Pairs<W>* strip = problem.weight + (first_panel + p) * stride + begin * Source::kStride;
      uint32_t *to = widened.data() + p * num_lines * kPanel, *last = to + num_lines * kPanel;
      int64_t k = begin;
      for (; k + kSteps <= end; k += kSteps, strip += kSteps * Source::kStride) {
        __builtin_prefetch((const char*)(strip + ahead));
        widen_line(strip, to);
        to += kSteps / 2 * kPanel;
      }
      for (; k < end; k += 2, strip += 2 * Source::kStride, to += kPanel)
        store(to, Source::read(strip, k + 1 < end ? strip + Source::kStride : nullptr, 0));
      std::fill(to, last, 0u);
    }
    lines = matrix_tiles::Panels::packed(widened.data(), num_lines);
  }

  // What tiles make of one row, bit for bit, in registers: widened numbers need not go through memory.
  // Of a block of 32 k steps the even ones are a chain of fma, and so are the odd ones; the sum of both
  // is added to that of the blocks before.
  template <int Num>
  __attribute__((noinline)) void multiply_row(const char* x, float* sum) const {
    const int64_t depth = problem.depth, stride = packed_linear::panel_elements<Pairs<W>>(depth);
    const Pairs<W>* strip = problem.weight + first_panel * stride;
    Vector<float> total[Num] = {};
    for (int64_t block = 0; block < depth; block += 32) {
      Vector<float> even[Num] = {}, odd[Num] = {};
      const int64_t end = std::min(block + 32, depth);
      for (int64_t k = block; k < end; k += 2, strip += 2 * Source::kStride) {
        uint32_t pair;
        std::memcpy(&pair, x + k * 2, sizeof(pair));
        const auto first = (Vector<float>)(splat(pair) << 16),
                   second = (Vector<float>)(splat(pair) & 0xffff0000u);
#pragma GCC unroll 4
        for (int p = 0; p < Num; ++p) {
          const Pairs<W>* from = strip + p * stride;
          if (k % kSteps == 0) __builtin_prefetch((const char*)from + packed_linear::kNear);
          even[p] = fma(first, Strip<W>::read(&from->stored, 0), even[p]);
          if (k + 1 < end)
            odd[p] = fma(second, Strip<W>::read(&(from + Source::kStride)->stored, 0), odd[p]);
        }
      }
      for (int p = 0; p < Num; ++p) total[p] += even[p] + odd[p];
    }
    for (int p = 0; p < Num; ++p) store(sum + p * kPanel, total[p]);
  }

  void multiply(int64_t tiles, int64_t num, const char* const* x, int64_t x_stride,
                const int64_t* first, int64_t size, float* const* sum) {
    if constexpr (!Strip<W>::kGrouped)
      if (problem.num_rows == 1) {
        const AsTiles as_tiles;
        num == 4   ? multiply_row<4>(x[0], sum[0])
        : num == 2 ? multiply_row<2>(x[0], sum[0])
                   : multiply_row<1>(x[0], sum[0]);
        return;
      }
    // k steps: threads of one core share its L1, and four panels of them take 8 KiB.
    constexpr int64_t kPiece = 64;
    const int64_t depth = problem.depth, groups = problem.num_groups, width = num * kPanel;
    const int64_t piece = Strip<W>::kGrouped ? std::max<int64_t>(depth / groups, 1)
                          : is_wide          ? std::max<int64_t>(depth, 1)
                                             : kPiece;
    alignas(64) float kept[matrix_tiles::kMostSums * matrix_tiles::kRows * kPanel];
    float* const part[2] = {kept, kept + size * width};
    for (int64_t k = 0; k < std::max<int64_t>(depth, 1); k += piece) {
      const int64_t end = std::min(k + piece, depth);
      if (!is_wide) widen(k, end);
      const auto panels = is_wide ? lines.lines(k / 2, (end - k + 31) / 32 * 16) : lines;
      const char* const from[2] = {x[0] + k * 2, x[1] + k * 2};
      const bool more = !Strip<W>::kGrouped && k > 0;
      matrix_tiles::multiply<matrix_tiles::Pairs>(tiles, num, from, x_stride, panels,
                                                  Strip<W>::kGrouped ? part : sum, width, more,
                                                  matrix_tiles::kNothing);
      if constexpr (Strip<W>::kGrouped) add_group(k / piece, part, tiles, num, first, size, sum);
    }
  }

  // sum (+)= scale * (part - zero * sum of x).
  void add_group(int64_t g, const float* const* part, int64_t tiles, int64_t num,
                 const int64_t* first, int64_t size, float* const* sum) const {
    const int64_t groups = problem.num_groups, width = num * kPanel;
    for (int64_t p = 0; p < num; ++p) {
      const int64_t of_group = ((first_panel + p) * groups + g) * kPanel;
      const Vector<float> scale = load(problem.scale + of_group),
                          zero = Strip<W>::kHasZero ? load(problem.zero + of_group) : Vector<float>{};
      for (int64_t t = 0; t < tiles; ++t)
        for (int64_t r = 0; r < size; ++r) {
          Vector<float> value = load(part[t] + r * width + p * kPanel);
          if constexpr (Strip<W>::kHasZero) value -= zero * sums_of_x[(first[t] + r) * groups + g];
          float* to = sum[t] + r * width + p * kPanel;
          store(to, g == 0 ? value * scale : fma(value, scale, load(to)));
        }
    }
  }
};
#endif

template <class W>
Problem<W> describe(const Call& call, const at::Tensor& packed, const float* zero) {
  Problem<W> problem{};
  problem.x = call.x.const_data_ptr();
  problem.x_stride = call.x_stride;
  problem.x_type = call.x.scalar_type();
  problem.weight = (const W*)packed.const_data_ptr();
  problem.bias = call.bias.defined() ? (const float*)call.bias.const_data_ptr() : nullptr;
  problem.out = call.out.mutable_data_ptr();
  problem.num_rows = call.num_rows;
  problem.depth = call.depth;
  problem.num_columns = call.out.size(-1);
  problem.num_panels = packed.size(0);
  problem.scale = (const float*)call.scale.const_data_ptr();
  problem.zero = zero;
  problem.num_groups = call.scale.size(1);
  while ((problem.num_groups << problem.group_shift) < problem.depth) ++problem.group_shift;
  TORCH_CHECK(problem.num_groups == 1 ||
                  problem.num_groups << problem.group_shift == problem.depth,
              "packed_quantized_linear: expected groups of a power of two, got ",
              problem.num_groups, " of ", problem.depth, " input features");
  return problem;
}

#if defined(COMPILESPEC_MATRIX_TILES)
// Whether this went by tiles: groups must fill them, 32 steps each.
template <class W>
bool run_tiles(const Problem<Pairs<W>>& problem) {
  if (!matrix_tiles::available() || (problem.num_groups > 1 && problem.group_shift < 5)) return false;
  Widened<W> weight{problem};
  static thread_local std::vector<float> sums;
  if (problem.zero) {
    sums.resize(size_t(problem.num_rows * problem.num_groups));
    const int64_t group = (problem.depth + problem.num_groups - 1) / problem.num_groups;
    for (int64_t r = 0; r < problem.num_rows; ++r)
      for (int64_t g = 0; g < problem.num_groups; ++g)
        sums[size_t(r * problem.num_groups + g)] = sum_of(
            (const c10::BFloat16*)problem.x + r * problem.x_stride + g * group, group);
    weight.sums_of_x = sums.data();
  }
  const int64_t bytes = packed_linear::panel_elements<W>(problem.depth) * int64_t(sizeof(W));
  matrix_tiles::run_pairs(problem, weight,
                          {(const char*)problem.weight, problem.num_panels, bytes});
  return true;
}
#endif

// Where x and the CPU allow it, of pairs: of groups by tiles alone.
template <class W>
void start(const Call& call, const at::Tensor& packed, const float* zero = nullptr) {
#if defined(COMPILESPEC_BF16_DOT)
  if (call.x.scalar_type() == c10::ScalarType::BFloat16) {
#if defined(COMPILESPEC_MATRIX_TILES)
    if (run_tiles(describe<Pairs<W>>(call, packed, zero))) return;
#endif
    if constexpr (!Strip<W>::kGrouped) return run(describe<Pairs<W>>(call, packed, zero));
  }
#endif
  run(describe<W>(call, packed, zero));
}

at::Tensor packed_quantized_linear(const at::Tensor& x, const at::Tensor& packed,
                                   const at::Tensor& scale, const c10::optional<at::Tensor>& bias,
                                   int64_t out_features, const c10::optional<at::Tensor>& zero) {
  using c10::ScalarType;
  const Call call(x, scale, bias, out_features, "packed_quantized_linear");
  TORCH_CHECK(!zero || (zero->sizes() == scale.sizes() && zero->is_contiguous() &&
                        zero->scalar_type() == ScalarType::Float),
              "packed_quantized_linear: expected contiguous float32 zero points ", scale.sizes());
  const float* zeros = zero ? (const float*)zero->const_data_ptr() : nullptr;
  const auto type = packed.scalar_type();
  const int64_t width = type == ScalarType::Byte ? kPanel / 2 : kPanel;
  TORCH_CHECK(packed.dim() == 3 && packed.size(2) == width && packed.is_contiguous() &&
                  packed.size(0) == scale.size(0) && packed.size(1) == call.depth,
              "packed_quantized_linear: expected a packed weight [", scale.size(0), ", ",
              call.depth, ", ", width, "], got ", packed.sizes());
  const bool grouped = scale.size(1) > 1;
  if (type == ScalarType::Byte && zero)
    start<ZeroPoints<GroupedInt4>>(call, packed, zeros);
  else if (type == ScalarType::Char && zero)
    start<ZeroPoints<GroupedInt8>>(call, packed, zeros);
  else if (type == ScalarType::Byte)
    start<GroupedInt4>(call, packed);
  else if (type == ScalarType::Char && grouped)
    start<GroupedInt8>(call, packed);
  else if (type == ScalarType::Char)
    start<Int8>(call, packed);
  else if (type == ScalarType::Float8_e4m3fn && !grouped && !zero)
    start<Float8>(call, packed);
  else
    TORCH_CHECK(false, "packed_quantized_linear: unsupported weight type ", type, " with ",
                scale.size(1), " groups", zero ? " and zero points" : "");
  return call.out;
}

// --- both sides in int8 ---

using integer_dot::IntDot;
using integer_dot::kQuad;
using packed_linear::convert_lanes;
using packed_linear::kNumLanes;
using packed_linear::Lanes;
using packed_linear::load_lanes;
using packed_linear::map_lanes;
using packed_linear::splat_lanes;
using packed_linear::store_columns;
using packed_linear::store_lanes;

// 16 elements of a row, widened.
COMPILESPEC_INLINE Lanes<float> read_lanes(const float* source) { return load_lanes(source); }
COMPILESPEC_INLINE Lanes<float> read_lanes(const c10::BFloat16* source) {
  uint16_t bits[kNumLanes];
  uint32_t words[kNumLanes];
  std::memcpy(bits, source, sizeof(bits));
  for (int i = 0; i < kNumLanes; ++i) words[i] = uint32_t(bits[i]) << 16;
  return load_lanes((const float*)words);
}
COMPILESPEC_INLINE Lanes<float> read_lanes(const c10::Half* source) {
  Lanes<float> value;
  for (int p = 0; p < value.kParts; ++p)
    value.part[p] = Storage<c10::Half>::lo(source + p * kLanes<float>);
  return value;
}

// Rounded to T and back.
COMPILESPEC_INLINE Lanes<float> rounded(const Lanes<float>& value, const float*) { return value; }
COMPILESPEC_INLINE Lanes<float> rounded(const Lanes<float>& value, const c10::BFloat16*) {
  return map_lanes(
      [](Vector<float> part) { return (Vector<float>)round_to_bfloat16((VectorU32)part); }, value);
}
COMPILESPEC_INLINE Lanes<float> rounded(const Lanes<float>& value, const c10::Half*) {
  c10::Half narrow[kNumLanes];
  store_lanes(value, narrow);
  return read_lanes(narrow);
}

// 16 elements of a row of x as integers plus `offset`.
COMPILESPEC_INLINE Lanes<int32_t> to_integers(const Lanes<float>& x, float inverse, int32_t offset) {
  return map_lanes(
      [=](Vector<float> part) {
        const float magic = 12582912.f;  // 1.5 * 2^23: adding it rounds to an integer
        Vector<float> value = part * inverse;
        value = value > 127.f ? splat(127.f) : value;
        value = value > -128.f ? value : splat(-128.f);
        return (Vector<int32_t>)(value + magic) - 0x4b400000 + offset;
      },
      x);
}

// f(lanes, first element, their number) over a row, the last lanes filled up with zeros.
template <class T, class F>
COMPILESPEC_INLINE void each_lanes(const T* x, int64_t depth, const F& f) {
  int64_t k = 0;
  for (; k + kNumLanes <= depth; k += kNumLanes) f(read_lanes(x + k), k, int64_t(kNumLanes));
  if (k == depth) return;
  T rest[kNumLanes] = {};
  std::copy(x + k, x + depth, rest);
  f(read_lanes(rest), k, depth - k);
}

// A row of x as integers plus `offset`, and its scale: largest magnitude over 127.5, in the type of x,
// at least 2^-23; NaN if one of them is.
template <class Element, class T>
float quantise_row(const T* x, int64_t depth, int32_t offset, void* target) {
  // Of magnitudes: they order like the numbers, and NaN is above all.
  Lanes<int32_t> bits{};
  each_lanes(x, depth, [&](const Lanes<float>& value, int64_t, int64_t)
                           __attribute__((always_inline)) {
    bits = map_lanes(
        [](Vector<float> part, Vector<int32_t> most) {
          const Vector<int32_t> magnitude = (Vector<int32_t>)part & 0x7fffffff;
          return magnitude > most ? magnitude : most;
        },
        value, bits);
  });
  int32_t magnitudes[kNumLanes];
  store_lanes(bits, magnitudes);
  const int32_t most = *std::max_element(magnitudes, magnitudes + kNumLanes);
  float largest;
  std::memcpy(&largest, &most, sizeof(largest));
  const bool is_nan = largest != largest;
  const float least = 1.1920928955078125e-07f;
  const float given = rounded(splat_lanes(largest / 127.5f), x).part[0][0];
  const float scale = given > least ? given : least, inverse = 1.f / scale;
  each_lanes(x, depth, [&](const Lanes<float>& value, int64_t k, int64_t count)
                           __attribute__((always_inline)) {
    Element elements[kNumLanes];
    convert_lanes(to_integers(value, inverse, offset), elements);
    std::memcpy((char*)target + size_t(k) * sizeof(Element), elements,
                size_t(count) * sizeof(Element));
  });
  return is_nan ? std::numeric_limits<float>::quiet_NaN() : scale;
}

template <class T>
struct DynamicProblem {
  const int8_t* weight;
  const float *scale, *bias;  // bias: or null
  T* out;
  int64_t num_columns;

  // Sums of `rows` rows and `parts` panels: scaled by row, rounded, scaled by column, rounded.
  void finish(const int32_t* sum, const float* row_scale, int64_t first_row, int64_t rows,
              int64_t panel, int64_t parts) const {
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t p = 0; p < parts; ++p) {  // neighbours, so that cache lines are written whole
        const int64_t column = (panel + p) * kPanel,
                      width = std::min<int64_t>(kPanel, num_columns - column);
        const Lanes<int32_t> dot = load_lanes(sum + (r * parts + p) * kPanel);
        const Lanes<float> wide = map_lanes(
            [=](Vector<int32_t> part) {
              return __builtin_convertvector(part, Vector<float>) * row_scale[r];
            },
            dot);
        Lanes<float> value =
            map_lanes(std::multiplies(), rounded(wide, out), load_lanes(scale + column));
        if (bias) {
          float column_bias[kNumLanes] = {};
          std::copy_n(bias + column, width, column_bias);
          value = map_lanes(std::plus(), value, load_lanes(column_bias));
        }
        store_columns(value, width, out + (first_row + r) * num_columns + column);
      }
  }
};

#if defined(COMPILESPEC_MATRIX_TILES)
// The same sums by tiles.
template <class T>
void run_tiles(const Call& call, const DynamicProblem<T>& problem, const at::Tensor& packed) {
  const auto panels = matrix_tiles::Panels::packed(problem.weight, packed.size(1));
  const int64_t stride = panels.num_blocks() * matrix_tiles::kLine, rows = call.num_rows;
  static thread_local Aligned<int8_t> kept_rows;
  static thread_local std::vector<float> kept_scales;
  if (int64_t(kept_rows.size()) < rows * stride) kept_rows.resize(size_t(rows * stride));
  kept_scales.resize(size_t(rows));
  int8_t* x = kept_rows.data();
  float* row_scale = kept_scales.data();
  parallel_for(rows, 65536 / std::max<int64_t>(call.depth, 1) + 1, [&](int64_t row, int64_t end) {
    for (; row < end; ++row) {
      int8_t* to = x + row * stride;
      std::fill(to + call.depth, to + stride, int8_t(0));
      row_scale[row] = quantise_row<int8_t>((const T*)call.x.const_data_ptr() + row * call.x_stride,
                                            call.depth, 0, to);
    }
  });
  matrix_tiles::run<matrix_tiles::Quads>(
      (const char*)x, stride, rows, panels.num_blocks(),
      matrix_tiles::Packed<matrix_tiles::Quads>{panels}, {panels.data, packed.size(0), panels.stride},
      [&](const int32_t* sum, int64_t first, int64_t count, int64_t panel, int64_t num) {
        problem.finish(sum, row_scale + first, first, count, panel, num);
      });
}
#endif

template <class T>
void run_dynamic(const Call& call, const at::Tensor& packed) {
  const int64_t num_quads = packed.size(1), padded = num_quads * kQuad, depth = call.depth;
  const int64_t rows = call.num_rows, num_panels = packed.size(0);
  const T* x = (const T*)call.x.const_data_ptr();
  const DynamicProblem<T> problem{
      (const int8_t*)packed.const_data_ptr(), (const float*)call.scale.const_data_ptr(),
      call.bias.defined() ? (const float*)call.bias.const_data_ptr() : nullptr,
      (T*)call.out.mutable_data_ptr(), call.out.size(-1)};
#if defined(COMPILESPEC_MATRIX_TILES)
  if (matrix_tiles::available()) return run_tiles(call, problem, packed);
#endif
  // Rows in tiles of like size, each as quads [num_quads][rows of the tile].
  const int64_t num_tiles = (rows + IntDot::kRows - 1) / IntDot::kRows;
  const auto first_row = [=](int64_t tile) { return tile * rows / num_tiles; };
  static thread_local std::vector<IntDot::Quad> kept_quads;
  static thread_local std::vector<float> kept_scales;
  kept_quads.resize(size_t(rows * num_quads));
  kept_scales.resize(size_t(rows));
  IntDot::Quad* quads = kept_quads.data();
  float* row_scale = kept_scales.data();
  const int64_t elements = std::max<int64_t>(IntDot::kRows * depth, 1);
  parallel_for(num_tiles, 65536 / elements + 1, [&](int64_t tile, int64_t end) {
    static thread_local std::vector<IntDot::Quad> row;
    row.assign(size_t(num_quads), IntDot::kZeros);  // what lies past the depth stays
    for (; tile < end; ++tile) {
      const int64_t first = first_row(tile), count = first_row(tile + 1) - first;
      for (int64_t r = 0; r < count; ++r) {
        row_scale[first + r] = quantise_row<IntDot::Element>(x + (first + r) * call.x_stride, depth,
                                                             IntDot::kOffset, row.data());
        IntDot::Quad* target = quads + first * num_quads + r;
        for (int64_t q = 0; q < num_quads; ++q) target[q * count] = row[size_t(q)];
      }
    }
  });
  constexpr int64_t kBlock = 8;  // tiles that share what L1 holds of the weight
  const int64_t num_blocks = (num_tiles + kBlock - 1) / kBlock;
  const double work_ns =
      double(padded * kPanel) / 12 +
      double(std::min(rows, kBlock * IntDot::kRows) * padded * kPanel) / IntDot::kPerNs + 50;
  const int64_t most = (rows + num_tiles - 1) / std::max<int64_t>(num_tiles, 1),
                wide = IntDot::parts(int(most));
  const int64_t grain = (int64_t(8000 / work_ns) / wide + 1) * wide;  // of whole tiles
  const Reading reading{(const char*)problem.weight, num_panels, padded * kPanel};
  parallel_for(num_blocks * num_panels, grain, reading, [&](int64_t unit, int64_t end) {
    int32_t sum[IntDot::kRows * integer_dot::kMostParts * kPanel];
    while (unit < end) {
      const int64_t tile = unit / num_panels * kBlock, panel = unit % num_panels;
      const int64_t last_tile = std::min(num_tiles, tile + kBlock);
      const int64_t parts = std::min(end - unit, num_panels - panel) >= wide ? wide : 1;
      for (int64_t t = tile; t < last_tile; ++t) {
        const int64_t first = first_row(t), count = first_row(t + 1) - first;
        integer_dot::pick_tile(count, parts)(quads + first * num_quads, num_quads,
                                             problem.weight + panel * padded * kPanel, sum);
        problem.finish(sum, row_scale + first, first, count, panel, parts);
      }
      unit += parts;
    }
  });
}

at::Tensor packed_dynamic_int8_linear(const at::Tensor& x, const at::Tensor& packed,
                                      const at::Tensor& scale,
                                      const c10::optional<at::Tensor>& bias,
                                      int64_t out_features) {
  using c10::ScalarType;
  const Call call(x, scale, bias, out_features, "packed_dynamic_int8_linear");
  TORCH_CHECK(packed.dim() == 4 && packed.size(2) == kPanel && packed.size(3) == kQuad &&
                  packed.is_contiguous() && packed.scalar_type() == ScalarType::Char &&
                  packed.size(0) == scale.size(0) && scale.size(1) == 1 &&
                  packed.size(1) == (call.depth + kQuad - 1) / kQuad,
              "packed_dynamic_int8_linear: expected a packed int8 weight [", scale.size(0), ", ",
              (call.depth + kQuad - 1) / kQuad, ", 16, 4], got ", packed.sizes());
  switch (x.scalar_type()) {
    case ScalarType::Float: run_dynamic<float>(call, packed); break;
    case ScalarType::BFloat16: run_dynamic<c10::BFloat16>(call, packed); break;
    default: run_dynamic<c10::Half>(call, packed); break;
  }
  return call.out;
}

TORCH_LIBRARY_IMPL(compilespec, CPU, m) {
  m.impl("packed_quantized_linear", packed_quantized_linear);
  m.impl("packed_dynamic_int8_linear", packed_dynamic_int8_linear);
}

}  // namespace quantized_linear
}  // namespace compilespec
