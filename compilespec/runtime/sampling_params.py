"""The parameters of one request: how its tokens are chosen, and when it ends."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from compilespec.errors import InvalidRequest
from compilespec.errors.suggest import did_you_mean
from compilespec.runtime.texts import check_unicode, shown

MAX_STOP_STRINGS = 64  # stop strings of a request; each token is compared with all of them
MAX_STOP_LENGTH = 256  # characters of one
LISTS_OF_IDS = ("stop_token_ids", "shown_token_ids", "allowed_token_ids", "bad_token_ids")


class HasDefaults(Protocol):
    """An engine, seen only for its checkpoint's defaults."""

    @property
    def generation_defaults(self) -> Mapping[str, Any]:
        """Sampling defaults by the names of `SamplingParams`."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """The parameters of one request, checked when they are made.

    Impossible values raise InvalidRequest here; values that are possible but not built yet raise
    NotSupported when the request is submitted.  Logits are changed in this order: the engine's
    logits processor, the request's, penalties, bias and banned ids, min_new_tokens, guide,
    temperature, top_k, top_p, min_p.  Numbers are limited to 1e25 in size, and factors to 1e-25 at
    least.  A drawn token depends only on the seed and on the tokens before it: not on other
    requests, and not on the number of drafts.
    """

    max_new_tokens: int = 16
    """The largest number of tokens to generate, 1 or more."""

    min_new_tokens: int = 0
    """The number of tokens before which neither EOS nor a stop id may be chosen."""

    temperature: float = 0.0
    """0 (or less than 1e-5) is greedy: the most probable token, the first index on a tie.  Above it
    the token is drawn.
    """

    top_k: int = 0
    """Draw among this many most probable tokens, and those as probable as the last of them; 0 means
    all.  Greedy decoding ignores it, top_p and min_p.
    """

    top_p: float = 1.0
    """Draw among the most probable tokens that together reach this probability, above 0 to 1."""

    min_p: float = 0.0
    """Draw among tokens at least this fraction as probable as the best one, 0 to 1."""

    repetition_penalty: float = 1.0
    """Divide positive (multiply negative) logits of tokens seen in prompt or output, above 0."""

    presence_penalty: float = 0.0
    """Subtract this from the logits of tokens that the output already contains."""

    frequency_penalty: float = 0.0
    """Subtract this times its count in the output from a token's logit."""

    logit_bias: Mapping[int, float] | None = None
    """Added to the logits, by token id."""

    allowed_token_ids: tuple[int, ...] | None = None
    """The only ids that may be chosen."""

    bad_token_ids: tuple[int, ...] | None = None
    """Ids that may never be chosen."""

    seed: int | None = None
    """Key of the random numbers, 0 to 2**63 - 1; with None the engine picks one and returns it."""

    n: int = 1
    """Independent samples of the prompt, an output each.  Sample i of a seed is the same for any
    n."""

    stop: tuple[str, ...] = ()
    """Texts (or one) that end the output, which is cut before the first of them: at most 64, of at
    most 256 characters."""

    stop_token_ids: tuple[int, ...] = ()
    """Ids that end the output beside EOS; the id is kept in `token_ids`."""

    shown_token_ids: tuple[int, ...] = ()
    """Special tokens whose names stand in the output's text; the others leave none."""

    ignore_eos: bool = False
    """Go on after the model's end-of-sequence token."""

    logprobs: int | None = None
    """The number of top log-probabilities to return for each generated token, beside its own, 0 to
    20; they are those of the model's logits, before sampling changes them.
    """

    prompt_logprobs: int | None = None
    """The number of top log-probabilities to return for each prompt token but the first, beside its
    own, 0 to 20; the engine must be compiled with prompt_logprobs=True.
    """

    logits_processor: Callable[[list[int], Any], Any] | None = None
    """Called with the tokens so far (prompt included) and their float logits, a CPU tensor [V] of
    its own, for each of the S rows of every step; returns the logits to use.  It must depend only
    on its arguments, so that drafts change no token.  It runs S times a step, and every step copies
    the logits to the host and back.  The engine must be compiled with host_processors=True.
    """

    guide: Any = None
    """The form of the output, up to EOS: a `compilespec.guides` JsonSchema, Regex or Choice, or a
    mapping (JSON schema), a string (regular expression) or a sequence (choices) for one.  EOS may
    come only where the text is whole; with ignore_eos the output ends where nothing can follow.
    """

    guide_after_token_id: int | None = None
    """The guide begins after this token of the output, for example the one that ends reasoning; the
    text before it is free.
    """

    num_draft_tokens: int | None = None
    """Draft tokens per step for this request, at most the engine's; None is the engine's."""

    deadline_seconds: float | None = None
    """The request ends, with the tokens that it has, at the first step that begins this long after
    it was submitted; its finish_reason is "deadline".
    """

    prediction: str | tuple[int, ...] | None = None
    """Text, or ids, that much of the output is expected to repeat, such as the file that is edited:
    drafts are looked up there, too.  It changes no token.  Only methods that remember texts take
    it: "suffix", alone or before another one.
    """

    adapter: str | None = None
    """The LoRA adapter to generate with, by the name that it has in `compile(adapters=)` or
    `Engine.load_adapter`; None is the target as it is."""

    @classmethod
    def of(cls, engine: HasDefaults, **changes: Any) -> SamplingParams:
        """The checkpoint's own defaults (its generation_config.json), as transformers' `generate`
        applies them, with `changes` in their place.

        Raises: InvalidRequest where the checkpoint or a change has an impossible value.
        """
        return cls(**{**engine.generation_defaults, **changes})

    if not TYPE_CHECKING:  # an unknown keyword deserves our error; type checkers see the dataclass

        def __new__(cls, *args: Any, **keywords: Any) -> SamplingParams:
            known = [field.name for field in dataclasses.fields(cls)]
            if args:
                raise InvalidRequest(
                    f"SamplingParams takes keywords, such as max_new_tokens=64; got {args[0]!r}"
                )
            for name in keywords:
                if name not in known:
                    cure = did_you_mean(name, known, "SamplingParams")
                    cure = cure or f"; known: {', '.join(known)}"
                    raise InvalidRequest(f"SamplingParams has no field {name!r}{cure}")
            return super().__new__(cls)

    def __post_init__(self) -> None:
        _normalise(self)
        _check_hooks(self)
        _check_counts(self)
        _check_numbers(self)
        _check_stops(self)


