"""spec="suffix+eagle3" and the like: the surer drafts count, and caches miss nothing."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import compilespec
from compilespec import SamplingParams
from compilespec.errors import InvalidOption, NotSupported, UnknownMethod
from compilespec.methods import eagle3, mtp, suffix
from compilespec.methods.combined import CombinedMethod
from compilespec.methods.registry import get_method
from tests.support.models import (
    VOCAB,
    DialDrafter,
    ask_all,
    assert_nothing_held,
    run_traffic,
    target_info,
    tiny_target,
)
from tests.support.scripted import Scripted, use

COUNTS = (0, 1, 3)
MAX_SEQ_LEN = 125
SIZES = ((5, 120), (21, 90), (1, 60))  # the first one ends at the maximum length


class Misled(suffix.SuffixDrafter):
    """A look-up that can be told to find, at every third length, what never follows."""

    def __init__(self, unused: int) -> None:
        super().__init__(max_match=5, min_match=1, num_past_texts=2, vocab_size=VOCAB)
        self.register_buffer("is_misled", torch.zeros(1, dtype=torch.bool))
        self.unused = unused

    def draft(self, history_BL: Tensor, length_B: Tensor, past_ML: Tensor) -> tuple[Tensor, Tensor]:
        found_BK, matched_B = super().draft(history_BL, length_B, past_ML)
        is_wrong_B = length_B % 3 == 0
        wrong_BK = torch.where(is_wrong_B.unsqueeze(1), self.unused, -1).expand_as(found_BK)
        misled_B = torch.where(is_wrong_B, 20, 0)
        return (
            torch.where(self.is_misled, wrong_BK, found_BK),
            torch.where(self.is_misled, misled_B, matched_B),
        )


class MisledMethod:
    capabilities = suffix.METHOD.capabilities

    def __init__(self, drafter: Misled) -> None:
        self.drafter = drafter

    def load(self, *_: Any) -> Misled:
        return self.drafter


@pytest.fixture(scope="module")
def lab() -> Iterator[Any]:
    """A look-up that may be wrong, and a head that is right if, and only if, its cache holds the
    true sequence.
    """
    model = tiny_target("llama", num_layers=2)
    asks = ask_all(model, SIZES)
    said = {token for ask in asks for token in ask.tokens}
    finder = Misled(next(token for token in range(VOCAB) if token not in said))
    head = eagle3.random_head(target_info(model, MAX_SEQ_LEN), aux_layers=(0, 1, 2))
    dial = DialDrafter(head, max_seq_len=MAX_SEQ_LEN, dtype=torch.float64)
    dial.know([*ask.prompt, *ask.tokens] for ask in asks)
    dial.draft_from_script(lambda position: False)
    with compilespec.compile(
        model, CombinedMethod(MisledMethod(finder), eagle3.METHOD), draft=dial,
        num_draft_tokens=COUNTS, backend="eager", max_batch_size=3, max_seq_len=MAX_SEQ_LEN,
        kv_cache_tokens=15 * 16,
    ) as engine:  # fmt: skip
        yield engine, asks, finder, dial


def at_random(seed: int) -> Iterator[int]:
    draw = random.Random(seed)
    while True:
        yield from [draw.choice(COUNTS)] * draw.choice((1, 1, 2, 5))


def expected_steps(taken: Sequence[int], num_prompt: int, num_output: int) -> list[int]:
    """Tokens a step: none of a misled look-up's drafts, all of the head's; both are there after a
    separate step, and after steps of K = 0 a catch-up drafts with the head.
    """
    steps, length, end = [], num_prompt + 1, num_prompt + num_output
    there = 3
    for before, count in itertools.pairwise([None, *taken]):
        if length >= end:
            break
        if before == 0 and count:
            there = 3
        right = 0 if length % 3 == 0 else min(count or 0, there)
        steps.append(min(1 + right, end - length))
        length, there = length + 1 + right, count or 0
    return steps


@pytest.mark.parametrize("seed", [None, 0, pytest.param(1, marks=pytest.mark.slow)])
def test_the_surer_one_drafts_and_the_models_cache_misses_nothing(lab: Any, seed: int | None):
    engine, asks, finder, _ = lab
    finder.is_misled.fill_(True)
    for ask in asks:
        policy = use(engine, Scripted(itertools.repeat(3) if seed is None else at_random(seed)))
        params = SamplingParams(max_new_tokens=len(ask.tokens), ignore_eos=True)
        (output,) = engine.generate([list(ask.prompt)], params)
        assert output.token_ids == list(ask.tokens)
        wanted = expected_steps(policy.taken, len(ask.prompt), len(ask.tokens))
        assert output.emitted_per_step == wanted


@pytest.mark.parametrize("misled", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_joins_leaves_preemption_and_the_maximum_length(lab: Any, misled: bool) -> None:
    engine, asks, finder, dial = lab
    finder.is_misled.fill_(misled)
    dial.draft_from_script(lambda position: position % 5 == 2)
    use(engine, Scripted(at_random(9)))
    before = engine.stats().num_preemptions
    for request, ask in zip(run_traffic(engine, asks * 2, (1, 2, 1, 3, 3)), asks * 2, strict=True):
        assert request.output_token_ids == list(ask.tokens)
    dial.draft_from_script(lambda position: False)
    assert engine.stats().num_preemptions > before
    assert engine.stats().num_recompiles == 0
    assert_nothing_held(engine)


def test_sampled_tokens_are_those_of_any_schedule(lab: Any) -> None:
    engine, asks, finder, _ = lab
    finder.is_misled.fill_(False)
    prompts, outputs = [list(ask.prompt) for ask in asks], []
    params = SamplingParams(max_new_tokens=40, ignore_eos=True, temperature=1.0, seed=7)
    for counts in (itertools.repeat(0), itertools.repeat(3), at_random(3)):
        use(engine, Scripted(counts))
        outputs.append([output.token_ids for output in engine.generate(prompts, params)])
    assert outputs[0] == outputs[1] == outputs[2]


def test_the_policy_itself(lab: Any) -> None:
    engine, asks, finder, _ = lab
    finder.is_misled.fill_(False)
    engine._scheduler.launches.adaptive.policy = engine._policy
    params = [SamplingParams(max_new_tokens=len(a.tokens), ignore_eos=True) for a in asks]
    outputs = engine.generate([list(ask.prompt) for ask in asks], params)
    assert [output.token_ids for output in outputs] == [list(ask.tokens) for ask in asks]
    plan = engine.plan()
    assert plan["method"] == "suffix+eagle3"
    assert sum(plan["adaptive"]["num_steps_by_reason"].values()) > 0


@pytest.mark.parametrize(
    ("spec", "counts"),
    [("ngram+draft_model", (1, 3)), ("suffix+mtp", 2), ("ngram+mtp_eagle", "auto")],
)
def test_other_pairs(spec: str, counts: Any) -> None:
    model = tiny_target("llama", num_layers=3)
    asks = ask_all(model, SIZES)
    info = target_info(model, MAX_SEQ_LEN)
    draft = {
        "draft_model": lambda: tiny_target("llama", num_layers=1, seed=3),
        "mtp": lambda: mtp.random_modules(info, 2),
        "mtp_eagle": lambda: mtp.random_modules(info, 1, recycled=True),
    }[spec.partition("+")[2]]()
    options = {"max_batch_size": 3, "max_seq_len": MAX_SEQ_LEN, "kv_cache_tokens": 15 * 16}
    program = compilespec.trace(model, spec, draft=draft, num_draft_tokens=counts, **options)
    report = compilespec.verify(program)
    assert report.ok, str(report)
    with compilespec.compile(
        model, spec, draft=draft, num_draft_tokens=counts, backend="eager", **options
    ) as engine:
        traffic = run_traffic(engine, asks * 2, (1, 2, 1, 3, 3))
        for request, ask in zip(traffic, asks * 2, strict=True):
            assert request.output_token_ids == list(ask.tokens)
        assert engine.stats().num_recompiles == 0


@pytest.mark.parametrize("counts", [3, COUNTS])
def test_every_pass_is_what_its_reference_says(counts: Any) -> None:
    model = tiny_target("llama", torch.float64, num_layers=2)
    head = eagle3.random_head(target_info(model, 128), aux_layers=(0, 1, 2), draft_vocab_size=61)
    program = compilespec.trace(
        model, "suffix+eagle3", draft=head, num_draft_tokens=counts, max_batch_size=3,
        max_seq_len=43, max_prefill_tokens=32,
    )  # fmt: skip
    report = compilespec.verify(program)
    assert report.ok, str(report)


@pytest.mark.parametrize(
    "spec", ["eagle3+suffix", "suffix+ngram", "suffix+user", "suffix+none", "suffix+ngram+eagle3"]
)
def test_pairs_that_cannot_be(spec: str) -> None:
    with pytest.raises(InvalidOption, match="in this order, such as 'suffix"):
        get_method(spec)


def test_a_misspelt_part_is_named() -> None:
    with pytest.raises(UnknownMethod, match="eagle4"):
        get_method("suffix+eagle4")


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"acceptance": "rejection"}, InvalidOption, "leave acceptance= at"),
        ({"draft_tree": compilespec.DraftTree(top_k=2, depth=2, num_nodes=4)}, NotSupported,
         "name 'eagle3' alone"),
    ],
)  # fmt: skip
def test_what_does_not_go_with_a_pair(options: Any, error: type, words: str) -> None:
    model = tiny_target("llama", num_layers=2)
    head = eagle3.random_head(target_info(model, 64), aux_layers=(0, 1, 2))
    with pytest.raises(error, match=words):
        compilespec.trace(model, "ngram+eagle3", draft=head, max_seq_len=64, **options)
