// suffix_match on the CPU: a request's newest token is looked for in all texts, many tokens at a time;
// only where it stands are the tokens before it compared.
#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <torch/library.h>

#include <algorithm>
#include <tuple>
#include <vector>

#include "_threads.h"
#include "_tokens.h"

namespace compilespec {
namespace suffix_match {

struct Text {
  const int32_t* tokens;
  int64_t length;
};

struct Place {  // a token with the longest match
  const int32_t *token, *end;
};

struct Search {
  const int32_t* newest;  // the request's last token
  int64_t length;         // of the request
  int64_t max_match, longest;
  std::vector<Place> places;  // in the order of the texts

  // Token i of a text, whose predecessor is the newest one of the request.
  void consider(const Text& text, int64_t i) {
    if (text.tokens[i] < 0) return;
    const int64_t matched =
        count_matching(text.tokens + i - 1, newest, std::min({i, length, max_match}));
    if (matched < longest) return;
    if (matched > longest) places.clear();
    longest = matched;
    places.push_back({text.tokens + i, text.tokens + text.length});
  }

  void run(const Text& text) {
    for (int64_t first = 0; first + 1 < text.length; first += kTokensAtOnce) {
      const int64_t last = std::min(first + kTokensAtOnce, text.length - 1);
      if (last - first == kTokensAtOnce && !holds(text.tokens + first, *newest)) continue;
      for (int64_t i = first; i < last; ++i)
        if (text.tokens[i] == *newest) consider(text, i + 1);
    }
  }

  // The token that most places go on with, which becomes the only one that they do; false for none.
  bool vote(std::vector<std::pair<int32_t, int64_t>>& tokens, int32_t* draft) {
    tokens.clear();
    for (int64_t p = 0; p < int64_t(places.size()); ++p)
      if (places[size_t(p)].token < places[size_t(p)].end && *places[size_t(p)].token >= 0)
        tokens.push_back({*places[size_t(p)].token, p});
    if (tokens.empty()) return false;
    std::sort(tokens.begin(), tokens.end());
    int64_t most = 0, newest_place = -1;
    for (size_t begin = 0, end; begin < tokens.size(); begin = end) {
      for (end = begin + 1; end < tokens.size() && tokens[end].first == tokens[begin].first;) ++end;
      const int64_t count = int64_t(end - begin), place = tokens[end - 1].second;
      if (count < most || (count == most && place < newest_place)) continue;
      most = count;
      newest_place = place;
      *draft = tokens[begin].first;
    }
    std::vector<Place> left;
    for (const Place& place : places)
      if (place.token < place.end && *place.token == *draft)
        left.push_back({place.token + 1, place.end});
    places = std::move(left);
    return true;
  }
};

std::tuple<at::Tensor, at::Tensor> suffix_match(const at::Tensor& history, const at::Tensor& length,
                                                const at::Tensor& past, int64_t num_draft_tokens,
                                                int64_t max_match, int64_t min_match, int64_t) {
  TORCH_CHECK(history.dim() == 2 && history.scalar_type() == c10::ScalarType::Int &&
                  past.dim() == 2 && past.scalar_type() == c10::ScalarType::Int,
              "suffix_match: expected int32 history [B, L] and past [M, L], got ",
              history.scalar_type(), " ", history.sizes(), " and ", past.scalar_type(), " ",
              past.sizes());
  TORCH_CHECK(length.dim() == 1 && length.size(0) == history.size(0) && min_match >= 1,
              "suffix_match: expected a length for each of ", history.size(0),
              " requests and min_match of 1 or more");
  const at::Tensor own = history.contiguous(), texts = past.contiguous();
  const at::Tensor lengths = length.to(c10::ScalarType::Long).contiguous();
  at::Tensor out = at::full({history.size(0), num_draft_tokens}, -1, history.options());
  at::Tensor matched = at::full({history.size(0)}, 0, history.options());
  const int64_t batch = own.size(0), width = own.size(1);
  const int64_t num_past = texts.size(0), past_width = texts.size(1);
  const auto* own_ptr = (const int32_t*)own.const_data_ptr();
  const auto* past_ptr = (const int32_t*)texts.const_data_ptr();
  const auto* length_ptr = (const int64_t*)lengths.const_data_ptr();
  auto* out_ptr = (int32_t*)out.mutable_data_ptr();
  auto* matched_ptr = (int32_t*)matched.mutable_data_ptr();
  const double cells = double(batch) * double(width + num_past * past_width);
  share(batch, cells / 8, [&](std::atomic<int64_t>& next) {
    std::vector<std::pair<int32_t, int64_t>> tokens;
    for (int64_t b; (b = next++) < batch;) {
      const int32_t* row = own_ptr + b * width;
      const int64_t num_own = std::min(length_ptr[b], width);
      if (num_own < 1 || row[num_own - 1] < 0) continue;
      Search search{row + num_own - 1, num_own, max_match, min_match, {}};
      for (int64_t m = 0; m < num_past; ++m) search.run({past_ptr + m * past_width, past_width});
      search.run({row, num_own});
      if (!search.places.empty()) matched_ptr[b] = int32_t(search.longest);
      for (int64_t k = 0; k < num_draft_tokens; ++k)
        if (!search.vote(tokens, out_ptr + b * num_draft_tokens + k)) break;
    }
  });
  return {out, matched};
}

TORCH_LIBRARY_IMPL(compilespec, CPU, m) { m.impl("suffix_match", suffix_match); }

}  // namespace suffix_match
}  // namespace compilespec
