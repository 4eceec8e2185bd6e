// sample and draw on the CPU: argmax or Gumbel-max over Philox noise, a row at a time.
//
// Noise of 64 token ids comes from 16 counters, which fill the vectors of any CPU without a lane
// crossing: id 64 a + 16 k + i is word k of counter 16 a + i.  Rows are independent of each other,
// of the batch and of the threads.
#include <ATen/Dispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <tuple>
#include <vector>

#include "_threads.h"
#include "_vector.h"

namespace compilespec {
namespace sample {

// ops/sample/layout.py
enum Real { kTemperature, kTopP, kMinP, kRepetition, kPresence, kFrequency };
enum Word {
  kSeedLow, kSeedHigh, kSample, kFlags, kTopK, kPromptLen, kMinNew, kLogprobs, kNumStops, kFirstStop
};
constexpr int32_t kPenalise = 1, kBias = 2, kGuide = 4;
constexpr float kMinTemperature = 1e-5f;
constexpr uint32_t kStreamDraw = 0;  // the other streams come in tensors

constexpr int kBlock = 64;  // ids whose noise is made together
constexpr int kGroup = 16;  // ids that share a word of neighbouring counters

// --- random words ---

using VectorI32 = Vector<int32_t>;

struct Words {
  VectorU32 word[4];
};

// High and low halves of the products of each lane with one factor.
COMPILESPEC_INLINE void multiply(VectorU32 x, uint32_t factor, VectorU32* high, VectorU32* low) {
#if defined(__AVX512F__)
  const __m512i wide = _mm512_set1_epi64(factor), even = _mm512_mul_epu32((__m512i)x, wide),
                odd = _mm512_mul_epu32(_mm512_srli_epi64((__m512i)x, 32), wide);
  *high = (VectorU32)_mm512_mask_blend_epi32(0xaaaa, _mm512_srli_epi64(even, 32), odd);
  *low = (VectorU32)_mm512_mask_blend_epi32(0xaaaa, even, _mm512_slli_epi64(odd, 32));
#elif defined(__AVX2__)
  const __m256i wide = _mm256_set1_epi64x(factor), even = _mm256_mul_epu32((__m256i)x, wide),
                odd = _mm256_mul_epu32(_mm256_srli_epi64((__m256i)x, 32), wide);
  *high = (VectorU32)_mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa);
  *low = (VectorU32)_mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa);
#else
  for (int i = 0; i < kLanes<uint32_t>; ++i) {
    const uint64_t product = uint64_t(x[i]) * factor;
    (*high)[i] = uint32_t(product >> 32);
    (*low)[i] = uint32_t(product);
  }
#endif
}

// Philox-4x32-10.
COMPILESPEC_INLINE Words philox(Words counter, uint32_t key0, uint32_t key1) {
  VectorU32 a = counter.word[0], b = counter.word[1], c = counter.word[2], d = counter.word[3];
#pragma GCC unroll 10
  for (int round = 0; round < 10; ++round) {
    VectorU32 high_a, low_a, high_c, low_c;
    multiply(a, 0xd2511f53u, &high_a, &low_a);
    multiply(c, 0xcd9e8d57u, &high_c, &low_c);
    a = high_c ^ b ^ key0;
    b = low_c;
    c = high_a ^ d ^ key1;
    d = low_a;
    key0 += 0x9e3779b9u;
    key1 += 0xbb67ae85u;
  }
  return {{a, b, c, d}};
}

// --- Gumbel noise ---

// log(x) of positive normal x, about one ulp.
COMPILESPEC_INLINE Vector<float> log(Vector<float> x) {
  const VectorI32 bits = (VectorI32)x, exponent = (bits - 0x3f3504f3) >> 23;
  const Vector<float> f = (Vector<float>)(bits - (exponent << 23)) - 1.f,
                      n = __builtin_convertvector(exponent, Vector<float>), square = f * f;
  Vector<float> p = splat(7.0376836292e-2f);
  p = fma(p, f, splat(-1.1514610310e-1f));
  p = fma(p, f, splat(1.1676998740e-1f));
  p = fma(p, f, splat(-1.2420140846e-1f));
  p = fma(p, f, splat(1.4249322787e-1f));
  p = fma(p, f, splat(-1.6668057665e-1f));
  p = fma(p, f, splat(2.0000714765e-1f));
  p = fma(p, f, splat(-2.4999993993e-1f));
  p = fma(p, f, splat(3.3333331174e-1f));
  p = fma(p * f, square, n * -2.12194440e-4f);
  p = fma(square, splat(-0.5f), p);
  return fma(n, splat(0.693359375f), f + p);
}

