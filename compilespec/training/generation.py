"""Prompts answered by the target itself, through the engine.

A drafter is judged by how well it foresees its target, so it learns best from what that writes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
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
    """How far generating is."""

    num_done: int
    num_prompts: int
    num_tokens: int
    """Of this call."""
    num_failed: int


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
    """Let the target answer the prompts that `path` has no answer of, and append them to it.

    A prompt's temperature and seed follow from its hash, so a run that was stopped goes on to the
    records that it would have written without; they come in the order in which answers end.

    Args:
        path: JSONL; a record has key, domain, temperature, prompt_token_ids, token_ids, text and
            finish_reason, and is on disk before the next one is made.
        on_record: called after every record.
        until: asked before a prompt is begun; true ends generating after those that are running.
    Raises: CheckpointError; InvalidOption where the engine takes none of the prompts.
    """
    journal = Journal(path)
    done = {record["key"] for _, record in read_records(path)}
    waiting = (one for one in prompts if one.key not in done)
    num_done = sum(one.key in done for one in prompts)
    tokens = failed = 0
    errors: list[str] = []
    running: list[tuple[Prompt, float, Any]] = []
    with journal:
        while True:
            room = engine.geometry.max_batch_size + 2 - len(running)
            for one in itertools.islice(waiting, 0 if until() else room):
                heat = temperature_of(one, temperatures)
                try:
                    running.append(
                        (one, heat, engine.submit(one.prompt, _params(one, heat, max_new_tokens)))
                    )
                except SpecError as error:
                    failed += 1
                    errors.append(str(error))
            if not running:
                break
            engine.step()
            for entry in [entry for entry in running if entry[2].finished]:
                running.remove(entry)
                output = entry[2].output()
                if output.finish_reason not in ("stop", "length"):
                    failed += 1
                    errors.append(str(output.error))
                    continue
                journal.append(_record(entry[0], entry[1], output))
                num_done, tokens = num_done + 1, tokens + len(output.token_ids)
                if on_record is not None:
                    on_record(_state(num_done, prompts, tokens, failed))
    if failed and not num_done:
        raise InvalidOption(
            f"none of the {failed} prompts could be answered; the first: {errors[0]}"
        )
    return _state(num_done, prompts, tokens, failed)


def temperature_of(prompt: Prompt, temperatures: Sequence[float]) -> float:
    """One of them, by the prompt's hash."""
    return temperatures[int(prompt.key[:8], 16) % len(temperatures)]


def _params(prompt: Prompt, temperature: float, max_new_tokens: int) -> SamplingParams:
    return SamplingParams(
        max_new_tokens=max_new_tokens, temperature=temperature, seed=int(prompt.key[8:15], 16)
    )


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


def _state(num_done: int, prompts: Sequence[Prompt], tokens: int, failed: int) -> Generated:
    return Generated(
        num_done=num_done, num_prompts=len(prompts), num_tokens=tokens, num_failed=failed
    )
