// ngram_match on the CPU: a request's tokens are searched backwards from its newest one, many at a
// time, and no further than the first match of the longest window.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <numeric>
#include <tuple>

#include "_threads.h"
#include "_tokens.h"

namespace compilespec {
namespace ngram_match {

struct Match {
  int64_t end = 0;     // the place of the token after it; 0 where there is none
  int64_t length = 0;  // tokens
};

// The last of the longest windows of min_ngram to max_ngram newest tokens that occurred before.
Match find(const int32_t* tokens, int64_t length, int64_t max_ngram, int64_t min_ngram) {
  Match best;
  const int32_t* newest = tokens + length - 1;
  if (length < 1 || *newest < 0) return best;
  for (int64_t end = length - 1, begin; end > 0; end = begin) {
    begin = std::max<int64_t>(end - kTokensAtOnce, 0);
    if (end - begin == kTokensAtOnce && !holds(tokens + begin, *newest)) continue;
    for (int64_t i = end - 1; i >= begin; --i) {
      if (tokens[i] != *newest) continue;
      const int64_t matched = count_matching(tokens + i, newest, std::min(i + 1, max_ngram));
      if (matched < min_ngram || matched <= best.length) continue;
      best = {i + 1, matched};
      if (matched == max_ngram) return best;
    }
  }
  return best;
}

std::tuple<at::Tensor, at::Tensor> ngram_match(const at::Tensor& history, const at::Tensor& length,
                                               int64_t num_draft_tokens, int64_t max_ngram,
                                               int64_t min_ngram) {
  TORCH_CHECK(history.dim() == 2 && history.scalar_type() == c10::ScalarType::Int,
              "ngram_match: expected int32 history [B, L], got ", history.scalar_type(), " ",
              history.sizes());
  TORCH_CHECK(length.dim() == 1 && length.size(0) == history.size(0) && num_draft_tokens >= 1 &&
                  min_ngram >= 1 && min_ngram <= max_ngram,
              "ngram_match: expected a length for each of ", history.size(0),
              " requests, a draft or more, and 1 <= min_ngram <= max_ngram");
  const at::Tensor texts = history.contiguous();
  const at::Tensor lengths = length.to(c10::ScalarType::Long).contiguous();
  const int64_t batch = texts.size(0), width = texts.size(1);
  at::Tensor drafts = at::empty({batch, num_draft_tokens}, history.options());
  at::Tensor matched = at::empty({batch}, history.options());
  const auto* all = (const int32_t*)texts.const_data_ptr();
  const auto* length_of = (const int64_t*)lengths.const_data_ptr();
  auto* drafts_ptr = (int32_t*)drafts.mutable_data_ptr();
  auto* matched_ptr = (int32_t*)matched.mutable_data_ptr();
  const auto num_tokens = double(std::accumulate(length_of, length_of + batch, int64_t(0)));
  share(batch, num_tokens / 8, [&](std::atomic<int64_t>& next) {
    for (int64_t b; (b = next++) < batch;) {
      const int32_t* tokens = all + b * width;
      const int64_t num_own = std::min(length_of[b], width);
      const Match match = find(tokens, num_own, max_ngram, min_ngram);
      const int64_t begin = match.length ? match.end : num_own;
      int32_t* draft = drafts_ptr + b * num_draft_tokens;
      const int64_t count = std::clamp<int64_t>(num_own - begin, 0, num_draft_tokens);
      std::fill(std::copy_n(tokens + begin, count, draft), draft + num_draft_tokens, -1);
      matched_ptr[b] = int32_t(match.length);
    }
  });
  return {drafts, matched};
}

TORCH_LIBRARY_IMPL(compilespec, CPU, m) { m.impl("ngram_match", ngram_match); }

}  // namespace ngram_match
}  // namespace compilespec