// -log(-log(u)), u = (bits + 1/2) / 2^32; above one half by way of 1 - u.
COMPILESPEC_INLINE Vector<float> gumbel(VectorU32 bits) {
  const VectorI32 upper = (VectorI32)bits >> 31;  // all ones where u > 1/2
  const VectorI32 word = (VectorI32)bits ^ upper;
  const Vector<float> v = (__builtin_convertvector(word, Vector<float>) + 0.5f) * 0x1p-32f;
  const Vector<float> u = upper ? 1.f - v : v, lost = 1.f - u, minus_log = -log(u);
  // log1p: the rounding of 1 - v is undone in proportion
  const Vector<float> precise = lost > 0.f ? minus_log * (v / lost) : v;
  return -log(upper ? precise : minus_log);
}

struct Key {
  uint32_t low, high, sample, position, stream;
};

Key make_key(const int32_t* words, int32_t position, uint32_t stream = kStreamDraw) {
  return {uint32_t(words[kSeedLow]), uint32_t(words[kSeedHigh]), uint32_t(words[kSample]),
          uint32_t(position), stream};
}

// Noise of the ids 64 * block ... 64 * block + 63.
void fill_noise(const Key& key, int64_t block, float* noise) {
  constexpr int kWide = std::min(kLanes<float>, kGroup);
  for (int first = 0; first < kGroup; first += kWide) {
    VectorU32 place{};
    for (int i = 0; i < kWide; ++i) place[i] = uint32_t(block * kGroup + first + i);
    const VectorU32 zero{};
    const Words words = philox({{place, zero + key.position, zero + key.sample, zero + key.stream}},
                               key.low, key.high);
    for (int k = 0; k < 4; ++k) store(noise + k * kGroup + first, gumbel(words.word[k]));
  }
}

// --- filters ---

// The k-th best of `spare`, which is reordered.
template <class Acc>
Acc kth_of(std::vector<Acc>& spare, int64_t k) {
  std::nth_element(spare.begin(), spare.begin() + (k - 1), spare.end(), std::greater<Acc>());
  return spare[size_t(k - 1)];
}

// The k-th best score; -inf where there are fewer.  The k-th best of the maxima of 4 k groups is at
// most that, so that only what reaches it has to be looked at.
template <class Acc>
Acc kth_best(const Acc* scores, int64_t count, int64_t k, std::vector<Acc>& spare) {
  constexpr Acc kNone = -std::numeric_limits<Acc>::infinity();
  const int64_t size = count / (4 * k);  // scores of a group
  Acc bound = kNone;
  spare.clear();
  if (size > 1) {
    for (int64_t base = 0; base + size <= count; base += size) {
      Acc best = kNone;
      for (int64_t i = base; i < base + size; ++i) best = scores[i] > best ? scores[i] : best;
      spare.push_back(best);
    }
    bound = kth_of(spare, k);
    spare.clear();
  }
  for (int64_t i = 0; i < count; ++i)
    if (scores[i] >= bound && scores[i] > kNone) spare.push_back(scores[i]);
  return int64_t(spare.size()) < k ? kNone : kth_of(spare, k);
}

// The lowest score of the fewest best tokens (at or above `lowest`) that reach `top_p`.  Buckets of
// 1/64 say where it lies, so that only one of them is sorted.
template <class Acc>
Acc nucleus(const Acc* scores, int64_t count, Acc best, Acc lowest, double top_p,
            std::vector<Acc>& spare) {
  constexpr int kBuckets = 2048;
  double mass[kBuckets] = {};
  auto bucket = [best](Acc score) {
    const Acc place = (best - score) * 64;
    return place < kBuckets - 1 ? int(place) : kBuckets - 1;
  };
  auto weight = [best](Acc score) { return std::exp(double(score - best)); };
  for (int64_t i = 0; i < count; ++i)
    if (scores[i] >= lowest && best - scores[i] < 60) mass[bucket(scores[i])] += weight(scores[i]);
  double total = 0, before = 0;
  for (double part : mass) total += part;
  const double wanted = top_p * total;
  int found = 0;
  while (found < kBuckets - 1 && before + mass[found] < wanted) before += mass[found++];
  spare.clear();
  for (int64_t i = 0; i < count; ++i)
    if (scores[i] >= lowest && bucket(scores[i]) == found) spare.push_back(scores[i]);
  std::sort(spare.begin(), spare.end(), std::greater<Acc>());
  for (Acc score : spare) {
    if (!(before < wanted)) break;
    lowest = score;
    before += weight(score);
  }
  return lowest;
}

