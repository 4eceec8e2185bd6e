"""Unshifted drafting: a separate causal model, which sees each token at its own position."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from compilespec.passes.references.base import Tokens, Values
from compilespec.passes.references.draft_loops.drafts import Chain, Drafts
from compilespec.passes.references.placement import place_tokens
from compilespec.passes.references.recurrent_state import RequestProgress

NO_STATES = RequestProgress(absorbed={}, committed={})  # drafters that grow trees have none


def unshifted(draft: Drafts, values: Values) -> Tensor:
    """A separate model: a pass over the tokens at their own positions, then single-token passes."""
    config, roles = draft.config, values.roles
    start = draft.placed.start.tolist()
    if draft.case.phase == "decode":
        counts = roles["num_emitted"].tolist()
        ids, tokens = emitted(draft, values)
        held = [s + 1 for s in start]
        kept = [s + n for s, n in zip(held, counts, strict=True)]
        progress = draft.progress(held, kept)
        (logits,) = _model(draft, tokens, ids, progress)
        picked = torch.stack([logits[b, n - 1] for b, n in enumerate(counts)])
        first = [s + n + 1 for s, n in zip(start, counts, strict=True)]
        if draft.ctx.config.tree is not None:
            return draft.grow("logits_BV", first, first, _model_chain(picked))
        drafts, held = [*draft.call("propose", logits_BV=picked)], kept
        token = drafts[0]
    else:
        _model(draft, draft.placed.tokens, draft.placed.ids, _whole_prompts(draft.placed.tokens))
        token, first, drafts = roles["target"][:, 0], start, []
        held, kept = start, [s + 1 for s in start]
    while len(drafts) < config.num_draft_tokens:
        tokens = draft.single(first)
        (logits,) = _model(draft, tokens, draft.ids(token), draft.progress(held, kept))
        if draft.ctx.config.tree is not None:  # after the prompt's first token
            first = [position + 1 for position in first]
            return draft.grow("logits_BV", first, first, _model_chain(logits[:, 0]))
        held = kept  # drafts do not stay
        drafts += draft.call("propose", logits_BV=logits[:, 0])
        token, first = drafts[-1], [position + 1 for position in first]
    return torch.stack(drafts, 1)


def emitted(draft: Drafts, values: Values) -> tuple[Tensor, Tokens]:
    """The ids and places of the step's tokens, or of those that were kept."""
    roles = values.roles
    if draft.case.key.kind == "replay":
        at = Tokens(position=roles["position"], row=roles["row"], slot=roles["slot"])
        return roles["draft_ids"], at
    count = draft.config.num_verify_tokens
    rows = [[row] * count for row in draft.state_rows()]
    positions = [[s + 1 + j for j in range(count)] for s in draft.placed.start.tolist()]
    at = place_tokens(draft.config, draft.case.inputs, rows, positions)
    return roles["target"].clamp(min=0), at


def _model_chain(logits_BV: Tensor) -> Chain:
    def follow(draft: Drafts, request: int, tokens: Sequence[Tokens], ids: Sequence[int]) -> Tensor:
        last = logits_BV[request : request + 1]
        for place, token in zip(tokens, ids, strict=True):
            fed = draft.ids(last.new_tensor([token], dtype=torch.int32))
            (logits,) = _model(draft, place, fed, NO_STATES)
            last = logits[:, 0]
        return last

    return follow


def _whole_prompts(tokens: Tokens) -> RequestProgress:
    """The states hold what comes before each request's tokens, which are there to stay."""
    first: dict[int, int] = {}
    pairs = zip(tokens.row.flatten().tolist(), tokens.position.flatten().tolist(), strict=True)
    for row, position in pairs:
        first.setdefault(row, position)
    return RequestProgress(absorbed=first, committed=dict.fromkeys(first, sys.maxsize))


def _model(
    draft: Drafts, tokens: Tokens, ids: Tensor, progress: RequestProgress
) -> tuple[Tensor, ...]:
    ids = translated(draft, ids)
    return draft.call(
        "forward", tokens, input_ids=ids, position_ids=tokens.position, progress=progress
    )


def translated(draft: Drafts, ids: Tensor) -> Tensor:
    """The draft model's ids for the target's, where its vocabulary is another."""
    if "translate" in draft.ctx.draft:
        (ids,) = draft.call("translate", input_ids=ids)
    return ids
