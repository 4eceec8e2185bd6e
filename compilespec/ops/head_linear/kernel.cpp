// head_linear on the CPU: every head's rows times its own matrix, read where it lies.
//
// A matrix has dense rows (an output is one chain of fma over k, many outputs side by side) or dense
// columns (an output is a dot product, lanes summed in one fixed tree).  Which rows share a register
// tile, the batch, the threads: none of it changes a bit of a row.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

#include "_threads.h"
#include "_vector.h"

namespace compilespec {
namespace head_linear {

constexpr int kGroupRows = kNumRegisters == 32 ? 4 : 3;  // rows of the largest register tile
constexpr int kBlockRows = 48;                           // rows of one unit of work
constexpr int kGroupColumns = 4;                         // dot products of a register tile

struct Problem {
  const void *x, *weight;
  void* out;
  int64_t num_rows, rows_per_batch, num_heads, depth, num_columns;
  int64_t batch_stride, row_stride, head_stride;              // of x, whose last dim is dense
  int64_t weight_head, weight_depth, weight_column;           // strides; one of the last two is 1
};

template <class T>
struct Worker {
  using Acc = typename Storage<T>::Acc;
  using Vec = Vector<Acc>;
  static constexpr int kPair = Storage<T>::kPair;
  static constexpr int kL = kLanes<Acc>;

  const Problem& problem;
  int64_t head, first_row, num_rows, pad;  // depth rounded up to whole pairs
  std::vector<Acc>& x;                     // [num_rows][pad], zeros past the depth

  const T* weight() const { return (const T*)problem.weight + head * problem.weight_head; }
  T* out(int64_t row) const {
    return (T*)problem.out + ((first_row + row) * problem.num_heads + head) * problem.num_columns;
  }

  // Rows of x, widened; in the order in which Storage<T> splits pairs, if they meet such pairs.
  void widen(bool in_pairs) {
    x.assign(size_t(num_rows * pad), Acc(0));
    for (int64_t r = 0; r < num_rows; ++r) {
      const int64_t row = first_row + r;
      const T* source = (const T*)problem.x + row / problem.rows_per_batch * problem.batch_stride +
                        row % problem.rows_per_batch * problem.row_stride +
                        head * problem.head_stride;
      Acc* target = x.data() + r * pad;
      if (!in_pairs) {
        for (int64_t k = 0; k < problem.depth; ++k) target[k] = Acc(source[k]);
        continue;
      }
      for (int64_t k = 0; k < pad; k += kPair) {
        T last[kPair] = {};
        const T* pair = source + k;
        if (k + kPair > problem.depth) {
          std::copy_n(pair, problem.depth - k, last);
          pair = last;
        }
        store(target + k, Storage<T>::lo(pair));
        store(target + k + kL, Storage<T>::hi(pair));
      }
    }
  }

  // body(rows, first row) over all rows, in groups of at most kGroupRows.
  template <class F>
  void in_groups(const F& body) {
    int64_t row = 0;
    for (; row + kGroupRows <= num_rows; row += kGroupRows)
      body(std::integral_constant<int, kGroupRows>(), row);
    for (; row < num_rows; ++row) body(std::integral_constant<int, 1>(), row);
  }

  template <int Rows, int Pairs>
  void chains(int64_t row, int64_t column) {
    Vec acc[Rows][2 * Pairs] = {};
    const T* strip = weight() + column;
    const Acc* factors = x.data() + row * pad;
    for (int64_t k = 0; k < problem.depth; ++k, strip += problem.weight_depth) {
#pragma GCC unroll 4
      for (int pair = 0; pair < Pairs; ++pair) {
        const Vec even = in_register(Storage<T>::lo(strip + pair * kPair));
        const Vec odd = in_register(Storage<T>::hi(strip + pair * kPair));
#pragma GCC unroll 4
        for (int r = 0; r < Rows; ++r) {
          const Vec factor = splat(factors[r * pad + k]);
          acc[r][2 * pair] = fma(factor, even, acc[r][2 * pair]);
          acc[r][2 * pair + 1] = fma(factor, odd, acc[r][2 * pair + 1]);
        }
      }
    }
    for (int r = 0; r < Rows; ++r)
      for (int pair = 0; pair < Pairs; ++pair)
        Storage<T>::store_pair(out(row + r) + column + pair * kPair, acc[r][2 * pair],
                               acc[r][2 * pair + 1]);
  }

  void run_chains() {
    widen(false);
    int64_t column = 0;
    for (; column + 2 * kPair <= problem.num_columns; column += 2 * kPair)
      in_groups([&](auto rows, int64_t row) { chains<rows(), 2>(row, column); });
    for (; column + kPair <= problem.num_columns; column += kPair)
      in_groups([&](auto rows, int64_t row) { chains<rows(), 1>(row, column); });
    for (; column < problem.num_columns; ++column)
      for (int64_t r = 0; r < num_rows; ++r) {
        const T* from = weight() + column;
        Acc sum = 0;
        for (int64_t k = 0; k < problem.depth; ++k, from += problem.weight_depth)
          sum = std::fma(x[size_t(r * pad + k)], Acc(*from), sum);
        convert_to(sum, out(r) + column);
      }
  }

  static void convert_to(double value, double* target) { *target = value; }
  template <class U>
  static void convert_to(float value, U* target) {
    convert(value, target);
  }

