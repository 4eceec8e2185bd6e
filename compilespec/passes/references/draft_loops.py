"""The draft loop driven from Python: the drafter's captured calls, one after the other.

Every call has the shape it has in the step; its attention and its recurrent layers are the step's
operators on metadata computed in plain Python, so that the result must be equal bit for bit.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from compilespec.errors import NotSupported
from compilespec.ops.sample import draw_reference, layout
from compilespec.ops.sample.probabilities import draw_weighted_reference
from compilespec.passes.context import PassContext
from compilespec.passes.kv_groups import KVGroup
from compilespec.passes.references.base import (
    Attention,
    AttentionCall,
    Before,
    Case,
    Tokens,
    Values,
)
from compilespec.passes.references.fragments import products, run_fragment
from compilespec.passes.references.grown_trees import grow, level_calls, rank_tokens
from compilespec.passes.references.kept_inputs import keep_pairs
from compilespec.passes.references.placement import place_chain, place_tokens
from compilespec.passes.references.recurrent_state import Progress, recurrent_operators
from compilespec.passes.sampling import wide_dtype
from compilespec.program import PAD
from compilespec.tracing.capture import output_widths

# Names of the buffers that loops read and write.
WRITTEN_BY_LOOPS = ("cache.draft", "recurrence.draft", "causal_conv.draft", "ring_")


def splice_draft_loop(before: Before, ctx: PassContext, case: Case) -> Values:
    """The drafts and writes of the method's kind of loop.

    Raises: NotSupported for a kind that has no reference.
    """
    loop = LOOP_REFERENCES.get(ctx.capabilities.kind)
    if loop is None:
        raise NotSupported(
            f"the draft loop {ctx.capabilities.kind!r} has no reference; known: "
            f"{', '.join(sorted(LOOP_REFERENCES))}"
        )
    return _drafted(loop, before(case.inputs), ctx, case)


def trim_draft_head(before: Before, ctx: PassContext, case: Case) -> Values:
    """The loop once more, from what was before it: its head computes the columns of
    `ctx.draft_ids` alone.
    """
    values = before(case.inputs)
    num_calls = 0 if case.key.kind == "replay" else ctx.num_attention_layers
    theirs = dataclasses.replace(
        values,
        roles={n: value for n, value in values.roles.items() if not n.startswith("draft_probs.")},
        buffers={n: b for n, b in values.buffers.items() if not n.startswith(WRITTEN_BY_LOOPS)},
        calls=values.calls[:num_calls],
    )
    loop = LOOP_REFERENCES[ctx.capabilities.kind]
    assert ctx.draft_ids is not None
    return _drafted(loop, theirs, ctx, case, ctx.draft_ids.to(ctx.config.device))


def _drafted(
    loop: Loop, values: Values, ctx: PassContext, case: Case, kept_ids: Tensor | None = None
) -> Values:
    """What the step has computed before its draft loop, and what the loop adds."""
    buffers = {
        name: case.inputs[name].clone() for name in ctx.buffers if name not in values.buffers
    }
    drafter = Drafts(ctx, case, buffers, values.roles, kept_ids)
    if ctx.config.num_draft_tokens:
        drafts = _widened(ctx, loop(drafter, values))
        buffers |= drafter.kept_probs()
    else:
        drafts = _widened(ctx, values.roles["target"].new_empty((len(drafter.state_rows()), 0)))
        if ctx.capabilities.kind == "recycled":
            keep_pairs(drafter.placed, values, buffers)
        if ctx.capabilities.kind == "direct" and "history_RL" in buffers:
            _history(drafter, values)
    made = {"drafts": drafts}
    if drafter.parents is not None:
        made["parents"] = drafter.parents
    return dataclasses.replace(
        values,
        roles={**values.roles, **made},
        buffers={**values.buffers, **buffers},
        calls=(*values.calls, *drafter.calls),
    )


def _widened(ctx: PassContext, drafts_BK: Tensor) -> Tensor:
    """As many columns as the largest K of the program has; PAD after the graph's own."""
    missing = ctx.config.num_row_tokens - 1 - drafts_BK.shape[1]
    pad = drafts_BK.new_full((drafts_BK.shape[0], missing), PAD)
    return torch.cat([drafts_BK, pad], 1)


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
        self._bonus = self.placed.start  # position of the last emitted token
        if case.phase == "decode":
            self._bonus = self._bonus + roles["num_emitted"]
        self._num_proposals = 0
        self.parents: Tensor | None = None  # of the rows of a tree, [B, N + 1]

    def call(
        self,
        name: str,
        tokens: Tokens | None = None,
        *,
        owner: str = "draft",
        progress: Progress | None = None,
        **arguments: Tensor,
    ) -> tuple[Tensor, ...]:
        """One captured call; with `tokens` its attention reads and writes the caches of `owner`,
        with `progress` its recurrent layers read and write their states.
        """
        mixers = {} if tokens is None else {"attention": self._attention(tokens, owner)}
        if tokens is not None and progress is not None:
            mixers |= recurrent_operators(self.buffers, owner, tokens, progress)
        outputs = run_fragment(self.ctx.draft[name], arguments, mixers, self._columns(name))
        if not name.startswith("propose"):
            return outputs
        if self._kept_ids is not None and len(outputs) > 1:
            outputs = (*outputs, self._kept_ids)
        return (self._draft(*outputs),)

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

    def kept_probs(self) -> dict[str, Tensor]:
        """The rows of `draft_prob_RKV` after the step, if the program has them."""
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
            argument: what "propose" calls its input; first, drawn: by request, the position of
                drafts of depth 1 in the drafter, and the one that they are drawn for.
            follow: that input after a path, run as a chain.
        """
        shape, kept, calls = self.ctx.config.tree, self.buffers, list(self.calls)
        assert shape is not None
        grown = []
        for request, row in enumerate(self.state_rows()):

            def best(path: Sequence[int], request: int = request, row: int = row) -> Any:
                self.buffers = {name: buffer.clone() for name, buffer in kept.items()}
                places = [
                    place_tokens(self.config, self.case.inputs, [[row]], [[first[request] + d]])
                    for d in range(len(path))
                ]
                head = follow(self, request, places, path)
                state_row = int(self.placed.row_index[request])
                at = drawn[request] + len(path)
                return rank_tokens(self.ctx, self.case, state_row, at, argument, head)

            grown.append(grow(shape, best))
        self.buffers = kept
        self.calls = [*calls, *level_calls(self.ctx, self.case, self.state_rows(), first)]
        device = self.placed.start.device
        drafts, parents = zip(*grown, strict=True)
        self.parents = torch.tensor(parents, dtype=torch.int32, device=device)
        return torch.tensor(drafts, dtype=torch.int32, device=device)

    def single(self, positions: Sequence[int]) -> Tokens:
        """One token per request, at these positions; none for requests that commit nothing."""
        rows = [[row] for row in self.state_rows()]
        return place_tokens(self.config, self.case.inputs, rows, [[p] for p in positions])

    def state_rows(self) -> list[int]:
        """The state row of each request of the call, -1 if it commits nothing."""
        name = "row_B" if self.case.phase == "decode" else "commit_row_R"
        rows: list[int] = self.case.inputs[name].tolist()
        return rows

    def progress(self, held: Sequence[int], kept: Sequence[int]) -> Progress:
        """By request: the tokens in its states, and the position up to which the call's stay."""
        rows = self.state_rows()
        return Progress(
            absorbed=dict(zip(rows, held, strict=True)),
            committed=dict(zip(rows, kept, strict=True)),
        )

    def ids(self, tokens: Tensor) -> Tensor:
        """[B] tokens as [B, 1] ids; PAD, which is not an id, becomes 0."""
        ids = [[max(token, 0)] for token in tokens.tolist()]
        return torch.tensor(ids, dtype=torch.int32, device=tokens.device)

    def _attention(self, tokens: Tokens, owner: str) -> Attention:
        def attend(layer: int, args: tuple[Any, ...]) -> Tensor:
            query, key, value, *options = args
            names = [f"cache.{owner}.{layer}.{half}" for half in ("key", "value")]
            placed, table = self._grouped(tokens, owner, window=int(options[1]))
            self.calls.append(AttentionCall(cache=names[0], tokens=placed, key=key))
            key_cache, value_cache = self.buffers[names[0]], self.buffers.get(names[1])
            result: Tensor = torch.ops.compilespec.paged_attention(
                query, key, None if value_cache is None else value, key_cache, value_cache,
                placed.slot, placed.row, placed.position, table, *options, value.shape[3],
            )  # fmt: skip
            return result

        return attend

    def _grouped(self, tokens: Tokens, owner: str, *, window: int) -> tuple[Tokens, Tensor]:
        """The tokens in the KV group of a draft step, and its block table."""
        sizes = self.ctx.kv_block_sizes
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