// The score below which top_k, then top_p, then min_p drop a token.
template <class Acc>
Acc lowest_kept(const Acc* scores, int64_t count, const float* reals, const int32_t* words) {
  static thread_local std::vector<Acc> spare;
  constexpr Acc kNone = -std::numeric_limits<Acc>::infinity();
  const bool cuts = words[kTopK] > 0 && words[kTopK] < count;
  if (!cuts && !(reals[kTopP] < 1) && !(reals[kMinP] > 0)) return kNone;
  Acc best = kNone, lowest = kNone;
  for (int64_t i = 0; i < count; ++i) best = scores[i] > best ? scores[i] : best;
  if (!std::isfinite(best)) return kNone;
  if (cuts) lowest = kth_best(scores, count, int64_t(words[kTopK]), spare);
  if (reals[kTopP] < 1) lowest = nucleus(scores, count, best, lowest, double(reals[kTopP]), spare);
  if (reals[kMinP] > 0) lowest = std::max(lowest, best + Acc(std::log(double(reals[kMinP]))));
  return lowest;
}

// --- one row ---

template <class Acc>
int32_t first_best(const Acc* scores, int64_t count) {
  int64_t found = 0;
  for (int64_t i = 1; i < count; ++i)
    if (scores[i] > scores[found]) found = i;
  return int32_t(found);
}

// argmax(score + noise) over the ids first ... first + count - 1 whose score is at least `lowest`,
// and that sum in `best_score`.
template <class Acc>
int32_t draw_part(const Acc* scores, int64_t first, int64_t count, Acc lowest, const Key& key,
                  Acc* best_score) {
  constexpr Acc kNone = -std::numeric_limits<Acc>::infinity();
  Acc best[kGroup], padded[kBlock];
  int32_t place[kGroup];
  float noise[kBlock];
  std::fill_n(best, kGroup, kNone);
  std::fill_n(place, kGroup, int32_t(first));
  for (int64_t base = first - first % kBlock; base < first + count; base += kBlock) {
    const int64_t begin = std::max(base, first), end = std::min(base + kBlock, first + count);
    const Acc* block = scores + (begin - first);
    if (end - begin < kBlock) {
      std::fill_n(padded, kBlock, kNone);
      std::copy(block, block + (end - begin), padded + (begin - base));
      block = padded;
    }
    bool some = false;
    for (int i = 0; i < kBlock; ++i) some |= block[i] >= lowest;
    if (!some) continue;
    fill_noise(key, base / kBlock, noise);
    for (int k = 0; k < kBlock; k += kGroup)
      for (int i = 0; i < kGroup; ++i) {
        const Acc score = block[k + i] >= lowest ? block[k + i] + Acc(noise[k + i]) : kNone;
        const bool better = score > best[i];
        best[i] = better ? score : best[i];
        place[i] = better ? int32_t(base + k + i) : place[i];
      }
  }
  int found = 0;
  for (int i = 1; i < kGroup; ++i)
    if (best[i] > best[found] || (best[i] == best[found] && place[i] < place[found])) found = i;
  *best_score = best[found];
  return place[found];
}

template <class Acc>
int32_t draw_whole(const Acc* scores, int64_t count, Acc lowest, const Key& key) {
  Acc best;
  return draw_part(scores, 0, count, lowest, key, &best);
}

// The same over entries that stand for other ids; neighbours in one block of ids share its noise.
template <class Acc, class T>
int32_t draw_mapped(const T* logits, const int64_t* ids, int64_t count, Acc temperature,
                    const Key& key, int32_t greedy) {
  float noise[kBlock];
  int64_t made = -1;
  Acc best = -std::numeric_limits<Acc>::infinity();
  int64_t found = greedy;
  for (int64_t i = 0; i < count; ++i) {
    if (ids[i] < 0) continue;
    if (ids[i] / kBlock != made) {
      made = ids[i] / kBlock;
      fill_noise(key, made, noise);
    }
    const Acc score = Acc(logits[i]) / temperature + Acc(noise[ids[i] % kBlock]);
    if (score > best) {
      best = score;
      found = ids[i];
    }
  }
  return int32_t(found);
}

// Penalties on the tokens of the context, each once.
template <class Acc>
void penalise(Acc* scores, int64_t vocab, const float* reals, const int32_t* context,
              int64_t length, int64_t prompt_len) {
  static thread_local std::vector<int32_t> counts;  // all zero between calls
  if (int64_t(counts.size()) < vocab) counts.resize(size_t(vocab), 0);
  const Acc repetition = Acc(reals[kRepetition]), presence = Acc(reals[kPresence]),
            frequency = Acc(reals[kFrequency]);
  auto inside = [vocab](int32_t id) { return id >= 0 && id < vocab; };
  for (int64_t i = 0; i < length; ++i)
    if (inside(context[i])) counts[size_t(context[i])] += i >= prompt_len ? 2 : 0;
  for (int64_t i = 0; i < length; ++i) {
    if (!inside(context[i])) continue;
    int32_t& count = counts[size_t(context[i])];
    if (count & 1) continue;
    Acc& score = scores[context[i]];
    score = score < 0 ? score * repetition : score / repetition;
    score = score - frequency * Acc(count / 2);
    if (count) score = score - presence;
    count |= 1;
  }
  for (int64_t i = 0; i < length; ++i)
    if (inside(context[i])) counts[size_t(context[i])] = 0;
}

