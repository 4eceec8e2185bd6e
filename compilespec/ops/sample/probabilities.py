"""What rules need that judge by probabilities: the target's at every verify row, uniform numbers,
draws by weights.  Noise is keyed as that of `sample`, in streams of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compilespec.ops._library import define_op
from compilespec.ops.sample import layout
from compilespec.ops.sample.philox import gumbel, noise_bits_of_rows
from compilespec.ops.sample.reference import filter_scores, first_best, processed_rows


def filtered_probs(
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
    """The distributions that `sample` draws from; see `filtered_probs_reference`."""
    return _FILTERED_PROBS(
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


def draw_weighted(
    weights_BV: Tensor, row_B: Tensor, drawn_B: Tensor, stream_B: Tensor, sampling_RI: Tensor
) -> Tensor:
    """Draw one id a row; see `draw_weighted_reference`."""
    return _DRAW_WEIGHTED(weights_BV, row_B, drawn_B, stream_B, sampling_RI)


def uniform(row_B: Tensor, drawn_BN: Tensor, stream_BN: Tensor, sampling_RI: Tensor) -> Tensor:
    """Numbers in (0, 1); see `uniform_reference`."""
    return _UNIFORM(row_B, drawn_BN, stream_BN, sampling_RI)


def filtered_probs_reference(
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
    """The distribution of the token that `sample` would choose at every row, over its noise.

    Args: those of `sample_reference`; the context is written as there.
    Returns:
        [B, S, V], float32, or float64 for logits in float64.  Of a row that takes the best token:
        1 there.
    """
    wide = torch.float64 if logits_BSV.dtype == torch.float64 else torch.float32
    probs_BSV = torch.zeros(logits_BSV.shape, dtype=wide, device=logits_BSV.device)
    probs_BSV.scatter_(2, greedy_BS.long().unsqueeze(2), 1)
    rows = processed_rows(
        logits_BSV, ids_BS, row_B, drawn_BS, sampling_RF, sampling_RI, bias_RV, context_RL,
        mask_RSW,
    )  # fmt: skip
    for b, s, scores_V, reals, words, _ in rows:
        probs_BSV[b, s] = 0
        if float(reals[layout.TEMPERATURE]) < layout.MIN_TEMPERATURE:
            probs_BSV[b, s, first_best(scores_V)] = 1
        else:
            probs_BSV[b, s] = filter_scores(scores_V, reals, words).softmax(0)
    return probs_BSV


def draw_weighted_reference(
    weights_BV: Tensor, row_B: Tensor, drawn_B: Tensor, stream_B: Tensor, sampling_RI: Tensor
) -> Tensor:
    """Draw an id with a chance in proportion to its weight.

    Args:
        weights_BV: float32 or float64, worked on in float32; those that are not above 0 (or are
            subnormal) are never drawn.
        row_B: int64, the request's row of the state buffers, for its seed.
        drawn_B: int32, position of the token; stream_B: int32, see `layout.stream_word`.
    Returns:
        int32 [B]; 0 where no weight is above 0.
    """
    ids_V = torch.arange(weights_BV.shape[1], device=weights_BV.device)
    bits_BV = noise_bits_of_rows(ids_V, row_B, drawn_B, stream_B, sampling_RI)
    weights_BV = weights_BV.to(torch.float32)
    is_drawn_BV = weights_BV >= torch.finfo(torch.float32).tiny
    scores_BV = torch.where(is_drawn_BV, weights_BV, 0).log() + gumbel(bits_BV)
    return scores_BV.argmax(-1).to(torch.int32)


def uniform_reference(
    row_B: Tensor, drawn_BN: Tensor, stream_BN: Tensor, sampling_RI: Tensor
) -> Tensor:
    """Numbers keyed by (request, position, stream): odd multiples of 2**-25, all in (0, 1).

    Args: see `draw_weighted_reference`, N a row.
    Returns:
        float32 [B, N].
    """
    zero_1 = torch.zeros(1, dtype=torch.int64, device=row_B.device)
    columns = [
        noise_bits_of_rows(zero_1, row_B, drawn_B, stream_B, sampling_RI).squeeze(1)
        for drawn_B, stream_B in zip(drawn_BN.unbind(1), stream_BN.unbind(1), strict=True)
    ]
    bits_BN = torch.stack(columns, 1) >> 8
    return (bits_BN.to(torch.float32) + 0.5) * 2.0**-24


def _like_logits(logits: Tensor, *rest: Tensor | None) -> Tensor:
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    return logits.new_empty(logits.shape, dtype=wide)


def _like_drawn(weights: Tensor, row: Tensor, drawn: Tensor, *rest: Tensor) -> Tensor:
    return drawn.new_empty(drawn.shape)


def _like_positions(row: Tensor, drawn: Tensor, *rest: Tensor) -> Tensor:
    return drawn.new_empty(drawn.shape, dtype=torch.float32)


_FILTERED_PROBS = define_op(
    "filtered_probs(Tensor logits, Tensor greedy, Tensor? ids, Tensor row, Tensor drawn, "
    "Tensor sampling_real, Tensor sampling_int, Tensor bias, Tensor(a!) context, Tensor mask) "
    "-> Tensor",
    filtered_probs_reference,
    _like_logits,
    has_kernel=True,
)
_DRAW_WEIGHTED = define_op(
    "draw_weighted(Tensor weights, Tensor row, Tensor drawn, Tensor stream, Tensor sampling_int) "
    "-> Tensor",
    draw_weighted_reference,
    _like_drawn,
    has_kernel=True,
)
_UNIFORM = define_op(
    "uniform_noise(Tensor row, Tensor drawn, Tensor stream, Tensor sampling_int) -> Tensor",
    uniform_reference,
    _like_positions,
    has_kernel=True,
)