def _normalise(params: SamplingParams) -> None:
    """Make tuples of sequences, and copy the mapping: the caller may change its own, and the
    request keeps the checked values.
    """
    if isinstance(params.stop, str):
        object.__setattr__(params, "stop", (params.stop,))
    if isinstance(params.logit_bias, Mapping):
        object.__setattr__(params, "logit_bias", dict(params.logit_bias))
    for name in ("stop", *LISTS_OF_IDS):
        value = getattr(params, name)
        if value is None:
            value = () if name.startswith("s") else None
        elif isinstance(value, Iterable) and not isinstance(value, str | bytes):
            value = tuple(value)
        else:
            raise _invalid(name, "a sequence", value, f"write {name}=({value!r},)")
        object.__setattr__(params, name, value)


def _check_hooks(params: SamplingParams) -> None:
    if params.guide is not None:
        from compilespec.runtime.guides import as_guide

        object.__setattr__(params, "guide", as_guide(params.guide))
    told = params.prediction
    if told is not None and not isinstance(told, str):
        ids = tuple(told) if isinstance(told, Iterable) else (-1,)
        _check_ids("prediction", ids)
        object.__setattr__(params, "prediction", ids)
    if params.adapter is not None and not isinstance(params.adapter, str):
        raise _invalid("adapter", "the name of an adapter, or None", params.adapter)
    after = params.guide_after_token_id
    if after is not None and (not _is_int(after) or after < 0):
        raise _invalid("guide_after_token_id", "a token id of at least 0", after)
    if after is not None and params.guide is None:
        raise _invalid("guide_after_token_id", "a guide with it", after, "give guide=")
    if params.logits_processor is not None and not callable(params.logits_processor):
        raise _invalid(
            "logits_processor", "a function of (token_ids, logits)", params.logits_processor
        )