def recycled(draft: Drafts, values: Values) -> Tensor:
    """One pass over all rows; then single tokens, each on the hidden state of the pass before."""
    roles, tokens = values.roles, draft.placed.tokens
    (hidden,) = draft.call("combine", aux=roles["aux"])
    head, hidden = draft.call(
        "forward", tokens, input_ids=roles["draft_ids"], position_ids=tokens.position, hidden=hidden
    )
    head, hidden, start = _committed_rows(draft, roles, head, hidden)
    if draft.ctx.config.tree is not None:
        return draft.grow(
            "head_input", start, [s + 1 for s in start], _recycled_chain(head, hidden)
        )
    drafts = [*draft.call("propose", head_input=head)]
    for step in range(draft.config.num_draft_tokens - 1):
        tokens = draft.single([position + step for position in start])
        head, hidden = draft.call(
            "forward", tokens, input_ids=draft.ids(drafts[-1]), position_ids=tokens.position,
            hidden=hidden,
        )  # fmt: skip
        drafts += draft.call("propose", head_input=head[:, 0])
    return torch.stack(drafts, 1)


def _recycled_chain(head_BD: Tensor, hidden_B1D: Tensor) -> Chain:
    def follow(draft: Drafts, request: int, tokens: Sequence[Tokens], ids: Sequence[int]) -> Tensor:
        one = slice(request, request + 1)
        head, hidden = head_BD[one], hidden_B1D[one]
        for place, token in zip(tokens, ids, strict=True):
            fed = draft.ids(head.new_tensor([token], dtype=torch.int32))
            heads, hidden = draft.call(
                "forward", place, input_ids=fed, position_ids=place.position, hidden=hidden
            )
            head = heads[:, 0]
        return head

    return follow


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


