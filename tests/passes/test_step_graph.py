"""The real step graphs against the plain-Python model of their bookkeeping (support/step_model.py).

Two drafters go over the same schedules.  "eagle3" is a random head.  "provenance" computes nothing:
its hidden states and its cache entries say what they were computed from (position and token of the
hidden state, how often it was recycled, the token paired with it), so that the cache of a real run
can be compared with the model's entry by entry.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from compilespec.program import Lowered
from compilespec.runtime.executor import PrefillChunk
from compilespec.runtime.step_runner import StepRunner
from tests.support.models import VOCAB
from tests.support.provenance import (
    BLOCK_SIZE,
    MAX_ROWS,
    MAX_SEQ_LEN,
    NUM_DRAFT_TOKENS,
    NUM_LAYERS,
    build,
)
from tests.support.step_model import Forced, Pair, RowRecord, StepModel, Toy


@pytest.fixture(scope="module", params=["provenance", "eagle3"])
def lowered(request) -> Lowered:
    return build(request.param)


def poisoned_runner(lowered: Lowered, buckets: Sequence[int] | None = None) -> StepRunner:
    """Caches start as NaN: whoever reads a slot that nobody wrote gets NaN for a result."""
    runner = StepRunner(lowered, buckets=buckets)
    for name, buffer in runner.buffers.items():
        if name.startswith("cache."):
            buffer.fill_(float("nan"))
    return runner


# --- the operator trace ---


@dataclass
class AttentionCall:
    slots: Tensor
    rows: Tensor
    positions: Tensor


@dataclass
class OperatorTrace(TorchDispatchMode):
    """Every operator of a step; of attention calls the metadata, of embeddings the ids."""

    operators: list[str] = field(default_factory=list)
    attention: list[AttentionCall] = field(default_factory=list)
    ids: list[Tensor] = field(default_factory=list)
    argmax: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __hash__(self) -> int:
        return id(self)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.operators.append(str(func))
        if func is torch.ops.compilespec.paged_attention.default:
            assert all(part.dtype == torch.int32 for part in args[5:9])
            self.attention.append(AttentionCall(*(part.clone() for part in args[5:8])))
        elif func is torch.ops.aten.embedding.default:
            self.ids.append(args[1].clone())
        elif func is torch.ops.aten.argmax.default:
            self.argmax.append(result.clone())
        return result


class Twin:
    """The step model and the real runner, side by side, over one schedule."""

    def __init__(self, lowered: Lowered, *, padded: bool = False) -> None:
        self.runner = poisoned_runner(lowered, buckets=(MAX_ROWS,) if padded else None)
        self.lowered = lowered
        self.has_provenance = "draft.follower" in lowered.program.weights
        self.model = StepModel(
            "recycled", NUM_DRAFT_TOKENS, max_rows=MAX_ROWS, max_seq_len=MAX_SEQ_LEN,
            block_size=BLOCK_SIZE, oracle=Toy(vocab_size=VOCAB + 1),
        )  # fmt: skip
        self.operators: set[str] = set()
        self.emitted: list[int] = []

    def prefill(self, chunks: Sequence[tuple[int, int]]) -> None:
        """One packed call of (row, number of next prompt tokens)."""
        model, packed = self.model, []
        for row, length in chunks:
            request = model.request(row)
            start, end = request.launched, request.launched + length
            model._reserve(row, end, 0)  # as the step is about to: the real one runs first
            self.runner.set_blocks(row, model.rows[row].table)
            packed.append(
                PrefillChunk(
                    row=row, start=start, tokens=request.prompt[start:end],
                    next_token=request.prompt[end] if end < len(request.prompt) else None,
                )
            )  # fmt: skip
        with OperatorTrace() as trace:
            firsts = self.runner.prefill(packed)
        forced = {
            chunk.row: Forced(targets=[first], drafts=self._drafts(chunk.row))
            for chunk, first in zip(packed, firsts, strict=True)
            if first is not None
        }
        record = model.prefill(chunks, forced=forced)
        assert [row.emitted for row in record.prefill] == [
            () if first is None else (first,) for first in firsts
        ]
        self._compare(trace, record.prefill, is_prefill=True)
        for row, chunk in zip(record.prefill, packed, strict=True):
            if chunk.finished and chunk.row in model.rows:
                self._compare_state(row)

    def decode(self, rows: Sequence[int]) -> None:
        model = self.model
        for row in rows:
            model._reserve(row, model.request(row).known_len, 0)
            self.runner.set_blocks(row, model.rows[row].table)
        with OperatorTrace() as trace:
            emitted = self.runner.decode(rows)
        targets = trace.argmax[0]
        assert targets.shape == (self._bucket(rows), NUM_DRAFT_TOKENS + 1)
        forced = {
            row: Forced(targets=targets[index].tolist(), drafts=self._drafts(row))
            for index, row in enumerate(rows)
        }
        record = model.decode(rows, forced=forced)
        assert [list(row.emitted) for row in record.decode] == emitted
        self.emitted += [len(tokens) for tokens in emitted]
        self._compare(trace, record.decode, is_prefill=False)
        for row in record.decode:
            self._compare_state(row)

    def _bucket(self, rows: Sequence[int]) -> int:
        return next(size for size in self.runner.buckets if size >= len(rows))

    def _drafts(self, row: int) -> list[int]:
        return self.runner.buffers["tokens_RS"][row, 1:].tolist()

    def _compare_state(self, row: RowRecord) -> None:
        buffers = self.runner.buffers
        assert buffers["tokens_RS"][row.row].tolist() == [row.emitted[-1], *row.drafts]
        assert buffers["seq_len_R"][row.row].item() == min(row.new_seq_len, MAX_SEQ_LEN)

    def _compare(
        self, trace: OperatorTrace, rows: Sequence[RowRecord], *, is_prefill: bool
    ) -> None:
        """Slots, positions, rows and ids of every pass: target layers, then the drafter's."""
        self.operators |= set(trace.operators)
        num_draft_layers = len(trace.attention) - NUM_LAYERS
        assert num_draft_layers == NUM_DRAFT_TOKENS
        wanted = [
            ([row.slots for row in rows], [row.positions for row in rows])
            for _ in range(NUM_LAYERS)
        ]  # fmt: skip
        ids = [[row.tokens for row in rows]]
        for index in range(NUM_DRAFT_TOKENS):
            passes = [row.passes[index] if index < len(row.passes) else None for row in rows]
            wanted.append(
                ([p.slots if p else (-1,) for p in passes],
                 [p.positions if p else (0,) for p in passes])
            )  # fmt: skip
            ids.append([p.tokens if p else None for p in passes])
        for call, (slots, positions) in zip(trace.attention, wanted, strict=True):
            packs = is_prefill and call.slots.shape[0] == 1 and call is not trace.attention[-1]
            real_slots = _split(call.slots, slots, packs)
            assert real_slots == [list(part) for part in slots]
            assert _split(call.positions, positions, packs) == [list(part) for part in positions]
            for row, part, at in zip(rows, _split(call.rows, slots, packs), slots, strict=True):
                assert part == [row.row if slot >= 0 else -1 for slot in at]
            for padded in (call.slots, call.rows)[: 0 if packs else 2]:
                assert (padded[len(rows) :] == -1).all()
        if not self.has_provenance:
            for real, want in zip(self._id_calls(trace), ids, strict=True):
                for part, tokens in zip(_split(real, want, real.shape[0] == 1), want, strict=False):
                    assert tokens is None or part == list(tokens)

    def _id_calls(self, trace: OperatorTrace) -> list[Tensor]:
        return trace.ids

    def check_draft_cache(self) -> None:
        """Every drafter slot holds what the model says; every other slot is as poisoned as ever."""
        assert self.has_provenance
        real = self.runner.buffers["cache.draft.0.key"].flatten(0, 1)[:, 0]
        wanted = torch.full_like(real, float("nan"))
        for (group, slot), entry in self.model.cache.items():
            if group == 1:
                assert isinstance(entry.value, Pair)
                hidden, token = entry.value
                wanted[slot] = torch.tensor(
                    [hidden.position, hidden.prefix[-1], hidden.depth, token], dtype=real.dtype
                )
        torch.testing.assert_close(real, wanted, rtol=0, atol=0, equal_nan=True)

    def check_target_cache(self) -> None:
        """Exactly the slots that the model wrote were written, in every layer, and to numbers."""
        written = {slot for group, slot in self.model.cache if group == 0}
        for layer in range(NUM_LAYERS):
            for half in ("key", "value"):
                cells = self.runner.buffers[f"cache.target.{layer}.{half}"].flatten(0, 1).flatten(1)
                assert set((~cells.isnan().any(1)).nonzero().flatten().tolist()) == written
                assert set((~cells.isnan().all(1)).nonzero().flatten().tolist()) == written


