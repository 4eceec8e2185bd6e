"""Whole engines on the fake device: their tokens beside the CPU's, and what the driver saw.

`python -m tests.support.fake_cuda FAMILY [METHOD ...]`, with the Python of build/fake-cuda, prints
a line of JSON for each method; `--help` names the flags.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import compilespec
from compilespec import SamplingParams
from compilespec.cudagraphs.modes import GraphOptions
from compilespec.runtime.engine import Engine
from tests.support.drafters import METHODS, traced_info
from tests.support.models import HYBRIDS, MOE, VOCAB, tiny_hybrid, tiny_target
from tools.fake_cuda import device

SIZES = {"max_batch_size": 3, "max_seq_len": 64, "max_prefill_tokens": 32}
PROMPTS = [[3 + (7 * row + 5 * i) % (VOCAB - 3) for i in range(1 + 11 * row)] for row in range(3)]
GREEDY = SamplingParams(max_new_tokens=6, ignore_eos=True)
MIXED = (
    GREEDY,
    SamplingParams(max_new_tokens=6, ignore_eos=True, temperature=0.8, seed=5, top_p=0.9),
    SamplingParams(max_new_tokens=6, ignore_eos=True, temperature=1.2, seed=6, top_k=9,
                   repetition_penalty=1.3),
)  # fmt: skip
ALL_AT_START = GraphOptions(startup_seconds=500.0, max_seconds=500.0)
COMBINED = ("tree", "suffix+eagle3")
TREE = compilespec.DraftTree(top_k=2, depth=2, num_nodes=4)


@dataclass(frozen=True, kw_only=True)
class Case:
    family: str
    spec: str = "none"
    """A method of the registry, "tree" (of eagle3) or "suffix+eagle3"."""
    device: str = "cuda"
    backend: str = "eager"
    is_lazy: bool = False
    options: dict[str, Any] = field(default_factory=dict)


def model_of(family: str) -> nn.Module:
    """A tiny model in float32; one with experts in bfloat16, where they are one grouped product."""
    if family in HYBRIDS:
        return tiny_hybrid(family, torch.float32)
    num_layers = 3 if family in ("llama", "gpt_oss", "deepseek_v3") else 2
    dtype, experts = torch.float32, "batched_mm"
    if family in MOE:
        dtype, experts = torch.bfloat16, "grouped_mm"
    return tiny_target(family, dtype, num_layers=num_layers, experts=experts)


def options_of(model: nn.Module, spec: str) -> dict[str, Any]:
    """The keywords of `compile` for a method, its drafter included."""
    if spec == "none":
        return {"spec": "none"}
    num_draft_tokens = 1 if spec == "mtp" else 2
    if spec in ("tree", "suffix+eagle3"):
        head = METHODS["eagle3"](model, traced_info(model), 2)["draft"]
        if spec == "tree":
            return {"spec": "eagle3", "draft": head, "draft_tree": TREE}
        return {"spec": spec, "draft": head, "num_draft_tokens": 2}
    given = METHODS[spec](model, traced_info(model), num_draft_tokens)
    return {"spec": spec, "num_draft_tokens": num_draft_tokens, **given}


@contextlib.contextmanager
def engine_on(where: str, case: Case) -> Iterator[Engine]:
    """The case's engine on a device; its weights are the same everywhere."""
    model = model_of(case.family)
    options = {**options_of(model, case.spec), **case.options}
    if isinstance(options.get("draft"), nn.Module):
        options["draft"] = copy.deepcopy(options["draft"]).to(where)
    graphs = {} if where == "cpu" else {"cudagraphs": ALL_AT_START}
    backend = "eager" if where == "cpu" else case.backend
    options = {**SIZES, "progress": False, "backend": backend, **graphs, **options}
    with compilespec.compile(model.to(where), **options) as engine:
        yield engine


def tokens_of(engine: Engine) -> list[list[int]]:
    """One greedy request, then two, then a mixed batch: every bucket of decoding has its turn."""
    made = []
    for count in (1, 2):
        made += engine.generate(PROMPTS[-count:], GREEDY)
    made += engine.generate(PROMPTS, GREEDY)
    made += engine.generate(PROMPTS, list(MIXED))
    return [list(output.token_ids) for output in made]


def compare(case: Case, ask: Callable[[Engine], list[list[int]]] = tokens_of) -> dict[str, Any]:
    """The case's record; `faults` is empty where all is well.  Args: ask: what is generated."""
    with engine_on("cpu", case) as engine:
        wanted = ask(engine)
    torch.cuda.synchronize()
    device.refusals(), device.faults()
    torch.cuda.reset_peak_memory_stats(case.device)
    started = time.perf_counter()
    with device.lazy() if case.is_lazy else contextlib.nullcontext():
        with engine_on(case.device, case) as engine:
            start_s = time.perf_counter() - started
            launches, replays = device.num_launches(), device.num_replays()
            got = ask(engine)
            graphs, stats = engine.plan().get("cudagraphs") or {}, engine.stats()
            launches, replays = device.num_launches() - launches, device.num_replays() - replays
    faults = [f"{mine}, not {theirs}" for mine, theirs in zip(got, wanted, strict=True)
              if mine != theirs]  # fmt: skip
    faults += [f"dropped {name}: {why}" for name, why in graphs.get("dropped", {}).items()]
    faults += [*device.refusals(), *device.faults()]
    if stats.num_recompiles:
        faults.append(f"{stats.num_recompiles} recompilations")
    recorded = graphs.get("graphs", [])
    return {
        "family": case.family, "spec": case.spec, "backend": case.backend, "device": case.device,
        "is_lazy": case.is_lazy, "buckets": len(recorded),
        "kinds": sorted({f"{one['phase']} {one['kind']}" for one in recorded}),
        "graphs": sum(one["num_graphs"] for one in recorded),
        "refused": graphs.get("refused", {}),
        "replays": replays, "uncaptured": graphs.get("num_uncaptured"), "launches": launches,
        "start_s": round(start_s, 2), "capture_s": round(graphs.get("seconds", 0.0), 2),
        "graph_mib": round(graphs.get("mib", 0.0), 1),
        "peak_mib": round(torch.cuda.max_memory_allocated(case.device) / 2**20, 1),
        "faults": faults,
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.support.fake_cuda", description=__doc__)
    parser.add_argument("family")
    parser.add_argument("specs", nargs="*", help="all, if none is named")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--backend", default="eager", choices=("eager", "inductor"))
    parser.add_argument("--lazy", action="store_true")
    given = parser.parse_args(arguments)
    device.attach_project()
    if given.backend == "inductor":
        from tools.fake_cuda import interpreter

        interpreter.attach()
    for spec in given.specs or ("none", *METHODS, *COMBINED):
        case = Case(family=given.family, spec=spec, device=given.device, backend=given.backend,
                    is_lazy=given.lazy)  # fmt: skip
        try:
            record = compare(case)
        except Exception as error:
            said = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            record = {"family": given.family, "spec": spec, "faults": [said]}
        print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
