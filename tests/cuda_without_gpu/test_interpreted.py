"""Engines whose steps are the code generated for CUDA, interpreted: tokens are those of eager."""

from __future__ import annotations

import pytest

from tools.without_gpu.prove import INTERPRETED, faults_of, run_part

pytest.importorskip("triton")
OTHERS = {"qwen3_5": ("cached_recurrence", "cached_conv")}


@pytest.mark.parametrize("case", INTERPRETED)
def test_tokens_are_those_of_the_interpreted_graphs(case: str) -> None:
    """Greedy, sampled, filtered and penalised rows, by full and greedy steps; llama with several K,
    and in bfloat16 by the margin rule.
    """
    part = run_part(f"interpreted {case}")
    assert not faults_of(part)
    *requests, launched = part["records"]
    assert len(requests) == 6
    assert len({tuple(request["cuda"]) for request in requests}) > 1
    assert launched["generated_kernels"] > 20
    expected = {"paged_attention", "sample", "draw", "argmax_linear", *OTHERS.get(case, ())}
    assert expected <= set(launched["own_operators"])
