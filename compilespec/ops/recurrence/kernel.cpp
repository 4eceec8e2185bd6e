// cached_recurrence on the CPU: each unit of work has one request, one head and a few columns of its
// state, which stay in L1 while the tokens pass.
//
// A column depends on no other one, and what it sums over keys is one chain of fma (for a single
// column, whose lanes are the keys: one fixed tree).  Kept tokens take the same way as new ones, from
// inputs that were stored as wide as they are used: replaying a token repeats its bits.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <vector>

#include "_threads.h"
#include "_tokens.h"
#include "_vector.h"

namespace compilespec {
namespace recurrence {

constexpr int kHeads = 32;  // heads of a unit where each has a single column
constexpr int kGroup = 16;  // heads whose lanes are summed at once

struct Rows {  // what one token gives: a row for each head
  const char* data;
  c10::ScalarType type;
  int64_t stride;  // bytes from head to head

  const char* at(int64_t head) const { return data + head * stride; }
};

struct View {  // [B, S, heads, width] with unit stride over width
  const char* data;
  c10::ScalarType type;
  int64_t batch, token, head;  // strides in bytes
};

struct Problem {
  View query, key, value, decay, beta;
  char *state, *recent, *out;
  const int32_t *row, *position, *absorbed;
  const bool* commits;
  int64_t num_tokens, tokens_per_batch, num_heads, num_key_heads, key_dim, value_dim;
  int64_t decay_dim;  // 1 or key_dim
  int64_t num_rows, num_kept, kept_width;
  bool has_beta;
  std::vector<Segment> segments;

  int64_t first_replayed(const Segment& segment) const {
    return std::max<int64_t>({absorbed[segment.begin], segment.first - num_kept, 0});
  }
  int64_t num_replayed(const Segment& segment) const {
    return std::max<int64_t>(segment.first - first_replayed(segment), 0);
  }
  // The token whose state is written back, counted from the segment's first one; -1 for none.
  int64_t last_commit(const Segment& segment) const {
    int64_t last = segment.end - 1;
    while (last >= segment.begin && !commits[last]) --last;
    return last - segment.begin;
  }
};

struct Token {
  Rows query, key, value, decay, beta;
};

Rows rows_of(const View& view, const Problem& problem, int64_t token) {
  const int64_t b = token / problem.tokens_per_batch, s = token % problem.tokens_per_batch;
  return {view.data + b * view.batch + s * view.token, view.type, view.head};
}

Token new_token(const Problem& problem, int64_t token) {
  return {rows_of(problem.query, problem, token), rows_of(problem.key, problem, token),
          rows_of(problem.value, problem, token), rows_of(problem.decay, problem, token),
          rows_of(problem.beta, problem, token)};
}

// A kept token.  Nothing asks it for an output: its key stands in for a query.
template <class Acc>
Token kept_token(const Problem& problem, int64_t row, int64_t position) {
  constexpr auto kType = c10::CppTypeToScalarType<Acc>::value;
  constexpr int64_t kBytes = int64_t(sizeof(Acc));
  const int64_t cell = row * problem.num_kept + column_of(position, problem.num_kept);
  const char* data = problem.recent + cell * problem.kept_width * kBytes;
  const Rows key{data, kType, problem.key_dim * kBytes};
  data += problem.num_key_heads * key.stride;
  const Rows value{data, kType, problem.value_dim * kBytes};
  data += problem.num_heads * value.stride;
  const Rows decay{data, kType, problem.decay_dim * kBytes};
  data += problem.num_heads * decay.stride;
  return {key, key, value, decay, {data, kType, kBytes}};
}

// Token i of those that a segment takes: first the kept ones, then its own.
template <class Acc>
Token token_at(const Problem& problem, const Segment& segment, int64_t i) {
  const int64_t replayed = problem.num_replayed(segment);
  if (i >= replayed) return new_token(problem, segment.begin + i - replayed);
  return kept_token<Acc>(problem, segment.row, problem.first_replayed(segment) + i);
}

// Elements that begin at a multiple of a vector's size.
template <class Acc>
class Scratch {
  struct alignas(kVectorBytes) Line {
    Acc lanes[kLanes<Acc>];
  };
  std::vector<Line> lines;

