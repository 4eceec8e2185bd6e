"""Drafters that know the target's distribution."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from compilespec.methods.base import Drafter
from compilespec.methods.capabilities import FINAL_NORM, Capabilities
from compilespec.methods.capture import capture_windowed
from compilespec.methods.recycled import RecycledDrafter
from compilespec.program import ProgramConfig, Traced
from compilespec.tracing.target_info import TargetInfo
from tests.support.models import PlainModel


class Knowing(nn.Module):
    """The target's table; with `ids`, over entries that stand for these target ids."""

    def __init__(self, target: PlainModel, ids: Tensor | None) -> None:
        super().__init__()
        self.tokens, self.norm, self.head = target.tokens, target.norm, target.head
        self.draft_ids = ids

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, hidden: Tensor
    ) -> tuple[Tensor, Tensor]:
        return self.norm(self.tokens(input_ids)), hidden

    def logits(self, head_input: Tensor) -> Tensor:
        every = self.head(head_input)
        return every if self.draft_ids is None else every[..., self.draft_ids]

    def propose(self, head_input: Tensor) -> Tensor:
        best = self.logits(head_input).argmax(-1)
        return (best if self.draft_ids is None else self.draft_ids[best]).to(torch.int32)


class KnowingDrafter(RecycledDrafter):
    def __init__(self, target: PlainModel, ids: Tensor | None, *, windowed: bool) -> None:
        super().__init__()
        self.steps = nn.ModuleList([Knowing(target, ids)])
        self.draft_ids, self.windowed = ids, windowed
        self.num_draft_tokens, self.aux_layers = 3, (FINAL_NORM,)

    def capture(self, config: ProgramConfig, info: TargetInfo) -> dict[str, Traced]:
        return (
            capture_windowed(self, config, info) if self.windowed else super().capture(config, info)
        )

    def combine(self, aux: Tensor) -> Tensor:
        return aux

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, hidden: Tensor
    ) -> tuple[Tensor, Tensor]:
        return self.steps[0](input_ids, position_ids, hidden)

    def logits(self, head_input: Tensor) -> Tensor:
        return self.steps[0].logits(head_input)

    def propose(self, head_input: Tensor) -> Tensor:
        return self.steps[0].propose(head_input)


class Method:
    def __init__(self, drafter: KnowingDrafter, chain: str) -> None:
        drafter.chain = chain
        self.drafter = drafter
        self.capabilities = Capabilities(
            name="knowing", kind="windowed" if drafter.windowed else "recycled",
            reads_hidden_states=True, own_kv_cache=True,
        )  # fmt: skip

    def load(self, draft: Any, target: TargetInfo, options: Mapping[str, Any]) -> Drafter:
        return self.drafter
