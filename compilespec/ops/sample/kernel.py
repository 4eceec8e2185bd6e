"""sample, draw and note_logprobs in Triton; plain greedy rows return at once.

Other rows go through these kernels: one counts the context (penalties), one searches the lowest
score that the filters keep, a digit a launch (`kernels/filters.py`), one finds the best sum of
score and noise in each span of the vocabulary, and one picks the best of those.  Scores are
recomputed from the logits in every pass, so that no [rows, V] buffer exists; a row's spans are
their own programs.  The noise of 64 token ids uses 16 counters, as in `noise_bits`.
Grids depend on shapes only: safe in a CUDA graph.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from compilespec.ops._tensors import dense_rows, wide_dtype
from compilespec.ops.sample.kernels.draws import draft_kernel, draw_kernel, pick_kernel
from compilespec.ops.sample.kernels.filters import DIGIT, DIGITS, Search, search_kernel
from compilespec.ops.sample.kernels.logprobs import logprobs_kernel
from compilespec.ops.sample.kernels.requests import Requests
from compilespec.ops.sample.kernels.scores import Window, count_kernel

_SPAN = 8192  # ids of one program of the draw kernels; a multiple of 4 * _LANES
_LANES = 256
_BLOCK = 2048  # ids that a program holds at once
_SEARCH_SPAN = 4096  # ids of one program of a search


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
    """See `sample_reference`."""
    batch, num_tokens, vocab = logits_BSV.shape
    chosen_BS = torch.empty_like(greedy_BS, memory_format=torch.contiguous_format)
    if batch * num_tokens == 0:
        return chosen_BS
    wide, num_rows = wide_dtype(logits_BSV.dtype), batch * num_tokens
    logits_BSV, drawn_BS = dense_rows(logits_BSV), drawn_BS.contiguous()
    counts_BV = row_B.new_empty((batch, vocab), dtype=torch.int32)
    spans = triton.cdiv(vocab, _SPAN)
    best, place = _partial_best(logits_BSV, num_rows, spans, wide)
    requests = Requests(row_B.contiguous(), drawn_BS, sampling_RF, sampling_RI)
    window = Window(
        logits_BSV, bias_RV, context_RL, counts_BV, mask_RSW, num_tokens, vocab,
        context_RL.shape[1], *mask_RSW.shape[1:], *logits_BSV.stride()[:2],
    )  # fmt: skip
    ids = drawn_BS if ids_BS is None else ids_BS.contiguous()
    search, sizes = search_lowest(requests, window, ids, num_rows, has_ids=ids_BS is not None)
    draw_kernel[(num_rows, spans)](
        requests, window, search, best, place, SPAN=_SPAN, LANES=_LANES, **sizes
    )
    pick_kernel[(num_rows,)](
        requests, best, place, greedy_BS.contiguous(), place, chosen_BS, num_tokens, spans, vocab,
        HAS_MAP=False, FOR_DRAFT=False, BLOCK=triton.next_power_of_2(spans),
    )  # fmt: skip
    return chosen_BS


def search_lowest(
    requests: Requests, window: Window, ids: Tensor, num_rows: int, *, has_ids: bool
) -> tuple[Search, dict[str, Any]]:
    """Search each row's lowest score that the filters keep.

    Returns: what `lowest_kept` reads, and its compile-time sizes.
    """
    like, vocab, wide = window.logits, window.vocab, wide_dtype(window.logits.dtype)
    key, bits = _KEYS[wide], 8 * wide.itemsize
    steps = triton.cdiv(bits, DIGIT.value)
    spans = triton.cdiv(vocab, _SEARCH_SPAN)
    search = Search(
        tables=like.new_empty((num_rows, 2 * steps, DIGITS.value), dtype=torch.int64),
        found=like.new_empty((num_rows, 2 * steps), dtype=key),
        wanted=like.new_empty((num_rows, 2 * steps), dtype=torch.int64),
        best=like.new_empty((num_rows, spans), dtype=wide),
        num_spans=spans,
        unit=2.0 ** (62 - vocab.bit_length()),  # the sum of a row is below 2**62
    )
    count_kernel[(num_rows // window.num_tokens, window.num_tokens)](
        requests, window, search.tables, 2 * steps * DIGITS.value, ids, HAS_IDS=has_ids,
        BLOCK=_BLOCK,
    )  # fmt: skip
    sizes = {
        "STEPS": steps, "SPANS": triton.next_power_of_2(spans), "WIDE": _TYPES[wide],
        "KEY": _TYPES[key], "BITS": bits, "enable_fp_fusion": False,
    }  # fmt: skip
    for step in range(2 * steps):
        search_kernel[(num_rows, spans)](
            requests, window, search, step, BY_MASS=step >= steps, SPAN=_SEARCH_SPAN,
            BLOCK=_BLOCK, num_warps=8, **sizes,
        )  # fmt: skip
    return search, sizes


def draw(
    logits_BV: Tensor,
    greedy_B: Tensor,
    ids_V: Tensor | None,
    row_B: Tensor,
    drawn_B: Tensor,
    sampling_RF: Tensor,
    sampling_RI: Tensor,
) -> Tensor:
    """See `draw_reference`; a row without a legal id gets the greedy one."""
    batch, vocab = logits_BV.shape
    chosen_B = torch.empty_like(greedy_B, memory_format=torch.contiguous_format)
    if batch == 0:
        return chosen_B
    wide = wide_dtype(logits_BV.dtype)
    logits_BV, spans = dense_rows(logits_BV), triton.cdiv(vocab, _SPAN)
    best, place = _partial_best(logits_BV, batch, spans, wide)
    requests = Requests(row_B.contiguous(), drawn_B.contiguous(), sampling_RF, sampling_RI)
    own_ids, has_map = (place, False) if ids_V is None else (ids_V.contiguous(), True)
    draft_kernel[(batch, spans)](
        requests, logits_BV, own_ids, best, place, vocab, logits_BV.stride(0), HAS_MAP=has_map,
        SPAN=_SPAN, LANES=_LANES, WIDE=_TYPES[wide], enable_fp_fusion=False,
    )  # fmt: skip
    pick_kernel[(batch,)](
        requests, best, place, greedy_B.contiguous(), own_ids, chosen_B, 1, spans, vocab,
        HAS_MAP=has_map, FOR_DRAFT=True, BLOCK=triton.next_power_of_2(spans),
    )  # fmt: skip
    return chosen_B


def note_logprobs(
    logits_BSV: Tensor,
    chosen_BS: Tensor,
    row_B: Tensor,
    sampling_RI: Tensor,
    logprob_RSN: Tensor,
    logprob_id_RSN: Tensor,
) -> Tensor:
    """See `note_logprobs_reference`."""
    batch, num_tokens, vocab = logits_BSV.shape
    own_BS = logprob_RSN.new_empty((batch, num_tokens))
    if batch * num_tokens == 0:
        return own_BS
    logits_BSV = dense_rows(logits_BSV)
    logprobs_kernel[(batch * num_tokens,)](
        logits_BSV, chosen_BS.contiguous(), row_B.contiguous(), sampling_RI, logprob_RSN,
        logprob_id_RSN, own_BS, num_tokens, vocab, *logits_BSV.stride()[:2],
        logprob_RSN.shape[1], MOST=logprob_id_RSN.shape[2],
        BLOCK=_BLOCK, WIDE=_TYPES[wide_dtype(logits_BSV.dtype)], num_warps=8,
    )  # fmt: skip
    return own_BS


def _partial_best(
    like: Tensor, num_rows: int, spans: int, wide: torch.dtype
) -> tuple[Tensor, Tensor]:
    best = like.new_empty((num_rows, spans), dtype=wide)
    return best, like.new_empty((num_rows, spans), dtype=torch.int32)


_TYPES = {
    torch.float32: tl.float32, torch.float64: tl.float64, torch.int32: tl.int32,
    torch.int64: tl.int64,
}  # fmt: skip
_KEYS = {torch.float32: torch.int32, torch.float64: torch.int64}