 public:
  void resize(int64_t size) { lines.assign(size_t((size + kLanes<Acc> - 1) / kLanes<Acc>), Line{}); }
  Acc* data() { return (Acc*)lines.data(); }
  const Acc* data() const { return (const Acc*)lines.data(); }
};

// `width` elements of each of some heads as Acc, from one head to the next `stride` of them.
template <class Acc>
void widen_heads(const Rows& rows, int64_t head, int64_t num_heads, int64_t width, Acc* target,
                 int64_t stride) {
  if (rows.stride == width * int64_t(c10::elementSize(rows.type)) && stride == width)
    return widen(rows.at(head), rows.type, num_heads * width, target);
  for (int64_t h = 0; h < num_heads; ++h)
    widen(rows.at(head + h), rows.type, width, target + h * stride);
}

int64_t rounded_up(int64_t size, int64_t multiple) {
  return (size + multiple - 1) / multiple * multiple;
}

// exp of one head's decay, for every key.
template <class Acc>
void keep_factors(const Problem& problem, const Token& token, int64_t head, Acc* kept_K) {
  widen(token.decay.at(head), token.decay.type, problem.decay_dim, kept_K);
  if (problem.decay_dim == 1) {
    std::fill_n(kept_K, problem.key_dim, exp(splat(kept_K[0]))[0]);
    return;
  }
  for (int64_t k = 0; k < problem.key_dim; k += kLanes<Acc>)
    store(kept_K + k, exp(load(kept_K + k)));
}

// Several columns of a head: the lanes are columns.
template <class Acc, int Vectors, bool HasBeta>
struct Columns {
  using Vec = Vector<Acc>;
  static constexpr int kL = kLanes<Acc>, kWidth = Vectors * kL;

  struct Inputs {
    Scratch<Acc> query, key, kept;
    Acc value[kWidth], beta[kL];
  };

  const Problem& problem;
  int64_t head = 0, column = 0, width = 0;  // of the unit at hand
  Scratch<Acc> tile, edge;                  // [K, kWidth]
  Inputs inputs[2];
  Vec known[Vectors];  // what the faded state has for the key of the token to come

  explicit Columns(const Problem& problem) : problem(problem) {
    const int64_t keys = rounded_up(problem.key_dim, kL);
    tile.resize(keys * kWidth);
    if (problem.value_dim % kWidth) edge.resize(keys * kWidth);
    for (Inputs& one : inputs)
      for (auto* part : {&one.query, &one.key, &one.kept}) part->resize(keys);
  }

  static int64_t units_per_segment(const Problem& problem) {
    return problem.num_heads * ((problem.value_dim + kWidth - 1) / kWidth);
  }

  void run(const Segment& segment, int64_t unit) {
    head = unit % problem.num_heads;
    column = unit / problem.num_heads * kWidth;
    width = std::min<int64_t>(kWidth, problem.value_dim - column);
    const int64_t replayed = problem.num_replayed(segment);
    const int64_t commit = replayed + problem.last_commit(segment);
    const int64_t num_tokens = replayed + segment.end - segment.begin;
    Acc* state = (Acc*)problem.state +
                 (segment.row * problem.num_heads + head) * problem.key_dim * problem.value_dim +
                 column;
    read(segment, 0);
    begin(segment, state);
    for (int64_t i = 0; i < num_tokens; ++i) {
      Acc* save = i != commit || commit < replayed ? nullptr : is_whole() ? state : edge.data();
      Acc found[kWidth];
      const bool ends = i + 1 == num_tokens;
      if (!ends) read(segment, i + 1);
      if (i < replayed)
        pass<true, true, false>(tile.data(), kWidth, i, nullptr, nullptr);
      else if (!ends)
        pass<true, true, true>(tile.data(), kWidth, i, found, save);
      else
        pass<true, false, true>(tile.data(), kWidth, i, found, save);
      if (save && !is_whole()) copy(edge.data(), kWidth, state, problem.value_dim);
      if (i >= replayed) write(found, segment.begin + i - replayed);
    }
  }

  bool is_whole() const { return width == kWidth; }

  void copy(const Acc* source, int64_t source_stride, Acc* target, int64_t target_stride) const {
    for (int64_t k = 0; k < problem.key_dim; ++k)
      std::copy_n(source + k * source_stride, width, target + k * target_stride);
  }