def _split(real: Tensor, like: Sequence[Sequence[int] | None], packed: bool) -> list[list[int]]:
    """A call's [B, S] or packed [1, T] metadata by request, in order."""
    if not packed:
        return [part.tolist() for part in real[: len(like)]]
    parts, start, flat = [], 0, real.flatten().tolist()
    for part in like:
        length = len(part or ())
        parts.append(flat[start : start + length])
        start += length
    return parts


# --- schedules ---


def prompt(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(3, VOCAB), k=length)


def scripted(twin: Twin) -> None:
    """Joins, leaves, chunks (one token long, too), reuse of rows and blocks, the maximum length."""
    model = twin.model
    a, b = model.admit(prompt(9, 1), 9), model.admit(prompt(3, 2))
    twin.prefill([(a, 4), (b, 3)])  # a: unfinished chunk
    twin.decode([b])
    twin.prefill([(a, 1)])
    twin.prefill([(a, 4)])
    twin.decode([a, b])
    c = model.admit(prompt(MAX_SEQ_LEN - 1, 3))  # room for one token
    d = model.admit(prompt(MAX_SEQ_LEN - 4, 4))
    twin.prefill([(c, MAX_SEQ_LEN - 1), (d, 11)])
    twin.prefill([(d, MAX_SEQ_LEN - 15)])
    assert c not in model.rows  # delivered its one token
    while d in model.running():
        twin.decode([r for r in (d, a, b) if r in model.running()])
    if b in model.rows:
        model.abort(b)  # leaves in the middle
    e, f = model.admit(prompt(1, 5), 6), model.admit(prompt(5, 6), 3)
    twin.prefill([(f, 5), (e, 1)])  # not in the order of rows
    while model.running():
        twin.decode(list(reversed(model.running())))


