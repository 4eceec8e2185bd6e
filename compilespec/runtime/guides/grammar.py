"""Languages of text, followed by llguidance."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from compilespec.errors import GuideFailed, InvalidRequest, MissingDependency
from compilespec.runtime.guides.base import Matcher, Vocabulary


@dataclass(frozen=True)
class JsonSchema:
    """JSON that a schema admits: object members in the order of the schema's `properties`.

    Args:
        schema: a mapping, or JSON text.  What llguidance cannot enforce is refused, not ignored.
        compact: no white space between the parts; else any, so that a model may write as it likes.
    """

    schema: Mapping[str, Any] | str = field(hash=False)
    compact: bool = False

    def matcher(self, vocabulary: Vocabulary) -> Matcher:
        schema = self.schema
        try:
            loaded = json.loads(schema) if isinstance(schema, str) else schema
            text = json.dumps(loaded)
        except (TypeError, ValueError) as error:
            raise InvalidRequest(f"JsonSchema: the schema is no JSON: {error}") from error
        return text_matcher("compact json" if self.compact else "json", text, vocabulary)


@dataclass(frozen=True)
class Regex:
    """Text that a regular expression matches from its first character to its last.

    The syntax is that of Rust's regex crate; look-around and back references do not exist there.
    """

    pattern: str

    def matcher(self, vocabulary: Vocabulary) -> Matcher:
        return text_matcher("regex", self.pattern, vocabulary)


def text_matcher(kind: str, source: str, vocabulary: Vocabulary) -> Matcher:
    """A matcher at the beginning of a "regex", a "json" schema, or one in "compact json".

    Raises: InvalidRequest (no tokenizer, a slow one, a grammar that llguidance refuses),
        MissingDependency.
    """
    llguidance = _llguidance()
    key = f"{kind} {source}"
    compiled = vocabulary.grammars.get(key)
    if compiled is None:
        compiled = _compile(llguidance, kind, source, vocabulary)
    vocabulary.keep(key, compiled)
    return _TextMatcher(compiled.deep_copy(), vocabulary.num_words)


def escape(text: str) -> str:
    """The regular expression that matches this text alone."""
    return "".join(c if c.isalnum() or ord(c) > 127 else f"\\x{{{ord(c):x}}}" for c in text)


def _llguidance() -> Any:
    try:
        return importlib.import_module("llguidance")
    except ImportError as error:
        raise MissingDependency(
            "guides over text need llguidance, which is not installed: pip install "
            "'compilespec[guide]'"
        ) from error


def _compile(llguidance: Any, kind: str, source: str, vocabulary: Vocabulary) -> Any:
    matcher = llguidance.LLMatcher
    if kind == "regex":
        grammar = matcher.grammar_from_regex(source)
    else:
        options = {"whitespace_flexible": False} if kind == "compact json" else None
        try:
            grammar = matcher.grammar_from_json_schema(source, overrides=options)
        except ValueError as error:
            raise InvalidRequest(f"SamplingParams.guide: {_one_line(error)}") from error
    compiled = matcher(_tokens(vocabulary), grammar, log_level=0)
    if compiled.is_error():
        what = "regular expression" if kind == "regex" else "JSON schema"
        why = _one_line(compiled.get_error())
        raise InvalidRequest(f"SamplingParams.guide: llguidance refuses the {what}: {why}")
    return compiled


def _tokens(vocabulary: Vocabulary) -> Any:
    """llguidance's view of the tokenizer, made once."""
    if vocabulary.llg is not None:
        return vocabulary.llg
    tokenizer = vocabulary.tokenizer
    if tokenizer is None:
        raise InvalidRequest(
            "SamplingParams.guide needs a tokenizer and the engine has none; compile with "
            "tokenizer=..., or give a Choice of lists of token ids"
        )
    size = max(vocabulary.size, len(tokenizer))
    try:
        made = importlib.import_module("llguidance.hf").from_tokenizer(tokenizer, n_vocab=size)
    except Exception as error:  # whatever a tokenizer of another kind runs into
        raise InvalidRequest(
            f"SamplingParams.guide: llguidance cannot read the tokenizer "
            f"{type(tokenizer).__name__} ({_one_line(error)}); load it with use_fast=True"
        ) from error
    vocabulary.llg = made
    return made


def _one_line(error: object) -> str:
    """What a parser says over several lines, with a picture of the place."""
    return " ".join(str(error).split())


class _TextMatcher:
    """llguidance's matcher, from which EOS is kept away: it may come where `may_end`."""

    def __init__(self, matcher: Any, num_words: int) -> None:
        self._matcher, self._num_words = matcher, num_words

    def allowed(self) -> Tensor:
        matcher = self._matcher
        if matcher.is_stopped():  # nothing but EOS would be allowed
            if matcher.is_error():
                raise GuideFailed(f"llguidance gave up: {_one_line(matcher.get_error())}")
            return torch.zeros(self._num_words, dtype=torch.int32)
        words = torch.frombuffer(bytearray(matcher.compute_bitmask()), dtype=torch.int32)
        return words[: self._num_words]

    def may_end(self) -> bool:
        return bool(self._matcher.is_accepting())

    def advance(self, token: int) -> bool:
        return bool(self._matcher.try_consume_tokens([token]) == 1)

    def rewind(self, count: int) -> None:
        if count and not self._matcher.rollback(count):
            raise GuideFailed(f"llguidance cannot go back: {_one_line(self._matcher.get_error())}")
