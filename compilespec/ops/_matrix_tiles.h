// Products by matrix instructions (AMX): a tile of up to 16 rows of x, 64 bytes of each, times the
// 16 cache lines of a packed panel that belong to them.
//
// A panel of bfloat16 pairs or of int8 quads is such lines as it lies in memory.  An element of the
// result is a chain over blocks of 64 bytes of its row, whatever the rows, panels or threads beside
// it, so single rows go through the same tiles: what serves a row in company serves it alone.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "_panels.h"

#if (defined(__AMX_BF16__) && defined(__AMX_INT8__)) || defined(COMPILESPEC_EMULATE_MATRIX_TILES)
#define COMPILESPEC_MATRIX_TILES 1

#if !defined(COMPILESPEC_EMULATE_MATRIX_TILES)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace compilespec {
namespace matrix_tiles {

using packed_linear::kPanel;

constexpr int kRows = 16;           // of a tile, at most
constexpr int kLine = 64;           // bytes of a row of a tile
constexpr int kBlock = 16 * kLine;  // bytes of a panel that a tile takes

// The eight tile registers: sums, two of rows of x, two of panels.
constexpr int kSums = 0, kFactors = 4, kPanels = 6;
constexpr int kMostSums = 4;

#if !defined(COMPILESPEC_EMULATE_MATRIX_TILES)
// Whether the system lets this process use tiles: Linux wants to be asked once.
inline bool available() {
#if defined(__linux__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  static const bool allowed = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return allowed;
#else
  return false;
#endif
}

template <int Tile>
COMPILESPEC_INLINE void zero() {
  asm volatile("tilezero %%tmm%c0" : : "i"(Tile));
}
template <int Tile>
COMPILESPEC_INLINE void load(const char* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(Tile) : "memory");
}
template <int Tile>
COMPILESPEC_INLINE void store(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(Tile) : "memory");
}

// Elements of x and of the panels: pairs of bfloat16, summed in float32; quads of int8, in int32.
struct Pairs {
  using Sum = float;
  template <int To, int X, int Panel>
  static COMPILESPEC_INLINE void multiply_add() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(To), "i"(X), "i"(Panel));
  }
};
struct Quads {
  using Sum = int32_t;
  template <int To, int X, int Panel>
  static COMPILESPEC_INLINE void multiply_add() {
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(To), "i"(X), "i"(Panel));
  }
};

// The tiles' rows, in this thread, while it lives.
class Configured {
 public:
  explicit Configured(int64_t rows) {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t bytes_of_row[16] = {};
      uint8_t rows[16] = {};
    } config;
    for (int tile = 0; tile < 8; ++tile) {
      config.bytes_of_row[tile] = kLine;
      config.rows[tile] = tile < kPanels ? uint8_t(rows) : 16;
    }
    asm volatile("ldtilecfg %0" : : "m"(config));
  }
  Configured(const Configured&) = delete;
  ~Configured() { asm volatile("tilerelease"); }
};

#else  // for tests on other CPUs
inline bool available() { return true; }

struct Tile {
  uint32_t word[16][16];
};
inline thread_local Tile tiles[8];
inline thread_local int64_t num_rows;
constexpr int64_t rows_of(int tile) { return tile < kPanels ? num_rows : 16; }

template <int Index>
void zero() {
  tiles[Index] = {};
}
template <int Index>
void load(const char* from, int64_t stride) {
  for (int64_t r = 0; r < rows_of(Index); ++r)
    std::memcpy(tiles[Index].word[r], from + r * stride, kLine);
}
template <int Index>
void store(void* to, int64_t stride) {
  for (int64_t r = 0; r < rows_of(Index); ++r)
    std::memcpy((char*)to + r * stride, tiles[Index].word[r], kLine);
}

