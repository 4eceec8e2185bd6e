// Integer products of rows in int8 with a packed int8 weight [panels, K / 4, 16, 4].
//
// Sums are exact whatever the order, so a tile may have any shape and each instruction set its own
// form of a row: `IntDot` says how four neighbouring elements of it (a quad) are stored, and how
// they and the same four k steps of a panel become sums.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "_panels.h"

namespace compilespec {
namespace integer_dot {

using packed_linear::kPanel;

constexpr int kQuad = 4;                     // k steps of a quad
constexpr int kQuadBytes = kPanel * kQuad;   // of a panel

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
// Instructions that multiply unsigned bytes with signed ones: 128 is added to the elements of x, and
// a further row of 128 gives what that is too much.
#if defined(__AVX512VNNI__)
struct Sums {
  __m512i columns;
};
using Steps = __m512i;
#else
struct Sums {
  __m256i columns[2];
};
struct Steps {
  __m256i columns[2];
};
#endif
struct IntDot {
  using Quad = uint32_t;  // four unsigned bytes
  using Element = uint8_t;
  static constexpr int32_t kOffset = 128;
  static constexpr Quad kZeros = 0x80808080u;
  static constexpr int kRows = kNumRegisters == 32 ? 12 : 5;
  static constexpr double kPerNs = kNumRegisters == 32 ? 120 : 60;  // products
  static constexpr int parts(int rows) { return kNumRegisters < 32 ? 1 : rows <= 5 ? 4 : 2; }
#if defined(__AVX512VNNI__)
  static COMPILESPEC_INLINE Sums zeros() { return {_mm512_setzero_si512()}; }
  static COMPILESPEC_INLINE Steps read(const int8_t* weight) { return _mm512_loadu_si512(weight); }
  static COMPILESPEC_INLINE Sums add(Sums sums, Quad x, Steps steps) {
    // The intrinsic would be compiled to copies of the sums, and so would an array in their place.
    asm("vpdpbusd %2, %1, %0" : "+v"(sums.columns) : "v"(_mm512_set1_epi32(int32_t(x))), "v"(steps));
    return sums;
  }
  static COMPILESPEC_INLINE void put(Sums sums, int32_t* target) {
    _mm512_storeu_si512(target, sums.columns);
  }
#else
  static COMPILESPEC_INLINE Sums zeros() { return {}; }
  static COMPILESPEC_INLINE Steps read(const int8_t* weight) {
    return {_mm256_loadu_si256((const __m256i*)weight),
            _mm256_loadu_si256((const __m256i*)(weight + 32))};
  }
  static COMPILESPEC_INLINE Sums add(Sums sums, Quad x, Steps steps) {
    const __m256i four = _mm256_set1_epi32(int32_t(x));
    for (int half = 0; half < 2; ++half)
      asm("{vex} vpdpbusd %2, %1, %0" : "+x"(sums.columns[half]) : "x"(four), "x"(steps.columns[half]));
    return sums;
  }
  static COMPILESPEC_INLINE void put(Sums sums, int32_t* target) {
    std::memcpy(target, sums.columns, sizeof(sums.columns));
  }
#endif
};

#elif defined(__AVX2__)
// Both sides as 16 bits: a product of pairs leaves two sums of each column, which put() adds.
#if defined(__AVX512BW__)
using Words = __m512i;
#else
using Words = __m256i;
#endif
constexpr int kParts = 2 * kQuadBytes / int(sizeof(Words));  // registers that hold a panel's quad
struct Sums {
  Words pairs[kParts];
};
struct Steps {
  Words words[kParts];
};
struct IntDot {
  using Quad = uint64_t;  // four signed 16-bit integers
  using Element = int16_t;
  static constexpr int32_t kOffset = 0;
  static constexpr Quad kZeros = 0;
  static constexpr int kRows = kNumRegisters == 32 ? 6 : 2;
  static constexpr double kPerNs = kNumRegisters == 32 ? 60 : 30;
  static constexpr int parts(int) { return kNumRegisters == 32 ? 2 : 1; }
  static COMPILESPEC_INLINE Sums zeros() { return {}; }
  static COMPILESPEC_INLINE Steps read(const int8_t* weight) {
    Steps steps;
#pragma GCC unroll 4
    for (int i = 0; i < kParts; ++i)
#if defined(__AVX512BW__)
      steps.words[i] = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)(weight + 32 * i)));
#else
      steps.words[i] = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)(weight + 16 * i)));
