"""The attention marker: stateless causal attention that tracing emits and a pass makes paged."""

from __future__ import annotations

from torch import Tensor

from compilespec.ops._library import define_op
from compilespec.ops.attention.reference import attention_reference

__all__ = ["attention", "attention_reference"]


def attention(
    query_BNTH: Tensor,
    key_BNTH: Tensor,
    value_BNTH: Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks_N: Tensor | None = None,
    chunk: int = 0,
    mask: Tensor | None = None,
) -> Tensor:
    """Attend causally over the token dimension; see `attention_reference`."""
    return _ATTENTION(
        query_BNTH, key_BNTH, value_BNTH, scale, window, softcap, sinks_N, chunk, mask
    )


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


_ATTENTION = define_op(
    "attention(Tensor query, Tensor key, Tensor value, float scale, int window, float softcap, "
    "Tensor? sinks, int chunk=0, Tensor? mask=None) -> Tensor",
    attention_reference,
    _attention_fake,
    has_kernel=False,
)
