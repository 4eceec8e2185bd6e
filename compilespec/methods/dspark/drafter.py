"""The DSpark drafter module: a DFlash drafter, a Markov head and a confidence head.

Its state_dict uses speculators' names: those of DFlash, markov_head, confidence_head.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from compilespec.methods.block import capture_block, capture_sureness, capture_turns
from compilespec.methods.dflash.drafter import DFlashDrafter
from compilespec.methods.dspark.config import DSparkConfig
from compilespec.program import ProgramConfig, Traced
from compilespec.tracing.target_info import TargetInfo


class DSparkDrafter(DFlashDrafter):
    """One DSpark drafter.

    The block is DFlash's, run once.  Its logits are a base, to which each draft adds a bias that
    depends on the token before it: the newest token's for draft 1, then that of the draft chosen
    last, so that the drafts of a step are chosen in turn.

    Source: DSpark (2026); speculators 0.9.
    """

    config: DSparkConfig

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__(config)
        self.markov_head = MarkovHead(config) if config.markov_rank else None
        self.confidence_head = ConfidenceHead(config) if config.has_confidence else None

    def capture_calls(self, config: ProgramConfig, info: TargetInfo) -> dict[str, Traced]:
        """The calls of a block drafter; with a Markov head, those that choose drafts in turn; and
        with a confidence head one that says how sure they are.
        """
        capture = capture_block if self.markov_head is None else capture_turns
        calls = capture(self, config, info)
        if self.confidence_head is not None:
            calls["sure"] = capture_sureness(self, config, self.config.hidden_size)
        return calls

    def state(self, head_input: Tensor, token: Tensor) -> Tensor:
        """The Markov head's state [B, r] before the first row that proposes.

        Args:
            head_input: of all rows of the block, [B, W, D]; token: the newest, [B].
        """
        assert self.markov_head is not None
        state_BR = head_input.new_zeros((head_input.shape[0], self.config.markov_rank))
        if self.config.sample_from_anchor:
            return state_BR
        return self.markov_head(head_input[:, 0], token, state_BR)[1]

    def follow(self, head_input: Tensor, token: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """What the bias of a draft's logits is made of, [B, r], and the state after its row.

        Args:
            head_input: of its row, [B, D]; token: the one before it, int32 [B]; state: [B, r].
        """
        assert self.markov_head is not None
        features_BR, state_BR = self.markov_head(head_input, token, state)
        return features_BR, state_BR

    def biased(self, base: Tensor, features: Tensor) -> Tensor:
        """Logits [B, Vd] over the DRAFT vocabulary: `logits` of the row, with their bias."""
        assert self.markov_head is not None
        return base + self.markov_head.markov_w2(features)

    def confidence(self, head_input: Tensor, token: Tensor) -> Tensor:
        """The logit of the probability that a draft is accepted, [B].

        Args:
            head_input: of its row, [B, D]; token: the one before it, [B].
        """
        assert self.confidence_head is not None
        if self.config.confidence_with_markov and self.markov_head is not None:
            head_input = torch.cat([head_input, self.markov_head.embed(token)], -1)
        logit_B1: Tensor = self.confidence_head.proj(head_input)
        return logit_B1.squeeze(-1)


class MarkovHead(nn.Module):
    """A bias of low rank on a draft's logits, from the token before it."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        rank, width = config.markov_rank, config.hidden_size
        self.kind = config.markov_type
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocab_size, bias=False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(width + rank, rank)
        elif self.kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + width, 3 * rank)

    def embed(self, token: Tensor) -> Tensor:
        """The embedding [B, r] of the token before."""
        return functional.embedding(token.clamp_min(0), self.markov_w1.weight)

    def forward(self, hidden: Tensor, token: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Features [B, r] of the bias, and the state [B, r] after the row."""
        before_BR = self.embed(token)
        if self.kind == "gated":
            gate_BR = torch.sigmoid(self.gate_proj(torch.cat([hidden, before_BR], -1)))
            return gate_BR * before_BR, state
        if self.kind == "rnn":
            joint = self.joint_proj(torch.cat([state, before_BR, hidden], -1))
            gate_BR, candidate_BR, output_BR = joint.chunk(3, -1)
            gate_BR = torch.sigmoid(gate_BR)
            state = gate_BR * state + (1.0 - gate_BR) * torch.tanh(candidate_BR)
            return torch.tanh(output_BR), state
        return before_BR, state


class ConfidenceHead(nn.Module):
    """Predicts from a row whether its draft is accepted."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        rank = config.markov_rank if config.confidence_with_markov else 0
        self.proj = nn.Linear(config.hidden_size + rank, 1)
