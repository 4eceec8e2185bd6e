"""The engine, which users hold: prompts in, tokens and statistics out."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from compilespec.errors import (
    EngineClosed,
    InvalidRequest,
    NotSupported,
    TokenizerFailed,
    is_integer,
)
from compilespec.errors.suggest import not_one_of
from compilespec.runtime.adapters import Adapters
from compilespec.runtime.adaptive import AdaptiveDrafts
from compilespec.runtime.admission import Admission, Params
from compilespec.runtime.chat import chat_prompts
from compilespec.runtime.detokenize import Tokenizer
from compilespec.runtime.engine_thread import EngineThread
from compilespec.runtime.executor import Executor
from compilespec.runtime.forks import Process
from compilespec.runtime.image_prompts import ReadPrompt
from compilespec.runtime.keywords import check_keywords
from compilespec.runtime.outputs import Delta, FinishReason, GenerationOutput
from compilespec.runtime.prompts import as_prompt_list, read_text
from compilespec.runtime.request import Request
from compilespec.runtime.rollouts import Rollout, by_prompt, rollout_params, why_not_exact
from compilespec.runtime.sampling_params import SamplingParams
from compilespec.runtime.scheduler import Scheduler
from compilespec.runtime.serving import ServingOptions
from compilespec.runtime.stats import EngineStats, StatsRecorder
from compilespec.runtime.token_counts import save_counts
from compilespec.runtime.weight_updates import POLICIES, Given, UpdatePolicy, Write


class Engine:
    """Serves requests with a compiled program.

    One thread at a time.  `generate` and `stream` drive the same loop as `submit` and `step`, so
    requests submitted earlier move on with them.
    """

    def __init__(
        self,
        executor: Executor,
        tokenizer: Tokenizer | None = None,
        options: ServingOptions | None = None,
    ) -> None:
        """Wrap an executor, which the engine owns from now on.

        Args:
            tokenizer: a transformers tokenizer, or None for token ids only.
            options: how to serve; None takes the defaults.
        """
        self._options = options = options or ServingOptions()
        self.geometry = executor.geometry
        self.tokenizer = tokenizer
        self.eos_token_ids = frozenset(options.eos_token_ids)
        self.generation_defaults = options.generation_defaults
        self.graphs: Mapping[Any, Any] = options.program.graphs if options.program else {}
        self._executor, self._policy = executor, options.policy
        drafter = options.program.drafter if options.program else None
        self._recorder = drafter.recorder if drafter else None
        self._stats = StatsRecorder(self.geometry.config.num_draft_tokens, options.report.buckets)
        self._scheduler = Scheduler(
            executor,
            self._stats,
            on_finish=self._end,
            on_preempt=self._recorder.forget if self._recorder else None,
            propose=drafter.propose_on_host if drafter else None,
            overlap=options.overlap,
            shares_prefixes=options.shares_prefixes,
            tiers=options.tiers,
            max_step_tokens=options.max_step_tokens,
            adaptive=AdaptiveDrafts(executor, self._policy) if self._policy else None,
        )
        self.adapters = Adapters(
            executor=executor, shape=self.geometry.config.adapters, dtype=self.geometry.config.dtype
        )
        self._admission = Admission(
            self.geometry, tokenizer, self.adapters, self.eos_token_ids, options.images
        )
        self._closed, self._is_served, self._is_asleep = False, False, False
        self._process = Process()

    @check_keywords
    def generate(self, prompts: Any, params: Params = None) -> list[GenerationOutput]:
        """Run the prompts to their end; outputs in the order of the prompts, `n` of each.

        Args:
            prompts: a string, a list of token ids (or a 1-D integer tensor), a conversation as
                `{"messages": [...]}`, or a list of those; or a tokenizer's unpadded output. With
                images, where the model takes them: messages that hold them, `{"prompt": text,
                "images": [...]}`, or the output of the model's processor for one prompt.
            params: one SamplingParams, or one per prompt; None takes the defaults.
        Raises:
            SpecError: a single prompt cannot be served, or `params` shared by all cannot.  In a
                list, a prompt that cannot be served gives an output with finish_reason "error" and
                the others go on.
        """
        self._check_free()
        self._check_awake()
        requests = self._admission.of_prompts(prompts, params)
        self._run(requests)
        return [self._output(request) for request in requests]

    @check_keywords
    def chat(self, messages: Any, params: Params = None) -> list[GenerationOutput]:
        """Answer a conversation through the tokenizer's chat template, `n` outputs of it.

        Args:
            messages: mappings with "role" and "content" (text, or a list with images), as in
                `[{"role": "user", "content": "Hello"}]`, or a list of such conversations.
            params: as for `generate`; `SamplingParams.of(engine)` has what the checkpoint asks.
        Raises: as `generate`; InvalidRequest where there is no chat template, or it refuses them.
        """
        return self.generate(chat_prompts(messages), params)

    @check_keywords
    def rollout(
        self,
        prompts: Any,
        n: int = 8,
        seeds: int | Sequence[int] | None = None,
        sampling: SamplingParams | None = None,
        *,
        step: int = 0,
    ) -> list[list[Rollout]]:
        """Sample each prompt `n` times, with the log-probabilities of the tokens.

        Args:
            prompts: as for `generate`.
            seeds: one for each prompt, or one for all, from which, `step` and the prompt's number
                theirs are made: the same three give the same rollouts.  None: the engine picks.
            sampling: None takes temperature 1 and 256 new tokens.
            step: the number of the training step.
        Returns: the `n` samples of each prompt, in order.
        Raises: as `generate`; the error of any request.
        """
        self._check_free()
        each, _ = as_prompt_list(prompts)
        sampling = sampling or SamplingParams(temperature=1.0, max_new_tokens=256)
        params = rollout_params(len(each), n, seeds, step, sampling)
        outputs = self.generate(each, params)
        return by_prompt(outputs, n, why_not_exact(self._options.program))

    @check_keywords
    def stream(self, prompts: Any, params: Params = None) -> Generator[Delta, None, None]:
        """Run the prompts and yield the additions of each step; arguments and errors as in
        `generate`.  Closing the iterator early aborts the rest.

        Closing the iterator early aborts what is left.
        """
        self._check_free()
        self._check_awake()
        return self._stream(self._admission.of_prompts(prompts, params))

    @check_keywords
    def submit(
        self, prompt: Any, params: SamplingParams | None = None, *, priority: int = 0
    ) -> Request:
        """Queue one prompt; `step` moves it.

        Args:
            priority: higher ones are admitted earlier and make room later; among equals, first
                come, first served.
        Raises: InvalidRequest, NotSupported (nothing was queued), EngineClosed.
        """
        self._check_free()
        request = self.make_request(prompt, params, priority)
        self._add(request)
        return request

    @check_keywords
    def serve(self, *, max_waiting: int | None = None) -> EngineThread:
        """Run the loop on its own thread, which owns the engine until it is closed: submit,
        stream and abort there, from any thread or event loop.

        Args:
            max_waiting: requests that may wait beyond the `max_batch_size` that run; one more is
                refused with QueueFull.  None: no limit.
        Raises: EngineClosed; InvalidRequest where requests were submitted here and not finished,
            and from `generate`, `stream`, `submit` and another `serve` of this engine from then on.
        """
        self._check_free()
        if self.has_work:
            raise InvalidRequest("finish or abort what was submitted before serve()")
        if max_waiting is not None and (not is_integer(max_waiting) or max_waiting < 0):
            raise InvalidRequest(
                f"max_waiting: expected an integer of at least 0, or None, got {max_waiting!r}"
            )
        server = EngineThread(self, max_waiting)
        self._is_served = True
        return server

    def make_request(self, prompt: Any, params: SamplingParams | None, priority: int) -> Request:
        """The request of one prompt, not queued; from any thread.

        Raises: InvalidRequest, NotSupported, EngineClosed.
        """
        self._check_awake()
        return self._admission.single(prompt, params, priority)

    def make_samples(
        self, prompt: Any, params: SamplingParams | None, priority: int = 0
    ) -> list[Request]:
        """The requests of one prompt, `n` of one seed, not queued; from any thread.

        Raises: InvalidRequest, NotSupported, EngineClosed.
        """
        self._check_awake()
        return self._admission.samples(prompt, params, priority)

    def enqueue(self, request: Request) -> None:
        """Queue requests of `make_request` or `make_samples`."""
        self._check_open()
        self._add(request)

    def _add(self, request: Request) -> None:
        self._keep_text(request.predicted)
        self._scheduler.add(request)

    def take_delta(self, request: Request, index: int = 0) -> Delta | None:
        """The tokens and text that no earlier call returned, with the output if that is all; None
        where there is nothing.
        """
        token_ids, text = self._take_delta(request)
        output = self._output(request) if request.finished else None
        if output is None and not token_ids and not text:
            return None
        end = len(request.output_token_ids)
        new = slice(end - len(token_ids), end)
        return Delta(
            index=index,
            token_ids=token_ids,
            text=text,
            output=output,
            logprobs=None if request.params.logprobs is None else request.output_logprobs[new],
            drafted=tuple(request.output_drafted[new]),
        )

    def step(self) -> list[Request]:
        """Run one scheduler step: at most one prefill and one decode; returns the requests that got
        tokens.

        Raises: any error of the program; the requests that were running have then ended with
            "error".
        """
        self._check_open()
        return self._scheduler.step()

    @property
    def executor(self) -> Executor:
        """The executor of the steps, which the engine owns: a `StepRunner`, if compiled."""
        return self._executor

    @property
    def has_work(self) -> bool:
        """True where any submitted request is unfinished."""
        return self._scheduler.has_work

    def abort(self, request: Request) -> None:
        """End a request now; it keeps the tokens it has.  No effect on a finished one.

        Raises: EngineClosed; any error of the program while a step in flight is read; the request
            has ended then, and others go on.
        """
        self._check_open()
        self._scheduler.abort(request)

    def reset_prefix_cache(self) -> None:
        """Forget all prefixes that were computed before: call it after the weights were changed."""
        self._check_open()
        self._scheduler.reset_prefix_cache()

    @check_keywords
    def update_weights(
        self,
        weights: Given | None,
        draft: Given | None = None,
        policy: UpdatePolicy = "finish",
    ) -> int:
        """Give the model other weights, in place: nothing is traced, compiled or captured again.

        Args:
            weights: a state dict, an iterator of (name, tensor) or a module, by the names of the
                model that was compiled, some of them or all; values must stay until this returns.
                None: the drafter alone changes.
            draft: the same for the drafter, by the names of its checkpoint, or some of its module.
            policy: "finish": requests that run end first, with the old weights; "continue": they go
                on with the new ones, and `GenerationOutput.weights_versions` says from which token.
        Returns: `weights_version`, which counts updates and is 0 at the start.
        Raises: CheckpointError (a name, shape or dtype that is not the model's), NotSupported (what
            cannot change), InvalidOption, EngineClosed; any error of the program while requests
            end.  Nothing has changed then.
        """
        self._check_free()
        update = self.check_update(weights, draft, policy)
        if policy == "finish":
            self._finish_begun()
        self.apply_update(update)
        return self.weights_version

    @property
    def weights_version(self) -> int:
        """The number of updates of the weights so far."""
        return self._scheduler.weights_version

    def check_update(
        self, weights: Given | None, draft: Given | None, policy: UpdatePolicy
    ) -> list[Write]:
        """The checked values of an update; from any thread.  Raises: as `update_weights`."""
        self._check_open()
        if policy not in POLICIES:
            raise not_one_of("update_weights: policy", policy, POLICIES)
        if self._options.updates is None:
            raise NotSupported(
                "update_weights: the ranks of a tensor-parallel job hold parts of the weights, "
                "which cannot change; compile again"
            )
        return self._options.updates.check(weights, draft)

    def apply_update(self, update: Sequence[Write]) -> None:
        """Copy the values, between two steps."""
        assert self._options.updates is not None, "check_update has looked"
        updates = self._options.updates
        is_whole = False

        def change() -> None:
            nonlocal is_whole
            updates.apply(update)
            is_whole = True

        try:
            self._scheduler.change_weights(change)
        finally:
            if not is_whole:  # interrupted, or out of memory: weights of two versions
                self.close()

    def admit_new(self, admits: bool) -> None:
        """Let requests that have not begun be admitted, or wait."""
        self._scheduler.admits_new = admits

    @property
    def has_begun(self) -> bool:
        """True where a request has begun and not ended."""
        return self._scheduler.has_begun

    def _finish_begun(self) -> None:
        """Run the requests that have begun to their end."""
        self.admit_new(False)
        try:
            while self.has_begun:
                self._scheduler.step()
        finally:
            self.admit_new(True)

    def sleep(self) -> int:
        """Give the memory of the caches back to the system until `wake`; the weights stay, and may
        be updated meanwhile.  What was computed for prompts is forgotten.

        Returns: the bytes that went back.
        Raises: InvalidRequest (a request has not ended), NotSupported (not on the CPU),
            EngineClosed.
        """
        self._check_free()
        return self.fall_asleep()

    def wake(self) -> None:
        """Serve again after `sleep`."""
        self._check_free()
        self.wake_up()

    def wake_up(self) -> None:
        """`wake`, between two steps."""
        self._is_asleep = False

    def fall_asleep(self) -> int:
        """`sleep`, between two steps."""
        if self.has_work:
            raise InvalidRequest("sleep: requests run or wait; finish or abort them first")
        self._scheduler.reset_prefix_cache(empties=False)
        num_bytes = self._executor.release_caches()
        self._is_asleep = True
        return num_bytes

    def load_adapter(self, name: str, directory: str | Path) -> None:
        """Load a LoRA adapter for `SamplingParams(adapter=name)`; it may replace another of that
        name.  Nothing is compiled.  Requests that run keep the adapter that they began with.

        Raises: CheckpointError, NotSupported (not an adapter of this model, or of modules or a rank
            that there is no room for), InvalidRequest (all places are taken), EngineClosed.
        """
        self._check_free()
        self.adapters.put(name, self.adapters.read(directory))

    def drop_adapter(self, name: str) -> None:
        """Forget an adapter; requests that have it go on with it to their end.

        Raises: InvalidRequest where there is none of that name, EngineClosed.
        """
        self._check_free()
        self.adapters.drop(name)

    def encode(self, prompt: Any) -> list[int]:
        """Return the prompt's token ids as they would be fed.  Raises: InvalidRequest,
        EngineClosed."""
        return list(self.read(prompt).ids)

    def read(self, prompt: Any) -> ReadPrompt:
        """A prompt, tokenized and its images encoded, as `submit` takes it too: for those who must
        know its ids before.  Raises: InvalidRequest, NotSupported, EngineClosed.
        """
        self._check_open()
        return self._admission.read(prompt)

    def stats(self) -> EngineStats:
        """Totals since the engine was made."""
        scheduler, tiers = self._scheduler, self._options.tiers
        size = self.geometry.config.block_size
        return dataclasses.replace(
            self._stats.read(self._options.report.count_recompiles()),
            num_tokens_from_host=tiers.num_from_host * size if tiers else 0,
            num_tokens_from_disk=tiers.num_from_disk * size if tiers else 0,
            num_state_copies=self._options.report.count_state_copies(),
            num_running=len(scheduler.line.running),
            num_waiting=len(scheduler.line.waiting),
            num_free_blocks=scheduler.holdings.pool.num_free,
            num_blocks=self.geometry.config.num_blocks,
        )

    @check_keywords
    def explain(self, prompts: Any, params: Params = None) -> Any:
        """Run prompts and say why their drafts were lost, by cause, with what to do.

        Args:
            prompts: as for `generate`; or `GenerationOutput`s of this engine, which are read as
                they are.
            params: as for `generate`; None: greedy answers of 128 tokens.
        Returns: an `Explanation`: `str` of it is a text, `as_dict()` plain values.
        Raises: as `generate`; InvalidRequest where there is nothing to explain or requests run;
            NotSupported where ranks hold parts of the weights.
        """
        self._check_free()
        self._check_awake()
        if self.has_work:
            raise InvalidRequest("explain: requests run or wait; finish or abort them first")
        if self._options.report.explain is None:
            raise NotSupported(
                "explain: the ranks of a tensor-parallel job hold parts of the weights, which it "
                "must read whole; compile on one process"
            )
        return self._options.report.explain(self, prompts, params)

    @contextlib.contextmanager
    def most_drafts(self) -> Iterator[None]:
        """Every step verifies the most drafts, whether they pay or not."""
        launches = self._scheduler.launches
        adaptive, launches.adaptive = launches.adaptive, None
        try:
            yield
        finally:
            launches.adaptive = adaptive

    def remember(self, text: Any) -> None:
        """Let the drafter look texts up that no request gave: documentation, code, past answers.

        Only methods that draft from past texts (`suffix`) read it; others take no notice.

        Args:
            text: a string or token ids; one longer than `max_seq_len` is remembered in pieces.
        Raises: InvalidRequest (neither, or an id outside the vocabulary), EngineClosed.
        """
        self._check_open()
        self._keep_text(read_text(text, self.tokenizer, self.geometry))

    def _keep_text(self, tokens: Sequence[int]) -> None:
        size = self.geometry.config.max_seq_len
        for first in range(0, len(tokens), size):
            self._executor.keep_text(tokens[first : first + size])

    def token_counts(self) -> dict[int, int]:
        """How often each token was delivered, by id; `draft_vocab_counts=` takes it as it is."""
        return self._stats.token_counts()

    def save_token_counts(self, path: str | Path) -> Path:
        """Write `token_counts()` as JSON, for `draft_vocab_counts=` of a later start."""
        return save_counts(path, self.token_counts(), self.geometry.config.vocab_size)

    def plan(self) -> dict[str, Any]:
        """Method, K, sizes and buckets of the engine, and why they are so."""
        report = self._options.report
        plan, graphs = dict(report.plan), report.captured()
        if graphs is not None:
            plan["cudagraphs"] = graphs
        if self._options.tiers is not None:
            plan["prefix_tiers"] = self._options.tiers.describe()
        adaptive = self._scheduler.launches.adaptive
        if adaptive is not None:
            plan["adaptive"] = adaptive.policy.describe()
        return plan

    def close(self) -> None:
        """Abort what runs, write what was recorded and free the device buffers.  Closing twice is
        harmless.

        Raises: what failed, such as CheckpointError where saved hidden states cannot be written.
            The engine is closed even then; another call tries again what failed.  In a forked
            child nothing is done: all of it belongs to the parent.
        """
        if self._process.is_another:
            return
        self._scheduler.close()
        self._closed = True
        if self._options.tiers is not None:
            self._options.tiers.close()
        self._executor.close()

    def __repr__(self) -> str:
        """One line: the model, the method, K, the device, the dtype, and whether it is closed."""
        plan, counts = self._options.report.plan, self.geometry.config.draft_counts
        parts = [str(plan[name]) for name in ("model", "method") if name in plan]
        parts.append(f"K={','.join(map(str, counts))}")
        parts += [str(plan[name]) for name in ("device", "dtype") if name in plan]
        return f"Engine({', '.join(parts)}{', closed' if self._closed else ''})"

    def __enter__(self) -> Engine:
        self._check_open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _run(self, requests: Sequence[Request]) -> None:
        try:
            self._queue(requests)
            while not all(request.finished for request in requests):
                self._scheduler.step()
        finally:
            self._drop(requests)

    def _stream(self, requests: Sequence[Request]) -> Generator[Delta, None, None]:
        self._check_free()  # the engine may have been closed since the iterator was made
        open_requests = dict(enumerate(requests))
        try:
            self._queue(requests)
            while open_requests:
                if not any(request.finished for request in open_requests.values()):
                    self.step()
                for index, request in list(open_requests.items()):
                    delta = self.take_delta(request, index)
                    if request.finished:
                        del open_requests[index]
                    if delta is not None:
                        yield delta
        finally:
            self._drop(requests)

    def _take_delta(self, request: Request) -> tuple[tuple[int, ...], str]:
        """`Request.take_delta`; a tokenizer that raises ends this request, not the stream."""
        try:
            return request.take_delta()
        except TokenizerFailed as error:
            request.output_text = None
            self._scheduler.fail(request, error)
            return request.take_delta()

    def _output(self, request: Request) -> GenerationOutput:
        try:
            return request.output()
        except TokenizerFailed as error:
            request.output_text = None
            self._scheduler.fail(request, error)
            return request.output()

    def _end(self, request: Request, reason: FinishReason) -> None:
        if self._recorder is not None:
            self._recorder.finish(request, reason)
        if reason in ("stop", "length"):
            self._executor.keep_text(request.token_ids)

    def _queue(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if not request.finished:
                self._add(request)

    def _drop(self, requests: Sequence[Request]) -> None:
        """Leave nothing behind when a call ends early; close() has aborted all there was."""
        if not self._closed:
            self._scheduler.abort(*requests)

    def _check_open(self) -> None:
        self._process.check()
        if self._closed:
            raise EngineClosed("the engine is closed; compile a new one")

    def _check_awake(self) -> None:
        self._check_open()
        if self._is_asleep:
            raise InvalidRequest("the engine sleeps: call wake() first")

    def _check_free(self) -> None:
        """The engine is open, and the caller's own: `serve` has not given it to a thread."""
        self._check_open()
        if self._is_served:
            raise InvalidRequest(
                "the engine belongs to the thread that serve() started: call what serve() "
                "returned, such as server.submit(prompt)"
            )
