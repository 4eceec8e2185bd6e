"""Delivers the tokens that a launch gave a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from compilespec.errors import NanLogits, SpecError
from compilespec.program import Phase
from compilespec.runtime.executor import Executor
from compilespec.runtime.host_masks import admitted
from compilespec.runtime.outputs import FinishReason, now_ms
from compilespec.runtime.request import Request
from compilespec.runtime.stats import StatsRecorder
from compilespec.runtime.stopping import append_until_end


@dataclass(frozen=True, kw_only=True)
class Received:
    """The number of tokens that the request got; a reason or an error where it ends with them."""

    num_tokens: int = 0
    reason: FinishReason | None = None
    error: Exception | None = None


class Delivery:
    """Hands tokens on to their requests: past guide and processor, up to where a request ends,
    with log-probabilities and text.
    """

    def __init__(self, executor: Executor, stats: StatsRecorder) -> None:
        self._executor, self._stats = executor, stats

    def hand_on(self, request: Request, tokens: Sequence[int]) -> Received:
        """Append what a launch gave to the request's output."""
        if request.timings.first_token_ms is None:
            request.timings.first_token_ms = now_ms()
        tokens, error = admitted(request, tokens)
        if error is not None and not tokens:
            return Received(error=error)
        wanted = request.params.logprobs
        if wanted is not None:
            request.output_logprobs += self._executor.logprobs(request.row, tokens, wanted)
        try:
            count, reason = append_until_end(
                request, tokens, max_seq_len=self._executor.geometry.max_seq_len
            )
        except SpecError as failure:  # from the caller's tokenizer
            return Received(error=failure)
        if reason is None and request.guide is not None and request.guide.is_complete:
            reason = "stop"
        if reason is None and error is not None:
            return Received(num_tokens=count, error=error)
        return Received(num_tokens=count, reason=reason)

    def record(
        self, request: Request, received: Received, phase: Phase, *, given: int, drafted: int
    ) -> None:
        """Note the received tokens in the request's timings and in the counters.

        Args: given: tokens of the launch, of which all but the last one were drafts; drafted: the
            number of drafts it judged.
        """
        count = received.num_tokens
        request.output_drafted += [index < given - 1 for index in range(count)]
        own = request.params.num_draft_tokens
        request.num_drafted += drafted if own is None else min(drafted, own)
        self._stats.count_tokens(request.output_token_ids[len(request.output_token_ids) - count :])
        request.timings.tokens_ms += [now_ms()] * count
        if phase == "decode" and request.error is None:
            request.emitted_per_step.append(count)
            self._stats.count_verify_step(count)


def nan_error(request: Request) -> NanLogits:
    """The error of a request whose logits held NaN."""
    return NanLogits(
        f"the model's logits for token {request.num_tokens} of request {request.id} held NaN; "
        "check the weights, or try a dtype with more range (float32, bfloat16)"
    )