struct Pairs {
  using Sum = float;
  template <int To, int X, int Panel>
  static void multiply_add() {
    const auto even = [](uint32_t word) { return std::bit_cast<float>(word << 16); };
    const auto odd = [](uint32_t word) { return std::bit_cast<float>(word & 0xffff0000u); };
    for (int64_t r = 0; r < num_rows; ++r)
      for (int column = 0; column < 16; ++column) {
        float sums[2] = {};
        for (int k = 0; k < 16; ++k) {
          const uint32_t a = tiles[X].word[r][k], b = tiles[Panel].word[k][column];
          sums[0] = std::fma(even(a), even(b), sums[0]);
          sums[1] = std::fma(odd(a), odd(b), sums[1]);
        }
        uint32_t& to = tiles[To].word[r][column];
        to = std::bit_cast<uint32_t>(std::bit_cast<float>(to) + (sums[0] + sums[1]));
      }
  }
};
struct Quads {
  using Sum = int32_t;
  template <int To, int X, int Panel>
  static void multiply_add() {
    for (int64_t r = 0; r < num_rows; ++r)
      for (int column = 0; column < 16; ++column)
        for (int k = 0; k < 16; ++k)
          for (int byte = 0; byte < 32; byte += 8)
            tiles[To].word[r][column] +=
                uint32_t(int8_t(tiles[X].word[r][k] >> byte) *
                         int8_t(tiles[Panel].word[k][column] >> byte));
  }
};

struct Configured {
  explicit Configured(int64_t rows) { num_rows = rows; }
};
#endif

// Rows in tiles of one size, the last of which may have rows of the one before it again.
struct RowTiles {
  int64_t num_rows, num_tiles, size;
  explicit RowTiles(int64_t rows)
      : num_rows(rows),
        num_tiles((rows + kRows - 1) / kRows),
        size((rows + num_tiles - 1) / num_tiles) {}

  // f(tiles, first row of each) for two tiles at a time, or the last alone.
  template <class F>
  void in_pairs(const F& f) const {
    for (int64_t tile = 0; tile < num_tiles; tile += 2) {
      const int64_t last = num_rows - size,
                    first[2] = {std::min(tile * size, last), std::min((tile + 1) * size, last)};
      f(std::min<int64_t>(2, num_tiles - tile), first);
    }
  }
};

// Panels of num_lines lines of 64 bytes, which lie line_stride apart, as the panels lie `stride`.
struct Panels {
  const char* data;
  int64_t num_lines, line_stride, stride;
  int64_t num_blocks() const { return (num_lines + 15) / 16; }

  // One after the other, as packed weights are.
  static Panels packed(const void* data, int64_t num_lines) {
    return {(const char*)data, num_lines, kLine, num_lines * kLine};
  }
  Panels from(int64_t panel) const {
    return {data + panel * stride, num_lines, line_stride, stride};
  }
  // Some lines of each, or all from the first on.
  Panels lines(int64_t first, int64_t count) const {
    return {data + first * line_stride, count, line_stride, stride};
  }
};

