// pack_gguf_blocks on the CPU: a part of the blocks of a GGUF file in the layout of grouped_linear.
//
// Source of the blocks: ggml's layouts (ggml-common.h), as in reference.py.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/util/Half.h>
#include <torch/library.h>

#include <cstring>
#include <string>

namespace compilespec {
namespace gguf_blocks {

constexpr int kPanel = 16;    // rows of a panel
constexpr int kQuad = 4;      // neighbours of a row that lie side by side
constexpr int kRun = 32;      // weights whose halves share bytes, where there are 4 bits
constexpr int kMost = 256;    // weights of a block
constexpr int kMostGroups = 16;

using Bytes = const uint8_t*;

inline float half_at(Bytes b) {
  uint16_t bits;
  std::memcpy(&bits, b, sizeof bits);
  return float(c10::Half(bits, c10::Half::from_bits()));
}

// Integers of a block as we hold them, and the step and the least value of each of its groups.
struct Q4_0 {
  static void ints(Bytes b, int8_t* q) {
    for (int j = 0; j < 16; ++j) q[j] = (b[2 + j] & 15) - 8, q[j + 16] = (b[2 + j] >> 4) - 8;
  }
  static void steps(Bytes b, float* step, float*) { step[0] = half_at(b); }
};
struct Q4_1 {
  static void ints(Bytes b, int8_t* q) { Q4_0::ints(b + 2, q); }
  static void steps(Bytes b, float* step, float* least) {
    step[0] = half_at(b), least[0] = half_at(b + 2);
  }
};
inline void five_bits(Bytes fifth, Bytes four, int offset, int8_t* q) {
  uint32_t bits;
  std::memcpy(&bits, fifth, sizeof bits);
  for (int j = 0; j < 16; ++j) {
    q[j] = int8_t(((four[j] & 15) | (bits >> j & 1) << 4) - offset);
    q[j + 16] = int8_t(((four[j] >> 4) | (bits >> (j + 16) & 1) << 4) - offset);
  }
}
struct Q5_0 {
  static void ints(Bytes b, int8_t* q) { five_bits(b + 2, b + 6, 16, q); }
  static void steps(Bytes b, float* step, float*) { step[0] = half_at(b); }
};
struct Q5_1 {
  static void ints(Bytes b, int8_t* q) { five_bits(b + 4, b + 8, 0, q); }
  static void steps(Bytes b, float* step, float* least) { Q4_1::steps(b, step, least); }
};
struct Q8_0 {
  static void ints(Bytes b, int8_t* q) { std::memcpy(q, b + 2, 32); }
  static void steps(Bytes b, float* step, float*) { step[0] = half_at(b); }
};
struct Q4_K {
  static void ints(Bytes b, int8_t* q) {
    for (int c = 0; c < 4; ++c)
      for (int j = 0; j < 32; ++j) {
        const int both = b[16 + 32 * c + j];
        q[64 * c + j] = (both & 15) - 8, q[64 * c + 32 + j] = (both >> 4) - 8;
      }
  }
  static void steps(Bytes b, float* step, float* least) {
    const float d = half_at(b), down = -half_at(b + 2);
    const Bytes s = b + 4;
    for (int g = 0; g < 8; ++g) {
      const int up = g < 4 ? s[g] & 63 : (s[g + 4] & 15) | s[g - 4] >> 6 << 4;
      const int low = g < 4 ? s[g + 4] & 63 : s[g + 4] >> 4 | s[g] >> 6 << 4;
      step[g] = d * float(up), least[g] = down * float(low);
    }
  }
};
struct Q5_K {
  static void ints(Bytes b, int8_t* q) {
    for (int c = 0; c < 4; ++c)
      for (int j = 0; j < 32; ++j) {
        const int both = b[48 + 32 * c + j], fifth = b[16 + j] >> (2 * c);
        q[64 * c + j] = int8_t((both & 15) | (fifth & 1) << 4);
        q[64 * c + 32 + j] = int8_t(both >> 4 | (fifth >> 1 & 1) << 4);
      }
  }
  static void steps(Bytes b, float* step, float* least) { Q4_K::steps(b, step, least); }
};
struct Q6_K {
  static void ints(Bytes b, int8_t* q) {
    for (int h = 0; h < 2; ++h)
      for (int t = 0; t < 4; ++t)
        for (int j = 0; j < 32; ++j) {
          const int both = b[64 * h + 32 * (t & 1) + j];
          const int four = t < 2 ? both & 15 : both >> 4, two = b[128 + 32 * h + j] >> (2 * t) & 3;
          q[128 * h + 32 * t + j] = int8_t((four | two << 4) - 32);
        }
  }
  static void steps(Bytes b, float* step, float*) {
    const float d = half_at(b + 208);
    for (int g = 0; g < 16; ++g) step[g] = d * float(int8_t(b[192 + g]));
  }
};

struct Form {  // as `BlockType`; what is added to a value before it is stored
  int64_t num_bytes, num_weights, group;
  int bits;
  bool is_symmetric;
};

// Four neighbours of a row at once.
inline uint32_t quad_at(const int8_t* q) {
  uint32_t quad;
  std::memcpy(&quad, q, sizeof quad);
  return quad;
}
// Plus 8: of -8..7, the low four bits with the highest of them turned.
inline uint32_t halves_at(const int8_t* q) { return (quad_at(q) ^ 0x08080808u) & 0x0f0f0f0fu; }
inline void put(uint8_t*& to, uint32_t quad) {
  std::memcpy(to, &quad, sizeof quad);
  to += sizeof quad;
}

template <class Type>
void pack_values(const Form& form, const at::Tensor& blocks, uint8_t* out) {
  const int64_t rows = blocks.size(0), row_bytes = blocks.size(1);
  const int64_t per_row = row_bytes / form.num_bytes, group = form.group;
  const int64_t out_bytes = form.num_weights * form.bits / 8 * kPanel;  // of a block of each row
  const Bytes data = blocks.const_data_ptr<uint8_t>();
  at::parallel_for(0, (rows + kPanel - 1) / kPanel, 1, [&](int64_t panel, int64_t end) {
    int8_t q[kPanel][kMost];
    float step[kMostGroups], least[kMostGroups];
    for (; panel < end; ++panel)
      for (int64_t b = 0; b < per_row; ++b) {
        for (int c = 0; c < kPanel; ++c) {
          const int64_t row = panel * kPanel + c;
          if (row >= rows) {
            std::memset(q[c], 0, form.num_weights);
            continue;
          }
          const Bytes block = data + row * row_bytes + b * form.num_bytes;
          Type::ints(block, q[c]);
          if (form.is_symmetric) continue;
          Type::steps(block, step, least);
          for (int64_t g = 0; g < form.num_weights / group; ++g)
            if (step[g] == 0.f) std::memset(q[c] + g * group, 0, group);
        }
        uint8_t* to = out + (panel * per_row + b) * out_bytes;
        if (form.bits == 8) {
          for (int64_t k = 0; k < form.num_weights; k += kQuad)
            for (int c = 0; c < kPanel; ++c)
              put(to, quad_at(q[c] + k) ^ 0x80808080u);
        } else {
          for (int64_t k = 0; k < form.num_weights; k += kRun)
            for (int i = 0; i < kRun / 2; i += kQuad)
              for (int c = 0; c < kPanel; ++c)
                put(to, halves_at(q[c] + k + i) | halves_at(q[c] + k + kRun / 2 + i) << 4);
        }
      }
  });
}

template <class Type>
void pack_groups(const Form& form, const at::Tensor& blocks, bool is_zero, float* out) {
  const int64_t rows = blocks.size(0), row_bytes = blocks.size(1);
  const int64_t per_row = row_bytes / form.num_bytes, groups = form.num_weights / form.group;
  const float offset = form.bits == 4 ? 8.f : 0.f;
  const Bytes data = blocks.const_data_ptr<uint8_t>();
  at::parallel_for(0, (rows + kPanel - 1) / kPanel, 1, [&](int64_t panel, int64_t end) {
    float step[kMostGroups], least[kMostGroups];
    for (; panel < end; ++panel)
      for (int64_t b = 0; b < per_row; ++b)
        for (int c = 0; c < kPanel; ++c) {
          const int64_t row = panel * kPanel + c;
          float* to = out + (panel * per_row + b) * groups * kPanel + c;
          if (row < rows) Type::steps(data + row * row_bytes + b * form.num_bytes, step, least);
          for (int64_t g = 0; g < groups; ++g) {
            float value = 0.f;
            if (row < rows) {
              const bool is_flat = !form.is_symmetric && step[g] == 0.f;
              if (is_zero)
                value = is_flat ? -1.f : -offset - least[g] / step[g];
              else
                value = is_flat ? least[g] : step[g];
            }
            to[g * kPanel] = value;
          }
        }
  });
}

template <class Type>
at::Tensor pack(const at::Tensor& blocks, const std::string& part, Form form) {
  TORCH_CHECK(blocks.dim() == 2 && blocks.scalar_type() == c10::ScalarType::Byte &&
                  blocks.is_contiguous() && blocks.size(1) % form.num_bytes == 0,
              "pack_gguf_blocks: expected contiguous uint8 [N, a multiple of ", form.num_bytes,
              "], got ", blocks.sizes());
  const int64_t depth = blocks.size(1) / form.num_bytes * form.num_weights;
  const int64_t panels = (blocks.size(0) + kPanel - 1) / kPanel;
  if (part == "values") {
    auto out = at::empty({panels, depth * form.bits / 8 / kQuad, kPanel, kQuad}, blocks.options());
    pack_values<Type>(form, blocks, out.template mutable_data_ptr<uint8_t>());
    return out;
  }
  TORCH_CHECK(part == "scale" || (part == "zero" && !form.is_symmetric),
              "pack_gguf_blocks: no part '", part, "'");
  const auto floats = blocks.options().dtype(c10::ScalarType::Float);
  auto out = at::empty({panels, depth / form.group, kPanel}, floats);
  pack_groups<Type>(form, blocks, part == "zero", out.template mutable_data_ptr<float>());
  return out;
}

at::Tensor pack_gguf_blocks(const at::Tensor& blocks, c10::string_view kind_, c10::string_view part_) {
  const std::string kind(kind_), part(part_);
  if (kind == "Q4_0") return pack<Q4_0>(blocks, part, {18, 32, 32, 4, true});
  if (kind == "Q4_1") return pack<Q4_1>(blocks, part, {20, 32, 32, 4, false});
  if (kind == "Q5_0") return pack<Q5_0>(blocks, part, {22, 32, 32, 8, true});
  if (kind == "Q5_1") return pack<Q5_1>(blocks, part, {24, 32, 32, 8, false});
  if (kind == "Q8_0") return pack<Q8_0>(blocks, part, {34, 32, 32, 8, true});
  if (kind == "Q4_K") return pack<Q4_K>(blocks, part, {144, 256, 32, 4, false});
  if (kind == "Q5_K") return pack<Q5_K>(blocks, part, {176, 256, 32, 8, false});
  if (kind == "Q6_K") return pack<Q6_K>(blocks, part, {210, 256, 16, 8, true});
  TORCH_CHECK(false, "pack_gguf_blocks: no type '", kind, "'");
}

TORCH_LIBRARY_IMPL(compilespec, CPU, m) { m.impl("pack_gguf_blocks", pack_gguf_blocks); }

}  // namespace gguf_blocks
}  // namespace compilespec
