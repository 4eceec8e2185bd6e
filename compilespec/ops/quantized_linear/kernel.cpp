// Products with quantised weights on the CPU: packed_quantized_linear and
// packed_dynamic_int8_linear.
//
// The first widens each stored strip to float32 and goes through the tiles of _panels.h, so that
// rows are bitwise what they are alone.  The second quantises the rows of x as well and sums in
// integers, which are exact in any order.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <cmath>
#include <cstring>

#include "_panels.h"

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

template <class W>
void start(const Call& call, const at::Tensor& packed) {
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
  problem.num_groups = call.scale.size(1);
  while ((problem.num_groups << problem.group_shift) < problem.depth) ++problem.group_shift;
  TORCH_CHECK(problem.num_groups == 1 ||
                  problem.num_groups << problem.group_shift == problem.depth,
              "packed_quantized_linear: expected groups of a power of two, got ",
              problem.num_groups, " of ", problem.depth, " input features");
  run(problem);
}

at::Tensor packed_quantized_linear(const at::Tensor& x, const at::Tensor& packed,
                                   const at::Tensor& scale, const c10::optional<at::Tensor>& bias,
                                   int64_t out_features) {
  using c10::ScalarType;
  const Call call(x, scale, bias, out_features, "packed_quantized_linear");
  const auto type = packed.scalar_type();
  const int64_t width = type == ScalarType::Byte ? kPanel / 2 : kPanel;
  TORCH_CHECK(packed.dim() == 3 && packed.size(2) == width && packed.is_contiguous() &&
                  packed.size(0) == scale.size(0) && packed.size(1) == call.depth,
              "packed_quantized_linear: expected a packed weight [", scale.size(0), ", ",
              call.depth, ", ", width, "], got ", packed.sizes());
  const bool grouped = scale.size(1) > 1;
  if (type == ScalarType::Byte)
    start<GroupedInt4>(call, packed);
  else if (type == ScalarType::Char && grouped)
    start<GroupedInt8>(call, packed);
  else if (type == ScalarType::Char)
    start<Int8>(call, packed);
  else if (type == ScalarType::Float8_e4m3fn && !grouped)
    start<Float8>(call, packed);
  else
    TORCH_CHECK(false, "packed_quantized_linear: unsupported weight type ", type, " with ",
                scale.size(1), " groups");
  return call.out;
}

// --- both sides in int8 ---

constexpr int kQuad = 4;  // k steps that one integer dot product takes
constexpr int kIntRows = 6;
#if defined(__AVX512VNNI__)
using IntAcc = __m512i;  // the 16 columns of a panel
COMPILESPEC_INLINE IntAcc zeros() { return _mm512_setzero_si512(); }
COMPILESPEC_INLINE IntAcc dot4(IntAcc sum, int32_t x, const int8_t* weight) {
  return _mm512_dpbusd_epi32(sum, _mm512_set1_epi32(x), _mm512_loadu_si512(weight));
}
COMPILESPEC_INLINE void put(IntAcc sum, int32_t* target) { _mm512_storeu_si512(target, sum); }
#else
struct IntAcc {
  int32_t lane[kPanel];
};
COMPILESPEC_INLINE IntAcc zeros() { return IntAcc{}; }
COMPILESPEC_INLINE IntAcc dot4(IntAcc sum, int32_t x, const int8_t* weight) {
  for (int c = 0; c < kPanel; ++c)
    for (int u = 0; u < kQuad; ++u)
      sum.lane[c] += int32_t(uint8_t(uint32_t(x) >> (8 * u))) * weight[c * kQuad + u];
  return sum;
}
COMPILESPEC_INLINE void put(IntAcc sum, int32_t* target) {
  std::memcpy(target, sum.lane, sizeof(sum.lane));
}
#endif

// sum[Rows + 1][16] = x[Rows][quads] times a panel; the last row is the sum of 128 times the
// weights, which x + 128 (unsigned) has too much of.
template <int Rows>
void int_tile(const int32_t* x, int64_t x_stride, const int8_t* weight, int64_t num_quads,
              int32_t (*sum)[kPanel]) {
  IntAcc acc[Rows + 1];
#pragma GCC unroll 16
  for (int r = 0; r <= Rows; ++r) acc[r] = zeros();
  for (int64_t q = 0; q < num_quads; ++q, weight += kPanel * kQuad) {
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) acc[r] = dot4(acc[r], x[r * x_stride + q], weight);
    acc[Rows] = dot4(acc[Rows], int32_t(0x80808080u), weight);
  }
