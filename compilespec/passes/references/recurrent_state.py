"""Recurrent layers driven from Python: each request's tokens, one after the other."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from compilespec.ops.recurrence.reference import advance, read
from compilespec.passes.context import PassContext
from compilespec.passes.references.base import Case, Mixers, Tokens
from compilespec.passes.references.placement import place_call
from compilespec.passes.splice.draft_loops import LOOPS


@dataclass(frozen=True, kw_only=True)
class RequestProgress:
    """The progress of the states of a call's requests are, by state row."""

    absorbed: Mapping[int, int]  # tokens in the state before the call
    committed: Mapping[int, int]  # the position up to which the call's tokens cannot be rejected


def target_progress(ctx: PassContext, case: Case) -> RequestProgress:
    """Decode commits the first token of each row; prefill what no later chunk runs again."""
    placed, config = place_call(ctx.config, case), ctx.config
    starts, committed = placed.start.tolist(), {}
    if case.phase == "decode":
        for row, start in zip(case.inputs["row_B"].tolist(), starts, strict=True):
            committed[row] = min(start + 1, config.max_seq_len)
    else:
        repeated = LOOPS[ctx.capabilities.kind].reach(config.num_row_tokens - 1).num_repeated_tokens
        rows, owners = case.inputs["row_T"].tolist(), case.inputs["owner_T"].tolist()
        for row, owner in zip(rows, owners, strict=True):
            end = starts[owner]
            committed[row] = end if placed.live[owner] else max(0, end - repeated)
    absorbed = dict(enumerate(case.inputs["absorbed_R"].tolist()))
    return RequestProgress(
        absorbed=absorbed, committed={r: n for r, n in committed.items() if r >= 0}
    )


def recurrent_layers(
    buffers: MutableMapping[str, Tensor], owner: str, tokens: Tokens, progress: RequestProgress
) -> Mixers:
    """What computes the recurrent markers of a graph of `owner`; writes the states in `buffers`."""
    mine = _by_row(tokens)

    def recur(layer: int, args: tuple[Any, ...]) -> Tensor:
        query, *inputs = (x.flatten(0, 1) for x in args[:5] if x is not None)
        state_RHKV, recent_RPE = (
            buffers[f"recurrence.{owner}.{layer}.{name}"] for name in ("state", "recent")
        )
        out_THV = torch.zeros_like(inputs[1])
        for row, places in mine.items():
            first = places[0][0]
            state = state_RHKV[row].clone() if first else torch.zeros_like(state_RHKV[row])
            num_kept = recent_RPE.shape[1]
            for position in range(max(progress.absorbed[row], first - num_kept), first):
                state = _advance(state, _taken_apart(recent_RPE[row, position % num_kept], inputs))
            for position, token in places:
                now = [x[token] for x in inputs]
                state = _advance(state, now)
                out_THV[token] = read(state, query[token])
                if position < progress.committed[row]:
                    state_RHKV[row] = state
                else:
                    flat = [x.flatten().to(recent_RPE.dtype) for x in now]
                    recent_RPE[row, position % num_kept] = torch.cat(flat)
        return out_THV.view(args[2].shape)

    def convolve(layer: int, args: tuple[Any, ...]) -> Tensor:
        return _convolve(buffers[f"causal_conv.{owner}.{layer}.recent"], mine, args)

    return {"recurrence": recur, "causal_conv": convolve}


def _convolve(
    recent_RPC: Tensor, mine: Mapping[int, list[tuple[int, int]]], args: tuple[Any, ...]
) -> Tensor:
    """A convolution over the tokens of each row, and those before them that the ring holds."""
    x_TC, weight_CW, bias = args[0].flatten(0, 1), args[1], args[2]
    out_TC, num_kept = torch.zeros_like(x_TC), recent_RPC.shape[1]
    for row, places in mine.items():
        window = range(places[0][0] - weight_CW.shape[1] + 1, places[0][0])
        zero = torch.zeros_like(x_TC[0])
        before = [recent_RPC[row, p % num_kept].clone() if p >= 0 else zero for p in window]
        sequence_TC = torch.stack([*before, *(x_TC[token] for _, token in places)])
        found_1CT = F.conv1d(
            sequence_TC.t()[None], weight_CW.unsqueeze(1), bias, groups=x_TC.shape[1]
        )
        for (position, token), value_C in zip(places, found_1CT[0].t(), strict=True):
            out_TC[token] = value_C
            recent_RPC[row, position % num_kept] = x_TC[token]
    return out_TC.view(args[0].shape)


def recurrent_operators(
    buffers: MutableMapping[str, Tensor],
    owner: str,
    tokens: Tokens,
    progress: RequestProgress,
    numbers: Mapping[str, Sequence[int]],
) -> Mixers:
    """The same by the operators that serve, on metadata from Python: equal bit for bit.

    Args: numbers: those of the states, by kind; empty: 0, 1, ...
    """
    ops, rows = torch.ops.compilespec, tokens.row.tolist()
    absorbed = tokens.row.new_tensor([[progress.absorbed.get(r, 0) for r in row] for row in rows])
    committed = tokens.row.new_tensor(
        [[min(progress.committed.get(r, 0), 2**31 - 1) for r in row] for row in rows]
    )
    commits = tokens.position < committed

    def recur(layer: int, args: tuple[Any, ...]) -> Tensor:
        *inputs, kind = args
        number = numbers["recurrence"][layer] if numbers else layer
        name = f"recurrence.{owner}.{number}"
        result: Tensor = ops.cached_recurrence(
            *inputs, buffers[f"{name}.state"], buffers[f"{name}.recent"], tokens.row,
            tokens.position, absorbed, commits, kind,
        )  # fmt: skip
        return result

    def convolve(layer: int, args: tuple[Any, ...]) -> Tensor:
        number = numbers["causal_conv"][layer] if numbers else layer
        ring = buffers[f"causal_conv.{owner}.{number}.recent"]
        result: Tensor = ops.cached_conv(*args, ring, tokens.row, tokens.position)
        return result

    return {"recurrence": recur, "causal_conv": convolve}


def _by_row(tokens: Tokens) -> dict[int, list[tuple[int, int]]]:
    """(position, place in the call) of each state row's tokens."""
    pairs = zip(tokens.row.flatten().tolist(), tokens.position.flatten().tolist(), strict=True)
    found: dict[int, list[tuple[int, int]]] = {}
    for place, (row, position) in enumerate(pairs):
        if row >= 0:
            found.setdefault(row, []).append((position, place))
    return found


def _advance(state: Tensor, inputs: Sequence[Tensor]) -> Tensor:
    key, value, decay, *beta = inputs
    return advance(state, key, value, decay, beta[0] if beta else None)


def _taken_apart(kept_E: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """A kept token's inputs, in the shapes of one token of `like`."""
    parts = kept_E.split([x[0].numel() for x in like])
    return [part.view(x.shape[1:]) for part, x in zip(parts, like, strict=True)]
