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


def sample(
    logits_BSV: Tensor,
    greedy_BS: Tensor,
    ids_BS: Tensor | None,
    row_B: Tensor,
    drawn_BS: Tensor,
    sampling_RF: Tensor,
    sampling_RI: Tensor,
    bias_RV: Tensor,
    context_RL: Tensor,
    mask_RSW: Tensor,
) -> Tensor:
    """Choose the target's tokens; see `sample_reference`."""
    return _SAMPLE(
        logits_BSV,
        greedy_BS,
        ids_BS,
        row_B,
        drawn_BS,
        sampling_RF,
        sampling_RI,
        bias_RV,
        context_RL,
        mask_RSW,
    )


def draw(
    logits_BV: Tensor,
    greedy_B: Tensor,
    ids_V: Tensor | None,
    row_B: Tensor,
    drawn_B: Tensor,
    sampling_RF: Tensor,
    sampling_RI: Tensor,
) -> Tensor:
    """Choose a draft token; see `draw_reference`."""
    return _DRAW(logits_BV, greedy_B, ids_V, row_B, drawn_B, sampling_RF, sampling_RI)


def note_logprobs(
    logits_BSV: Tensor,
    chosen_BS: Tensor,
    row_B: Tensor,
    sampling_RI: Tensor,
    logprob_RSN: Tensor,
    logprob_id_RSN: Tensor,
) -> Tensor:
    """Write the log-probabilities that rows ask for; see `note_logprobs_reference`."""
    return _NOTE_LOGPROBS(logits_BSV, chosen_BS, row_B, sampling_RI, logprob_RSN, logprob_id_RSN)


def philox(counter_N4: Tensor, key_2: Tensor) -> Tensor:
    """The random words behind the noise; see `philox_reference`."""
    return _PHILOX(counter_N4, key_2)


def _like_greedy(logits: Tensor, greedy: Tensor, *rest: Tensor | None) -> Tensor:
    return greedy.new_empty(greedy.shape)


def _like_logprobs(
    logits: Tensor, chosen: Tensor, row: Tensor, words: Tensor, logprob: Tensor, ids: Tensor
) -> Tensor:
    return logprob.new_empty(chosen.shape)


def _like_counter(counter_N4: Tensor, key_2: Tensor) -> Tensor:
    return counter_N4.new_empty(counter_N4.shape)


_SAMPLE = define_op(
    "sample(Tensor logits, Tensor greedy, Tensor? ids, Tensor row, Tensor drawn, "
    "Tensor sampling_real, Tensor sampling_int, Tensor bias, Tensor(a!) context, "
    "Tensor mask) -> Tensor",
    sample_reference,
    _like_greedy,
    has_kernel=True,
    triton="sample",
)
_DRAW = define_op(
    "draw(Tensor logits, Tensor greedy, Tensor? ids, Tensor row, Tensor drawn, Tensor "
    "sampling_real, Tensor sampling_int) -> Tensor",
    draw_reference,
    _like_greedy,
    has_kernel=True,
    triton="sample",
)
_NOTE_LOGPROBS = define_op(
    "note_logprobs(Tensor logits, Tensor chosen, Tensor row, Tensor sampling_int, "
    "Tensor(a!) logprob, Tensor(b!) logprob_id) -> Tensor",
    note_logprobs_reference,
    _like_logprobs,
    has_kernel=True,
    triton="sample",
)
_PHILOX = define_op(
    "philox(Tensor counter, Tensor key) -> Tensor",
    philox_reference,
    _like_counter,
    has_kernel=True,
)
