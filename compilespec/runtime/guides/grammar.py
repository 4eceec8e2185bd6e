"""Guides over text, followed by llguidance."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from compilespec.errors import GuideFailed, InvalidRequest, MissingDependency
from compilespec.runtime.guides.base import Matcher, Vocabulary, only_bit
from compilespec.runtime.guides.trial import why_too_much
from compilespec.runtime.texts import (
    MAX_NESTING,
    check_unicode,
    has_more_values,
    is_nested_too_deep,
)

# The limits of a schema or an expression: more would hold up the steps of all requests.
MAX_SOURCE = 1 << 16  # characters
MAX_EXPRESSIONS = 100_000  # "fuel" of llguidance's lexer


@dataclass(frozen=True)
class JsonSchema:
    """JSON that a schema admits: object members in the order of the schema's `properties`.

    Args:
        schema: a mapping, or JSON text.  Parts that llguidance cannot enforce are refused, not
            ignored.
        compact: no white space between the parts; else any, so that a model may write as it likes.
    """

    schema: Mapping[str, Any] | str = field(hash=False)
    compact: bool = False

    def matcher(self, vocabulary: Vocabulary) -> Matcher:
        return text_matcher(*self.source(), vocabulary)

    def source(self) -> tuple[str, str]:
        """Kind and text, as `text_matcher` takes them.  Raises: InvalidRequest."""
        schema = self.schema
        if has_more_values(schema, MAX_SOURCE):  # told before 200,000 options are written out
            raise InvalidRequest(
                f"JsonSchema: the schema has more than {MAX_SOURCE} values: give a smaller one, or "
                "a Choice of lists of token ids"
            )
        try:
            loaded = json.loads(schema) if isinstance(schema, str) else schema
            if is_nested_too_deep(loaded):
                raise RecursionError
            text = json.dumps(loaded)
        except RecursionError:
            raise InvalidRequest(
                f"JsonSchema: the schema is nested more than {MAX_NESTING} levels deep"
            ) from None
        except (TypeError, ValueError) as error:
            raise InvalidRequest(
                f"JsonSchema: the schema is no JSON: {_one_line(error)}"
            ) from error
        return "compact json" if self.compact else "json", text


@dataclass(frozen=True)
class Regex:
    """Text that a regular expression matches from its first character to its last.

    The syntax is that of Rust's regex crate; look-around and back references do not exist there.
    """

    pattern: str

    def matcher(self, vocabulary: Vocabulary) -> Matcher:
        return text_matcher(*self.source(), vocabulary)

    def source(self) -> tuple[str, str]:
        return "regex", self.pattern


class _GrammarPart(Protocol):
    def source(self) -> tuple[str, str]: ...


@dataclass(frozen=True)
class Grammar:
    """Text that a grammar in llguidance's dialect of Lark admits.

    Args:
        lark: its rules, of which `start` is the first; `@name` stands for one of `parts`.
        parts: other guides over text.
    """

    lark: str
    parts: Mapping[str, _GrammarPart] = field(default_factory=dict, hash=False)

    def matcher(self, vocabulary: Vocabulary) -> Matcher:
        return text_matcher(*self.source(), vocabulary)

    def source(self) -> tuple[str, str]:
        parts = {name: part.source() for name, part in self.parts.items()}
        return "grammar", json.dumps([self.lark, parts])


def text_matcher(kind: str, source: str, vocabulary: Vocabulary) -> Matcher:
    """A matcher at the beginning of a "regex", a "json" schema, one in "compact json", or the
    "grammar" of a `Grammar`.

    Raises: InvalidRequest (no tokenizer, a slow one, a grammar that llguidance refuses),
        MissingDependency.
    """
    llguidance = _llguidance()
    _check_source(kind, source)
    key = f"{kind} {source}"
    compiled = vocabulary.grammars.get(key)
    if compiled is None:
        with vocabulary.compiles:  # one at a time: steps need the other cores
            compiled = vocabulary.grammars.get(key)
            compiled = compiled or _compile(llguidance, kind, source, vocabulary)
    vocabulary.keep(key, compiled)
    if isinstance(compiled, str):
        raise InvalidRequest(compiled)
    return _TextMatcher(compiled.deep_copy(), _tokens(vocabulary), vocabulary.num_words)


def _check_source(kind: str, source: str) -> None:
    if len(source) > MAX_SOURCE:
        what = _name(kind) + (" (of a choice: its options)" if kind == "regex" else "")
        raise InvalidRequest(
            f"SamplingParams.guide: the {what} has {len(source)} characters; expected at most "
            f"{MAX_SOURCE}: give a smaller one, or a Choice of lists of token ids"
        )
    check_unicode("SamplingParams.guide", source)


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
    """A matcher at the beginning; why there is none, where compiling takes too much.  Raises:
    InvalidRequest.
    """
    matcher = llguidance.LLMatcher
    grammar = _grammar(matcher, kind, source)
    if too_much := why_too_much(grammar, MAX_EXPRESSIONS):
        return f"SamplingParams.guide: the {_name(kind)} is refused: {too_much}: give a smaller one"
    limits = llguidance.LLParserLimits(initial_lexer_fuel=MAX_EXPRESSIONS, verbose_errors=False)
    compiled = matcher(_tokens(vocabulary).llg, grammar, log_level=0, limits=limits)
    why = compiled.get_error()
    for _ in range(0 if why else 2):  # a language that is too large fails here, not in a step
        trial = compiled.deep_copy()  # two masks, because copies share what they know of the text
        trial.compute_bitmask()
        why = trial.get_error()
    if why:
        why = _one_line(why.replace("<non-verbose/>", ""))
        raise InvalidRequest(f"SamplingParams.guide: llguidance refuses the {_name(kind)}: {why}")
    return compiled


def _name(kind: str) -> str:
    return {"regex": "regular expression", "grammar": "grammar"}.get(kind, "JSON schema")


def _grammar(matcher: Any, kind: str, source: str) -> str:
    """llguidance's own form of a grammar, JSON."""
    if kind == "regex":
        return str(matcher.grammar_from_regex(source))
    if kind == "grammar":
        lark, parts = json.loads(source)
        grammars = [{"lark_grammar": lark}]
        for name, part in parts.items():
            inner = json.loads(_grammar(matcher, *part))["grammars"][0]
            grammars.append({**inner, "name": name})
        return json.dumps({"grammars": grammars})
    options = {"whitespace_flexible": False} if kind == "compact json" else None
    try:
        return str(matcher.grammar_from_json_schema(source, overrides=options))
    except ValueError as error:
        raise InvalidRequest(f"SamplingParams.guide: {_one_line(error)}") from error


