// row_topk on the CPU: the largest few values of each row, or their log-probabilities.
//
// A row's spans give their largest values first, with vectors; only spans that have one of the best
// are searched for its place.  A second pass adds up the exponentials.  torch's two operators write a
// row of log-probabilities and sort pairs of it: for the scores of a draft, 20 times as long.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <numeric>
#include <tuple>
#include <vector>

#include "_threads.h"
#include "_vector.h"

namespace compilespec {
namespace row_topk {

constexpr int64_t kSpan = 64;  // elements

template <class T>
class Row {
 public:
  // Read a row whose largest values are wanted.
  void read(const T* row, int64_t columns) {
    row_ = row, columns_ = columns;
    const int64_t spans = (columns + kSpan - 1) / kSpan;
    most_.assign(size_t((spans + kLanes<T> - 1) / kLanes<T> * kLanes<T>), kNone);
    last_.assign(size_t(spans), -1);
    auto is_nan = Vector<T>{} != Vector<T>{};
    for (int64_t s = 0; s < spans; ++s) {
      T padded[kSpan];
      const T* from = span(s, padded);
      Vector<T> most = load(from);
      for (int64_t i = 0; i < kSpan; i += kLanes<T>) {
        const Vector<T> value = load(from + i);
        most = value > most ? value : most;
        is_nan |= value != value;
      }
      most_[s] = max_lanes<T>(most);
    }
    has_nan_ = false;
    for (int lane = 0; lane < kLanes<T>; ++lane) has_nan_ |= is_nan[lane] != 0;
  }

  bool has_nan() const { return has_nan_; }

  // The places of the k largest values in falling order, of equal ones the first first; NaN is none
  // of the elements.
  void find(int64_t k, int64_t* places) {
    for (int64_t found = 0; found < k; ++found) places[found] = take(best_span());
  }

  // logsumexp of the row less `top`, its largest value.
  T log_sum(T top) const {
    Vector<T> sums[2] = {};
    for (int64_t s = 0; s < int64_t(last_.size()); ++s) {
      T padded[kSpan];
      const T* from = span(s, padded);
      for (int64_t i = 0; i < kSpan; i += 2 * kLanes<T>) {
        sums[0] += exp(load(from + i) - top);
        sums[1] += exp(load(from + i + kLanes<T>) - top);
      }
    }
    const Vector<T> both = sums[0] + sums[1];
    T sum = 0;
    for (int lane = 0; lane < kLanes<T>; ++lane) sum += both[lane];
    return std::log(sum);
  }

 private:
  static constexpr T kNone = std::numeric_limits<T>::quiet_NaN();
  static constexpr T kLeast = -std::numeric_limits<T>::infinity();

  // The elements of a span, behind the row's end -inf.
  const T* span(int64_t s, T* padded) const {
    const int64_t first = s * kSpan;
    if (first + kSpan <= columns_) return row_ + first;
    std::fill_n(std::copy(row_ + first, row_ + columns_, padded), first + kSpan - columns_, kLeast);
    return padded;
  }

  // The first span that has the largest value left.
  int64_t best_span() const {
    Vector<T> most = splat(kLeast);
    for (size_t s = 0; s < most_.size(); s += kLanes<T>) {
      const Vector<T> value = load(most_.data() + s);
      most = value > most ? value : most;
    }
    return std::find(most_.begin(), most_.end(), max_lanes<T>(most)) - most_.begin();
  }

  // Take the first of a span's largest values that are left, and note the next.
  int64_t take(int64_t s) {
    const int64_t first = s * kSpan, end = std::min(first + kSpan, columns_);
    const T top = most_[s];
    // Those as large that stand before the last one taken are taken; if it was larger, none is.
    int64_t place = last_[s] >= 0 && row_[last_[s]] == top ? last_[s] + 1 : first;
    while (row_[place] != top) ++place;
    last_[s] = place;
    for (int64_t i = place + 1; i < end; ++i)
      if (row_[i] == top) return place;
    T next = kNone;
    for (int64_t i = first; i < end; ++i)
      next = row_[i] < top && !(next >= row_[i]) ? row_[i] : next;
    most_[s] = next;
    return place;
  }

  const T* row_ = nullptr;
  int64_t columns_ = 0;
  bool has_nan_ = false;
  // Of each span: the largest value that is left, kNone where none is, and the place that was taken
  // last, or -1.
  std::vector<T> most_;
  std::vector<int64_t> last_;
};

// Of a row with NaN: those first, then the largest.
template <class T>
void find_with_nan(const T* row, int64_t columns, int64_t k, int64_t* places) {
  std::vector<int64_t> order(size_t(columns), 0);
  std::iota(order.begin(), order.end(), 0);
  std::partial_sort(order.begin(), order.begin() + k, order.end(), [row](int64_t a, int64_t b) {
    const bool nan_a = row[a] != row[a], nan_b = row[b] != row[b];
    if (nan_a != nan_b) return nan_a;
    return nan_a || row[a] == row[b] ? a < b : row[a] > row[b];
  });
  std::copy_n(order.begin(), k, places);
}

template <class T>
void run(const at::Tensor& x, int64_t k, bool log_probs, T* values, int64_t* places) {
  const int64_t columns = x.size(-1), rows = columns ? x.numel() / columns : 0;
  const T* all = x.const_data_ptr<T>();
  share(rows, double(rows) * double(columns) / 5, [&](std::atomic<int64_t>& next) {
    static thread_local Row<T> scratch;
    for (int64_t r; (r = next++) < rows;) {
      const T* row = all + r * columns;
      T* best = values + r * k;
      int64_t* place = places + r * k;
      scratch.read(row, columns);
      if (scratch.has_nan())
        find_with_nan(row, columns, k, place);
      else
        scratch.find(k, place);
      for (int64_t i = 0; i < k; ++i) best[i] = row[place[i]];
      if (!log_probs || k == 0) continue;
      const T top = best[0];
      const bool is_defined = std::isfinite(top);  // as torch has it
      const T log_sum = is_defined ? scratch.log_sum(top) : std::numeric_limits<T>::quiet_NaN();
      for (int64_t i = 0; i < k; ++i) best[i] = (best[i] - top) - log_sum;
    }
  });
}

std::tuple<at::Tensor, at::Tensor> row_topk(const at::Tensor& given, int64_t k, bool log_probs) {
  using c10::ScalarType;
  TORCH_CHECK(given.dim() >= 1 && k >= 0 && k <= given.size(-1),
              "row_topk: expected x [..., columns] of ", k, " columns or more, got ", given.sizes());
  const at::Tensor x = given.contiguous();
  std::vector<int64_t> shape = x.sizes().vec();
  shape.back() = k;
  at::Tensor values = at::empty(shape, x.options());
  at::Tensor places = at::empty(shape, x.options().dtype(ScalarType::Long));
  int64_t* to = places.mutable_data_ptr<int64_t>();
  switch (x.scalar_type()) {
    case ScalarType::Float: run<float>(x, k, log_probs, values.mutable_data_ptr<float>(), to); break;
    case ScalarType::Double: run<double>(x, k, log_probs, values.mutable_data_ptr<double>(), to); break;
    default: TORCH_CHECK(false, "row_topk: unsupported type ", x.scalar_type());
  }
  return {values, places};
}

TORCH_LIBRARY_IMPL(compilespec, CPU, m) { m.impl("row_topk", row_topk); }

}  // namespace row_topk
}  // namespace compilespec
