"""Random calls of a graph, as hostile as is legal.

Rows and blocks in no order, ragged lengths up to the maximum, padded rows in the middle of a batch,
chunks that begin and end anywhere; caches hold NaN wherever no step may have written.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compilespec.errors import SpecError
from compilespec.inspect.history import history_mixers
from compilespec.inspect.interpret import Stage
from compilespec.ops.device import traits_of
from compilespec.ops.sample import layout
from compilespec.passes.context import PassContext
from compilespec.passes.references import Case, rope_arguments
from compilespec.passes.references.placement import place_call
from compilespec.passes.references.recurrent_state import recurrent_layers, target_progress
from compilespec.passes.splice.read_rope_offsets import OFFSETS_T
from compilespec.passes.splice.sights import AHEAD
from compilespec.program import NUM_KEPT, PAD, BufferSpec

SPARE_BLOCKS = 2  # blocks that no table points to
FAR = 256  # tokens: a context that is long to attend to in plain Python


@dataclass(frozen=True, kw_only=True)
class _Row:
    """A running request: its state row, and how many of its tokens are in the cache."""

    row: int
    length: int
    backlog: int = 0  # the last tokens that its drafter has not seen


def random_cases(
    ctx: PassContext,
    vocab_size: int,
    start: Stage,
    *,
    batch_sizes: Sequence[int] | None = None,
    seed: int = 0,
    whole_caches: bool = False,
    plain: bool = False,
) -> list[Case]:
    """Cases of one graph, smallest batch first.

    Args:
        start: the target alone (ids and positions to logits); it says which drafts to accept.
        batch_sizes: None takes 1, 2 and the largest; of prompts that are prefilled alone, 1.
        whole_caches: caches of the program's size instead of just as many blocks as are used.
        plain: every request asks for the argmax, and nothing else.
    """
    config = ctx.config
    sizes = batch_sizes or sorted({1, min(2, config.max_batch_size), config.max_batch_size})
    if ctx.phase == "prefill" and config.prefills_one:
        sizes = [1]
    make = _decode_case if ctx.phase == "decode" else _prefill_case
    draws = [_Draw(ctx, vocab_size, seed * 1000 + size, whole_caches, plain) for size in sizes]
    return [
        with_target_inputs(ctx, make(draw, size, start))
        for draw, size in zip(draws, sizes, strict=True)
    ]


def with_target_inputs(ctx: PassContext, case: Case) -> Case:
    """The case with the ids and positions that the target alone reads, before `read_state`."""
    placed = place_call(ctx.config, case)
    own = {"input_ids": placed.ids, "position_ids": placed.tokens.position}
    own |= rope_arguments(ctx, case)
    return dataclasses.replace(case, inputs={**case.inputs, **own})


def _decode_case(draw: _Draw, batch_size: int, start: Stage) -> Case:
    """`batch_size` rows, of which one is padded where there are more than two."""
    ctx, config = draw.ctx, draw.ctx.config
    num_padded = int(batch_size > 2)
    longest = config.max_seq_len
    # near the end of the sequence, at it, its first token; the rest anywhere
    lengths = [longest - 2, 1, longest - config.num_draft_tokens - 1, longest, 2]
    if longest > FAR:  # histories so long are costly: one of them is enough
        lengths[2:4] = [FAR // 2 - 1, FAR // 2]
    shortest = 2 if ctx.key.kind == "replay" else 1  # the prompt, and what a step of K = 0 gave
    lengths = [max(shortest, length) for length in lengths]
    if batch_size == 1:
        lengths = [min(longest - 1, 2 * config.block_size + 1)]
    lengths += [
        draw.rng.randint(shortest, min(longest, 4 * config.block_size))
        for _ in range(batch_size - len(lengths))
    ]
    rows = draw.rng.sample(range(config.max_batch_size), batch_size - num_padded)
    running = [
        _Row(row=row, length=length, backlog=draw.backlog(length))
        for row, length in zip(rows, lengths, strict=False)
    ]
    inputs = draw.state(running)
    row_B = list(rows)
    for _ in range(num_padded):
        row_B.insert(len(row_B) // 2, PAD)
    inputs["row_B"] = draw.int32(row_B)
    if ctx.key.kind == "replay":
        backlogs = {request.row: request.backlog for request in running}
        inputs["backlog_B"] = draw.int32([backlogs.get(row, 0) for row in row_B])
    case = Case(
        name=f"{batch_size} rows{f', {num_padded} padded' if num_padded else ''}",
        key=ctx.key,
        batch_size=batch_size,
        inputs=inputs,
    )
    if ctx.key.kind != "replay":  # a step that judges none
        _match_drafts(ctx, case, start, draw.vocab_size)
    return case


def _match_drafts(ctx: PassContext, case: Case, start: Stage, vocab_size: int) -> None:
    """Rewrite the drafts in place: in some rows the first m equal the target's tokens, the next one
    differs, and those after it are equal again; m differs from row to row.  Guides allow those m.
    """
    num_drafts, tokens_RS = ctx.config.num_draft_tokens, case.inputs["tokens_RS"]
    if ctx.config.tree is not None:
        _match_tree(ctx, case, start, vocab_size)
        return
    for draft in range(1, num_drafts + 1):
        best_BS = target_logits(ctx, case, start).argmax(-1)
        for index, row in enumerate(case.inputs["row_B"].tolist()):
            if row < 0:
                continue
            matching = (index + case.batch_size) % (num_drafts + 1)
            wrong = int(draft == matching + 1)
            best = int(best_BS[index, draft - 1])
            tokens_RS[row, draft] = (best + wrong) % vocab_size
            if "mask_RSW" in case.inputs and draft <= matching:
                word, bit = divmod(best, 32)
                case.inputs["mask_RSW"][row, draft - 1, word] |= (-1 if bit == 31 else 1) << bit


def _match_tree(ctx: PassContext, case: Case, start: Stage, vocab_size: int) -> None:
    """The same for a tree: down to some depth exactly one child of each node is the target's
    token.
    """
    num_drafts, tokens_RS = ctx.config.num_draft_tokens, case.inputs["tokens_RS"]
    paths = place_call(ctx.config, case).paths
    for depth in range(1, num_drafts + 1):
        best_BS = target_logits(ctx, case, start).argmax(-1)
        for index, row in enumerate(case.inputs["row_B"].tolist()):
            if row < 0:
                continue
            matching = (index + case.batch_size) % (num_drafts + 1)
            seen: dict[int, int] = {}  # children so far, by parent
            for path in reversed([path for path in paths[index] if len(path) == depth + 1]):
                parent, node = path[-2:]
                seen[parent] = seen.get(parent, -1) + 1
                wrong = seen[parent] + int(depth > matching)
                best = int(best_BS[index, parent])
                tokens_RS[row, node] = (best + wrong) % vocab_size
                if "mask_RSW" in case.inputs and not wrong:
                    word, bit = divmod(best, 32)
                    case.inputs["mask_RSW"][row, parent, word] |= (-1 if bit == 31 else 1) << bit


def target_logits(ctx: PassContext, case: Case, start: Stage) -> Tensor:
    """The target's logits over dense histories: no pass had a hand in them."""
    mixers = dict(history_mixers(ctx, case))
    if ctx.num_recurrent_markers:
        buffers = {name: case.inputs[name].clone() for name in ctx.buffers if ".target." in name}
        tokens = place_call(ctx.config, case).tokens
        mixers |= recurrent_layers(buffers, "target", tokens, target_progress(ctx, case))
    return start(with_target_inputs(ctx, case).inputs, mixers).outputs["logits"]


