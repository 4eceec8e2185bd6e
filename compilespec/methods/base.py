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

DraftKind = Literal["none", "recycled", "windowed", "unshifted"]


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What a method needs from the engine.  Passes and the runtime branch on these fields only."""

    name: str
    kind: DraftKind  # how its draft loop walks the cache (DESIGN section 3, step 5)
    needs_draft_weights: bool = False
    needs_aux_hidden_states: bool = False  # taps of inner layers of the target
    own_kv_cache: bool = False  # the drafter writes a KV cache of its own
    lossless: bool = True
    aliases: tuple[str, ...] = ()  # reference mode names that map to this method


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
    max_seq_len: int = 0


class Drafter(nn.Module):
    """Drafter of a hidden-state method.  All ids are TARGET ids; d2t never leaks out of `propose`.

    The engine traces three calls, at these shapes ([B, S] first pass in decode, [1, T] in prefill,
    [B, 1] steps):
      combine(aux_BSE)            -> hidden_BSD    true target features to drafter width
      forward(input_ids_BS, position_ids_BS, hidden_BSD) -> (head_input_BSD, recycled_BSD)
      propose(head_input_BD)      -> token_B       int32 argmax, mapped to target ids
    Attention inside goes through `torch.ops.compilespec.attention`.
    """

    num_draft_tokens: int  # K that the checkpoint suggests
    aux_layers: tuple[
        int, ...
    ]  # hs indices: residual stream ENTERING layer k, n = last layer's output pre-norm

    def combine(self, aux: Tensor) -> Tensor:
        raise NotImplementedError

    def propose(self, head_input: Tensor) -> Tensor:
        raise NotImplementedError


class Method(Protocol):
    """A method's folder provides one object of this shape, registered in `methods/__init__.py`."""

    capabilities: Capabilities

    def load(
        self, draft: str | Path | nn.Module, target: TargetInfo, options: Mapping[str, Any]
    ) -> Drafter:
        """Build the drafter from a checkpoint directory, or adopt a module; check it on the target.

        Raises: CheckpointError (missing, unexpected or misshapen tensors), DraftMismatch (sizes),
        InvalidOption (unknown option).
        """


@dataclass(frozen=True, kw_only=True)
class MethodConfig:
    """A method by name with its options: what `spec=` may be given instead of a string."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
