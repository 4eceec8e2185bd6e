"""A guide of alternatives: texts, or sequences of token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from compilespec.errors import InvalidRequest
from compilespec.runtime.guides.base import Matcher, Vocabulary
from compilespec.runtime.guides.grammar import bits, escape, text_matcher


@dataclass(frozen=True)
class Choice:
    """One of `options`: texts, in any tokenisation, or sequences of token ids, as they are.

    Ids need neither a tokenizer nor llguidance.
    """

    options: tuple[Any, ...]

    def __init__(self, options: Sequence[str | Sequence[int]]) -> None:
        if isinstance(options, str) or not isinstance(options, Sequence) or not options:
            raise InvalidRequest(
                f"Choice: expected a sequence of at least one option, got {options!r}"
            )
        are_texts = all(isinstance(option, str) for option in options)
        if not are_texts and any(isinstance(option, str) for option in options):
            raise InvalidRequest("Choice: options must be all texts, or all lists of token ids")
        if any(len(option) == 0 for option in options):
            raise InvalidRequest("Choice: an option is empty; leave it out")
        made = options if are_texts else [tuple(int(token) for token in one) for one in options]
        object.__setattr__(self, "options", tuple(made))

    def matcher(self, vocabulary: Vocabulary) -> Matcher:
        if isinstance(self.options[0], str):
            return text_matcher(*self.source(), vocabulary)
        outside = [t for option in self.options for t in option if not 0 <= t < vocabulary.size]
        if outside:
            raise InvalidRequest(
                f"Choice: expected ids from 0 to {vocabulary.size - 1}, got {outside[0]}"
            )
        return _IdMatcher(self.options, vocabulary.num_words)

    def source(self) -> tuple[str, str]:
        """Of texts: kind and text, as `text_matcher` takes them."""
        return "regex", "|".join(escape(option) for option in self.options)


class _IdMatcher:
    """The options that begin with the tokens so far."""

    def __init__(self, options: Sequence[tuple[int, ...]], num_words: int) -> None:
        self._options, self._num_words = options, num_words
        self._came: list[int] = []

    def allowed(self) -> Tensor:
        return bits(self._next(), self._num_words)

    def may_end(self) -> bool:
        return tuple(self._came) in self._options

    def advance(self, token: int) -> bool:
        if token not in self._next():
            return False
        self._came.append(token)
        return True

    def rewind(self, count: int) -> None:
        del self._came[len(self._came) - count :]

    def _next(self) -> set[int]:
        length, came = len(self._came), tuple(self._came)
        return {
            option[length]
            for option in self._options
            if len(option) > length and option[:length] == came
        }
