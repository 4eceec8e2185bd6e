"""One part of `tools.gpu.first_run`, in this process: a line of JSON a record, as it comes.

`python -m tools.gpu.measure PART [MODEL [WAY]]`; `PARTS`, at the end, are all.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from tools.bench import report
from tools.bench.measure import quantiles
from tools.fake_cuda import device as fake_device
from tools.gpu.models import SHAPES, TINY_SHAPES, Shape, make_target, num_bytes_read
from tools.gpu.steps import copy_bytes_per_s, device_ms, mm_tflop_per_s, one_launch, time_steps

# Of decoding: plain, with FlashAttention-3, plain until it is ready, drafts that cost next to
# nothing to make, and drafts of a head.
PLAIN, FLASH, WARM, VERIFY, EAGLE3 = WAYS = ("plain", "flash", "warm", "verify", "eagle3")
PEERS = ("compiled", "vllm")  # transformers, and vLLM
SAMPLED: dict[str, Any] = {"temperature": 0.7, "top_p": 0.9, "top_k": 50}
GPU_TESTS = (
    "tests/ops/test_triton_gpu.py",
    "tests/cudagraphs/test_cudagraphs.py",
    "tests/cudagraphs/test_gpu_graphs.py",
)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all measurements share."""

    device: torch.device
    dtype: torch.dtype
    backend: str
    num_steps: int
    num_tokens: int
    """New tokens of a timed `generate`."""
    num_calls: int
    copy_bytes: int
    mm_size: int

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"


def setting_of(device: str, *, is_tiny: bool) -> Setting:
    where = torch.device(device)
    if is_tiny:
        return Setting(
            device=where, dtype=torch.float32, backend="eager", num_steps=2, num_tokens=4,
            num_calls=2, copy_bytes=2**20, mm_size=64,
        )  # fmt: skip
    return Setting(
        device=where, dtype=torch.bfloat16, backend="inductor", num_steps=30, num_tokens=64,
        num_calls=4, copy_bytes=2**30, mm_size=8192,
    )  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 1 where a kernel or a token is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tools.gpu.measure", description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small models, no speeds")
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("model", nargs="?", choices=sorted(SHAPES))
    parser.add_argument("way", nargs="?", choices=(*WAYS, *PEERS))
    options = parser.parse_args(arguments)
    if fake_device.is_here():
        from tools.fake_cuda import interpreter

        fake_device.attach_project()
        interpreter.attach()
    setting = setting_of(options.device, is_tiny=options.tiny)
    shape = (TINY_SHAPES if options.tiny else SHAPES)[options.model or "llama-3.1-8b"]
    return int(PARTS[options.part](shape, setting, options.way) or 0)


def tell(record: dict[str, Any]) -> None:
    print(json.dumps(record), flush=True)


def measure_ceilings(shape: Shape, setting: Setting, way: str) -> None:
    """Tell what the machine is, then what memory and multiplication reach at best."""
    tell({**report.environment(), "cuda": torch.version.cuda})
    if setting.is_cuda:
        one = torch.cuda.get_device_properties(setting.device)
        tell({"capability": [one.major, one.minor], "memory_gib": one.total_memory / 2**30,
              "multiprocessors": one.multi_processor_count})  # fmt: skip
    tell({"copy_gb_per_s": copy_bytes_per_s(setting.device, setting.copy_bytes) / 1e9})
    for dtype in (torch.bfloat16, torch.float32):
        speed = mm_tflop_per_s(setting.device, dtype, setting.mm_size)
        tell({"mm": str(dtype), "tflop_per_s": speed})


def check_kernels(shape: Shape, setting: Setting, way: str) -> int:
    """Run the gpu tests in bfloat16, and those without a dtype: a line of JSON a test.

    On the CPU one file of kernels goes through Triton's interpreter instead.
    """
    import pytest

    class Lines:
        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.when == "call" or report.failed:
                print()  # behind the dots of pytest
                error = report.longreprtext.splitlines()[-12:] if report.failed else []
                tell({"test": report.nodeid.rpartition("/")[2], "outcome": report.outcome,
                      "seconds": round(report.duration, 2), "error": error})  # fmt: skip

    chosen = ["-m", "gpu", *GPU_TESTS, "-k", "not torch.float"]
    if not setting.is_cuda:
        chosen = ["tests/ops/test_triton_rest.py", "-k", "ngram"]
    return int(
        pytest.main(["-q", "-s", "--tb=short", "-p", "no:cacheprovider", *chosen], [Lines()])
    )


