"""Every pass against the graph before it, or its reference, on random calls of a family (T30)."""

from __future__ import annotations

import functools
import importlib
import json
from typing import Any

import pytest
import torch

import compilespec
from compilespec.errors import InvalidOption, NotSupported, SpecError
from compilespec.inspect.compare import BOUNDS, compare
from compilespec.methods.eagle3 import random_head
from compilespec.passes.order import ATEN_PASSES, SPLICE_PASSES
from compilespec.passes.references import draft_loops
from tests.support.models import FAMILIES, VOCAB, target_info, tiny_target

SIZES = {"num_draft_tokens": 2, "max_batch_size": 5, "max_seq_len": 43, "max_prefill_tokens": 64}
DEFAULT = ("gemma2",)  # windows and soft caps
NUM_LAYERS = {"gemma3": 6}  # its sixth is its first without a window
ALL_PASSES = {entry.name for entry in (*SPLICE_PASSES, *ATEN_PASSES)} | {"to_aten"}
# of programs that save them, have a processor, note prompts, have states, trim the head, choose K
ALL_PASSES -= {"output_hidden_states", "process_logits", "output_head_input"}
ALL_PASSES -= {"insert_recurrent_state", "trim_draft_head", "report_evidence"}
# of several ranks, with adapters, images, positions of several axes, trees
ALL_PASSES -= {"shard_weights", "add_adapters", "read_embeds", "read_rope_offsets", "keep_path"}


def program(family: str, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    model = tiny_target(family, dtype, num_layers=NUM_LAYERS.get(family, 3))
    head = random_head(target_info(model, 128), aux_layers=(0, 1, 3), draft_vocab_size=61)
    return compilespec.trace(model, spec="eagle3", draft=head, **{**SIZES, **options})


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=() if family in DEFAULT else pytest.mark.slow)
        for family in [*FAMILIES, "plain"]
    ],
)
def test_every_pass_of_a_family_computes_what_it_must(family):
    report = compilespec.verify(program(family))
    assert report.ok, str(report)
    assert {check.pass_name for check in report.checks} == ALL_PASSES
    assert {check.batch_size for check in report.checks} == {1, 2, 5}
    rounding = [check for check in report.checks if check.bound is not None]
    assert max(check.error for check in rounding) < BOUNDS[torch.float64] / 5  # room for others


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_moe"])
def test_narrower_types_stay_within_their_bounds(family, dtype):
    report = compilespec.verify(program(family, dtype))
    assert report.ok, str(report)


def test_plain_decoding_is_verified_without_a_drafter():
    model = tiny_target("qwen3", num_layers=2)
    sizes = {key: value for key, value in SIZES.items() if key != "num_draft_tokens"}
    traced = compilespec.trace(model, spec="none", keep_graphs=False, **sizes)
    report = compilespec.verify(traced, batch_sizes=(3,))
    assert report.ok, str(report)
    assert "splice_draft_loop" not in {check.pass_name for check in report.checks}
    parsed = json.loads(json.dumps(report.to_dict()))
    assert parsed["ok"]
    assert str(report).endswith("verify: none, torch.float64: all agree")


@pytest.fixture(scope="module")
def served():
    model = tiny_target("llama", num_layers=3)
    head = random_head(target_info(model, 128), aux_layers=(0, 1, 2), draft_vocab_size=61)
    with compilespec.compile(model, spec="eagle3", draft=head, backend="eager", **SIZES) as engine:
        yield engine


def test_an_engine_is_verified_and_serves_on(served):
    """It was built without the passes' graphs: they are made again."""
    before = served.generate([5, 6, 7])[0].token_ids
    report = compilespec.verify(served, phases=["decode"], batch_sizes=(2,))
    assert report.ok, str(report)
    assert served.generate([5, 6, 7])[0].token_ids == before
    chosen = compilespec.verify(served, passes=["commit_state"], batch_sizes=(1,))
    assert {check.pass_name for check in chosen.checks} == {"commit_state"}
    for wrong in ({"phases": ["training"]}, {"passes": ["no_pass"]}):
        with pytest.raises(InvalidOption):
            compilespec.verify(served, batch_sizes=(1,), **wrong)


