"""The context of a phase graph: what passes read, and the inputs and buffers they declare."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from compilespec.methods.capabilities import Capabilities, Chain
from compilespec.ops.device import CPU, DeviceTraits
from compilespec.passes.splice.acceptance.rule import STRICT, Acceptance
from compilespec.passes.splice.expansion import Expansion
from compilespec.passes.splice.logits_processor import LogitsProcessor
from compilespec.passes.splice.sharding.plan import Sharding
from compilespec.program import (
    BufferSpec,
    InputSpec,
    Phase,
    ProgramConfig,
    StepKey,
    StepKind,
    Traced,
)


@dataclass(kw_only=True)
class PassContext:
    """The facts that passes read, and the inputs and buffers they declare; one for each graph."""

    phase: Phase
    config: ProgramConfig
    capabilities: Capabilities
    target: Traced
    draft: Mapping[str, Traced]  # the drafter's captured calls, by the names that its loop uses
    aux_layers: tuple[int, ...] = ()
    chain: Chain = "module_rows"  # what the modules of a windowed drafter read
    acceptance: Acceptance = STRICT
    kv_layers: tuple[int, ...] = ()  # target layers whose caches a shared_kv drafter reads
    kv_block_sizes: tuple[int, ...] = ()  # by draft step, if they have their own KV groups
    draft_ids: Tensor | None = None  # int64 [N], ascending, on the CPU: all that it may propose
    traits: DeviceTraits = CPU  # what follows from the device
    fuse_head: bool | None = None  # heads give no logits; None: on GPUs, as sizes say
    greedy_only: bool = False  # strict, for requests that need only the argmax
    logits_processor: LogitsProcessor | None = None  # traced into the step
    sees_ahead: bool = False  # whether tokens of a prompt may see later ones
    sharding: Sharding | None = None  # among the ranks of tensor parallelism; None: there is one
    read_only: frozenset[str] = frozenset()  # state that this graph reads, and others write
    expanded: Mapping[str, Traced] = field(default_factory=dict)  # `draft` before latents
    latents: dict[str, Expansion | str] = field(default_factory=dict)  # see `absorb_latents`
    weights: dict[str, Tensor] = field(default_factory=dict)
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
        """Which of a program's graphs the passes make."""
        kind: StepKind = "greedy" if self.greedy_only else "full"
        kind = "replay" if self.read_only else kind
        return StepKey(self.phase, self.config.num_draft_tokens, kind)

    @property
    def has_drafter(self) -> bool:
        return self.capabilities.kind != "none"

    @property
    def tells_evidence(self) -> bool:
        """True where the step says how sure its drafts are, for the host to choose the next K."""
        several = self.config.max_draft_tokens is not None and not self.read_only
        return several and self.capabilities.drafts_in_step

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
        config = self.config
        several = config.max_draft_tokens is not None or config.tree is not None
        return self.capabilities.may_omit_drafts or several