// -inf where the mask's bit is 0.
template <class Acc>
void guide(Acc* scores, int64_t vocab, const int32_t* mask) {
  for (int64_t base = 0; base < vocab; base += 32) {
    const uint32_t word = uint32_t(mask[base / 32]);
    if (word == ~0u) continue;
    const int64_t end = std::min<int64_t>(32, vocab - base);
    for (int64_t i = 0; i < end; ++i)
      if (!(word >> i & 1)) scores[base + i] = -std::numeric_limits<Acc>::infinity();
  }
}

// What the row's request makes of its logits: before the temperature where it takes the best of
// them, else divided by it, with the score below which the filters drop a token in `lowest`.
template <class Acc, class T>
void process(std::vector<Acc>& scores, const T* logits, int64_t vocab, const float* reals,
             const int32_t* words, const float* bias, const int32_t* context, int64_t max_seq_len,
             int32_t drawn, const int32_t* mask, Acc* lowest) {
  scores.resize(size_t(vocab));
  for (int64_t i = 0; i < vocab; ++i) scores[size_t(i)] = Acc(logits[i]);
  if (words[kFlags] & kPenalise)
    penalise(scores.data(), vocab, reals, context, std::clamp<int64_t>(drawn, 0, max_seq_len),
             int64_t(words[kPromptLen]));
  if (words[kFlags] & kBias)
    for (int64_t i = 0; i < vocab; ++i) scores[size_t(i)] += Acc(bias[i]);
  if (int64_t(drawn) - words[kPromptLen] < words[kMinNew])
    for (int i = 0; i < words[kNumStops]; ++i)
      scores[size_t(words[kFirstStop + i])] = -std::numeric_limits<Acc>::infinity();
  if (words[kFlags] & kGuide) guide(scores.data(), vocab, mask);
  if (reals[kTemperature] < kMinTemperature) return;
  const Acc temperature = Acc(reals[kTemperature]);
  for (int64_t i = 0; i < vocab; ++i) scores[size_t(i)] /= temperature;
  *lowest = lowest_kept(scores.data(), vocab, reals, words);
}

// Of the scores that are at least `lowest`; 0 elsewhere.
template <class Acc>
void softmax(const Acc* scores, int64_t vocab, Acc lowest, Acc* probs) {
  constexpr int kWide = kLanes<Acc>;
  constexpr Acc kNone = -std::numeric_limits<Acc>::infinity();
  Acc best = kNone, part[kWide];
  for (int64_t i = 0; i < vocab; ++i) best = scores[i] > best ? scores[i] : best;
  Vector<Acc> total{};
  for (int64_t base = 0; base < vocab; base += kWide) {
    const int count = int(std::min<int64_t>(kWide, vocab - base));
    for (int i = 0; i < kWide; ++i)
      part[i] = i < count && scores[base + i] >= lowest ? scores[base + i] - best : kNone;
    const Vector<Acc> mass = exp(load(part));
    total += mass;
    for (int i = 0; i < count; ++i) probs[base + i] = mass[i];
  }
  Acc sum = 0;
  for (int i = 0; i < kWide; ++i) sum += total[i];
  for (int64_t i = 0; i < vocab; ++i) probs[i] /= sum;
}

bool is_plain(const float* reals, const int32_t* words) {
  return reals[kTemperature] < kMinTemperature && !words[kFlags] && !words[kMinNew];
}

template <class T>
using AccOf = std::conditional_t<std::is_same_v<T, double>, double, float>;

// --- operators ---

// Rows of work that are worth a thread.
int64_t grain(int64_t vocab) { return 4096 / std::max<int64_t>(vocab, 1) + 1; }

void check_state(const at::Tensor& row, const at::Tensor& reals, const at::Tensor& words) {
  using c10::ScalarType;
  TORCH_CHECK(row.scalar_type() == ScalarType::Long && row.is_contiguous(),
              "sample: expected row int64, contiguous");
  TORCH_CHECK(reals.scalar_type() == ScalarType::Float && reals.is_contiguous() &&
                  words.scalar_type() == ScalarType::Int && words.is_contiguous(),
              "sample: expected contiguous state, float32 and int32");
}

