"""Drawing tokens, and the sampling parameters of each row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

GREEDY_TEMPERATURE = 1e-5
NO_TOP_K = torch.iinfo(torch.int32).max
GREEDY_ROW = -1  # the temperature that marks a greedy row


def sample_greedy(logits_BV: Tensor, d2t_V: Tensor | None = None) -> Tensor:
    """The drafter's best tokens, int32 [B], as target ids: token + d2t[token].

    Source: requirement I12.
    """
    token_B = logits_BV.argmax(-1)
    return (token_B if d2t_V is None else token_B + d2t_V[token_B]).to(torch.int32)


def sampling_rows(
    requests: Sequence[tuple[Mapping[str, Any] | None, bool]], num_draft_tokens: int
) -> tuple[Tensor, Tensor, Tensor]:
    """temperature (float32), top_k (int32) and top_p (float32) of every row.

    Args:
        requests: parameters (None: greedy) and whether the request decodes: K+1 rows, else 1.
    Source: requirement I8.
    """
    rows: list[tuple[float, int, float]] = []
    for params, is_decoding in requests:
        given = params or {}
        temperature, top_k, top_p = given.get("temperature"), given.get("top_k"), given.get("top_p")
        is_greedy = not temperature
        row = (
            float(temperature or GREEDY_TEMPERATURE),
            NO_TOP_K if is_greedy or top_k is None or top_k <= 0 else int(top_k),
            1.0 if is_greedy or top_p is None else float(top_p),
        )
        rows += [row] * (num_draft_tokens + 1 if is_decoding else 1)
    temperatures, top_ks, top_ps = ([row[i] for row in rows] for i in range(3))
    return (
        torch.tensor(temperatures, dtype=torch.float32),
        torch.tensor(top_ks, dtype=torch.int32),
        torch.tensor(top_ps, dtype=torch.float32),
    )


def compute_probs_and_sample_next_token(
    logits_BV: Tensor,
    temperature_B: Tensor | None,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Draw the next tokens: int64 [B], and the probabilities they were drawn from, float32 [B, V].

    Args:
        temperature_B: None if all rows are greedy (the logits are then returned in place of the
            probabilities); -1 marks a greedy row among others.
    Source: requirement E12: an exponential race, argmax(p / Exp(1)), draws with probabilities p.
    """
    if temperature_B is None:
        return logits_BV.argmax(-1), logits_BV
    is_greedy_B = temperature_B == GREEDY_ROW
    divisor_B = torch.where(is_greedy_B, 1.0, temperature_B)
    probs_BV = (logits_BV / divisor_B.unsqueeze(-1)).softmax(-1, dtype=torch.float32)
    race_BV = torch.empty_like(probs_BV).exponential_(generator=generator)
    drawn_B = probs_BV.div(race_BV).argmax(-1)
    return torch.where(is_greedy_B, probs_BV.argmax(-1), drawn_B), probs_BV
