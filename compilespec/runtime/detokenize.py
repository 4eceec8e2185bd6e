"""Text from tokens as they come: whole characters only, stop strings cut out.

Source: the prefix-window method of Hugging Face text-generation-inference (also in vLLM): decode a
    short window with and without the new tokens and give out the difference.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any, Protocol

from compilespec.errors import TokenizerFailed

REPLACEMENT = "\ufffd"  # decoding writes it for bytes that are no character (yet)
PROMPT_WINDOW = 8  # prompt tokens decoded before the output, so that spaces and characters join


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that the runtime calls."""

    def encode(self, text: str, /) -> list[int]: ...

    def decode(self, token_ids: Any, /, **options: Any) -> Any: ...


class OutputText:
    """The text of one request: `text` is the text of its tokens so far, up to a stop string.

    `text` continues the prompt's text, so a leading space is kept; special tokens leave no text.

    Args: hidden_token_ids: those that leave none, if the other special tokens are to be shown.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        stop: Sequence[str] = (),
        hidden_token_ids: Set[int] | None = None,
    ) -> None:
        self.text = ""
        self.stopped_by: str | None = None  # the stop string before which `text` was cut
        self._decoder = _WindowDecoder(tokenizer, prompt_token_ids, hidden_token_ids)
        self._stop = tuple(stop)
        self._longest_stop = max(map(len, self._stop), default=0)
        self._num_taken = 0
        self._finished = False

    @property
    def stopped(self) -> bool:
        return self.stopped_by is not None

    def add(self, token_ids: Sequence[int]) -> bool:
        """Append tokens; returns whether a stop string is now complete (then `text` ends before
        it).

        Feed requests that have stop strings one token at a time: the token that completes one is
        the last kept.
        """
        self._append(self._decoder.add(token_ids))
        if self._stop and not self.stopped and self._decoder.pending:
            self._cut(self.text + self._decoder.pending)
        return self.stopped

    def finish(self) -> None:
        """Stop waiting for the rest of a character: incomplete bytes become U+FFFD."""
        if not self._finished:
            self._finished = True
            if not self.stopped:
                self._append(self._decoder.flush())

    def take(self) -> str:
        """Return the text not taken before, but for an end that may turn into a stop string."""
        end = len(self.text) - (0 if self._finished or self.stopped else self._held_back())
        taken, self._num_taken = self.text[self._num_taken : end], max(self._num_taken, end)
        return taken

    def _append(self, new: str) -> None:
        if new and not self._cut(self.text + new):
            self.text += new

    def _cut(self, text: str) -> bool:
        start = max(0, len(self.text) - self._longest_stop + 1)  # earlier text holds no stop string
        found = [(at, stop) for stop in self._stop if (at := text.find(stop, start)) >= 0]
        if found:
            end, self.stopped_by = min(found, key=lambda place: place[0])
            self.text = text[:end]
        return self.stopped

    def _held_back(self) -> int:
        tail = self.text[max(0, len(self.text) - self._longest_stop + 1) :] if self._stop else ""
        return max((_num_begun(tail, stop) for stop in self._stop), default=0)


def _num_begun(text: str, stop: str) -> int:
    """The number of characters at the end of a text that begin a stop string."""
    start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while start >= 0 and not stop.startswith(text[start:]):
        start = text.find(stop[0], start + 1)
    return 0 if start < 0 else len(text) - start


class _WindowDecoder:
    """Tokens in, complete new characters out.

    The window starts one extension before the last complete text, because tokenizers treat the
    start of a sequence specially (a dropped space, a byte run that does not begin with a
    character).
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], hidden: Set[int] | None
    ) -> None:
        self._tokenizer, self._hidden = tokenizer, hidden
        self._ids = self._prompt_tail(prompt_token_ids)
        # Text of the window before the pending tokens; a prompt may end inside a character.
        self._known = self._decode(self._ids).rstrip(REPLACEMENT)
        self._num_known = len(self._ids)
        self.pending = ""  # characters held back because an incomplete one follows them

    def add(self, token_ids: Sequence[int]) -> str:
        self._ids.extend(token_ids)
        return self._give_out(final=False)

    def flush(self) -> str:
        return self._give_out(final=True)

    def _give_out(self, *, final: bool) -> str:
        if len(self._ids) == self._num_known:
            return ""
        text = self._decode(self._ids)
        if len(text) <= len(self._known):
            return ""
        if text.endswith(REPLACEMENT) and not final:
            self.pending = text[len(self._known) :].rstrip(REPLACEMENT)
            return ""
        pending = self._ids[self._num_known :]
        # One bad byte makes byte-fallback tokenizers spoil a whole run of bytes.
        new = text[len(self._known) :] if text.startswith(self._known) else self._decode(pending)
        self._ids, self.pending = pending, ""
        self._known, self._num_known = self._decode(self._ids), len(self._ids)
        return new

    def _prompt_tail(self, prompt_token_ids: Sequence[int]) -> list[int]:
        size = PROMPT_WINDOW
        while size < len(prompt_token_ids):
            tail = list(prompt_token_ids[-size:])
            if not self._decode(tail).startswith(REPLACEMENT):
                return tail
            size *= 2
        return list(prompt_token_ids)

    def _decode(self, token_ids: list[int]) -> str:
        if self._hidden is not None:
            token_ids = [token for token in token_ids if token not in self._hidden]
        try:
            return str(
                self._tokenizer.decode(
                    token_ids,
                    skip_special_tokens=self._hidden is None,
                    clean_up_tokenization_spaces=False,
                )
            )
        except Exception as error:
            message = (str(error).splitlines() or [""])[0]
            raise TokenizerFailed(
                f"the tokenizer raised {type(error).__name__} for the tokens {token_ids}: {message}"
            ) from error


def special_ids(tokenizer: Any) -> set[int]:
    """The tokens that leave no text."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).items()
    named = getattr(tokenizer, "all_special_ids", ())
    return {*named, *(index for index, token in added if getattr(token, "special", False))}