  template <int Rows>
  void dots(int64_t row, int64_t column, int64_t count, const T* const* columns) {
    Vec acc[Rows][kGroupColumns] = {};
    const Acc* q = x.data() + row * pad;
    for (int64_t k = 0; k < pad; k += kPair)
      for (int half = 0; half < 2; ++half) {
        Vec part[Rows];
#pragma GCC unroll 4
        for (int r = 0; r < Rows; ++r) part[r] = in_register(load(q + r * pad + k + half * kL));
#pragma GCC unroll 4
        for (int i = 0; i < kGroupColumns; ++i) {
          const Vec value = in_register(half ? Storage<T>::hi(columns[i] + k)
                                             : Storage<T>::lo(columns[i] + k));
#pragma GCC unroll 4
          for (int r = 0; r < Rows; ++r) acc[r][i] = fma(part[r], value, acc[r][i]);
        }
      }
    for (int r = 0; r < Rows; ++r)
      for (int64_t i = 0; i < count; ++i)
        convert_to(sum_lanes<Acc>(acc[r][i]), out(row + r) + column + i);
  }

  void run_dots() {
    widen(true);
    static thread_local std::vector<T> copy;  // of columns whose last pair is not whole
    copy.assign(size_t(kGroupColumns * pad), T(0));
    for (int64_t column = 0; column < problem.num_columns; column += kGroupColumns) {
      const int64_t count = std::min<int64_t>(kGroupColumns, problem.num_columns - column);
      const T* columns[kGroupColumns];
      for (int64_t i = 0; i < kGroupColumns; ++i) {
        const T* from = weight() + (column + std::min(i, count - 1)) * problem.weight_column;
        columns[i] = from;
        if (pad == problem.depth) continue;
        std::copy_n(from, problem.depth, copy.data() + i * pad);
        columns[i] = copy.data() + i * pad;
      }
      in_groups([&](auto rows, int64_t row) { dots<rows()>(row, column, count, columns); });
    }
  }
};

template <class T>
void run(const Problem& problem) {
  using Acc = typename Storage<T>::Acc;
  constexpr int kPair = Storage<T>::kPair;
  const int64_t num_blocks = (problem.num_rows + kBlockRows - 1) / kBlockRows;
  const int64_t block = (problem.num_rows + num_blocks - 1) / std::max<int64_t>(num_blocks, 1);
  const double unit_ns = double(block * problem.depth * problem.num_columns) / 20;
  const int64_t grain = int64_t(8000 / (unit_ns + 50)) + 1;  // 8 us pays for waking a thread
  parallel_for(problem.num_heads * num_blocks, grain, [&](int64_t unit, int64_t end) {
    static thread_local std::vector<Acc> x;
    for (; unit < end; ++unit) {
      const int64_t first = unit % num_blocks * block;
      const int64_t rows = std::min(block, problem.num_rows - first);
      if (rows <= 0) continue;
      const int64_t pad = (problem.depth + kPair - 1) / kPair * kPair;
      Worker<T> worker{problem, unit / num_blocks, first, rows, pad, x};
      if (problem.weight_column == 1)
        worker.run_chains();
      else
        worker.run_dots();
    }
  });
}

at::Tensor head_linear(const at::Tensor& x, const at::Tensor& weight) {
  using c10::ScalarType;
  TORCH_CHECK(x.dim() >= 2 && weight.dim() == 3 && x.size(-2) == weight.size(0) &&
                  x.size(-1) == weight.size(1),
              "head_linear: expected x [.., N, K] and weight [N, K, O], got ", x.sizes(), " and ",
              weight.sizes());
  TORCH_CHECK(x.scalar_type() == weight.scalar_type(), "head_linear: x and weight share one dtype, got ",
              x.scalar_type(), " and ", weight.scalar_type());
  auto sizes = x.sizes().vec();
  sizes.back() = weight.size(2);
  at::Tensor out = at::empty(sizes, x.options());
  if (out.numel() == 0) return out;
  const bool as_it_is = x.dim() == 4 && (x.stride(3) == 1 || x.size(3) == 1);
  const at::Tensor rows = as_it_is ? x : x.contiguous();
  const at::Tensor matrices =
      weight.stride(2) == 1 || weight.stride(1) == 1 ? weight : weight.contiguous();
  Problem p{};
  p.x = rows.const_data_ptr();
  p.weight = matrices.const_data_ptr();
  p.out = out.mutable_data_ptr();
  p.num_heads = weight.size(0);
  p.depth = weight.size(1);
  p.num_columns = weight.size(2);
  p.num_rows = out.numel() / (p.num_heads * p.num_columns);
  p.rows_per_batch = as_it_is ? x.size(1) : p.num_rows;
  p.batch_stride = as_it_is ? x.stride(0) : 0;
  p.row_stride = as_it_is ? x.stride(1) : p.num_heads * p.depth;
  p.head_stride = as_it_is ? x.stride(2) : p.depth;
  p.weight_head = matrices.stride(0);
  p.weight_depth = matrices.stride(1);
  p.weight_column = matrices.stride(2);
  switch (x.scalar_type()) {
    case ScalarType::Float: run<float>(p); break;
    case ScalarType::Double: run<double>(p); break;
    case ScalarType::BFloat16: run<c10::BFloat16>(p); break;
    case ScalarType::Half: run<c10::Half>(p); break;
    default: TORCH_CHECK(false, "head_linear: unsupported dtype ", x.scalar_type());
  }
  return out;
}

TORCH_LIBRARY_IMPL(compilespec, CPU, m) { m.impl("head_linear", head_linear); }

}  // namespace head_linear
}  // namespace compilespec