def _check_counts(params: SamplingParams) -> None:
    lowest = {"max_new_tokens": 1, "min_new_tokens": 0, "top_k": 0, "n": 1}
    lowest |= {"logprobs": 0, "prompt_logprobs": 0, "num_draft_tokens": 0, "seed": 0}
    for name, low in lowest.items():
        value = getattr(params, name)
        if value is None and name in ("logprobs", "prompt_logprobs", "num_draft_tokens", "seed"):
            continue
        if not _is_int(value) or value < low:
            raise _invalid(name, f"an integer of at least {low}", value)
    if params.seed is not None and params.seed >= 2**63:
        raise _invalid("seed", "an integer below 2**63", params.seed)
    if params.min_new_tokens > params.max_new_tokens:
        expected = f"at most max_new_tokens ({params.max_new_tokens})"
        raise _invalid("min_new_tokens", expected, params.min_new_tokens, "raise max_new_tokens")
    if params.n > 2**31 - 1:
        raise _invalid("n", "an integer below 2**31", params.n)


def _check_numbers(params: SamplingParams) -> None:
    def check(name: str, expected: str, low: float, high: float, *, open_low: bool = False) -> None:
        value = getattr(params, name)
        if not _is_finite(value) or not low <= value <= high:
            raise _invalid(name, expected, value)
        if open_low and value == low:
            raise _invalid(name, expected, value)

    check("temperature", "a finite number of at least 0", 0.0, math.inf)
    check("top_p", "a number above 0 and at most 1", 0.0, 1.0, open_low=True)
    check("min_p", "a number from 0 to 1", 0.0, 1.0)
    check("repetition_penalty", "a finite number above 0", 0.0, math.inf, open_low=True)
    check("presence_penalty", "a finite number", -math.inf, math.inf)
    check("frequency_penalty", "a finite number", -math.inf, math.inf)
    if params.deadline_seconds is not None:
        check("deadline_seconds", "a finite number above 0", 0.0, math.inf, open_low=True)


def _check_stops(params: SamplingParams) -> None:
    if len(params.stop) > MAX_STOP_STRINGS:
        raise _invalid(
            "stop", f"at most {MAX_STOP_STRINGS} strings", len(params.stop), "give fewer of them"
        )
    for text in params.stop:
        if not isinstance(text, str) or not 0 < len(text) <= MAX_STOP_LENGTH:
            expected = f"strings of at least one character, and at most {MAX_STOP_LENGTH}"
            raise _invalid("stop", expected, text)
    check_unicode("SamplingParams.stop", params.stop)
    for name in LISTS_OF_IDS:
        _check_ids(name, getattr(params, name) or ())
    if params.allowed_token_ids == ():
        raise _invalid("allowed_token_ids", "at least one id", (), "give None to allow all")
    if not isinstance(params.ignore_eos, bool):
        raise _invalid("ignore_eos", "True or False", params.ignore_eos)
    bias = params.logit_bias
    if bias is None:
        return
    if not isinstance(bias, Mapping):
        raise _invalid("logit_bias", "a mapping of token id to number", bias)
    _check_ids("logit_bias", bias)
    numbers = bias.values()
    if set(map(type, numbers)) == {float} and all(map(math.isfinite, numbers)):
        return
    for value in numbers:
        if not _is_finite(value):
            raise _invalid("logit_bias", "finite numbers", value, "ban ids with bad_token_ids")


def _check_ids(name: str, ids: Collection[Any]) -> None:
    """Check many ids at once: a whole vocabulary must not hold up the interpreter."""
    if not ids or (set(map(type, ids)) == {int} and min(ids) >= 0):
        return
    for token in ids:
        if not _is_int(token) or token < 0:
            raise _invalid(name, "token ids of at least 0", token)


def _is_finite(value: object) -> bool:
    """True where a value is a number that a float can hold."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer of more than 308 digits
        return False


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _invalid(name: str, expected: str, came: object, cure: str = "") -> InvalidRequest:
    tail = f"; {cure}" if cure else ""
    return InvalidRequest(f"SamplingParams.{name}: expected {expected}, got {shown(came)}{tail}")
