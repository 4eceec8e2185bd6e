"""Choose tokens on the device: greedy, or drawn with noise that depends on the request alone.

`sample` is the target's choice at every verify row, with every option that a request may set;
`draw` chooses a draft with the same noise, so that likely drafts are right.  Plain greedy rows cost
nothing.  In both kernels (`kernel.cpp` for the CPU, `kernel.py` for GPUs) the random bits are those
of the reference.
"""

from __future__ import annotations

from torch import Tensor

from compilespec.ops._library import define_op
from compilespec.ops.sample.philox import philox_reference
from compilespec.ops.sample.reference import (
    draw_reference,
    note_logprobs_reference,
    sample_reference,
)

__all__ = [
    "draw",
    "draw_reference",
    "note_logprobs",
    "note_logprobs_reference",
    "philox",
    "philox_reference",
    "sample",
    "sample_reference",
]


def _like_greedy(logits: Tensor, greedy: Tensor, *rest: Tensor | None) -> Tensor:
    return greedy.new_empty(greedy.shape)


def _like_logprobs(
    logits: Tensor, chosen: Tensor, row: Tensor, words: Tensor, logprob: Tensor, ids: Tensor
) -> Tensor:
    return logprob.new_empty(chosen.shape)


def _like_counter(counter_N4: Tensor, key_2: Tensor) -> Tensor:
    return counter_N4.new_empty(counter_N4.shape)


sample = define_op(
    sample_reference,
    _like_greedy,
    writes=("context_RL",),
    has_kernel=True,
    triton="sample",
)
draw = define_op(
    draw_reference,
    _like_greedy,
    has_kernel=True,
    triton="sample",
)
note_logprobs = define_op(
    note_logprobs_reference,
    _like_logprobs,
    writes=("logprob_RSN", "logprob_id_RSN"),
    has_kernel=True,
    triton="sample",
)
philox = define_op(
    philox_reference,
    _like_counter,
    has_kernel=True,
)
