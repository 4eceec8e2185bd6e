"""The options of serving: facts of the program, and decisions of the pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from compilespec.program import HostProposal
from compilespec.runtime.draft_policy import DraftPolicy
from compilespec.runtime.image_prompts import ImageReader
from compilespec.runtime.outputs import FinishReason
from compilespec.runtime.request import Request


@dataclass(frozen=True, kw_only=True)
class ServingOptions:
    """The parts that an `Engine` is given beside its executor and its tokenizer."""

    eos_token_ids: Iterable[int] = ()
    """Ids that end every request that does not ignore them."""

    generation_defaults: Mapping[str, Any] = field(default_factory=dict)
    """The checkpoint's sampling defaults, for `SamplingParams.of`."""

    plan: Mapping[str, Any] = field(default_factory=dict)
    """The decisions (method, K, buckets) and their reasons; returned by `Engine.plan`."""

    graphs: Mapping[Any, Any] = field(default_factory=dict)
    """Every graph with its history."""

    buckets: Sequence[int] = ()
    """Batch sizes that decode runs at; empty where it runs at any size."""

    overlap: bool = False
    """Launch a step before the tokens of the last one are read (see `Scheduler`)."""

    prefix_lookahead: int | None = None
    """Find the blocks of known prompts again (see `PrefixCache`); None: never."""

    max_step_tokens: int | None = None
    """Tokens of a step, prefill and decode together (see `Scheduler`); None: no limit."""

    policy: DraftPolicy | None = None
    """Chooses K of every step, where the program has several."""

    propose: HostProposal | None = None
    """Drafts from the host, called before every verify step for each request."""

    on_finish: Callable[[Request, FinishReason], None] | None = None
    """Called with every request that ends, while it still has its row."""

    on_preempt: Callable[[Request], None] | None = None
    """Called with every request that loses its row and will be computed anew."""

    images: ImageReader | None = None
    """Reads prompts with images, where the model takes them."""

    count_recompiles: Callable[[], int] = lambda: 0
    """Returns the compilations since the program was ready."""

    count_state_copies: Callable[[], int] = lambda: 0
    """Returns the number of copies of the host's writes into state rows."""

    graph_report: Callable[[], dict[str, Any] | None] = lambda: None
    """Returns the graphs captured so far; part of the plan."""
