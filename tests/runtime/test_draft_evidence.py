"""K by what a look-up found: simulated texts on a simulated machine, no model."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compilespec.methods.registry import get_method
from compilespec.passes.splice.evidence import (
    FIRST_MATCH,
    MATCHES,
    NUM_BITS,
    NUM_CONFIDENCES,
    Evidence,
    read_outcome,
)
from compilespec.runtime.acceptance_rates import JudgedDrafts
from compilespec.runtime.adaptive import AdaptiveDrafts
from compilespec.runtime.draft_policy import Drafted, DraftPolicy
from compilespec.runtime.step_costs import StepCosts
from tests.support.fake_executor import geometry

COUNTS = (0, 2, 4, 8)
SUFFIX = get_method("suffix").capabilities
# Milliseconds by K and batch: a machine that has room at batch 1, and little at batch 8.
COSTS = {
    (0, 1): 1.0, (2, 1): 1.15, (4, 1): 1.3, (8, 1): 1.6,
    (0, 8): 4.0, (2, 8): 7.0, (4, 8): 10.0, (8, 8): 16.0,
}  # fmt: skip
LENGTH = 400


def never(draw: random.Random) -> list[int]:
    return list(range(LENGTH))


def always(draw: random.Random) -> list[int]:
    return list(range(40)) * (LENGTH // 40 + 2)


def ordinary(draw: random.Random) -> list[int]:
    """Phrases that come again among words that do so by chance."""
    phrases = [[draw.randrange(400) for _ in range(draw.randint(3, 12))] for _ in range(12)]
    text: list[int] = []
    while len(text) < LENGTH:
        text += draw.choice(phrases)
        text += [draw.randrange(400) for _ in range(draw.randint(0, 8))]
    return text


def misleading(draw: random.Random) -> list[int]:
    """Every token was there before; what follows it is anybody's guess."""
    return [draw.randrange(24) for _ in range(LENGTH)]


class Text:
    """A request whose tokens are known; n-grams of 1 to 3 are looked up in what was said."""

    def __init__(self, tokens: Sequence[int], own: int | None = None) -> None:
        self.tokens, self.length = list(tokens), 2
        self.backlog, self.row, self.evidence = 0, 0, None
        self.params = SimpleNamespace(num_draft_tokens=own)
        self.drafts: list[int] = []
        self.places: dict[tuple[int, ...], int] = {}  # where each n-gram stood last
        self.num_placed = 1
        self.found = self.look_up()

    @property
    def output_token_ids(self) -> list[int]:
        return self.tokens[1 : self.length]

    def look_up(self) -> Evidence:
        for end in range(self.num_placed, self.length):
            for size in range(1, min(3, end) + 1):
                self.places[tuple(self.tokens[end - size : end])] = end
        self.num_placed = self.length
        for size in (3, 2, 1):
            end = self.places.get(tuple(self.tokens[self.length - size : self.length]), 0)
            if size <= self.length and end:
                self.drafts = self.tokens[end : min(end + COUNTS[-1], self.length)]
                return Evidence(len(self.drafts), FIRST_MATCH + size - 1)
        self.drafts = []
        return Evidence(0, 0)

    def step(self, count: int) -> tuple[list[int], Evidence]:
        right = 0
        rest = self.tokens[self.length :]
        while (
            right < len(self.drafts) and self.drafts[right : right + 1] == rest[right : right + 1]
        ):
            right += 1
        given = rest[: min(right, count) + 1]
        self.length += len(given)
        found = self.look_up()
        return given, found._replace(goes_on=right > count)


def speed(
    texts: Sequence[Text], choose: Callable[[Sequence[Text]], int], *,
    observe: Callable[..., Any] = lambda *_: None, seed: int = 0,
) -> float:  # fmt: skip
    """Tokens a millisecond of requests that run side by side, until the first one's text ends."""
    draw, batch = random.Random(seed), len(texts)
    true, ms, num_tokens = StepCosts(COSTS, {}), 0.0, 0
    while all(text.length < LENGTH - 20 for text in texts):
        count = choose(texts)
        stepped = [text.step(count) for text in texts]
        elapsed = true.step(count, batch) * draw.uniform(0.95, 1.05)
        given, evidence = [tokens for tokens, _ in stepped], [one for _, one in stepped]
        observe(given, evidence, elapsed)
        ms += elapsed
        num_tokens += sum(map(len, given))
    return num_tokens / ms


def adaptive_speed(make: Any, batch: int, *, is_late: bool = False, seeds: int = 3) -> float:
    """Of one controller that serves one batch of requests after the other."""
    sizes = geometry(num_draft_tokens=8, several=COUNTS, capabilities=SUFFIX)
    policy = DraftPolicy(COUNTS, StepCosts(COSTS, {}), looks_up=True)
    adaptive = AdaptiveDrafts(SimpleNamespace(geometry=sizes), policy)  # type: ignore[arg-type]
    speeds = []
    for seed in range(seeds):
        texts: Any = [Text(make(random.Random(100 * seed + i))) for i in range(batch)]
        for text in texts:
            text.evidence = text.found
        plans: list[Any] = []
        waiting: list[Any] = []

        def choose(texts: Any, plans: list[Any] = plans) -> int:
            plans.append(adaptive.begin(texts, is_late=is_late))
            return int(plans[-1].num_draft_tokens)

        def observe(
            given: Any, evidence: Any, elapsed: float, texts: Any = texts, plans: Any = plans,
            waiting: Any = waiting,
        ) -> None:  # fmt: skip
            waiting.append((plans[-1], texts, given, evidence, elapsed))
            if len(waiting) > is_late:
                adaptive.end(*waiting.pop(0))

        speeds.append(speed(texts, choose, observe=observe, seed=seed))
    return sum(speeds[1:]) / len(speeds[1:])


