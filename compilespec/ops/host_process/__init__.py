"""Logits processors on the host, called from inside a step.

A step with this operator waits for the host on any device, and cannot be captured in a CUDA graph.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from compilespec.ops._library import define_op
from compilespec.ops._tensors import wide_dtype

# The drafts before each of S rows, and logits [S, V] on the CPU, to logits [S, V]; must not raise.
Processor = Callable[[list[list[int]], Tensor], Tensor]

_processors: dict[int, Processor] = {}
_handles = itertools.count(1)


def register(processor: Processor) -> int:
    """Register a processor for all steps; returns its handle, never 0."""
    handle = next(_handles)
    _processors[handle] = processor
    return handle


def release(handle: int) -> None:
    """Unregister a processor; harmless if it is unknown."""
    _processors.pop(handle, None)


def host_process_reference(
    logits_BSV: Tensor,
    ids_BS: Tensor,
    row_B: Tensor,
    processor_R: Tensor,
    path_BSP: Tensor | None = None,
) -> Tensor:
    """The logits, with those of rows that have a processor replaced by its result.

    Args:
        ids_BS: int32, the tokens fed to the window: the last emitted one, then the drafts.
        row_B: int64, each request's row; processor_R: int64, handles by row, 0 is none.
        path_BSP: int32, of a tree: the rows from the root to each row, -1 after them.
    Returns:
        float32 [B, S, V], float64 for float64.
    """
    wide = wide_dtype(logits_BSV.dtype)
    result_BSV = logits_BSV.to(wide, copy=True)
    for b, handle in enumerate(processor_R[row_B].tolist()):
        processor = _processors.get(handle)
        if processor is not None:
            ids = ids_BS[b].tolist()
            paths: list[Sequence[int]] = [range(row + 1) for row in range(len(ids))]
            if path_BSP is not None:
                paths = [[row for row in path if row >= 0] for path in path_BSP[b].tolist()]
            drafts = [[ids[row] for row in path[1:]] for path in paths]
            changed_SV = processor(drafts, result_BSV[b].cpu())
            result_BSV[b].copy_(changed_SV)
    return result_BSV


def _fake(logits_BSV: Tensor, *rest: Tensor | None) -> Tensor:
    wide = wide_dtype(logits_BSV.dtype)
    return torch.empty_like(logits_BSV, dtype=wide)


host_process = define_op(
    host_process_reference,
    _fake,
    has_kernel=False,
)
