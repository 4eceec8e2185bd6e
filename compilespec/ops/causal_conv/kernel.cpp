// cached_conv on the CPU: each unit of work has a few tokens of one request and a block of channels.
//
// A channel's sum begins with the oldest token and ends with the bias, product after product, as the
// reference computes it: the bits are the same.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "_threads.h"
#include "_tokens.h"

namespace compilespec {
namespace causal_conv {

constexpr int kChannels = 256;  // of a unit
constexpr int kTokens = 32;     // of a unit, at most

struct Problem {
  const char *x, *weight, *bias;
  char *recent, *out;
  c10::ScalarType type, weight_type, bias_type;
  int64_t x_batch, x_token;  // strides in bytes
  const int32_t *row, *position;
  int64_t num_tokens, tokens_per_batch, num_channels, width, num_kept;
  int64_t bytes, weight_bytes, bias_bytes;  // of an element
  std::vector<Segment> segments;

  const char* token_ptr(int64_t token) const {
    return x + token / tokens_per_batch * x_batch + token % tokens_per_batch * x_token;
  }
  char* recent_ptr(int64_t row, int64_t position) const {
    return recent + (row * num_kept + column_of(position, num_kept)) * num_channels * bytes;
  }
};

struct Piece {  // tokens [begin, end) of a segment
  const Segment* segment;
  int64_t begin, end;
};

template <class Acc>
struct Worker {
  const Problem& problem;
  std::vector<Acc> weight, rows;  // [W, kChannels]; inputs [W - 1 + kTokens, kChannels]
  std::vector<Acc> straight;      // [kChannels, W]
  Acc bias[kChannels], total[kChannels];
  int64_t channel = 0, num_channels = 0;  // of the unit at hand

  explicit Worker(const Problem& problem) : problem(problem) {
    weight.resize(size_t(problem.width * kChannels));
    straight.resize(size_t(problem.width * kChannels));
    rows.resize(size_t((problem.width - 1 + kTokens) * kChannels));
  }

  void bind(int64_t first_channel) {
    channel = first_channel;
    num_channels = std::min<int64_t>(kChannels, problem.num_channels - channel);
    const int64_t width = problem.width;
    widen(problem.weight + channel * width * problem.weight_bytes, problem.weight_type,
          num_channels * width, straight.data());
    switch (width) {  // constant strides are shuffles of vectors
      case 2: transpose<2>(2); break;
      case 3: transpose<3>(3); break;
      case 4: transpose<4>(4); break;
      default: transpose<0>(width);
    }
    if (problem.bias)
      widen(problem.bias + channel * problem.bias_bytes, problem.bias_type, num_channels, bias);
  }

  template <int Width>
  void transpose(int64_t given) {
    const int64_t width = Width ? Width : given;
    for (int64_t w = 0; w < width; ++w)
      for (int64_t c = 0; c < kChannels; ++c)
        weight[size_t(w * kChannels + c)] = straight[size_t(c * width + w)];
  }

  void run(const Piece& piece) {
    const Segment& segment = *piece.segment;
    const int64_t num_before = problem.width - 1;
    for (int64_t token = piece.begin - num_before; token < piece.end; ++token) {
      Acc* target = rows.data() + (token - piece.begin + num_before) * kChannels;
      const int64_t position = segment.first + token - segment.begin;
      if (position < 0 && token < segment.begin) {
        std::fill_n(target, num_channels, Acc(0));
        continue;
      }
      const char* source = token >= segment.begin ? problem.token_ptr(token)
                                                  : problem.recent_ptr(segment.row, position);
      widen(source + channel * problem.bytes, problem.type, num_channels, target);
    }
    for (int64_t token = piece.begin; token < piece.end; ++token) {
      slide(rows.data() + (token - piece.begin) * kChannels);
      char* target = problem.out + (token * problem.num_channels + channel) * problem.bytes;
      narrow(total, problem.type, num_channels, target);
    }
  }