@pytest.fixture(scope="module")
def traced():
    return program("llama")


def test_bisect_serves_prompts_against_the_captured_model(traced):
    report = compilespec.bisect(traced, [[5, 6, 7], [11], [3, 4] * 9], max_new_tokens=8)
    assert report.ok, str(report)
    assert "tokens of 3 prompts equal the model's" in str(report)
    with pytest.raises(InvalidOption, match="need as many expected"):
        compilespec.bisect(traced, [[1]], expected=[])


def test_bisect_says_so_when_the_tokens_part_and_the_passes_do_not(traced):
    """The tokens that are asked for are no token of the model."""
    report = compilespec.bisect(traced, [[5, 6, 7]], expected=[[VOCAB, VOCAB]])
    assert (report.tokens.prompt, report.tokens.position) == (0, 0)
    assert report.tokens.expected == VOCAB
    assert report.found is None
    assert not report.ok


def test_bisect_goes_from_wrong_tokens_to_the_node(monkeypatch):
    """A stale position in the target's attention, seen from the tokens."""
    read_state = importlib.import_module("compilespec.passes.splice.read_state")
    right = read_state.read_decode_state

    @functools.wraps(right)
    def stale(row_B, tokens_RS, seq_len_R, table, **sizes):
        return right(row_B, tokens_RS, (seq_len_R - 1).clamp(min=0), table, **sizes)

    monkeypatch.setattr(read_state, "read_decode_state", stale)
    model = tiny_target("llama", num_layers=3)
    head = random_head(target_info(model, 128), aux_layers=(0, 1, 2), draft_vocab_size=61)
    wrong = compilespec.trace(model, spec="eagle3", draft=head, **SIZES)
    report = compilespec.bisect(wrong, [[5, 6, 7], [9, 8, 7, 6]], max_new_tokens=8)
    assert report.tokens is not None
    assert (report.pass_name, report.found.phase) == ("read_state", "decode")
    assert report.found.case.startswith("call ")
    assert "role" in report.node.what
    assert report.wrong_batch_sizes


def test_a_loop_without_a_reference_is_not_called_verified(traced, monkeypatch):
    monkeypatch.setattr(draft_loops, "LOOP_REFERENCES", {})
    report = compilespec.verify(traced, phases=["decode"], passes=["splice_draft_loop"],
                                batch_sizes=(1,))  # fmt: skip
    assert not report.ok
    assert "NOT CHECKED: the draft loop 'recycled' has no reference" in str(report)
    assert issubclass(NotSupported, SpecError)


def test_the_compiled_step_agrees_with_its_graph(inductor_cache_dir):
    model = tiny_target("llama", torch.float32, num_layers=3)
    head = random_head(target_info(model, 128), aux_layers=(0, 1, 2), draft_vocab_size=61)
    with compilespec.compile(model, spec="eagle3", draft=head, **SIZES) as engine:
        report = compilespec.verify(engine, passes=["lower"])
    assert report.ok, str(report)
    assert {check.pass_name for check in report.checks} == {"lower"}


def test_comparison_is_bitwise_unless_bounded():
    one = torch.tensor([1.0, float("nan"), 0.0])
    assert compare(one.clone(), one, bound=None) is None
    assert compare(torch.tensor([1.0, float("nan"), -0.0]), one, bound=None) is not None
    assert compare(torch.tensor([1.0, 2.0, 0.0]), one, bound=1e3) is not None  # poison moved
    near = one + torch.tensor([1e-6, 0.0, 0.0])
    assert compare(near, one, bound=None).error == pytest.approx(1e-6, rel=0.1)
    assert compare(near, one, bound=1e-5) is None
    assert compare(one.double(), one, bound=1.0).error == float("inf")
    integers = torch.tensor([1, 2])
    assert compare(integers + 1, integers, bound=10.0) is not None
