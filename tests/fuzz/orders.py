"""The requests of a round: what each asks for, how it is read, and what it must give."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from compilespec import EmbedsPrompt, SamplingParams
from compilespec.runtime.outputs import GenerationOutput
from tests.fuzz.plan import Plan
from tests.fuzz.truth import ADAPTERS, LETTERS, Truth, embeds_table, text_of
from tests.support.images import IMAGE
from tests.support.images import prompt as image_prompt
from tests.support.models import VOCAB

REPLACEMENT = "\ufffd"
DEFAULTS = vars(SamplingParams())
# Parameters under which a copy of the target, as drafter, need not say what the target says.
CHANGING = frozenset(
    {"sampled", "penalties", "bias", "ids", "guide", "host", "adapter", "embeds", "images"}
)


@dataclass(frozen=True, kw_only=True, eq=False)  # prompts may be tensors
class Order:
    """One prompt; `params.seed` names it, no other of the round has the same."""

    prompt: Any  # token ids, text, embeddings, or what a processor of images returns
    params: SamplingParams
    priority: int = 0
    way: str = "submit"  # how it is served and read
    leaves: Literal["abort", "abandon"] | None = None
    leave_after: int = 0  # deltas or steps
    asked_for: frozenset[str] = frozenset()
    expected: tuple[GenerationOutput, ...] = ()
    free_texts: tuple[str, ...] = ()  # without stop strings

    def __str__(self) -> str:
        own = vars(self.params)
        asked = [f"{name}={own[name]!r}" for name, value in DEFAULTS.items() if own[name] != value]
        leaves = f", leaves: {self.leaves} after {self.leave_after}" if self.leaves else ""
        return f"prompt {self.prompt!r}, {', '.join(asked)}, by {self.way}{leaves}"


DIRECT_WAYS = ("submit", "submit", "quiet", "generate", "stream")
SERVED_WAYS = ("result", "iterate", "iterate", "wait", "async", "async", "generate")
CAN_LEAVE = ("submit", "stream", "iterate", "async")
CAN_ABANDON = ("stream", "iterate", "async")
TAKES_SAMPLES = ("generate", "stream")  # n > 1


def draw_orders(
    plan: Plan, draw: random.Random, truth: Truth, ways: tuple[str, ...]
) -> list[Order]:
    """`plan.num_orders` of them, each with its answer; many begin alike, or go on from one."""
    beginnings = [[draw.randrange(3, VOCAB) for _ in range(48)] for _ in range(2)]
    orders: list[Order] = []
    for _ in range(plan.num_orders):
        answered = [o.expected[0].prompt_token_ids + o.expected[0].token_ids for o in orders[-5:]]
        orders.append(_draw_order(plan, draw, truth, [*beginnings, *beginnings, *answered], ways))
    return orders


def _draw_order(
    plan: Plan, draw: random.Random, truth: Truth, beginnings: list[list[int]],
    ways: tuple[str, ...],
) -> Order:  # fmt: skip
    given, prompt = _draw_given(plan, draw, _draw_prompt(plan, draw, beginnings))
    asked: dict[str, dict[str, Any]] = {
        name: make(draw)
        for name, make in FIELDS.items()
        if name in plan.features and draw.random() < 0.4
    }
    way = draw.choice(ways)
    if way not in TAKES_SAMPLES:
        asked.pop("n", None)
    fields: dict[str, Any] = {
        "seed": draw.getrandbits(62),
        "max_new_tokens": draw.choice((1, 2, 7, 15, 30, 30, 45, 90)),
        "ignore_eos": draw.random() < 0.7,
    }
    for part in asked.values():
        fields |= part
    fields["max_new_tokens"] = max(fields.get("min_new_tokens", 1), fields["max_new_tokens"])
    order = Order(
        prompt=prompt, params=SamplingParams(**fields), way=way, asked_for=frozenset(asked) | given,
        priority=draw.choice((0, 0, 1, -2)) if "priority" in plan.features else 0,
        **_draw_leaving(plan, draw, way),
    )  # fmt: skip
    return _answered(plan, draw, truth, order, fields)


def _draw_prompt(plan: Plan, draw: random.Random, beginnings: list[list[int]]) -> Any:
    if "text" in plan.features and draw.random() < 0.2:
        return "".join(chr(draw.choice(LETTERS)) for _ in range(draw.randint(1, 30)))
    start = draw.choice(beginnings)[: draw.choice((0, 5, 16, 17, 33, 40, 48, 80))]
    end = [draw.randrange(3, VOCAB) for _ in range(draw.choice((1, 1, 2, 9, 20)))]
    return [*start, *end]


def _draw_given(
    plan: Plan, draw: random.Random, prompt: Any
) -> tuple[frozenset[str], Any]:  # what it has, and the prompt with that
    if isinstance(prompt, list) and "images" in plan.features:
        prompt = [one if one < IMAGE else 3 for one in prompt]
    if not isinstance(prompt, list) or draw.random() < 0.5:
        return frozenset(), prompt
    kinds = [kind for kind in ("embeds", "images") if kind in plan.features]
    kind = draw.choice(kinds) if kinds else ""
    if kind == "embeds":  # the same beginnings as ids have, and as rows of another dtype
        dtype = draw.choice((torch.float64, torch.float64, torch.float32, torch.bfloat16))
        rows = embeds_table(plan.family)[prompt].to(dtype)
        return frozenset({kind}), EmbedsPrompt(rows, draw.choice((None, prompt)))
    if kind == "images":
        words = prompt[:24]
        at = draw.randrange(len(words) + 1)
        given = image_prompt(plan.family, words[:at], None, words[at:], seed=draw.randrange(4))
        return frozenset({kind}), given
    return frozenset(), prompt


def _draw_leaving(plan: Plan, draw: random.Random, way: str) -> dict[str, Any]:
    if "leave" not in plan.features or way not in CAN_LEAVE or draw.random() < 0.6:
        return {}
    leaves = "abandon" if way in CAN_ABANDON and draw.random() < 0.5 else "abort"
    if way == "stream":
        leaves = "abandon"
    return {"leaves": leaves, "leave_after": draw.choice((1, 1, 2, 4, 9, 20))}


def _answered(
    plan: Plan, draw: random.Random, truth: Truth, order: Order, fields: dict[str, Any]
) -> Order:
    """With what plain decoding gives, and a stop string or id taken from that."""
    outputs = free = truth.answer(order.prompt, order.params)
    if not order.asked_for - {"logprobs", "prompt_logprobs", "caps"} and outputs[0].error is None:
        assert truth.is_the_models_own(outputs[0]), f"plain decoding itself is wrong: {order}"
    may_stop = "stop" in plan.features and "min_new_tokens" not in fields  # it holds stop ids back
    if may_stop and outputs[0].token_ids and draw.random() < 0.5:
        stop = _draw_stop(draw, outputs[0])
        if stop:
            params = SamplingParams(**{**fields, **stop})
            order = replace(order, params=params, asked_for=order.asked_for | set(stop))
            outputs = truth.answer(order.prompt, params)
    return replace(
        order, expected=tuple(outputs), free_texts=tuple(output.text or "" for output in free)
    )


def _draw_stop(draw: random.Random, output: GenerationOutput) -> dict[str, Any]:
    """What ends this output early: a piece of its text, or one of its tokens."""
    if draw.random() < 0.3:
        return {"stop_token_ids": tuple(draw.sample(output.token_ids[-20:], 1))}
    pieces = [piece for piece in (output.text or "").split(REPLACEMENT) if len(piece) > 1]
    if not pieces:
        return {}
    piece = draw.choice(pieces)
    at = draw.randrange(len(piece) - 1)
    return {"stop": ("never said", piece[at : at + draw.choice((2, 3, 4))])}


# --- what a request may ask for ---


def _sampled(draw: random.Random) -> dict[str, Any]:
    fields: dict[str, Any] = {"temperature": draw.choice((0.3, 0.7, 1.0, 1.3))}
    fields |= draw.choice(({}, {}, {"top_k": 9}, {"top_p": 0.8}, {"min_p": 0.05}))
    return fields


def _penalties(draw: random.Random) -> dict[str, Any]:
    return draw.choice(
        (
            {"repetition_penalty": 1.3},
            {"presence_penalty": 1.2},
            {"frequency_penalty": 0.5, "repetition_penalty": 0.9},
        )
    )


def _bias(draw: random.Random) -> dict[str, Any]:
    return {"logit_bias": {draw.randrange(VOCAB): draw.choice((-5.0, 2.0, 6.0)) for _ in range(4)}}


def _ids(draw: random.Random) -> dict[str, Any]:
    ids = tuple(draw.sample(range(3, VOCAB), 30))
    return draw.choice(
        (
            {"allowed_token_ids": (2, *ids)},
            {"bad_token_ids": ids},
            {"min_new_tokens": draw.choice((3, 12)), "stop_token_ids": ids},
        )
    )


def _guide(draw: random.Random) -> dict[str, Any]:
    stem = [draw.randrange(3, VOCAB) for _ in range(draw.randint(1, 6))]
    options = [
        [
            *stem[: draw.randint(0, 6)],
            *(draw.randrange(3, VOCAB) for _ in range(draw.randint(1, 9))),
        ]
        for _ in range(4)
    ]
    fields: dict[str, Any] = {"guide": options}
    if draw.random() < 0.3:
        fields["guide_after_token_id"] = draw.randrange(3, VOCAB)
    return fields


def _host(draw: random.Random) -> dict[str, Any]:
    return {"logits_processor": _pusher(draw.randint(2, 9))}


def _pusher(every: int) -> Callable[[list[int], Any], Any]:
    def push(tokens: list[int], logits_V: Tensor) -> Tensor:
        logits_V[(tokens[-1] + len(tokens)) % every :: every] += 2.0
        return logits_V

    return push


FIELDS: dict[str, Callable[[random.Random], dict[str, Any]]] = {
    "sampled": _sampled,
    "penalties": _penalties,
    "bias": _bias,
    "ids": _ids,
    "guide": _guide,
    "host": _host,
    "logprobs": lambda draw: {"logprobs": draw.choice((0, 1, 5))},
    "prompt_logprobs": lambda draw: {"prompt_logprobs": draw.choice((0, 3))},
    "caps": lambda draw: {"num_draft_tokens": draw.choice((0, 1, 2, 2))},
    "adapter": lambda draw: {"adapter": draw.choice(ADAPTERS)},
    "n": lambda draw: {"n": draw.choice((2, 3))},
}


def spelled(output: GenerationOutput) -> str | None:
    """The text by plain Python, where the prompt ends with a whole character; else None."""
    prompt = text_of(output.prompt_token_ids)
    return None if prompt.endswith(REPLACEMENT) else text_of(output.token_ids)