def _prefill_case(draw: _Draw, batch_size: int, start: Stage) -> Case:
    """Chunks of `batch_size` requests: whole prompts, first, middle and last parts, up to the
    maximum length; two padded tokens at the end where there are several.
    """
    config = draw.ctx.config
    longest, budget = config.max_seq_len, config.max_prefill_tokens - 2
    # (start, tokens, finished)
    shapes = [(0, 7, True), (longest - 3, 3, True), (0, 4, False), (5, 1, False), (3, 6, True)]
    if batch_size == 1:
        shapes = [(2, 5, True)]
    while len(shapes) < batch_size:
        shapes.append((draw.rng.randrange(9), draw.rng.randint(1, 5), draw.rng.random() < 0.7))
    rows = draw.rng.sample(range(config.max_batch_size), batch_size)
    packed: dict[str, list[int]] = {
        name: []
        for name in ("ids_T", "next_T", "position_T", "row_T", "owner_T", "last_R", "commit_row_R")
    }
    running = []
    for owner, (row, (begin, count, finished)) in enumerate(zip(rows, shapes, strict=False)):
        begin = max(0, min(begin, longest - 1))
        count = max(1, min(count, longest - begin, budget // batch_size))
        running.append(_Row(row=row, length=begin))
        ids = [draw.rng.randrange(draw.vocab_size) for _ in range(count + 1)]
        packed["ids_T"] += ids[:-1]
        packed["next_T"] += [*ids[1:-1], PAD if finished else ids[-1]]
        packed["position_T"] += range(begin, begin + count)
        packed["row_T"] += [row] * count
        packed["owner_T"] += [owner] * count
        packed["last_R"].append(len(packed["ids_T"]) - 1)
        packed["commit_row_R"].append(row if finished else PAD)
    num_padded = 2 if batch_size > 1 else 0
    for name, value in (("ids_T", 0), ("next_T", 0), ("position_T", 0), ("row_T", PAD),
                        ("owner_T", 0)):  # fmt: skip
        packed[name] += [value] * num_padded
    if "embeds_PD" in draw.ctx.buffers:  # every other token
        count = len(packed["ids_T"]) - num_padded
        rows = draw.rng.sample(range(count), count)
        given = [row if token % 2 else PAD for token, row in enumerate(rows)]
        packed["given_T"] = [*given, *[PAD] * num_padded]
    if draw.ctx.config.features.sees_ahead:  # as far as the chunk; what follows it is not written
        packed[AHEAD] = [0] * len(packed["ids_T"])
        for place, owner in enumerate(packed["owner_T"][: len(packed["ids_T"]) - num_padded]):
            packed[AHEAD][place] = draw.rng.randint(0, packed["last_R"][owner] - place)
    if draw.ctx.target.has_rope_offsets:
        for name in OFFSETS_T:
            packed[name] = [draw.rng.randint(-9, 9) for _ in packed["ids_T"]]
    inputs = draw.state(running) | {name: draw.int32(values) for name, values in packed.items()}
    num_tokens = len(packed["ids_T"])
    return Case(
        name=f"{batch_size} prompts, {num_tokens} tokens"
        + (f", {num_padded} padded" if num_padded else ""),
        key=draw.ctx.key,
        batch_size=batch_size,
        inputs=inputs,
    )


_ASKED = ("sampling_RF", "sampling_RI", "mask_RSW")  # the requests of sampled and guided rows


class _Draw:
    """Random state for given requests."""

    def __init__(
        self, ctx: PassContext, vocab_size: int, seed: int, whole_caches: bool, plain: bool
    ) -> None:
        if traits_of(ctx.config.device).is_meta:
            raise SpecError("a program on meta tensors has no numbers to verify; load the weights")
        self.ctx, self.vocab_size, self._whole, self._plain = ctx, vocab_size, whole_caches, plain
        self.rng = random.Random(seed)
        self._generator = torch.Generator(device=ctx.config.device).manual_seed(seed)

    def backlog(self, length: int) -> int:
        """The backlog of a catch-up step: from one token to as many as are kept."""
        if self.ctx.key.kind != "replay":
            return 0
        return self.rng.randint(1, min(length - 1, NUM_KEPT))

    def _tree(self, num_rows: int) -> list[int]:
        """Parents of a random tree, not deeper than the program's."""
        parents, depths = [0], [0]
        for row in range(1, num_rows):
            known = [i for i in range(row) if depths[i] < self.ctx.config.num_draft_tokens]
            # chains are likely, for a tree of random parents is flat
            parents.append(known[-1] if self.rng.random() < 0.5 else self.rng.choice(known))
            depths.append(depths[parents[-1]] + 1)
        return parents

    def int32(self, values: Sequence[Any]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.ctx.config.device)

    def state(self, running: Sequence[_Row]) -> dict[str, Tensor]:
        """Every buffer: tables in random order, random tokens, NaN where nothing was written."""
        config = self.ctx.config
        needs = [
            -(-min(config.max_seq_len, r.length + self._reach()) // config.block_size)
            for r in running
        ]
        num_blocks = config.num_blocks if self._whole else sum(needs) + SPARE_BLOCKS
        free = self.rng.sample(range(num_blocks), num_blocks)
        if sum(needs) > num_blocks:
            raise SpecError(
                f"the cases need {sum(needs)} cache blocks and the program has {num_blocks}; "
                f"verify fewer rows: batch_sizes="
            )
        inputs = {name: self._buffer(spec, num_blocks) for name, spec in self.ctx.buffers.items()}
        inputs["block_table_RM"].fill_(PAD)
        for request, need in zip(running, needs, strict=True):
            blocks = self.int32([free.pop() for _ in range(need)])
            inputs["block_table_RM"][request.row, :need] = blocks
            inputs["seq_len_R"][request.row] = request.length
            if "absorbed_R" in inputs:
                inputs["absorbed_R"][request.row] = request.length - self._num_kept(request)
            self._write_caches(inputs, blocks, request)
        return inputs

    def _num_kept(self, request: _Row) -> int:
        """Accepted drafts of the last step, which recurrent states do not hold yet."""
        most = min(self.ctx.config.num_row_tokens - 1, request.length)
        return self.rng.randint(0, most) if self.ctx.phase == "decode" else 0

    def _reach(self) -> int:
        """Positions past the length that a call may write: 2K+1 in decode, a chunk in prefill."""
        return 2 * self.ctx.config.num_draft_tokens + 1 + (7 if self.ctx.phase == "prefill" else 0)

    def _buffer(self, spec: BufferSpec, num_blocks: int) -> Tensor:
        config = self.ctx.config
        if spec.kind == "cache" and not self._is_shared(spec):
            return spec.empty(config.device).copy_(self._normal(spec.shape, spec.dtype))
        if spec.kind == "cache":
            small = dataclasses.replace(spec, shape=(num_blocks, *spec.shape[1:]))
            return small.empty(config.device).fill_(float("nan"))
        if spec.name == "withheld_R":  # every other request has all drafts but one judged
            return self.int32([row % 2 for row in range(spec.shape[0])])
        if spec.name in _ASKED and config.dtype == torch.float64 and not self._plain:
            return self._sampling(spec)
        if spec.name == "parents_RS":
            return self.int32([self._tree(spec.shape[1]) for _ in range(spec.shape[0])])
        if spec.name in ("draft_prob_RKV", "child_prob_RIV"):
            return self._normal(spec.shape, spec.dtype).softmax(-1)
        if spec.name == "adapter_R":
            assert config.adapters is not None, "rows have places where there are adapters"
            most = config.adapters.num_places
            return self.int32([row % (most + 1) - 1 for row in range(spec.shape[0])])
        if spec.name == "rope_delta_R":
            return self.int32([row % 7 - 4 for row in range(spec.shape[0])])
        if spec.name == "long_rope_R":
            return self.int32([row % 2 for row in range(spec.shape[0])])
        if spec.name in ("embeds_PD", "deep_PE"):
            return self._normal(spec.shape, spec.dtype)
        if spec.name.startswith("adapter."):
            return self._normal(spec.shape, spec.dtype) / spec.shape[-1] ** 0.5
        if spec.by_host:  # no request asks for anything
            return torch.full(spec.shape, spec.fill, dtype=spec.dtype, device=config.device)
        if spec.dtype.is_floating_point:
            return self._normal(spec.shape, spec.dtype)
        is_length = spec.name in ("seq_len_R", "absorbed_R")
        high = config.max_seq_len if is_length else self.vocab_size
        return torch.randint(
            1, high, spec.shape, dtype=spec.dtype, device=config.device, generator=self._generator
        )

    def _sampling(self, spec: BufferSpec) -> Tensor:
        """Parameters in float64, where rounding flips no choice: every third request is sampled,
        every other one has a guide.
        """
        device = self.ctx.config.device
        if spec.name == "mask_RSW":
            return torch.randint(
                -(2**31), 2**31, spec.shape, dtype=spec.dtype, device=device,
                generator=self._generator,
            )  # fmt: skip
        rows = torch.zeros(spec.shape, dtype=spec.dtype, device=device)
        if spec.name == "sampling_RI":
            rows[1::3, layout.SEED_LOW] = self.rng.randrange(2**31)
            rows[1::3, layout.TOP_K] = 20
            rows[::2, layout.FLAGS] = layout.GUIDE
        else:
            rows[1::3, layout.TEMPERATURE] = 0.9
            rows[1::3, layout.TOP_P] = 0.8
        return rows

    def _is_shared(self, spec: BufferSpec) -> bool:
        """True where the cache is laid out in the program's blocks, not in those of a KV group."""
        return not self.ctx.drafter.kv_block_sizes or spec.name.startswith("cache.target.")

    def _write_caches(self, inputs: dict[str, Tensor], blocks: Tensor, request: _Row) -> None:
        """Keys and values at the positions that earlier steps wrote."""
        unshifted = self.ctx.capabilities.kind in ("unshifted", "masked")
        for name, spec in self.ctx.buffers.items():
            if spec.kind != "cache" or not self._is_shared(spec):
                continue
            count = request.length
            if not name.startswith("cache.target."):
                # an unshifted drafter has been fed the last emitted token as well
                count += int(unshifted and count > 0) - request.backlog
            count = min(count, len(blocks) * spec.shape[1])
            at = torch.arange(count, device=blocks.device)
            cells = blocks.long()[at // spec.shape[1]] * spec.shape[1] + at % spec.shape[1]
            inputs[name].flatten(0, 1)[cells] = self._normal((count, *spec.shape[2:]), spec.dtype)

    def _normal(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        device = self.ctx.config.device
        return torch.randn(tuple(shape), generator=self._generator, device=device).to(dtype)
