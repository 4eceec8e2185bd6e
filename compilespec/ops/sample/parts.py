"""Chooses among the logits of a stretch of ids, while other ranks have the other ids.

Only what must be known of all ids goes between ranks: the best of each row with its id, and, for
rows with filters, what their bounds follow from.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from compilespec.ops._library import define_op
from compilespec.ops._tensors import wide_dtype
from compilespec.ops.sample import layout
from compilespec.ops.sample.philox import gumbel, noise_bits
from compilespec.ops.sample.reference import first_best, processed_rows

BUCKETS = 2048  # of a 64th each below the best score; kernel.cpp has the same
NOT_COUNTED = 60  # below the best score: adds nothing to a float32's sum


@dataclass(frozen=True)
class RankPart:
    """A rank's stretch of the ids."""

    first: int
    length: int  # ids of all ranks
    gather: Callable[[Tensor], list[Tensor]]  # every rank's value, in rank order

    def own(self, logits: Tensor) -> Tensor:
        """Without the padding at the end of all ids."""
        return logits[..., : max(min(logits.shape[-1], self.length - self.first), 0)]

    def best_of_ranks(self, best_N: Tensor, ids_N: Tensor) -> Tensor:
        """The id of the largest value; the lowest id of equals."""
        winner_1N = torch.stack(self.gather(best_N)).argmax(0, keepdim=True)
        return torch.stack(self.gather(ids_N)).gather(0, winner_1N).squeeze(0)


