"""Every graph that can run is checked: steps of a smaller K, greedy ones and the replay, too."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

import compilespec
from compilespec.inspect.bisect import bisect
from compilespec.inspect.bounds import prove
from compilespec.inspect.cost import estimate
from compilespec.inspect.stages import context_of
from compilespec.inspect.verify import GREEDY, verify
from compilespec.methods.eagle3 import random_head
from compilespec.passes import order
from compilespec.passes.graph.nodes import find_role, output_node
from compilespec.passes.order import rewrite_phase
from compilespec.passes.splice.builder import Splice
from compilespec.passes.splice.draft_loops import kept_inputs
from compilespec.program import ByStep, SpecProgram, StepKey
from tests.support.hand_graphs import emit
from tests.support.models import target_info, tiny_target

KEYS = (
    StepKey("prefill", 3), StepKey("decode", 3), StepKey("decode", 0), StepKey("decode", 2),
    StepKey("decode", 3, "replay"), StepKey("decode", 0, "greedy"), StepKey("decode", 2, "greedy"),
    StepKey("decode", 3, "greedy"),
)  # fmt: skip


@pytest.fixture(scope="module")
def program() -> SpecProgram:
    model = tiny_target("llama", torch.float64, num_layers=1)
    head = random_head(target_info(model, 32), aux_layers=(0, 1), num_draft_tokens=3)
    return compilespec.trace(
        model, "eagle3", draft=head, num_draft_tokens=(0, 2, 3), greedy_step=True,
        max_batch_size=2, max_seq_len=32, max_prefill_tokens=32,
    )  # fmt: skip


def test_keys_are_read_and_found(program: SpecProgram) -> None:
    graphs = program.graphs
    assert tuple(graphs) == KEYS
    assert [str(key) for key in KEYS] == [
        "prefill", "decode, K=3", "decode, K=0", "decode, K=2", "replay", "decode, K=0, greedy",
        "decode, K=2, greedy", "decode, K=3, greedy",
    ]  # fmt: skip
    assert [graphs.name(key) for key in KEYS] == [
        "prefill", "decode", "decode.0", "decode.2", "replay", "decode.0.greedy",
        "decode.2.greedy", "decode.3.greedy",
    ]  # fmt: skip
    assert graphs["decode"] is graphs[StepKey("decode", 3)]
    assert graphs["prefill"] is graphs[StepKey("prefill", 3)]
    assert graphs.draft_counts == (0, 2, 3)
    assert "replay" not in graphs


def test_bounds_and_cost_list_every_graph(program: SpecProgram) -> None:
    assert {bound.step for bound in prove(program).bounds} == set(map(str, KEYS))
    costs = estimate(program).graphs
    assert tuple(costs) == KEYS
    flops = {key: costs[key].total.cost for key in KEYS}
    assert flops[StepKey("decode", 2)] != flops[StepKey("decode", 3)]


def test_verify_lists_every_graph_and_all_agree(program: SpecProgram) -> None:
    report = verify(program, batch_sizes=(2,))
    assert report.ok, str(report)
    assert report.steps == KEYS
    assert {row[0] for row in report.rows()} == set(map(str, KEYS))


def test_bisect_lists_every_graph(program: SpecProgram) -> None:
    report = bisect(program)
    assert report.ok, str(report)
    assert report.steps == KEYS
    assert all(str(key) in str(report) for key in KEYS)


def test_one_pass_of_every_graph(program: SpecProgram) -> None:
    report = verify(program, passes=["commit_state", "commit_drafts", GREEDY], batch_sizes=(2,))
    assert report.ok, str(report)
    assert report.steps == KEYS


# --- a fault in each kind ---


def drafts_moved(gm: fx.GraphModule) -> None:
    """Each draft stands a column further on."""
    node = find_role(gm, "drafts")
    moved = emit(gm, lambda drafts_BK: drafts_BK.roll(1, 1), node, before=output_node(gm))
    moved.meta["role"] = node.meta.pop("role")


def wrong_drafts(patch: pytest.MonkeyPatch) -> None:
    def wrong(run: Callable[..., int]) -> Callable[..., int]:
        def splice_draft_loop(step: Splice) -> int:
            count = run(step)
            drafts_moved(step.gm)
            return count

        return splice_draft_loop

    entries = [
        dataclasses.replace(entry, run=wrong(entry.run))
        if entry.name == "splice_draft_loop"
        else entry
        for entry in order.SPLICE_PASSES
    ]
    patch.setattr(order, "SPLICE_PASSES", tuple(entries))


def wrong_place_kept(patch: pytest.MonkeyPatch) -> None:
    """A step of K = 0 keeps its inputs where the next ones belong."""
    write = kept_inputs.write_ring

    @functools.wraps(write)
    def write_ring(ring: Any, index: Any, start_B: Any, made: Any) -> Any:
        return write(ring, index, start_B + 1, made)

    patch.setattr(kept_inputs, "write_ring", write_ring)


def wrong_pairs_read(patch: pytest.MonkeyPatch) -> None:
    """A replay takes each hidden state with the token of the row before."""
    place = kept_inputs.place_kept

    @functools.wraps(place)
    def place_kept(*arguments: Any, **options: Any) -> tuple[Any, ...]:
        *others, ids, aux = place(*arguments, **options)
        return (*others, ids.roll(1, 1), aux)

    patch.setattr(kept_inputs, "place_kept", place_kept)


FAULTS: dict[str, tuple[StepKey, Callable[[pytest.MonkeyPatch], None], str]] = {
    "a smaller K": (StepKey("decode", 2), wrong_drafts, "splice_draft_loop"),
    "K = 0": (StepKey("decode", 0), wrong_place_kept, "splice_draft_loop"),
    "greedy": (StepKey("decode", 2, "greedy"), wrong_drafts, "splice_draft_loop"),
    "replay": (StepKey("decode", 3, "replay"), wrong_pairs_read, "read_kept"),
}


def planted(program: SpecProgram, key: StepKey, plant: Callable[..., None]) -> SpecProgram:
    """The program's full step of the key's K, and the key's graph, made wrong."""
    ctx = dataclasses.replace(
        context_of(program.graphs[key]), inputs={}, buffers={}, weights={}, declared={}
    )
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        wrong = rewrite_phase(ctx, keep_graphs=True)
    full = program.graphs[StepKey("decode", key.num_draft_tokens)]
    return dataclasses.replace(program, graphs=ByStep([full, wrong]))


@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_in_one_graph_is_caught_and_named(program: SpecProgram, kind: str) -> None:
    key, plant, pass_name = FAULTS[kind]
    faulty = planted(program, key, plant)
    checks = verify(faulty, passes=[pass_name], batch_sizes=(2,)).failed
    assert {(check.key, check.pass_name) for check in checks} == {(key, pass_name)}
    assert checks[0].against == "its reference"
    alone = dataclasses.replace(faulty, graphs=ByStep([faulty.graphs[key]]))
    found = bisect(alone)
    assert found.found is not None
    assert (found.found.key, found.pass_name) == (key, pass_name)
    assert str(key) in str(found)


def test_a_greedy_step_that_parts_from_the_full_one_is_caught(program: SpecProgram) -> None:
    """Independent of its passes' references."""
    key, plant, _ = FAULTS["greedy"]
    report = verify(planted(program, key, plant), passes=[GREEDY], batch_sizes=(2,))
    (check,) = report.failed
    assert (check.key, check.against) == (key, "the full step")
    assert check.mismatches[0].value == "buffer tokens_RS"
