"""Penalties of trees: what each row has seen is on its own path."""

from __future__ import annotations

import torch
from torch import Tensor

import compilespec.ops.sample.path_penalties  # noqa: F401  (registers the operator)
from compilespec.ops.sample.layout import FLAGS, NUM_INTS, PENALISE
from compilespec.passes.splice.builder import Splice, arange_like


def penalise_paths(
    step: Splice, logits: Tensor, state: tuple[Tensor, ...]
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The logits after penalties, each row's by its path; and the state without them, for what
    would penalise rows as if they were a chain.
    """
    roles = step.roles
    real, whole, bias, context = state
    penalised = torch.ops.compilespec.penalise_paths.default(
        logits, roles.ids, roles.path, roles.row_index, roles.start, real, whole, context
    )
    return penalised, (real, without_penalties(whole), bias, context)


def without_penalties(sampling_RI: Tensor) -> Tensor:
    """The rows, in which no request has penalties."""
    is_flag_I = arange_like(sampling_RI, NUM_INTS) == FLAGS
    return torch.where(is_flag_I, sampling_RI & ~PENALISE, sampling_RI)


def keep_context(step: Splice, state: tuple[Tensor, ...], taken: Tensor) -> None:
    """Write the tokens of the accepted path, of requests with penalties, by position."""
    roles, (_, whole, _, context) = step.roles, state
    step.call(write_context, context, whole, roles.row_index, roles.start, roles.ids, taken)


def write_context(
    context_RL: Tensor,
    sampling_RI: Tensor,
    index_B: Tensor,
    start_B: Tensor,
    ids_BS: Tensor,
    taken_BP: Tensor,
    *,
    num_step_tokens: int,
    max_seq_len: int,
) -> Tensor:
    """What is written after the path's end, the next step writes again before it is read."""
    wanted_BP = start_B.unsqueeze(1) + arange_like(start_B, num_step_tokens)
    place_BP = wanted_BP.clamp(max=max_seq_len - 1).long()
    index_B1 = index_B.unsqueeze(1)
    is_kept_B1 = (sampling_RI[index_B][:, FLAGS] & PENALISE != 0).unsqueeze(1)
    tokens_BP = ids_BS.gather(1, taken_BP.long()).to(torch.int32)
    tokens_BP = torch.where(is_kept_B1, tokens_BP, context_RL[index_B1, place_BP])
    return context_RL.index_put_((index_B1, place_BP), tokens_BP)
