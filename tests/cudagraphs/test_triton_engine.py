"""A whole engine on the Triton kernels: interpreted, they serve the CPU; tokens are the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from compilespec.ops import _library
from compilespec.ops._library import TRITON_KERNELS

ROOT = Path(__file__).resolve().parents[2]


def test_cuda_tensors_take_the_triton_kernels():
    names = {"paged_attention", "sample", "draw", "note_logprobs", "argmax_linear", "score_linear",
             "ngram_match", "suffix_match", "roll_window"}  # fmt: skip
    assert set(TRITON_KERNELS) >= names
    for name in TRITON_KERNELS:
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"compilespec::{name}", "CUDA")


def test_the_cpu_never_imports_triton_for_an_operator():
    """Importing the package, and calling operators on the CPU."""
    script = (
        "import sys, torch, compilespec\n"
        "from compilespec.ops import argmax_linear, ngram_match\n"
        "argmax_linear(torch.ones(2, 3), torch.ones(5, 3))\n"
        "ngram_match(torch.ones(1, 4).int(), torch.tensor([4]), 2, 3, 1)\n"
        "assert 'triton' not in sys.modules\n"
    )
    run(script)


def test_without_triton_the_references_serve(monkeypatch):
    """One warning says so; a variable of the environment asks for the same without one."""

    def run() -> str:
        call = _library._lazy_triton("argmax_linear", "argmax_linear", lambda x: "reference")
        return call(torch.zeros(1))

    _library.has_triton.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(_library.importlib.util, "find_spec", lambda name: None)
        with pytest.warns(RuntimeWarning, match="install triton"):
            assert run() == "reference"
        assert run() == "reference"
    _library.has_triton.cache_clear()
    monkeypatch.setenv("COMPILESPEC_TRITON_KERNELS", "0")
    assert run() == "reference"
    _library.has_triton.cache_clear()


def run(script: str, **environment: str) -> str:
    variables = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True,
                          env=variables, check=False, timeout=1200)  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


ENGINE = """
import dataclasses
import functools
import torch
import compilespec
from compilespec import SamplingParams
from compilespec.methods.eagle3 import random_head
from compilespec.ops._library import TRITON_KERNELS
from tests.support.models import target_info, tiny_target

def in_order(context, **given):
    traits = dataclasses.replace(given["traits"], caches_heads_first=False)  # as on a GPU
    return context(**{{**given, "traits": traits}})

calls = []
if {on_triton}:
    import tests.support.triton_interpreter
    from compilespec.pipeline import build
    build.PassContext = functools.partial(in_order, build.PassContext)
    library = torch.library.Library("compilespec", "IMPL")
    for name, kernel in TRITON_KERNELS.items():
        def served(*args, name=name, kernel=kernel):
            calls.append(name)
            return kernel(*args)
        library.impl(name, served, "CPU")

torch.manual_seed(0)
model = tiny_target({family!r}, torch.float64, num_layers=2)
head = random_head(target_info(model, 64), aux_layers=(0, 1, 2), num_draft_tokens=2)
params = [
    SamplingParams(max_new_tokens=5, ignore_eos=True),
    SamplingParams(max_new_tokens=5, ignore_eos=True, temperature=0.8, seed=5, logprobs=2),
    SamplingParams(max_new_tokens=5, ignore_eos=True, temperature=1.2, seed=6, top_k=9,
                   repetition_penalty=1.3),
]
prompts = [[5, 6, 7, 8, 9, 10, 11], [3, 4], list(range(1, 20))]
with compilespec.compile(
    model, spec="eagle3", draft=head, backend="eager", max_batch_size=3, max_seq_len=64,
    max_prefill_tokens=32,
) as engine:
    for out in engine.generate(prompts, params):
        print(out.token_ids, out.emitted_per_step)
assert not {on_triton} or {{"paged_attention", "sample", "draw", "note_logprobs"}} <= set(calls)
"""


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_an_engine_on_interpreted_kernels_gives_the_same_tokens(family):
    """Greedy and sampled rows, penalties and filters, prefill and decode, in float64."""
    pytest.importorskip("triton")
    outputs = [
        run(
            ENGINE.format(family=family, on_triton=on_triton),
            TRITON_INTERPRET="1",
            COMPILESPEC_CPP_KERNELS="0",
        )
        for on_triton in (False, True)
    ]
    assert outputs[0] == outputs[1]
    assert outputs[0].count("\n") == 3
