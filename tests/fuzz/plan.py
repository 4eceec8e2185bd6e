"""What a round compiles: a target, a method, K, sizes and switches."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from compilespec import DraftTree

MAX_SEQ_LEN = 112  # 7 blocks
RECURRENT = ("qwen3_5", "nemotron_h")  # a delta rule; Mamba-2
WITH_IMAGES = ("llava",)
FAMILIES = ("llama", "llama", "gemma3", "plain", *RECURRENT, *WITH_IMAGES)
TAKES_EMBEDS = ("llama", "gemma3", *RECURRENT, *WITH_IMAGES)
TAKES_ADAPTERS = ("llama", "gemma3", "llama", *RECURRENT)

# By method: K, or several of which every step takes one.
COUNTS: dict[str, tuple[Any, ...]] = {
    "none": (None,),
    "dial": (1, 3, 5, (0, 3), (0, 1, 3), (1, 4), (0, 2, 5)),
    "eagle3": (2, (0, 3)),
    "eagle": (3, (0, 2)),
    "mtp": (1, 3),
    "mtp_eagle": (3, (0, 1, 3)),
    "mtp_multi": (1, 3),
    "shared_kv": (3, (0, 1, 2)),
    "draft_model": (2, 3, (1, 3)),
    "ngram": (4, (0, 2, 5)),
    "suffix": (3, (0, 4)),
    "user": (3, (0, 3)),
    "user_host": (3,),
    "suffix+eagle3": (3, (0, 3)),
    "ngram+mtp_eagle": (2, (0, 1, 3)),
    "suffix+draft_model": (3,),
}
# Instead of K, for most rounds of these.
TREES: tuple[DraftTree, ...] = (
    DraftTree(top_k=2, depth=3, num_nodes=6),
    DraftTree(top_k=3, depth=2, num_nodes=5),
    DraftTree(choices=((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0))),
)
GROWS_TREES = ("eagle3", "eagle", "mtp_eagle", "draft_model")
# Half of the rounds have the drafters that lose acceptance where anything was lost.
WEIGHTS = {"dial": 8, "draft_model": 2, "user_host": 2}

# What requests may ask for; a round has some of it, so that each also meets steps without.
LIGHT = ("sampled", "penalties", "bias", "ids", "stop", "caps", "n", "priority", "leave", "text")
HEAVY = ("logprobs", "guide", "host")  # the host acts between their steps: no overlap


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One round."""

    seed: int
    number: int
    method: str
    family: str
    num_draft_tokens: Any
    has_traced_processor: bool
    policy: str  # of several K: "own" or "scripted"
    features: frozenset[str]
    num_orders: int  # by one thread, and as many by clients
    options: dict[str, Any] = field(default_factory=dict)  # further keywords of compile()

    @property
    def draw(self) -> random.Random:
        """A new source, always from the start."""
        return random.Random(f"{self.seed}:{self.number}")

    @property
    def most(self) -> int:
        """The largest K."""
        count = self.num_draft_tokens
        if "draft_tree" in self.options:
            return 3
        return max(count) if isinstance(count, tuple) else count or 0

    def __str__(self) -> str:
        options = ", ".join(f"{name}={value}" for name, value in self.options.items())
        return (
            f"{self.method} on {self.family}, K={self.num_draft_tokens}, policy {self.policy}, "
            f"{options}, traced processor {self.has_traced_processor}, requests with: "
            f"{', '.join(sorted(self.features)) or 'nothing special'}"
        )


def draw_plan(seed: int, number: int, num_orders: int) -> Plan:
    draw = random.Random(f"plan {seed}:{number}")
    method = draw.choices(list(COUNTS), [WEIGHTS.get(name, 1) for name in COUNTS])[0]
    features = {name for name in LIGHT if draw.random() < 0.6}
    features |= {name for name in HEAVY if draw.random() < 0.35}
    acceptance = draw.choice(("auto",) * 5 + ("rejection", "block"))
    count = draw.choice(COUNTS[method])
    if "+" in method:
        acceptance = "auto"
    if acceptance != "auto":  # drawn tokens have the right distribution, and are others; one K
        features.discard("sampled")
        count = max(count) if isinstance(count, tuple) else count
    batch = draw.choice((1, 2, 3, 4, 4))
    has_prompt_logprobs = draw.random() < 0.3
    options = {
        "overlap": draw.random() < 0.6,
        "max_batch_size": batch,
        "kv_cache_tokens": draw.choice((None, 112, 128, 160)),
        "enable_prefix_caching": draw.random() < 0.75,
        "max_prefill_tokens": draw.choice((8, 16, 32, 64)),
        "max_step_tokens": draw.choice((None, None, 24, 40)),
        "buckets": draw.choice((None, sorted({1, batch}), sorted({min(2, batch), batch}))),
        "acceptance": acceptance,
        "greedy_step": acceptance == "auto" and "host" not in features and draw.random() < 0.4,
        "host_processors": "host" in features,
        "prompt_logprobs": has_prompt_logprobs,
    }
    family = draw.choice(FAMILIES)
    if family in TAKES_EMBEDS and draw.random() < 0.4:
        features.add("embeds")
        options["prompt_embeds"] = True
    if family in TAKES_ADAPTERS and draw.random() < 0.5:
        features.add("adapter")
    if family in WITH_IMAGES:
        features.add("images")
        options["max_prefill_tokens"] = max(16, options["max_prefill_tokens"])
    has_tree = method in GROWS_TREES and family not in RECURRENT and draw.random() < 0.9
    if has_tree and acceptance != "block" and not options["host_processors"]:
        options["draft_tree"], count = draw.choice(TREES), None
    if options["enable_prefix_caching"] and draw.random() < 0.4:
        options["prefix_host_mib"] = 1
    return Plan(
        seed=seed, number=number, method=method, family=family, num_draft_tokens=count,
        has_traced_processor=draw.random() < 0.2,
        policy=draw.choice(("own", "scripted", "scripted", "scripted")),
        features=frozenset(features | ({"prompt_logprobs"} if has_prompt_logprobs else set())),
        num_orders=num_orders, options=options,
    )  # fmt: skip
