"""Chooses the requests that run, their state rows and their cache blocks.

One order rules all: by priority, then first come, first served (`line.py`).  The first in line is
admitted when a row is free, and blocks for its prompt (`holdings.py`); a step prefills prompts in
chunks (`chunks.py`) and decodes all requests whose prompt is in.  Blocks are added as a request
grows.  When none is left, the last in line makes room: it waits again, and its prompt and output
are prefilled when its turn comes.  So the first in line always goes on, and every request becomes
first at some time: none starves.  (By priority at most `PATIENCE` later requests overtake one.)

With `overlap` a step is launched before the tokens of the last one are read (`launches.py`): a
request that ended in that one still takes part, what it gets is dropped, and its row and blocks are
free afterwards.

A change that fails, or is interrupted at any place, leaves rows and blocks in an unknown state.
After a failed change, every admitted request ends and all rows and blocks are freed
(`Scheduler._changing`).  This rests on one rule: a request enters its next list before it leaves
the last one (`Line`), so that it is always in a list.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

from compilespec.program import HostProposal
from compilespec.runtime.adaptive import AdaptiveDrafts
from compilespec.runtime.chunks import next_chunks
from compilespec.runtime.delivery import Delivery, nan_error
from compilespec.runtime.executor import Executor
from compilespec.runtime.holdings import Holdings
from compilespec.runtime.host_drafts import write_drafts
from compilespec.runtime.host_masks import write_masks
from compilespec.runtime.host_processors import HostProcessor
from compilespec.runtime.launches import Launch, Launches
from compilespec.runtime.line import Line
from compilespec.runtime.outputs import FinishReason, now_ms
from compilespec.runtime.prefix_tiers import PrefixTiers
from compilespec.runtime.request import Request, RequestState
from compilespec.runtime.stats import StatsRecorder


class Scheduler:
    """Drives an executor: `add` requests, then `step` until `has_work` is false.

    Args:
        on_finish: called with every request that ends, while it still has its row; on_preempt: with
            every request that loses its row and will be computed anew.
        propose: drafts from the host.
        overlap: launch a step before the last one's tokens are read, where no request of the step
            needs the host in between.
        shares_prefixes: find the blocks of known prompts again (see `PrefixCache`).
        tiers: find them beyond the pool as well.
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
        shares_prefixes: bool = False,
        tiers: PrefixTiers | None = None,
        max_step_tokens: int | None = None,
        adaptive: AdaptiveDrafts | None = None,
    ) -> None:
        self.geometry = executor.geometry
        self.line = Line()
        self.holdings = Holdings(self.geometry, shares_prefixes=shares_prefixes, tiers=tiers)
        self.launches = Launches(executor, stats, adaptive)
        self._delivery = Delivery(executor, stats)
        self._executor, self._stats = executor, stats
        self._on_finish, self._on_preempt, self._propose = on_finish, on_preempt, propose
        self._overlap, self._max_step_tokens = overlap, max_step_tokens
        self._received: dict[Request, None] = {}  # tokens in this step, in order
        self._to_abort: deque[Request] = deque()
        self._is_changing = False  # or left behind by an interrupted clean-up
        self.weights_version = 0  # the number of changes so far
        self.admits_new = True  # false: only requests that have begun are admitted

    @property
    def has_work(self) -> bool:
        return bool(self.line.waiting or self.line.running)

    def step(self) -> list[Request]:
        """Admit what fits, launch a prefill and a decode call, read what is due.

        Returns: the requests that received tokens.
        Raises: any error of the executor, after ending all running requests with it; waiting
            ones stay.
        """
        self._received = {}
        with self._changing():
            self._step()
        return list(self._received)

    def add(self, request: Request) -> None:
        assert request.state is RequestState.WAITING
        with self._changing():
            self.line.join(request)

    def abort(self, *requests: Request) -> None:
        """End requests; their rows and blocks are free once no launch names them.  In the middle
        of another call (Python's collector may close a stream there) they end with that call.

        Raises: any error of the executor where nothing runs any more and it reads what is in
            flight; the requests have ended, waiting ones stay.
        """
        self._to_abort.extend(requests)
        if not self._is_changing:
            with self._changing():
                pass

    def fail(self, request: Request, error: Exception) -> None:
        """End a request with an error, between steps; one that has ended counts as failed too."""
        with self._changing():
            self._fail(request, error)

    def reset_prefix_cache(self, *, empties: bool = True) -> None:
        """Forget the published blocks; running requests publish none of their present ones.

        Args:
            empties: those of a folder, too.
        """
        with self._changing():
            self.holdings.withdraw_all(self.line.running)
            self.holdings.renew_tiers(empties=empties)

    @property
    def has_begun(self) -> bool:
        """True where a request runs, or was preempted and will go on."""
        return bool(self.line.running) or any(map(_has_begun, self.line.waiting))

    def change_weights(self, change: Callable[[], None]) -> None:
        """Run `change` between two steps.  Requests that decode go on with their keys and values;
        others begin anew, and nobody finds what was computed before.
        """
        with self._changing():
            self._deliver()
            for request in [r for r in self.line.running if r.state is RequestState.PREFILL]:
                self._preempt(request)
            self.holdings.withdraw_all(self.line.running)
            change()
            self.holdings.renew_tiers(empties=False)
            self.weights_version += 1
            for request in self.line.running:
                request.note_weights(self.weights_version)

    def close(self) -> None:
        """Abort all requests; launches in flight are not read."""
        self._to_abort.extend(self.line.waiting)
        self._start_over(None)

    # --- changes, whole or undone ---

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """A change that may move requests, rows and blocks; then the aborts that were deferred.

        If this is cut short, by an error or an interrupt, `_start_over` follows.  If that is cut
        short in turn, `_is_changing` stays set, and the next change begins with it.
        """
        if self._is_changing:
            self._start_over(None)
        try:
            self._is_changing = True
            yield
            self._abort_all()
            if not self.line.running:
                self._deliver()
            self._is_changing = False
        except BaseException as error:
            self._start_over(error)
            raise

    def _abort_all(self) -> None:
        """End the requests that are to be aborted; each stays among them until it has ended."""
        while self._to_abort:
            if not self._to_abort[0].finished:
                self._finish(self._to_abort[0], "aborted")
            self._to_abort.popleft()

    def _start_over(self, error: BaseException | None) -> None:
        """After a failed change, every admitted request ends and all rows and blocks are freed.

        If it is cut short, it can be repeated from its beginning: until its last steps it takes no
        request from a list, and no request ends twice.
        """
        self._is_changing = True
        self.launches.in_flight.clear()
        known = dict.fromkeys([*self.line.everyone(), *self._to_abort])
        for request in known:
            if request.finished:
                continue
            if request in self._to_abort:
                self._end(request, "aborted")
            elif request.state is not RequestState.WAITING:
                request.error = error if isinstance(error, Exception) else None
                self._end(request, "error" if request.error else "aborted")
        self.holdings.free_all(known)
        self.line.start_over(known)
        self._is_changing = False

    # --- a step ---

    def _step(self) -> None:
        reads_late = self._plan()
        self._launch(reads_late=reads_late)
        self._deliver(spare_this_step=reads_late)

    def _plan(self) -> bool:
        """End late requests and admit others.  Returns True where the step's tokens are read after
        the next launch.
        """
        self.launches.begin_step()
        for request in [r for r in (*self.line.running, *self.line.waiting) if r.is_late]:
            self._finish(request, "deadline")
        self._admit()
        return self._overlap and not any(map(_needs_host, self.line.running))

    def _launch(self, *, reads_late: bool) -> None:
        """Launch a prefill and a decode call; the decode call sees what the prefill gave, unless
        that is read late.
        """
        self._launch_prefill()
        if not reads_late:
            self._deliver()
        self._launch_decode()

    def _admit(self) -> None:
        """Give the first in line a row and blocks, or let it wait, so that no large request
        starves.
        """
        while (request := self._next()) and self.holdings.take(request, self.line.running):
            self._start(request)

    def _next(self) -> Request | None:
        """The first in line that may be admitted."""
        waiting = self.line.waiting
        if not self.admits_new:
            waiting = [request for request in waiting if _has_begun(request)]
        return waiting[0] if waiting else None

    def _start(self, request: Request) -> None:
        request.state = RequestState.PREFILL
        if not _has_begun(request):  # after a preemption it finds its own
            request.timings.admitted_ms = now_ms()
            request.num_found = request.num_cached
            self._stats.count_cached(request.num_cached)
        request.note_weights(self.weights_version)
        self.line.run(request)
        known = request.prefill_token_ids[: request.num_cached]
        self._executor.set_blocks(request.row, request.blocks, known, request.state_place)
        function = request.params.logits_processor
        if function is not None:
            request.processor = HostProcessor(
                function, owner=f"request {request.id}", tokens=lambda: request.token_ids
            )
        self._executor.set_sampling(request.row, request.sampling())

    def _launch_prefill(self) -> None:
        running = self.line.running
        prefilling = [request for request in running if request.state is RequestState.PREFILL]
        self._fail_each(write_masks(self._executor, prefilling, drafted=False))
        chunks = next_chunks(running, self.geometry, self._max_step_tokens)
        if not chunks:
            return
        chunks = {r: self.holdings.with_state_place(r, chunk) for r, chunk in chunks.items()}
        self.launches.prefill(chunks)
        for request, chunk in chunks.items():
            request.num_prefilled = chunk.end
            if chunk.num_logprobs is not None:
                request.note_prompt(self._executor.prompt_logprobs(request.row))
            if chunk.finished:
                request.state = RequestState.DECODE

    def _launch_decode(self) -> None:
        requests = self._with_room([r for r in self.line.running if self._goes_on(r)])
        if self._propose is not None:
            self._fail_each(write_drafts(self._executor, self._propose, requests))
            requests = [request for request in requests if not request.finished]
        self._fail_each(write_masks(self._executor, requests, drafted=True))
        requests = [request for request in requests if not request.finished]
        if requests:
            self.launches.decode(requests)

    def _deliver(self, *, spare_this_step: bool = False) -> None:
        """Read the launches that are due, and hand their tokens on."""
        while self.launches.is_due(spare_this_step=spare_this_step):
            launch, given = self.launches.read()
            for request, tokens in zip(launch.most, given, strict=True):
                self._hand_on(launch, request, tokens)
            self._free_unnamed()

    # --- before a decode call ---

    def _goes_on(self, request: Request) -> bool:
        """True where the request decodes, and the launches in flight do not surely end it."""
        if request.state is not RequestState.DECODE:
            return False
        num_sure = request.num_tokens + self.launches.num_sure(request)
        return num_sure < min(request.max_tokens, self.geometry.config.max_seq_len)

    def _with_room(self, requests: list[Request]) -> list[Request]:
        """Give each the blocks that its next step may write; the last in line make room."""
        made_room = False
        for request in requests:
            while (not made_room or self._goes_on(request)) and not self._grow(request):
                made_room = True  # from here on, a request may have ended or lost its row
                if self.launches.in_flight:
                    self._deliver()
                else:
                    self._preempt(self.line.running[-1])
        return [r for r in requests if self._goes_on(r)] if made_room else requests

    def _grow(self, request: Request) -> bool:
        num_committed = request.num_tokens - 1 + self.launches.num_coming(request)
        blocks = self.holdings.grow(request, num_committed)
        if blocks:
            self._executor.add_blocks(request.row, len(request.blocks) - len(blocks), blocks)
        return blocks is not None

    def _preempt(self, request: Request) -> None:
        """Take row and blocks from a request that no launch names; it waits to be computed anew."""
        if self._on_preempt is not None:
            self._on_preempt(request)
        self.line.wait_again(request)
        self.holdings.free(request)
        request.state = RequestState.WAITING
        request.num_preemptions += 1
        self._stats.count_preemption()

    # --- after a call ---

    def _hand_on(self, launch: Launch, request: Request, tokens: Sequence[int]) -> None:
        assert len(tokens) <= launch.most[request], "only a finished prompt, or a step, has tokens"
        request.num_computed = launch.num_computed(request, len(tokens))
        if request.finished:
            return  # one step late: these tokens come after the end
        if launch.most[request] and not tokens:
            self.holdings.withdraw(request)  # its cache blocks may hold NaN too
            self._fail(request, nan_error(request))
        elif tokens:
            self._received[request] = None
            received = self._delivery.hand_on(request, tokens)
            if received.error is not None:
                self._fail(request, received.error)
            elif received.reason is not None:
                self._finish(request, received.reason)
            drafted = launch.most[request] - 1
            self._delivery.record(
                request, received, launch.phase, given=len(tokens), drafted=drafted
            )
        if not request.finished:
            self.holdings.publish(request)

    def _fail(self, request: Request, error: Exception) -> None:
        request.error = error
        if request.finished:
            request.finish_reason = "error"
        else:
            self._finish(request, "error")

    def _fail_each(self, failed: Mapping[Request, Exception]) -> None:
        for request, error in failed.items():
            self._fail(request, error)

    def _finish(self, request: Request, reason: FinishReason) -> None:
        if reason in ("stop", "length"):
            self.holdings.publish(request)
        self._end(request, reason)
        self.line.leave(request)
        self._free_unnamed()

    def _end(self, request: Request, reason: FinishReason) -> None:
        if self._on_finish is not None:
            try:
                self._on_finish(request, reason)
            except Exception as error:
                request.error, reason = error, "error"
        request.finish_reason, request.timings.finished_ms = reason, now_ms()
        request.state = RequestState.FINISHED

    def _free_unnamed(self) -> None:
        """Free rows and blocks of finished requests that no launch names."""
        for request in list(self.line.leaving):
            if not self.launches.names(request):
                self.holdings.free(request)
                self.line.leaving.remove(request)


def _has_begun(request: Request) -> bool:
    return request.timings.admitted_ms is not None


def _needs_host(request: Request) -> bool:
    """True where the host acts between two of the request's steps, on the tokens of the first."""
    return request.params.logprobs is not None or request.needs_host
