"""Medusa's heads: residual blocks over the target's last hidden state, then a product each."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from compilespec.errors import InvalidOption
from compilespec.methods.base import Drafter
from compilespec.methods.capabilities import FINAL_NORM
from compilespec.methods.capture import trace_proposal
from compilespec.program import ProgramConfig, Traced
from compilespec.tracing.target_info import TargetInfo


class MedusaHead(nn.Module):
    """One head.

    Args:
        num_rows: ids that it knows: the target's, or those that `draft_ids` names.
        num_blocks: residual blocks before the product.
    """

    draft_ids: Tensor | None  # int64, the target's id of each row; None: they are the same

    def __init__(self, hidden_size: int, num_rows: int, num_blocks: int, *, has_bias: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Linear(hidden_size, hidden_size, bias=has_bias) for _ in range(num_blocks)
        )
        self.lm_head = nn.Linear(hidden_size, num_rows, bias=False)
        self.draft_ids = None

    def logits(self, head_input: Tensor) -> Tensor:
        """Draft logits of rows [..., D], [..., Vd], in the head's dtype."""
        for block in self.blocks:
            head_input = head_input + functional.silu(block(head_input))
        output: Tensor = self.lm_head(head_input)
        return output

    def propose(self, head_input: Tensor) -> Tensor:
        """Greedy draft tokens of rows [..., D]: int32 target ids."""
        best = self.logits(head_input).argmax(dim=-1)
        return (best if self.draft_ids is None else self.draft_ids[best]).to(torch.int32)


class MedusaDrafter(Drafter):
    """Heads over the hidden state that enters the target's own head, after the last norm.

    That of position t gives the target's token at t+1; head i gives the draft at t+2+i.  Drafts do
    not depend on each other, and nothing is kept from one step to the next.

    Source: Cai et al. 2024 (Medusa).
    """

    def __init__(
        self, num_heads: int, hidden_size: int, num_rows: int, num_blocks: int, *,
        has_bias: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        self.aux_layers = (FINAL_NORM,)
        self.num_draft_tokens = num_heads
        self.hidden_size, self.num_rows, self.num_blocks = hidden_size, num_rows, num_blocks
        self.heads = nn.ModuleList(
            MedusaHead(hidden_size, num_rows, num_blocks, has_bias=has_bias)
            for _ in range(num_heads)
        )

    @property
    def max_draft_tokens(self) -> int | None:
        return len(self.heads)

    def capture(self, config: ProgramConfig, info: TargetInfo) -> dict[str, Traced]:
        """The calls "propose.i", head_input_BD -> token_B, logits_BV, of the first K heads.

        Raises: InvalidOption where there are fewer.
        """
        count = config.num_draft_tokens
        if count > len(self.heads):
            given = f"num_draft_tokens={count}"
            if config.tree is not None:
                given = f"draft_tree= drafts {count} deep"
            raise InvalidOption(
                f"{given}: the drafter has {len(self.heads)} heads, each for one "
                f"draft; give at most {len(self.heads)}"
            )
        return {
            f"propose.{index}": trace_proposal(head, config, f"draft.{index}", self.hidden_size)
            for index, head in enumerate(list(self.heads)[:count])
        }

    def choose_ids(self, ids: Tensor | None) -> None:
        """Say which of the target's ids the rows of all heads stand for: int64 [Vd]; None: all."""
        for head in self.heads:
            cast(MedusaHead, head).draft_ids = ids

    def describe(self) -> str:
        """The resolved spec on one line."""
        return (
            f"medusa x{len(self.heads)}, {self.num_blocks} residual blocks each, hidden "
            f"{self.hidden_size}, vocab {self.num_rows}"
        )
