"""Counters of an engine's life."""

from __future__ import annotations

import bisect
import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from compilespec.program import Phase
from compilespec.runtime.outputs import now_ms


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """Totals since the engine was made.  A verify step is counted once per request that takes part
    in it."""

    num_verify_steps: int
    """Verify steps, counted per request."""

    num_emitted: int
    """Tokens delivered by verify steps; the first token of a request comes from prefill and is not
    counted."""

    acceptance_length: float
    """num_emitted over num_verify_steps; 0.0 before the first step."""

    acceptance_rate_by_position: tuple[float, ...]
    """The share of all verify steps that delivered draft i as well, i = 0..K-1; they add up to
    acceptance_length - 1.
    """

    prefill_ms: float
    """Time spent in prefill calls."""

    decode_ms: float
    """Time spent in decode calls."""

    num_recompiles: int
    """Compilations since the engine was ready; more than 0 is a bug."""

    num_prefills: int
    """Prefill calls."""

    num_decodes_by_bucket: Mapping[int, int]
    """Decode calls by the bucket that holds the batch; by batch size without buckets."""

    num_decodes_by_k: Mapping[int, int] = field(default_factory=dict)
    """Decode calls by the number of drafts that they verified."""

    num_preemptions: int = 0
    """The number of times a request had to make room for others and was computed anew."""

    num_cached_tokens: int = 0
    """Prompt tokens that were in the KV cache when their request was first admitted."""

    num_tokens_from_host: int = 0
    """Tokens whose keys and values were copied back from host memory (`prefix_host_mib=`)."""

    num_tokens_from_disk: int = 0
    """Tokens whose keys and values were read from a folder (`prefix_dir=`)."""

    num_state_copies: int = 0
    """Copies to the device of the host's writes into state rows (blocks, parameters, masks): at
    most one for each call of the program; 0 on the CPU.
    """

    num_running: int = 0
    """Requests that hold a state row now."""

    num_waiting: int = 0
    """Requests in line now."""

    num_free_blocks: int = 0
    """Blocks of the KV cache that nobody holds now, including those of known prefixes."""

    num_blocks: int = 0
    """Blocks of the KV cache."""


class StatsRecorder:
    """The counters that the scheduler writes; `read` makes the frozen snapshot."""

    def __init__(self, num_draft_tokens: int, buckets: Sequence[int] = ()) -> None:
        self._buckets = sorted(buckets)
        self._num_steps_by_emitted = [0] * (num_draft_tokens + 2)
        self._prefill_ms = 0.0
        self._decode_ms = 0.0
        self._num_prefills = 0
        self._num_decodes_by_bucket: Counter[int] = Counter()
        self._num_decodes_by_k: Counter[int] = Counter()
        self._num_preemptions = 0
        self._num_cached_tokens = 0
        self._tokens: dict[int, int] = {}

    @contextlib.contextmanager
    def time(self, phase: Phase) -> Iterator[None]:
        """Add the time of the body, launching or waiting, to a phase's time."""
        start = now_ms()
        yield
        elapsed = now_ms() - start
        if phase == "prefill":
            self._prefill_ms += elapsed
        else:
            self._decode_ms += elapsed

    def count_prefill(self) -> None:
        self._num_prefills += 1

    def count_decode(self, batch: int, num_draft_tokens: int) -> None:
        self._num_decodes_by_k[num_draft_tokens] += 1
        at = bisect.bisect_left(self._buckets, batch)
        bucket = self._buckets[at] if at < len(self._buckets) else batch
        self._num_decodes_by_bucket[bucket] += 1

    def count_preemption(self) -> None:
        self._num_preemptions += 1

    def count_cached(self, num_tokens: int) -> None:
        self._num_cached_tokens += num_tokens

    def count_verify_step(self, num_emitted: int) -> None:
        self._num_steps_by_emitted[num_emitted] += 1

    def count_tokens(self, token_ids: Sequence[int]) -> None:
        for token in token_ids:
            self._tokens[token] = self._tokens.get(token, 0) + 1

    def token_counts(self) -> dict[int, int]:
        """The number of times each token was delivered; from any thread."""
        return dict(self._tokens)

    def read(self, num_recompiles: int) -> EngineStats:
        by_emitted = self._num_steps_by_emitted
        steps = sum(by_emitted)
        emitted = sum(n * times for n, times in enumerate(by_emitted))
        rates = (sum(by_emitted[i:]) / max(steps, 1) for i in range(2, len(by_emitted)))
        return EngineStats(
            num_verify_steps=steps,
            num_emitted=emitted,
            acceptance_length=emitted / steps if steps else 0.0,
            acceptance_rate_by_position=tuple(rates),
            prefill_ms=self._prefill_ms,
            decode_ms=self._decode_ms,
            num_recompiles=num_recompiles,
            num_prefills=self._num_prefills,
            num_decodes_by_bucket=dict(self._num_decodes_by_bucket),
            num_decodes_by_k=dict(self._num_decodes_by_k),
            num_preemptions=self._num_preemptions,
            num_cached_tokens=self._num_cached_tokens,
        )