def at_random(twin: Twin, seed: int, num_steps: int = 60) -> None:
    rng, model = random.Random(seed), twin.model
    for _ in range(num_steps):
        if len(model.rows) < MAX_ROWS and rng.random() < 0.4:
            length = rng.choice([1, 2, 3, 5, 8, 13, 20, 25, 26])
            model.admit(rng.choices(range(3, VOCAB), k=length), rng.choice([1, 4, 9, 15, 30]))
        waiting = [r for r in model.rows if model.prompt_left(r) and rng.random() < 0.8]
        if waiting:
            rng.shuffle(waiting)
            lengths = [rng.randint(1, max(12, model.prompt_left(r))) for r in waiting]
            twin.prefill(
                [(r, min(n, model.prompt_left(r))) for r, n in zip(waiting, lengths, strict=True)]
            )
        running = [r for r in model.running() if rng.random() < 0.9]
        if running:
            rng.shuffle(running)
            twin.decode(running)
        if model.rows and rng.random() < 0.05:
            model.abort(rng.choice(list(model.rows)))


SCHEDULES = {"scripted": scripted, "random1": lambda twin: at_random(twin, 1),
             "random2": lambda twin: at_random(twin, 2)}  # fmt: skip


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("padded", [False, True], ids=["exact", "padded"])
def test_every_pass_goes_where_the_model_says(lowered, schedule, padded):
    twin = Twin(lowered, padded=padded)
    SCHEDULES[schedule](twin)
    twin.check_target_cache()
    if twin.has_provenance:
        twin.check_draft_cache()
        assert {1, NUM_DRAFT_TOKENS + 1} <= set(
            twin.emitted
        )  # none and all accepted, both were seen
    assert len(twin.emitted) > 10


@pytest.mark.parametrize("schedule", ["scripted", "random1"])
def test_padded_rows_change_nothing(lowered, schedule):
    """T11: rows and caches after the same traffic at exact and padded batch sizes, bitwise."""
    twins = [Twin(lowered), Twin(lowered, padded=True)]
    for twin in twins:
        SCHEDULES[schedule](twin)
    exact, padded = (twin.runner.buffers for twin in twins)
    assert twins[0].emitted == twins[1].emitted
    for name, buffer in exact.items():
        other = padded[name]
        if not name.startswith("cache."):  # the spare row is what padded rows may write
            buffer, other = buffer[:MAX_ROWS], other[:MAX_ROWS]
        torch.testing.assert_close(other, buffer, rtol=0, atol=0, equal_nan=True, msg=name)


def test_a_wholly_padded_step_writes_nothing(lowered):
    runner = poisoned_runner(lowered)
    before = {name: buffer.clone() for name, buffer in runner.buffers.items()}
    phase = lowered.graphs["decode"]
    call = runner.calls["decode"]
    with OperatorTrace() as trace:
        call({"row_B": torch.full((3,), -1, dtype=torch.int32)})
    assert all((c.slots == -1).all() and (c.rows == -1).all() for c in trace.attention)
    assert all((ids >= 0).all() for ids in trace.ids)
    for name, buffer in runner.buffers.items():
        rows = slice(None) if name.startswith("cache.") else slice(MAX_ROWS)
        torch.testing.assert_close(buffer[rows], before[name][rows], rtol=0, atol=0, equal_nan=True)
    assert [spec.name for spec in phase.inputs if spec.kind == "batch"] == ["row_B"]


