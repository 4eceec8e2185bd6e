"""A drafter that gives all its drafts in one call, without its own cache."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from compilespec.errors import DraftMismatch, InvalidOption
from compilespec.methods.base import Drafter
from compilespec.program import PAD, ProgramConfig, Traced
from compilespec.tracing.capture import EXAMPLE_SHAPE, trace_call
from compilespec.tracing.target_info import TargetInfo

INPUTS = ("history_BL", "length_B", "past_ML", "hidden_BE")


class DirectDrafter(Drafter):
    """Override `draft`; the names of its parameters say which of these it reads:

    history_BL  int32 [B, max_seq_len]: the request's tokens, the newest last, then -1
    length_B    int32 [B]: how many of them are valid, at least 2
    past_ML     int32 [M, max_seq_len]: what the last M requests that ended had, prompt included,
                in no order, each followed by -1; M = `self.num_past_texts`
    hidden_BE   [B, A*D]: the target's hidden states at the position before the newest token, those
                of `aux_layers` concatenated (FINAL_NORM: what enters the head)

    `draft` returns [B, K] token ids of the target, K = `self.num_draft_tokens`; an id outside the
    vocabulary, such as -1, is not a draft: it and the ids after it are not accepted.  It may also
    return how sure it is, as a second tensor: [B] integers, 0 where it has nothing to propose,
    larger ones for surer drafts (the length of a match, say).  Steps of several K choose K by it.
    """

    num_past_texts = 0

    @property
    def drafting(self) -> Callable[..., Tensor]:
        """The callable whose parameters say what it reads."""
        draft: Callable[..., Tensor] = self.draft  # type: ignore[assignment]
        return draft

    def capture(self, config: ProgramConfig, info: TargetInfo) -> dict[str, Traced]:
        """The one call, "draft", at [B, ..] with B symbolic.

        Raises: InvalidOption (unknown parameter, hidden states without aux layers), DraftMismatch
        (not K drafts), TraceError.
        """
        self.num_draft_tokens = config.num_draft_tokens
        drafting, names = self.drafting, input_names(self.drafting)
        if "hidden_BE" in names and not self.aux_layers:
            raise InvalidOption("a drafter that reads hidden_BE must set aux_layers")
        if "past_ML" in names and self.num_past_texts < 1:
            raise InvalidOption("a drafter that reads past_ML must set num_past_texts")
        arguments = {
            name: (self._example(name, config, info), () if name == "past_ML" else (0,))
            for name in names
        }
        vocab_size = info.vocab_size

        def call(*tensors: Tensor) -> tuple[Tensor, ...]:
            found = drafting(**dict(zip(names, tensors, strict=True)))
            ids, *sure_B = found if isinstance(found, tuple) else (found,)  # type: ignore[var-annotated]
            kept_BK = torch.where((ids >= 0) & (ids < vocab_size), ids, PAD).to(torch.int32)
            return kept_BK, *(sure.to(torch.int32) for sure in sure_B)

        traced = trace_call(self, call, arguments, name="draft.draft", owner="draft")
        output = next(node for node in reversed(traced.graph_module.graph.nodes))
        shape = tuple(output.args[0][0].meta["example_value"].shape)
        if len(shape) != 2 or shape[1] != config.num_draft_tokens:
            raise DraftMismatch(
                f"the drafter must return [B, K] ids with K={config.num_draft_tokens}; got "
                f"{list(shape)}; set num_draft_tokens= to its number of drafts"
            )
        return {"draft": traced}

    def _example(self, name: str, config: ProgramConfig, info: TargetInfo) -> Tensor:
        batch, device = EXAMPLE_SHAPE[0], config.device
        if name == "hidden_BE":
            width = len(self.aux_layers) * info.hidden_size
            return torch.zeros(batch, width, dtype=config.dtype, device=device)
        rows = self.num_past_texts if name == "past_ML" else batch
        shape = (rows,) if name == "length_B" else (rows, config.max_seq_len)
        return torch.ones(shape, dtype=torch.int32, device=device)


def input_names(drafting: Callable[..., Any]) -> tuple[str, ...]:
    """What a drafting function reads.  Raises: InvalidOption for parameters it cannot be given."""
    names = tuple(inspect.signature(drafting).parameters)
    unknown = [name for name in names if name not in INPUTS]
    if unknown or not names:
        raise InvalidOption(
            f"a drafting function's parameters must be of {', '.join(INPUTS)}; got "
            f"{', '.join(unknown) or 'none'}"
        )
    return names
