"""Acceptance lengths of chain drafting, computed along text that the target generated.

Drafting from a position needs no second run of the target: a chain is judged by the target's own
continuation.  Greedy: draft token j is accepted when it equals the next token of the greedy text.
Temperature 1, ratio acceptance: along a text sampled from the target, token x was an accepted draft
with probability min(1, draft(x) / target(x)), given that the tokens before it were; so walking a
sampled text with that coin has the law of speculative decoding itself.  `eval_demo.py --check`
runs the literal procedure beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Scores:
    """Draft steps of every origin t along [B, T]: judged against the token x[t + 2 + j]."""

    # bool [B, T, depth]: the draft's argmax is the token.
    top: Tensor
    # float [B, T, depth]: draft probability of the token over the target's.
    ratio: Tensor


def acceptance_length(
    scores: Scores, prompt: int, num_draft_tokens: int, *, greedy: bool, seed: int = 0
) -> float:
    """Return the mean emitted tokens per verify step (bonus included), over all sequences.

    Args:
        prompt: length of the prompt; the token at index `prompt` came from the prefill.
    """
    rng = torch.Generator().manual_seed(seed)
    coin = torch.rand(scores.ratio.shape, generator=rng)
    accepted = (scores.top if greedy else coin < scores.ratio)[..., :num_draft_tokens]
    leading = accepted.long().cumprod(-1).sum(-1)
    emitted = walks = 0
    for row in leading.tolist():
        origin = prompt - 1
        while origin < len(row):
            emitted += row[origin] + 1
            walks += 1
            origin += row[origin] + 1
    return emitted / walks


def ngram_scores(ids_BL: Tensor, depth: int, max_ngram: int = 3) -> Scores:
    """Score prompt lookup: the continuation of the most recent match of the last n-gram.

    A missing draft counts as rejected.  The draft is a point mass, so greedy and ratio acceptance
    follow the same rule: the token is the drafted one.
    """
    B, L = ids_BL.shape
    T = L - 1 - depth
    top = torch.zeros(B, T, depth, dtype=torch.bool)
    for b, ids in enumerate(ids_BL.tolist()):
        latest: dict[tuple[int, ...], int] = {}
        for t in range(T):
            # x[t + 1] is the last known token; every n-gram ending before it is indexed.
            for n in range(1, max_ngram + 1):
                if t - n + 1 >= 0:
                    latest[tuple(ids[t - n + 1 : t + 1])] = t + 1
            for n in range(max_ngram, 0, -1):
                start = latest.get(tuple(ids[t + 2 - n : t + 2])) if t + 2 >= n else None
                if start is not None:
                    known = ids[start : t + 2]
                    for j in range(min(depth, len(known))):
                        top[b, t, j] = known[j] == ids[t + 2 + j]
                    break
    return Scores(top=top, ratio=top.float())