def windowed(draft: Drafts, values: Values) -> Tensor:
    """Each module over the pairs that end at the last committed row, request by request."""
    run = _window if draft.case.phase == "decode" else _packed
    return torch.stack(run(draft, values.roles), 1)


def _window(draft: Drafts, roles: Mapping[str, Tensor]) -> list[Tensor]:
    count, window = draft.config.num_draft_tokens, draft.config.num_verify_tokens
    starts, emitted = draft.placed.start.tolist(), roles["num_emitted"].tolist()
    states, ids = [], []
    for request, row in enumerate(draft.placed.row_index.tolist()):
        ring = (draft.buffers["ring_hidden_RKD"], draft.buffers["ring_ids_RK"])
        first = emitted[request] - 1
        pairs = [
            torch.cat([kept[row], new[request]])[first : first + window]
            for kept, new in zip(ring, (roles["aux"], roles["draft_ids"]), strict=True)
        ]
        states.append(pairs[0])
        ids.append(pairs[1])
    for request, row in enumerate(draft.placed.row_index.tolist()):
        draft.buffers["ring_hidden_RKD"][row] = states[request][1:]
        draft.buffers["ring_ids_RK"][row] = ids[request][1:]
    drafts: list[Tensor] = []
    hidden, following = torch.stack(states), torch.stack(ids)
    for step in range(count):
        num_rows = following.shape[1]
        positions = [
            [start + n - num_rows + j for j in range(num_rows)]
            for start, n in zip(starts, emitted, strict=True)
        ]
        rows = [[row] * num_rows for row in draft.state_rows()]
        tokens = place_tokens(draft.config, draft.case.inputs, rows, positions)
        head, recycled = draft.call(
            f"forward.{step}", tokens, owner=f"draft.{step}", input_ids=following,
            position_ids=tokens.position, hidden=hidden,
        )  # fmt: skip
        drafts += draft.call(f"propose.{step}", head_input=head[:, -1])
        following = torch.cat([following, draft.ids(drafts[-1])], 1)
        if draft.ctx.chain == "target_rows":
            hidden = torch.cat([hidden, recycled[:, -1:]], 1)
        else:
            following, hidden = following[:, 1:], recycled
    return drafts