  void slide(const Acc* oldest) {
    for (int c = 0; c < kChannels; c += kLanes<Acc>) {
      Vector<Acc> sum = {};
      for (int64_t w = 0; w < problem.width; ++w)
        sum += load(oldest + w * kChannels + c) * load(weight.data() + w * kChannels + c);
      if (problem.bias) sum += load(bias + c);
      store(total + c, sum);
    }
  }
};

template <class Acc>
void convolve(const Problem& problem) {
  std::vector<Piece> pieces;
  for (const Segment& one : problem.segments)
    for (int64_t token = one.begin; token < one.end; token += kTokens)
      pieces.push_back({&one, token, std::min(token + kTokens, one.end)});
  const int64_t num_pieces = int64_t(pieces.size());
  const int64_t num_units = num_pieces * ((problem.num_channels + kChannels - 1) / kChannels);
  const double cells = double((problem.num_tokens + num_pieces) * problem.num_channels);
  share(num_units, cells * double(problem.width) / 8, [&](std::atomic<int64_t>& next) {
    Worker<Acc> worker(problem);
    for (int64_t unit, bound = -1; (unit = next++) < num_units;) {
      const int64_t block = unit / num_pieces;
      if (block != bound) worker.bind(block * kChannels);
      bound = block;
      worker.run(pieces[size_t(unit % num_pieces)]);
    }
  });
}

// The last tokens of each request, once all have read the ring.
void write_ring(const Problem& problem) {
  std::vector<std::pair<int64_t, char*>> copies;
  for (const Segment& one : problem.segments)
    for (int64_t token = std::max(one.begin, one.end - problem.num_kept); token < one.end; ++token)
      copies.push_back({token, problem.recent_ptr(one.row, one.first + token - one.begin)});
  const int64_t bytes = problem.num_channels * problem.bytes;
  const int64_t grain = (64 << 10) / std::max<int64_t>(bytes, 1) + 1;
  parallel_for(int64_t(copies.size()), grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      std::memcpy(copies[size_t(i)].second, problem.token_ptr(copies[size_t(i)].first),
                  size_t(bytes));
  });
}

void check_shapes(const at::Tensor& x, const at::Tensor& weight,
                  const c10::optional<at::Tensor>& bias, const at::Tensor& recent) {
  TORCH_CHECK(x.dim() == 3 && weight.dim() == 2 && weight.size(0) == x.size(2) &&
                  weight.size(1) > 0,
              "cached_conv: x ", x.sizes(), " and weight ", weight.sizes(), " do not fit");
  TORCH_CHECK(!bias || (bias->dim() == 1 && bias->size(0) == x.size(2)),
              "cached_conv: expected bias [", x.size(2), "]");
  TORCH_CHECK(recent.dim() == 3 && recent.is_contiguous() && recent.size(2) == x.size(2) &&
                  recent.scalar_type() == x.scalar_type(),
              "cached_conv: expected contiguous recent tokens [rows, P, ", x.size(2), "] of ",
              x.scalar_type(), ", got ", recent.sizes(), " of ", recent.scalar_type());
  TORCH_CHECK(recent.size(1) >= weight.size(1) - 1, "cached_conv: a ring of ", recent.size(1),
              " tokens for a convolution over ", weight.size(1));
}

at::Tensor cached_conv(const at::Tensor& x, const at::Tensor& weight,
                       const c10::optional<at::Tensor>& bias, at::Tensor& recent,
                       const at::Tensor& row, const at::Tensor& position) {
  check_shapes(x, weight, bias, recent);
  at::Tensor out = at::empty(x.sizes(), x.options());
  if (out.numel() == 0) return out;
  const at::Tensor rows = x.stride(2) == 1 || x.size(2) == 1 ? x : x.contiguous();
  const at::Tensor factors = weight.contiguous();
  at::Tensor keep[3];
  Problem p{};
  p.num_tokens = x.size(0) * x.size(1);
  p.tokens_per_batch = x.size(1);
  p.num_channels = x.size(2);
  p.width = weight.size(1);
  p.num_kept = recent.size(1);
  p.type = x.scalar_type();
  p.bytes = int64_t(x.element_size());
  p.x = (const char*)rows.const_data_ptr();
  p.x_batch = rows.stride(0) * p.bytes;
  p.x_token = rows.stride(1) * p.bytes;
  p.weight = (const char*)factors.const_data_ptr();
  p.weight_type = factors.scalar_type();
  p.weight_bytes = int64_t(factors.element_size());
  if (bias && bias->defined()) {
    keep[2] = bias->contiguous();
    p.bias = (const char*)keep[2].const_data_ptr();
    p.bias_type = keep[2].scalar_type();
    p.bias_bytes = int64_t(keep[2].element_size());
  }
  p.row = int32_ptr(row, p.num_tokens, "cached_conv: row", keep[0]);
  p.position = int32_ptr(position, p.num_tokens, "cached_conv: position", keep[1]);
  p.recent = (char*)recent.mutable_data_ptr();
  p.out = (char*)out.mutable_data_ptr();
  p.segments = find_segments(p.row, p.position, p.num_tokens, recent.size(0), "cached_conv");
  const int64_t bytes = p.num_channels * p.bytes;
  for (int64_t token = 0; token < p.num_tokens; ++token)
    if (p.row[token] < 0) std::memset(p.out + token * bytes, 0, size_t(bytes));
  if (p.type == c10::ScalarType::Double)
    convolve<double>(p);
  else
    convolve<float>(p);
  write_ring(p);
  return out;
}

TORCH_LIBRARY_IMPL(compilespec, CPU, m) { m.impl("cached_conv", cached_conv); }

}  // namespace causal_conv
}  // namespace compilespec
