"""Log-probabilities in the two forms that OpenAI gives them."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from compilespec.runtime.sampling_rows import TokenLogprobs
from compilespec.runtime.token_bytes import TokenBytes


class TextOffsets:
    """Counts the characters of a text before each of its tokens.

    Special tokens leave no text, and a token that begins within a character has its place.

    Args: text: given where a prompt is part of it, which may spell special tokens, and lacks the
        space that some tokenizers put before the first token.
    """

    def __init__(self, spelled: TokenBytes, text: str | None = None) -> None:
        self._spelled, self._text = spelled, text
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._at, self._has_begun = 0, False

    def of(self, token_ids: Sequence[int]) -> list[int]:
        """The offsets of the tokens that come next."""
        offsets = []
        for token in token_ids:
            spelling, text = self._spelled.shown(token), self._text
            if not spelling and text and text.startswith(self._spelled.text(token), self._at):
                spelling = self._spelled(token)
            if spelling and not self._has_begun:
                self._has_begun = True
                spelling = spelling.removeprefix(b" " if text and text[0] != " " else b"")
            offsets.append(self._at)
            self._at += len(self._decoder.decode(spelling))
        return offsets


def completion_logprobs(
    token_ids: Sequence[int],
    entries: Sequence[TokenLogprobs | None],
    spelled: TokenBytes,
    offsets: TextOffsets,
) -> dict[str, Any]:
    """The form of completions, lists side by side.

    The chosen token is always among the `top_logprobs` of its place, with the same float, so that
    readers can see if it is the most probable.  Of two tokens with the same text the more probable
    one stays.

    Args: entries: None at the beginning of a prompt.
    """
    return {
        "tokens": [spelled.text(token) for token in token_ids],
        "token_logprobs": [None if one is None else one.logprob for one in entries],
        "top_logprobs": [None if one is None else _top(one, spelled) for one in entries],
        "text_offset": offsets.of(token_ids),
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
