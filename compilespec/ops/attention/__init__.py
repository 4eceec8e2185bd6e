"""The attention marker: stateless causal attention that tracing emits and a pass makes paged."""

from __future__ import annotations

from torch import Tensor

from compilespec.ops._library import define_op
from compilespec.ops.attention.reference import attention_reference

__all__ = ["attention", "attention_reference"]


def _attention_fake(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
    chunk: int = 0,
    mask: Tensor | None = None,
) -> Tensor:
    batch, num_heads, num_tokens, _ = query.shape
    return query.new_empty((batch, num_tokens, num_heads, value.shape[3]))


attention = define_op(
    attention_reference,
    _attention_fake,
    has_kernel=False,
    optional=("window", "softcap", "sinks_N"),
)