// Calls `use(row, scores, lowest, reals, words, drawn)` for every row that asks for something.
template <class Use>
void for_rows(const at::Tensor& logits, const c10::optional<at::Tensor>& ids, const at::Tensor& row,
              const at::Tensor& drawn, const at::Tensor& reals, const at::Tensor& words,
              const at::Tensor& bias, at::Tensor& context, const at::Tensor& mask, const Use& use) {
  check_state(row, reals, words);
  TORCH_CHECK(logits.dim() == 3 && logits.size(2) > 0 && bias.size(1) == logits.size(2),
              "sample: expected logits [B, S, ", bias.size(1), "], got ", logits.sizes());
  TORCH_CHECK(mask.scalar_type() == c10::ScalarType::Int && mask.is_contiguous() &&
                  mask.dim() == 3 && mask.size(1) >= logits.size(1) &&
                  mask.size(2) * 32 >= logits.size(2),
              "sample: expected a mask of int32 [rows, ", logits.size(1), ", ceil(",
              logits.size(2), " / 32)], contiguous, got ", mask.sizes());
  const int64_t batch = logits.size(0), steps = logits.size(1), vocab = logits.size(2);
  const int64_t* rows = row.const_data_ptr<int64_t>();
  const int64_t num_reals = reals.size(1), num_words = words.size(1), length = context.size(1);
  auto reals_of = [&](int64_t b) { return reals.const_data_ptr<float>() + rows[b] * num_reals; };
  auto words_of = [&](int64_t b) { return words.const_data_ptr<int32_t>() + rows[b] * num_words; };
  auto context_of = [&](int64_t b) { return context.mutable_data_ptr<int32_t>() + rows[b] * length; };
  bool is_asked = false;
  for (int64_t b = 0; b < batch; ++b) is_asked |= !is_plain(reals_of(b), words_of(b));
  if (!is_asked) return;
  const at::Tensor positions = drawn.contiguous(), scores = logits.contiguous();
  const int32_t* position = positions.const_data_ptr<int32_t>();
  if (ids && ids->defined()) {
    const at::Tensor fed = ids->contiguous();
    const int32_t* token = fed.const_data_ptr<int32_t>();
    for (int64_t b = 0; b < batch; ++b) {
      if (!(words_of(b)[kFlags] & kPenalise)) continue;
      for (int64_t i = b * steps; i < (b + 1) * steps; ++i)
        if (position[i] > 0 && position[i] <= length) context_of(b)[position[i] - 1] = token[i];
    }
  }
  AT_DISPATCH_FLOATING_TYPES_AND2(
      c10::ScalarType::Half, c10::ScalarType::BFloat16, scores.scalar_type(), "sample", [&] {
        using Acc = AccOf<scalar_t>;
        const scalar_t* data = scores.const_data_ptr<scalar_t>();
        parallel_for(batch * steps, grain(vocab), [&](int64_t begin, int64_t end) {
          static thread_local std::vector<Acc> processed;
          for (int64_t i = begin; i < end; ++i) {
            const int64_t b = i / steps, place = rows[b] * mask.size(1) + i % steps;
            if (is_plain(reals_of(b), words_of(b))) continue;
            Acc lowest = -std::numeric_limits<Acc>::infinity();
            process(processed, data + i * vocab, vocab, reals_of(b), words_of(b),
                    bias.const_data_ptr<float>() + rows[b] * vocab, context_of(b), length,
                    position[i], mask.const_data_ptr<int32_t>() + place * mask.size(2), &lowest);
            use(i, processed, lowest, reals_of(b), words_of(b), position[i]);
          }
        });
      });
}

at::Tensor sample(const at::Tensor& logits, const at::Tensor& greedy,
                  const c10::optional<at::Tensor>& ids, const at::Tensor& row,
                  const at::Tensor& drawn, const at::Tensor& reals, const at::Tensor& words,
                  const at::Tensor& bias, at::Tensor& context, const at::Tensor& mask) {
  const at::Tensor chosen = greedy.contiguous().clone();
  int32_t* tokens = chosen.mutable_data_ptr<int32_t>();
  for_rows(logits, ids, row, drawn, reals, words, bias, context, mask,
           [tokens](int64_t i, const auto& scores, auto lowest, const float* real,
                    const int32_t* word, int32_t position) {
             const int64_t vocab = int64_t(scores.size());
             tokens[i] = real[kTemperature] < kMinTemperature
                             ? first_best(scores.data(), vocab)
                             : draw_whole(scores.data(), vocab, lowest, make_key(word, position));
           });
  return chosen;
}

