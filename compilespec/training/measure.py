"""The acceptance of a drafter on held-out prompts, measured by the engine that will run it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from compilespec.pipeline.entry import compile as compile_engine
from compilespec.runtime.outputs import GenerationOutput
from compilespec.runtime.sampling_params import SamplingParams
from compilespec.tracing.load import Target
from compilespec.training.data import Sample
from compilespec.training.options import TrainOptions

MAX_DOCUMENT_PROMPT = 64


@dataclass(frozen=True, kw_only=True)
class MeasuredAcceptance:
    """Mean tokens per verify step, greedy."""

    overall: float
    by_domain: dict[str, float]
    num_prompts: int
    num_steps: int


def measure(
    target: Target, spec: str, draft: Path, samples: Sequence[Sample], options: TrainOptions
) -> MeasuredAcceptance:
    """Decode the beginnings of held-out samples with a saved drafter.  Raises: the errors of
    `compile`.

    Raises: what `compile` raises.
    """
    chosen = choose(samples, options.eval_prompts)
    prompts = [list(beginning(one)) for one in chosen]
    longest = max(map(len, prompts)) + options.eval_new_tokens
    with compile_engine(
        target.model,
        spec,
        draft=draft,
        tokenizer=target.tokenizer,
        num_draft_tokens=options.num_draft_tokens,
        max_batch_size=min(8, len(prompts)),
        max_seq_len=-(-longest // 64) * 64,
        backend=options.backend,
    ) as engine:
        params = SamplingParams(max_new_tokens=options.eval_new_tokens)
        outputs = engine.generate(prompts, params)
    domains = {one.domain: [] for one in chosen}  # type: dict[str, list[GenerationOutput]]
    for one, output in zip(chosen, outputs, strict=True):
        domains[one.domain].append(output)
    return MeasuredAcceptance(
        overall=mean_length(outputs),
        by_domain={name: mean_length(group) for name, group in sorted(domains.items()) if name},
        num_prompts=len(prompts),
        num_steps=sum(len(one.emitted_per_step) for one in outputs),
    )


def choose(samples: Sequence[Sample], count: int) -> list[Sample]:
    """The first samples of every domain in turn."""
    by_domain: dict[str, list[Sample]] = {}
    for one in samples:
        by_domain.setdefault(one.domain, []).append(one)
    chosen: list[Sample] = []
    for rank in range(max(map(len, by_domain.values()), default=0)):
        chosen += [group[rank] for _, group in sorted(by_domain.items()) if rank < len(group)]
    return chosen[:count]


def beginning(sample: Sample) -> tuple[int, ...]:
    """The given part of a sample, or the first tokens of a document."""
    if sample.start > 1:
        return sample.token_ids[: sample.start]
    return sample.token_ids[: max(1, min(MAX_DOCUMENT_PROMPT, len(sample) // 2))]


def mean_length(outputs: Sequence[GenerationOutput]) -> float:
    steps = [count for output in outputs for count in output.emitted_per_step]
    return sum(steps) / len(steps) if steps else 0.0


@contextmanager
def folder_beside(directory: Path) -> Iterator[Path]:
    """A temporary folder for parts, on the same file system."""
    directory.mkdir(parents=True, exist_ok=True)
    parts = Path(tempfile.mkdtemp(prefix=".parts-", dir=directory))
    try:
        yield parts
    finally:
        shutil.rmtree(parts, ignore_errors=True)