#pragma GCC unroll 16
  for (int r = 0; r <= Rows; ++r) put(acc[r], sum[r]);
}

using IntTile = void (*)(const int32_t*, int64_t, const int8_t*, int64_t, int32_t (*)[kPanel]);
constexpr IntTile kIntTiles[kIntRows] = {int_tile<1>, int_tile<2>, int_tile<3>,
                                         int_tile<4>, int_tile<5>, int_tile<6>};

COMPILESPEC_INLINE float rounded(float value, const float*) { return value; }
template <class T>
COMPILESPEC_INLINE float rounded(float value, const T*) {
  T narrow;
  convert(value, &narrow);
  return float(narrow);
}

// A row of x as unsigned bytes (plus 128; 128 stands for 0) and its scale: largest magnitude over
// 127.5, in the type of x, at least 2^-23.
template <class T>
float quantise_row(const T* x, int64_t depth, uint8_t* target, int64_t padded) {
  float largest = 0;
  bool is_nan = false;
  for (int64_t k = 0; k < depth; ++k) {
    const float magnitude = std::fabs(float(x[k]));
    largest = magnitude > largest ? magnitude : largest;
    is_nan |= magnitude != magnitude;
  }
  float scale = rounded(largest / 127.5f, x);
  const float least = 1.1920928955078125e-07f;
  scale = scale < least ? least : scale;
  const float inverse = 1.f / scale;
  for (int64_t k = 0; k < depth; ++k) {
    float value = std::nearbyint(float(x[k]) * inverse);
    value = value > 127.f ? 127.f : value;
    value = value > -128.f ? value : -128.f;
    target[k] = uint8_t(int32_t(value) + 128);
  }
  std::memset(target + depth, 128, size_t(padded - depth));
  return is_nan ? std::numeric_limits<float>::quiet_NaN() : scale;
}

template <class T>
void run_dynamic(const Call& call, const at::Tensor& packed) {
  const int64_t num_quads = packed.size(1), padded = num_quads * kQuad, depth = call.depth;
  const int64_t rows = call.num_rows, columns = call.out.size(-1), num_panels = packed.size(0);
  const T* x = (const T*)call.x.const_data_ptr();
  const auto* weight = (const int8_t*)packed.const_data_ptr();
  const auto* scale = (const float*)call.scale.const_data_ptr();
  const float* bias = call.bias.defined() ? (const float*)call.bias.const_data_ptr() : nullptr;
  T* out = (T*)call.out.mutable_data_ptr();
  std::vector<int32_t> quads(size_t(rows * num_quads));
  std::vector<float> row_scale(static_cast<size_t>(rows));
  at::parallel_for(0, rows, 16384 / std::max<int64_t>(depth, 1) + 1, [&](int64_t r, int64_t end) {
    for (; r < end; ++r)
      row_scale[size_t(r)] = quantise_row(x + r * call.x_stride, depth,
                                          (uint8_t*)(quads.data() + r * num_quads), padded);
  });
  const int64_t block = 96, num_blocks = (rows + block - 1) / block;
  const double work_ns = double(padded * kPanel) / 12 +
                         double(std::min(rows, block) * padded * kPanel) / 120 + 50;
  at::parallel_for(0, num_blocks * num_panels, int64_t(8000 / work_ns) + 1,
                   [&](int64_t unit, int64_t end) {
    int32_t sum[kIntRows + 1][kPanel];
    for (; unit < end; ++unit) {
      const int64_t first = unit / num_panels * block, panel = unit % num_panels;
      const int64_t last = std::min(rows, first + block), column = panel * kPanel;
      const int64_t width = std::min<int64_t>(kPanel, columns - column);
      for (int64_t r = first; r < last; r += kIntRows) {
        const int64_t count = std::min<int64_t>(kIntRows, last - r);
        kIntTiles[count - 1](quads.data() + r * num_quads, num_quads,
                             weight + panel * padded * kPanel, num_quads, sum);
        for (int64_t i = 0; i < count; ++i)
          for (int64_t c = 0; c < width; ++c) {
            const float dot = float(sum[i][c] - sum[count][c]) * row_scale[size_t(r + i)];
            float value = rounded(dot, x) * scale[column + c];
            if (bias) value += bias[column + c];
            convert(value, out + (r + i) * columns + column + c);
          }
      }
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
