"""Cases of tensor parallelism: run by pytest as one process, and by a job of several.

torchrun --nproc-per-node 2 -m tests.support.rank_job RESULTS CASE CASE ...
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from torch import nn

import compilespec
from compilespec import SamplingParams
from compilespec.errors import SpecError
from compilespec.passes.splice.shard_weights import collectives_of
from compilespec.pipeline import parallel
from compilespec.runtime.engine import Engine
from tests.support.adapters import write_adapter
from tests.support.drafters import METHODS
from tests.support.models import even_target, target_info, tiny_target

FOLDER = "folder"  # a checkpoint of a few layers of real width beside the results
ROOT = Path(__file__).parents[2]
PROMPTS = [[5, 9, 7, 30, 11, 40, 41, 40, 41], [3, 3], [12, 60, 61, 62, 60, 61], [88]]


@dataclass(frozen=True)
class RankCase:
    """One engine, and what it is asked."""

    family: str
    spec: str = "none"
    num_layers: int = 2
    num_draft_tokens: int = 2
    changes: Mapping[str, Any] = field(default_factory=dict)  # keywords of compile()
    fault: str = ""


FAMILIES = ("llama", "qwen3", "gemma3", "phi3", "olmo2", "gpt_oss", "deepseek_v3")
SPECS = ("none", "eagle3", "mtp", "draft_model", "ngram")
MATRIX = {
    f"{family}-{spec}": RankCase(family, spec, num_layers=3 if spec == "eagle3" else 2)
    for family in FAMILIES
    for spec in SPECS
}
CASES: dict[str, RankCase] = {
    **MATRIX,
    "mixtral-ngram": RankCase("mixtral", "ngram"),
    "llama-several": RankCase(
        "llama", "eagle3", num_layers=3, changes={"num_draft_tokens": (0, 2)}
    ),
    "llama-inductor": RankCase("llama", "ngram", changes={"backend": "inductor"}),
    "quantized-int8": RankCase("even", "ngram", changes={"quantize": "int8_weight_only"}),
    "quantized-dynamic": RankCase("even", "ngram", changes={"quantize": "int8_dynamic"}),
    "quantized-int4": RankCase("even", "ngram", changes={"quantize": "int4_weight_only"}),
    "folder": RankCase(FOLDER),
    "adapters": RankCase(
        "llama", "ngram", changes={"adapters": {}, "max_adapters": 2, "max_adapter_rank": 4}
    ),
    "drafter-cut": RankCase("llama", "draft_model", changes={"draft_tensor_parallel_size": 2}),
    "other-weights": RankCase("llama", num_layers=1, fault="weights"),
    "other-options": RankCase("llama", num_layers=1, fault="options"),
    "other-version": RankCase("llama", num_layers=1, fault="version"),
    "wrong-plan": RankCase(
        "llama", num_layers=1, changes={"tensor_parallel_plan": {"*.down_proj": "columns"}}
    ),
}


def run_case(
    case: RankCase, size: int, rank: int = 0, directory: Path | None = None
) -> dict[str, Any]:
    """What a case's engine gives, in plain values; an error's class and words instead."""
    try:
        with _other_version() if case.fault == "version" and rank else contextlib.nullcontext():
            return _run(case, size, rank, directory)
    except SpecError as error:
        return {"error": type(error).__name__, "says": str(error)}
    except SystemExit:
        return {"followed": True}


def _run(case: RankCase, size: int, rank: int, directory: Path | None) -> dict[str, Any]:
    inductor = case.changes.get("backend") == "inductor"
    dtype = torch.float32 if inductor else torch.float64
    is_odd = rank == 1
    model = _model_of(case, dtype, int(case.fault == "weights" and is_odd), directory)
    keywords: dict[str, Any] = {"backend": "eager", "max_seq_len": 64, "max_batch_size": 3}
    if case.spec != "none":
        keywords["num_draft_tokens"] = case.num_draft_tokens
        torch.manual_seed(1)
        info = target_info(model, max_seq_len=64)
        keywords |= METHODS[case.spec](model, info, case.num_draft_tokens)
    keywords |= case.changes
    if case.fault == "options" and is_odd:
        keywords["max_batch_size"] = 2
    with (
        MemoryWatch() as watch,
        compilespec.compile(model, spec=case.spec, tensor_parallel_size=size, **keywords) as engine,
    ):
        peak = watch.stop()
        params = [
            SamplingParams(max_new_tokens=14, ignore_eos=True, temperature=warmth, seed=3, top_k=20)
            for warmth in (0.0, 0.9, 0.0, 1.3)
        ]
        if "adapters" in case.changes:
            assert isinstance(model, nn.Module)
            params = _with_adapters(engine, model, params)
        outputs = engine.generate(PROMPTS, params)
        decode = engine.graphs["decode"].graph_module.graph
        return {
            "tokens": [output.token_ids for output in outputs],
            "emitted": [output.emitted_per_step for output in outputs],
            "peak_mib": peak,
            "weights_mib": engine.plan()["weights_mib"],
            "cache_mib": engine.plan()["kv_cache_mib"],
            "collectives": collectives_of(decode),
            "why": list(engine.plan()["why"]),
            "recompiles": engine.stats().num_recompiles,
        }


def _model_of(
    case: RankCase, dtype: torch.dtype, seed: int, directory: Path | None
) -> nn.Module | Path:
    if case.family == FOLDER:
        assert directory is not None
        return directory / FOLDER
    if case.family == "even":  # float32: torchao quantizes no float64
        return even_target(case.num_layers, seed)
    return tiny_target(case.family, dtype, num_layers=case.num_layers, seed=seed)


def _other_version() -> Any:
    return mock.patch.object(parallel, "source_digest", return_value="of other code")


def _with_adapters(
    engine: Engine, model: nn.Module, params: Sequence[SamplingParams]
) -> list[SamplingParams]:
    """Requests of two adapters, loaded while serving, and of none."""
    with tempfile.TemporaryDirectory() as place:
        for seed, name in enumerate(("one", "two")):
            engine.load_adapter(name, write_adapter(Path(place) / name, model, seed=seed))
    names = ("one", None, "two", "one")
    return [dataclasses.replace(p, adapter=n) for p, n in zip(params, names, strict=True)]


class MemoryWatch:
    """The most private memory of the process, above what it has now; in MiB."""

    def __init__(self) -> None:
        self._before = self._most = self._now()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def __enter__(self) -> MemoryWatch:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()  # a thread that reads files when the process ends may abort it

    def stop(self) -> float:
        self._is_over.set()
        self._thread.join()
        return self._most - self._before

    def _look(self) -> None:
        while not self._is_over.wait(0.003):
            self._most = max(self._most, self._now())

    @staticmethod
    def _now() -> float:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024


def save_folder(directory: Path) -> None:
    """280 MiB of weights in float32, whose parts are most of what a start needs."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=4096, hidden_size=1024, intermediate_size=4096, num_hidden_layers=4,
        num_attention_heads=16, num_key_value_heads=8, max_position_embeddings=128,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(directory / FOLDER)


def run_job(names: Sequence[str], directory: Path, size: int = 2) -> dict[str, list[Any]]:
    """Each case's results by rank, of one job for all of them."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
        str(size), "-m", "tests.support.rank_job", str(directory), *names,
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=3600
    )
    assert result.returncode == 0, result.stderr[-3000:]
    found = [json.loads((directory / f"rank{rank}.json").read_text()) for rank in range(size)]
    return {name: [one[name] for one in found] for name in names}


def main() -> None:
    directory, names = Path(sys.argv[1]), sys.argv[2:]
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    found = {name: run_case(CASES[name], size, rank, directory) for name in names}
    (directory / f"rank{rank}.json").write_text(json.dumps(found))


@functools.cache
def alone(name: str, directory: Path | None = None) -> dict[str, Any]:
    """The same case in one process."""
    case = CASES[name]
    plain = {k: v for k, v in case.changes.items() if "tensor_parallel" not in k}
    return run_case(dataclasses.replace(case, changes=plain, fault=""), 1, 0, directory)


if __name__ == "__main__":
    main()
