"""What a drafting method is: a capability record, a drafter, and a draft step.

Code outside a method's folder asks for capabilities, never for a method's name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from compilespec.program import HostProposal, ProgramConfig, TapSink, Traced

# How a method's draft loop walks the cache (ARCHITECTURE.md, kinds of draft loops); "direct" is one
# call that gives all K drafts and has no cache: n-gram match, extra heads, functions of a user;
# with "callback" they come from the host, between the calls; with "shared_kv" each is one query at
# a constant position on the target's caches.
DraftKind = Literal["none", "recycled", "windowed", "unshifted", "direct", "callback", "shared_kv"]

# Which hidden states the modules of a windowed drafter read (`passes/draft_loops/windowed.py`).
Chain = Literal["module_rows", "target_rows"]

FINAL_NORM = -1  # an aux layer: the hidden state that enters the target's head, after the last norm


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What a method needs from the engine.  Passes and the runtime branch on these fields only."""

    name: str
    kind: DraftKind
    needs_draft_weights: bool = False
    reads_hidden_states: bool = False  # the target's, tapped at the drafter's aux layers
    outputs_hidden_states: bool = False  # the taps leave the step, for the drafter's `recorder`
    own_kv_cache: bool = False  # the drafter writes a KV cache of its own
    lossless: bool = True
    chooses: bool = False  # stands for another method, which is picked before anything is built
    inside_target: bool = False  # the target's own checkpoint may hold the drafter
    folders: tuple[str, ...] = ()  # beside the target, after the one named as the method
    aliases: tuple[str, ...] = ()  # reference mode names that map to this method
    options: tuple[str, ...] | None = (
        None  # what `load` takes, by name; None: it checks them itself
    )

    @property
    def may_omit_drafts(self) -> bool:
        """Fewer than K drafts are legal: PAD stands where there is none."""
        return self.kind in ("direct", "callback")


@dataclass(frozen=True, kw_only=True)
class KVLayer:
    """What one attention layer of the target keeps in its cache."""

    num_heads: int
    key_dim: int
    value_dim: int
    window: int  # keys that a query of the target sees, 0 for all
    producer: int  # the layer whose keys and values these are: itself, or an earlier one


@dataclass(frozen=True, kw_only=True)
class TargetInfo:
    """What a drafter may need to know about the target it serves."""

    hidden_size: int
    vocab_size: int
    num_layers: int
    dtype: torch.dtype
    device: torch.device
    embedding: Tensor  # [V, D] input embedding weight, shared by identity
    lm_head: (
        Tensor  # [V, D] output head weight, shared by identity (the embedding itself when tied)
    )
    config: Any = None  # transformers config, when the target has one
    tokenizer: Any = None  # transformers tokenizer, when one is known
    max_seq_len: int = 0
    kv_layers: tuple[KVLayer, ...] = ()  # by layer


class Drafter(nn.Module):
    """A drafter.  All ids are TARGET ids; d2t never leaks out of `propose`.

    This class is a recycled drafter: the engine traces three calls, at these shapes ([B, S] first
    pass in decode, [1, T] in prefill, [B, 1] steps):
      combine(aux_BSE)            -> hidden_BSD    true target features to drafter width
      forward(input_ids_BS, position_ids_BS, hidden_BSD) -> (head_input_BSD, recycled_BSD)
      propose(head_input_BD)      -> token_B       int32 argmax, mapped to target ids
    Attention inside goes through `torch.ops.compilespec.attention`.

    Optional, in the class that has `propose`: logits(head_input_BD) -> [B, Vd], whose argmax
    `propose` maps, and `draft_ids`, int64 [Vd], their target ids (None: the same).  Drafts of
    sampled requests are then drawn with the target's own noise, and are accepted far more often.
    """

    num_draft_tokens: int  # K that the checkpoint suggests
    kv_block_sizes: tuple[int, ...] = ()  # by draft step: KV groups of their own (windowed)
    aux_layers: tuple[
        int, ...
    ] = ()  # hs indices: residual stream ENTERING layer k, n = last layer's output pre-norm
    kv_layers: tuple[int, ...] = ()  # target layers whose caches its attention reads (shared_kv)
    recorder: TapSink | None = None  # takes the taps that the step gives out
    propose_on_host: HostProposal | None = None  # where drafts come from between the calls
    capabilities: Capabilities | None = None  # where an option made them other than the method's

    def capture(self, config: ProgramConfig, info: TargetInfo) -> dict[str, Traced]:
        """Capture the calls that the draft loop of the method's kind splices, by name.

        A method of another kind overrides this; what its loop needs is said in
        `passes/draft_loops/`.
        """
        from compilespec.methods.capture import capture_recycled

        return capture_recycled(self, config, info)

    def combine(self, aux: Tensor) -> Tensor:
        raise NotImplementedError

    def propose(self, head_input: Tensor) -> Tensor:
        raise NotImplementedError


class Method(Protocol):
    """A method's folder provides one object of this shape, registered in `methods/__init__.py`."""

    capabilities: Capabilities

    def load(
        self, draft: str | Path | nn.Module | None, target: TargetInfo, options: Mapping[str, Any]
    ) -> Drafter | None:
        """Build the drafter from a checkpoint directory, or adopt a module; check it on the target.

        Args:
            draft: what was found for a method that needs draft weights, None for others.
        Returns: the drafter, or None for a method of kind "none".

        Raises: CheckpointError (missing, unexpected or misshapen tensors), DraftMismatch (sizes),
        InvalidOption (an option's value).
        """


@dataclass(frozen=True, kw_only=True)
class MethodConfig:
    """A method by name with its options: what `spec=` may be given instead of a string."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