def check_pair(shape: Shape, setting: Setting, way: str) -> int:
    """Compare tokens of graphs, compiled unless tiny, with those of eager steps without graphs."""
    import compilespec

    shape = TINY_SHAPES["llama-3.1-8b"]
    model = make_target(shape, torch.float32, setting.device)
    sampled = compilespec.SamplingParams(max_new_tokens=20, ignore_eos=True, seed=5, **SAMPLED)
    greedy = compilespec.SamplingParams(max_new_tokens=20, ignore_eos=True)
    tokens, prompts = [], [prompt_of(shape, row) for row in range(3)]
    ways: Any = (("eager", "none"), (setting.backend, "full_and_piecewise"))
    for backend, graphs in ways:
        started = time.perf_counter()
        with compilespec.compile(
            model, max_batch_size=3, max_seq_len=64, backend=backend, cudagraphs=graphs,
            **keywords_of(EAGLE3, shape, model),
        ) as engine:  # fmt: skip
            ready_s = time.perf_counter() - started
            made = [one for params in (greedy, sampled) for one in engine.generate(prompts, params)]
            tokens.append([list(one.token_ids) for one in made])
            captured = engine.plan().get("cudagraphs") or {}
        tell({"backend": backend, "ready_s": ready_s, "replays": captured.get("num_replays"),
              "dropped": captured.get("dropped"), "refused": captured.get("refused")})  # fmt: skip
    eager, replayed = tokens
    same = [one == other for one, other in zip(eager, replayed, strict=True)]
    tell({"same_greedy": same[:3], "same_sampled": same[3:]})
    return int(not all(same))


def keywords_of(way: str, shape: Shape, model: Any) -> dict[str, Any]:
    """The keywords of `compile()` for a way of decoding."""
    if way in (PLAIN, FLASH, WARM):
        return {"spec": "none"}
    if way == VERIFY:
        return {"spec": "ngram", "num_draft_tokens": shape.num_draft_tokens}
    from tools.gpu.models import make_head

    return {"spec": "eagle3", "draft": make_head(model), "num_draft_tokens": shape.num_draft_tokens,
            "force_num_accepted": shape.num_accepted}  # fmt: skip


def measure_program(shape: Shape, setting: Setting, way: str) -> None:
    """Tell what starting took; then, of each batch, its steps; then how fast one prompt goes."""
    import compilespec

    if way == FLASH:
        torch.nn.attention.activate_flash_attention_impl("FA3")
    model = make_target(shape, setting.dtype, setting.device)
    room = (shape.num_draft_tokens + 1) * (3 * setting.num_steps + setting.num_tokens + 16)
    started = time.perf_counter()
    engine = compilespec.compile(
        model, max_batch_size=max(shape.batches), max_seq_len=min(shape.context + room,
        shape.config["max_position_embeddings"]), backend=setting.backend,
        cudagraphs="full_and_piecewise", enable_prefix_caching=False,
        **keywords_of(way, shape, model),
    )  # fmt: skip
    with engine:
        runner: Any = engine.executor
        plan = engine.plan()
        tell(
            {
                "ready_s": time.perf_counter() - started,
                "compile_s": {name: c["seconds"] for name, c in runner.lowered.costs().items()},
                "cudagraphs": plan.get("cudagraphs"),
                "attention": plan["attention"],
            }
        )
        if way == WARM:
            return
        for record in measure_steps(runner, model, shape, setting):
            tell(record)
        params = compilespec.SamplingParams(max_new_tokens=setting.num_tokens, ignore_eos=True)
        rate = time_generate(lambda: engine.generate([prompt_of(shape, 0)], params), setting)
        tell(
            {
                "tokens_per_s": rate,
                "num_recompiles": engine.stats().num_recompiles,
                "peak_memory_gib": peak_gib(setting.device),
            }
        )


