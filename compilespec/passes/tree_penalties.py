"""Penalties of trees: what each row has seen is on its own path."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

import compilespec.ops.sample.path_penalties  # noqa: F401  (registers the operator)
from compilespec.ops.sample.layout import FLAGS, NUM_INTS, PENALISE
from compilespec.passes.context import PassContext
from compilespec.passes.graph import arange_like, emit, find_role, output_node


def penalise_paths(
    gm: fx.GraphModule, logits: fx.Node, state: tuple[fx.Node, ...], *, before: fx.Node
) -> tuple[fx.Node, tuple[fx.Node, ...]]:
    """The logits after penalties, each row's by its path; and the state without them, for what
    would penalise rows as if they were a chain.
    """
    real, whole, bias, context = state
    with gm.graph.inserting_before(before):
        penalised = gm.graph.call_function(
            torch.ops.compilespec.penalise_paths.default,
            (logits, find_role(gm, "ids"), find_role(gm, "path"), find_role(gm, "row_index"),
             find_role(gm, "start"), real, whole, context),
        )  # fmt: skip
    rest = emit(gm, without_penalties, whole, before=before)
    return penalised, (real, rest, bias, context)


def without_penalties(sampling_RI: Any) -> Any:
    """The rows, in which no request has penalties."""
    is_flag_I = arange_like(sampling_RI, NUM_INTS) == FLAGS
    return torch.where(is_flag_I, sampling_RI & ~PENALISE, sampling_RI)


def keep_context(
    gm: fx.GraphModule, ctx: PassContext, state: tuple[fx.Node, ...], taken: fx.Node
) -> None:
    """Write the tokens of the accepted path, of requests with penalties, by position."""
    _, whole, _, context = state
    emit(
        gm, write_context, context, whole, find_role(gm, "row_index"), find_role(gm, "start"),
        find_role(gm, "ids"), taken, before=output_node(gm),
        num_tokens=ctx.config.num_step_tokens, max_seq_len=ctx.config.max_seq_len,
    )  # fmt: skip


def write_context(
    context_RL: Any, sampling_RI: Any, index_B: Any, start_B: Any, ids_BS: Any, taken_BP: Any, *,
    num_tokens: int, max_seq_len: int,
) -> Any:  # fmt: skip
    """What is written after the path's end, the next step writes again before it is read."""
    wanted_BP = start_B.unsqueeze(1) + arange_like(start_B, num_tokens)
    place_BP = wanted_BP.clamp(max=max_seq_len - 1).long()
    index_B1 = index_B.unsqueeze(1)
    is_kept_B1 = (sampling_RI[index_B][:, FLAGS] & PENALISE != 0).unsqueeze(1)
    tokens_BP = ids_BS.gather(1, taken_BP.long()).to(torch.int32)
    tokens_BP = torch.where(is_kept_B1, tokens_BP, context_RL[index_B1, place_BP])
    return context_RL.index_put_((index_B1, place_BP), tokens_BP)