// sum[t][rows][Num * 16] = rows of x[t] times the first `Num` panels, for one or two tiles of rows.
// Rows have whole lines, zeros past their end.  `more`: of a chain that goes on, what sum has is kept.
// fetch(block) is called before each block.
template <class Elements, int Tiles, int Num, class Fetch>
void multiply(const char* const* x, int64_t x_stride, const Panels& panels,
              typename Elements::Sum* const* sum, int64_t sum_stride, bool more, const Fetch& fetch) {
  static_assert(Tiles * Num <= kMostSums && Tiles <= 2);
  const char* from = panels.data;
  const int64_t num_blocks = panels.num_blocks(), whole = panels.num_lines / 16;
  const auto each_sum = [](const auto& f) __attribute__((always_inline)) {
    f(std::integral_constant<int, 0>());
    if constexpr (Tiles * Num > 1) f(std::integral_constant<int, 1>());
    if constexpr (Tiles * Num > 2) f(std::integral_constant<int, 2>());
    if constexpr (Tiles * Num > 3) f(std::integral_constant<int, 3>());
  };
  each_sum([&](auto i) __attribute__((always_inline)) {
    constexpr int p = i() / Tiles, tile = i() % Tiles;
    if (more)
      load<kSums + i()>((const char*)(sum[tile] + p * kPanel), sum_stride * 4);
    else
      zero<kSums + i()>();
  });
  alignas(64) char last[Num * kBlock];  // of the panels, where lines are missing
  if (whole < num_blocks) {
    std::memset(last, 0, sizeof(last));
    for (int p = 0; p < Num; ++p)
      for (int64_t line = 0; line < panels.num_lines % 16; ++line)
        std::memcpy(last + p * kBlock + line * kLine,
                    from + p * panels.stride + (whole * 16 + line) * panels.line_stride, kLine);
  }
  for (int64_t block = 0; block < num_blocks; ++block) {
    fetch(block);
    const bool is_whole = block < whole;
    const char* lines = is_whole ? from + block * 16 * panels.line_stride : last;
    const int64_t stride = is_whole ? panels.stride : kBlock,
                  line_stride = is_whole ? panels.line_stride : kLine;
    load<kFactors>(x[0] + block * kLine, x_stride);
    if constexpr (Tiles == 2) load<kFactors + 1>(x[1] + block * kLine, x_stride);
    each_sum([&](auto i) __attribute__((always_inline)) {
      // A panel's sums follow each other, for the first tile of rows and the second.
      constexpr int p = i() / Tiles, tile = i() % Tiles, kPanelTile = kPanels + p % 2;
      if constexpr (tile == 0) load<kPanelTile>(lines + p * stride, line_stride);
      Elements::template multiply_add<kSums + i(), kFactors + tile, kPanelTile>();
    });
  }
  each_sum([&](auto i) __attribute__((always_inline)) {
    constexpr int p = i() / Tiles, tile = i() % Tiles;
    store<kSums + i()>(sum[tile] + p * kPanel, sum_stride * 4);
  });
}

// Panels beside each other in products of so many tiles of rows.
constexpr int64_t panels_of(int64_t tiles) { return tiles == 1 ? 4 : 2; }

// `multiply` for one tile of rows and one, two or four panels, or two tiles and one or two panels.
template <class Elements, class Fetch>
void multiply(int64_t tiles, int64_t num, const char* const* x, int64_t x_stride,
              const Panels& panels, typename Elements::Sum* const* sum, int64_t sum_stride,
              bool more, const Fetch& fetch) {
  const auto call = [&](auto kernel) { kernel(x, x_stride, panels, sum, sum_stride, more, fetch); };
  if (tiles == 2)
    call(num == 2 ? multiply<Elements, 2, 2, Fetch> : multiply<Elements, 2, 1, Fetch>);
  else
    call(num == 4   ? multiply<Elements, 1, 4, Fetch>
         : num == 2 ? multiply<Elements, 1, 2, Fetch>
                    : multiply<Elements, 1, 1, Fetch>);
}

// Of products whose panels are in the cache: what they fetch.
inline constexpr auto kNothing = [](int64_t) {};

// Panels as they lie in memory.  What serves in its place has the same methods, which a thread calls
// on a copy of its own.
template <class Elements>
struct Packed {
  Panels panels, here{};

  // Make the next `num` panels ready, for one call of `multiply` or for several.
  void take(int64_t panel, int64_t /*num*/, bool /*once*/) { here = panels.from(panel); }

  // The same for rows from here on.
  const Packed& rows_from(int64_t /*first*/) const { return *this; }

  // What `multiply` says, for tiles of `size` rows that begin at rows `first`.
  void multiply(int64_t tiles, int64_t num, const char* const* x, int64_t x_stride,
                const int64_t* first, int64_t /*size*/, typename Elements::Sum* const* sum) const {
    if (first[0] != 0)
      return matrix_tiles::multiply<Elements>(tiles, num, x, x_stride, here, sum, num * kPanel,
                                              false, kNothing);
    // What comes kNear bytes later in each panel, and in the end the beginning of the next panels.
    const int64_t turn = here.num_blocks() - packed_linear::kNear / kBlock;
    matrix_tiles::multiply<Elements>(
        tiles, num, x, x_stride, here, sum, num * kPanel, false,
        [this, num, turn](int64_t block) __attribute__((always_inline)) {
          const char* next = here.data + packed_linear::kNear + block * kBlock;
          if (block >= turn) next += (num - 1) * here.stride;
          for (int64_t p = 0; p < num; ++p)
#pragma GCC unroll 16
            for (int line = 0; line < 16; ++line)
              __builtin_prefetch(next + p * here.stride + line * kLine, 0, 3);
        });
  }
};

