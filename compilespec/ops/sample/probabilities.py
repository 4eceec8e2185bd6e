"""Operators for rules that judge by probabilities: the target's distribution at every verify row,
uniform numbers, and draws by weight.  Noise is keyed like that of `sample`, in separate streams.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from compilespec.ops._library import define_op
from compilespec.ops._tensors import wide_dtype
from compilespec.ops.device import traits_of
from compilespec.ops.sample import layout
from compilespec.ops.sample.philox import gumbel, noise_bits_of_rows
from compilespec.ops.sample.reference import filter_scores, first_best, processed_rows


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
        [B, S, V], float32, or float64 for logits in float64.  A row that takes the best token is 1
        there.  A row without a legal id, such as one after a draft that a guide forbids, is 0
        everywhere.
    """
    wide = wide_dtype(logits_BSV.dtype)
    probs_BSV = torch.zeros(logits_BSV.shape, dtype=wide, device=logits_BSV.device)
    probs_BSV.scatter_(2, greedy_BS.long().unsqueeze(2), 1)
    rows = processed_rows(
        logits_BSV, ids_BS, row_B, drawn_BS, sampling_RF, sampling_RI, bias_RV, context_RL,
        mask_RSW,
    )  # fmt: skip
    for b, s, scores_V, reals, words, _ in rows:
        probs_BSV[b, s] = 0
        if bool((scores_V == -math.inf).all()):
            continue
        if float(reals[layout.TEMPERATURE]) < layout.MIN_TEMPERATURE:
            probs_BSV[b, s, first_best(scores_V)] = 1
        else:
            probs_BSV[b, s] = filter_scores(scores_V, reals, words).softmax(0)
    return probs_BSV


