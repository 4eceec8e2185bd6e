"""The context of a phase graph: what passes read, and the inputs and buffers they declare."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from compilespec.methods.base import Drafter
from compilespec.methods.capabilities import Capabilities
from compilespec.ops.device import CPU, DeviceTraits
from compilespec.passes.splice.acceptance.rule import STRICT, Acceptance
from compilespec.passes.splice.expansion import Expansion
from compilespec.passes.splice.logits_processor import LogitsProcessor
from compilespec.passes.splice.sharding.plan import Sharding
from compilespec.program import (
    BufferSpec,
    Derived,
    InputSpec,
    Phase,
    ProgramConfig,
    StepKey,
    StepKind,
    Traced,
    tells_evidence,
)


@dataclass(kw_only=True)
class PassContext:
    """The facts that passes read, and the inputs and buffers they declare; one for each graph."""

    phase: Phase
    kind: StepKind = "full"
    config: ProgramConfig
    capabilities: Capabilities
    target: Traced
    draft: Mapping[str, Traced]  # the drafter's captured calls, by the names that its loop uses
    drafter: Drafter = field(default_factory=Drafter)  # of a method without one: it reads nothing
    acceptance: Acceptance = STRICT
    draft_ids: Tensor | None = None  # int64 [N], ascending, on the CPU: all that it may propose
    traits: DeviceTraits = CPU  # what follows from the device
    logits_processor: LogitsProcessor | None = None  # traced into the step
    sharding: Sharding | None = None  # among the ranks of tensor parallelism; None: there is one
    latents: dict[str, Expansion | str] = field(default_factory=dict)  # see `absorb_latents`
    weights: dict[str, Tensor] = field(default_factory=dict)
    derived: dict[str, Derived] = field(default_factory=dict)  # weights made of others, by name
    inputs: dict[str, InputSpec] = field(default_factory=dict)  # by placeholder name
    declared: dict[str, InputSpec] = field(default_factory=dict)  # with those of earlier stages
    buffers: dict[str, BufferSpec] = field(default_factory=dict)

    @property
    def num_attention_layers(self) -> int:
        return self.target.num_attention_layers

    @property
    def num_recurrent_markers(self) -> int:
        return self.target.num_recurrent_markers

    @property
    def key(self) -> StepKey:
        """The key of the graph that the passes make."""
        return StepKey(self.phase, self.config.num_draft_tokens, self.kind)

    @property
    def greedy_only(self) -> bool:
        """True where all requests of a step want the argmax alone."""
        return self.kind == "greedy"

    @property
    def is_replay(self) -> bool:
        """True where the drafter alone runs, over inputs that other steps kept."""
        return self.kind == "replay"

    @property
    def has_drafter(self) -> bool:
        return self.capabilities.kind != "none"

    @property
    def drafts_in_place(self) -> bool:
        """True where the drafter writes into the target's caches and states."""
        return self.capabilities.kind == "in_place"

    @property
    def tells_evidence(self) -> bool:
        """True where the step says how sure its drafts are."""
        return tells_evidence(self.config, self.capabilities) and not self.is_replay

    @property
    def drafts_now(self) -> bool:
        """True where the drafter of the graph's loop runs in it."""
        finds = self.capabilities.looks_up and not self.capabilities.combines
        return self.config.num_draft_tokens > 0 or finds

    @property
    def may_omit_drafts(self) -> bool:
        """True where a row may hold PAD for a draft: from the method, from a step of a smaller K,
        or in a tree whose node has too few continuations.
        """
        sizes_differ = bool(self.config.several) or self.config.tree is not None
        return self.capabilities.may_omit_drafts or sizes_differ
