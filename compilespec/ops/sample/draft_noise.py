"""The noise with which a request's next tokens are drawn, for drafters that choose several."""

from __future__ import annotations

import torch
from torch import Tensor

from compilespec.ops._library import define_op
from compilespec.ops.device import traits_of
from compilespec.ops.sample import layout
from compilespec.ops.sample.philox import gumbel, noise_bits_of_rows


def draft_noise_reference(
    row_B: Tensor,
    drawn_B: Tensor,
    ids_V: Tensor | None,
    num_ids: int,
    sampling_RF: Tensor,
    sampling_RI: Tensor,
    stream: int = layout.STREAM_DRAW,
) -> Tensor:
    """The Gumbel noise of each token id at the position that is drawn.

    Args:
        row_B: int64, the request's row of the state buffers; drawn_B: int32, as in
            `sample_reference`.
        ids_V: int64, target ids (negative: none); None: 0 to num_ids - 1.
        stream: which of the numbers of a position; the target draws with those of STREAM_DRAW.
    Returns:
        float32 [B, V], 0 for greedy requests.
    """
    is_drawn_B = sampling_RF[row_B][:, layout.TEMPERATURE] >= layout.MIN_TEMPERATURE
    if ids_V is None:
        ids_V = torch.arange(num_ids, device=row_B.device)
    if traits_of(row_B.device).is_cpu and not bool(is_drawn_B.any()):  # else the host must not read
        return sampling_RF.new_zeros((len(row_B), len(ids_V)))
    stream_B = torch.full_like(drawn_B, stream)
    bits_BV = noise_bits_of_rows(ids_V.clamp(min=0), row_B, drawn_B, stream_B, sampling_RI)
    return torch.where(is_drawn_B.unsqueeze(1), gumbel(bits_BV), 0)


def _fake(
    row: Tensor, drawn: Tensor, ids: Tensor | None, num_ids: int, real: Tensor, words: Tensor,
    stream: int = layout.STREAM_DRAW,
) -> Tensor:  # fmt: skip
    width = num_ids if ids is None else ids.shape[0]
    return real.new_empty((row.shape[0], width), dtype=torch.float32)


draft_noise = define_op(
    draft_noise_reference,
    _fake,
    has_kernel=False,
)
