"""Penalties along the paths of a tree of drafts, whose rows have seen different contexts."""

from __future__ import annotations

import torch
from torch import Tensor

from compilespec.ops._library import define_op
from compilespec.ops._tensors import wide_dtype
from compilespec.ops.device import traits_of
from compilespec.ops.sample import layout
from compilespec.ops.sample.probabilities import apply_penalties, count_context


def penalise_paths_reference(
    logits_BSV: Tensor,
    ids_BS: Tensor,
    path_BSP: Tensor,
    row_B: Tensor,
    start_B: Tensor,
    sampling_RF: Tensor,
    sampling_RI: Tensor,
    context_RL: Tensor,
) -> Tensor:
    """The logits after the penalties of `sample`, as if each path were a chain.

    Args:
        logits_BSV: any floating dtype; ids_BS: int32, the tokens of the rows, the root first.
        path_BSP: int32, the rows from the root to each row, -1 after them.
        row_B: int64, the request's row of the state buffers; start_B: int32, position of the root.
        sampling_RF, sampling_RI, context_RL: as in `sample_reference`.  A row has seen
            context[row, :start] and the tokens on its path.
    Returns:
        float32, or float64 for logits in float64; the logits as they are for requests without
        penalties.
    """
    scores_BSV = logits_BSV.to(wide_dtype(logits_BSV.dtype), copy=True)
    reals_B1F = sampling_RF[row_B].to(scores_BSV.dtype).unsqueeze(1)
    words_B1I = sampling_RI[row_B].long().unsqueeze(1)
    is_penalised_B11 = words_B1I[..., layout.FLAGS, None] & layout.PENALISE != 0
    if traits_of(row_B.device).is_cpu and not bool(
        is_penalised_B11.any()
    ):  # else the host reads not
        return scores_BSV
    seen_B1V, count_B1V = count_context(
        scores_BSV[:, :1], words_B1I, context_RL[row_B].long(), start_B.long().unsqueeze(1)
    )
    is_on_BSP = path_BSP >= 0
    place_BSP = path_BSP.clamp(min=0).long()
    token_BSP = ids_BS.long().unsqueeze(1).expand(place_BSP.shape[:2] + ids_BS.shape[1:])
    token_BSP = token_BSP.gather(2, place_BSP)
    drafted_BSV = torch.zeros_like(scores_BSV).scatter_add(
        2, token_BSP.clamp(0, scores_BSV.shape[2] - 1), is_on_BSP.to(scores_BSV.dtype)
    )
    penalised_BSV = apply_penalties(
        scores_BSV, reals_B1F, seen_B1V + drafted_BSV, count_B1V + drafted_BSV
    )
    return torch.where(is_penalised_B11, penalised_BSV, scores_BSV)


def _fake(logits: Tensor, *rest: Tensor) -> Tensor:
    return logits.new_empty(logits.shape, dtype=wide_dtype(logits.dtype))


penalise_paths = define_op(
    penalise_paths_reference,
    _fake,
    has_kernel=False,
)
