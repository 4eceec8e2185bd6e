"""Finds where a request ends inside the tokens that a step gave it."""

from __future__ import annotations

from collections.abc import Sequence

from compilespec.runtime.outputs import FinishReason
from compilespec.runtime.request import Request


def append_until_end(
    request: Request, tokens: Sequence[int], *, max_seq_len: int
) -> tuple[int, FinishReason | None]:
    """Append the tokens to the request up to where it ends.

    The tokens after a stop, or past a length limit, are dropped, although they were drafted and
    verified.  A stop wins over a limit reached by the same token.

    Returns: the number of tokens delivered (1 or more) and the reason why the request ends here,
        None if it goes on.
    """
    params = request.params
    room = params.max_new_tokens - len(request.output_token_ids)
    room = min(room, max_seq_len - request.num_tokens)
    assert room > 0, "a request without room has finished"
    assert tokens, "a step gives each request at least one token"
    kept = tokens[:room]
    reason: FinishReason | None = "length" if len(kept) == room else None
    for count, token in enumerate(kept, start=1):
        if token in request.stop_token_ids:
            kept, reason = kept[:count], "stop"
            break
    if params.stop:
        ends_with_id = reason == "stop"  # such an id leaves no text
        count = request.add_until_stop_string(kept[:-1] if ends_with_id else kept) or 0
        if count:
            kept, reason = kept[:count], "stop"
    request.output_token_ids.extend(kept)
    return len(kept), reason
