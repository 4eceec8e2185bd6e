"""What tests of MTP checkpoints share: files with an expert a tensor, and drafts from scratch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def per_expert(name: str, tensor: Tensor, *, fused: bool = False) -> dict[str, Tensor]:
    """transformers' fused matrices as the files have them: for each expert, or `fused`."""
    stem, _, kind = name.rpartition(".")
    if fused or not stem.endswith(".experts"):
        return {name: tensor.clone()}
    parts: dict[str, Tensor] = {}
    for expert, matrix in enumerate(tensor):
        if kind == "down_proj":
            parts[f"{stem}.{expert}.down_proj.weight"] = matrix.clone()
        else:
            gate, up = matrix.chunk(2)
            parts[f"{stem}.{expert}.gate_proj.weight"] = gate.clone()
            parts[f"{stem}.{expert}.up_proj.weight"] = up.clone()
    return parts


@torch.no_grad()
def recycled_drafts(model: nn.Module, drafter: Any, tokens: list[int], count: int) -> list[int]:
    """Drafts after `tokens`, the last of which is the bonus token; nothing is cached."""
    ids = torch.tensor([tokens])
    hidden, ids, drafts = model.model(ids[:, :-1]).last_hidden_state, ids[:, 1:], []
    for _ in range(count):
        place = torch.arange(ids.shape[1])[None]
        head_input, recycled = drafter(ids, place, hidden)
        drafts.append(int(drafter.propose(head_input[:, -1])))
        ids = torch.cat([ids, torch.tensor([drafts[-1:]])], 1)
        hidden = torch.cat([hidden, recycled[:, -1:]], 1)
    return drafts
