"""Helpers for methods that draft in one call: a script that reads the history, traffic checks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from compilespec.runtime.engine import Engine
from compilespec.runtime.request import Request
from tests.support.models import Ask, assert_nothing_held, run_traffic

SIZES = (
    (1, 26), (40, 35), (16, 17), (64, 11), (70, 5), (74, 1), (2, 9),
)  # fmt: skip
MAX_SEQ_LEN = 75


class Script(nn.Module):
    """Drafts what follows in a known sequence if the history is exactly its beginning, else -1."""

    def __init__(self, sequences: Iterable[Sequence[int]], num_drafts: int) -> None:
        super().__init__()
        self.num_drafts = num_drafts
        table = torch.full((64, MAX_SEQ_LEN + num_drafts), -1, dtype=torch.int32)
        for row, tokens in enumerate(sequences):
            table[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        self.register_buffer("table", table)
        self.register_buffer("offset", torch.zeros(1, dtype=torch.int32))

    def forward(self, history_BL: Tensor, length_B: Tensor) -> Tensor:
        width = history_BL.shape[1]
        place = torch.arange(width)
        is_open = place >= length_B.unsqueeze(1)
        is_clean = ((history_BL == -1) | ~is_open).all(1)
        same = (history_BL.unsqueeze(1) == self.table[:, :width]) | is_open.unsqueeze(1)
        is_known = same.all(-1)
        row = is_known.to(torch.int32).argmax(1)
        wanted = length_B.unsqueeze(1).long() + torch.arange(self.num_drafts)
        drafts = self.table[row].gather(1, wanted)
        found = is_known.any(1) & is_clean
        return torch.where(found.unsqueeze(1) & (drafts >= 0), drafts + self.offset, -1)


def check_traffic(engine: Engine, asks: Sequence[Ask]) -> list[Request]:
    """Requests that join and leave in batches of 1 to 5 give the model's tokens; nothing is held
    after, nothing is compiled.
    """
    requests = run_traffic(engine, asks, (1, 2, 3, 5))
    for request, ask in zip(requests, asks, strict=True):
        assert request.output_token_ids == list(ask.tokens), f"prompt of {len(ask.prompt)}"
    assert_nothing_held(engine)
    assert engine.stats().num_recompiles == 0
    return requests
