// Short SIMD vectors for the CPU kernels: GCC vector extensions, intrinsics only where they pay.
//
// Everything here is deterministic per element: what a lane computes never depends on how many
// rows, lanes or threads take part, so kernels built from it can promise results that are bitwise
// independent of the batch.  Compile with -ffp-contract=off: fma() is the only place where a
// product and a sum are fused.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <new>
#include <type_traits>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace compilespec {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
constexpr int kNumRegisters = 32;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
constexpr int kNumRegisters = 16;
#else
constexpr int kVectorBytes = 16;
constexpr int kNumRegisters = 32;
#endif

template <class Acc>
struct VectorOf {
  typedef Acc type __attribute__((vector_size(kVectorBytes)));
};
template <class Acc>
using Vector = typename VectorOf<Acc>::type;
using VectorU32 = Vector<uint32_t>;
template <class Acc>
constexpr int kLanes = kVectorBytes / int(sizeof(Acc));

#define COMPILESPEC_INLINE inline __attribute__((always_inline))

template <class Acc>
COMPILESPEC_INLINE Vector<Acc> load(const Acc* source) {
  Vector<Acc> value;
  std::memcpy(&value, source, sizeof(value));
  return value;
}

template <class Acc>
COMPILESPEC_INLINE void store(Acc* target, Vector<Acc> value) {
  std::memcpy(target, &value, sizeof(value));
}

template <class Acc>
COMPILESPEC_INLINE Vector<Acc> splat(Acc scalar) {
  return scalar - Vector<Acc>{};  // -0 and NaN survive: x - 0 is x
}

// An array of scratch that begins on a cache line, so that registers are not loaded from two.
template <class T>
struct LineAllocator {
  using value_type = T;
  static constexpr std::align_val_t kLine{64};
  LineAllocator() = default;
  template <class U>
  LineAllocator(const LineAllocator<U>&) {}
  T* allocate(size_t size) { return (T*)::operator new(size * sizeof(T), kLine); }
  void deallocate(T* data, size_t) { ::operator delete(data, kLine); }
  bool operator==(const LineAllocator&) const { return true; }
};
template <class T>
using Aligned = std::vector<T, LineAllocator<T>>;

// The value, held in a register from here on: neither folded into a memory operand nor merged with
// an equal one.
template <class V>
COMPILESPEC_INLINE V in_register(V value) {
#if defined(__x86_64__)
  asm volatile("" : "+v"(value));
#elif defined(__aarch64__)
  asm volatile("" : "+w"(value));
#endif
  return value;
}

// The same pointer, of which the compiler no longer knows where it points: what was read through it
// is read again.
template <class T>
COMPILESPEC_INLINE const T* forget_value(const T* pointer) {
  asm volatile("" : "+r"(pointer));
  return pointer;
}

COMPILESPEC_INLINE Vector<float> fma(Vector<float> a, Vector<float> b, Vector<float> c) {
#if defined(__AVX512F__)
  return (Vector<float>)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
  return (Vector<float>)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (Vector<float>)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

COMPILESPEC_INLINE Vector<double> fma(Vector<double> a, Vector<double> b, Vector<double> c) {
#if defined(__AVX512F__)
  return (Vector<double>)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
#elif defined(__AVX2__) && defined(__FMA__)
  return (Vector<double>)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
#elif defined(__aarch64__)
  return (Vector<double>)vfmaq_f64((float64x2_t)c, (float64x2_t)a, (float64x2_t)b);
#else
  return a * b + c;
#endif
}

// The bits of float32 values, one or a vector of them, rounded to nearest even like torch: the result
// is the high half of each word.
template <class Bits>
COMPILESPEC_INLINE Bits round_to_bfloat16(Bits bits) {
  const Bits nan = Bits{} + 0x7fc00000u, rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  return ((bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded) & 0xffff0000u;
}

// 2 * kLanes stored elements as two accumulator vectors, lo and hi.  bfloat16 splits into even and
// odd elements (one shift, one mask, no lane crossing); the other types into first and second half.
// store_pair() is the way back, rounded to nearest even.
template <class T>
struct Storage;

template <class T>
struct DirectStorage {
  using Acc = T;
  static constexpr int kPair = 2 * kLanes<T>;
  static COMPILESPEC_INLINE Vector<T> lo(const T* source) { return load(source); }
  static COMPILESPEC_INLINE Vector<T> hi(const T* source) { return load(source + kLanes<T>); }
  static COMPILESPEC_INLINE void store_pair(T* target, Vector<T> lo, Vector<T> hi) {
    store(target, lo);
    store(target + kLanes<T>, hi);
  }
};
template <>
struct Storage<float> : DirectStorage<float> {};
template <>
struct Storage<double> : DirectStorage<double> {};

template <>
struct Storage<c10::BFloat16> {
  using Acc = float;
  static constexpr int kPair = 2 * kLanes<float>;
  static COMPILESPEC_INLINE VectorU32 words(const c10::BFloat16* source) {
    VectorU32 value;
    std::memcpy(&value, source, sizeof(value));
    return value;
  }
  static COMPILESPEC_INLINE Vector<float> lo(const c10::BFloat16* source) {
    return (Vector<float>)(words(source) << 16);
  }
  static COMPILESPEC_INLINE Vector<float> hi(const c10::BFloat16* source) {
    return (Vector<float>)(words(source) & 0xffff0000u);
  }
  static COMPILESPEC_INLINE void store_pair(c10::BFloat16* target, Vector<float> lo,
                                            Vector<float> hi) {
    const VectorU32 value =
        (round_to_bfloat16((VectorU32)lo) >> 16) | round_to_bfloat16((VectorU32)hi);
    std::memcpy(target, &value, sizeof(value));
  }
};

template <>
struct Storage<c10::Half> {
  using Acc = float;
  static constexpr int kPair = 2 * kLanes<float>;
  static COMPILESPEC_INLINE Vector<float> lo(const c10::Half* source) {
#if defined(__AVX512F__)
    return (Vector<float>)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)source));
#elif defined(__AVX2__) && defined(__F16C__)
    return (Vector<float>)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)source));