def fixed_speed(make: Any, batch: int, count: int, seeds: int = 3) -> float:
    speeds = [
        speed([Text(make(random.Random(100 * seed + i))) for i in range(batch)], lambda _: count)
        for seed in range(1, seeds)
    ]
    return sum(speeds) / len(speeds)


@pytest.mark.parametrize("batch", [1, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("make", [never, always, ordinary, misleading])
def test_as_fast_as_the_best_k_and_never_slower_than_plain(make: Any, batch: int) -> None:
    fixed = {count: fixed_speed(make, batch, count) for count in COUNTS}
    found = adaptive_speed(make, batch)
    assert found > 0.95 * max(fixed.values())
    assert found > 0.97 * fixed[0]
    if make is ordinary and batch == 1:  # what was found says which steps are worth a draft
        assert found > 1.02 * max(fixed.values())


@pytest.mark.parametrize("batch", [1, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("make", [never, always, ordinary, misleading])
def test_evidence_that_is_a_step_late(make: Any, batch: int) -> None:
    fixed = {count: fixed_speed(make, batch, count) for count in COUNTS}
    found = adaptive_speed(make, batch, is_late=True)
    assert found > 0.93 * max(fixed.values())
    assert found > 0.95 * fixed[0]


@given(st.lists(st.sampled_from([never, always, ordinary, misleading]), min_size=2, max_size=5),
       st.integers(0, 2**16))  # fmt: skip
@settings(deadline=None, max_examples=6)
def test_a_text_of_several_kinds_is_never_much_slower_than_plain(kinds: Any, seed: int) -> None:
    def make(draw: random.Random) -> list[int]:
        text: list[int] = []
        while len(text) < LENGTH:
            text += draw.choice(kinds)(random.Random(seed))[: draw.randint(20, 200)]
        return text

    assert adaptive_speed(make, 1, seeds=2) > 0.95 * fixed_speed(make, 1, 0, seeds=2)


def test_nothing_found_is_not_even_decided() -> None:
    """Such steps are plain ones."""
    sizes = geometry(num_draft_tokens=8, several=COUNTS, capabilities=SUFFIX)
    policy = DraftPolicy(COUNTS, StepCosts(COSTS, {}), looks_up=True)
    adaptive = AdaptiveDrafts(SimpleNamespace(geometry=sizes), policy)  # type: ignore[arg-type]
    text: Any = Text(never(random.Random(0)))
    text.evidence = text.found
    for _ in range(64):
        plan = adaptive.begin([text])
        given, evidence = text.step(plan.num_draft_tokens)
        adaptive.end(plan, [text], [given], [evidence], 1.0)
    reasons = policy.describe()["num_steps_by_reason"]
    assert reasons["nothing to verify"] == 64  # type: ignore[index]
    assert not reasons.get("trial")  # type: ignore[attr-defined]


def test_a_match_is_taken_at_once_and_wrong_ones_are_left() -> None:
    policy = DraftPolicy(COUNTS, StepCosts(COSTS, {}), looks_up=True)
    for count in COUNTS:
        policy.observe(count, 1, COSTS[count, 1], [])
    weak, strong = FIRST_MATCH, FIRST_MATCH + 3
    for _ in range(40):  # judged by plain steps: the first draft was not the token that came
        policy.observe(0, 1, 1.0, [JudgedDrafts(1, 0, weak), JudgedDrafts(1, 1, strong)])
    assert policy.choose([Drafted(8, weak, 8, is_found=True)], 1).num_draft_tokens == 0
    assert policy.choose([Drafted(8, strong, 8, is_found=True)], 1).num_draft_tokens > 0
    assert policy.choose([Drafted(8, strong, 2, is_found=True)], 1).num_draft_tokens == 2
    assert policy.choose([Drafted(8, weak, 8, is_found=True)], 1).num_draft_tokens == 0


def test_what_a_model_drafts_follows_its_usual_acceptance_as_well() -> None:
    """Unsure drafts make a step shorter, and one such step does not end drafting."""
    costs = {(count, 1): 1 + 0.3 * count for count in (0, 1, 3, 5)}
    policy = DraftPolicy((0, 1, 3, 5), StepCosts(costs, {1: 1.0}))
    for count in (0, 1, 3, 5):
        policy.observe(count, 1, costs[count, 1], [])
    for _ in range(60):
        policy.observe(5, 1, 2.5, [JudgedDrafts(5, 5, 8)])
        policy.observe(5, 1, 2.5, [JudgedDrafts(5, 0, 1)])
    assert policy.choose([Drafted(5, 8, 5)], 1).num_draft_tokens == 5
    by_confidence = policy.acceptance.by_confidence()
    assert by_confidence[8][0] > 0.9
    assert by_confidence[1][0] < 0.1


def test_an_outcome_is_read_as_it_is_packed() -> None:
    most = NUM_CONFIDENCES - 1
    for tokens, drafts, sure, goes_on in ((1, 0, 0, 0), (65, 64, most, 1), (3, 8, 9, 0)):
        packed = tokens + (drafts << NUM_BITS) + (sure << 2 * NUM_BITS) + (goes_on << 3 * NUM_BITS)
        assert packed < 2**31
        assert read_outcome(packed) == (tokens, Evidence(drafts, sure, bool(goes_on)))
    assert len(MATCHES) + FIRST_MATCH == NUM_CONFIDENCES