at::Tensor filtered_probs(const at::Tensor& logits, const at::Tensor& greedy,
                          const c10::optional<at::Tensor>& ids, const at::Tensor& row,
                          const at::Tensor& drawn, const at::Tensor& reals,
                          const at::Tensor& words, const at::Tensor& bias, at::Tensor& context,
                          const at::Tensor& mask) {
  using c10::ScalarType;
  const bool is_wide = logits.scalar_type() == ScalarType::Double;
  const at::Tensor probs = at::zeros(
      logits.sizes(), logits.options().dtype(is_wide ? ScalarType::Double : ScalarType::Float));
  probs.scatter_(2, greedy.to(ScalarType::Long).unsqueeze(2), 1);
  void* data = probs.mutable_data_ptr();
  for_rows(logits, ids, row, drawn, reals, words, bias, context, mask,
           [data](int64_t i, const auto& scores, auto lowest, const float* real, const int32_t*,
                  int32_t) {
             using Acc = decltype(lowest);
             const int64_t vocab = int64_t(scores.size());
             Acc* out = static_cast<Acc*>(data) + i * vocab;
             constexpr Acc kNone = -std::numeric_limits<Acc>::infinity();
             const bool is_empty = std::all_of(scores.begin(), scores.end(),
                                               [](Acc score) { return score == kNone; });
             if (is_empty || real[kTemperature] < kMinTemperature) std::fill_n(out, vocab, Acc(0));
             if (is_empty) return;
             if (real[kTemperature] < kMinTemperature) {
               out[first_best(scores.data(), vocab)] = 1;
             } else {
               softmax(scores.data(), vocab, lowest, out);
             }
           });
  return probs;
}

// An id drawn by its weight, a row at a time; 0 where no weight is above 0.
template <class Acc>
int32_t draw_by_weight(const Acc* weights, int64_t vocab, const Key& key) {
  constexpr int kWide = kLanes<float>;
  static thread_local std::vector<float> scores;
  const int64_t padded = (vocab + kBlock - 1) / kBlock * kBlock;
  scores.assign(size_t(padded), -std::numeric_limits<float>::infinity());
  for (int64_t base = 0; base < padded; base += kWide) {
    float part[kWide];
    bool some = false;
    for (int i = 0; i < kWide; ++i) {
      const float weight = base + i < vocab ? float(weights[base + i]) : 0.f;
      part[i] = weight >= std::numeric_limits<float>::min() ? weight : 0.f;
      some |= part[i] > 0;
    }
    if (!some) continue;
    const Vector<float> logs = log(load(part));
    for (int i = 0; i < kWide; ++i)
      if (part[i] > 0) scores[size_t(base + i)] = logs[i];
  }
  return draw_whole(scores.data(), padded, std::numeric_limits<float>::lowest(), key);
}

at::Tensor draw_weighted(const at::Tensor& weights, const at::Tensor& row, const at::Tensor& drawn,
                         const at::Tensor& stream, const at::Tensor& words) {
  TORCH_CHECK(weights.dim() == 2 && weights.size(1) > 0,
              "draw_weighted: expected weights [B, V], got ", weights.sizes());
  const int64_t batch = weights.size(0), vocab = weights.size(1);
  const at::Tensor positions = drawn.contiguous(), streams = stream.contiguous(),
                   source = weights.contiguous(), rows = row.contiguous();
  const at::Tensor chosen = at::empty_like(positions);
  int32_t* result = chosen.mutable_data_ptr<int32_t>();
  const int64_t* at_row = rows.const_data_ptr<int64_t>();
  AT_DISPATCH_FLOATING_TYPES(source.scalar_type(), "draw_weighted", [&] {
    const scalar_t* data = source.const_data_ptr<scalar_t>();
    parallel_for(batch, grain(vocab), [&](int64_t begin, int64_t end) {
      for (int64_t b = begin; b < end; ++b)
        result[b] = draw_by_weight(
            data + b * vocab, vocab,
            make_key(words.const_data_ptr<int32_t>() + at_row[b] * words.size(1),
                     positions.const_data_ptr<int32_t>()[b],
                     uint32_t(streams.const_data_ptr<int32_t>()[b])));
    });
  });
  return chosen;
}

// The word of id 0, cut to 24 bits: odd multiples of 2^-25.
at::Tensor uniform_noise(const at::Tensor& row, const at::Tensor& drawn, const at::Tensor& stream,
                         const at::Tensor& words) {
  const at::Tensor positions = drawn.contiguous(), streams = stream.contiguous(),
                   rows = row.contiguous();
  const at::Tensor numbers = at::empty(drawn.sizes(), words.options().dtype(at::kFloat));
  const int64_t count = drawn.dim() == 2 ? drawn.size(1) : 1;
  float* result = numbers.mutable_data_ptr<float>();
  for (int64_t i = 0; i < positions.numel(); ++i) {
    const int64_t at = rows.const_data_ptr<int64_t>()[i / count];
    const Key key = make_key(words.const_data_ptr<int32_t>() + at * words.size(1),
                             positions.const_data_ptr<int32_t>()[i],
                             uint32_t(streams.const_data_ptr<int32_t>()[i]));
    const VectorU32 zero{};
    const Words noise = philox({{zero, zero + key.position, zero + key.sample, zero + key.stream}},
                               key.low, key.high);
    result[i] = (float(noise.word[0][0] >> 8) + 0.5f) * 0x1p-24f;
  }
  return numbers;
}

