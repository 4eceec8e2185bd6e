"""The builder of steps: code goes to the cursor, roles are found by name, sizes are bound."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx, nn

from compilespec.errors import PassError
from compilespec.methods.registry import get_method
from compilespec.passes.context import PassContext
from compilespec.passes.splice.builder import Splice, arange_like, node_of
from tests.support.hand_graphs import HAND_CONFIG, call


@pytest.fixture
def step() -> Splice:
    """A step of one input, x, and its double, which is the output and plays `logits`."""
    gm = fx.GraphModule(nn.Module(), fx.Graph())
    x = gm.graph.placeholder("x")
    double = gm.graph.call_function(torch.add, (x, x))
    gm.graph.output((double,))
    double.meta["role"], gm.graph.output_node().meta["names"] = "logits", ("y",)
    ctx = PassContext(
        phase="decode", config=HAND_CONFIG, capabilities=get_method("none").capabilities,
        target=None, draft={},  # type: ignore[arg-type]
    )  # fmt: skip
    return Splice(gm, ctx)


def targets(step: Splice) -> list[str]:
    return [str(getattr(n.target, "__name__", n.target)) for n in step.graph.nodes]


def test_code_is_written_before_the_output_unless_the_cursor_is_moved(step: Splice) -> None:
    logits = step.roles.logits
    logits.relu()
    with step.before(logits):
        inner = step.value(next(iter(step.graph.nodes))).sin()
        with step.after(inner):
            inner.cos()
        inner.tan()
    with step.at_start():
        step.value(next(iter(step.graph.nodes))).exp()
    assert targets(step) == ["x", "exp", "sin", "cos", "tan", "add", "relu", "output"]
    step.graph.lint()


def test_a_cursor_goes_back_where_an_error_leaves_it(step: Splice) -> None:
    with pytest.raises(ZeroDivisionError), step.before(step.roles.logits):
        _ = 1 / 0
    assert step.cursor is step.graph.output_node()


def test_a_role_has_one_player_and_moves_with_an_assignment(step: Splice) -> None:
    old = node_of(step.roles.logits)
    step.roles.logits = step.roles.logits.relu()
    assert "role" not in old.meta
    assert node_of(step.roles.logits).target == "relu"
    step.name("aux.0", step.roles.logits.neg())
    assert node_of(step.role("aux.0")).target == "neg"


def test_roles_that_nobody_plays_or_declared_are_errors(step: Splice) -> None:
    assert step.find("drafts") is None
    with pytest.raises(PassError, match="no node plays the role 'drafts'; roles so far: logits"):
        _ = step.roles.drafts
    with pytest.raises(AttributeError, match="a step has no role 'draft'"):
        _ = step.roles.draft  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="a step has no role 'draft'"):
        step.roles.draft = step.roles.logits  # type: ignore[attr-defined]


def test_sizes_are_bound_by_name_and_what_is_given_counts(step: Splice) -> None:
    def sizes(x: Tensor, *, block_size: int, max_seq_len: int, extra: int = 1) -> tuple[int, ...]:
        return block_size, max_seq_len, extra

    wanted = (HAND_CONFIG.block_size, HAND_CONFIG.max_seq_len, 1)
    assert step.call(sizes, step.roles.logits) == wanted
    assert step.call(sizes, step.roles.logits, block_size=7) == (7, *wanted[1:])


def test_a_value_takes_the_place_of_a_node(step: Splice) -> None:
    old = node_of(step.roles.logits)
    step.take_place(old, step.value(old.args[0]) * 3)  # type: ignore[arg-type]
    assert step.outputs().keys() == {"y"}
    assert node_of(step.roles.logits) is node_of(step.outputs()["y"])
    (y,) = call(step.gm, torch.ones(2))
    assert y.tolist() == [3, 3]


def test_tensor_code_runs_eagerly_too() -> None:
    assert arange_like(torch.zeros(1), 3).tolist() == [0, 1, 2]