  void read(const Segment& segment, int64_t i) {
    const Token token = token_at<Acc>(problem, segment, i);
    const int64_t key_head = head / (problem.num_heads / problem.num_key_heads);
    Inputs& one = inputs[i % 2];
    widen(token.query.at(key_head), token.query.type, problem.key_dim, one.query.data());
    widen(token.key.at(key_head), token.key.type, problem.key_dim, one.key.data());
    keep_factors(problem, token, head, one.kept.data());
    std::fill_n(one.value + width, kWidth - width, Acc(0));
    const int64_t bytes = int64_t(c10::elementSize(token.value.type));
    widen(token.value.at(head) + column * bytes, token.value.type, width, one.value);
    if (HasBeta) widen(token.beta.at(head), token.beta.type, 1, one.beta);
  }

  // The state, faded for the first token, into the tile.
  void begin(const Segment& segment, const Acc* state) {
    std::fill_n(known, Vectors, Vec{});
    if (segment.first == 0) {
      std::fill_n(tile.data(), problem.key_dim * kWidth, Acc(0));
    } else if (is_whole()) {
      pass<false, true, false>(state, problem.value_dim, -1, nullptr, nullptr);
    } else {
      copy(state, problem.value_dim, tile.data(), kWidth);
      pass<false, true, false>(tile.data(), kWidth, -1, nullptr, nullptr);
    }
  }

  // Add token i and read what its query finds; then fade for token i + 1 and look up its key.  All
  // in one pass over the tile.
  template <bool Add, bool Fade, bool Read>
  void pass(const Acc* source, int64_t source_stride, int64_t i, Acc* out, Acc* save) {
    const Inputs &now = inputs[i & 1], &next = inputs[(i + 1) & 1];
    const int64_t num_keys = problem.key_dim, save_stride = is_whole() ? problem.value_dim : kWidth;
    Acc* target = tile.data();
    Vec update[Vectors], found[Vectors] = {}, next_known[Vectors] = {};
    if (Add)
#pragma GCC unroll 4
      for (int v = 0; v < Vectors; ++v) {
        update[v] = load(now.value + v * kL);
        if (HasBeta) update[v] = (update[v] - known[v]) * now.beta[0];
      }
    for (int64_t k = 0; k < num_keys; ++k) {
      // Held in registers: four loads for each of the factors would take longer than the products.
      const Vec key = in_register(splat(Add ? now.key.data()[k] : Acc(0)));
      const Vec query = in_register(splat(Read ? now.query.data()[k] : Acc(0)));
      const Vec kept = in_register(splat(Fade ? next.kept.data()[k] : Acc(0)));
      const Vec next_key = in_register(splat(Fade && HasBeta ? next.key.data()[k] : Acc(0)));
#pragma GCC unroll 4
      for (int v = 0; v < Vectors; ++v) {
        Vec state = load(source + k * source_stride + v * kL);
        if (Add) {
          state = fma(key, update[v], state);
          if (Read) found[v] = fma(query, state, found[v]);
          if (save) store(save + k * save_stride + v * kL, state);
        }
        if (Fade) {
          state = state * kept;
          if (HasBeta) next_known[v] = fma(next_key, state, next_known[v]);
          store(target + k * kWidth + v * kL, state);
        }
      }
    }
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) {
      known[v] = next_known[v];
      if (Read) store(out + v * kL, found[v]);
    }
  }

  void write(const Acc* found, int64_t token) const {
    const auto type = problem.value.type;
    const int64_t place = (token * problem.num_heads + head) * problem.value_dim + column;
    narrow(found, type, width, problem.out + place * int64_t(c10::elementSize(type)));
  }
};

// A single column of many heads: the lanes are keys.
template <class Acc, bool HasBeta>
struct Heads {
  using Vec = Vector<Acc>;
  static constexpr int kL = kLanes<Acc>;

  const Problem& problem;
  int64_t head = 0, num_heads = 0;  // of the unit at hand
  int64_t keys;                     // key_dim, rounded up to whole vectors
  Scratch<Acc> tile, kept;          // [kHeads, keys]
  Scratch<Acc> query, key;          // of the key heads that serve the unit
  Acc value[kHeads], beta[kHeads], out[kHeads];

  explicit Heads(const Problem& problem)
      : problem(problem), keys(rounded_up(problem.key_dim, kL)) {
    for (auto* part : {&tile, &kept, &query, &key}) part->resize(kHeads * keys);
  }

  static int64_t units_per_segment(const Problem& problem) {
    return (problem.num_heads + kHeads - 1) / kHeads;
  }

  int64_t key_head(int64_t h) const {
    return h / (problem.num_heads / problem.num_key_heads);
  }

