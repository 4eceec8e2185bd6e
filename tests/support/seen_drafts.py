"""The drafts that an engine makes, by the tokens that they follow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from compilespec import SamplingParams
from tests.support.models import Ask


def drafts_by_tokens(
    engine: Any, asks: Sequence[Ask], max_seq_len: int, **sampling: Any
) -> dict[tuple[int, ...], list[int]]:
    """Every (request's tokens so far) -> the K drafts in its state row, but for those that reach
    past the maximum length; checks the tokens of greedy requests.
    """
    requests = [
        engine.submit(
            list(ask.prompt),
            SamplingParams(max_new_tokens=len(ask.tokens), ignore_eos=True, **sampling),
        )
        for ask in asks
    ]
    found = {}
    while engine.has_work:
        engine.step()
        for request in requests:
            if request.row >= 0 and request.output_token_ids:
                tokens = (*request.prompt_token_ids, *request.output_token_ids)
                state = engine._executor.buffers["tokens_RS"][request.row].tolist()
                if len(tokens) + len(state) < max_seq_len:
                    found[tokens] = state[1:]
    for request, ask in zip(requests, asks, strict=True):
        assert sampling or request.output_token_ids == list(ask.tokens)
    return found
