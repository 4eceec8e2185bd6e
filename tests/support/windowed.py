"""Windowed drafters that are right only if their caches are whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from compilespec.methods.base import Drafter
from compilespec.methods.capabilities import FINAL_NORM, Capabilities, Chain
from compilespec.methods.capture import capture_windowed
from compilespec.program import ProgramConfig, Traced
from compilespec.tracing.target_info import TargetInfo
from tests.support.models import (
    VOCAB,
    Ask,
)

MAX_SEQ_LEN = 75


WIDTH = 48


class Step(nn.Module):
    """One module: attention over [embedding ; hidden], and a head that a script may replace.

    Where the script knows what follows a token, the draft is right; elsewhere it is the random
    head's, so it depends on every row of the module's cache.
    """

    def __init__(self, index: int, target: nn.Module, script: Tensor, window: int = 0) -> None:
        super().__init__()
        self.index, self.window = index, window
        self.embedding, self.head = target.get_input_embeddings(), target.get_output_embeddings()
        torch.manual_seed(100 + index)
        self.mix = nn.Linear(2 * WIDTH, WIDTH, bias=False, dtype=torch.float64)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False, dtype=torch.float64)
        with torch.no_grad():
            self.mix.weight.mul_(3)
            self.qkv.weight.mul_(3)
        self.places = nn.Parameter(torch.randn(MAX_SEQ_LEN, WIDTH, dtype=torch.float64))
        self.register_buffer("script", script)

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, hidden: Tensor
    ) -> tuple[Tensor, Tensor]:
        mixed = self.mix(torch.cat([self.embedding(input_ids), hidden], -1))
        mixed = mixed + self.places[position_ids]
        batch, length, _ = mixed.shape
        heads = self.qkv(mixed).view(batch, length, 3, 4, WIDTH // 4).permute(2, 0, 3, 1, 4)
        seen = torch.ops.compilespec.attention(*heads, 0.3, self.window, 0.0, None)
        recycled = torch.tanh(mixed + seen.flatten(2))
        keys = torch.stack([position_ids + self.index, input_ids], -1).to(hidden.dtype)
        return torch.cat([recycled, keys], -1), recycled

    def propose(self, head_input: Tensor) -> Tensor:
        place, token = head_input[:, -2].long(), head_input[:, -1].long()
        known = self.script[place.clamp(max=MAX_SEQ_LEN), token]
        drawn = self.head(head_input[:, :-2]).argmax(-1)
        return torch.where(known >= 0, known, drawn).to(torch.int32)


class WindowedDrafter(Drafter):
    def __init__(
        self, steps: list[Step], chain: Chain, kv_block_sizes: tuple[int, ...] = ()
    ) -> None:
        super().__init__()
        self.steps, self.chain = nn.ModuleList(steps), chain
        self.kv_block_sizes = kv_block_sizes
        self.num_draft_tokens, self.aux_layers = len(steps), (FINAL_NORM,)

    def capture(self, config: ProgramConfig, info: TargetInfo) -> dict[str, Traced]:
        return capture_windowed(self, config, info)


class Windowed:
    capabilities = Capabilities(
        name="windowed", kind="windowed", reads_hidden_states=True, own_kv_cache=True
    )

    def __init__(self, drafter: WindowedDrafter) -> None:
        self.drafter = drafter

    def load(self, draft: Any, target: TargetInfo, options: Mapping[str, Any]) -> Drafter:
        return self.drafter


def fresh_drafts(
    model: nn.Module, drafter: WindowedDrafter, tokens: list[int], k: int
) -> list[int]:
    """K drafts after `tokens`, the last of which is the bonus token; nothing is cached."""
    ids = torch.tensor([tokens])
    truth = model.model(ids[:, :-1]).last_hidden_state
    places = torch.arange(len(tokens) - 1).unsqueeze(0)
    following, hidden, drafts = ids[:, 1:], truth, []
    for index in range(k):
        step = drafter.steps[index % len(drafter.steps)]
        head_input, recycled = step(following, places, hidden)
        drafts.append(int(step.propose(head_input[:, -1])))
        following = torch.cat([following[:, 1:], torch.tensor([drafts[-1:]])], 1)
        if drafter.chain == "module_rows":
            hidden = recycled
        else:
            hidden = torch.cat([hidden[:, 1:], recycled[:, -1:]], 1)
    return drafts


def script_of(asks: list[Ask]) -> Tensor:
    """What follows (position, token) in the known sequences, at two of every three places."""
    script = torch.full((MAX_SEQ_LEN + 1, VOCAB), -1, dtype=torch.int64)
    for ask in asks:
        tokens = [*ask.prompt, *ask.tokens]
        for place in range(len(tokens) - 2):
            if (place + len(ask.prompt)) % 3:
                script[place, tokens[place + 1]] = tokens[place + 2]
    return script