  void run(const Segment& segment, int64_t unit) {
    head = unit * kHeads;
    num_heads = std::min<int64_t>(kHeads, problem.num_heads - head);
    const int64_t replayed = problem.num_replayed(segment);
    const int64_t commit = replayed + problem.last_commit(segment);
    const int64_t num_tokens = replayed + segment.end - segment.begin;
    Acc* state = (Acc*)problem.state + (segment.row * problem.num_heads + head) * problem.key_dim;
    for (auto* part : {&tile, &kept, &query, &key}) part->resize(kHeads * keys);
    std::fill_n(value, kHeads, Acc(0));
    std::fill_n(beta, kHeads, Acc(0));
    for (int64_t h = 0; h < num_heads && segment.first != 0; ++h)
      std::copy_n(state + h * problem.key_dim, problem.key_dim, tile.data() + h * keys);
    for (int64_t i = 0; i < num_tokens; ++i) {
      read(token_at<Acc>(problem, segment, i));
      for (int64_t group = 0; group < num_heads; group += kGroup) advance(group);
      if (i < replayed) continue;
      if (i == commit)
        for (int64_t h = 0; h < num_heads; ++h)
          std::copy_n(tile.data() + h * keys, problem.key_dim, state + h * problem.key_dim);
      const auto type = problem.value.type;
      const int64_t place = (segment.begin + i - replayed) * problem.num_heads + head;
      narrow(out, type, num_heads, problem.out + place * int64_t(c10::elementSize(type)));
    }
  }

  void read(const Token& token) {
    const int64_t first = key_head(head), num_keys = problem.key_dim;
    const int64_t num_key_heads = key_head(head + num_heads - 1) - first + 1;
    widen_heads(token.query, first, num_key_heads, num_keys, query.data(), keys);
    widen_heads(token.key, first, num_key_heads, num_keys, key.data(), keys);
    widen_heads(token.value, head, num_heads, 1, value, 1);
    if (HasBeta) widen_heads(token.beta, head, num_heads, 1, beta, 1);
    Acc* factors = kept.data();
    if (problem.decay_dim == 1) {
      Acc decay[kHeads] = {};
      widen_heads(token.decay, head, num_heads, 1, decay, 1);
      for (int64_t h = 0; h < num_heads; ++h) std::fill_n(factors + h * keys, keys, decay[h]);
    } else {
      std::fill_n(factors, kHeads * keys, Acc(0));
      widen_heads(token.decay, head, num_heads, num_keys, factors, keys);
    }
    for (int64_t n = 0; n < num_heads * keys; n += kL) store(factors + n, exp(load(factors + n)));
  }

