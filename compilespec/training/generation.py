"""Prompts answered by the target itself, through the engine.

A drafter must predict its target, so it learns best from the target's own texts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compilespec.errors import InvalidOption, SpecError
from compilespec.runtime.engine import Engine
from compilespec.runtime.sampling_params import SamplingParams
from compilespec.training.data import Prompt
from compilespec.training.files import Journal, read_records

GENERATED = "generated.jsonl"


@dataclass(frozen=True, kw_only=True)
class Generated:
    """The progress of generating."""

    num_done: int
    num_prompts: int
    num_tokens: int
    """Seconds of this call."""
    num_failed: int
    why: str = ""
    """The error of the first prompt that failed."""


def generate_answers(
    engine: Engine,
    prompts: Sequence[Prompt],
    path: Path,
    *,
    max_new_tokens: int = 256,
    temperatures: Sequence[float] = (0.0,),
    on_record: Callable[[Generated], object] | None = None,
    until: Callable[[], bool] = lambda: False,
) -> Generated:
    """Let the target answer the prompts without an answer in `path`, and append the answers.

    A prompt's temperature and seed follow from its hash, so a stopped run continues with the same
    records; they come in the order in which answers end.

    Args:
        path: JSONL; a record has key, domain, temperature, prompt_token_ids, token_ids, text and
            finish_reason, and is on disk before the next one is made.
        on_record: called after every record.
        until: asked before a prompt is begun; true ends generating after those that are running.
    Raises: CheckpointError; InvalidOption where the engine takes none of the prompts.
    """
    journal = Journal(path)
    done = {record["key"] for _, record in read_records(path)}
    run = _Run(engine, journal, [one for one in prompts if one.key not in done])
    num_before = len(prompts) - len(run.waiting)

    def state() -> Generated:
        return Generated(
            num_done=num_before + run.num_answered, num_prompts=len(prompts),
            num_tokens=run.num_tokens, num_failed=len(run.errors),
            why=next(iter(run.errors), ""),
        )  # fmt: skip

    with journal:
        try:
            while run.waiting or run.running:
                if not until():
                    run.begin(temperatures, max_new_tokens)
                elif not run.running:
                    break
                for _ in run.step():
                    if on_record is not None:
                        on_record(state())
        finally:
            run.drop()
    if run.errors and not state().num_done:
        raise InvalidOption(
            f"none of the {len(run.errors)} prompts could be answered; the first: {run.errors[0]}"
        )
    return state()


class _Run:
    """The prompts that are in the engine."""

    def __init__(self, engine: Engine, journal: Journal, waiting: list[Prompt]) -> None:
        self.engine, self.journal = engine, journal
        self.waiting = deque(waiting)
        self.running: list[tuple[Prompt, float, Any]] = []
        self.errors: list[str] = []
        self.num_answered = self.num_tokens = 0

    def begin(self, temperatures: Sequence[float], max_new_tokens: int) -> None:
        """Submit as many as keep every row of the engine busy."""
        while self.waiting and len(self.running) < self.engine.geometry.max_batch_size + 2:
            one = self.waiting.popleft()
            heat = temperature_of(one, temperatures)
            params = SamplingParams(
                max_new_tokens=max_new_tokens, temperature=heat, seed=int(one.key[8:15], 16)
            )
            try:
                self.running.append((one, heat, self.engine.submit(one.prompt, params)))
            except SpecError as error:
                self.errors.append(str(error))

    def step(self) -> Iterator[None]:
        """One step of the engine; yields after each record that is on disk."""
        if self.running:
            self.engine.step()
        for entry in [entry for entry in self.running if entry[2].finished]:
            self.running.remove(entry)
            prompt, heat, request = entry
            output = request.output()
            if output.finish_reason in ("stop", "length"):
                self.journal.append(_record(prompt, heat, output))
                self.num_answered += 1
                self.num_tokens += len(output.token_ids)
                yield
            else:
                self.errors.append(str(output.error))

    def drop(self) -> None:
        """Remove all requests from the engine."""
        for _, _, request in self.running:
            self.engine.abort(request)


def temperature_of(prompt: Prompt, temperatures: Sequence[float]) -> float:
    """One of the temperatures, chosen by the prompt's hash."""
    return temperatures[int(prompt.key[:8], 16) % len(temperatures)]


def _record(prompt: Prompt, temperature: float, output: Any) -> dict[str, Any]:
    return {
        "key": prompt.key,
        "domain": prompt.domain,
        "temperature": temperature,
        "prompt_token_ids": output.prompt_token_ids,
        "token_ids": output.token_ids,
        "text": output.text,
        "finish_reason": output.finish_reason,
    }
