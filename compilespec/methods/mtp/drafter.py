"""The MTP drafter: a chain of modules, each with its own cache, or the first one recycled."""

from __future__ import annotations

import contextlib
from typing import cast

from torch import Tensor, nn

from compilespec.methods.capabilities import FINAL_NORM, Chain
from compilespec.methods.capture import capture_windowed
from compilespec.methods.mtp.config import MtpConfig
from compilespec.methods.mtp.module import MtpStep
from compilespec.methods.recycled import RecycledDrafter
from compilespec.program import ProgramConfig, Traced
from compilespec.tracing.attention import MASKED, registered_as
from compilespec.tracing.masks import read_masks
from compilespec.tracing.target_info import TargetInfo


class MtpDrafter(RecycledDrafter):
    """The MTP modules of a checkpoint.

    Windowed: module i proposes draft i, over rows of its own cache.  Recycled: module 0 drafts
    every token, its output the hidden state of the next row.
    """

    def __init__(
        self,
        config: MtpConfig,
        steps: nn.ModuleList,
        *,
        recycled: bool = False,
        chain: Chain = "module_rows",
        num_target_layers: int,
    ) -> None:
        super().__init__()
        self.config, self.recycled, self.chain = config, recycled, chain
        self.steps = nn.ModuleList(list(steps)[:1]) if recycled else steps
        self.num_draft_tokens = config.num_draft_tokens
        self.aux_layers = (num_target_layers if config.hidden == "pre_norm" else FINAL_NORM,)

    def capture(self, config: ProgramConfig, info: TargetInfo) -> dict[str, Traced]:
        """Trace the calls that its kind of draft loop needs."""
        with registered_as(MASKED) if self.config.chooses_keys else contextlib.nullcontext():
            calls = super().capture(config, info) if self.recycled else self._windowed(config, info)
        for traced in {id(call): call for call in calls.values()}.values():
            if traced.num_attention_layers and self.config.chooses_keys:
                read_masks(traced, self)
        return calls

    def _windowed(self, config: ProgramConfig, info: TargetInfo) -> dict[str, Traced]:
        return capture_windowed(self, config, info)

    def combine(self, aux: Tensor) -> Tensor:
        """Return the target's hidden state unchanged."""
        return aux

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, hidden: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Module 0 over rows [B, S]; see `MtpStep.forward`."""
        output: tuple[Tensor, Tensor] = self.steps[0](input_ids, position_ids, hidden)
        return output

    def logits(self, head_input: Tensor) -> Tensor:
        """Draft logits of module 0."""
        return cast(MtpStep, self.steps[0]).logits(head_input)

    def propose(self, head_input: Tensor) -> Tensor:
        """Greedy draft tokens of rows [..., D]: int32 target ids."""
        return cast(MtpStep, self.steps[0]).propose(head_input)

    def describe(self) -> str:
        """The resolved spec on one line."""
        use = "module 0 recycled" if self.recycled else f"chain {self.chain}"
        return f"{self.config.describe()}, {use}"
