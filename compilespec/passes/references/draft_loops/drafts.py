"""The drafter's captured calls, and the buffers that it alone writes, during one step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from compilespec.ops.sample import draw_reference, layout
from compilespec.ops.sample.probabilities import draw_weighted_reference
from compilespec.passes.context import PassContext
from compilespec.passes.references.adapters import changed_alike
from compilespec.passes.references.base import Attention, AttentionCall, Case, Tokens
from compilespec.passes.references.evidence import confidence_of_chances, confidence_of_match
from compilespec.passes.references.fragments import products, run_fragment
from compilespec.passes.references.grown_trees import (
    are_drawn,
    child_distributions,
    depth_calls,
    grow,
    is_sampled,
    rank_tokens,
    scored_tokens,
)
from compilespec.passes.references.kept_masks import mask_parts
from compilespec.passes.references.placement import place_chain, place_tokens
from compilespec.passes.references.recurrent_state import RequestProgress, recurrent_operators
from compilespec.passes.splice.kv_groups import KVGroup
from compilespec.passes.splice.sampling import wide_dtype
from compilespec.program import MASK_PLACE
from compilespec.tracing.capture import output_widths


class Drafts:
    """The drafter's captured calls, and the buffers that it alone writes, during one step."""

    def __init__(
        self,
        ctx: PassContext,
        case: Case,
        buffers: dict[str, Tensor],
        roles: Mapping[str, Tensor],
        kept_ids: Tensor | None,  # the only ones that it may propose; None: all
    ) -> None:
        self.ctx, self.case = ctx, case
        self.config = dataclasses.replace(ctx.config, tree=None)  # see `place_chain`
        self._kept_ids = kept_ids
        self.placed = place_chain(ctx.config, case)
        self.calls: list[AttentionCall] = []
        self.buffers = buffers
        self.probs: list[Tensor] = []  # the distribution of each draft, [B, V]
        self.child_prob_RIV: Tensor | None = None  # those of the children of a tree's nodes
        self._bonus = self.placed.start  # position of the last emitted token
        if case.phase == "decode":
            self._bonus = self._bonus + roles["num_emitted"]
        self._num_proposals = 0
        self.parents: Tensor | None = None  # of the rows of a tree, [B, N + 1]
        self.chances: list[Tensor] = []  # of each draft, to be accepted, [B]
        self.matched: list[int] | None = None  # by request, tokens of context that were found

    def call(
        self,
        name: str,
        tokens: Tokens | None = None,
        *,
        owner: str = "draft",
        progress: RequestProgress | None = None,
        sights: Sequence[Sight] = (),
        **arguments: Tensor,
    ) -> tuple[Tensor, ...]:
        """One captured call; with `tokens` its attention reads and writes the caches of `owner`,
        with `progress` its recurrent layers read and write their states.  `sights`: what the tokens
        see, one for each layer or one for all.
        """
        mixers: dict[str, Attention] = {}
        if tokens is not None:
            attention = self._attention(tokens, owner, sights)
            table = self.case.inputs["block_table_RM"]
            masks = mask_parts(self.buffers, self.config, tokens, table, owner)
            mixers = {"attention": attention, **masks}
        if tokens is not None and progress is not None:
            numbers = self.ctx.drafter.target_layers
            mixers |= recurrent_operators(self.buffers, owner, tokens, progress, numbers)
        follow = None
        if tokens is not None and self.ctx.drafts_in_place:
            follow = changed_alike(self.ctx, self.case, tokens.row)
        outputs = run_fragment(self.ctx.draft[name], arguments, mixers, self._columns(name), follow)
        if not name.startswith("propose"):
            return outputs
        if self._kept_ids is not None and len(outputs) > 1:
            outputs = (*outputs, self._kept_ids)
        return (self._draft(*outputs),)

    def propose_all(self, head_BKD: Tensor) -> Tensor:
        """The drafts [B, K] of one call of "propose"."""
        count, columns = head_BKD.shape[1], self._columns("propose")
        arguments = {"head_input": head_BKD.flatten(0, 1)}
        best, *offered = run_fragment(self.ctx.draft["propose"], arguments, {}, columns)
        ids = offered[1:]
        if self._kept_ids is not None and offered:
            ids = [self._kept_ids]
        drafts = []
        for number in range(count):
            own = [part[number::count] for part in (best, *offered[:1])]
            drafts.append(self._draft(*own, *ids))
        return torch.stack(drafts, 1)

    def _columns(self, name: str) -> Tensor | None:
        """The columns that a call computes of its last product; None: all.  The head is in the
        call that proposes, or else in the one before it.
        """
        proposals = [call for one, call in self.ctx.draft.items() if one.startswith("propose")]
        is_apart = any(products(call.graph_module) for call in proposals)
        return self._kept_ids if name.startswith("propose") or not is_apart else None

    def _draft(self, best_B: Tensor, *offered: Tensor) -> Tensor:
        """The next draft of each request: the best, or drawn if the request is sampled."""
        self._num_proposals += 1
        if not offered or self.ctx.greedy_only:
            return best_B
        if "sure" not in self.ctx.draft:
            self.chances.append(offered[0].float().softmax(-1).amax(-1))
        position_B = self._bonus + self._num_proposals
        logits_BV, ids_V = offered[0], offered[1] if len(offered) > 1 else None
        real, whole = self.case.inputs["sampling_RF"], self.case.inputs["sampling_RI"]
        rows = self.placed.row_index
        if self.ctx.acceptance.couples_drafts:
            return draw_reference(logits_BV, best_B, ids_V, rows, position_B, real, whole)
        (vocab,) = output_widths(self.ctx.target)
        probs_BV = torch.zeros(len(rows), vocab, dtype=wide_dtype(self.ctx))
        for request, row in enumerate(rows.tolist()):
            temperature = float(real[row, layout.TEMPERATURE])
            if temperature < layout.MIN_TEMPERATURE:
                probs_BV[request, best_B[request]] = 1
                continue
            scale = real[row, layout.TEMPERATURE].to(probs_BV.dtype)
            own_V = (logits_BV[request].to(probs_BV.dtype) / scale).softmax(-1)
            for entry, chance in enumerate(own_V):
                probs_BV[request, entry if ids_V is None else ids_V[entry]] = chance
        self.probs.append(probs_BV)
        stream_B = torch.full_like(position_B, layout.STREAM_DRAFT + 8 * self._num_proposals)
        return draw_weighted_reference(probs_BV, rows, position_B, stream_B, whole)

    def judge(self, head_BD: Tensor, token_B: Tensor) -> None:
        """Note what the drafter's own head says of the draft of these rows, if it has one."""
        if "sure" in self.ctx.draft:
            (logit_B,) = self.call("sure", head_input=head_BD, token=token_B)
            self.chances.append(logit_B.float().sigmoid())

    def confidences(self, batch: int) -> list[int]:
        """How sure the drafts of each request are: by a look-up, or else by the model."""
        modelled = [0] * batch
        if self.chances:
            by_request = torch.stack(self.chances, 1).tolist()
            modelled = [confidence_of_chances(chances) for chances in by_request]
        found = [0] * batch if self.matched is None else map(confidence_of_match, self.matched)
        return [one or other for one, other in zip(found, modelled, strict=True)]

    def kept_probs(self) -> dict[str, Tensor]:
        """`draft_prob_RKV` or `child_prob_RIV` after the step, if the program has one."""
        if self.child_prob_RIV is not None:
            return {"child_prob_RIV": self.child_prob_RIV}
        if not (self.probs and self.ctx.acceptance.reads_draft_probs):
            return {}
        kept_RKV = self.case.inputs["draft_prob_RKV"].clone()
        for request, row in enumerate(self.placed.row_index.tolist()):
            kept_RKV[row] = 0
            for number, probs_BV in enumerate(self.probs):
                kept_RKV[row, number] = probs_BV[request]
        return {"draft_prob_RKV": kept_RKV}

    def grow(
        self, argument: str, first: Sequence[int], drawn: Sequence[int], follow: Chain
    ) -> Tensor:
        """The drafts of a tree, [B, N]; keeps the rows' `parents`.

        Args:
            argument: what "propose" calls its input; follow: that input after a path, run as a
                chain; first, drawn: by request, the position of drafts of depth 1 in the drafter,
                and the one that they are drawn for.
        """
        kept, calls, grown = self.buffers, list(self.calls), []
        if are_drawn(self.ctx):
            self.child_prob_RIV = self.case.inputs["child_prob_RIV"].clone()
        for request in range(len(self.state_rows())):

            def after(path: Sequence[int], request: int = request) -> Any:
                self.buffers = {name: buffer.clone() for name, buffer in kept.items()}
                return self._after(request, path, argument, first[request], follow)

            grown.append(self._grow_one(request, drawn[request], after))
        self.buffers = kept
        self.calls = [*calls, *depth_calls(self.ctx, self.case, self.state_rows(), first)]
        drafts, parents = (
            torch.tensor(part, dtype=torch.int32, device=self.placed.start.device)
            for part in zip(*grown, strict=True)
        )
        self.parents = parents
        return drafts

    def _grow_one(self, request: int, drawn: int, after: Callable[[Sequence[int]], Any]) -> Any:
        """Drafts and parents of one request; keeps what its nodes' children were drawn from."""
        shape, row = self.ctx.config.tree, int(self.placed.row_index[request])
        assert shape is not None

        def best(path: Sequence[int]) -> Any:
            at, depth = drawn + len(path), len(path) + 1
            return rank_tokens(self.ctx, self.case, row, at, depth, after(path))

        grown = grow(shape, best, is_drawn=are_drawn(self.ctx))
        if self.child_prob_RIV is not None:
            sampled = is_sampled(self.ctx, self.case, row)
            (vocab_size,) = output_widths(self.ctx.target)
            self.child_prob_RIV[row] = child_distributions(
                self.ctx, grown[0], after, vocab_size, sampled=sampled
            )
        return grown

    def _after(
        self, request: int, path: Sequence[int], argument: str, first: int, follow: Chain
    ) -> Any:
        """What follows a path of a request, by the drafter: see `scored_tokens`."""
        row, inputs = self.state_rows()[request], self.case.inputs
        wanted = range(first, first + len(path))
        places = [place_tokens(self.config, inputs, [[row]], [[p]]) for p in wanted]
        head = follow(self, request, places, path)
        return self._scored(request, len(path), {argument: head})

    def _scored(self, request: int, depth: int, arguments: Mapping[str, Tensor]) -> Any:
        """What follows a path of this depth, by the drafter's head: see `scored_tokens`."""
        at = int(self.placed.row_index[request])
        call = "propose" if "propose" in self.ctx.draft else f"propose.{depth}"
        columns, kept = self._columns(call), self._kept_ids
        return scored_tokens(
            self.ctx, self.case, at, call, arguments, columns=columns, kept_ids=kept
        )

    def newest(self) -> list[int]:
        """The position of each request's last emitted token."""
        positions: list[int] = self._bonus.tolist()
        return positions

    def single(self, positions: Sequence[int]) -> Tokens:
        """One token per request, at these positions; none for requests that commit nothing."""
        rows = [[row] for row in self.state_rows()]
        return place_tokens(self.config, self.case.inputs, rows, [[p] for p in positions])

    def state_rows(self) -> list[int]:
        """The state row of each request of the call, -1 if it commits nothing."""
        name = "row_B" if self.case.phase == "decode" else "commit_row_R"
        rows: list[int] = self.case.inputs[name].tolist()
        return rows

    def progress(self, held: Sequence[int], kept: Sequence[int]) -> RequestProgress:
        """By request: the tokens in its states, and the position up to which the call's stay."""
        rows = self.state_rows()
        return RequestProgress(
            absorbed=dict(zip(rows, held, strict=True)),
            committed=dict(zip(rows, kept, strict=True)),
        )

    def ids(self, tokens: Tensor) -> Tensor:
        """[B] tokens as [B, 1] ids; PAD, which is not an id, becomes 0."""
        ids = [[max(token, 0)] for token in tokens.tolist()]
        return torch.tensor(ids, dtype=torch.int32, device=tokens.device)

    def _attention(self, tokens: Tokens, owner: str, sights: Sequence[Sight]) -> Attention:
        layers = self.ctx.drafter.target_layers.get("attention")

        def attend(call: int, args: tuple[Any, ...]) -> Tensor:
            layer = layers[call] if layers else call
            sight = sights[call % len(sights)] if sights else ()
            query, key, value, *options = args
            names = [f"cache.{owner}.{layer}.{half}" for half in ("key", "value")]
            placed, table = self._grouped(tokens, owner, window=int(options[1]))
            self.calls.append(AttentionCall(cache=names[0], tokens=placed, key=key))
            key_cache, value_cache = self.buffers[names[0]], self.buffers.get(names[1])
            parts = (
                query, key, None if value_cache is None else value, key_cache, value_cache,
                placed.slot, placed.row, placed.position, table,
            )  # fmt: skip
            width = value.shape[3]
            if len(args) > MASK_PLACE:
                scale, _, softcap, sinks, _, mask = options
                masked: Tensor = torch.ops.compilespec.masked_attention(
                    *parts, scale, softcap, sinks, width, mask
                )
                return masked
            paged: Tensor = torch.ops.compilespec.paged_attention(*parts, *options, width, *sight)
            return paged

        return attend

    def _grouped(self, tokens: Tokens, owner: str, *, window: int) -> tuple[Tokens, Tensor]:
        """The tokens in the KV group of a draft step, and its block table."""
        sizes = self.ctx.drafter.kv_block_sizes
        if not sizes:
            return tokens, self.case.inputs["block_table_RM"]
        group = KVGroup(block_size=sizes[int(owner.removeprefix("draft."))], window=window)
        table, size = group.table(self.config), group.block_size
        slots = [
            [int(table[row, p // size]) * size + p % size if row >= 0 else -1 for row, p in pairs]
            for pairs in (
                list(zip(*both, strict=True))
                for both in zip(tokens.row.tolist(), tokens.position.tolist(), strict=True)
            )
        ]
        slot = torch.tensor(slots, dtype=torch.int32, device=table.device)
        return dataclasses.replace(tokens, slot=slot), table


# The last arguments of `paged_attention`: paths, and the first positions if they are given.
Sight = tuple[Tensor, ...]
# What "propose" takes after a path, of one request: its places and tokens, run as a chain.
Chain = Callable[[Drafts, int, Sequence[Tokens], Sequence[int]], Tensor]
