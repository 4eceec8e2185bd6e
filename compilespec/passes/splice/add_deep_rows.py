"""Adds features of images to the outputs of the target's first layers (deepstack)."""

from __future__ import annotations

import torch
from torch import Tensor

from compilespec.passes.context import PassContext
from compilespec.passes.splice.builder import Splice, node_of
from compilespec.program import BufferSpec, ProgramConfig, markers


def add_deep_rows(step: Splice) -> int:
    """`deep_rows(x, i)` -> x, in a prefill of prompts with images plus the i-th features of each
    token that the host gives a row for.

    Returns: their number.  Numerics: exact.  Torch IR.  Source: transformers' Qwen3-VL.
    """
    found = markers(step.gm, "deep_rows")
    if step.is_decode or not step.config.features.prompt_embeds:
        for node in found:
            step.take_place(node, step.values(node.args)[0])
        return len(found)
    shape, dtype = found[0].meta["example"]
    width = int(shape[-1])
    given = step.batch("given_T")
    rows = step.buffer(deep_rows_buffer(step.config, width * len(found), dtype))
    for node in found:
        node.target = with_features
        node.args = (*node.args, node_of(given), node_of(rows))
    return len(found)


def with_features(x_1TD: Tensor, index: int, given_T: Tensor, deep_PE: Tensor) -> Tensor:
    """The stream, plus part `index` of row `given_T` of what the host gave; -1: as it is."""
    width = x_1TD.shape[-1]
    own_TE = deep_PE[given_T.clamp(min=0).long()]
    own_TD = own_TE[:, index * width : (index + 1) * width]
    return torch.where((given_T >= 0).unsqueeze(-1), x_1TD + own_TD, x_1TD)


def deep_rows_buffer(config: ProgramConfig, width: int, dtype: torch.dtype) -> BufferSpec:
    """The features of a call's tokens for all layers that get some, where they lie in it."""
    shape = (config.max_prefill_tokens, width)
    return BufferSpec(name="deep_PE", kind="state", shape=shape, dtype=dtype, by_host=True)


def num_deep_rows(ctx: PassContext) -> int | None:
    return len(markers(ctx.target.graph_module, "deep_rows")) or None
