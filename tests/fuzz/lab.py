"""The engine of a round: its drafter, its policy, and what is known of the drafts it must make."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import compilespec
from compilespec.methods import eagle3
from compilespec.runtime import kept_states
from compilespec.runtime.draft_policy import StepChoice
from compilespec.runtime.engine import Engine
from compilespec.runtime.request import Request
from compilespec.tracing.target_info import TargetInfo
from tests.fuzz.orders import CHANGING, Order
from tests.fuzz.plan import MAX_SEQ_LEN, Plan
from tests.fuzz.truth import adapters, beside, target, tokenizer
from tests.support.drafters import METHODS, traced_info
from tests.support.models import DialDrafter, poison, target_info

NUM_ENTRIES = 4096  # of what a DialDrafter knows


@dataclass(kw_only=True)
class Lab:
    """An engine, and for each request whose drafts can be foretold where they are wrong."""

    engine: Engine
    wrong: frozenset[int] = frozenset()  # positions whose drafts err on purpose
    judged: set[tuple[int, int]] = field(default_factory=set)  # (seed, sample)
    adapters: Mapping[str, Path] = field(default_factory=dict)  # to load again

    def is_judged(self, request: Request) -> bool:
        return (request.seed or 0, request.sample) in self.judged


class Policy:
    """K in runs of (K, steps)."""

    def __init__(self, runs: Iterator[tuple[int, int]]) -> None:
        self._runs, self._count, self._left = runs, 0, 0

    def choose(self, drafted: Sequence[int], batch: int, *, needs_replay: bool) -> StepChoice:
        if not self._left:
            self._count, self._left = next(self._runs)
        self._left -= 1
        return StepChoice(self._count)

    def begin_text(self) -> None: ...

    def observe(self, *args: Any, **kwargs: Any) -> None: ...

    def describe(self) -> dict[str, object]:
        return {}


def _runs(counts: Sequence[int], draw: random.Random) -> Iterator[tuple[int, int]]:
    while True:
        yield draw.choice(counts), draw.choice((1, 1, 2, 5, 11, 40))


def build(plan: Plan, orders: Sequence[Order]) -> Lab:
    """Compile; teach the drafter the answers, where it can learn them."""
    draw = random.Random(f"lab {plan.seed}:{plan.number}")
    wrong = frozenset(
        draw.sample(range(MAX_SEQ_LEN), 20) if plan.method == "dial" and draw.random() < 0.3 else ()
    )
    known, judged = _tell_apart(orders)
    keywords = _drafting(plan, known, wrong)
    room = {"max_adapters": 3} if "adapter" in plan.features else {}
    kept_states.FEWEST_BLOCKS, kept_states.RUNG = 1, 2  # prompts are short here
    engine = compilespec.compile(
        target(plan.family), backend="eager", max_seq_len=MAX_SEQ_LEN, tokenizer=tokenizer(),
        **(beside(plan) | keywords | plan.options | room),
    )  # fmt: skip
    if isinstance(plan.num_draft_tokens, tuple) and plan.policy != "own":
        runs = _runs(plan.num_draft_tokens, draw)
        scripted: Any = Policy(runs)
        assert engine._scheduler.launches.adaptive is not None
        engine._policy = engine._scheduler.launches.adaptive.policy = scripted
    poison(engine)
    loads = adapters(plan.family) if "adapter" in plan.features else {}
    judged = _judged(plan, orders, judged)
    return Lab(engine=engine, wrong=wrong, judged=judged, adapters=loads)


def _drafting(
    plan: Plan, known: list[tuple[list[int], int]], wrong: frozenset[int]
) -> dict[str, Any]:
    """The keywords of `compile()` that name method, drafter and K."""
    model = target(plan.family)
    if plan.method == "none":
        return {"spec": "none"}
    has_tree = "draft_tree" in plan.options
    count: dict[str, Any] = {} if has_tree else {"num_draft_tokens": plan.num_draft_tokens}
    if has_tree and plan.method == "eagle3":
        return {"spec": "eagle3", "draft": eagle3.random_head(_info(plan.family))}
    if plan.method == "dial":
        info = target_info(model, MAX_SEQ_LEN)
        head = eagle3.random_head(info, aux_layers=(0, 1, 2))
        dial = DialDrafter(
            head, max_seq_len=MAX_SEQ_LEN, dtype=torch.float64, num_entries=NUM_ENTRIES
        )
        dial.know((tokens for tokens, _ in known), starts=(start for _, start in known))
        dial.draft_from_script(lambda position: position in wrong)
        return {"spec": "eagle3", "draft": dial, **count}
    if plan.method == "draft_model":
        return {"spec": "draft_model", "draft": copy.deepcopy(model), **count}
    if plan.method == "user_host":
        heart = ByHeart(known, plan.most)
        return {"spec": "user", "draft": heart, "traced": False, **count}
    drafts = plan.method.rpartition("+")[2]
    made = METHODS[drafts](model, _info(plan.family), plan.most)
    return {"spec": plan.method, **made, **count}


class ByHeart:
    """Drafts on the host what follows in a known sequence, from the second token of its output."""

    def __init__(self, known: list[tuple[list[int], int]], count: int) -> None:
        self.num_draft_tokens = count
        self._following = {
            tuple(tokens[:end]): tokens[end : end + count]
            for tokens, start in known
            for end in range(start + 1, len(tokens))
        }

    def __call__(self, token_ids: list[int]) -> list[int]:
        return self._following.get(tuple(token_ids), [])


def _tell_apart(
    orders: Sequence[Order],
) -> tuple[list[tuple[list[int], int]], set[tuple[int, int]]]:
    """Answers (and where the output starts) that a drafter can learn: none that goes on otherwise
    after the same tokens; a drafter never sees the first token.  Also whose they are.
    """
    following: dict[tuple[int, ...], int] = {}
    known, judged = [], set()
    for order in orders:
        for sample, output in enumerate(order.expected):
            start = len(output.prompt_token_ids)
            tokens = [*output.prompt_token_ids, *output.token_ids]
            own = {tuple(tokens[1:end]): tokens[end] for end in range(start + 1, len(tokens))}
            is_new = all(following.get(key, token) == token for key, token in own.items())
            if is_new and len(following.keys() | own) < NUM_ENTRIES:
                following |= own
                known.append((tokens, start))
                judged.add((order.params.seed or 0, sample))
    return known, judged


def _judged(
    plan: Plan, orders: Sequence[Order], told_apart: set[tuple[int, int]]
) -> set[tuple[int, int]]:
    """Whose drafts are all right as long as the drafter has lost nothing."""
    if plan.method in ("dial", "user_host"):
        return told_apart
    if "draft_tree" in plan.options:
        return set()
    if plan.method == "draft_model" and not plan.has_traced_processor:
        return {(o.params.seed or 0, 0) for o in orders if not o.asked_for & CHANGING}
    return set()


@functools.cache
def _info(family: str) -> TargetInfo:
    return traced_info(target(family))
