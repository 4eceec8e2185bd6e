"""Stage contracts: what each refuses, and what the errors say."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from compilespec.errors import PassError
from compilespec.passes import contracts
from compilespec.passes.context import PassContext
from compilespec.passes.order import ATEN_PASSES, SPLICE_PASSES
from compilespec.passes.runner import Pass, run_passes
from compilespec.passes.splice.builder import Splice
from compilespec.passes.splice.check_markers import check_markers
from compilespec.program import InputSpec
from tests.support.hand_graphs import graph_of

ATEN = torch.ops.aten


def run(
    function: Callable[..., Any], edit: Callable[..., Any], *ensures: Any, **specs: Any
) -> None:
    """One pass, `edit`, over a graph of `function`."""
    gm, ctx = graph_of(function, **specs)

    def wrong(step: Splice) -> int:
        edit(step.gm, step.ctx)
        return 1

    run_passes(
        gm, ctx, (Pass(run=wrong, at_least=0, ensures=ensures),), level="aten", keep_graphs=True
    )


def step(x: Tensor, state: Tensor) -> Tensor:
    state.index_put_((torch.zeros(1, dtype=torch.int64),), x[:1])
    return x + 1


INPUTS = {"x": ("batch", torch.ones(3)), "state": ("state", torch.zeros(4))}


def nothing(gm: fx.GraphModule, ctx: PassContext) -> None:
    pass


def add_stranger(gm: fx.GraphModule, ctx: PassContext) -> None:
    with gm.graph.inserting_before(next(iter(gm.graph.nodes))):
        gm.graph.placeholder("stranger").meta["role"] = "stranger"


def declare_unused(gm: fx.GraphModule, ctx: PassContext) -> None:
    ctx.inputs["ghost"] = InputSpec(name="ghost", kind="batch")


def drop_write(gm: fx.GraphModule, ctx: PassContext) -> None:
    node = next(n for n in gm.graph.nodes if n.target is ATEN.index_put_.default)
    gm.graph.erase_node(node)


def write_batch_input(gm: fx.GraphModule, ctx: PassContext) -> None:
    x = next(n for n in gm.graph.nodes if n.meta.get("role") == "x")
    with gm.graph.inserting_after(x):
        gm.graph.call_function(ATEN.add_.Tensor, (x, 1)).meta["val"] = x.meta["val"]


def write_a_copy(gm: fx.GraphModule, ctx: PassContext) -> None:
    """The write goes to a copy, which nobody reads: a dead write."""
    x = next(n for n in gm.graph.nodes if n.meta.get("role") == "x")
    with gm.graph.inserting_after(x):
        copy = gm.graph.call_function(ATEN.clone.default, (x,))
    with gm.graph.inserting_after(copy):
        write = gm.graph.call_function(ATEN.add_.Tensor, (copy, 1))
    copy.meta["val"] = write.meta["val"] = x.meta["val"]


def wrong_shape(gm: fx.GraphModule, ctx: PassContext) -> None:
    node = next(n for n in gm.graph.nodes if n.target is ATEN.add.Tensor)
    with gm.graph.inserting_after(node):
        new = gm.graph.call_function(ATEN.unsqueeze.default, (node, 0))
    new.meta["val"] = node.meta["val"]


def no_shape(gm: fx.GraphModule, ctx: PassContext) -> None:
    next(n for n in gm.graph.nodes if n.target is ATEN.add.Tensor).meta.pop("val")


def torch_function(gm: fx.GraphModule, ctx: PassContext) -> None:
    next(n for n in gm.graph.nodes if n.target is ATEN.add.Tensor).target = torch.add


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (add_stranger, "every placeholder is a declared input, but placeholder 'stranger' is fed"),
        (declare_unused, "input 'ghost' has no placeholder"),
        (drop_write, "no pass may drop a write, but state has 0 of 1"),
        (write_batch_input, r"writes x_?\d*, which is neither state nor cache"),
        (write_a_copy, "which nothing reads after it"),
        (wrong_shape, r"is described as float32\[3\], is float32\[1, 3\]"),
        (no_shape, "has no shape"),
        (torch_function, "only ATen and compilespec operators"),
    ],
)
def test_a_broken_contract_is_an_error_of_the_pass(edit, message):
    with pytest.raises(PassError, match=r"pass wrong \(decode\) broke its stage's contract"):
        run(step, edit, **INPUTS)
    with pytest.raises(PassError, match=message):
        run(step, edit, **INPUTS)


def read_by_an_earlier_view(gm: fx.GraphModule, ctx: PassContext) -> None:
    """A view, then a write to what it views, then a use of the view."""
    x = next(n for n in gm.graph.nodes if n.meta.get("role") == "x")
    output = gm.graph.output_node()
    with gm.graph.inserting_before(output):
        copy = gm.graph.call_function(ATEN.clone.default, (x,))
        view, other = (gm.graph.call_function(ATEN.alias.default, (copy,)) for _ in range(2))
        write = gm.graph.call_function(ATEN.add_.Tensor, (other, 1))
        read = gm.graph.call_function(ATEN.neg.default, (view,))
    for node in (copy, view, other, write, read):
        node.meta["val"] = x.meta["val"]


def test_a_graph_that_keeps_them_passes():
    run(step, read_by_an_earlier_view, **INPUTS)
    run(step, nothing, contracts.writes_buffers("state"), **INPUTS)


def test_what_a_pass_ensures_holds_for_the_passes_after_it():
    gm, ctx = graph_of(step, **INPUTS)

    def first(step: Splice) -> int:
        return 0

    def second(step: Splice) -> int:
        node = next(n for n in step.graph.nodes if n.target is ATEN.index_put_.default)
        with gm.graph.inserting_after(node):
            again = gm.graph.call_function(node.target, node.args)
        again.meta["val"] = node.meta["val"]
        return 0

    passes = (
        Pass(run=first, at_least=0, ensures=(contracts.writes_buffers("state"),)),
        Pass(run=second, at_least=0),
    )
    with pytest.raises(PassError, match=r"pass second .*but state is written 2 times"):
        run_passes(gm, ctx, passes, level="aten")


@pytest.mark.parametrize(
    ("contract", "message"),
    [
        (contracts.plays("ids"), "0 nodes play 'ids'"),
        (contracts.gives("a", "b"), "outputs are"),
        (contracts.writes_buffers("tokens_RS"), "tokens_RS is written 0 times"),
    ],
)
def test_grammar_that_does_not_hold_is_named(contract, message):
    gm, ctx = graph_of(step, **INPUTS)
    assert any(message in problem for problem in contract.problems(gm, ctx))


def test_stateless_attention_is_found():
    def attends(x: Tensor) -> Tensor:
        return torch.ops.compilespec.attention(x, x, x, 1.0, 0, 0.0, None)

    gm, ctx = graph_of(attends, x=("batch", torch.ones(1, 1, 2, 4)))
    assert list(contracts.NO_STATELESS.problems(gm, ctx)) == ["attention is stateless"]


def test_a_pass_that_matched_too_little_names_the_nearest_candidates():
    """A layer that computes attention by hand: the error points at its softmax."""

    def by_hand(x: Tensor) -> Tensor:
        return torch.softmax(x @ x.t(), -1) @ x

    gm, ctx = graph_of(by_hand, x=("batch", torch.ones(2, 4)))
    (entry,) = (entry for entry in SPLICE_PASSES if entry.run is check_markers)
    wrong = dataclasses.replace(entry, matches=lambda ctx: 1)
    with pytest.raises(PassError) as caught:
        run_passes(gm, ctx, (wrong,), level="aten")
    text = str(caught.value)
    assert "expected 1 matches, found 0; it looked for an attention marker for each layer" in text
    assert "the nearest candidates are _softmax" in text


def test_every_splice_says_what_it_ensures():
    """Passes that only name or only optimise may ensure nothing."""
    silent = {entry.name for entry in (*SPLICE_PASSES, *ATEN_PASSES) if not entry.ensures}
    assert silent <= {
        "narrow_rows", "lower_quantized",
        "read_embeds", "add_adapters",  # which change values alone: their references judge them
        "check_markers", "cleanup", "merge_projections", "fuse_head_argmax", "read_long_rows",
        "bound_positions", "check_mutations", "absorb_latents", "shard_weights",
    }  # fmt: skip