def measure_steps(
    runner: Any, model: Any, shape: Shape, setting: Setting
) -> Iterator[dict[str, Any]]:
    """Time the steps of each batch of greedy requests, a prompt, then steps of sampled requests."""
    import compilespec

    is_dense = "num_experts" not in shape.config
    weights = num_bytes_read(runner.weights, model) if is_dense else None
    about = {"context": shape.context, "weight_gb": None if weights is None else weights / 1e9}
    greedy, sampled = compilespec.SamplingParams(), compilespec.SamplingParams(**SAMPLED)
    for batch in shape.batches:
        yield {"batch": batch, **about, **measure_sampling(runner, batch, shape, setting, greedy)}
    chunks = [
        chunk
        for row in range(min(4, max(shape.batches)))
        for chunk in chunks_of(runner, shape, row)
    ]
    for packed in ([chunks[0]], chunks):
        call = partial(runner.launch_prefill, packed)
        all_ms = [device_ms(call, setting.device) for _ in range(setting.num_steps)]
        count = sum(len(chunk.tokens) for chunk in packed)
        yield {"prefill_tokens": count, "device_ms": quantiles(all_ms)}
    for batch in shape.batches:
        times = measure_sampling(runner, batch, shape, setting, sampled)
        yield {"sampled": SAMPLED, "batch": batch, **about, **times}


def measure_sampling(
    runner: Any, batch: int, shape: Shape, setting: Setting, params: Any
) -> dict[str, Any]:
    """Time the steps of a batch whose prompts have been prefilled with these parameters."""
    from compilespec.runtime.sampling_rows import RowSampling

    sizes, rows = runner.geometry, list(range(batch))
    for row in rows:
        sampling = RowSampling(
            params=params, bias=None, seed=row, token_ids=(), num_prompt_tokens=shape.context,
            stop_token_ids=(),
        )  # fmt: skip
        runner.set_sampling(row, sampling)
        first = row * sizes.config.blocks_per_row
        runner.set_blocks(row, list(range(first, first + sizes.config.blocks_per_row)))
        for chunk in chunks_of(runner, shape, row):
            runner.prefill([chunk])

    def launch() -> Any:
        return runner.launch_decode(rows)

    emitted = [len(tokens) for tokens in runner.collect(launch())]
    times = time_steps(launch, runner.collect, setting.device, setting.num_steps)
    return {
        "emitted_per_row": sum(emitted) / batch,
        **times,
        "launch": one_launch(launch, setting.device),
    }


def chunks_of(runner: Any, shape: Shape, row: int) -> Iterator[Any]:
    """A row's prompt, in chunks that a prefill takes."""
    from compilespec.runtime.executor import PrefillChunk

    tokens, size = prompt_of(shape, row), runner.geometry.config.max_prefill_tokens
    for start in range(0, len(tokens), size):
        part = tokens[start : start + size]
        end = start + len(part)
        following = tokens[end] if end < len(tokens) else None
        yield PrefillChunk(row=row, start=start, tokens=tuple(part), next_token=following)


def measure_kernels(shape: Shape, setting: Setting, way: str) -> None:
    """Tell of single kernels at the model's sizes: microseconds, and what they read a second."""
    for name, call, num_bytes in kernels_of(shape, setting):
        times = [device_ms(call, setting.device) for _ in range(setting.num_steps + 3)][3:]
        us = quantiles(times)["p50"] * 1e3
        tell({"kernel": name, "us": us, "gb_per_s": num_bytes / us / 1e3})