at::Tensor draw(const at::Tensor& logits, const at::Tensor& greedy,
                const c10::optional<at::Tensor>& ids, const at::Tensor& row,
                const at::Tensor& drawn, const at::Tensor& reals, const at::Tensor& words) {
  check_state(row, reals, words);
  TORCH_CHECK(logits.dim() == 2, "draw: expected logits [B, V], got ", logits.sizes());
  const at::Tensor chosen = greedy.contiguous().clone();
  const int64_t batch = logits.size(0), vocab = logits.size(1);
  const int64_t* rows = row.const_data_ptr<int64_t>();
  auto reals_of = [&](int64_t b) { return reals.const_data_ptr<float>() + rows[b] * reals.size(1); };
  auto words_of = [&](int64_t b) { return words.const_data_ptr<int32_t>() + rows[b] * words.size(1); };
  bool is_asked = false;
  for (int64_t b = 0; b < batch; ++b) is_asked |= !(reals_of(b)[kTemperature] < kMinTemperature);
  if (!is_asked) return chosen;
  const at::Tensor positions = drawn.contiguous(), scores = logits.contiguous();
  const int32_t* position = positions.const_data_ptr<int32_t>();
  const at::Tensor mapped = ids && ids->defined() ? ids->contiguous() : at::Tensor();
  int32_t* result = chosen.mutable_data_ptr<int32_t>();
  AT_DISPATCH_FLOATING_TYPES_AND2(
      c10::ScalarType::Half, c10::ScalarType::BFloat16, scores.scalar_type(), "draw", [&] {
        using Acc = AccOf<scalar_t>;
        const scalar_t* data = scores.const_data_ptr<scalar_t>();
        parallel_for(batch, grain(vocab), [&](int64_t begin, int64_t end) {
          static thread_local std::vector<Acc> warm;
          for (int64_t b = begin; b < end; ++b) {
            const float temperature = reals_of(b)[kTemperature];
            if (temperature < kMinTemperature) continue;
            const Key key = make_key(words_of(b), position[b]);
            if (mapped.defined()) {
              result[b] = draw_mapped<Acc>(data + b * vocab, mapped.const_data_ptr<int64_t>(),
                                           vocab, Acc(temperature), key, result[b]);
              continue;
            }
            warm.resize(size_t(vocab));
            for (int64_t i = 0; i < vocab; ++i)
              warm[size_t(i)] = Acc(data[b * vocab + i]) / Acc(temperature);
            result[b] = draw_whole<Acc>(warm.data(), vocab,
                                        -std::numeric_limits<Acc>::infinity(), key);
          }
        });
      });
  return chosen;
}

std::tuple<at::Tensor, at::Tensor> draw_parts(const at::Tensor& scores, const at::Tensor& lowest,
                                              const at::Tensor& row, const at::Tensor& drawn,
                                              const at::Tensor& words, int64_t first) {
  TORCH_CHECK(scores.dim() == 2 && lowest.scalar_type() == scores.scalar_type(),
              "draw_part: expected scores [N, V] and lowest [N], got ", scores.sizes());
  const at::Tensor from = scores.contiguous(), bounds = lowest.contiguous(),
                   rows = row.contiguous(), positions = drawn.contiguous(),
                   best = at::empty_like(bounds), id = at::empty_like(positions);
  const int64_t count = from.size(0), width = from.size(1);
  const int64_t* at_row = rows.const_data_ptr<int64_t>();
  AT_DISPATCH_FLOATING_TYPES(from.scalar_type(), "draw_part", [&] {
    parallel_for(count, grain(width), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const Key key = make_key(words.const_data_ptr<int32_t>() + at_row[i] * words.size(1),
                                 positions.const_data_ptr<int32_t>()[i]);
        id.mutable_data_ptr<int32_t>()[i] =
            draw_part(from.const_data_ptr<scalar_t>() + i * width, first, width,
                      bounds.const_data_ptr<scalar_t>()[i], key,
                      best.mutable_data_ptr<scalar_t>() + i);
      }
    });
  });
  return {best, id};
}