def test_at_the_maximum_length_nothing_is_written_past_it(lowered):
    """T10: a row that decodes at max_seq_len - 1 and beyond, beside one that is not disturbed."""
    twin = Twin(lowered)
    model = twin.model
    near, other = model.admit(prompt(MAX_SEQ_LEN - 2, 7)), model.admit(prompt(6, 8))
    twin.prefill([(near, MAX_SEQ_LEN - 2), (other, 6)])
    twin.decode([near, other])
    while model.running():
        twin.decode(model.running())
    twin.check_target_cache()
    # The engine never decodes a full row; the graph must stay harmless if it is asked to.
    twin.runner.buffers["seq_len_R"][0] = MAX_SEQ_LEN
    twin.runner.buffers["tokens_RS"][0] = -1
    before = {name: buffer.clone() for name, buffer in twin.runner.buffers.items()}
    with OperatorTrace() as trace:
        (emitted,) = twin.runner.decode([0])
    assert 1 <= len(emitted) <= NUM_DRAFT_TOKENS + 1
    assert all((call.slots == -1).all() for call in trace.attention)
    assert all((call.positions == 0).all() for call in trace.attention)
    for name, buffer in twin.runner.buffers.items():
        if name.startswith("cache."):
            torch.testing.assert_close(buffer, before[name], rtol=0, atol=0, equal_nan=True)
    assert twin.runner.buffers["seq_len_R"][0] == MAX_SEQ_LEN


# --- what no operator of a step may do ---

TO_HOST = ("_local_scalar_dense", "item", "nonzero", "is_nonzero", "equal", "_to_cpu", "pin_memory")
DATA_DEPENDENT = (
    "nonzero",
    "masked_select",
    "unique",
    "_unique2",
    "repeat_interleave.Tensor",
    "bincount",
)


def test_no_operator_copies_to_the_host_or_sizes_by_data(lowered):
    """T12: of the graph's nodes and of the operators that a schedule runs."""
    twin = Twin(lowered)
    scripted(twin)
    nodes = {
        str(node.target)
        for phase in lowered.program.graphs.values()
        for node in phase.graph_module.graph.nodes
        if node.op == "call_function"
    }
    assert any("paged_attention" in name for name in nodes & twin.operators)
    for name in nodes | twin.operators:
        short = name.split(".", 1)[-1] if name.startswith("aten.") else name
        assert short.split(".")[0] not in (*TO_HOST, *DATA_DEPENDENT), name
        assert short not in DATA_DEPENDENT, name


def test_sizes_are_static_or_the_batch_symbols(lowered):
    """No unbacked symbol; one symbol in decode (B), two in prefill (T, R)."""
    for key, phase in lowered.program.graphs.items():
        symbols = set()
        for node in phase.graph_module.graph.nodes:
            value = node.meta.get("val")
            for tensor in value if isinstance(value, list | tuple) else [value]:
                for size in getattr(tensor, "shape", ()):
                    if isinstance(size, torch.SymInt):
                        symbols |= {str(symbol) for symbol in size.node.expr.free_symbols}
        assert all(symbol.startswith("s") for symbol in symbols)
        assert len(symbols) == {"decode": 1, "prefill": 2}[key.phase]


def test_every_batch_and_integer_state_input_is_int32(lowered):
    """T13: the graphs are built for int32, and the runner makes nothing else.

    Callers of the engine cannot feed the graphs: batch inputs come from `BatchInputs`.
    """
    seen = []

    for phase in lowered.program.graphs.values():
        for spec, fake in zip(phase.inputs, phase.fakes, strict=True):
            if spec.kind in ("batch", "state"):
                seen.append(spec.name)
                is_real = spec.kind == "state" and fake.is_floating_point()
                assert is_real or fake.dtype == torch.int32
    assert {"row_B", "ids_T", "position_T", "tokens_RS", "seq_len_R", "block_table_RM"} <= set(seen)
    runner = StepRunner(lowered)
    checked = []
    for phase, call in runner.calls.items():

        def check(*inputs, phase=phase, inner=call._phase.call, batch=call._places):
            assert all(inputs[index].dtype == torch.int32 for index in batch.values())
            checked.append(phase)
            return inner(*inputs)

        call._phase = dataclasses.replace(call._phase, call=check)
    runner.set_blocks(0, [0, 1])
    runner.prefill([PrefillChunk(row=0, start=0, tokens=(3, 4), next_token=None)])
    runner.decode([0])
    assert [key.phase for key in checked] == ["prefill", "decode"]