def kernels_of(shape: Shape, setting: Setting) -> Iterator[tuple[str, Callable[[], Any], int]]:
    """Attention of a step, a product, the head with its argmax; bytes of cache or weight."""
    from compilespec.ops.argmax_linear import argmax_linear
    from compilespec.ops.paged_attention import paged_attention
    from compilespec.ops.quantized_linear import quantized_linear

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, device=setting.device, dtype=setting.dtype)

    sizes, count = shape.config, shape.num_draft_tokens + 1
    heads, kv, dim = (sizes[k] for k in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    blocks = -(-(shape.context + count) // 16)
    for batch in shape.batches:
        row = torch.arange(batch, device=setting.device, dtype=torch.int32).view(batch, 1)
        table = row * blocks + torch.arange(blocks, device=setting.device, dtype=torch.int32)
        caches = [random(batch * blocks, 16, kv, dim) for _ in range(2)]
        for num in (1, count):
            given = [random(batch, n, num, dim) for n in (heads, kv, kv)]
            position = shape.context + torch.zeros_like(row) + torch.arange(num).to(row)
            places = (row * blocks * 16 + position, row + torch.zeros_like(position), position)
            attend: Any = paged_attention
            call = partial(attend, *given, *caches, *places, table, dim**-0.5)
            read = 2 * batch * shape.context * kv * dim * setting.dtype.itemsize
            yield f"attention, {batch} x {num}, context {shape.context}", call, read
    width, wide, vocab = (sizes[k] for k in ("hidden_size", "intermediate_size", "vocab_size"))
    up, head = random(wide, width), random(vocab, width)
    small, scale = up.clamp(-9, 9).char(), torch.ones(wide, 1, device=setting.device)
    for rows in (1, count, 8 * count):
        x = random(rows, width)
        yield f"product, {rows} rows", partial(torch.mm, x, up.t()), up.nbytes
        eight = partial(quantized_linear, x, small, scale, None, 8)
        yield f"int8 product, {rows} rows", eight, small.nbytes
        yield f"head, {rows} rows", partial(argmax_linear, x, head, None), head.nbytes


def measure_peer(shape: Shape, setting: Setting, way: str) -> None:
    """Tell how fast transformers or vLLM goes on with the same prompt."""
    (measure_vllm if way == "vllm" else measure_transformers)(shape, setting)


def measure_transformers(shape: Shape, setting: Setting) -> None:
    """With a static cache, for which transformers compiles the forward."""
    from transformers import GenerationConfig

    model = make_target(shape, setting.dtype, setting.device)
    model.generation_config = GenerationConfig(pad_token_id=0, eos_token_id=None)
    ids_1T = torch.tensor([prompt_of(shape, 0)], device=setting.device)

    def generate() -> None:
        model.generate(
            ids_1T, attention_mask=torch.ones_like(ids_1T), do_sample=False,
            max_new_tokens=setting.num_tokens, cache_implementation="static",
        )  # fmt: skip

    tell({"tokens_per_s": time_generate(generate, setting)})


def measure_vllm(shape: Shape, setting: Setting) -> None:
    """vLLM with its own random weights, which decide no time."""
    from transformers import AutoConfig, AutoModelForCausalLM

    vllm: Any = importlib.import_module("vllm")
    config = AutoConfig.for_model(shape.family, **shape.config)
    config.architectures = [AutoModelForCausalLM._model_mapping[type(config)].__name__]
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        llm = vllm.LLM(
            model=folder, load_format="dummy", skip_tokenizer_init=True,
            dtype=str(setting.dtype).removeprefix("torch."),
            max_model_len=shape.context + setting.num_tokens,
        )  # fmt: skip
        params = vllm.SamplingParams(
            max_tokens=setting.num_tokens, ignore_eos=True, temperature=0.0, detokenize=False
        )
        prompt = {"prompt_token_ids": prompt_of(shape, 0)}

        def generate() -> None:
            llm.generate([prompt], params, use_tqdm=False)

        tell({"tokens_per_s": time_generate(generate, setting), "version": vllm.__version__})


def time_generate(call: Callable[[], Any], setting: Setting) -> dict[str, float]:
    """Tokens per second of one prompt, prefill included, after a warm-up call."""
    rates = []
    for _ in range(setting.num_calls):
        wait(setting)
        start = time.perf_counter()
        call()
        wait(setting)
        rates.append(setting.num_tokens / (time.perf_counter() - start))
    return quantiles(rates[1:])


def wait(setting: Setting) -> None:
    if setting.is_cuda:
        torch.cuda.synchronize(setting.device)


def prompt_of(shape: Shape, row: int) -> list[int]:
    return [
        (7 * row + 3 * place) % (shape.config["vocab_size"] - 3) + 3
        for place in range(shape.context)
    ]


def peak_gib(device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    return torch.cuda.max_memory_allocated(device) / 2**30


PARTS: dict[str, Callable[[Shape, Setting, str], int | None]] = {
    "ceilings": measure_ceilings,  # bandwidth of a copy, operations of a product
    "kernels": check_kernels,  # every Triton kernel against its reference
    "pair": check_pair,  # tokens with graphs against eager ones
    "program": measure_program,  # the start, steps and prompts of a MODEL in a WAY
    "alone": measure_kernels,  # times of single kernels
    "peer": measure_peer,  # the same prompt, elsewhere
}


if __name__ == "__main__":
    sys.exit(main())
