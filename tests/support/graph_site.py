"""A program of every kind of graph, shared by the tests that replay it: EAGLE-3 on a tiny llama."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from torch import nn

import compilespec
from compilespec.cudagraphs.buckets import Buckets
from compilespec.cudagraphs.modes import GraphOptions, units_for
from compilespec.lowering import lower
from compilespec.methods.eagle3 import random_head
from compilespec.program import Lowered, SpecProgram
from compilespec.runtime.engine import Engine
from compilespec.runtime.step_runner import StepRunner
from tests.support.fake_executor import engine_over
from tests.support.gpu_engine import moved
from tests.support.gpu_model import Gpu
from tests.support.models import Ask, ask_all, target_info, tiny_target

MAX_SEQ_LEN, MAX_BATCH = 61, 5
BUCKETS = Buckets(decode=((1,), (2,), (5,)), prefill=((1, 8), (2, 16), (5, 24)))
PROMPTS = (1, 7, 8, 9, 16, 17, 23, 24, 40)  # bucket edges and their neighbours; the last in chunks


@dataclass(frozen=True, eq=False)
class Site:
    model: nn.Module
    program: SpecProgram
    asks: list[Ask]

    def runner(
        self, mode: str, buckets: Buckets = BUCKETS, gpu: Gpu | None = None, **options: Any
    ) -> StepRunner:
        """Args: gpu: the modelled device that it runs on; None: the CPU."""
        graphs = GraphOptions(mode=mode, **options)
        lowered = self._lowered(mode)
        if gpu is not None:
            lowered = moved(lowered, gpu)
        return StepRunner(lowered, buckets=buckets, graphs=graphs)

    @functools.cache  # noqa: B019  (a site lives as long as the tests)
    def _lowered(self, mode: str) -> Lowered:
        units = units_for(GraphOptions(mode=mode).kinds_on(self.program.config.device))
        return lower(self.program, backend="eager", units=units)

    def engine(
        self, mode: str, *, overlap: bool = False, **options: Any
    ) -> tuple[StepRunner, Engine]:
        runner = self.runner(mode, **options)
        poison_caches(runner)
        return runner, engine_over(
            runner, overlap=overlap, count_recompiles=lambda: runner.num_recompiles,
            count_state_copies=lambda: runner.num_state_copies,
        )  # fmt: skip


@functools.cache
def the_site() -> Site:
    model = tiny_target("llama", num_layers=3)
    head = random_head(target_info(model, MAX_SEQ_LEN), aux_layers=(0, 1, 2))
    program = compilespec.trace(
        model, spec="eagle3", draft=head, num_draft_tokens=2, max_batch_size=MAX_BATCH,
        max_seq_len=MAX_SEQ_LEN, max_prefill_tokens=24, keep_graphs=False,
    )  # fmt: skip
    asks = ask_all(model, ((length, 9) for length in PROMPTS))
    return Site(model, program, asks)


def poison_caches(runner: StepRunner) -> None:
    for name, buffer in runner.buffers.items():
        if name.startswith("cache."):
            buffer.fill_(float("nan"))
