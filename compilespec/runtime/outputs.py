"""The results of requests: deltas, outputs, and their timings."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Literal

from compilespec.runtime.sampling_rows import TokenLogprobs


@dataclass(frozen=True, kw_only=True)
class Delta:
    """The additions of one step to one prompt of a stream."""

    index: int
    """The index of the output: the prompts in order, with the `n` samples of each next to each
    other.
    """

    token_ids: tuple[int, ...]
    """The new tokens."""

    text: str
    """The new text.  It may lag behind the tokens, and is complete once the request has
    finished.
    """

    output: GenerationOutput | None = None
    """The complete result, with the prompt's last delta."""

    logprobs: list[TokenLogprobs] | None = None
    """One entry for each new token, if `SamplingParams.logprobs` asked for them."""

    drafted: tuple[bool, ...] = ()
    """By new token: true if it was a draft, which the target accepted."""

    @property
    def finish_reason(self) -> FinishReason | None:
        return None if self.output is None else self.output.finish_reason


FinishReason = Literal["stop", "length", "deadline", "aborted", "error"]


@dataclass(kw_only=True)
class RequestTimings:
    """Moments of a request in ms of one monotonic clock; None: not reached."""

    submitted_ms: float = field(default_factory=lambda: now_ms())
    admitted_ms: float | None = None
    first_token_ms: float | None = None
    finished_ms: float | None = None
    tokens_ms: list[float] = field(default_factory=list)
    """By token: the moment when its step's tokens had arrived."""

    @property
    def queue_ms(self) -> float | None:
        """From submission to admission."""
        return None if self.admitted_ms is None else self.admitted_ms - self.submitted_ms

    @property
    def time_to_first_token_ms(self) -> float | None:
        return None if self.first_token_ms is None else self.first_token_ms - self.submitted_ms

    @property
    def time_per_output_token_ms(self) -> float | None:
        """Mean over the tokens after the first; None before there are two."""
        times = self.tokens_ms
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None


@dataclass(frozen=True, kw_only=True, repr=False)
class GenerationOutput:
    """The result of one prompt."""

    prompt_token_ids: list[int]
    """The prompt as it was fed; empty when it could not be read."""

    token_ids: list[int]
    """The generated tokens, including a final EOS or stop id and the tokens of a stop string."""

    text: str | None
    """Their text, which continues the prompt's and ends before a stop string; None without a
    tokenizer.
    """

    seed: int | None
    """The key of the random numbers; the engine picks it if the request named none."""

    finish_reason: FinishReason | None
    """The reason why generation ended; None while the request runs."""

    emitted_per_step: list[int]
    """Tokens delivered by each verify step, 1..K+1; tokens from prefill, the first one and the
    first after each preemption, are not counted.
    """

    error: Exception | None = None
    """The error when `finish_reason` is "error"."""

    logprobs: list[TokenLogprobs] | None = None
    """One entry for each generated token, if `SamplingParams.logprobs` asked for them."""

    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """One entry for each prompt token, if `SamplingParams.prompt_logprobs` asked for them; None for
    the first one, which follows nothing.
    """

    num_preemptions: int = 0
    """The number of times it had to make room and was computed anew."""

    weights_versions: tuple[tuple[int, int], ...] = ()
    """The versions of the weights, each with the first token that it gave: ((0, 3), (17, 4)) are 17
    tokens of version 3 and the others of version 4.
    """

    stopped_by: str | int | None = None
    """The stop string, or the EOS or stop id, that ended it; None for other ends."""

    num_cached_tokens: int = 0
    """Prompt tokens that were in the KV cache when it was first admitted."""

    num_accepted_drafts: int = 0
    """The number of its tokens that were drafts."""

    num_rejected_drafts: int = 0
    """Drafts of its verify steps that it did not keep."""

    timings: RequestTimings = field(default_factory=RequestTimings, compare=False)
    """Queue, first token, every token: moments in ms."""

    def __repr__(self) -> str:
        """In brief: its text, its length and the reason of its end."""
        said = f"text={self.text!r}" if self.text is not None else f"token_ids={self.token_ids}"
        error = "" if self.error is None else f", error={self.error!r}"
        return (
            f"GenerationOutput({said}, num_tokens={len(self.token_ids)}, "
            f"finish_reason={self.finish_reason!r}{error})"
        )

    @property
    def weights_version(self) -> int | None:
        """The version of the weights that its last tokens came from; None: it never ran."""
        return self.weights_versions[-1][1] if self.weights_versions else None

    @property
    def acceptance_length(self) -> float:
        """Mean tokens delivered per verify step; 0.0 when no verify step ran."""
        steps = self.emitted_per_step
        return sum(steps) / len(steps) if steps else 0.0


def now_ms() -> float:
    return time.perf_counter() * 1e3