#else
    Vector<float> value;
    for (int i = 0; i < kLanes<float>; ++i) value[i] = float(source[i]);
    return value;
#endif
  }
  static COMPILESPEC_INLINE Vector<float> hi(const c10::Half* source) {
    return lo(source + kLanes<float>);
  }
  static COMPILESPEC_INLINE void store_pair(c10::Half* target, Vector<float> lo,
                                            Vector<float> hi) {
    for (int i = 0; i < kLanes<float>; ++i) {
      target[i] = c10::Half(lo[i]);
      target[i + kLanes<float>] = c10::Half(hi[i]);
    }
  }
};

// sum + the products of pairs of bfloat16, a pair a lane, where an instruction multiplies them.
#if defined(__AVX512BF16__) || (defined(COMPILESPEC_EMULATE_BF16_DOT) && defined(__AVX512F__))
#define COMPILESPEC_BF16_DOT 1
COMPILESPEC_INLINE Vector<float> dot_pairs(VectorU32 a, VectorU32 b, Vector<float> sum) {
#if defined(__AVX512BF16__)
  asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
  return sum;
#else  // for tests on other CPUs
  const uint32_t high = 0xffff0000u;
  sum = fma((Vector<float>)(a & high), (Vector<float>)(b & high), sum);
  return fma((Vector<float>)(a << 16), (Vector<float>)(b << 16), sum);
#endif
}

// 16 numbers rounded to bfloat16, in their order.
COMPILESPEC_INLINE void store_rounded(uint32_t* target, Vector<float> value) {
#if defined(__AVX512BF16__)
  const __m256i rounded = (__m256i)_mm512_cvtneps_pbh((__m512)value);
#else
  const __m256i rounded = _mm512_cvtepi32_epi16((__m512i)(round_to_bfloat16((VectorU32)value) >> 16));
#endif
  _mm256_storeu_si256((__m256i*)target, rounded);
}

// The elements of two rows in pairs: those of even columns, and those of odd ones.
COMPILESPEC_INLINE std::pair<VectorU32, VectorU32> interleave(const c10::BFloat16* first,
                                                              const c10::BFloat16* second) {
  const VectorU32 a = Storage<c10::BFloat16>::words(first),
                  b = Storage<c10::BFloat16>::words(second);
  return {(a & 0xffffu) | (b << 16), (a >> 16) | (b & 0xffff0000u)};
}
#endif

// Pairs of bfloat16, a pair a lane, widened: what is multiplied without the instruction.
struct WidePairs {
  Vector<float> even, odd;
};
COMPILESPEC_INLINE Vector<float> dot_pairs(const WidePairs& a, const WidePairs& b,
                                           Vector<float> sum) {
  return fma(a.odd, b.odd, fma(a.even, b.even, sum));
}

