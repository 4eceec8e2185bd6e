"""The definition of `sample` and `draw`, in plain torch, one row at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from compilespec.ops._tensors import wide_dtype
from compilespec.ops.sample import layout
from compilespec.ops.sample.philox import gumbel, noise_bits


def sample_reference(
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
    """Choose the target's token at every row: the argmax or a draw, as the row's request says.

    Args:
        logits_BSV: any floating dtype; computed in float32 (float64 for float64).
        greedy_BS: int32, the argmax of the logits, which is the token of plain greedy rows.
        ids_BS: int32, the token fed to row (b, s), at position drawn - 1; None if the host has
            written the context.
        row_B: int64, the request's row of the state buffers.
        drawn_BS: int32, position of the token that the row draws: the number of tokens before it.
        sampling_RF, sampling_RI: see `layout`; bias_RV float32: added where the row's flag is set.
        context_RL: int32, tokens by position; written in place, only for rows with penalties: row
            (b, s) is then conditioned on context[row, :drawn], earlier drafts included.
        mask_RSW: int32 [rows, S or more, ceil(V / 32)], for rows with guides only: bit i of word w
            says whether row (b, s) may choose id 32 w + i.
    Returns:
        int32 [B, S], in 0..V-1.  A token depends on its own logits, position, prefix and
        parameters, but not on the batch or on how many rows are verified together.
    """
    chosen_BS = greedy_BS.clone()
    rows = processed_rows(
        logits_BSV, ids_BS, row_B, drawn_BS, sampling_RF, sampling_RI, bias_RV, context_RL,
        mask_RSW,
    )  # fmt: skip
    for b, s, scores_V, reals, words, position in rows:
        chosen_BS[b, s] = choose(scores_V, reals, words, position)
    return chosen_BS


def processed_rows(
    logits_BSV: Tensor,
    ids_BS: Tensor | None,
    row_B: Tensor,
    drawn_BS: Tensor,
    sampling_RF: Tensor,
    sampling_RI: Tensor,
    bias_RV: Tensor,
    context_RL: Tensor,
    mask_RSW: Tensor,
    first: int = 0,
) -> Iterator[tuple[int, int, Tensor, Tensor, list[int], int]]:
    """The rows that are not plain greedy: (b, s, scores before the temperature, the request's reals
    and words, position drawn); writes the context.  Arguments as in `sample_reference`; logits may
    be those of the ids from `first` on alone.
    """
    max_seq_len, own = context_RL.shape[1], slice(first, first + logits_BSV.shape[2])
    drawn = drawn_BS.tolist()
    for b, row in enumerate(row_B.tolist()):
        reals, words = sampling_RF[row], sampling_RI[row].tolist()
        if is_plain(float(reals[layout.TEMPERATURE]), words):
            continue
        if words[layout.FLAGS] & layout.PENALISE and ids_BS is not None:
            for s, position in enumerate(drawn[b]):
                if 0 < position <= max_seq_len:
                    context_RL[row, position - 1] = ids_BS[b, s]
        for s, position in enumerate(drawn[b]):
            context = context_RL[row, : min(max(position, 0), max_seq_len)]
            scores_V = process(
                logits_BSV[b, s], reals, words, bias_RV[row, own], context, position, first
            )
            if words[layout.FLAGS] & layout.GUIDE:
                scores_V = guided(scores_V, mask_RSW[row, s], first)
            yield b, s, scores_V, reals, words, position


def draw_reference(
    logits_BV: Tensor,
    greedy_B: Tensor,
    ids_V: Tensor | None,
    row_B: Tensor,
    drawn_B: Tensor,
    sampling_RF: Tensor,
    sampling_RI: Tensor,
) -> Tensor:
    """Draft with the noise with which the target will draw: only temperature, no filters.

    Args:
        logits_BV: the drafter's, over its own vocabulary; ids_V: int64, the target id of each of
            its entries (negative: none); None if the ids are the same.
        greedy_B: int32 target ids, the drafts of greedy rows.
        row_B, drawn_B, sampling_RF, sampling_RI: as in `sample_reference`.
    Returns:
        int32 [B] target ids.
    """
    chosen_B = greedy_B.clone()
    if ids_V is None:
        ids_V = torch.arange(logits_BV.shape[1], device=logits_BV.device)
    wide = wide_dtype(logits_BV.dtype)
    for b, (row, position) in enumerate(zip(row_B.tolist(), drawn_B.tolist(), strict=True)):
        reals, words = sampling_RF[row], sampling_RI[row].tolist()
        if float(reals[layout.TEMPERATURE]) < layout.MIN_TEMPERATURE:
            continue
        scores_V = logits_BV[b].to(wide) / reals[layout.TEMPERATURE].to(wide)
        scores_V = torch.where(ids_V >= 0, scores_V + _noise(ids_V, words, position), -math.inf)
        chosen_B[b] = ids_V[first_best(scores_V)]
    return chosen_B


def note_logprobs_reference(
    logits_BSV: Tensor,
    chosen_BS: Tensor,
    row_B: Tensor,
    sampling_RI: Tensor,
    logprob_RSN: Tensor,
    logprob_id_RSN: Tensor,
) -> Tensor:
    """Write log-softmax values of the unprocessed logits, for rows that ask for them.

    Args:
        chosen_BS: int32, the tokens of the step.
        logprob_RSN: float32 [rows, S, N + 1], written in place: the chosen token's, then those of
            the best, best first, the lower id first among equals.
        logprob_id_RSN: int32 [rows, S, N], written in place: the ids of the best.
    Returns:
        float32 [B, S], the chosen tokens'; 0 for rows that do not ask.
    """
    own_BS = logprob_RSN.new_zeros(chosen_BS.shape)
    most = logprob_id_RSN.shape[2]
    for b, row in enumerate(row_B.tolist()):
        asked = int(sampling_RI[row, layout.LOGPROBS])
        if asked <= 0:
            continue
        for s in range(logits_BSV.shape[1]):
            values_V = logits_BSV[b, s].double().log_softmax(0)
            own_BS[b, s] = logprob_RSN[row, s, 0] = values_V[chosen_BS[b, s]]
            count = min(asked - 1, most, len(values_V))
            order = values_V.sort(descending=True, stable=True).indices[:count]
            logprob_RSN[row, s, 1 : count + 1] = values_V[order].float()
            logprob_id_RSN[row, s, :count] = order.int()
    return own_BS


def is_plain(temperature: float, words: list[int]) -> bool:
    """True where a request takes the argmax of the unprocessed logits."""
    changes = words[layout.FLAGS] or words[layout.MIN_NEW]
    return temperature < layout.MIN_TEMPERATURE and not changes


def process(
    logits_V: Tensor,
    reals: Tensor,
    words: list[int],
    bias_V: Tensor,
    context: Tensor,
    drawn: int,
    first: int = 0,
) -> Tensor:
    """Apply penalties, bias and min_new_tokens, which act on the logits before the temperature."""
    wide = wide_dtype(logits_V.dtype)
    scores_V = logits_V.to(wide)
    reals = reals.to(wide)
    prompt_len = words[layout.PROMPT_LEN]
    if words[layout.FLAGS] & layout.PENALISE:
        scores_V = _penalise(scores_V, reals, context.long() - first, prompt_len)
    if words[layout.FLAGS] & layout.BIAS:
        scores_V = scores_V + bias_V.to(wide)
    if drawn - prompt_len < words[layout.MIN_NEW]:
        stops = words[layout.FIRST_STOP : layout.FIRST_STOP + words[layout.NUM_STOPS]]
        scores_V = scores_V.clone()
        scores_V[[id - first for id in stops if 0 <= id - first < len(scores_V)]] = -math.inf
    return scores_V


def guided(scores_V: Tensor, mask_W: Tensor, first: int = 0) -> Tensor:
    """The scores, -inf where the mask's bit is 0."""
    ids_V = torch.arange(len(scores_V), device=scores_V.device) + first
    allowed_V = (mask_W[ids_V // 32] >> (ids_V % 32)) & 1
    return scores_V.masked_fill(allowed_V == 0, -math.inf)


def _penalise(scores_V: Tensor, reals: Tensor, context: Tensor, prompt_len: int) -> Tensor:
    """Apply repetition over prompt and output; frequency, then presence, over the output."""
    is_own = (context >= 0) & (context < len(scores_V))
    vocab, output = len(scores_V), context[prompt_len:][is_own[prompt_len:]]
    seen_V = torch.bincount(context[is_own], minlength=vocab) > 0
    repetition = reals[layout.REPETITION]
    scaled_V = torch.where(scores_V < 0, scores_V * repetition, scores_V / repetition)
    scores_V = torch.where(seen_V, scaled_V, scores_V)
    count_V = torch.bincount(output, minlength=vocab).to(scores_V.dtype)
    scores_V = scores_V - reals[layout.FREQUENCY] * count_V
    return scores_V - torch.where(count_V > 0, reals[layout.PRESENCE], 0)


def choose(scores_V: Tensor, reals: Tensor, words: list[int], drawn: int) -> int:
    """The best of processed logits, or a draw from those that pass the filters."""
    if float(reals[layout.TEMPERATURE]) < layout.MIN_TEMPERATURE:
        return first_best(scores_V)
    scores_V = filter_scores(scores_V, reals, words)
    ids_V = torch.arange(len(scores_V), device=scores_V.device)
    return first_best(scores_V + _noise(ids_V, words, drawn))


def filter_scores(scores_V: Tensor, reals: Tensor, words: list[int]) -> Tensor:
    """The scores divided by the temperature; -inf where the filters drop a token."""
    scores_V = scores_V / reals[layout.TEMPERATURE].to(scores_V.dtype)
    return scores_V.masked_fill(scores_V < lowest_kept(scores_V, reals, words), -math.inf)


def lowest_kept(scores_V: Tensor, reals: Tensor, words: list[int]) -> Tensor:
    """The score below which top_k, then top_p of the remaining tokens, then min_p drop a token.

    A token that ties with the last one kept is kept.
    """
    best, lowest = scores_V.max(), scores_V.new_full((), -math.inf)
    if not bool(best.isfinite()):
        return lowest
    if 0 < words[layout.TOP_K] < len(scores_V):
        lowest = scores_V.topk(words[layout.TOP_K]).values[-1]
    if float(reals[layout.TOP_P]) < 1:
        kept = scores_V[scores_V >= lowest].sort(descending=True).values
        mass = (kept - best).double().exp()
        before = mass.cumsum(0) - mass  # mass of the better tokens
        lowest = kept[before < reals[layout.TOP_P].double() * mass.sum()][-1]
    if float(reals[layout.MIN_P]) > 0:
        least = best + reals[layout.MIN_P].double().log().to(best.dtype)
        lowest = torch.maximum(lowest, least)
    return lowest


def _noise(ids_V: Tensor, words: list[int], drawn: int) -> Tensor:
    bits = noise_bits(
        ids_V.clamp(min=0),
        seed_low=words[layout.SEED_LOW],
        seed_high=words[layout.SEED_HIGH],
        sample=words[layout.SAMPLE],
        position=drawn,
        stream=layout.STREAM_DRAW,
    )
    return gumbel(bits)


def first_best(scores_V: Tensor) -> int:
    """The index of the first maximum."""
    return int((scores_V == scores_V.max()).nonzero()[:1].sum())
