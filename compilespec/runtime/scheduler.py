"""Which requests run, in which state rows, over which cache blocks.

First come, first served.  A request is admitted when a row is free and so are all blocks that it
may ever write; hence no running request can run out.  (Growing on demand and preemption would admit
more at once.)
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence

from compilespec.errors import DraftFailed
from compilespec.program import HostProposal
from compilespec.runtime.blocks import BlockPool
from compilespec.runtime.executor import Executor, PrefillChunk
from compilespec.runtime.host_drafts import propose_drafts
from compilespec.runtime.request import FinishReason, Request, RequestState, now_ms
from compilespec.runtime.stats import StatsRecorder
from compilespec.runtime.stopping import deliver


class Scheduler:
    """Drives an executor: `add` requests, then `step` until `has_work` is false."""

    def __init__(
        self,
        executor: Executor,
        stats: StatsRecorder,
        *,
        on_finish: Callable[[Request, FinishReason], None] | None = None,
        propose: HostProposal | None = None,
    ) -> None:
        self.geometry = executor.geometry
        self.pool = BlockPool(self.geometry.num_blocks)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in order of admission
        self._free_rows = list(range(self.geometry.max_batch_size))  # a heap: lowest row first
        self._executor = executor
        self._stats = stats
        self._on_finish = on_finish
        self._propose = propose

    def step(self) -> list[Request]:
        """Admit what fits, prefill up to the token limit, decode every request whose prompt is in.

        Returns: the requests that received tokens.
        Raises: whatever the executor raises, after ending all running requests with it; waiting
            ones stay.
        """
        try:
            self._admit()
            received = self._prefill()
            received += [request for request in self._decode() if request not in received]
        except BaseException as error:
            self._end_running(error)
            raise
        return received

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        assert request.state is RequestState.WAITING
        self.waiting.append(request)

    def abort(self, request: Request) -> None:
        """End a request, between steps; its row and blocks are free at once."""
        if not request.finished:
            self._finish(request, "aborted")

    def num_blocks_needed(self, num_prompt_tokens: int, max_new_tokens: int) -> int:
        """Blocks for every slot that a request may write, drafts past its end included."""
        sizes = self.geometry
        slots = num_prompt_tokens + max_new_tokens + sizes.reserve_tokens
        return -(-min(sizes.max_seq_len, slots) // sizes.block_size)

    def _admit(self) -> None:
        while self.waiting and self._free_rows:
            request = self.waiting[0]
            blocks = self.pool.allocate(
                self.num_blocks_needed(len(request.prompt_token_ids), request.params.max_new_tokens)
            )
            if blocks is None:
                return  # the first in line waits for its blocks, so that no large request starves
            self.waiting.popleft()
            request.row, request.blocks = heapq.heappop(self._free_rows), blocks
            request.state = RequestState.PREFILL
            request.timings.admitted_ms = now_ms()
            self.running.append(request)
            self._executor.set_blocks(request.row, blocks)
            self._executor.set_sampling(request.row, request.sampling())

    def _prefill(self) -> list[Request]:
        requests = [r for r in self.running if r.state is RequestState.PREFILL]
        chunks = self._pack(requests)
        if not chunks:
            return []
        with self._stats.time_prefill():
            first_tokens = self._executor.prefill(chunks)
        assert len(first_tokens) == len(chunks)
        received = []
        for request, chunk, token in zip(requests, chunks, first_tokens, strict=False):
            request.num_prefilled = chunk.start + len(chunk.tokens)
            assert chunk.finished == (token is not None), (
                "a finished prompt, and only it, has a token"
            )
            if token is not None:
                request.state = RequestState.DECODE
                request.timings.first_token_ms = now_ms()
                self._deliver(request, (token,))
                received.append(request)
        return received

    def _pack(self, requests: Sequence[Request]) -> list[PrefillChunk]:
        """Fill one prefill call in order of admission; the last prompt may be cut.

        A chunk begins with the prompt's last `num_repeated_tokens` prefilled ones (H-22).
        """
        chunks: list[PrefillChunk] = []
        room = self.geometry.max_prefill_tokens
        for request in requests:
            prompt, start = request.prompt_token_ids, request.num_prefilled
            start = max(0, start - self.geometry.num_repeated_tokens)
            if room <= request.num_prefilled - start:
                break
            end = min(len(prompt), start + room)
            next_token = prompt[end] if end < len(prompt) else None
            chunks.append(
                PrefillChunk(
                    row=request.row, start=start, tokens=prompt[start:end], next_token=next_token
                )
            )
            room -= end - start
        return chunks

    def _decode(self) -> list[Request]:
        requests = [r for r in self.running if r.state is RequestState.DECODE]
        if self._propose is not None:
            requests = self._draft_on_host(self._propose, requests)
        if not requests:
            return []
        with self._stats.time_decode(len(requests)):
            emitted = self._executor.decode([request.row for request in requests])
        for request, tokens in zip(requests, emitted, strict=True):
            assert 1 <= len(tokens) <= self.geometry.num_draft_tokens + 1
            num_delivered = self._deliver(request, tokens)
            request.emitted_per_step.append(num_delivered)
            self._stats.count_verify_step(num_delivered)
        return requests

    def _draft_on_host(self, propose: HostProposal, requests: Sequence[Request]) -> list[Request]:
        """Ask for every request's drafts and write them; returns the requests that go on."""
        drafted: dict[Request, list[int]] = {}
        for request in requests:
            try:
                drafted[request] = propose_drafts(propose, request, self.geometry)
            except DraftFailed as error:
                request.error = error
                self._finish(request, "error")
        if drafted:
            self._executor.set_drafts([r.row for r in drafted], list(drafted.values()))
        return list(drafted)

    def _deliver(self, request: Request, tokens: Sequence[int]) -> int:
        wanted = request.params.logprobs
        if wanted is not None:
            request.output_logprobs += self._executor.logprobs(request.row, tokens, wanted)
        count, reason = deliver(request, tokens, max_seq_len=self.geometry.max_seq_len)
        if reason is not None:
            self._finish(request, reason)
        return count

    def _end_running(self, error: BaseException) -> None:
        """After a failed (or interrupted) call the state of the rows is unknown: let them go."""
        for request in list(self.running):
            request.error = error if isinstance(error, Exception) else None
            self._finish(request, "error" if request.error else "aborted")

    def _finish(self, request: Request, reason: FinishReason) -> None:
        if self._on_finish is not None:
            self._on_finish(request, reason)
        if request.state is RequestState.WAITING:
            self.waiting.remove(request)
        else:
            self.running.remove(request)
            self.pool.free(request.blocks)
            heapq.heappush(self._free_rows, request.row)
        request.row, request.blocks = -1, ()
        request.state, request.finish_reason = RequestState.FINISHED, reason
        request.timings.finished_ms = now_ms()