  // One token for kGroup heads.
  void advance(int64_t group) {
    Vec part[4][4] = {};
    Acc update[4][4];
    const Acc *k[kGroup], *q[kGroup];
    for (int i = 0; i < kGroup; ++i) {
      const int64_t h = std::min(group + i, num_heads - 1);
      const int64_t offset = (key_head(head + h) - key_head(head)) * keys;
      k[i] = key.data() + offset;
      q[i] = query.data() + offset;
      Acc *state = tile.data() + (group + i) * keys, *factor = kept.data() + (group + i) * keys;
      for (int64_t n = 0; n < keys; n += kL) {
        const Vec faded = load(state + n) * load(factor + n);
        if (HasBeta) part[i / 4][i % 4] = fma(load(k[i] + n), faded, part[i / 4][i % 4]);
        store(state + n, faded);
      }
    }
    if (HasBeta) sum_lanes_16<Acc>(part, update);
    for (int i = 0; i < kGroup; ++i) {
      Acc& one = update[i / 4][i % 4];
      one = HasBeta ? (value[group + i] - one) * beta[group + i] : value[group + i];
      Acc* state = tile.data() + (group + i) * keys;
      Vec found = {};
      for (int64_t n = 0; n < keys; n += kL) {
        const Vec added = fma(load(k[i] + n), splat(one), load(state + n));
        found = fma(load(q[i] + n), added, found);
        store(state + n, added);
      }
      part[i / 4][i % 4] = found;
    }
    Acc found[4][4];
    sum_lanes_16<Acc>(part, found);
    std::copy_n(&found[0][0], kGroup, out + group);
  }
};

// The inputs of tokens that do not commit, once all have read the ring.
template <class Acc>
void write_ring(const Problem& problem) {
  struct Kept {
    int64_t token, row, position;
  };
  std::vector<Kept> all;
  for (const Segment& one : problem.segments)
    for (int64_t token = std::max(one.begin, one.end - problem.num_kept); token < one.end; ++token)
      if (!problem.commits[token]) all.push_back({token, one.row, one.first + token - one.begin});
  const int64_t bytes = problem.kept_width * int64_t(sizeof(Acc));
  const int64_t grain = (64 << 10) / std::max<int64_t>(bytes, 1) + 1;
  parallel_for(int64_t(all.size()), grain, [&](int64_t begin, int64_t end) {
    const auto copy = [](const Rows& from, const Rows& to, int64_t heads, int64_t width) {
      widen_heads(from, 0, heads, width, (Acc*)to.data, width);
    };
    for (int64_t i = begin; i < end; ++i) {
      const Token from = new_token(problem, all[i].token);
      const Token to = kept_token<Acc>(problem, all[i].row, all[i].position);
      copy(from.key, to.key, problem.num_key_heads, problem.key_dim);
      copy(from.value, to.value, problem.num_heads, problem.value_dim);
      copy(from.decay, to.decay, problem.num_heads, problem.decay_dim);
      if (problem.has_beta) copy(from.beta, to.beta, problem.num_heads, 1);
    }
  });
}

template <class Worker>
void run_units(const Problem& problem) {
  double num_tokens = 0;
  for (const Segment& segment : problem.segments)
    num_tokens += double(segment.end - segment.begin + problem.num_replayed(segment)) + 1;
  const double total_ns =
      num_tokens * double(problem.num_heads * problem.key_dim * problem.value_dim) / 10;
  const int64_t per_segment = Worker::units_per_segment(problem);
  const int64_t num_units = int64_t(problem.segments.size()) * per_segment;
  share(num_units, total_ns, [&](std::atomic<int64_t>& next) {
    Worker worker(problem);
    for (int64_t unit; (unit = next++) < num_units;)
      worker.run(problem.segments[size_t(unit / per_segment)], unit % per_segment);
  });
}

template <class Acc, bool HasBeta>
void run_wide(const Problem& problem) {
  const int64_t vectors = (problem.value_dim + kLanes<Acc> - 1) / kLanes<Acc>;
  if (problem.value_dim == 1)
    run_units<Heads<Acc, HasBeta>>(problem);
  else if (vectors == 1)
    run_units<Columns<Acc, 1, HasBeta>>(problem);
  else if (vectors == 2)
    run_units<Columns<Acc, 2, HasBeta>>(problem);
  else
    run_units<Columns<Acc, 4, HasBeta>>(problem);
  write_ring<Acc>(problem);
}

// A tensor [B, S, heads, width] as a View; a copy where its last dimension is not dense.
View view_of(const at::Tensor& tensor, at::Tensor& keep) {
  keep = tensor.stride(3) == 1 || tensor.size(3) == 1 ? tensor : tensor.contiguous();
  const int64_t bytes = int64_t(keep.element_size());
  return {(const char*)keep.const_data_ptr(), keep.scalar_type(), keep.stride(0) * bytes,
          keep.stride(1) * bytes, keep.stride(2) * bytes};
}

void check_shapes(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                  const at::Tensor& decay, const c10::optional<at::Tensor>& beta,
                  const at::Tensor& state, const at::Tensor& recent) {
  TORCH_CHECK(query.dim() == 4 && key.sizes() == query.sizes() && value.dim() == 4 &&
                  value.size(0) == key.size(0) && value.size(1) == key.size(1),
              "cached_recurrence: q ", query.sizes(), ", k ", key.sizes(), ", v ", value.sizes(),
              " do not fit");
  const int64_t heads = value.size(2), key_heads = key.size(2);
  TORCH_CHECK(key_heads > 0 && heads % key_heads == 0, "cached_recurrence: ", heads,
              " heads cannot share ", key_heads, " key heads");
  TORCH_CHECK(decay.sizes().slice(0, 3) == value.sizes().slice(0, 3) &&
                  (decay.dim() == 3 || (decay.dim() == 4 && decay.size(3) == key.size(3))),
              "cached_recurrence: decay ", decay.sizes(), " does not fit v ", value.sizes());
  TORCH_CHECK(!beta || beta->sizes() == value.sizes().slice(0, 3), "cached_recurrence: beta ",
              beta->sizes(), " does not fit v ", value.sizes());
  TORCH_CHECK(state.dim() == 4 && state.is_contiguous() && state.size(1) == heads &&
                  state.size(2) == key.size(3) && state.size(3) == value.size(3),
              "cached_recurrence: expected a contiguous state [rows, ", heads, ", ", key.size(3),
              ", ", value.size(3), "], got ", state.sizes());
  const int64_t width = key_heads * key.size(3) + value.size(2) * value.size(3) +
                        decay[0][0].numel() + (beta ? heads : 0);
  TORCH_CHECK(recent.dim() == 3 && recent.is_contiguous() && recent.size(0) == state.size(0) &&
                  recent.size(2) == width,
              "cached_recurrence: expected contiguous kept tokens [", state.size(0), ", P, ",
              width, "], got ", recent.sizes());
  const auto wide = value.scalar_type() == c10::ScalarType::Double ? c10::ScalarType::Double
                                                                   : c10::ScalarType::Float;
  TORCH_CHECK(state.scalar_type() == wide && recent.scalar_type() == wide,
              "cached_recurrence: the state and the kept tokens of ", value.scalar_type(),
              " are ", wide, ", got ", state.scalar_type(), " and ", recent.scalar_type());
}

at::Tensor cached_recurrence(const at::Tensor& query, const at::Tensor& key,
                             const at::Tensor& value, const at::Tensor& decay,
                             const c10::optional<at::Tensor>& beta, at::Tensor& state,
                             at::Tensor& recent, const at::Tensor& row,
                             const at::Tensor& position, const at::Tensor& absorbed,
                             const at::Tensor& commits, c10::string_view) {
  at::Tensor out = at::empty(value.sizes(), value.options());
  Problem p{};
  p.num_tokens = value.size(0) * value.size(1);
  if (p.num_tokens == 0) return out;
  check_shapes(query, key, value, decay, beta, state, recent);
  at::Tensor keep[9];
  p.query = view_of(query, keep[0]);
  p.key = view_of(key, keep[1]);
  p.value = view_of(value, keep[2]);
  p.decay = view_of(decay.dim() == 3 ? decay.unsqueeze(3) : decay, keep[3]);
  p.has_beta = beta && beta->defined();
  p.beta = p.has_beta ? view_of(beta->unsqueeze(3), keep[4]) : View{};
  p.row = int32_ptr(row, p.num_tokens, "cached_recurrence: row", keep[5]);
  p.position = int32_ptr(position, p.num_tokens, "cached_recurrence: position", keep[6]);
  p.absorbed = int32_ptr(absorbed, p.num_tokens, "cached_recurrence: absorbed", keep[7]);
  TORCH_CHECK(commits.scalar_type() == c10::ScalarType::Bool && commits.numel() == p.num_tokens,
              "cached_recurrence: commits must be bool [B, S], got ", commits.scalar_type(), " ",
              commits.sizes());
  keep[8] = commits.contiguous();
  p.commits = (const bool*)keep[8].const_data_ptr();
  p.state = (char*)state.mutable_data_ptr();
  p.recent = (char*)recent.mutable_data_ptr();
  p.out = (char*)out.mutable_data_ptr();
  p.tokens_per_batch = value.size(1);
  p.num_heads = value.size(2);
  p.value_dim = value.size(3);
  p.num_key_heads = key.size(2);
  p.key_dim = key.size(3);
  p.decay_dim = decay.dim() == 4 ? p.key_dim : 1;
  p.num_rows = state.size(0);
  p.num_kept = recent.size(1);
  p.kept_width = recent.size(2);
  p.segments = find_segments(p.row, p.position, p.num_tokens, p.num_rows, "cached_recurrence");
  const int64_t bytes = p.num_heads * p.value_dim * int64_t(out.element_size());
  for (int64_t token = 0; token < p.num_tokens; ++token)
    if (p.row[token] < 0) std::memset(p.out + token * bytes, 0, size_t(bytes));
  std::stable_sort(p.segments.begin(), p.segments.end(),  // the longest is taken first
                   [](const Segment& a, const Segment& b) {
                     return a.end - a.begin > b.end - b.begin;
                   });
  if (state.scalar_type() == c10::ScalarType::Double)
    p.has_beta ? run_wide<double, true>(p) : run_wide<double, false>(p);
  else
    p.has_beta ? run_wide<float, true>(p) : run_wide<float, false>(p);
  return out;
}

TORCH_LIBRARY_IMPL(compilespec, CPU, m) { m.impl("cached_recurrence", cached_recurrence); }

}  // namespace recurrence
}  // namespace compilespec