// Rows to columns of 16 x 16 words.
#if defined(__AVX512F__)
COMPILESPEC_INLINE void transpose(__m512i* row) {
  __m512i half[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    half[i] = _mm512_unpacklo_epi32(row[i], row[i + 1]);
    half[i + 1] = _mm512_unpackhi_epi32(row[i], row[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {  // row[i + c]: columns c, 4 + c, 8 + c, 12 + c of rows i to i + 3
    row[i] = _mm512_unpacklo_epi64(half[i], half[i + 2]);
    row[i + 1] = _mm512_unpackhi_epi64(half[i], half[i + 2]);
    row[i + 2] = _mm512_unpacklo_epi64(half[i + 1], half[i + 3]);
    row[i + 3] = _mm512_unpackhi_epi64(half[i + 1], half[i + 3]);
  }
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    const __m512i even_top = _mm512_shuffle_i32x4(row[c], row[4 + c], 0x88),
                  odd_top = _mm512_shuffle_i32x4(row[c], row[4 + c], 0xdd),
                  even_low = _mm512_shuffle_i32x4(row[8 + c], row[12 + c], 0x88),
                  odd_low = _mm512_shuffle_i32x4(row[8 + c], row[12 + c], 0xdd);
    half[c] = _mm512_shuffle_i32x4(even_top, even_low, 0x88);
    half[4 + c] = _mm512_shuffle_i32x4(odd_top, odd_low, 0x88);
    half[8 + c] = _mm512_shuffle_i32x4(even_top, even_low, 0xdd);
    half[12 + c] = _mm512_shuffle_i32x4(odd_top, odd_low, 0xdd);
  }
  std::copy_n(half, 16, row);
}
#endif

COMPILESPEC_INLINE void convert(float source, c10::BFloat16* target) {
  uint32_t bits;
  std::memcpy(&bits, &source, 4);
  target->x = uint16_t(round_to_bfloat16(bits) >> 16);
}
COMPILESPEC_INLINE void convert(float source, c10::Half* target) { *target = c10::Half(source); }
COMPILESPEC_INLINE void convert(float source, float* target) { *target = source; }

// exp(x) for x <= 88, under 2 ulp; exactly 0 below the smallest normal result, NaN for NaN, exactly
// 1 for 0.
COMPILESPEC_INLINE Vector<float> exp(Vector<float> x) {
  const float lowest = -87.33654f,
              magic = 12582912.f;  // 1.5 * 2^23: adding it rounds to an integer
  const Vector<float> clamped = x < lowest ? splat(lowest) : x;
  const Vector<float> shifted = fma(clamped, splat(1.44269504f), splat(magic));
  const Vector<float> n = shifted - magic;
  Vector<float> r = fma(n, splat(-0.693359375f), clamped);
  r = fma(n, splat(2.12194440e-4f), r);
  Vector<float> p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p, r * r, r) + 1.f;
  const VectorU32 exponent = ((VectorU32)shifted - 0x4b400000u + 127u) << 23;
  const Vector<float> result = p * (Vector<float>)exponent;  // a product, so that NaN stays NaN
  return x < lowest ? splat(0.f) : result;
}

COMPILESPEC_INLINE Vector<double> exp(Vector<double> x) {
  for (int i = 0; i < kLanes<double>; ++i) x[i] = std::exp(x[i]);
  return x;
}

// tanh(x): a short series near 0 (no cancellation), 1 - 2 / (exp(2x) + 1) elsewhere.
COMPILESPEC_INLINE Vector<float> tanh(Vector<float> x) {
  const Vector<float> top = x > 20.f ? splat(20.f) : x;
  const Vector<float> inside = top < -20.f ? splat(-20.f) : top;
  const Vector<float> far = 1.f - 2.f / (exp(inside + inside) + 1.f);
  const Vector<float> square = inside * inside;
  Vector<float> p = splat(62.f / 2835.f);
  p = fma(p, square, splat(-17.f / 315.f));
  p = fma(p, square, splat(2.f / 15.f));
  p = fma(p, square, splat(-1.f / 3.f));
  const Vector<float> near = fma(p * square, inside, inside);
  return square < 0.04f ? near : far;
}

COMPILESPEC_INLINE Vector<double> tanh(Vector<double> x) {
  for (int i = 0; i < kLanes<double>; ++i) x[i] = std::tanh(x[i]);
  return x;
}

constexpr auto kSum = [](auto a, auto b) __attribute__((always_inline)) { return a + b; };
constexpr auto kMax = [](auto a, auto b) __attribute__((always_inline)) { return a < b ? b : a; };

#if defined(__AVX2__)
// The lanes of a float32 vector folded into four: upper halves onto lower ones.
template <class Fold>
COMPILESPEC_INLINE __m128 fold_to_4(Vector<float> value, Fold fold) {
#if defined(__AVX512F__)
  const __m256 half = fold(_mm512_castps512_ps256((__m512)value),
                           _mm256_castpd_ps(_mm512_extractf64x4_pd((__m512d)value, 1)));
#else
  const __m256 half = (__m256)value;
#endif
  return fold(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}
#endif

// One lane from all, in one fixed tree: the upper half onto the lower one, until one is left.
template <class Acc, class Fold>
COMPILESPEC_INLINE Acc fold_lanes(Vector<Acc> value, Fold fold) {
#if defined(__AVX2__)
  if constexpr (std::is_same_v<Acc, float>) {
    const __m128 four = fold_to_4(value, fold), two = fold(four, _mm_movehl_ps(four, four));
    return fold(two[0], two[1]);
  }
#endif
  Acc lanes[kLanes<Acc>];
  store(lanes, value);
  for (int half = kLanes<Acc> / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lanes[i] = fold(lanes[i], lanes[i + half]);
  return lanes[0];
}

// Sum over lanes in one fixed tree.
template <class Acc>
COMPILESPEC_INLINE Acc sum_lanes(Vector<Acc> value) {
  return fold_lanes<Acc>(value, kSum);
}

template <class Acc>
COMPILESPEC_INLINE Acc max_lanes(Vector<Acc> value) {
  return fold_lanes<Acc>(value, kMax);
}

// Lane sums of four vectors at once (dot products of four keys); the same tree for each of the
// four.
template <class Acc>
COMPILESPEC_INLINE void sum_lanes_4(const Vector<Acc>* value, Acc* target) {
  for (int i = 0; i < 4; ++i) target[i] = sum_lanes<Acc>(value[i]);
}

#if defined(__AVX2__)
template <>
COMPILESPEC_INLINE void sum_lanes_4<float>(const Vector<float>* value, float* target) {
  const __m128 a = fold_to_4(value[0], kSum), b = fold_to_4(value[1], kSum);
  const __m128 c = fold_to_4(value[2], kSum), d = fold_to_4(value[3], kSum);
  const __m128 ab = _mm_add_ps(_mm_unpacklo_ps(a, b), _mm_unpackhi_ps(a, b));  // a02 b02 a13 b13
  const __m128 cd = _mm_add_ps(_mm_unpacklo_ps(c, d), _mm_unpackhi_ps(c, d));
  _mm_storeu_ps(target, _mm_add_ps(_mm_movelh_ps(ab, cd), _mm_movehl_ps(cd, ab)));
}
#endif

// Lane sums of 4 x 4 vectors; the same tree for each of them.
template <class Acc>
COMPILESPEC_INLINE void sum_lanes_16(const Vector<Acc> (*value)[4], Acc (*target)[4]) {
  for (int i = 0; i < 4; ++i) sum_lanes_4<Acc>(value[i], target[i]);
}

#if defined(__AVX512F__)
template <>
COMPILESPEC_INLINE void sum_lanes_16<float>(const Vector<float> (*value)[4], float (*target)[4]) {
  // Halves, then quarters, of two vectors at a time are added into one vector; a quarter of four
  // sums to one element of it.
  __m512 eight[8], four[4], two[2];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    const __m512 a = (__m512)value[i / 4][i % 4], b = (__m512)value[2 + i / 4][i % 4];
    eight[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i)  // rows 0 2 1 3
    four[i] = _mm512_add_ps(_mm512_shuffle_f32x4(eight[i], eight[4 + i], 0x88),
                            _mm512_shuffle_f32x4(eight[i], eight[4 + i], 0xdd));
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i)
    two[i] = _mm512_add_ps(_mm512_unpacklo_ps(four[2 * i], four[2 * i + 1]),
                           _mm512_unpackhi_ps(four[2 * i], four[2 * i + 1]));
  const __m512d low = _mm512_castps_pd(two[0]), high = _mm512_castps_pd(two[1]);
  const __m512 sum = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(low, high)),
                                   _mm512_castpd_ps(_mm512_unpackhi_pd(low, high)));
  float rows[16];
  _mm512_storeu_ps(rows, _mm512_shuffle_f32x4(sum, sum, 0xd8));
  std::memcpy(target, rows, sizeof(rows));
}
#endif

}  // namespace compilespec
