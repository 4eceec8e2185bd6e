"""One request: its prompt, its parameters, its state and its output."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from compilespec.passes.splice.evidence import Evidence
from compilespec.program import NO_ADAPTER
from compilespec.runtime.adapters import LoadedAdapter
from compilespec.runtime.detokenize import OutputText
from compilespec.runtime.given_rows import GivenRows, RopeOffsets
from compilespec.runtime.guides.follower import GuideFollower
from compilespec.runtime.host_processors import HostProcessor
from compilespec.runtime.outputs import FinishReason, GenerationOutput, RequestTimings, now_ms
from compilespec.runtime.sampling_params import SamplingParams
from compilespec.runtime.sampling_rows import Bias, RowSampling, TokenLogprobs


class RequestState(enum.Enum):
    """The state of a request.  It only moves forward, except that a preempted request waits
    again.
    """

    WAITING = "waiting"  # no state row, no blocks
    PREFILL = "prefill"  # admitted; part of its tokens is not on its way into the cache yet
    DECODE = "decode"  # emits tokens at every step
    FINISHED = "finished"  # nothing more will come


@dataclass(kw_only=True, eq=False)
class Request:
    """A prompt on its way through the engine.  Callers read it; only the scheduler writes it."""

    id: int
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int | None
    sample: int = 0  # its number among the samples of its prompt
    priority: int = 0  # more is earlier
    arrival: int = 0  # place among all that the scheduler was given
    stop_token_ids: frozenset[int]  # EOS included, unless it is ignored
    output_text: OutputText | None = None  # None without a tokenizer
    guide: GuideFollower | None = None  # its place in its guide
    bias: Bias | None = None  # its bias on the logits
    adapter: LoadedAdapter | None = None  # changes the target for it
    given: GivenRows | None = None  # embeddings of its prompt, in place of those of its ids
    content_ids: tuple[int, ...] = ()  # its prompt's contents by position; (): its ids
    ahead: tuple[int, ...] = ()  # the number of later tokens that each prompt token sees; (): none
    rope: RopeOffsets | None = None  # its rotary positions minus its token positions
    has_long_rope: bool = False  # true: it may outgrow a model's short rotary table
    predicted: tuple[int, ...] = ()  # the end of its prompt, and what its output may repeat
    processor: HostProcessor | None = None  # calls its logits processor, while it is admitted
    state: RequestState = RequestState.WAITING
    output_token_ids: list[int] = field(default_factory=list)
    prompt_logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # by position
    output_logprobs: list[TokenLogprobs] = field(default_factory=list)
    emitted_per_step: list[int] = field(default_factory=list)
    output_drafted: list[bool] = field(default_factory=list)  # by token: true if it was a draft
    num_drafted: int = 0  # drafts that its verify steps judged
    finish_reason: FinishReason | None = None
    error: Exception | None = None
    timings: RequestTimings = field(default_factory=RequestTimings)
    row: int = -1  # state row while admitted
    blocks: tuple[int, ...] = ()  # cache blocks while admitted
    prefill_token_ids: tuple[int, ...] = ()  # prompt, and the output that it had when admitted
    num_prefilled: int = 0  # of these, those in the cache or on their way into it
    num_cached: int = 0  # of these, those that were found in the cache
    num_stored: int = 0  # blocks of these that are to be copied back into the pool
    num_found: int = 0  # as num_cached, when it was first admitted
    num_computed: int = 0  # tokens whose keys and values are known to be in the cache
    backlog: int = 0  # of these, the last ones that the drafter's cache lacks
    evidence: Evidence | None = None  # the evidence of the drafts in its row, as far as it was read
    num_preemptions: int = 0
    weights_versions: list[tuple[int, int]] = field(default_factory=list)  # from which token, which
    num_passed: int = 0  # later requests that were admitted before it, by priority
    block_keys: list[bytes] = field(default_factory=list)  # of its full blocks
    num_published: int = 0  # of its blocks
    state_place: int | None = None  # the copy of recurrent states that it starts from
    state_ends: dict[int, bytes] = field(default_factory=dict)  # ends of chunks that keep states
    _num_texted: int = 0  # output tokens that output_text has seen
    _num_taken: int = 0  # output tokens that take_delta has returned

    @property
    def finished(self) -> bool:
        return self.state is RequestState.FINISHED

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Prompt and output."""
        return (*self.prompt_token_ids, *self.output_token_ids)

    @property
    def max_tokens(self) -> int:
        """The largest number of prompt and output tokens; the maximum length may end it before."""
        return len(self.prompt_token_ids) + self.params.max_new_tokens

    @property
    def is_late(self) -> bool:
        """True behind its deadline."""
        limit = self.params.deadline_seconds
        return limit is not None and now_ms() >= self.timings.submitted_ms + 1e3 * limit

    @property
    def prefix_key(self) -> bytes:
        """The key on which its cache blocks depend beside tokens."""
        adapter = b"" if self.adapter is None else self.adapter.key
        return adapter + b"long" * self.has_long_rope

    @property
    def key_ids(self) -> tuple[int, ...]:
        """The contents of its cache blocks by position: tokens, or other content."""
        return (*(self.content_ids or self.prompt_token_ids), *self.output_token_ids)

    def ahead_of(self, start: int, end: int) -> list[int] | None:
        """The number of later tokens that each token of a chunk sees; None if none sees any."""
        own = self.ahead[start:end]
        return [*own, *[0] * (end - start - len(own))] if any(own) else None

    def whole_until(self, start: int, end: int) -> int:
        """The end of a chunk from `start`, at `end` or before, such that no token of it sees one
        behind it; `start` where there is no such place.
        """
        places = enumerate(self.ahead[start:end], start)
        return next((place for place, ahead in places if place + ahead >= end), end)

    def note_weights(self, version: int) -> None:
        """The tokens that follow are of this version of the weights."""
        known, count = self.weights_versions, len(self.output_token_ids)
        if known and known[-1][0] == count:
            known.pop()
        if not known or known[-1][1] != version:
            known.append((count, version))

    @property
    def needs_host(self) -> bool:
        """True where the host must act between two steps, on its tokens or drafts."""
        return self.guide is not None or self.params.logits_processor is not None

    def sampling(self) -> RowSampling:
        """The sampling parameters for its row."""
        return RowSampling(
            params=self.params,
            bias=self.bias,
            seed=self.seed or 0,
            sample=self.sample,
            token_ids=self.token_ids,
            num_prompt_tokens=len(self.prompt_token_ids),
            stop_token_ids=self.stop_token_ids,
            processor=0 if self.processor is None else self.processor.handle,
            adapter=NO_ADAPTER if self.adapter is None else self.adapter.place,
            rope_delta=0 if self.rope is None else self.rope.after,
            has_long_rope=self.has_long_rope,
        )

    @property
    def num_prompt_logprobs(self) -> int | None:
        """The number of best log-probabilities to note at each place of a prefill call; None:
        nothing.
        """
        lacks = len(self.prompt_logprobs) < len(self.prompt_token_ids) - 1
        return self.params.prompt_logprobs if lacks else None

    def note_prompt(self, noted: Mapping[int, TokenLogprobs]) -> None:
        """Keep the prompt log-probabilities that a prefill call noted."""
        length = len(self.prompt_token_ids)
        self.prompt_logprobs |= {place: one for place, one in noted.items() if place < length}

    def _prompt_logprobs(self) -> list[TokenLogprobs | None]:
        places = range(len(self.prompt_token_ids))
        return [self.prompt_logprobs.get(place) for place in places]

    def _logprobs(self) -> list[TokenLogprobs]:
        """The log-probabilities of the tokens that were delivered."""
        return self.output_logprobs[: len(self.output_token_ids)]

    def end(self, error: Exception | None) -> None:
        """End a request that no engine runs."""
        self.state, self.error = RequestState.FINISHED, error
        self.finish_reason = "aborted" if error is None else "error"
        self.timings.finished_ms = now_ms()

    def update_text(self) -> OutputText | None:
        """Bring `output_text` up to the tokens; a final EOS or stop id leaves no text."""
        text = self.output_text
        if text is None or text.stopped:
            return text
        tokens = self.output_token_ids
        if tokens and tokens[-1] in self.stop_token_ids:
            tokens = tokens[:-1]
        text.add(tokens[self._num_texted :])
        self._num_texted = len(tokens)
        if self.finished:
            text.finish()
        return text

    def add_until_stop_string(self, tokens: Sequence[int]) -> int | None:
        """Feed tokens one by one; returns how many complete a stop string, None if none does."""
        assert self.output_text is not None, "stop strings need a tokenizer; submit checks it"
        for count, token in enumerate(tokens, start=1):
            self._num_texted += 1
            if self.output_text.add((token,)):
                return count
        return None

    def take_delta(self) -> tuple[tuple[int, ...], str]:
        """Return the tokens and the text that no earlier call returned.

        Text may lag behind its tokens: it waits for whole characters and for the end of what may
        become a stop string.  The text is complete once the request has finished.
        """
        text = self.update_text()
        new = tuple(self.output_token_ids[self._num_taken :])
        self._num_taken = len(self.output_token_ids)
        return new, "" if text is None else text.take()

    @property
    def stopped_by(self) -> str | int | None:
        """The stop string or id that ended it."""
        if self.finish_reason != "stop":
            return None
        if self.output_text is not None and self.output_text.stopped:
            return self.output_text.stopped_by
        last = self.output_token_ids[-1] if self.output_token_ids else None
        return last if last in self.stop_token_ids else None

    def output(self) -> GenerationOutput:
        """The output so far; final once the request has finished."""
        text, num_accepted = self.update_text(), sum(self.output_drafted)
        return GenerationOutput(
            prompt_token_ids=list(self.prompt_token_ids),
            token_ids=list(self.output_token_ids),
            text=None if text is None else text.text,
            seed=self.seed,
            finish_reason=self.finish_reason,
            emitted_per_step=list(self.emitted_per_step),
            error=self.error,
            logprobs=None if self.params.logprobs is None else self._logprobs(),
            num_preemptions=self.num_preemptions,
            weights_versions=tuple(self.weights_versions),
            stopped_by=self.stopped_by,
            num_cached_tokens=self.num_found,
            num_accepted_drafts=num_accepted,
            num_rejected_drafts=self.num_drafted - num_accepted,
            timings=self.timings,
            prompt_logprobs=None
            if self.params.prompt_logprobs is None
            else self._prompt_logprobs(),
        )
