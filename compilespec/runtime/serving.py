"""The options of serving: parts of the program, and decisions of the pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from compilespec.program import SpecProgram
from compilespec.runtime.draft_policy import DraftPolicy
from compilespec.runtime.image_prompts import ImageReader
from compilespec.runtime.prefix_tiers import PrefixTiers
from compilespec.runtime.weight_updates import WeightUpdates


@dataclass(frozen=True, kw_only=True)
class EngineReport:
    """What an engine tells of its work: the plan, buckets, captured graphs, and counts."""

    plan: Mapping[str, Any] = field(default_factory=dict)
    """The decisions (method, K, buckets) and their reasons; returned by `Engine.plan`."""

    buckets: Sequence[int] = ()
    """Batch sizes that decode runs at; empty where it runs at any size."""

    captured: Callable[[], dict[str, Any] | None] = lambda: None
    """Returns the graphs captured so far; part of the plan."""

    count_recompiles: Callable[[], int] = lambda: 0
    """Returns the compilations since the program was ready."""

    count_state_copies: Callable[[], int] = lambda: 0
    """Returns the number of copies of the host's writes into state rows."""

    explain: Callable[..., Any] | None = None
    """Says why drafts were lost, given the engine, prompts and parameters; None: nothing can."""


@dataclass(frozen=True, kw_only=True)
class ServingOptions:
    """The parts that an `Engine` is given beside its executor and its tokenizer."""

    program: SpecProgram | None = None
    """What is served: its graphs, and a drafter that proposes or records on the host."""

    eos_token_ids: Iterable[int] = ()
    """Ids that end every request that does not ignore them."""

    generation_defaults: Mapping[str, Any] = field(default_factory=dict)
    """The checkpoint's sampling defaults, for `SamplingParams.of`."""

    report: EngineReport = EngineReport()
    """What the engine tells of its work."""

    overlap: bool = False
    """Launch a step before the tokens of the last one are read (see `Scheduler`)."""

    shares_prefixes: bool = False
    """Find the blocks of known prompts again (see `PrefixCache`)."""

    tiers: PrefixTiers | None = None
    """Find them beyond the pool as well, in host memory and in a folder; None: nowhere else."""

    max_step_tokens: int | None = None
    """Tokens of a step, prefill and decode together (see `Scheduler`); None: no limit."""

    policy: DraftPolicy | None = None
    """Chooses K of every step, where the program has several."""

    updates: WeightUpdates | None = None
    """Changes the weights; None: they cannot change."""

    images: ImageReader | None = None
    """Reads prompts with images, where the model takes them."""