def _packed(draft: Drafts, roles: Mapping[str, Tensor]) -> list[Tensor]:
    inputs, count = draft.case.inputs, draft.config.num_draft_tokens
    last, owners = inputs["last_R"].tolist(), inputs["owner_T"].tolist()
    drafts: list[Tensor] = []
    hidden, following = roles["aux"], roles["draft_ids"]
    for row, end in zip(draft.placed.row_index.tolist(), last, strict=True):
        for back in range(count):
            inside = int(inputs["position_T"][end]) >= back
            place = max(end - back, 0)
            for name, source in (("ring_hidden_RKD", hidden), ("ring_ids_RK", following)):
                kept = source[0, place] if inside else torch.zeros_like(source[0, 0])
                draft.buffers[name][row, count - 1 - back] = kept
    for step in range(count):
        tokens = draft.placed.tokens
        head, recycled = draft.call(
            f"forward.{step}", tokens, owner=f"draft.{step}", input_ids=following,
            position_ids=tokens.position, hidden=hidden,
        )  # fmt: skip
        drafts += draft.call(
            f"propose.{step}", head_input=torch.stack([head[0, end] for end in last])
        )
        moved_ids, moved_hidden = following.clone(), hidden.clone()
        for place, owner in enumerate(owners):
            is_end, follower = place == last[owner], (place + 1) % len(owners)
            moved_ids[0, place] = (
                max(int(drafts[-1][owner]), 0) if is_end else following[0, follower]
            )
            moved_hidden[0, place] = recycled[0, place] if is_end else hidden[0, follower]
        following = moved_ids
        hidden = moved_hidden if draft.ctx.chain == "target_rows" else recycled
    return drafts


def unshifted(draft: Drafts, values: Values) -> Tensor:
    """A separate model: a pass over the tokens at their own positions, then single-token passes."""
    config, roles = draft.config, values.roles
    start = draft.placed.start.tolist()
    if draft.case.phase == "decode":
        counts = roles["num_emitted"].tolist()
        rows = [[row] * config.num_verify_tokens for row in draft.state_rows()]
        positions = [[s + 1 + j for j in range(config.num_verify_tokens)] for s in start]
        tokens = place_tokens(config, draft.case.inputs, rows, positions)
        held = [s + 1 for s in start]
        kept = [s + n for s, n in zip(held, counts, strict=True)]
        progress = draft.progress(held, kept)
        (logits,) = _model(draft, tokens, roles["target"].clamp(min=0), progress)
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


def _model_chain(logits_BV: Tensor) -> Chain:
    def follow(draft: Drafts, request: int, tokens: Sequence[Tokens], ids: Sequence[int]) -> Tensor:
        last = logits_BV[request : request + 1]
        for place, token in zip(tokens, ids, strict=True):
            fed = draft.ids(last.new_tensor([token], dtype=torch.int32))
            (logits,) = _model(draft, place, fed, draft.progress([0], [0]))
            last = logits[:, 0]
        return last

    return follow


def _whole_prompts(tokens: Tokens) -> Progress:
    """The states hold what comes before each request's tokens, which are there to stay."""
    first: dict[int, int] = {}
    pairs = zip(tokens.row.flatten().tolist(), tokens.position.flatten().tolist(), strict=True)
    for row, position in pairs:
        first.setdefault(row, position)
    return Progress(absorbed=first, committed=dict.fromkeys(first, sys.maxsize))


def _model(draft: Drafts, tokens: Tokens, ids: Tensor, progress: Progress) -> tuple[Tensor, ...]:
    if "translate" in draft.ctx.draft:
        (ids,) = draft.call("translate", input_ids=ids)
    return draft.call(
        "forward", tokens, input_ids=ids, position_ids=tokens.position, progress=progress
    )