// Log-softmax of one row: the chosen token's value, then the best ones with their ids.
template <class T>
void note_row(const T* logits, int64_t vocab, int32_t token, int64_t num_best, float* values,
              int32_t* best_ids) {
  static thread_local std::vector<int32_t> order;
  double best = -std::numeric_limits<double>::infinity(), total = 0;
  for (int64_t i = 0; i < vocab; ++i) best = std::max(best, double(logits[i]));
  for (int64_t i = 0; i < vocab; ++i) total += std::exp(double(logits[i]) - best);
  const double shift = best + std::log(total);
  values[0] = token >= 0 && token < vocab ? float(double(logits[token]) - shift) : 0.f;
  num_best = std::min(num_best, vocab);
  if (num_best == 0) return;
  order.clear();
  for (int64_t i = 0; i < vocab; ++i)
    if (logits[i] == logits[i]) order.push_back(int32_t(i));
  num_best = std::min(num_best, int64_t(order.size()));
  std::partial_sort(order.begin(), order.begin() + num_best, order.end(),
                    [logits](int32_t a, int32_t b) {
                      return logits[a] > logits[b] || (logits[a] == logits[b] && a < b);
                    });
  for (int64_t i = 0; i < num_best; ++i) {
    best_ids[i] = order[size_t(i)];
    values[i + 1] = float(double(logits[order[size_t(i)]]) - shift);
  }
}

at::Tensor note_logprobs(const at::Tensor& logits, const at::Tensor& chosen, const at::Tensor& row,
                   const at::Tensor& words, at::Tensor& values, at::Tensor& best_ids) {
  TORCH_CHECK(logits.dim() == 3 && values.dim() == 3 && best_ids.dim() == 3 &&
                  logits.size(1) <= values.size(1) && values.size(2) == best_ids.size(2) + 1,
              "note_logprobs: expected logits [B, S, V] and rows of S x N");
  const int64_t batch = logits.size(0), steps = logits.size(1), vocab = logits.size(2);
  const int64_t* rows = row.const_data_ptr<int64_t>();
  auto asked = [&](int64_t b) {
    return words.const_data_ptr<int32_t>()[rows[b] * words.size(1) + kLogprobs];
  };
  bool is_asked = false;
  for (int64_t b = 0; b < batch; ++b) is_asked |= asked(b) > 0;
  const at::Tensor own = at::zeros(chosen.sizes(), values.options());
  if (!is_asked) return own;
  const at::Tensor scores = logits.contiguous(), tokens = chosen.contiguous();
  const int64_t width = best_ids.size(2), length = values.size(1);
  AT_DISPATCH_FLOATING_TYPES_AND2(
      c10::ScalarType::Half, c10::ScalarType::BFloat16, scores.scalar_type(), "note_logprobs", [&] {
        const scalar_t* data = scores.const_data_ptr<scalar_t>();
        parallel_for(batch * steps, grain(vocab), [&](int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; ++i) {
            const int64_t b = i / steps, place = rows[b] * length + i % steps;
            if (asked(b) <= 0) continue;
            note_row(data + i * vocab, vocab, tokens.const_data_ptr<int32_t>()[i],
                     std::min<int64_t>(asked(b) - 1, width),
                     values.mutable_data_ptr<float>() + place * (width + 1),
                     best_ids.mutable_data_ptr<int32_t>() + place * width);
            own.mutable_data_ptr<float>()[i] =
                values.const_data_ptr<float>()[place * (width + 1)];
          }
        });
      });
  return own;
}

at::Tensor philox_op(const at::Tensor& counter, const at::Tensor& key) {
  TORCH_CHECK(counter.dim() == 2 && counter.size(1) == 4 && key.numel() == 2,
              "philox: expected counter [N, 4] and key [2]");
  const at::Tensor from = counter.contiguous(), words = at::empty_like(from);
  const int64_t *source = from.const_data_ptr<int64_t>(), *pair = key.const_data_ptr<int64_t>();
  int64_t* target = words.mutable_data_ptr<int64_t>();
  constexpr int kWide = kLanes<uint32_t>;
  for (int64_t first = 0; first < from.size(0); first += kWide) {
    const int count = int(std::min<int64_t>(kWide, from.size(0) - first));
    Words lanes{};
    for (int i = 0; i < count; ++i)
      for (int k = 0; k < 4; ++k) lanes.word[k][i] = uint32_t(source[(first + i) * 4 + k]);
    lanes = philox(lanes, uint32_t(pair[0]), uint32_t(pair[1]));
    for (int i = 0; i < count; ++i)
      for (int k = 0; k < 4; ++k) target[(first + i) * 4 + k] = int64_t(lanes.word[k][i]);
  }
  return words;
}

TORCH_LIBRARY_IMPL(compilespec, CPU, m) {
  m.impl("sample", sample);
  m.impl("draw", draw);
  m.impl("draw_part", draw_parts);
  m.impl("note_logprobs", note_logprobs);
  m.impl("filtered_probs", filtered_probs);
  m.impl("draw_weighted", draw_weighted);
  m.impl("uniform_noise", uniform_noise);
  m.impl("philox", philox_op);
}

}  // namespace sample
}  // namespace compilespec
