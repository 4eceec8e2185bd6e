"""The draft loop, driven from outside: the drafter's captured calls, one after the other.

Every call has the shape it has in the step, and its attention is the paged operator on metadata
computed in plain Python, so that the result must be equal bit for bit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from compilespec.errors import NotSupported
from compilespec.passes.references.base import (
    Attention,
    AttentionCall,
    Before,
    Case,
    Tokens,
    Values,
)
from compilespec.passes.references.fragments import run_fragment
from compilespec.passes.references.placement import place_call, place_tokens
from compilespec.passes.runner import PassContext


def splice_draft_loop(before: Before, ctx: PassContext, case: Case) -> Values:
    """What the method's kind of loop drafts and writes.

    Raises: NotSupported for a kind that has no reference.
    """
    loop = LOOP_REFERENCES.get(ctx.capabilities.kind)
    if loop is None:
        raise NotSupported(
            f"the draft loop {ctx.capabilities.kind!r} has no reference; known: "
            f"{', '.join(sorted(LOOP_REFERENCES))}"
        )
    values = before(case.inputs)
    caches = {
        name: tensor.clone()
        for name, tensor in case.inputs.items()
        if name.startswith("cache.") and name not in values.buffers
    }
    drafter = Drafts(ctx, case, caches)
    drafts = loop(drafter, values)
    return dataclasses.replace(
        values,
        roles={**values.roles, "drafts": drafts},
        buffers={**values.buffers, **caches},
        calls=(*values.calls, *drafter.calls),
    )


class Drafts:
    """The drafter's captured calls and its caches during one step."""

    def __init__(self, ctx: PassContext, case: Case, caches: Mapping[str, Tensor]) -> None:
        self.ctx, self.case, self.config = ctx, case, ctx.config
        self.placed = place_call(ctx.config, case)
        self.calls: list[AttentionCall] = []
        self._caches = caches

    def call(
        self, name: str, tokens: Tokens | None = None, **arguments: Tensor
    ) -> tuple[Tensor, ...]:
        """One captured call; with `tokens` its attention reads and writes the drafter's caches."""
        attention = self._attention(tokens) if tokens is not None else None
        return run_fragment(self.ctx.draft[name], arguments, attention)

    def single(self, positions: Sequence[int]) -> Tokens:
        """One token a request, at these positions; nowhere for requests that commit nothing."""
        name = "row_B" if self.case.phase == "decode" else "commit_row_R"
        rows = [[row] for row in self.case.inputs[name].tolist()]
        return place_tokens(self.config, self.case.inputs, rows, [[p] for p in positions])

    def ids(self, tokens: Tensor) -> Tensor:
        """[B] tokens as [B, 1] ids: PAD is no id."""
        ids = [[max(token, 0)] for token in tokens.tolist()]
        return torch.tensor(ids, dtype=torch.int32, device=tokens.device)

    def _attention(self, tokens: Tokens) -> Attention:
        def attend(layer: int, args: tuple[Any, ...]) -> Tensor:
            query, key, value, *options = args
            names = [f"cache.draft.{layer}.{half}" for half in ("key", "value")]
            self.calls.append(AttentionCall(cache=names[0], tokens=tokens, key=key))
            result: Tensor = torch.ops.compilespec.paged_attention(
                query, key, value, *(self._caches[name] for name in names), tokens.slot,
                tokens.row, tokens.position, self.case.inputs["block_table_RM"], *options,
            )  # fmt: skip
            return result

        return attend


def recycled(draft: Drafts, values: Values) -> Tensor:
    """One pass over all rows; then single tokens, each on the hidden state of the pass before."""
    roles, tokens = values.roles, draft.placed.tokens
    (hidden,) = draft.call("combine", aux=roles["aux"])
    head, hidden = draft.call(
        "forward", tokens, input_ids=roles["draft_ids"], position_ids=tokens.position, hidden=hidden
    )
    head, hidden, start = _committed_rows(draft, roles, head, hidden)
    drafts = [*draft.call("propose", head_input=head)]
    for step in range(draft.config.num_draft_tokens - 1):
        tokens = draft.single([position + step for position in start])
        head, hidden = draft.call(
            "forward", tokens, input_ids=draft.ids(drafts[-1]), position_ids=tokens.position,
            hidden=hidden,
        )  # fmt: skip
        drafts += draft.call("propose", head_input=head[:, 0])
    return torch.stack(drafts, 1)


def _committed_rows(
    draft: Drafts, roles: Mapping[str, Tensor], head: Tensor, hidden: Tensor
) -> tuple[Tensor, Tensor, list[int]]:
    """Each request's last committed row, [B, D] and [B, 1, D], and the position after it."""
    start = draft.placed.start.tolist()
    if draft.case.phase == "decode":
        counts = roles["num_emitted"].tolist()
        picked = [(request, count - 1) for request, count in enumerate(counts)]
        start = [begin + count for begin, count in zip(start, counts, strict=True)]
    else:
        picked = [(0, last) for last in draft.case.inputs["last_R"].tolist()]
    heads = torch.stack([head[request, row] for request, row in picked])
    hiddens = torch.stack([hidden[request, row : row + 1] for request, row in picked])
    return heads, hiddens, start


LOOP_REFERENCES: Mapping[str, Callable[[Drafts, Values], Tensor]] = {"recycled": recycled}