// finish(sum, first row, rows, first panel, panels) for all rows of x and panels [panel, end).
template <class Elements, class Weight, class Finish>
void run_panels(const char* x, int64_t x_stride, int64_t rows, Weight weight, int64_t panel,
                int64_t end, const Finish& finish) {
  const RowTiles tiles(rows);
  const Configured configured(tiles.size);
  alignas(64) typename Elements::Sum sums[kMostSums * kRows * kPanel];
  const int64_t width = panels_of(tiles.num_tiles);
  for (int64_t num; panel < end; panel += num) {
    num = end - panel >= width ? width : 1;
    weight.take(panel, num, tiles.num_tiles <= 2);
    tiles.in_pairs([&](int64_t count, const int64_t* first) {
      const char* const from[2] = {x + first[0] * x_stride, x + first[1] * x_stride};
      typename Elements::Sum* const sum[2] = {sums, sums + tiles.size * num * kPanel};
      weight.multiply(count, num, from, x_stride, first, tiles.size, sum);
      for (int64_t t = 0; t < count; ++t) finish(sum[t], first[t], tiles.size, panel, num);
    });
  }
}

// The same for all panels, shared out among threads, which read them so; blocks of 64 bytes of a row.
template <class Elements, class Weight, class Finish>
void run(const char* x, int64_t x_stride, int64_t num_rows, int64_t num_blocks, const Weight& weight,
         const Reading& reading, const Finish& finish) {
  const int64_t fit = (512 << 10) / std::max<int64_t>(num_blocks * kLine, 1);  // rows that stay in L2
  const int64_t block = std::clamp<int64_t>(fit, 64, 512) / kRows * kRows;
  const int64_t width = panels_of((num_rows + kRows - 1) / kRows);
  const double row_ns = double(num_blocks * 16) / 20;
  packed_linear::share_blocks(
      num_rows, kRows, block, row_ns, width, reading,
      [&](int64_t first, int64_t rows, int64_t panel, int64_t end) {
        run_panels<Elements>(x + first * x_stride, x_stride, rows, weight.rows_from(first), panel, end,
                             [&](const auto* sum, int64_t row, int64_t size, int64_t p, int64_t num) {
                               finish(sum, first + row, size, p, num);
                             });
      });
}

// Products of bfloat16 rows, which are read where they lie if these are whole cache lines.  A line of
// the weight's panels holds two k steps.
template <class W, class Weight>
void run_pairs(const packed_linear::Problem<W>& problem, const Weight& weight,
               const Reading& reading) {
  using Element = c10::BFloat16;
  constexpr int64_t kElements = kLine / sizeof(Element);  // of a line
  const int64_t num_blocks = (problem.depth + kElements - 1) / kElements;
  const bool as_it_is = problem.depth % kElements == 0;
  const int64_t padded = num_blocks * kElements,
                stride = (as_it_is ? problem.x_stride : padded) * int64_t(sizeof(Element));
  static thread_local Aligned<Element> copied;
  if (!as_it_is) {
    const int64_t size = problem.num_rows * padded;
    if (int64_t(copied.size()) < size) copied.resize(size_t(size));
    for (int64_t r = 0; r < problem.num_rows; ++r) {
      Element* to = copied.data() + r * padded;
      std::copy_n((const Element*)problem.x + r * problem.x_stride, problem.depth, to);
      std::fill(to + problem.depth, to + padded, Element(0));
    }
  }
  const char* x = as_it_is ? (const char*)problem.x : (const char*)copied.data();
  run<Pairs>(x, stride, problem.num_rows, num_blocks, weight, reading,
             [&](const float* sum, int64_t first, int64_t rows, int64_t panel, int64_t num) {
               packed_linear::finish<W, Element>(problem, sum, num * kPanel, first, rows, panel, num);
             });
}

}  // namespace matrix_tiles
}  // namespace compilespec
#endif
