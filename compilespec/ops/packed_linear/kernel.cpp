// packed_linear on the CPU, for floating-point weights; how it computes is in _panels.h.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "_matrix_tiles.h"
#include "_panels.h"

namespace compilespec {
namespace packed_linear {

template <class W>
void start(const at::Tensor& x, const at::Tensor& packed, const c10::optional<at::Tensor>& bias,
           at::Tensor& out) {
  using Acc = typename Storage<W>::Acc;
  constexpr auto kAcc = c10::CppTypeToScalarType<Acc>::value;
  const int64_t depth = x.size(-1);
  Problem<W> problem{};
  at::Tensor rows = x, wide_bias;
  problem.x_stride = depth;
  if (x.dim() == 2 && x.stride(1) == 1)
    problem.x_stride = x.stride(0);
  else if (!x.is_contiguous())
    rows = x.contiguous();
  problem.x = rows.const_data_ptr();
  problem.x_type = x.scalar_type();
  problem.weight = (const W*)packed.const_data_ptr();
  if (bias && bias->defined()) {
    wide_bias = bias->to(kAcc).contiguous();
    problem.bias = (const Acc*)wide_bias.const_data_ptr();
  }
  problem.out = out.mutable_data_ptr();
  problem.num_columns = out.size(-1);
  problem.num_panels = packed.size(0);
  problem.depth = depth;
  problem.num_rows = problem.num_columns ? out.numel() / problem.num_columns : 0;
#if defined(COMPILESPEC_MATRIX_TILES)
  if constexpr (std::is_same_v<W, Pairs<c10::BFloat16>>)
    if (matrix_tiles::available()) {
      const auto panels = matrix_tiles::Panels::packed(problem.weight, (depth + 1) / 2);
      return matrix_tiles::run_pairs(problem, matrix_tiles::Packed<matrix_tiles::Pairs>{panels},
                                     {panels.data, problem.num_panels, panels.stride});
    }
#endif
  run(problem);
}

at::Tensor packed_linear(const at::Tensor& x, const at::Tensor& packed,
                         const c10::optional<at::Tensor>& bias, int64_t out_features) {
  using c10::ScalarType;
  const auto type = packed.scalar_type();
  TORCH_CHECK(x.dim() >= 1, "packed_linear: expected x [..., K]");
  const int64_t held = type == ScalarType::BFloat16 ? Strip<c10::BFloat16>::kHeld : 1,
                num_panels = (out_features + kPanel - 1) / kPanel,
                num_strips = (x.size(-1) + held - 1) / held;
  const bool fits = packed.dim() == (held > 1 ? 4 : 3) && packed.size(0) == num_panels &&
                    packed.size(1) == num_strips && packed.size(2) == kPanel &&
                    (held == 1 || packed.size(3) == held);
  TORCH_CHECK(fits && packed.is_contiguous(), "packed_linear: x ", x.sizes(), " and ", out_features,
              " output features take a contiguous packed weight of ", num_panels, " panels of ",
              num_strips, " strips of 16 columns and ", held, " input features, got ",
              packed.sizes());
  TORCH_CHECK(!bias || (bias->dim() == 1 && bias->size(0) == out_features),
              "packed_linear: expected bias [", out_features, "]");
  TORCH_CHECK((x.scalar_type() == ScalarType::Double) == (type == ScalarType::Double),
              "packed_linear: float64 x and weight go together, got ", x.scalar_type(), " and ",
              type);
  auto sizes = x.sizes().vec();
  sizes.back() = out_features;
  at::Tensor out = at::empty(sizes, x.options());
  switch (type) {
    case ScalarType::Float: start<float>(x, packed, bias, out); break;
    case ScalarType::Double: start<double>(x, packed, bias, out); break;
    case ScalarType::BFloat16:
#if defined(COMPILESPEC_BF16_DOT)
      if (x.scalar_type() == ScalarType::BFloat16) {
        start<Pairs<c10::BFloat16>>(x, packed, bias, out);
        break;
      }
#endif
      start<c10::BFloat16>(x, packed, bias, out);
      break;
    case ScalarType::Half: start<c10::Half>(x, packed, bias, out); break;
    default: TORCH_CHECK(false, "packed_linear: unsupported weight type ", type);
  }
  return out;
}

TORCH_LIBRARY_IMPL(compilespec, CPU, m) { m.impl("packed_linear", packed_linear); }

}  // namespace packed_linear
}  // namespace compilespec
