"""An independent causal language model drafts for the target: any family, any size, one
vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compilespec.errors import DraftMismatch, InvalidOption
from compilespec.loading import load_target
from compilespec.methods.base import Capabilities, Drafter, TargetInfo
from compilespec.methods.capture import output_widths
from compilespec.program import ProgramConfig, Traced
from compilespec.trace import EXAMPLE_SHAPE, trace_call, trace_target


class ModelDrafter(Drafter):
    """The model as it is; it is traced by the target's tracer."""

    def __init__(self, model: nn.Module, max_seq_len: int | None) -> None:
        super().__init__()
        self.model, self.max_seq_len = model, max_seq_len
        self.num_draft_tokens = 0  # a model suggests none

    def capture(self, config: ProgramConfig, info: TargetInfo) -> dict[str, Traced]:
        """ "forward" (input_ids, position_ids -> logits at [B, T]) and "propose" (logits_BV -> the
        best id that the target has, int32 [B]).

        Raises: DraftMismatch (a smaller vocabulary, fewer positions), TraceError.
        """
        if self.max_seq_len is not None and self.max_seq_len < config.max_seq_len:
            raise DraftMismatch(
                f"the draft model takes {self.max_seq_len} positions, the program "
                f"{config.max_seq_len}: give max_seq_len={self.max_seq_len} or less"
            )
        forward = trace_target(self.model, name="draft")
        (vocab_size,) = output_widths(forward)
        if vocab_size < info.vocab_size:
            raise DraftMismatch(
                f"the draft model knows {vocab_size} ids, the target {info.vocab_size}; expected "
                f"one vocabulary (the draft's may be padded): choose a draft model of the target's "
                f"tokenizer"
            )
        known = info.vocab_size

        def propose(logits_BV: Tensor) -> Tensor:
            return logits_BV[:, :known].argmax(-1).to(torch.int32)

        logits = torch.zeros(EXAMPLE_SHAPE[0], vocab_size, dtype=config.dtype, device=config.device)
        arguments = {"logits_BV": (logits, (0,))}
        return {
            "forward": forward,
            "propose": trace_call(self, propose, arguments, name="draft.propose", owner="draft"),
        }

    def describe(self) -> str:
        count = sum(parameter.numel() for parameter in self.model.parameters())
        return f"draft model {type(self.model).__name__}, {count / 1e6:.2f}M parameters"


class DraftModelMethod:
    """A model of its own with a KV cache of its own."""

    capabilities = Capabilities(
        name="draft_model",
        kind="unshifted",
        needs_draft_weights=True,
        own_kv_cache=True,
        aliases=("DRAFT_TARGET",),
    )

    def load(
        self, draft: str | Path | nn.Module | None, target: TargetInfo, options: Mapping[str, Any]
    ) -> ModelDrafter:
        """Load a directory in the target's dtype, or adopt a module as it is.

        Raises: ModelNotFound, CheckpointError, InvalidOption (an option was given, no module).
        """
        if options:
            raise InvalidOption(
                f"unknown option {', '.join(sorted(options))}; method 'draft_model' knows none"
            )
        if isinstance(draft, nn.Module):
            loaded = load_target(draft)
        elif isinstance(draft, str | Path):
            loaded = load_target(draft, dtype=target.dtype, device=target.device)
        else:
            raise InvalidOption(
                f"spec='draft_model' needs draft= a directory or a module; got "
                f"{type(draft).__name__}"
            )
        return ModelDrafter(loaded.model, loaded.max_seq_len)


METHOD = DraftModelMethod()