def filtered_probs_dense(
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
    """The same for all rows at once, without loops or host reads: safe in a CUDA graph."""
    wide = wide_dtype(logits_BSV.dtype)
    vocab = logits_BSV.shape[-1]
    reals_B1F = sampling_RF[row_B].to(wide).unsqueeze(1)
    words_B1I = sampling_RI[row_B].long().unsqueeze(1)
    flags_B11 = words_B1I[..., layout.FLAGS, None]
    scores_BSV, drawn_BS = logits_BSV.to(wide), drawn_BS.long()
    context_BL = _with_fed_tokens(context_RL, row_B, ids_BS, drawn_BS, flags_B11)
    penalised_BSV = _penalised(scores_BSV, reals_B1F, words_B1I, context_BL, drawn_BS)
    scores_BSV = torch.where(flags_B11 & layout.PENALISE != 0, penalised_BSV, scores_BSV)
    biased_BSV = scores_BSV + bias_RV[row_B].to(wide).unsqueeze(1)
    scores_BSV = torch.where(flags_B11 & layout.BIAS != 0, biased_BSV, scores_BSV)
    is_held_BS1 = (drawn_BS - words_B1I[..., layout.PROMPT_LEN]).unsqueeze(-1) < words_B1I[
        ..., layout.MIN_NEW, None
    ]
    scores_BSV = scores_BSV.masked_fill(is_held_BS1 & _stops(words_B1I, vocab), -math.inf)
    ids_V = torch.arange(vocab, device=logits_BSV.device)
    words_BSV = mask_RSW[row_B, : scores_BSV.shape[1]][..., ids_V // 32]
    is_banned_BSV = (flags_B11 & layout.GUIDE != 0) & (words_BSV >> (ids_V % 32) & 1 == 0)
    scores_BSV = scores_BSV.masked_fill(is_banned_BSV, -math.inf)
    is_drawn_B11 = sampling_RF[row_B].view(len(row_B), 1, -1)[..., layout.TEMPERATURE, None] >= (
        layout.MIN_TEMPERATURE
    )
    asks_B11 = (flags_B11 != 0) | (words_B1I[..., layout.MIN_NEW, None] != 0)
    best_BS = torch.where(asks_B11.squeeze(-1), scores_BSV.argmax(-1), greedy_BS.long())
    certain_BSV = (best_BS.unsqueeze(-1) == ids_V).to(wide)
    is_empty_BS1 = (scores_BSV == -math.inf).all(-1, keepdim=True) & (asks_B11 | is_drawn_B11)
    scale_B11 = torch.where(is_drawn_B11, reals_B1F[..., layout.TEMPERATURE, None], 1)
    scores_BSV = scores_BSV / scale_B11
    is_dropped_BSV = scores_BSV < _lowest_kept(scores_BSV, reals_B1F, words_B1I)
    probs_BSV = scores_BSV.masked_fill(is_dropped_BSV, -math.inf).softmax(-1)
    return torch.where(is_drawn_B11, probs_BSV, certain_BSV).masked_fill(is_empty_BS1, 0)


def _with_fed_tokens(
    context_RL: Tensor, row_B: Tensor, ids_BS: Tensor | None, drawn_BS: Tensor, flags_B11: Tensor
) -> Tensor:
    """Write the fed tokens of rows with penalties; returns the rows' context [B, L]."""
    context_BL = context_RL[row_B]
    length = context_BL.shape[1]
    if ids_BS is not None:
        is_kept_BS = (flags_B11.squeeze(-1) & layout.PENALISE != 0) & (drawn_BS > 0)
        place_BS = torch.where(is_kept_BS & (drawn_BS <= length), drawn_BS - 1, length)
        wide_BL = torch.nn.functional.pad(
            context_BL, (0, 1)
        )  # the last one takes the others' writes
        context_BL = wide_BL.scatter(1, place_BS, ids_BS.to(wide_BL.dtype))[:, :length]
        context_RL.index_put_((row_B,), context_BL)
    return context_BL.long()


def _penalised(
    scores_BSV: Tensor, reals_B1F: Tensor, words_B1I: Tensor, context_BL: Tensor, drawn_BS: Tensor
) -> Tensor:
    return apply_penalties(
        scores_BSV, reals_B1F, *count_context(scores_BSV, words_B1I, context_BL, drawn_BS)
    )


def count_context(
    like_BSV: Tensor, words_B1I: Tensor, context_BL: Tensor, drawn_BS: Tensor
) -> tuple[Tensor, Tensor]:
    """The occurrences of each id in context[:drawn], and in the output part of it."""
    vocab, place_L = like_BSV.shape[-1], torch.arange(context_BL.shape[1], device=drawn_BS.device)
    is_id_BL = (context_BL >= 0) & (context_BL < vocab)
    is_before_BSL = (place_L < drawn_BS.unsqueeze(-1)) & is_id_BL.unsqueeze(1)
    is_output_BSL = is_before_BSL & (place_L >= words_B1I[..., layout.PROMPT_LEN, None])
    token_BSL = context_BL.clamp(0, vocab - 1).unsqueeze(1).expand(is_before_BSL.shape)
    zeros_BSV = torch.zeros_like(like_BSV)
    seen_BSV = zeros_BSV.scatter_add(2, token_BSL, is_before_BSL.to(zeros_BSV.dtype))
    count_BSV = zeros_BSV.scatter_add(2, token_BSL, is_output_BSL.to(zeros_BSV.dtype))
    return seen_BSV, count_BSV


def apply_penalties(
    scores_BSV: Tensor, reals_B1F: Tensor, seen_BSV: Tensor, count_BSV: Tensor
) -> Tensor:
    """Apply repetition over prompt and output; frequency, then presence, over the output."""
    repetition_B11 = reals_B1F[..., layout.REPETITION, None]
    scaled_BSV = torch.where(
        scores_BSV < 0, scores_BSV * repetition_B11, scores_BSV / repetition_B11
    )
    scores_BSV = torch.where(seen_BSV > 0, scaled_BSV, scores_BSV)
    scores_BSV = scores_BSV - reals_B1F[..., layout.FREQUENCY, None] * count_BSV
    return scores_BSV - torch.where(count_BSV > 0, reals_B1F[..., layout.PRESENCE, None], 0)


def _stops(words_B1I: Tensor, vocab: int) -> Tensor:
    """The ids that `min_new_tokens` forbids: bool [B, 1, V]."""
    stops_B1N = words_B1I[..., layout.FIRST_STOP :]
    place_N = torch.arange(stops_B1N.shape[-1], device=stops_B1N.device)
    is_stop_B1N = place_N < words_B1I[..., layout.NUM_STOPS, None]
    none_B1V = torch.zeros(
        *stops_B1N.shape[:2], vocab + 1, dtype=torch.bool, device=stops_B1N.device
    )
    held_B1V = none_B1V.scatter(2, torch.where(is_stop_B1N, stops_B1N, vocab), True)
    return held_B1V[..., :vocab]


def _lowest_kept(scores_BSV: Tensor, reals_B1F: Tensor, words_B1I: Tensor) -> Tensor:
    """`lowest_kept` of every row, [B, S, 1]."""
    sorted_BSV = scores_BSV.sort(dim=-1, descending=True).values
    best_BS1, none = sorted_BSV[..., :1], torch.full_like(sorted_BSV[..., :1], -math.inf)
    count_B11, vocab = words_B1I[..., layout.TOP_K, None], scores_BSV.shape[-1]
    place_BS1 = (count_B11 - 1).clamp(0, vocab - 1).expand(none.shape)
    cuts_B11 = (count_B11 > 0) & (count_B11 < vocab)
    lowest_BS1 = torch.where(cuts_B11, sorted_BSV.gather(2, place_BS1), none)
    mass_BSV = (sorted_BSV - best_BS1).double().exp() * (sorted_BSV >= lowest_BS1)
    wanted_BS1 = reals_B1F[..., layout.TOP_P, None].double() * mass_BSV.sum(-1, keepdim=True)
    is_inside_BSV = (mass_BSV.cumsum(-1) - mass_BSV < wanted_BS1) & (sorted_BSV >= lowest_BS1)
    last_BS1 = (is_inside_BSV.sum(-1, keepdim=True) - 1).clamp(min=0)
    is_cut_B11 = reals_B1F[..., layout.TOP_P, None] < 1
    lowest_BS1 = torch.where(is_cut_B11, sorted_BSV.gather(2, last_BS1), lowest_BS1)
    share_B11 = reals_B1F[..., layout.MIN_P, None]
    least_BS1 = best_BS1 + share_B11.double().log().to(best_BS1.dtype)
    lowest_BS1 = torch.where(share_B11 > 0, torch.maximum(lowest_BS1, least_BS1), lowest_BS1)
    return torch.where(best_BS1.isfinite(), lowest_BS1, none)


def draw_weighted_reference(
    weights_BV: Tensor, row_B: Tensor, drawn_B: Tensor, stream_B: Tensor, sampling_RI: Tensor
) -> Tensor:
    """Draw an id with a probability in proportion to its weight.

    Args:
        weights_BV: float32 or float64, computed in float32; ids whose weight is not above 0 (or is
            subnormal) are never drawn.
        row_B: int64, the request's row of the state buffers, for its seed.
        drawn_B: int32, position of the token; stream_B: int32, see `layout.stream_word`.
    Returns:
        int32 [B]; 0 if no weight is above 0.
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

    Args: see `draw_weighted_reference`; N numbers per row.
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


def _filtered_probs(
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
    """True where a CPU call can skip plain greedy rows; other devices must not read on the host."""
    on_host = traits_of(logits_BSV.device).is_cpu
    probs = filtered_probs_reference if on_host else filtered_probs_dense
    state = (sampling_RF, sampling_RI, bias_RV, context_RL, mask_RSW)
    return probs(logits_BSV, greedy_BS, ids_BS, row_B, drawn_BS, *state)


def _like_logits(logits: Tensor, *rest: Tensor | None) -> Tensor:
    wide = wide_dtype(logits.dtype)
    return logits.new_empty(logits.shape, dtype=wide)


def _like_drawn(weights: Tensor, row: Tensor, drawn: Tensor, *rest: Tensor) -> Tensor:
    return drawn.new_empty(drawn.shape)


def _like_positions(row: Tensor, drawn: Tensor, *rest: Tensor) -> Tensor:
    return drawn.new_empty(drawn.shape, dtype=torch.float32)


filtered_probs = define_op(
    _filtered_probs,
    _like_logits,
    writes=("context_RL",),
    has_kernel=True,
)
draw_weighted = define_op(
    draw_weighted_reference,
    _like_drawn,
    has_kernel=True,
)
uniform = define_op(
    uniform_reference,
    _like_positions,
    name="uniform_noise",
    has_kernel=True,
)