class _Tokens:
    """llguidance's view of a tokenizer, with the bytes of its ids.

    Args: size: ids that may be chosen.
    """

    def __init__(self, llg: Any, size: int) -> None:
        self.llg = llg
        self._ids: dict[bytes, list[int]] = {}
        for token in range(min(size, llg.vocab_size)):
            if not llg.is_special_token(token):
                self._ids.setdefault(llg.decode_bytes([token]), []).append(token)
        self._longest = max(map(len, self._ids))

    def beginning(self, text: bytes) -> list[int]:
        """The ids of all tokens that a text may begin with."""
        lengths = range(1, min(len(text), self._longest) + 1)
        return [token for length in lengths for token in self._ids.get(text[:length], ())]


def _tokens(vocabulary: Vocabulary) -> _Tokens:
    """The tokenizer's facts for guides, made once."""
    if vocabulary.text_tokens is not None:
        known: _Tokens = vocabulary.text_tokens
        return known
    tokenizer = vocabulary.tokenizer
    if tokenizer is None:
        raise InvalidRequest(
            "SamplingParams.guide needs a tokenizer and the engine has none; compile with "
            "tokenizer=..., or give a Choice of lists of token ids"
        )
    size = max(vocabulary.size, len(tokenizer))
    try:
        llg = importlib.import_module("llguidance.hf").from_tokenizer(tokenizer, n_vocab=size)
        made = vocabulary.text_tokens = _Tokens(llg, vocabulary.size)
    except Exception as error:  # any error of another kind of tokenizer
        raise InvalidRequest(
            f"SamplingParams.guide: llguidance cannot read the tokenizer "
            f"{type(tokenizer).__name__} ({_one_line(error)}); load it with use_fast=True"
        ) from error
    return made


def _one_line(error: object) -> str:
    """A parser's message of several lines, with its picture of the place, on one line; of long
    lines, which hold the source, only beginning and end.
    """
    return _cut(" ".join(_cut(line, 40) for line in str(error).split("\n") if line.strip()), 120)


def _cut(text: str, most: int) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 2 * most else f"{text[:most]} ... {text[-most:]}"


class _TextMatcher:
    """llguidance's matcher without EOS, which may come where `may_end`.

    Where only one text can follow, llguidance allows the first token that the tokenizer makes of it
    and no other.  That token may mean something else than the text: an added token that the text
    spells, or characters after normalisation.  Then the text is spelled with the tokens that it
    begins with.
    """

    def __init__(self, matcher: Any, tokens: _Tokens, num_words: int) -> None:
        self._matcher, self._tokens, self._num_words = matcher, tokens, num_words

    def allowed(self) -> Tensor:
        matcher = self._matcher
        if matcher.is_stopped():  # nothing but EOS would be allowed
            if matcher.is_error():
                raise GuideFailed(f"llguidance gave up: {_one_line(matcher.get_error())}")
            return torch.zeros(self._num_words, dtype=torch.int32)
        words = torch.frombuffer(bytearray(matcher.compute_bitmask()), dtype=torch.int32)
        if matcher.is_error():
            raise GuideFailed(f"llguidance gave up: {_one_line(matcher.get_error())}")
        words = words[: self._num_words]
        alone = only_bit(words)
        if alone is None or (alone >= 0 and matcher.validate_tokens([alone]) == 1):
            return words
        return bits(self._tokens.beginning(matcher.compute_ff_bytes()), self._num_words)

    def may_end(self) -> bool:
        return bool(self._matcher.is_accepting())

    def advance(self, token: int) -> bool:
        return bool(self._matcher.try_consume_tokens([token]) == 1)

    def rewind(self, count: int) -> None:
        if count and not self._matcher.rollback(count):
            raise GuideFailed(f"llguidance cannot go back: {_one_line(self._matcher.get_error())}")


def bits(tokens: Iterable[int], num_words: int) -> Tensor:
    """The mask of these ids: int32 [num_words]."""
    words = [0] * num_words
    for token in tokens:
        words[token // 32] |= 1 << token % 32
    return torch.tensor([word - (word >> 31 << 32) for word in words], dtype=torch.int32)
