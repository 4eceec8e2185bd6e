"""Prompts as callers give them: text, token ids or a conversation, one or many."""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

from compilespec.errors import ContextExceeded, InvalidRequest, TokenizerFailed
from compilespec.ops.sample.layout import MAX_LOGPROBS, MAX_STOPS
from compilespec.runtime.chat import chat_error, encode_chat, is_chat, is_chat_prompt
from compilespec.runtime.detokenize import Tokenizer
from compilespec.runtime.embeds_prompt import EmbedsPrompt, placeholder_ids
from compilespec.runtime.executor import Geometry
from compilespec.runtime.image_inputs import has_media
from compilespec.runtime.sampling_params import SamplingParams
from compilespec.runtime.texts import check_unicode

USUAL_LENGTH = 8  # characters; few tokens are longer


def as_prompt_list(prompts: Any) -> tuple[list[Any], bool]:
    """Tell one prompt (a string, ids in a flat sequence or 1-D array, a conversation) from many.

    Returns: the prompts, and whether it was a single one.  An empty sequence is no prompt at all.
    Raises: InvalidRequest.
    """
    if is_chat_prompt(prompts) or isinstance(prompts, EmbedsPrompt) or has_media(prompts):
        return [prompts], True
    if isinstance(prompts, Mapping):
        rows = _tokenized_rows(prompts)
        return rows, len(rows) == 1
    if isinstance(prompts, str | bytes | bytearray) or hasattr(prompts, "ndim"):
        return [prompts], True
    if not isinstance(prompts, Sequence):
        raise InvalidRequest(
            "prompts: expected a string, a list of token ids, or a list of those, got "
            f"{_type(prompts)}"
        )
    if prompts and (all(_is_int(item) for item in prompts) or is_chat(prompts)):
        return [prompts], True
    return list(prompts), False


def read_prompt(prompt: Any, tokenizer: Tokenizer | None, geometry: Geometry) -> tuple[int, ...]:
    """Return the prompt's token ids, checked against the program's sizes.

    Raises: InvalidRequest (what `read_text` refuses), ContextExceeded.
    """
    return read_text(prompt, tokenizer, geometry, most=geometry.config.max_seq_len - 1)


def read_text(
    prompt: Any, tokenizer: Tokenizer | None, geometry: Geometry, most: int | None = None
) -> tuple[int, ...]:
    """Return the token ids of a prompt of any length, or of at most `most` tokens.

    Raises: InvalidRequest (empty, ids outside the vocabulary, text without a tokenizer, messages
        that the chat template cannot take, a tokenizer's output of several rows or with padding),
        ContextExceeded.
    """
    if isinstance(prompt, Mapping) and not is_chat_prompt(prompt):
        rows = _tokenized_rows(prompt)
        if len(rows) != 1:
            raise InvalidRequest(
                f"the prompt has {len(rows)} rows of input_ids: expected one; give its rows as a "
                "list to generate()"
            )
        prompt = rows[0]
    if is_chat_prompt(prompt):
        ids = encode_chat(prompt, tokenizer, lambda text: check_length(text, tokenizer, most))
    elif isinstance(prompt, EmbedsPrompt):
        ids = _as_ids(placeholder_ids(prompt, geometry))
    elif isinstance(prompt, str):
        check_length(prompt, tokenizer, most)
        ids = _encode(prompt, tokenizer)
    else:
        if most is not None and isinstance(prompt, Sequence) and len(prompt) > most:
            raise _too_long(f"{len(prompt)} tokens", most)
        ids = _as_ids(prompt)
    if not ids:
        raise InvalidRequest(
            "the prompt is empty: expected at least one token; give the id that begins a text, if "
            "the model has one"
        )
    if most is not None and len(ids) > most:
        raise _too_long(f"{len(ids)} tokens", most)
    for position, token in enumerate(ids):
        if not 0 <= token < geometry.config.vocab_size:
            raise InvalidRequest(
                f"prompt token {position} is {token}: expected ids from 0 to "
                f"{geometry.config.vocab_size - 1}, the vocabulary of the target; check that the "
                "tokenizer belongs to it"
            )
    return ids


