"""Programs with recurrent layers: verified, proved and costed; a fault in each formula is named."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

import compilespec
from compilespec.inspect.bounds import prove
from compilespec.inspect.cost import estimate
from compilespec.inspect.node_costs import C
from compilespec.inspect.stages import context_of
from compilespec.inspect.verify import verify
from compilespec.methods import mtp
from compilespec.passes.order import rewrite_phase
from compilespec.passes.proofs.claims import find_claims
from compilespec.passes.proofs.ranges import Ranges
from compilespec.passes.proofs.sizes import B, R, Sizes
from compilespec.passes.splice.builder import Splice
from compilespec.program import ByStep, SpecProgram, StepKey
from tests.support.drafters import traced_info
from tests.support.hand_graphs import HAND_CONFIG, graph_of
from tests.support.models import VOCAB, tiny_hybrid

SIZES = {"max_batch_size": 5, "max_seq_len": 26, "max_prefill_tokens": 64, "keep_graphs": False}
# the passes have these modules' names
inserted = importlib.import_module("compilespec.passes.splice.insert_recurrent_state")
loop = importlib.import_module("compilespec.passes.splice.draft_loops.unshifted")
TARGET, DRAFTER = "insert_recurrent_state", "splice_draft_loop"
STATES = [TARGET, DRAFTER, "commit_state"]


@functools.cache
def program(kind: str) -> SpecProgram:
    """A delta rule under a windowed drafter; Mamba-2 under one of its kind, for several K."""
    if kind == "windowed":
        model = tiny_hybrid("qwen3_5", num_layers=3)
        modules = mtp.random_modules(traced_info(model), 3)
        return compilespec.trace(model, "mtp", draft=modules, num_draft_tokens=3, **SIZES)
    if kind == "in_place":
        draft = compilespec.SelfDraft(weights=None)
        model = tiny_hybrid("qwen3_5")
        return compilespec.trace(model, "self", draft=draft, num_draft_tokens=(1, 2), **SIZES)
    model, draft = tiny_hybrid("nemotron_h"), tiny_hybrid("nemotron_h", seed=1)
    return compilespec.trace(model, "draft_model", draft=draft, num_draft_tokens=(1, 3), **SIZES)


KIND = pytest.mark.parametrize("kind", ["windowed", "unshifted"])


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("windowed", marks=pytest.mark.slow),
        pytest.param("in_place", marks=pytest.mark.slow),
        "unshifted",
    ],
)
def test_states_are_what_their_references_say(kind: str) -> None:
    report = verify(program(kind), passes=STATES, batch_sizes=(5,))
    assert report.ok, str(report)
    assert report.steps == tuple(program(kind).graphs)
    kept = {check.pass_name: check for check in report.checks}
    assert kept[TARGET].against == kept[DRAFTER].against == "its reference"
    assert kept[DRAFTER].bound is None  # bit for bit


@KIND
def test_every_pass_agrees(kind: str) -> None:
    report = verify(program(kind))
    assert report.ok, str(report)


@KIND
def test_states_have_a_cost(kind: str) -> None:
    for cost in estimate(program(kind)).graphs.values():
        assert not any("cached" in name for name in cost.uncounted)
        # a request's states are moved for any context
        assert cost.total.cost.cache_bytes.subs(C, 0).free_symbols & {B, R}


# --- claims ---


@KIND
def test_rows_and_positions_of_states_are_proved(kind: str) -> None:
    report = prove(program(kind))
    assert report.num_open == 0, str(report)
    bounds = [bound for bound in report.bounds if bound.what == "row inside the states, or -1"]
    places = [b for b in report.bounds if b.what == "position inside the maximum length"]
    assert {bound.step for bound in bounds} == set(map(str, program(kind).graphs))
    for step in {bound.step for bound in bounds}:
        mine = [bound for bound in bounds if bound.step == step]
        assert {bound.status for bound in mine} == {"proved"}
        assert {bound.status for bound in places if bound.step == step} == {"proved"}
        # a recurrence and a convolution of each layer; a drafter's in each of its passes
        passes = {"prefill": 4, "decode, K=3": 3, "decode, K=1": 1}
        assert len(mine) == 2 * (1 + passes[step] if kind == "unshifted" else 2)


def states_of(row: Callable[..., Any], position: Callable[..., Any]) -> set[str]:
    """What is not proved of a convolution and a recurrence at these rows and positions."""
    rows = HAND_CONFIG.max_batch_size + 1
    state, ring = torch.zeros(rows, 2, 3, 4), torch.zeros(rows, 2, 12)
    x, weight = torch.zeros(2, 1, 12), torch.zeros(12, 2)

    def step(row_B: Any, seq_len_R: Any, state: Any, ring: Any) -> Any:
        ops = torch.ops.compilespec
        at = (row(row_B).unsqueeze(1), position(seq_len_R[:2]).unsqueeze(1))
        y = ops.cached_conv(x, weight, None, ring, *at)
        value = y[..., :8].reshape(2, 1, 2, 4)
        key, decay = value[..., :1, :3], value[..., 0]
        return ops.cached_recurrence(
            key, key, value, decay, None, state, ring, *at, at[1], at[1] > 0, "mamba2"
        )

    integers = torch.zeros(2, dtype=torch.int32)
    gm, ctx = graph_of(
        step, row_B=("batch", integers), seq_len_R=("state", integers.new_zeros(rows)),
        **{"recurrence.target.0.state": ("state", state)},
        **{"causal_conv.target.0.recent": ("state", ring)},
    )  # fmt: skip
    claims = find_claims(Ranges(gm, Sizes(HAND_CONFIG, VOCAB), ctx.inputs, ctx.weights))
    return {claim.what for claim in claims if not claim.holds}


ROW, POSITION = "row inside the states, or -1", "position inside the maximum length"


@pytest.mark.parametrize(
    ("row", "position", "open_claims"),
    [
        (lambda row: row, lambda length: (length - 1).clamp(min=0), set()),
        (lambda row: row + 1, lambda length: (length - 1).clamp(min=0), set()),  # the spare row
        (lambda row: row + 2, lambda length: (length - 1).clamp(min=0), {ROW}),
        (lambda row: row - 1, lambda length: (length - 1).clamp(min=0), {ROW}),
        (lambda row: row, lambda length: length, {POSITION}),  # may be the maximum length
        (lambda row: row, lambda length: length - 1, {POSITION}),
    ],
)
def test_rows_and_positions_outside_are_not_proved(
    row: Callable[..., Any], position: Callable[..., Any], open_claims: set[str]
) -> None:
    assert states_of(row, position) == open_claims


# --- planted faults ---


def of_result(number: int, change: Callable[[Any], Any]) -> Callable[..., Any]:
    """A fault: one of the results of a formula becomes a function of what it was."""

    def plant(right: Callable[..., Any]) -> Callable[..., Any]:
        def wrong(*args: Any, **options: Any) -> Any:
            results = list(right(*args, **options))
            results[number] = change(results[number])
            return tuple(results)

        return wrong

    return plant


def of_argument(number: int, change: Callable[[Any], Any]) -> Callable[..., Any]:
    def plant(right: Callable[..., Any]) -> Callable[..., Any]:
        def wrong(*args: Any, **options: Any) -> Any:
            changed = [change(x) if i == number else x for i, x in enumerate(args)]
            return right(*changed, **options)

        return wrong

    return plant


def of_option(name: str, value: Any) -> Callable[..., Any]:
    return lambda right: lambda *args, **options: right(*args, **{**options, name: value})


def also_first_draft(right: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(counts: Any, index: Any, position_BS: Any, **options: Any) -> Any:
        absorbed, _ = right(counts, index, position_BS, **options)
        return absorbed, position_BS < position_BS[:, :1] + 2

    return wrong


def layers_swapped(right: Callable[..., Any]) -> Callable[..., Any]:
    """The states of the first two recurrences, exchanged."""

    def wrong(step: Splice, *args: Any) -> int:
        gm, count = step.gm, int(right(step, *args))
        op = torch.ops.compilespec.cached_recurrence.default
        first, second, *_ = gm.graph.find_nodes(op="call_function", target=op)
        for place in (5, 6):
            one, other = first.args[place], second.args[place]
            first.update_arg(place, other)
            second.update_arg(place, one)
        return count

    return wrong


def never(commits: Any) -> Any:
    return commits & False


def always(commits: Any) -> Any:
    return commits | True


DECODE, PREFILL = StepKey("decode", 3), StepKey("prefill", 3)
# kind of program, graph, module and formula, fault, the pass that must be named
FAULTS: dict[str, tuple[str, StepKey, Any, str, Callable[..., Any], str]] = {
    "commits a draft": (
        "windowed", DECODE, inserted, "_decode_places", also_first_draft, TARGET),
    "commits nothing": (
        "windowed", DECODE, inserted, "_decode_places", of_result(1, never), TARGET),
    "takes one token more": (
        "windowed", DECODE, inserted, "_decode_places",
        of_result(0, lambda n: (n - 1).clamp(min=0)), TARGET),
    "counts no token": (
        "windowed", DECODE, inserted, "_count_first", of_argument(2, lambda n: n - 1), TARGET),
    "commits repeated tokens": (
        "windowed", PREFILL, inserted, "_prefill_places", of_option("num_repeated", 0), TARGET),
    "holds whole prompts back": (
        "windowed", PREFILL, inserted, "_prefill_places",
        of_argument(4, never), TARGET),
    "counts to another request": (
        "windowed", PREFILL, inserted, "_prefill_places",
        of_result(2, lambda index: index.flip(0)), TARGET),
    "swaps layers": ("windowed", DECODE, inserted, "keep_states", layers_swapped, TARGET),
    "keeps rejected drafts": (
        "unshifted", DECODE, loop, "_emitted_state", of_result(1, always), DRAFTER),
    "drops the bonus token": (
        "unshifted", DECODE, loop, "_emitted_state", of_argument(2, lambda n: n - 1), DRAFTER),
    "takes the last token again": (
        "unshifted", DECODE, loop, "_emitted_state",
        of_result(0, lambda n: (n - 1).clamp(min=0)), DRAFTER),
    "keeps drafts": (
        "unshifted", DECODE, loop, "_drafted_state", of_result(1, always), DRAFTER),
    "forgets the draft before": (
        "unshifted", DECODE, loop, "_drafted_state", of_result(0, lambda n: n + 1), DRAFTER),
    "keeps drafts after a prompt": (
        "unshifted", PREFILL, loop, "_drafted_state", of_result(1, always), DRAFTER),
    "keeps nothing of a prompt": (
        "unshifted", PREFILL, loop, "_prompt_state", of_result(1, never), DRAFTER),
}  # fmt: skip


def planted(
    kind: str, key: StepKey, module: Any, formula: str, plant: Callable[..., Any]
) -> SpecProgram:
    """A graph of the program, made again with one formula wrong."""
    whole = program(kind)
    ctx = dataclasses.replace(
        context_of(whole.graphs[key]), inputs={}, buffers={}, weights={}, declared={}
    )
    with pytest.MonkeyPatch.context() as patch:
        right = getattr(module, formula)
        patch.setattr(module, formula, functools.wraps(right)(plant(right)))
        wrong = rewrite_phase(ctx, keep_graphs=True)
    return dataclasses.replace(whole, graphs=ByStep([wrong]))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_caught_and_named(fault: str) -> None:
    *where, pass_name = FAULTS[fault]
    report = verify(planted(*where), passes=STATES, batch_sizes=(5,), fail_fast=True)
    (check,) = report.failed
    assert check.pass_name == pass_name
    assert check.against == "its reference"
    assert check.mismatches


def test_a_count_past_the_end_is_not_proved() -> None:
    """Steps begin at the maximum length only where one ran on after a request's end."""
    unbounded = of_option("max_seq_len", 2**30)
    faulty = planted("windowed", DECODE, inserted, "_count_first", unbounded)
    found = {bound.what for bound in prove(faulty).bounds if bound.status != "proved"}
    assert found - {b.what for b in prove(program("windowed")).bounds if b.status != "proved"}
