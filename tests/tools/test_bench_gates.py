"""The benchmark's own arithmetic: quantiles, turns, gates, batches, and the check of outputs."""

from __future__ import annotations

import json

import pytest
import torch

from tools.bench import gates
from tools.bench.check import Checker
from tools.bench.measure import interleave, quantiles
from tools.bench.prompts import encode_prompts, load_prompts
from tools.bench.speed import make_batches


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([5.0], (5.0, 5.0, 5.0)),
        ([3.0, 1.0, 2.0, 5.0, 4.0, 0.0], (1.0, 2.5, 4.0)),
        ([1.0, 2.0], (1.2, 1.5, 1.8)),
    ],
)
def test_quantiles(values, expected):
    assert tuple(quantiles(values).values()) == pytest.approx(expected)


def test_quantiles_of_nothing_is_an_error():
    with pytest.raises(ValueError, match="at least one"):
        quantiles([])


def test_interleave_rotates_who_goes_first_and_times_each_call():
    now = [0.0]
    order = []

    def way(name, seconds):
        def call(i):
            order.append((name, i))
            now[0] += seconds
            return 10

        return call

    calls = {"a": way("a", 1.0), "b": way("b", 2.0)}
    samples = interleave(calls, num_inputs=2, rounds=2, clock=lambda: now[0])
    assert order == [
        *[("a", 0), ("b", 0), ("b", 1), ("a", 1)],
        *[("a", 0), ("b", 0), ("b", 1), ("a", 1)],
    ]
    assert samples["a"].ms == [1000.0] * 4
    assert samples["b"].tokens_per_s == [5.0] * 4
    assert samples["b"].summary()["tokens_per_s_whole_run"] == pytest.approx(5.0)


SPEEDS = {
    gates.EAGER: 100.0,
    gates.STATIC: 250.0,
    f"{gates.LOOKUP} K=3": 200.0,
    gates.PLAIN: 240.0,
    f"{gates.EAGLE3} K=3": 270.0,
    f"{gates.EAGLE3} K=5": 260.0,
}


def test_gates_take_the_best_of_each_side():
    verdicts = gates.judge(SPEEDS, batch=1)
    required = [v for v in verdicts if v.gate.required]
    assert [(v.way, v.against) for v in required] == [
        (gates.PLAIN, gates.EAGER),
        (f"{gates.EAGLE3} K=3", gates.EAGER),
        (f"{gates.EAGLE3} K=3", gates.STATIC),
        (f"{gates.EAGLE3} K=3", gates.PLAIN),
    ]
    assert [v.ratio for v in required] == pytest.approx([2.4, 2.7, 1.08, 1.125])
    assert all(v.passed for v in required)
    goal = next(v for v in verdicts if not v.gate.required)
    assert not goal.passed
    assert not goal.failed


@pytest.mark.parametrize(
    ("changed", "num_failed"),
    [({gates.PLAIN: 149.0}, 1), ({gates.PLAIN: 246.0}, 1), ({gates.STATIC: 271.0}, 1), ({}, 0)],
)
def test_a_missed_gate_fails(changed, num_failed):
    verdicts = gates.judge(SPEEDS | changed, batch=1)
    assert sum(v.failed for v in verdicts) == num_failed


def test_gates_that_cannot_be_judged_are_named():
    speeds = {gates.EAGER: 1.0, gates.PLAIN: 2.0}
    assert {g.way for g in gates.missing(speeds)} == {gates.EAGLE3}
    assert gates.missing(SPEEDS) == []


@pytest.mark.parametrize("size", [1, 3, 8], ids="B{}".format)
def test_batches_hold_every_prompt_and_are_full(size):
    names = [f"p{i}" for i in range(7)]
    batches = make_batches(names, size)
    assert {name for batch in batches for name in batch} == set(names)
    assert all(len(batch) == size for batch in batches)


def test_batch_larger_than_the_prompts_repeats_them():
    assert make_batches(["a", "b"], 5) == [["a", "b", "a", "b", "a"]]


def test_prompts_are_sixteen_texts_that_any_vocabulary_can_encode(tmp_path):
    prompts = load_prompts()
    assert len(prompts) == 16
    assert len(set(prompts.values())) == 16
    assert all(120 < len(text) < 420 for text in prompts.values())  # 40 to 120 demo tokens
    ids = encode_prompts(prompts, tmp_path, vocab_size=61)
    assert all(0 <= i < 61 for row in ids.values() for i in row)


class Ladder(torch.nn.Module):
    """After token t, token t+1 is best (logit 8); t+2 has logit 8 - gap, all others 0."""

    def __init__(self, gap, dtype=torch.bfloat16):
        super().__init__()
        table_VV = torch.zeros(16, 16)
        for t in range(16):
            table_VV[t, (t + 1) % 16] = 8.0
            table_VV[t, (t + 2) % 16] = 8.0 - gap
        self.table_VV = torch.nn.Parameter(table_VV.to(dtype), requires_grad=False)

    def forward(self, input_ids, use_cache):
        return type("Output", (), {"logits": self.table_VV[input_ids]})


def test_checker_accepts_identical_text():
    comparison = Checker(Ladder(gap=4.0)).compare("w", 1, "p", [3], [4, 5, 6], [4, 5, 6])
    assert comparison.ok
    assert comparison.first_difference is None
    assert comparison.worst_margin == 0.0


@pytest.mark.parametrize(("gap", "ok"), [(0.0625, True), (0.5, False)])
def test_checker_judges_a_difference_by_its_margin(gap, ok):
    comparison = Checker(Ladder(gap)).compare("w", 1, "p", [3], [4, 6, 7], [4, 5, 6])
    assert comparison.first_difference == 1
    assert comparison.margin == pytest.approx(gap)
    assert comparison.ok is ok
    json.dumps(comparison.to_dict())


def test_checker_finds_a_wrong_token_after_the_texts_parted():
    comparison = Checker(Ladder(gap=0.0625)).compare("w", 1, "p", [3], [4, 6, 9], [4, 5, 6])
    assert comparison.first_difference == 1
    assert comparison.worst_index == 2
    assert not comparison.ok


def test_float32_is_held_to_a_tighter_bound():
    checker = Checker(Ladder(0.0625, torch.float32))
    assert not checker.compare("w", 1, "p", [3], [4, 6, 7], [4, 5, 6]).ok


def test_checker_refuses_a_text_of_another_length():
    with pytest.raises(ValueError, match="ignore EOS"):
        Checker(Ladder(1.0)).compare("w", 1, "p", [3], [4, 5], [4, 5, 6])
