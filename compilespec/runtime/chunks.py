"""Chooses the prompt tokens of the next prefill call."""

from __future__ import annotations

from collections.abc import Sequence

from compilespec.runtime.executor import Geometry, PrefillChunk
from compilespec.runtime.request import Request, RequestState


def next_chunks(
    running: Sequence[Request], sizes: Geometry, max_step_tokens: int | None
) -> dict[Request, PrefillChunk]:
    """Fill one prefill call in order; the last prompt may be cut.

    A chunk begins with the prompt's last `num_repeated_tokens` prefilled ones (H-22), unless they
    were found in the cache, where their entries are complete.

    Args:
        max_step_tokens: of the step, prefill and decode together; None: as many as a call holds.
    """
    chunks: dict[Request, PrefillChunk] = {}
    room = _room(running, sizes, max_step_tokens)
    for request in running:
        if request.state is not RequestState.PREFILL:
            continue
        tokens, done = request.prefill_token_ids, request.num_prefilled
        start = max(request.num_cached, done - sizes.reach.num_repeated_tokens)
        if room <= done - start or (chunks and sizes.config.prefills_one):
            break
        end = request.whole_until(start, min(len(tokens), start + room))
        end = min((e for e in request.state_ends if done < e < end), default=end)
        if chunks and _undoes_state(request, end, sizes):
            break
        if end <= done and not chunks:  # tokens that see each other outrank `max_step_tokens`
            end = done + request.ahead[done] + 1
        if end <= done:
            break
        chunks[request] = PrefillChunk(
            row=request.row,
            start=start,
            tokens=tokens[start:end],
            next_token=tokens[end] if end < len(tokens) else None,
            num_logprobs=request.num_prompt_logprobs,
            given=None if request.given is None else request.given.between(start, end),
            ahead=request.ahead_of(start, end),
            rope=None if request.rope is None else request.rope.between(start, end),
        )
        room -= end - start
    return chunks


def _undoes_state(request: Request, end: int, sizes: Geometry) -> bool:
    """True where the next chunk would begin before the states that the request started from."""
    is_early = end - request.num_cached < sizes.reach.num_repeated_tokens
    return request.state_place is not None and is_early and end < len(request.prefill_token_ids)


def _room(running: Sequence[Request], sizes: Geometry, max_step_tokens: int | None) -> int:
    """The tokens that the call may take; at least one block of new ones."""
    if max_step_tokens is None:
        return sizes.config.max_prefill_tokens
    num_decoding = sum(request.state is RequestState.DECODE for request in running)
    left = max_step_tokens - num_decoding * (sizes.config.num_draft_tokens + 1)
    left = max(left, sizes.reach.num_repeated_tokens + sizes.config.block_size)
    return min(left, sizes.config.max_prefill_tokens)
