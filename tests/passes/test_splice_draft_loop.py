"""What the pass changes, what it must leave alone, what it refuses."""

from __future__ import annotations

import dataclasses

import pytest

from compilespec.errors import PassError
from compilespec.methods.registry import get_method
from compilespec.passes.graph.retrace import start_step
from compilespec.passes.order import SPLICE_PASSES, run_passes
from compilespec.passes.splice.builder import Splice
from compilespec.passes.splice.splice_draft_loop import splice_draft_loop
from tests.support.hand_graphs import HAND_CONFIG, reading
from tests.support.steps import CONFIG, NUM_DRAFT_TOKENS, context, started
from tests.support.untouched import check_left_alone, step


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_the_draft_loop_is_unrolled(parts, phase):
    gm, ctx = started(parts, phase, "splice_draft_loop")
    target_calls = sum("paged_attention" in str(node.target) for node in gm.graph.nodes)
    assert splice_draft_loop(Splice(gm, ctx)) == NUM_DRAFT_TOKENS
    calls = [node for node in gm.graph.nodes if "paged_attention" in str(node.target)]
    assert len(calls) == target_calls + NUM_DRAFT_TOKENS
    assert {node.args[3].meta["role"] for node in calls[target_calls:]} == {"cache.draft.0.key"}
    fragments = [node.meta["custom"]["fragment"] for node in calls[target_calls:]]
    assert fragments == ["draft.forward"] * NUM_DRAFT_TOKENS


def test_the_draft_loop_must_make_every_pass(parts):
    """K one larger than what the pass unrolled is an error of the pass that says so."""
    gm, ctx = started(parts, "decode", "splice_draft_loop")
    entry = next(entry for entry in SPLICE_PASSES if entry.name == "splice_draft_loop")
    wrong = dataclasses.replace(entry, matches=lambda ctx: NUM_DRAFT_TOKENS + 1)
    with pytest.raises(
        PassError, match=r"pass splice_draft_loop \(decode\): expected 3 matches, found 2"
    ):
        run_passes(gm, ctx, (wrong,), level="torch")


def test_a_method_without_a_drafter_is_left_alone(parts):
    ctx = context(
        parts, "decode", capabilities=get_method("none").capabilities, drafter=reading(), draft={},
        config=dataclasses.replace(CONFIG, num_draft_tokens=0),
    )  # fmt: skip
    gm = start_step(ctx)
    names = [record.name for record in run_passes(gm, ctx, SPLICE_PASSES, level="torch")]
    assert not {"tap_hidden_states", "shift_hidden_states", "splice_draft_loop"} & set(names)
    assert "splice_acceptance" in names
    assert not any("draft" in name for name in ctx.buffers)


def test_without_a_drafter_nothing_changes() -> None:
    config = dataclasses.replace(HAND_CONFIG, num_draft_tokens=0)
    done = ("read_state", "insert_paged_attention", "splice_acceptance")
    check_left_alone("splice_draft_loop", step("decode", *done, config=config))
