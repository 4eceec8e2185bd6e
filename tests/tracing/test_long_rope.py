"""Rotary tables of short and long sequences (LongRoPE): a request has the table for its length."""

from __future__ import annotations

import pytest
import torch

import compilespec
from compilespec import SamplingParams
from compilespec.program import LONG_ROPE, markers, module_path
from compilespec.tracing.target import trace_target
from tests.support.models import long_rope_target, recomputed

LIMIT = 24  # the longest sequence of the short table
ASKS = ((5, 12), (40, 12), (20, 4), (30, 1), (20, 30))  # prompt, new tokens


def asked() -> tuple[list[list[int]], list[SamplingParams]]:
    prompts = [[3 + (11 * i + n) % 90 for i in range(n)] for n, _ in ASKS]
    return prompts, [SamplingParams(max_new_tokens=count, ignore_eos=True) for _, count in ASKS]


@pytest.mark.parametrize("family", ["phi3", "llama"])
def test_requests_of_a_batch_do_not_change_each_other(family: str) -> None:
    """The table of the long ones, of the short ones; the last outgrows the short table and has the
    long one from its beginning, regardless of its batch.
    """
    model = long_rope_target(family)
    prompts, params = asked()
    expected = [recomputed(model, prompt, n) for prompt, (_, n) in zip(prompts, ASKS, strict=True)]
    with compilespec.compile(
        model, spec="ngram", num_draft_tokens=2, backend="eager", max_seq_len=96, max_batch_size=5,
    ) as engine:  # fmt: skip
        together = [output.token_ids for output in engine.generate(prompts, params)]
        alone = [engine.generate([p], q)[0].token_ids for p, q in zip(prompts, params, strict=True)]
    assert together[:4] == expected[:4]
    assert together == alone  # prefixes found in the cache are those of the same table, too


def test_one_table_serves_where_no_request_is_longer() -> None:
    model = long_rope_target("llama")
    assert LONG_ROPE not in trace_target(model, longest=LIMIT, by_request=True).arguments
    assert LONG_ROPE in trace_target(model, longest=LIMIT + 1, by_request=True).arguments
    assert LONG_ROPE not in trace_target(model, longest=LIMIT + 1).arguments


def test_the_pass_computes_what_its_reference_does() -> None:
    program = compilespec.trace(long_rope_target("phi3"), max_seq_len=96, max_batch_size=3)
    report = compilespec.verify(program)
    assert report.ok, str(report)
    assert "long_rope_R" in {buffer.name for buffer in program.buffers}


def test_the_model_is_as_it_was() -> None:
    model = long_rope_target("llama")
    before = {name: value.clone() for name, value in model.named_buffers()}
    trace_target(model, longest=LIMIT + 1, by_request=True)
    after = dict(model.named_buffers())
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_modules_keep_their_paths() -> None:
    """So that drafters find the target's layers, and adapters its products."""
    traced = trace_target(long_rope_target(), longest=LIMIT + 1, by_request=True)
    paths = [module_path(marker) for marker in markers(traced.graph_module)]
    assert paths == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