def check_length(text: str, tokenizer: Any, most: int | None) -> None:
    """Refuse a text that has more tokens, without reading all of it: tokenizers take seconds for
    megabytes and block the interpreter.

    Raises: InvalidRequest.
    """
    if most is None or tokenizer is None or len(text) <= USUAL_LENGTH * (most + 1):
        return
    if len(text) > most * _longest_token(tokenizer):
        raise _too_long(f"too many tokens ({len(text)} characters)", most)
    beginning = text[: USUAL_LENGTH * (most + 1)]
    if len(_encode(beginning, tokenizer)) > 2 * most:  # the end cannot join that many
        raise _too_long(f"too many tokens ({len(text)} characters)", most)


@functools.lru_cache(maxsize=8)
def _longest_token(tokenizer: Any) -> int:
    """The largest number of characters of a token; infinite where that is not known."""
    if not hasattr(tokenizer, "get_vocab"):
        return sys.maxsize
    return max(map(len, tokenizer.get_vocab()), default=1)


def _too_long(what: str, most: int) -> ContextExceeded:
    return ContextExceeded(
        f"the prompt has {what}: expected at most {most}, to leave room for one new token; "
        "shorten it or compile with a higher max_seq_len"
    )


def check_params(params: Any, tokenizer: Tokenizer | None, geometry: Geometry) -> None:
    """Refuse parameters that this engine cannot serve.

    Raises: InvalidRequest (not SamplingParams, a part that was not compiled in, stop strings
        without a tokenizer, ids outside the vocabulary).
    """
    if not isinstance(params, SamplingParams):
        cure = "SamplingParams(**params)" if isinstance(params, Mapping) else "SamplingParams(...)"
        raise InvalidRequest(f"params: expected SamplingParams, got {_type(params)}; write {cure}")
    for name, is_compiled, option in (
        ("prompt_logprobs", geometry.config.features.prompt_logprobs, "prompt_logprobs=True"),
        ("logits_processor", geometry.config.features.host_processors, "host_processors=True"),
    ):
        if getattr(params, name) is not None and not is_compiled:
            raise InvalidRequest(
                f"SamplingParams.{name} needs an engine that was compiled with {option}"
            )
    if params.prediction is not None and not geometry.capabilities.remembers_texts:
        raise InvalidRequest(
            f"SamplingParams.prediction: spec={geometry.capabilities.name!r} looks no texts up; "
            "compile with spec='suffix', or put 'suffix+' before another method's name"
        )
    if params.stop and tokenizer is None:
        raise InvalidRequest(
            "SamplingParams.stop needs a tokenizer and the engine has none; compile with "
            "tokenizer=..., or give stop_token_ids"
        )
    last, after = geometry.config.vocab_size - 1, params.guide_after_token_id
    if after is not None and after > last:
        raise InvalidRequest(
            f"SamplingParams.guide_after_token_id: expected an id from 0 to {last}, got {after}"
        )
    for name in ("logprobs", "prompt_logprobs"):
        count = getattr(params, name)
        if count is not None and count > MAX_LOGPROBS:
            raise InvalidRequest(
                f"SamplingParams.{name}: expected at most {MAX_LOGPROBS}, got {count}"
            )
    for name in ("stop_token_ids", "allowed_token_ids", "bad_token_ids", "logit_bias"):
        highest = max(getattr(params, name) or (), default=0)
        if highest > last:
            raise InvalidRequest(
                f"SamplingParams.{name}: expected ids from 0 to {last}, got {highest}"
            )


