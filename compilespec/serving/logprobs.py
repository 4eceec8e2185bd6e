"""Log-probabilities in the two forms that OpenAI gives them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from compilespec.runtime.sampling_rows import TokenLogprobs
from compilespec.runtime.token_bytes import TokenBytes


def completion_logprobs(
    token_ids: Sequence[int],
    entries: Sequence[TokenLogprobs | None],
    spelled: TokenBytes,
    offset: int = 0,
) -> dict[str, Any]:
    """The form of completions, lists side by side.

    The chosen token is always among the `top_logprobs` of its place, with the same float: whether
    it is the most probable one can be read off there.  Of two tokens with one text the more
    probable one stands.

    Args: entries: None where a prompt begins; offset: characters before the first token.
    """
    texts = [spelled.text(token) for token in token_ids]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": texts,
        "token_logprobs": [None if one is None else one.logprob for one in entries],
        "top_logprobs": [None if one is None else _top(one, spelled) for one in entries],
        "text_offset": offsets,
    }


def chat_logprobs(entries: Sequence[TokenLogprobs], spelled: TokenBytes) -> dict[str, Any]:
    """The form of chat completions: an entry a token."""
    return {
        "content": [
            {
                **_token(one.token_id, one.logprob, spelled),
                "top_logprobs": [_token(*item, spelled) for item in one.top.items()],
            }
            for one in entries
        ],
        "refusal": None,
    }


def _top(one: TokenLogprobs, spelled: TokenBytes) -> dict[str, float]:
    top: dict[str, float] = {}
    for token, value in {**one.top, one.token_id: one.logprob}.items():
        text = spelled.text(token)
        top[text] = max(value, top.get(text, value))
    return top


def _token(token: int, logprob: float, spelled: TokenBytes) -> dict[str, Any]:
    return {
        "token": spelled.text(token),
        "logprob": logprob,
        "bytes": list(spelled(token)),
    }
