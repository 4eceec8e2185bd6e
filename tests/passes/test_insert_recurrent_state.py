"""The pass `insert_recurrent_state`: what it must leave alone."""

from __future__ import annotations

import pytest
import torch

from compilespec.errors import PassError
from compilespec.passes.graph.nodes import find_role
from compilespec.passes.splice.builder import Splice
from compilespec.passes.splice.recurrent_state import StatePlaces, keep_states
from tests.support.hand_graphs import code
from tests.support.untouched import check_left_alone, step


def test_a_model_without_recurrent_layers_is_left_alone() -> None:
    check_left_alone("insert_recurrent_state", step("decode", "read_state"))


def test_states_are_kept_for_recurrent_markers_alone() -> None:
    """Attention markers stay; a marker of which no shape is known is refused."""
    gm, ctx = step("decode", "read_state")
    made = Splice(gm, ctx)
    row, position = made.roles.row, made.roles.position
    at = StatePlaces(row=row, position=position, absorbed=position, commits=row)
    before = code(gm)
    assert keep_states(made, "draft", at) == 0
    assert code(gm) == before
    logits = find_role(gm, "logits")
    with gm.graph.inserting_after(logits):
        gm.graph.call_function(torch.ops.compilespec.causal_conv, (logits, logits, None))
    del logits.meta["example"]
    with pytest.raises(PassError, match=r"causal_conv.draft.0: an argument of the marker has no"):
        keep_states(made, "draft", at)
