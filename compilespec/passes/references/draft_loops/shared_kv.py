"""Drafting on the target's caches: single queries at the newest key."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from compilespec.passes.references.base import Attention, AttentionCall, Tokens, Values
from compilespec.passes.references.draft_loops.drafts import Drafts
from compilespec.passes.references.fragments import run_fragment


def shared_kv(draft: Drafts, values: Values) -> Tensor:
    """Single queries at the newest key, on the caches that the target has just written."""
    roles, start = values.roles, draft.placed.start.tolist()
    if draft.case.phase == "decode":
        counts = roles["num_emitted"].tolist()
        picked = [(request, count - 1) for request, count in enumerate(counts)]
        token = torch.stack([roles["target"][request, row] for request, row in picked])
        start = [begin + count for begin, count in zip(start, counts, strict=True)]
    else:
        picked = [(0, last) for last in draft.case.inputs["last_R"].tolist()]
        token = roles["target"][:, 0]
    aux = torch.cat([roles[f"aux.{i}"] for i in range(len(draft.ctx.drafter.aux_layers))], -1)
    hidden = torch.stack([aux[request, row : row + 1] for request, row in picked])
    (hidden,) = draft.call("combine", aux=hidden)
    tokens = draft.single([length - 1 for length in start])
    tokens = dataclasses.replace(tokens, slot=torch.full_like(tokens.slot, -1))
    drafts: list[Tensor] = []
    for _ in range(draft.config.num_draft_tokens):
        arguments = {
            "input_ids": draft.ids(token),
            "position_ids": tokens.position,
            "hidden": hidden,
        }
        attend = {"attention": _on_target(draft, values, tokens)}
        head, hidden = run_fragment(draft.ctx.draft["forward"], arguments, attend)
        (token,) = draft.call("propose", head_input=head[:, 0])
        drafts.append(token)
    return torch.stack(drafts, 1)


def _on_target(draft: Drafts, values: Values, tokens: Tokens) -> Attention:
    """Attention on copies of the target's caches, so that its writes have no effect."""

    def attend(call: int, args: tuple[Any, ...]) -> Tensor:
        layer = draft.ctx.drafter.kv_layers[call]
        names = [f"cache.target.{layer}.{half}" for half in ("key", "value")]
        caches = [values.buffers[name].clone() for name in names]
        draft.calls.append(AttentionCall(cache=names[0], tokens=tokens))
        query, key, value, *options = args
        result: Tensor = torch.ops.compilespec.paged_attention(
            query,
            key,
            value,
            *caches,
            tokens.slot,
            tokens.row,
            tokens.position,
            draft.case.inputs["block_table_RM"],
            *options,
        )
        return result

    return attend