#endif
    return steps;
  }
  static COMPILESPEC_INLINE Sums add(Sums sums, Quad x, Steps steps) {
#pragma GCC unroll 4
    for (int i = 0; i < kParts; ++i) {
#if defined(__AVX512BW__)
      const Words products = _mm512_madd_epi16(_mm512_set1_epi64(int64_t(x)), steps.words[i]);
#else
      const Words products = _mm256_madd_epi16(_mm256_set1_epi64x(int64_t(x)), steps.words[i]);
#endif
      // As with VNNI: the compiler would copy the sums.
      asm("vpaddd %1, %0, %0" : "+v"(sums.pairs[i]) : "v"(products));
    }
    return sums;
  }
  static COMPILESPEC_INLINE void put(Sums sums, int32_t* target) {
#if defined(__AVX512BW__)
#pragma GCC unroll 2
    for (int i = 0; i < kParts; ++i) {
      const __m512i both = _mm512_add_epi32(sums.pairs[i], _mm512_srli_epi64(sums.pairs[i], 32));
      _mm256_storeu_si256((__m256i*)target + i, _mm512_cvtepi64_epi32(both));
    }
#else
#pragma GCC unroll 2
    for (int i = 0; i < kParts / 2; ++i) {
      const __m256i both = _mm256_hadd_epi32(sums.pairs[2 * i], sums.pairs[2 * i + 1]);
      _mm256_storeu_si256((__m256i*)target + i, _mm256_permute4x64_epi64(both, 0xd8));
    }
#endif
  }
};

#else
struct Sums {
  int32_t columns[kPanel];
};
struct IntDot {
  struct Quad {
    int8_t element[kQuad];
  };
  using Element = int8_t;
  static constexpr int32_t kOffset = 0;
  static constexpr Quad kZeros{};
  static constexpr int kRows = 2;
  static constexpr double kPerNs = 10;
  static constexpr int parts(int) { return 1; }
  static COMPILESPEC_INLINE Sums zeros() { return {}; }
  static COMPILESPEC_INLINE const int8_t* read(const int8_t* weight) { return weight; }
  static COMPILESPEC_INLINE Sums add(Sums sums, Quad x, const int8_t* steps) {
    for (int c = 0; c < kPanel; ++c)
      for (int u = 0; u < kQuad; ++u) sums.columns[c] += x.element[u] * steps[c * kQuad + u];
    return sums;
  }
  static COMPILESPEC_INLINE void put(Sums sums, int32_t* target) {
    std::memcpy(target, sums.columns, sizeof(sums.columns));
  }
};
#endif

using Quad = IntDot::Quad;
constexpr int kMostParts = std::max(IntDot::parts(1), IntDot::parts(IntDot::kRows));

// sum[Rows][Parts * 16] = x[num_quads][Rows] times `Parts` panels that follow each other.
template <int Rows, int Parts>
void tile(const Quad* x, int64_t num_quads, const int8_t* weight, int32_t* sum) {
  constexpr bool kHasOffset = IntDot::kOffset != 0;
  constexpr int kStride = Parts * kPanel;
  const int64_t panel_stride = num_quads * kQuadBytes;
  Sums acc[Rows][Parts], offset[Parts];
#pragma GCC unroll 16
  for (int p = 0; p < Parts; ++p) {
    offset[p] = IntDot::zeros();
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) acc[r][p] = IntDot::zeros();
  }
  // As in _panels.h: each panel some bytes ahead, and at its end the panels after these.
  const char* ahead = (const char*)weight + packed_linear::kNear;
  const int64_t turn = num_quads - packed_linear::kNear / kQuadBytes;
  for (int64_t q = 0; q < num_quads; ++q, ahead += kQuadBytes) {
    if constexpr (Parts > 1) {
      if (q == turn) ahead += (Parts - 1) * panel_stride;
#pragma GCC unroll 16
      for (int p = 0; p < Parts; ++p) __builtin_prefetch(ahead + p * panel_stride, 0, 3);
    }
    decltype(IntDot::read(weight)) steps[Parts];
#pragma GCC unroll 16
    for (int p = 0; p < Parts; ++p)
      steps[p] = IntDot::read(weight + p * panel_stride + q * kQuadBytes);
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 16
      for (int p = 0; p < Parts; ++p)
        acc[r][p] = IntDot::add(acc[r][p], x[q * Rows + r], steps[p]);
    if constexpr (kHasOffset)
#pragma GCC unroll 16
      for (int p = 0; p < Parts; ++p)
        offset[p] = IntDot::add(offset[p], IntDot::kZeros, steps[p]);
  }
#pragma GCC unroll 16
  for (int p = 0; p < Parts; ++p) {
    int32_t too_much[kPanel] = {};
    if constexpr (kHasOffset) IntDot::put(offset[p], too_much);
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
      int32_t* target = sum + r * kStride + p * kPanel;
      IntDot::put(acc[r][p], target);
      if constexpr (kHasOffset)
        for (int c = 0; c < kPanel; ++c) target[c] -= too_much[c];
    }
  }
}

using Tile = void (*)(const Quad*, int64_t, const int8_t*, int32_t*);

// The tile of `rows` rows (at most kRows) and `parts` panels: one, or what suits these rows, or what
// suits the largest tile.
template <int Rows = IntDot::kRows>
Tile pick_tile(int64_t rows, int64_t parts) {
  if constexpr (Rows > 1)
    if (rows < Rows) return pick_tile<Rows - 1>(rows, parts);
  constexpr int kOwn = IntDot::parts(Rows), kLeast = IntDot::parts(IntDot::kRows);
  return parts == kOwn ? tile<Rows, kOwn> : parts == kLeast ? tile<Rows, kLeast> : tile<Rows, 1>;
}

}  // namespace integer_dot
}  // namespace compilespec
