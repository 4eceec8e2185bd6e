// What operators that read requests' tokens share: searching them, runs of tokens, rings of recent
// tokens, and elements of any floating dtype.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <vector>

#include "_vector.h"

namespace compilespec {

constexpr int64_t kTokensAtOnce = 32;  // that a search compares

inline bool holds(const int32_t* tokens, int32_t wanted) {
  int found = 0;
  for (int64_t i = 0; i < kTokensAtOnce; ++i) found |= tokens[i] == wanted;
  return found != 0;
}

// How many tokens up to `token`, which equals `newest`, are those up to that one; at most `most`.
inline int64_t count_matching(const int32_t* token, const int32_t* newest, int64_t most) {
  int64_t matched = 1;
  while (matched < most && token[-matched] == newest[-matched] && newest[-matched] >= 0) ++matched;
  return matched;
}

struct Segment {  // tokens [begin, end) of one request
  int64_t begin, end, row;
  int64_t first;  // position of token `begin`
};

// The runs of tokens with one live state row.
inline std::vector<Segment> find_segments(const int32_t* row, const int32_t* position,
                                          int64_t num_tokens, int64_t num_rows, const char* name) {
  std::vector<Segment> segments;
  for (int64_t token = 0; token < num_tokens; ++token) {
    if (row[token] < 0) continue;
    TORCH_CHECK(row[token] < num_rows, name, ": row ", row[token], " in a state of ", num_rows,
                " rows");
    if (token > 0 && row[token - 1] == row[token])
      segments.back().end = token + 1;
    else
      segments.push_back({token, token + 1, row[token], position[token]});
  }
  return segments;
}

// Where a ring of `size` columns has a position, which may be negative.
inline int64_t column_of(int64_t position, int64_t size) {
  const int64_t column = position % size;
  return column < 0 ? column + size : column;
}

inline const int32_t* int32_ptr(const at::Tensor& tensor, int64_t num_tokens, const char* name,
                                at::Tensor& keep) {
  TORCH_CHECK(tensor.scalar_type() == c10::ScalarType::Int && tensor.dim() == 2 &&
                  tensor.numel() == num_tokens,
              name, " must be int32 [B, S], got ", tensor.scalar_type(), " ", tensor.sizes());
  keep = tensor.is_contiguous() ? tensor : tensor.contiguous();
  return (const int32_t*)keep.const_data_ptr();
}

template <class Acc, class T>
void copy_as(const T* source, int64_t size, Acc* target) {
  for (int64_t i = 0; i < size; ++i) target[i] = Acc(float(source[i]));
}
inline void copy_as(const double* source, int64_t size, double* target) {
  std::copy_n(source, size, target);
}
inline void copy_as(const double* source, int64_t size, float* target) {
  for (int64_t i = 0; i < size; ++i) target[i] = float(source[i]);
}

// `size` elements of dtype `type` as Acc.
template <class Acc>
void widen(const void* source, c10::ScalarType type, int64_t size, Acc* target) {
  using c10::ScalarType;
  switch (type) {
    case ScalarType::Float: return copy_as((const float*)source, size, target);
    case ScalarType::Double: return copy_as((const double*)source, size, target);
    case ScalarType::BFloat16: return copy_as((const c10::BFloat16*)source, size, target);
    case ScalarType::Half: return copy_as((const c10::Half*)source, size, target);
    default: TORCH_CHECK(false, "expected floating point, got ", type);
  }
}

// The way back, rounded to nearest even.
inline void narrow(const float* source, c10::ScalarType type, int64_t size, void* target) {
  using c10::ScalarType;
  switch (type) {
    case ScalarType::Float: std::copy_n(source, size, (float*)target); return;
    case ScalarType::BFloat16:
      for (int64_t i = 0; i < size; ++i) convert(source[i], (c10::BFloat16*)target + i);
      return;
    case ScalarType::Half:
      for (int64_t i = 0; i < size; ++i) convert(source[i], (c10::Half*)target + i);
      return;
    default: TORCH_CHECK(false, "no float32 sums are made of ", type);
  }
}
inline void narrow(const double* source, c10::ScalarType, int64_t size, void* target) {
  std::copy_n(source, size, (double*)target);
}

}  // namespace compilespec
