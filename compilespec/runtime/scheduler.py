"""Which requests run, in which state rows, over which cache blocks.

One order rules all: by priority, then first come, first served.  The first in line is admitted when
a row is free, and blocks for its prompt; a step prefills prompts in chunks and decodes all requests
whose prompt is in.  Blocks are added as a request grows.  When none is left, the last in line makes
room: it waits again, and its prompt and output are prefilled when its turn comes.  So the first in
line always goes on, and every request becomes the first: none starves.  (By priority at most
`PATIENCE` later requests overtake one.)

With `overlap` a step is launched before the tokens of the last one are read: a request that ended
in that one still takes part, what it gets is dropped, and its row and blocks are free afterwards.

A change that fails, or is interrupted at any place, leaves rows and blocks in an unknown state.  So
who holds one is ended, and all are free again.  This rests on one rule: a request enters the list
that it goes to before it leaves the one where it was, so that none is ever in no list.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from compilespec.errors import DraftFailed, NanLogits, SpecError
from compilespec.program import HostProposal, Phase
from compilespec.runtime.adaptive import AdaptiveDrafts, StepPlan
from compilespec.runtime.blocks import BlockPool, num_blocks_for
from compilespec.runtime.executor import Executor, PrefillChunk
from compilespec.runtime.host_drafts import propose_drafts
from compilespec.runtime.host_masks import admitted, write_masks
from compilespec.runtime.host_processors import HostProcessor
from compilespec.runtime.outputs import FinishReason, now_ms
from compilespec.runtime.prefix_cache import PrefixCache
from compilespec.runtime.request import Request, RequestState
from compilespec.runtime.stats import StatsRecorder
from compilespec.runtime.stopping import deliver

PATIENCE = 32  # later requests that may be admitted before one because their priority is higher


@dataclass(frozen=True, kw_only=True, eq=False)
class _Launch:
    """A call of the program whose tokens were not read yet."""

    phase: Phase
    step: int
    handle: Any
    most: Mapping[Request, int]  # by request that it names, in order: tokens that it may give
    ends: Mapping[Request, int]  # prefill: where each chunk ends
    started_ms: float = 0.0
    plan: StepPlan | None = None  # of a step whose K was chosen


class Scheduler:
    """Drives an executor: `add` requests, then `step` until `has_work` is false.

    Args:
        on_finish: called with every request that ends, while it still has its row; on_preempt: with
            every request that loses its row and will be computed anew.
        propose: drafts from the host.
        overlap: launch a step before the last one's tokens are read, where no request of the step
            needs the host in between.
        prefix_lookahead: find the blocks of known prompts again (see `PrefixCache`); None: do not.
        max_step_tokens: tokens of a step, prefill and decode together; a step decodes all requests
            and prefills at least one block.
        adaptive: chooses K of every step, where the program has several.
    """

    def __init__(
        self,
        executor: Executor,
        stats: StatsRecorder,
        *,
        on_finish: Callable[[Request, FinishReason], None] | None = None,
        on_preempt: Callable[[Request], None] | None = None,
        propose: HostProposal | None = None,
        overlap: bool = False,
        prefix_lookahead: int | None = None,
        max_step_tokens: int | None = None,
        adaptive: AdaptiveDrafts | None = None,
    ) -> None:
        self.geometry, self._prefix_lookahead = executor.geometry, prefix_lookahead
        self.waiting: list[Request] = []  # both in order: the first in line first
        self.running: list[Request] = []
        self._leaving: list[Request] = []  # finished, but named by a launch
        self._to_abort: deque[Request] = deque()
        self._is_changing = False  # also left behind by a clean-up that was interrupted
        self._free_all()
        self._in_flight: deque[_Launch] = deque()
        self._received: dict[Request, None] = {}  # in this step, in order
        self._steps, self._arrivals = 0, itertools.count()
        self._executor, self._stats = executor, stats
        self._on_finish, self._on_preempt, self._propose = on_finish, on_preempt, propose
        self._adaptive, self._collected_ms = adaptive, 0.0
        self._overlap, self._max_step_tokens = overlap, max_step_tokens

    def step(self) -> list[Request]:
        """Admit what fits, launch a prefill and a decode call, read what is due.

        Returns: the requests that received tokens.
        Raises: whatever the executor raises, after ending all running requests with it; waiting
            ones stay.
        """
        self._received = {}
        self._change(self._step)
        return list(self._received)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        assert request.state is RequestState.WAITING
        request.arrival = next(self._arrivals)
        self._change(lambda: bisect.insort(self.waiting, request, key=_rank))

    def abort(self, *requests: Request) -> None:
        """End requests; their rows and blocks are free once no launch names them.  In the middle
        of another call (Python's collector may close a stream there) they end with that call.

        Raises: whatever the executor raises where nothing runs any more and it reads what is in
            flight; the requests have ended, waiting ones stay.
        """
        self._to_abort.extend(requests)
        if not self._is_changing:
            self._change(lambda: None)

    def fail(self, request: Request, error: Exception) -> None:
        """End a request with an error, between steps; one that has ended before counts as failed,
        too.
        """
        self._change(lambda: self._fail(request, error))

    def reset_prefix_cache(self) -> None:
        """Forget the published blocks; requests that run publish none of those that they have."""
        self._change(self._withdraw_all)

    def close(self) -> None:
        """Abort all there is; nothing is read any more."""
        self._to_abort.extend(self.waiting)
        self._end_running(None)

    def _change(self, change: Callable[[], object]) -> None:
        """Do what may move rows and blocks, and what was put off until then."""
        if self._is_changing:
            self._end_running(None)
        try:
            self._is_changing = True
            change()
            while self._to_abort:
                if not self._to_abort[0].finished:
                    self._finish(self._to_abort[0], "aborted")
                self._to_abort.popleft()
            if not self.running:
                self._collect_all()
            self._is_changing = False
        except BaseException as error:
            self._end_running(error)
            raise

    def _step(self) -> None:
        self._steps += 1
        self._admit()
        is_late = self._overlap and not any(map(_needs_host, self.running))
        self._launch_prefill()
        if not is_late:
            self._collect_all()
        self._launch_decode()
        self._collect(before_step=self._steps if is_late else self._steps + 1)

    def _withdraw_all(self) -> None:
        if self.prefixes is not None:
            self.prefixes.clear()
            for request in self.running:
                request.num_published = self.geometry.blocks_per_row

    # --- admission ---

    def _admit(self) -> None:
        while self.waiting and self._free_rows:
            request = self.waiting[0]
            tokens = request.token_ids
            shared = self._find_prefix(request, tokens)
            if shared is None:
                return  # it is being computed
            self.pool.share(shared)
            own = self._allocate(self._num_blocks(request, len(tokens)) - len(shared))
            if own is None:
                self.pool.free(shared)
                return  # the first in line waits for its blocks, so that no large request starves
            self._start(request, tokens, shared, own)
            del self.waiting[0]
            self._note_passed(request)

    def _find_prefix(self, request: Request, tokens: Sequence[int]) -> tuple[int, ...] | None:
        """Blocks that hold the request's first tokens; None where another request is just computing
        the next one: samples of one prompt share it.
        """
        if self.prefixes is None or request.num_prompt_logprobs is not None:
            return ()
        keys = request.block_keys
        self.prefixes.extend_keys(keys, tokens)
        found = self.prefixes.find(keys, len(tokens))
        wanted = keys[len(found) : self.prefixes.num_findable(len(tokens))][:1]
        is_coming = any(
            wanted[0] in other.block_keys[other.num_published :]
            for other in (self.running if wanted else ())
            if other.num_computed < len(other.prefill_token_ids)
        )
        return None if is_coming else found

    def _allocate(self, count: int) -> tuple[int, ...] | None:
        """Blocks for another request, unless the running ones would soon lack them."""
        growing = sum(
            len(r.blocks) < self._num_blocks(r, self.geometry.max_seq_len) for r in self.running
        )
        return self.pool.allocate(count) if count + growing <= self.pool.num_free else None

    def _start(
        self, request: Request, tokens: tuple[int, ...], shared: tuple[int, ...],
        own: tuple[int, ...],
    ) -> None:  # fmt: skip
        num_cached = len(shared) * self.geometry.block_size
        request.row, request.blocks = heapq.heappop(self._free_rows), shared + own
        request.prefill_token_ids, request.num_published = tokens, len(shared)
        request.num_cached = request.num_prefilled = request.num_computed = num_cached
        request.state = RequestState.PREFILL
        if request.timings.admitted_ms is None:  # after a preemption it finds its own
            request.timings.admitted_ms = now_ms()
            self._stats.count_cached(num_cached)
        bisect.insort(self.running, request, key=_rank)
        self._executor.set_blocks(request.row, request.blocks, tokens[:num_cached])
        function = request.params.logits_processor
        if function is not None:
            request.processor = HostProcessor(
                function, owner=f"request {request.id}", tokens=lambda: request.token_ids
            )
        self._executor.set_sampling(request.row, request.sampling())

    def _note_passed(self, request: Request) -> None:
        """Those who came before it and still wait; who has waited long enough becomes the first."""
        if not self.waiting or self.waiting[-1].priority >= request.priority:
            return
        for other in self.waiting:
            other.num_passed += other.arrival < request.arrival
        self.waiting.sort(key=_rank)

    # --- launching ---

    def _launch_prefill(self) -> None:
        self._guide([r for r in self.running if r.state is RequestState.PREFILL], drafted=False)
        chunks = self._pack()
        if not chunks:
            return
        with self._stats.time("prefill"):
            handle = self._executor.launch_prefill(list(chunks.values()))
        self._stats.count_prefill()
        for request, chunk in chunks.items():
            request.num_prefilled = chunk.start + len(chunk.tokens)
            if chunk.num_logprobs is not None:
                request.note_prompt(self._executor.prompt_logprobs(request.row))
            if chunk.finished:
                request.state = RequestState.DECODE
        self._in_flight.append(
            _Launch(
                phase="prefill",
                step=self._steps,
                handle=handle,
                most={request: int(chunk.finished) for request, chunk in chunks.items()},
                ends={request: request.num_prefilled for request in chunks},
            )
        )

    def _pack(self) -> dict[Request, PrefillChunk]:
        """Fill one prefill call in order; the last prompt may be cut.

        A chunk begins with the prompt's last `num_repeated_tokens` prefilled ones (H-22), unless
        they were found in the cache, where their entries are complete.
        """
        chunks: dict[Request, PrefillChunk] = {}
        room = self._prefill_room()
        for request in self.running:
            if request.state is not RequestState.PREFILL:
                continue
            tokens, done = request.prefill_token_ids, request.num_prefilled
            start = max(request.num_cached, done - self.geometry.num_repeated_tokens)
            if room <= done - start:
                break
            end = min(len(tokens), start + room)
            chunks[request] = PrefillChunk(
                row=request.row,
                start=start,
                tokens=tokens[start:end],
                next_token=tokens[end] if end < len(tokens) else None,
                num_logprobs=request.num_prompt_logprobs,
            )
            room -= end - start
        return chunks

    def _prefill_room(self) -> int:
        sizes = self.geometry
        if self._max_step_tokens is None:
            return sizes.max_prefill_tokens
        num_decoding = sum(r.state is RequestState.DECODE for r in self.running)
        left = self._max_step_tokens - num_decoding * (sizes.num_draft_tokens + 1)
        left = max(left, sizes.num_repeated_tokens + sizes.block_size)
        return min(left, sizes.max_prefill_tokens)

    def _launch_decode(self) -> None:
        requests = self._with_room([r for r in self.running if self._goes_on(r)])
        if self._propose is not None:
            requests = self._draft_on_host(self._propose, requests)
        requests = self._guide(requests, drafted=True)
        if not requests:
            return
        started = now_ms()
        with self._stats.time("decode"):
            plan = self._adaptive.begin(requests) if self._adaptive is not None else None
            if plan is not None and plan.num_draft_tokens:  # a replay may have drafted anew
                write_masks(self._executor, requests, drafted=True)
            count = None if plan is None else plan.num_draft_tokens
            handle = self._executor.launch_decode([request.row for request in requests], count)
        count = self.geometry.num_draft_tokens if count is None else count
        self._stats.count_decode(len(requests), count)
        self._in_flight.append(
            _Launch(
                phase="decode",
                step=self._steps,
                handle=handle,
                most=dict.fromkeys(requests, count + 1),
                ends={},
                started_ms=started,
                plan=plan,
            )
        )

    def _goes_on(self, request: Request) -> bool:
        """Whether it decodes, and what is in flight does not end it for sure."""
        if request.state is not RequestState.DECODE:
            return False
        coming = sum(launch.most.get(request, 0) > 0 for launch in self._in_flight)
        return request.num_tokens + coming < min(request.max_tokens, self.geometry.max_seq_len)

    def _with_room(self, requests: Sequence[Request]) -> list[Request]:
        """Give each the blocks that its next step may write; the last in line make room."""
        for request in requests:
            while self._goes_on(request) and not self._grow(request):
                if self._in_flight:
                    self._collect_all()  # somebody may have ended
                else:
                    self._preempt(self.running[-1])
        return [request for request in requests if self._goes_on(request)]

    def _grow(self, request: Request) -> bool:
        coming = sum(launch.most.get(request, 0) for launch in self._in_flight)
        wanted = self._num_blocks(request, request.num_tokens - 1 + coming)
        missing = wanted - len(request.blocks)
        if missing <= 0:
            return True
        blocks = self.pool.allocate(missing)
        if blocks is None:
            return False
        self._executor.add_blocks(request.row, len(request.blocks), blocks)
        request.blocks += blocks
        return True

    def _num_blocks(self, request: Request, num_committed: int) -> int:
        """Blocks for what a step may write after so many tokens, no more than it ever needs."""
        return num_blocks_for(self.geometry, min(num_committed, request.max_tokens))

    def _preempt(self, request: Request) -> None:
        """Take row and blocks from a request that no launch names; it waits to be computed anew."""
        if self._on_preempt is not None:
            self._on_preempt(request)
        bisect.insort(self.waiting, request, key=_rank)
        self.running.remove(request)
        self._free(request)
        request.state = RequestState.WAITING
        request.num_preemptions += 1
        self._stats.count_preemption()

    def _draft_on_host(self, propose: HostProposal, requests: Sequence[Request]) -> list[Request]:
        """Ask for every request's drafts and write them; returns the requests that go on."""
        drafted: dict[Request, list[int]] = {}
        for request in requests:
            try:
                drafted[request] = propose_drafts(propose, request, self.geometry)
            except DraftFailed as error:
                self._fail(request, error)
        if drafted:
            self._executor.set_drafts([r.row for r in drafted], list(drafted.values()))
        return list(drafted)

    # --- reading ---

    def _collect_all(self) -> None:
        self._collect(before_step=self._steps + 1)

    def _collect(self, *, before_step: int) -> None:
        """Read the launches of earlier steps."""
        while self._in_flight and self._in_flight[0].step < before_step:
            launch = self._in_flight.popleft()
            with self._stats.time(launch.phase):
                given = self._executor.collect(launch.handle)
            if launch.plan is not None and self._adaptive is not None:
                elapsed = now_ms() - max(launch.started_ms, self._collected_ms)
                self._adaptive.end(launch.plan, list(launch.most), given, elapsed)
            self._collected_ms = now_ms()
            for request, tokens in zip(launch.most, given, strict=True):
                self._read(launch, request, tokens)
            self._release()

    def _read(self, launch: _Launch, request: Request, tokens: Sequence[int]) -> None:
        assert len(tokens) <= launch.most[request], "only a finished prompt, or a step, has tokens"
        is_prefill = launch.phase == "prefill"
        request.num_computed = (
            launch.ends[request] if is_prefill else request.num_computed + len(tokens)
        )
        if request.finished:
            return  # one step late: nobody asked for these
        if launch.most[request] and not tokens:
            self._spoil(request)
        elif tokens:
            self._received[request] = None
            if request.timings.first_token_ms is None:
                request.timings.first_token_ms = now_ms()
            count = self._deliver(request, tokens)
            request.timings.tokens_ms += [now_ms()] * count
            if not is_prefill and request.error is None:
                request.emitted_per_step.append(count)
                self._stats.count_verify_step(count)
        if not request.finished:
            self._publish(request)

    def _guide(self, requests: Sequence[Request], *, drafted: bool) -> list[Request]:
        """Say what guided requests may choose in the call to come; returns those that go on."""
        for request, error in write_masks(self._executor, requests, drafted=drafted).items():
            self._fail(request, error)
        return [request for request in requests if not request.finished]

    def _deliver(self, request: Request, tokens: Sequence[int]) -> int:
        tokens, error = admitted(request, tokens)
        if error is not None and not tokens:
            self._fail(request, error)
            return 0
        wanted = request.params.logprobs
        if wanted is not None:
            request.output_logprobs += self._executor.logprobs(request.row, tokens, wanted)
        try:
            count, reason = deliver(request, tokens, max_seq_len=self.geometry.max_seq_len)
        except SpecError as failure:  # from the caller's tokenizer
            self._fail(request, failure)
            return 0
        if reason is None and request.guide is not None and request.guide.is_complete:
            reason = "stop"
        if reason is not None:
            self._finish(request, reason)
        elif error is not None:
            self._fail(request, error)
        return count

    def _spoil(self, request: Request) -> None:
        """Its logits held NaN: what it has written may hold NaN, too."""
        if self.prefixes is not None:
            self.prefixes.withdraw(request.blocks)
        place = request.num_tokens
        self._fail(
            request,
            NanLogits(
                f"the model's logits for token {place} of request {request.id} held NaN; check the "
                "weights, or try a dtype with more range (float32, bfloat16)"
            ),
        )

    def _publish(self, request: Request) -> None:
        """Let others find the blocks that are complete, in the drafter's cache as well."""
        if self.prefixes is None:
            return
        ahead = max(1, self.prefixes.lookahead)
        known = request.num_computed - request.backlog + 1 - ahead
        count = min(known // self.geometry.block_size, len(request.blocks))
        if count <= request.num_published:
            return
        self.prefixes.extend_keys(request.block_keys, request.token_ids)
        count = min(count, len(request.block_keys))
        for number in range(request.num_published, count):
            self.prefixes.publish(request.block_keys[number], request.blocks[number])
        request.num_published = max(count, request.num_published)

    # --- leaving ---

    def _end_running(self, error: BaseException | None) -> None:
        """Nobody knows what the rows hold: let them all go, and all blocks.  What an interrupt
        leaves undone here, the next change does.
        """
        self._is_changing = True
        self._in_flight.clear()
        known = dict.fromkeys([*self._leaving, *self.running, *self.waiting, *self._to_abort])
        for request in known:
            was_running = request.state is not RequestState.WAITING
            if request in self._to_abort and not request.finished:
                self._end(request, "aborted")
            elif was_running and not request.finished:
                request.error = error if isinstance(error, Exception) else None
                self._end(request, "error" if request.error else "aborted")
            _vacate(request)
        self._free_all()
        self.waiting[:] = sorted((r for r in known if not r.finished), key=_rank)
        self.running.clear()
        self._leaving.clear()
        self._is_changing = False

    def _free_all(self) -> None:
        """Rows and blocks that nobody holds, and of which nothing is known."""
        sizes, lookahead = self.geometry, self._prefix_lookahead
        self._free_rows = list(range(sizes.max_batch_size))  # a heap: lowest row first
        self.pool = BlockPool(sizes.num_blocks)
        self.prefixes = (
            None
            if lookahead is None
            else PrefixCache(self.pool, block_size=sizes.block_size, lookahead=lookahead)
        )

    def _fail(self, request: Request, error: Exception) -> None:
        request.error = error
        if request.finished:
            request.finish_reason = "error"
        else:
            self._finish(request, "error")

    def _finish(self, request: Request, reason: FinishReason) -> None:
        if reason in ("stop", "length"):
            self._publish(request)
        self._end(request, reason)
        if request.row >= 0:
            self._leaving.append(request)
        for line in (self.waiting, self.running):
            if request in line:
                line.remove(request)
        self._release()

    def _end(self, request: Request, reason: FinishReason) -> None:
        if self._on_finish is not None:
            try:
                self._on_finish(request, reason)
            except Exception as error:
                request.error, reason = error, "error"
        request.finish_reason, request.timings.finished_ms = reason, now_ms()
        request.state = RequestState.FINISHED

    def _release(self) -> None:
        """Free rows and blocks of finished requests that no launch names."""
        for request in list(self._leaving):
            if not any(request in launch.most for launch in self._in_flight):
                self._free(request)
                self._leaving.remove(request)

    def _free(self, request: Request) -> None:
        self.pool.free(request.blocks)
        heapq.heappush(self._free_rows, request.row)
        _vacate(request)


def _vacate(request: Request) -> None:
    """It holds nothing now."""
    if request.processor is not None:
        request.processor.close()
    request.row, request.blocks, request.num_published = -1, (), 0
    request.num_prefilled = request.num_computed = request.num_cached = request.backlog = 0


def _rank(request: Request) -> tuple[bool, int, int]:
    """The place in line: less is earlier."""
    return request.num_passed < PATIENCE, -request.priority, request.arrival


def _needs_host(request: Request) -> bool:
    """Whether the host acts between two of its steps, on the tokens of the first."""
    return request.params.logprobs is not None or request.needs_host
