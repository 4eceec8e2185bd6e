"""What a drafting method is: a capability record, a drafter, and a draft step.

Code outside a method's folder asks for capabilities, never for a method's name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from torch import Tensor, nn

from compilespec.methods.capabilities import Capabilities, Chain
from compilespec.program import HostProposal, ProgramConfig, TapSink, Traced
from compilespec.tracing.state_names import StateName
from compilespec.tracing.target_info import TargetInfo


class Drafter(nn.Module):
    """A drafter.  All ids are TARGET ids; d2t never leaks out of `propose`.

    A drafter provides the calls that the draft loop of its kind splices: recycled ones are
    `methods.recycled.RecycledDrafter`, direct ones `methods.direct.DirectDrafter`.
    """

    num_draft_tokens: int  # K that the checkpoint suggests
    kv_block_sizes: tuple[int, ...] = ()  # by draft step: their own KV groups (windowed)
    aux_layers: tuple[
        int, ...
    ] = ()  # hs indices: residual stream ENTERING layer k, n = last layer's output pre-norm
    chain: Chain = "module_rows"  # what the modules of a windowed drafter read
    kv_layers: tuple[int, ...] = ()  # target layers whose caches its attention reads (shared_kv)
    target_layers: Mapping[str, tuple[int, ...]] = MappingProxyType({})  # by kind of marker: the
    # numbers that its markers have in the target, whose caches and states they continue (in_place)
    copied_in: str | None = None  # the form of its own copies of the target's products
    recorder: TapSink | None = None  # receives the tapped hidden states that the step outputs
    propose_on_host: HostProposal | None = None  # proposes drafts on the host, between the calls
    given_state: Mapping[str, StateName] = MappingProxyType({})  # as it was before quantizing
    load_like: Callable[[Mapping[str, Tensor]], Drafter] | None = None  # from its checkpoint's
    # names; None where it came from no directory
    capabilities: Capabilities | None = None  # set if an option made them differ from the method's

    @property
    def max_draft_tokens(self) -> int | None:
        """The most drafts that it can give; None: any number."""
        return None

    def capture(self, config: ProgramConfig, info: TargetInfo) -> dict[str, Traced]:
        """Capture the calls that the draft loop of the method's kind splices, by name: none here.

        `passes/splice/draft_loops/` says what each loop needs.
        """
        return {}


class Method(Protocol):
    """The object that a method's folder provides and `methods/registry.py` lists."""

    capabilities: Capabilities

    def load(
        self, draft: str | Path | nn.Module | None, target: TargetInfo, options: Mapping[str, Any]
    ) -> Drafter | None:
        """Build the drafter from a checkpoint directory, or adopt a module; check it on the target.

        Args:
            draft: the drafter found for a method that needs draft weights, None for others.
        Returns: the drafter, or None for a method of kind "none".

        Raises: CheckpointError (missing, unexpected or misshapen tensors), DraftMismatch (sizes),
        InvalidOption (an option's value).
        """


@dataclass(frozen=True, kw_only=True)
class MethodConfig:
    """A method's name with its options: `spec=` takes one instead of a string."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
