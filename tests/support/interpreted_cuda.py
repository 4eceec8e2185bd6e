"""Whole engines whose steps are the code that Inductor generates for CUDA, interpreted on the CPU.

The code is generated for sm_90 on fake tensors; Triton's interpreter runs its kernels, and our own,
on CPU tensors, and libraries' products are the CPU's.  Run as a script, in a separate process,
with TRITON_INTERPRET=1: `python -m tests.support.interpreted_cuda CASE`; a line of JSON a request
says what tokens it got, and what the interpreted graphs (`backend="eager"`) gave.
"""

from __future__ import annotations

import contextlib
import copy
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn
from triton import language as tl
from triton.runtime.interpreter import TensorHandle

import compilespec
from compilespec import SamplingParams, _torch_compat
from compilespec.lowering.artifacts import ArtifactCache
from compilespec.methods.eagle3 import random_head
from compilespec.ops._library import TRITON_KERNELS
from compilespec.passes.aten.read_long_rows import read_long_rows
from tests.support.margin import shortfall
from tests.support.models import HYBRIDS, target_info, tiny_hybrid, tiny_target
from tools.without_gpu.absent import absent_gpu, allocating, counting
from tools.without_gpu.gpus import GPUS
from tools.without_gpu.machine_code import lowered
from tools.without_gpu.steps import on_cuda, passes_of_cuda

