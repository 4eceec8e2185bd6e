"""Turns recurrent layers and causal convolutions of transformers models into markers.

transformers' modelling files compute these layers by module-level functions, so that faster
libraries can replace them.  We replace them too, while a model is traced.  The model is not edited.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

import compilespec.ops  # noqa: F401  (registers the operators)
from compilespec.errors import UnsupportedState
from compilespec.ops._tensors import wide_dtype


@contextlib.contextmanager
def marked_recurrence(model: Any) -> Iterator[None]:
    """Route recurrences and causal convolutions of a transformers model to the markers.

    Raises: UnsupportedState for recurrent layers that call none of the functions known here.
    """
    places = {
        (type(module).__module__, name)
        for module in model.modules()
        for name in _MARKED
        if hasattr(sys.modules.get(type(module).__module__), name)
    }
    _refuse_unknown_state(model, {name for _, name in places})
    with contextlib.ExitStack() as stack:
        for module, name in places:
            stack.enter_context(mock.patch.object(sys.modules[module], name, _MARKED[name]))
        yield


def _refuse_unknown_state(model: Any, found: set[str]) -> None:
    """Refuse layers that are named recurrent and whose state no marker can represent;
    `check_positions` finds other layers that mix tokens.
    """
    layer_types = getattr(model.config.get_text_config(), "layer_types", None) or ()
    recurrent = {str(t) for t in layer_types if any(word in str(t) for word in _STATEFUL)}
    recurrent -= {"conv"} if "causal_conv1d_fn" in found else set()
    if not recurrent or found & set(_RECURRENCES):
        return
    raise UnsupportedState(
        f"{type(model).__name__} has layers of type {', '.join(sorted(recurrent))}, whose "
        "recurrent state cannot be rewound after a rejected draft: expected layers that call "
        f"{', '.join(sorted(_RECURRENCES))}; use a model of such layers, or of attention alone"
    )


# --- what takes the place of transformers' functions ---


def _gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor,
    chunk_size: int = 64, initial_state: Tensor | None = None, output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """[B, T, N, K], [B, T, H, V]; g [B, T, H], or [B, T, H, K] for Kimi's delta attention."""
    query_wide, key_wide = _widen(query), _widen(key)
    if use_qk_l2norm_in_kernel:
        query_wide, key_wide = _l2norm(query_wide), _l2norm(key_wide)
    output = torch.ops.compilespec.recurrence(
        query_wide * query.shape[-1] ** -0.5, key_wide, _widen(value), _widen(g), _widen(beta),
        "gated_delta" if g.dim() == 3 else "kimi_delta",
    )  # fmt: skip
    return output.to(query.dtype), None


def _mamba2_scan(
    hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int,
    D: Tensor | None = None, dt_bias: Tensor | None = None, initial_states: Tensor | None = None,
    dt_softplus: bool = False, dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False, **_: Any,
) -> Any:  # fmt: skip
    """hidden [B, T, H, V], dt [B, T, H], A and D [H], B and C [B, T, N, K]."""
    step = _time_step(dt, dt_bias, dt_softplus)
    step = _widen(step.clamp(*dt_limit))
    hidden = _widen(hidden_states)
    output = torch.ops.compilespec.recurrence(
        _widen(C), _widen(B), hidden * step[..., None], _widen(A) * step, None, "mamba2"
    )
    if D is not None:
        output = output + D[..., None] * hidden
    return (output, None) if return_final_states else output


def _mamba_scan(
    hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor,
    D: Tensor | None = None, z: Tensor | None = None, delta_bias: Tensor | None = None,
    delta_softplus: bool = False, return_last_state: bool = False, **_: Any,
) -> Any:  # fmt: skip
    """hidden and dt [B, H, T], A [H, K], B and C [B, K, T], D [H]: a head of each channel."""
    step = _widen(_time_step(dt, None if delta_bias is None else delta_bias[:, None],
                             delta_softplus)).transpose(1, 2)  # fmt: skip
    hidden = _widen(hidden_states).transpose(1, 2)
    query, key = (_widen(x).transpose(1, 2).unsqueeze(2) for x in (C, B))
    output = torch.ops.compilespec.recurrence(
        query, key, (hidden * step).unsqueeze(-1), step.unsqueeze(-1) * _widen(A), None, "mamba"
    )
    result = output.squeeze(-1).transpose(1, 2)
    if D is not None:
        result = result + hidden_states * D[None, :, None]
    if z is not None:
        result = result * F.silu(z)
    result = result.to(hidden_states.dtype)
    return (result, None) if return_last_state else result


def _causal_convolution(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> Tensor:
    """hidden [B, C, T], weight [C, W]."""
    from transformers.activations import ACT2FN

    output = torch.ops.compilespec.causal_conv(
        hidden_states.to(weight.dtype).transpose(1, 2), weight, bias
    )
    if activation is not None:
        output = ACT2FN[activation](output)
    return output.transpose(1, 2).to(hidden_states.dtype)


_RECURRENCES: Mapping[str, Callable[..., Any]] = {
    "torch_chunk_gated_delta_rule": _gated_delta_rule,
    "chunk_kimi_delta_attention": _gated_delta_rule,
    "mamba2_chunk_scan": _mamba2_scan,
    "mamba_selective_scan": _mamba_scan,
}
_STATEFUL = ("linear", "recurrent", "mamba", "ssm", "conv", "lstm", "rwkv", "retention", "hybrid")
_MARKED = {**_RECURRENCES, "causal_conv1d_fn": _causal_convolution}


def _widen(x: Tensor) -> Tensor:
    """Widen to the dtype of the states: float32, as in the models' own code; float64 models keep
    float64.
    """
    return x.to(wide_dtype(x.dtype))


def _l2norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def _time_step(dt: Tensor, bias: Tensor | None, softplus: bool) -> Tensor:
    step = dt if bias is None else dt + bias.to(dt.dtype)
    return F.softplus(step) if softplus else step