def check_choices(params: SamplingParams, stop_ids: frozenset[int], vocab_size: int) -> None:
    """Refuse a request that leaves no token to choose, or one with more stop ids than a row holds.

    Raises: InvalidRequest.
    """
    if params.min_new_tokens and len(stop_ids) > MAX_STOPS:
        raise InvalidRequest(
            f"SamplingParams.min_new_tokens: expected at most {MAX_STOPS} ids to hold back, EOS "
            f"included, got {len(stop_ids)}; give fewer stop_token_ids"
        )
    if params.allowed_token_ids is None and len(params.bad_token_ids or ()) < vocab_size // 2:
        return
    allowed = params.allowed_token_ids
    left = set(range(vocab_size) if allowed is None else allowed) - set(params.bad_token_ids or ())
    if params.min_new_tokens:
        left -= stop_ids
    if not left:
        raise InvalidRequest(
            "SamplingParams.allowed_token_ids: no token is left to choose once bad_token_ids, and "
            "the stop ids that min_new_tokens holds back, are taken away; allow another id"
        )


def _encode(prompt: str, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    if not prompt:  # not even the token that a tokenizer may put in front
        return ()
    if tokenizer is None:
        raise InvalidRequest(
            "the prompt is text and the engine has no tokenizer; compile with tokenizer=..., or "
            "give token ids"
        )
    check_unicode("the prompt", prompt)
    try:
        return tuple(tokenizer.encode(prompt))
    except Exception as error:  # tokenizers raise any error
        raise TokenizerFailed(
            f"the tokenizer raised {type(error).__name__} for the prompt: "
            f"{(str(error).splitlines() or [''])[0]:.200}; give token ids, or another tokenizer"
        ) from error


def _tokenized_rows(encoding: Mapping[str, Any]) -> list[Any]:
    """The rows of a tokenizer's `input_ids`: one, or a list, or an array of one or two dimensions.

    Raises: InvalidRequest (a chat message, no `input_ids`, masked tokens).
    """
    if is_chat([encoding]):
        raise chat_error()
    if "input_ids" not in encoding:
        raise InvalidRequest(
            f"the prompt is {_type(encoding)} without input_ids: expected a string, a list of "
            "token ids, or what a tokenizer returns"
        )
    mask = encoding.get("attention_mask")
    hidden = 0 if mask is None else sum(row.count(0) for row in _rows(mask))
    if hidden:
        raise InvalidRequest(
            f"attention_mask hides {hidden} of the prompts' tokens: expected prompts without "
            "padding; call the tokenizer without padding= and return_tensors="
        )
    return _rows(encoding["input_ids"])


def _rows(value: Any) -> list[Any]:
    """One row of integers, or an array or a list of rows, as a list of rows."""
    rows = _plain(value)
    is_batch = isinstance(rows, list | tuple) and rows and not _is_int(rows[0])
    return [_plain(row) for row in rows] if is_batch else [rows]


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def _as_ids(prompt: Any) -> tuple[int, ...]:
    ids = prompt
    if isinstance(prompt, bytes | bytearray):
        raise InvalidRequest(
            f"the prompt is {_type(prompt)}: expected a string or a list of token ids; give "
            "prompt.decode()"
        )
    if hasattr(prompt, "ndim"):  # a tensor or an array, without importing its library
        if prompt.ndim != 1:
            raise InvalidRequest(
                f"the prompt has {prompt.ndim} dimensions: expected 1 (token ids); give a batch as "
                "a list of rows"
            )
        ids = prompt.tolist()
    if not isinstance(ids, Sequence):
        raise InvalidRequest(
            f"the prompt is {_type(ids)}: expected a string or a list of token ids"
        )
    if ids and is_chat(ids):
        raise chat_error()
    for position, token in enumerate(ids):
        if not _is_int(token):
            raise InvalidRequest(
                f"prompt token {position} is {token!r}: expected an integer token id"
            )
    return tuple(int(token) for token in ids)


def _is_int(value: object) -> bool:
    """True where a value counts as one token id: int and NumPy's integers, no bool and no
    tensor.
    """
    return isinstance(value, Integral) and not isinstance(value, bool)


def _type(value: object) -> str:
    if value is None:
        return "None"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
