// row_argmax on the CPU: the first of each row's largest values, the first NaN where there is one.
//
// A row's spans give their largest values first, with vectors; only the span that has the best is
// searched for its place.  Inductor's loop keeps an index beside every lane, and takes 5 times as
// long for the logits of a token.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <limits>

#include "_threads.h"
#include "_vector.h"

namespace compilespec {
namespace row_argmax {

constexpr int64_t kSpan = 2048;  // elements

// Whether `value` takes the place of an earlier `best`: NaN is larger than any number.
template <class Acc>
bool beats(Acc value, Acc best) {
  return value > best || (value != value && best == best);
}

template <class T, class Acc = typename Storage<T>::Acc>
Acc largest(const T* from, int64_t count) {
  constexpr int kSums = 4;
  constexpr int64_t kPair = Storage<T>::kPair, kStep = kPair * kSums / 2;
  Acc best = -std::numeric_limits<Acc>::infinity();
  Vector<Acc> most[kSums];
  for (auto& one : most) one = splat(best);
  int64_t i = 0;
  for (; i + kStep <= count; i += kStep)
#pragma GCC unroll 4
    for (int s = 0; s < kSums; ++s) {
      const T* pair = from + i + s / 2 * kPair;
      const Vector<Acc> value = s % 2 ? Storage<T>::hi(pair) : Storage<T>::lo(pair);
      most[s] = (value > most[s]) | (value != value) ? value : most[s];
    }
  for (const auto& one : most)
    for (int lane = 0; lane < kLanes<Acc>; ++lane)
      if (beats<Acc>(one[lane], best)) best = one[lane];
  for (; i < count; ++i)
    if (beats(Acc(from[i]), best)) best = Acc(from[i]);
  return best;
}

template <class T>
int64_t place_of_best(const T* row, int64_t columns) {
  using Acc = typename Storage<T>::Acc;
  Acc best = largest(row, std::min(kSpan, columns));
  int64_t place = 0;
  for (int64_t first = kSpan; first < columns; first += kSpan) {
    const Acc most = largest(row + first, std::min(kSpan, columns - first));
    if (beats(most, best)) best = most, place = first;
  }
  const bool is_nan = best != best;
  for (;; ++place) {
    const auto value = Acc(row[place]);
    if (is_nan ? value != value : value == best) return place;
  }
}

template <class T>
void run(const at::Tensor& x, int64_t* places) {
  const int64_t columns = x.size(-1), rows = columns ? x.numel() / columns : 0;
  const T* from = (const T*)x.const_data_ptr();
  const int64_t grain = 8000 / (columns / 16 + 1) + 1;  // 8 us pays for waking a thread
  parallel_for(rows, grain, [&](int64_t row, int64_t end) {
    for (; row < end; ++row) places[row] = place_of_best(from + row * columns, columns);
  });
}

at::Tensor row_argmax(const at::Tensor& given) {
  using c10::ScalarType;
  TORCH_CHECK(given.dim() >= 1, "row_argmax: expected x [..., columns]");
  const at::Tensor x = given.contiguous();
  const auto rows = x.sizes().slice(0, size_t(x.dim() - 1));
  at::Tensor places = at::empty(rows, x.options().dtype(ScalarType::Long));
  TORCH_CHECK(x.size(-1) > 0 || places.numel() == 0, "row_argmax: rows of no element in ", x.sizes());
  int64_t* to = places.mutable_data_ptr<int64_t>();
  switch (x.scalar_type()) {
    case ScalarType::Float: run<float>(x, to); break;
    case ScalarType::Double: run<double>(x, to); break;
    case ScalarType::BFloat16: run<c10::BFloat16>(x, to); break;
    case ScalarType::Half: run<c10::Half>(x, to); break;
    default: TORCH_CHECK(false, "row_argmax: unsupported type ", x.scalar_type());
  }
  return places;
}

TORCH_LIBRARY_IMPL(compilespec, CPU, m) { m.impl("row_argmax", row_argmax); }

}  // namespace row_argmax
}  // namespace compilespec
