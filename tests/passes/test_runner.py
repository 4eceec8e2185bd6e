"""The runner: it counts, records, skips and refuses."""

from __future__ import annotations

import pytest
import torch

from compilespec.errors import PassError
from compilespec.passes.order import ATEN_PASSES, SPLICE_PASSES, Pass, run_passes
from compilespec.passes.runner import check_order
from compilespec.passes.splice.builder import Splice
from tests.support.hand_graphs import graph_of
from tests.support.steps import ATEN


def _noop(step: Splice) -> int:
    return 1


def test_order_is_checked():
    def first(step):
        return 0

    def second(step):
        return 0

    check_order((Pass(run=first, at_least=0), Pass(run=second, after=("first",), at_least=0)))
    with pytest.raises(AssertionError, match="second must come after"):
        check_order((Pass(run=second, after=("first",), at_least=0), Pass(run=first, at_least=0)))
    with pytest.raises(AssertionError, match="needs matches or at_least"):
        check_order((Pass(run=first),))
    with pytest.raises(AssertionError, match="needs matches or at_least"):
        check_order((Pass(run=first, at_least=0, matches=lambda ctx: 1),))


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"matches": lambda ctx: 2}, r"pass _noop \(decode\): expected 2 matches, found 1"),
        ({"matches": lambda ctx: 0}, r"pass _noop \(decode\): expected 0 matches, found 1"),
        ({"at_least": 3}, r"pass _noop \(decode\): expected at least 3 matches, found 1"),
    ],
)
def test_a_wrong_number_of_matches_is_an_error(limits, message):
    gm, ctx = graph_of(lambda x: x + 1, x=("batch", torch.zeros(2)))
    with pytest.raises(PassError, match=message):
        run_passes(gm, ctx, (Pass(run=_noop, **limits),), level="aten")


def test_passes_are_recorded_skipped_and_disabled_by_exact_name():
    gm, ctx = graph_of(lambda x: x + 1, x=("batch", torch.zeros(2)))
    (record,) = run_passes(gm, ctx, (Pass(run=_noop, at_least=0),), level="aten", keep_graphs=True)
    assert (record.name, record.matches, record.level) == ("_noop", 1, "aten")
    assert str(record.before) == str(record.after)
    skipped = Pass(run=_noop, matches=lambda ctx: None)
    assert run_passes(gm, ctx, (skipped,), level="aten") == []
    entry = Pass(run=_noop, at_least=0)
    assert run_passes(gm, ctx, (entry,), level="aten", disabled=frozenset({"_noop"})) == []
    assert len(run_passes(gm, ctx, (entry,), level="aten", disabled=frozenset({"_no"}))) == 1


def test_a_broken_graph_is_an_error_of_the_pass():
    def breaks(step: Splice) -> int:
        first, second = step.graph.find_nodes(op="call_function", target=ATEN.add.Tensor)
        first.args = (second, 1)  # uses what comes later
        return 1

    gm, ctx = graph_of(lambda x: (x + 1) + 2, x=("batch", torch.zeros(2)))
    with pytest.raises(PassError, match="pass breaks left a broken graph"):
        run_passes(gm, ctx, (Pass(run=breaks, at_least=1),), level="aten")


def test_every_node_names_the_pass_that_made_it(rewritten):
    authors = {
        node.meta["custom"]["pass"]
        for node in rewritten.final.graph.nodes
        if node.op == "call_function"
    }
    known = {entry.name for entry in (*SPLICE_PASSES, *ATEN_PASSES)} | {"trace", "to_aten"}
    assert authors <= known
    assert {"read_state", "insert_paged_attention", "prepack_linears", "commit_state"} <= authors
    assert all("val" in n.meta for n in rewritten.final.graph.nodes if n.op == "call_function")