SPLITTING = sys.modules[read_long_rows.__module__]
SIZES = {"max_batch_size": 3, "max_seq_len": 64, "max_prefill_tokens": 32}
PROMPTS = ([5, 6, 7, 8, 9, 10, 11], [3, 4], list(range(1, 20)))
GREEDY = SamplingParams(max_new_tokens=4, ignore_eos=True)
MIXED = (  # greedy, sampled, filtered, penalised, in one batch
    GREEDY,
    SamplingParams(max_new_tokens=4, ignore_eos=True, temperature=0.8, seed=5, top_p=0.9),
    SamplingParams(max_new_tokens=4, ignore_eos=True, temperature=1.2, seed=6, top_k=9,
                   repetition_penalty=1.3, frequency_penalty=0.2),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Case:
    family: str
    dtype: torch.dtype = torch.float32
    num_draft_tokens: int | tuple[int, ...] = 2


CASES = {
    "llama": Case(family="llama", num_draft_tokens=(0, 2)),
    "qwen3_moe": Case(family="qwen3_moe"),
    "gpt_oss": Case(family="gpt_oss", num_draft_tokens=1),
    "gemma2": Case(family="gemma2", num_draft_tokens=1),
    "qwen3_5": Case(family="qwen3_5", num_draft_tokens=1),  # recurrent layers
    "deepseek_v3": Case(family="deepseek_v3", num_draft_tokens=1),  # latents
    "llama-bf16": Case(family="llama", dtype=torch.bfloat16, num_draft_tokens=1),
}
BF16_BOUND = 16 * torch.finfo(torch.bfloat16).eps  # of logits of order 1, through few layers


@dataclass(kw_only=True)
class Launched:
    """What ran in place of a GPU's code."""

    generated: Counter[str] = field(default_factory=Counter)
    own: Counter[str] = field(default_factory=Counter)


def compare(case: Case) -> Iterator[dict[str, Any]]:
    """Tokens of both ways, a record a request; then one that counts what was launched."""
    make = tiny_hybrid if case.family in HYBRIDS else tiny_target
    model = make(case.family, case.dtype, num_layers=2)
    eager = tokens_of(case, model, backend="eager")
    launched = Launched()
    with on_generated_code(launched):
        cuda = tokens_of(case, model, backend="inductor")
    asked = zip(2 * PROMPTS, (*MIXED, *(GREEDY,) * 3), eager, cuda, strict=True)
    for prompt, params, left, right in asked:
        record = {"prompt": prompt, "temperature": params.temperature, "eager": left, "cuda": right}
        yield {**record, "faults": list(parting(model, prompt, params, left, right))}
    yield {"generated_kernels": len(launched.generated), "launches": launched.generated.total(),
           "own_operators": sorted(launched.own), "faults": []}  # fmt: skip


def parting(
    model: nn.Module,
    prompt: Sequence[int],
    params: SamplingParams,
    eager: Sequence[int],
    cuda: Sequence[int],
) -> Iterator[str]:
    """Why tokens may not part as they do: in bfloat16 greedy ones may, where both are all but best,
    and sampled ones, whose noise decides by as little; in float32 none.
    """
    if eager == cuda:
        return
    if next(model.parameters()).dtype != torch.bfloat16:
        yield f"{cuda}, not {eager}"
    elif params.temperature == 0:
        reference = copy.deepcopy(model).double()
        for tokens in (eager, cuda):
            short = shortfall(reference, prompt, tokens)
            if short > BF16_BOUND:
                yield f"{tokens}: {short:.2e} below the best"


def tokens_of(case: Case, model: nn.Module, *, backend: str) -> list[list[int]]:
    """Tokens of a mixed batch, then of a greedy one, for which there are separate steps."""
    torch.manual_seed(0)
    head = random_head(target_info(model, 64), aux_layers=(0, 1, 2), num_draft_tokens=2)
    with compilespec.compile(
        model, spec="eagle3", draft=head, backend=backend, greedy_step=True,
        num_draft_tokens=case.num_draft_tokens, **SIZES,
    ) as engine:  # fmt: skip
        prompts = [list(prompt) for prompt in PROMPTS]
        outputs = [*engine.generate(prompts, list(MIXED)), *engine.generate(prompts, GREEDY)]
        return [list(output.token_ids) for output in outputs]


@contextlib.contextmanager
def on_generated_code(launched: Launched) -> Iterator[None]:
    """Within, engines on the CPU run the code that is generated for CUDA."""
    gpu = GPUS["sm_90"]

    def compiled(gm: Any, fakes: Sequence[Any], options: Any) -> Callable[..., Any]:
        step = on_cuda(gm, fakes)
        with mock.patch.object(_torch_compat, "standalone_compile", original):
            with absent_gpu(gpu), allocating("cpu"):
                call = lowered(step)

        def run(*args: Any) -> Any:
            with absent_gpu(gpu):
                return call(*args, *step.constants)

        return run

    original = _torch_compat.standalone_compile
    with contextlib.ExitStack() as stack:
        stack.enter_context(passes_of_cuda(fuse_head=True))
        # toys' vocabularies
        stack.enter_context(mock.patch.object(SPLITTING, "LEAST_COLUMNS_ON_GPU", 64))
        stack.enter_context(counting(lambda name: launched.generated.update([name])))
        stack.enter_context(mock.patch.object(_torch_compat, "standalone_compile", compiled))
        for name in ("load", "load_plan", "save", "save_plan", "keep_key"):
            stack.enter_context(mock.patch.object(ArtifactCache, name, return_value=None))
        _interpret(stack, launched)
        yield


def _interpret(stack: contextlib.ExitStack, launched: Launched) -> None:
    """Our operators take their Triton kernels; generated kernels find a math library."""
    from torch._inductor.runtime import triton_helpers

    import tests.support.triton_interpreter  # noqa: F401

    stack.enter_context(mock.patch.object(triton_helpers, "libdevice", Libdevice()))
    library = torch.library.Library("compilespec", "IMPL")
    stack.callback(library._destroy)
    for name, kernel in TRITON_KERNELS.items():

        def served(*args: Any, name: str = name, kernel: Any = kernel) -> Any:
            launched.own[name] += 1
            return kernel(*args)

        library.impl(name, served, "CPU")


_OTHERS: dict[str, Any] = {"rsqrt": lambda x: 1 / np.sqrt(x), "pow": np.power}
_LOGICAL = ("isnan", "isinf", "signbit")


class Libdevice:
    """CUDA's math functions by numpy's, on the interpreter's tensors."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function: Any = _OTHERS.get(name) or getattr(np, name)

        def call(*tensors: Any) -> Any:
            made = np.asarray(function(*(tensor.handle.data for tensor in tensors)))
            like = tensors[0]
            if name not in _LOGICAL:
                handle = TensorHandle(made.astype(like.handle.data.dtype), like.handle.dtype)
                return tl.tensor(handle, like.type)
            kind = like.type.with_element_ty(tl.int1) if like.type.is_block() else tl.int1
            return tl.tensor(TensorHandle(made, tl.int1), kind)

        return call


if __name__ == "__main__":
    for record in compare(CASES[sys.argv[1]]):
        print(json.dumps(record), flush=True)
