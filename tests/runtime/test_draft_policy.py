"""K of a step by measured costs and recent acceptance: a simulated machine, no model."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from compilespec.program import NUM_KEPT
from compilespec.runtime import step_costs
from compilespec.runtime.acceptance_rates import JudgedDrafts, expected_accepted
from compilespec.runtime.draft_policy import LEARN_INTERVAL, Drafted, DraftPolicy
from compilespec.runtime.step_costs import StepCosts
from tests.support.fake_executor import geometry

COUNTS = (0, 2, 5)
# Milliseconds by K and batch: a machine that has room at batch 1, and none at batch 8.
COSTS = {
    (0, 1): 1.0, (2, 1): 1.5, (5, 1): 2.0,
    (0, 8): 4.0, (2, 8): 11.0, (5, 8): 23.0,
}  # fmt: skip
REPLAY = {1: 1.5, 8: 12.0}


class Machine:
    """Decodes `batch` requests for ever; each draft is right with the chance that `right` says."""

    def __init__(
        self,
        costs: dict[tuple[int, int], float] = COSTS,
        seed: int = 0,
        measured: dict[tuple[int, int], float] | None = None,
    ) -> None:
        self.costs = StepCosts(measured or costs, REPLAY)
        self.true = StepCosts(costs, REPLAY)
        self.policy = DraftPolicy(COUNTS, self.costs)
        self.draw = random.Random(seed)
        self.slowness, self.steps_left = 1.0, 0
        self.changes: Sequence[float] = ()  # what the slowness may become, now and then

    def run(self, num_tokens: int, batch: int, right: float) -> float:
        """Tokens a millisecond of the machine at its best, of new requests `num_tokens` long."""
        ms = emitted_total = 0.0
        backlog, done = 0, 0
        while done < num_tokens:
            cold = backlog > NUM_KEPT
            drafted = [] if cold else [Drafted(COUNTS[-1])] * batch
            choice = self.policy.choose(drafted, batch, needs_replay=backlog > 0)
            count = choice.num_draft_tokens
            if count and backlog and not cold:
                ms += self.true.replay(batch)
                backlog = 0
            emitted = [1 + self._accepted(0 if cold else count, right) for _ in range(batch)]
            elapsed = self._elapsed(count, batch)
            judged = [] if cold or not count else [JudgedDrafts(count, n - 1) for n in emitted]
            self.policy.observe(count, batch, elapsed, judged, is_trial=choice.is_trial)
            backlog += count == 0
            ms += elapsed / self.slowness
            emitted_total += sum(emitted)
            done += round(sum(emitted) / batch)
        return emitted_total / ms

    def fixed(self, count: int, batch: int, right: float) -> float:
        """Tokens a millisecond of a fixed K."""
        tokens = 1 + expected_accepted([right] * COUNTS[-1])[count]
        return batch * tokens / self.true.step(count, batch)

    def _elapsed(self, count: int, batch: int) -> float:
        if self.changes and not self.steps_left:
            self.slowness = self.draw.choice(self.changes)
            self.steps_left = self.draw.randint(5, 90)
        self.steps_left -= 1
        return self.true.step(count, batch) * self.slowness * self.draw.uniform(0.95, 1.05)

    def _accepted(self, count: int, right: float) -> int:
        accepted = 0
        while accepted < count and self.draw.random() < right:
            accepted += 1
        return accepted


@pytest.mark.parametrize("length", [40, 200, 3000])
@pytest.mark.parametrize("batch", [1, 8])
def test_where_drafts_never_match_little_is_lost(batch: int, length: int) -> None:
    machine = Machine()
    total = sum(machine.run(length, batch, 0.0) for _ in range(6000 // length))
    assert total / (6000 // length) > 0.95 * machine.fixed(0, batch, 0.0)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("right", [0.5, 0.8, 1.0])
@pytest.mark.parametrize("batch", [1, 8])
def test_the_best_k_is_found(batch: int, right: float, seed: int) -> None:
    machine = Machine(seed=seed)
    speed = sum(machine.run(300, batch, right) for _ in range(20)) / 20
    assert speed > 0.95 * max(machine.fixed(count, batch, right) for count in COUNTS)


def test_drafts_that_begin_to_match_are_used_again() -> None:
    """New requests bring drafters that are up to date: the machine looks again, and stays."""
    machine = Machine()
    for _ in range(10):
        machine.run(200, 1, 0.0)
    assert machine.policy.num_steps[0] > machine.policy.num_steps[5]
    for _ in range(30):
        machine.run(200, 1, 0.95)
    assert machine.run(200, 1, 0.95) > 0.9 * machine.fixed(5, 1, 0.95)


def test_drafts_that_cannot_pay_are_not_tried_again() -> None:
    """Not even right ones make up for the steps: each K is met once, and that is all."""
    costs = {(count, size): 1.0 + 3 * count for count in COUNTS for size in (1, 8)}
    machine = Machine(costs)
    machine.run(5000, 8, 1.0)
    assert machine.policy.num_steps[2] <= 1
    assert machine.policy.num_steps[5] <= 1


def test_a_pause_of_the_machine_does_not_spoil_its_cost() -> None:
    costs = StepCosts(COSTS, REPLAY)
    costs.update(0, 1, 1e6)
    assert 1.0 < costs.step(0, 1) < 1.1
    assert costs.step(0, 3) == COSTS[0, 8]  # a batch of 3 runs like the next size
    assert costs.step(0, 99) == COSTS[0, 8]


def test_a_time_that_cannot_be_right_is_looked_at_once() -> None:
    """It is above that of a larger K, or takes longer than its tokens one by one."""
    costs = StepCosts({(0, 1): 1.0, (2, 1): 9.0, (4, 1): 8.0, (8, 1): 3.0}, {})
    assert costs.doubtful(1) == [2, 4]
    policy = DraftPolicy((0, 2, 4, 8), costs)
    assert policy.choose([Drafted(8)], 1) == (2, True)
    policy.observe(2, 1, 1.5, [JudgedDrafts(2, 0)], is_trial=True)
    assert costs.doubtful(1) == [4]
    assert costs.step(2, 1) == pytest.approx(1.5)
    assert StepCosts({(0, 1): 300.0, (2, 1): 1.5, (5, 1): 2.0}, {}).doubtful(1) == [0]


def test_steps_of_a_model_are_decided_together() -> None:
    """As long as the requests are as many, and what was not learnt yet is before it is told."""
    policy = DraftPolicy(COUNTS, StepCosts(COSTS, REPLAY))
    for batch in [1] * (LEARN_INTERVAL + 2) + [2]:
        count = policy.choose([Drafted(5)] * batch, batch).num_draft_tokens
        policy.observe(count, batch, COSTS[count, 1], [JudgedDrafts(count, count)] * batch)
    assert policy.reasons["decided with the step before"] == LEARN_INTERVAL  # of 7 and of 1
    assert policy.reasons.total() == LEARN_INTERVAL + 3
    assert sum(policy.num_steps.values()) == LEARN_INTERVAL + 3
    first, *_ = policy.describe()["acceptance_by_position"]  # type: ignore[misc]
    assert first > 0.9


def test_later_drafts_are_judged_given_the_earlier_ones() -> None:
    policy = DraftPolicy(COUNTS, StepCosts(COSTS, REPLAY))
    for _ in range(300):  # the first is always right, the second never
        policy.observe(5, 1, 2.0, [JudgedDrafts(5, 1)])
    rates: Any = policy.describe()["acceptance_by_position"]
    assert rates[0] > 0.97
    assert rates[1] < 0.06
    assert rates[2] == pytest.approx(rates[1], abs=1e-3)  # never tried: as the one before
    assert expected_accepted(rates)[5] == pytest.approx(rates[0] * (1 + rates[1]), abs=0.01)


def policy_that_met_all() -> DraftPolicy:
    """Of batches of 1, every K has been served."""
    policy = DraftPolicy(COUNTS, StepCosts(COSTS, REPLAY))
    for count in COUNTS:
        policy.observe(count, 1, COSTS[count, 1], [JudgedDrafts(count, count)])
    return policy


def test_a_requests_own_k_counts() -> None:
    """Requests that take no drafts make those of others too dear."""
    policy = policy_that_met_all()
    for _ in range(100):
        policy.observe(5, 1, 2.0, [JudgedDrafts(5, 5)])
    assert policy.choose([Drafted(5)], 1).num_draft_tokens == 5
    assert policy.choose([Drafted(0)], 1).num_draft_tokens == 0


def test_drafts_of_a_few_requests_must_be_worth_the_time_of_all() -> None:
    """Three of eight have drafts that are always right, and steps take half as long again: 14
    tokens instead of 8, but those who have none, and end the batch, only wait longer.
    """
    times = {(0, 8): 4.0, (2, 8): 6.0, (5, 8): 14.0}
    policy = DraftPolicy(COUNTS, StepCosts(times, {}), looks_up=True)
    for _ in range(100):
        for count in COUNTS:
            policy.observe(count, 8, times[count, 8], [JudgedDrafts(2, 2, confidence=1)])
    found = Drafted(5, confidence=1, num_drafts=2, is_found=True)
    nothing = Drafted(5, num_drafts=0, is_found=True)
    assert policy.choose([found] * 3 + [nothing] * 5, 8).num_draft_tokens == 0
    assert policy.choose([found] * 6 + [nothing] * 2, 8).num_draft_tokens == 2
    assert policy.choose([found] * 3, 8).num_draft_tokens == 0  # the others have no drafter


def test_a_slow_machine_does_not_make_other_k_look_fast():
    """Every step takes half as long again for a while: the K that pays stays in use."""
    policy = policy_that_met_all()
    for _ in range(200):
        policy.observe(5, 1, COSTS[5, 1], [JudgedDrafts(5, 5)])
    assert policy.choose([Drafted(5)], 1).num_draft_tokens == 5
    for _ in range(60):
        policy.observe(5, 1, 1.5 * COSTS[5, 1], [JudgedDrafts(5, 5)])
        assert policy.choose([Drafted(5)], 1).num_draft_tokens == 5
    grown = [policy.costs.step(count, 1) / COSTS[count, 1] for count in COUNTS]
    assert all(1.3 < ratio < 1.55 for ratio in grown)


@pytest.mark.parametrize("right", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("batch", [1, 8])
def test_a_machine_that_is_slow_now_and_then_does_not_mislead(batch: int, right: float) -> None:
    """Its speed says nothing of how the K compare."""
    machine = Machine({**COSTS, (2, 8): 6.0, (5, 8): 10.0})
    machine.changes = (1.0, 1.3, 1.6)
    machine.run(3000, batch, right)
    speed = sum(machine.run(300, batch, right) for _ in range(30)) / 30
    assert speed > 0.95 * max(machine.fixed(count, batch, right) for count in COUNTS)


@pytest.mark.parametrize("factor", [0.8, 1.25])
@pytest.mark.parametrize("wrong", COUNTS)
def test_times_that_are_a_little_wrong_cost_little(wrong: int, factor: float) -> None:
    """A K that seems a quarter dearer than it is may stay out of use, if another is near."""
    true = {**COSTS, (2, 8): 8.0, (5, 8): 14.0}  # all drafts right: 2, 3 and 3.4 tokens a ms
    measured = {key: ms * (factor if key[0] == wrong else 1) for key, ms in true.items()}
    machine = Machine(true, measured=measured)
    machine.run(6000, 8, 1.0)
    speed = sum(machine.run(300, 8, 1.0) for _ in range(10)) / 10
    assert speed > 0.85 * max(machine.fixed(count, 8, 1.0) for count in COUNTS)


def test_a_slow_minute_leaves_no_k_behind():
    """Every step of one K took long; once they do not, the others are no slower than before."""
    costs = StepCosts(COSTS, REPLAY)
    before = costs.table()
    for _ in range(100):
        costs.update(2, 1, 1000.0)
    assert costs.table()["K=5, batch 1"] > 10 * before["K=5, batch 1"]
    costs.update(2, 1, before["K=2, batch 1"])
    after = costs.table()
    assert {k: after[k] for k in after if k.endswith("batch 1")} == pytest.approx(
        {k: before[k] for k in before if k.endswith("batch 1")}, abs=1e-3
    )


class Clock:
    """An executor, and the time that its steps take: plain ones behind another K are slower."""

    def __init__(self) -> None:
        self.geometry = geometry(num_draft_tokens=2, several=(0, 2), max_batch_size=1)
        self.now, self.last, self.cold = 0.0, 0, [1.0]

    def launch_decode(self, rows: Sequence[int], count: int) -> float:
        """Returns its milliseconds."""
        if count != self.last:
            self.last, self.cold = count, [1.0] if count else [1.0, 1.1, 1.2, 1.5]
        ms = COSTS[count, 1] * (self.cold.pop() if len(self.cold) > 1 else 1.0)
        self.now += ms / 1e3
        return ms

    def collect(self, handle: float) -> list[list[int]]:
        return []

    def perf_counter(self) -> float:
        return self.now


def test_steps_are_timed_as_they_run_in_service(monkeypatch) -> None:
    """The first plain steps after one with drafts are slower, and tell little of the others."""
    machine: Any = Clock()
    monkeypatch.setattr(step_costs, "time", machine)
    costs = step_costs.measure(machine)
    right = [COSTS[0, 1], COSTS[2, 1]]
    assert [costs.step(count, 1) for count in (0, 2)] == pytest.approx(right)


@pytest.mark.parametrize("wrong", [(0, 2, 5), (2, 5), (5,), (0,)])
@pytest.mark.parametrize("right", [0.0, 1.0])
def test_times_that_were_taken_on_a_busy_machine_do_not_stay(right: float, wrong: Sequence[int]):
    """Some K seemed to take 300 times as long when the engine started."""
    machine = Machine()
    measured = {key: ms * (300 if key[0] in wrong else 1) for key, ms in COSTS.items()}
    machine.policy = DraftPolicy(COUNTS, StepCosts(measured, REPLAY))
    for _ in range(40):
        machine.run(100, 1, right)
    speed = sum(machine.run(300, 1, right) for _ in range(10)) / 10
    assert speed > 0.95 * max(machine.fixed(count, 1, right) for count in COUNTS)


def test_a_new_text_is_tried_once() -> None:
    """After texts whose drafts failed, one whose drafts are right is drafted soon; another that
    fails costs no more than before.
    """

    def speed(right: float, *, is_told: bool) -> float:
        ratios = []
        for seed in range(6):
            machine = Machine(seed=seed)
            machine.run(2000, 1, 0.1)
            machine.policy._budget_ms = 0.0  # other texts were tried just now
            if is_told:
                machine.policy.begin_text()
            ratios.append(machine.run(200, 1, right) / machine.fixed(0, 1, right))
        return sum(ratios) / len(ratios)

    assert speed(0.95, is_told=True) > 1.15 * speed(0.95, is_told=False)
    assert speed(0.1, is_told=True) > 0.95 * speed(0.1, is_told=False)