def direct(draft: Drafts, values: Values) -> Tensor:
    """One call on its inputs: the request's tokens so far, their number, a hidden state."""
    roles, inputs, config = values.roles, draft.case.inputs, draft.config
    starts, rows = draft.placed.start.tolist(), draft.placed.row_index.tolist()
    is_decode = draft.case.phase == "decode"
    counts = roles["num_emitted"].tolist() if is_decode else [0] * len(rows)
    lengths = [min(s + n + 1, config.max_seq_len) for s, n in zip(starts, counts, strict=True)]
    reads = {entry.name for entry in draft.ctx.draft["draft"].inputs}
    arguments: dict[str, Tensor] = {}
    if "length_B" in reads:
        arguments["length_B"] = torch.tensor(
            lengths, dtype=torch.int32, device=inputs["block_table_RM"].device
        )
    if "history_BL" in reads:
        history = _history(draft, values)
        arguments["history_BL"] = torch.stack([history[row] for row in rows])
        for request, length in enumerate(lengths):
            is_live = rows[request] < config.max_batch_size
            arguments["history_BL"][request, length if is_live else 0 :] = PAD
    if "past_ML" in reads:
        arguments["past_ML"] = draft.buffers["past_ML"]
    if "hidden_BE" in reads:
        aux = torch.cat([roles[f"aux.{i}"] for i in range(len(draft.ctx.aux_layers))], -1)
        picked = (
            [(b, n - 1) for b, n in enumerate(counts)]
            if is_decode
            else [(0, last) for last in inputs["last_R"].tolist()]
        )
        arguments["hidden_BE"] = torch.stack([aux[b, row] for b, row in picked])
    (drafts,) = draft.call("draft", **arguments)  # type: ignore[arg-type]
    return drafts


def _history(draft: Drafts, values: Values) -> Tensor:
    """The history rows, with the tokens of this step written into them."""
    history, inputs = draft.buffers["history_RL"], draft.case.inputs
    is_decode = draft.case.phase == "decode"
    if not is_decode:
        packed = (inputs[name].tolist() for name in ("ids_T", "position_T", "row_T"))
        for token, position, row in zip(*packed, strict=True):
            history[row, position] = token  # -1, the spare row, is the last one
    starts, rows = draft.placed.start.tolist(), draft.placed.row_index.tolist()
    for row, start, new in zip(rows, starts, values.roles["emitted"].tolist(), strict=True):
        for j, token in enumerate(new):
            position = start + j + int(is_decode)
            if token != PAD and position < draft.config.max_seq_len:
                history[row, position] = token
    return history


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
    aux = torch.cat([roles[f"aux.{i}"] for i in range(len(draft.ctx.aux_layers))], -1)
    hidden = torch.stack([aux[request, row : row + 1] for request, row in picked])
    (hidden,) = draft.call("combine", aux=hidden)
    tokens = draft.single([length - 1 for length in start])
    tokens = dataclasses.replace(tokens, slot=torch.full_like(tokens.slot, -1))
    drafts: list[Tensor] = []
    for _ in range(draft.config.num_draft_tokens):
        arguments = {
            "input_ids": draft.ids(token), "position_ids": tokens.position, "hidden": hidden
        }  # fmt: skip
        attend = {"attention": _on_target(draft, values, tokens)}
        head, hidden = run_fragment(draft.ctx.draft["forward"], arguments, attend)
        (token,) = draft.call("propose", head_input=head[:, 0])
        drafts.append(token)
    return torch.stack(drafts, 1)


def _on_target(draft: Drafts, values: Values, tokens: Tokens) -> Attention:
    """Attention on copies of the target's caches, so that its writes have no effect."""

    def attend(call: int, args: tuple[Any, ...]) -> Tensor:
        layer = draft.ctx.kv_layers[call]
        names = [f"cache.target.{layer}.{half}" for half in ("key", "value")]
        caches = [values.buffers[name].clone() for name in names]
        draft.calls.append(AttentionCall(cache=names[0], tokens=tokens))
        query, key, value, *options = args
        result: Tensor = torch.ops.compilespec.paged_attention(
            query, key, value, *caches, tokens.slot, tokens.row, tokens.position,
            draft.case.inputs["block_table_RM"], *options,
        )  # fmt: skip
        return result

    return attend


def callback(draft: Drafts, values: Values) -> Tensor:
    """No drafts: the host writes them before the next call."""
    shape = (len(draft.state_rows()), draft.config.num_draft_tokens)
    return torch.full(shape, PAD, dtype=torch.int32, device=values.roles["target"].device)


Loop = Callable[[Drafts, Values], Tensor]
Chain = Callable[[Drafts, int, Sequence[Tokens], Sequence[int]], Tensor]
LOOP_REFERENCES: Mapping[str, Loop] = {
    "recycled": recycled,
    "windowed": windowed,
    "unshifted": unshifted,
    "direct": direct,
    "shared_kv": shared_kv,
    "callback": callback,
}