def draw_part_reference(
    scores_NV: Tensor, lowest_N: Tensor, row_N: Tensor, drawn_N: Tensor, sampling_RI: Tensor,
    first: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The best of scores and noise over the ids from `first` on whose score is at least the lowest.

    Args:
        scores_NV: float32 or float64, divided by the temperature; lowest_N: of the same dtype.
        row_N: int64, the request's row of the state; drawn_N: int32, as in `sample_reference`.
    Returns:
        the best sum [N], -inf where none is kept, and its id, int32 [N].
    """
    best_N, found_N = torch.empty_like(lowest_N), torch.empty_like(drawn_N)
    ids_V = torch.arange(scores_NV.shape[1], device=scores_NV.device) + first
    for n, (row, position) in enumerate(zip(row_N.tolist(), drawn_N.tolist(), strict=True)):
        words = sampling_RI[row].tolist()
        bits_V = noise_bits(
            ids_V, seed_low=words[layout.SEED_LOW], seed_high=words[layout.SEED_HIGH],
            sample=words[layout.SAMPLE], position=position, stream=layout.STREAM_DRAW,
        )  # fmt: skip
        is_kept_V = scores_NV[n] >= lowest_N[n]
        sums_V = (scores_NV[n] + gumbel(bits_V)).masked_fill(~is_kept_V, -math.inf)
        place = first_best(sums_V)
        best_N[n], found_N[n] = sums_V[place], place + first
    return best_N, found_N


draw_part = define_op(
    draw_part_reference,
    lambda scores, lowest, row, drawn, words, first: (
        torch.empty_like(lowest),
        torch.empty_like(drawn),
    ),
    has_kernel=True,
)


def sample_of_parts(
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
    part: RankPart,
) -> Tensor:
    """`sample_reference`, of a rank's part of the logits; state rows are whole, alike on all."""
    rows = list(
        processed_rows(
            part.own(logits_BSV), ids_BS, row_B, drawn_BS, sampling_RF, sampling_RI, bias_RV,
            context_RL, mask_RSW, part.first,
        )
    )  # fmt: skip
    chosen_BS = greedy_BS.clone()
    if not rows:
        return chosen_BS
    at_B, at_S, scores, *_ = zip(*rows, strict=True)
    scores_NV = torch.stack(scores)
    scores_NV = F.pad(scores_NV, (0, int(scores_NV.shape[1] == 0)), value=-math.inf)
    row_N, drawn_N = row_B[list(at_B)], drawn_BS[list(at_B), list(at_S)]
    temperature_N = sampling_RF[row_N, layout.TEMPERATURE]
    is_drawn_N = temperature_N >= layout.MIN_TEMPERATURE
    found_N = scores_NV.argmax(1)
    best_N = scores_NV.gather(1, found_N.unsqueeze(1)).squeeze(1)
    found_N = (found_N + part.first).to(drawn_N.dtype)
    if bool(is_drawn_N.any()):
        warm_NV = scores_NV[is_drawn_N] / temperature_N[is_drawn_N].to(best_N.dtype).unsqueeze(1)
        rows_N = row_N[is_drawn_N]
        lowest_N = lowest_of_parts(warm_NV, sampling_RF[rows_N], sampling_RI[rows_N], part)
        best_N[is_drawn_N], found_N[is_drawn_N] = draw_part(
            warm_NV, lowest_N, rows_N, drawn_N[is_drawn_N], sampling_RI, part.first
        )
    chosen_BS[list(at_B), list(at_S)] = part.best_of_ranks(best_N, found_N)
    return chosen_BS


def draw_of_parts(
    logits_BV: Tensor,
    greedy_B: Tensor,
    row_B: Tensor,
    drawn_B: Tensor,
    sampling_RF: Tensor,
    sampling_RI: Tensor,
    part: RankPart,
) -> Tensor:
    """`draw_reference`, of a rank's part of the logits; a draft's id is the target's."""
    temperature_B = sampling_RF[row_B, layout.TEMPERATURE]
    asked = (temperature_B >= layout.MIN_TEMPERATURE).nonzero().flatten()
    chosen_B = greedy_B.clone()
    if not len(asked):
        return chosen_B
    logits_NV = part.own(logits_BV)[asked].to(wide_dtype(logits_BV.dtype))
    scores_NV = logits_NV / temperature_B[asked].to(logits_NV.dtype).unsqueeze(1)
    scores_NV = F.pad(scores_NV, (0, int(scores_NV.shape[1] == 0)), value=-math.inf)
    lowest_N = scores_NV.new_full((len(asked),), -math.inf)
    best_N, found_N = draw_part(
        scores_NV, lowest_N, row_B[asked], drawn_B[asked], sampling_RI, part.first
    )
    chosen_B[asked] = part.best_of_ranks(best_N, found_N)
    return chosen_B


def lowest_of_parts(
    scores_NV: Tensor, reals_NF: Tensor, words_NI: Tensor, part: RankPart
) -> Tensor:
    """The score below which top_k, then top_p, then min_p drop a token, [N], by the scores of all
    ranks; as the kernel finds it, except for the order of its sums.
    """
    top_k_N, top_p_N = words_NI[:, layout.TOP_K].long(), reals_NF[:, layout.TOP_P]
    min_p_N = reals_NF[:, layout.MIN_P]
    by_k, by_p, by_best = (top_k_N > 0) & (top_k_N < part.length), top_p_N < 1, min_p_N > 0
    lowest_N = scores_NV.new_full((len(scores_NV),), -math.inf)
    if not bool((by_k | by_p | by_best).any()):
        return lowest_N
    best_N = torch.stack(part.gather(scores_NV.amax(1))).amax(0)
    by_k, by_p, by_best = (asked & best_N.isfinite() for asked in (by_k, by_p, by_best))
    if bool(by_k.any()):
        lowest_N[by_k] = _kth_best(scores_NV[by_k], top_k_N[by_k], part)
    if bool(by_p.any()):
        lowest_N[by_p] = _nucleus(
            scores_NV[by_p], best_N[by_p], lowest_N[by_p], top_p_N[by_p].double(), part
        )
    least_N = best_N + min_p_N.double().log().to(best_N.dtype)
    return torch.where(by_best, torch.maximum(lowest_N, least_N), lowest_N)


def _kth_best(scores_NV: Tensor, top_k_N: Tensor, part: RankPart) -> Tensor:
    """Each rank sends as many of its best as the largest k."""
    best_NK = _best_of_all(scores_NV, int(top_k_N.max()), part)
    return best_NK.gather(1, top_k_N.unsqueeze(1) - 1).squeeze(1)


def _best_of_all(scores_NV: Tensor, most: int, part: RankPart) -> Tensor:
    """The `most` best scores of every rank's part, all together, in descending order."""
    own_NM = scores_NV.topk(min(most, scores_NV.shape[1])).values
    own_NM = F.pad(own_NM, (0, most - own_NM.shape[1]), value=-math.inf)
    return torch.cat(part.gather(own_NM), 1).sort(descending=True).values


def _nucleus(
    scores_NV: Tensor, best_N: Tensor, lowest_N: Tensor, top_p_N: Tensor, part: RankPart
) -> Tensor:
    """The lowest score of the fewest best that reach top_p: ranks send the masses of buckets, then
    the scores of the bucket in which it lies.
    """
    below_NV = best_N.unsqueeze(1) - scores_NV
    is_in_NV = scores_NV >= lowest_N.unsqueeze(1)
    bucket_NV = (below_NV * 64).clamp(max=BUCKETS - 1).long()
    mass_NV = torch.where(is_in_NV & (below_NV < NOT_COUNTED), (-below_NV).double().exp(), 0)
    own_NK = mass_NV.new_zeros(len(scores_NV), BUCKETS).scatter_add_(1, bucket_NV, mass_NV)
    reached_NK = torch.stack(part.gather(own_NK)).sum(0).cumsum(1)
    wanted_N1 = top_p_N.unsqueeze(1) * reached_NK[:, -1:]
    found_N1 = (reached_NK < wanted_N1).sum(1, keepdim=True).clamp(max=BUCKETS - 1)
    before_N1 = F.pad(reached_NK, (1, 0)).gather(1, found_N1)
    scores_NV = scores_NV.masked_fill(~(is_in_NV & (bucket_NV == found_N1)), -math.inf)
    number = int((scores_NV > -math.inf).sum(1).max())
    most = int(torch.stack(part.gather(torch.tensor([number]))).max())
    sorted_NM = _best_of_all(scores_NV, most, part)
    weight_NM = (sorted_NM - best_N.unsqueeze(1)).double().exp()
    reached_NM = torch.cat([before_N1, weight_NM], 1).cumsum(1)[:, :-1]
    kept_N1 = ((reached_NM < wanted_N1) & (sorted_NM > -math.inf)).sum(1, keepdim=True)
    last_N = sorted_NM.gather(1, (kept_N1 - 1).clamp(min=0)).squeeze(1)
    return torch.where(kept_N1.squeeze(1) > 0, last_N, lowest_N)
