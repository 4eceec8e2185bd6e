"""One measurement of `tools.gpu_check`, in this process: a line of JSON a record, as it comes.

`python -m tools.gpu.measure copy`, `program MODEL WAY` and `peer MODEL NAME`; a way is "plain",
"flash" (the same with FlashAttention-3), "verify" (drafts that cost next to nothing to make) or a
number of drafts, accepted by force.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tools.bench.measure import quantiles
from tools.gpu.models import SHAPES, SMOKE_SHAPES, Shape, make_target, num_bytes_read
from tools.gpu.steps import copy_bytes_per_s, count_launches, time_steps

PLAIN, FLASH, VERIFY = "plain", "flash", "verify"
PEERS = ("eager", "compiled", "vllm")  # transformers' two, and vLLM
SAMPLED: dict[str, Any] = {
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 50,
}  # the parameters of sampled steps


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

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"


REAL = Setting(
    device=torch.device("cuda"), dtype=torch.bfloat16, backend="inductor", num_steps=30,
    num_tokens=64, num_calls=4, copy_bytes=2**30,
)  # fmt: skip
SMOKE = Setting(
    device=torch.device("cpu"), dtype=torch.float32, backend="eager", num_steps=2, num_tokens=4,
    num_calls=2, copy_bytes=2**20,
)  # fmt: skip


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.gpu.measure", description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="tiny models on the CPU, no speeds")
    what = parser.add_subparsers(dest="what", required=True)
    what.add_parser("copy", help="memory bandwidth")
    program = what.add_parser("program", help="a program's steps, and one prompt")
    program.add_argument("model", choices=sorted(SHAPES))
    program.add_argument("way", help=f"{PLAIN}, {FLASH}, {VERIFY}, or a number")
    peer = what.add_parser("peer", help="the same prompt, elsewhere")
    peer.add_argument("model", choices=sorted(SHAPES))
    peer.add_argument("name", choices=PEERS)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    setting = SMOKE if options.smoke else REAL
    if options.what == "copy":
        speed = copy_bytes_per_s(setting.device, setting.copy_bytes)
        tell({"copy_gb_per_s": speed / 1e9})
        return 0
    shape = (SMOKE_SHAPES if options.smoke else SHAPES)[options.model]
    if options.what == "program":
        measure_program(shape, setting, options.way)
    elif options.name == "vllm":
        measure_vllm(shape, setting)
    else:
        measure_transformers(shape, setting, options.name)
    return 0


def tell(record: dict[str, Any]) -> None:
    print(json.dumps(record), flush=True)


def keywords_of(way: str, shape: Shape, model: Any) -> dict[str, Any]:
    """The keywords of `compile()` for a way of decoding."""
    if way in (PLAIN, FLASH):
        return {"spec": "none"}
    count = shape.num_draft_tokens
    if way == VERIFY:
        return {"spec": "ngram", "num_draft_tokens": count}
    from .models import make_head

    forced = {"force_num_accepted": int(way)} if int(way) else {}
    return {"spec": "eagle3", "draft": make_head(model), "num_draft_tokens": count, **forced}


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
        for batch in shape.batches:
            tell(measure_steps(runner, model, batch, shape, setting))
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
    runner: Any, model: Any, batch: int, shape: Shape, setting: Setting
) -> dict[str, Any]:
    """Time a batch's steps: those of greedy requests, and under "sampled" those of others."""
    import compilespec

    is_dense = "num_experts" not in shape.config
    weights = num_bytes_read(runner.weights, model) if is_dense else None
    both = (compilespec.SamplingParams(), compilespec.SamplingParams(**SAMPLED))
    greedy, sampled = (measure_sampling(runner, batch, shape, setting, one) for one in both)
    return {
        "batch": batch,
        "context": shape.context,
        "weight_gb": None if weights is None else weights / 1e9,
        **greedy,
        "sampled": sampled,
    }


def measure_sampling(
    runner: Any, batch: int, shape: Shape, setting: Setting, params: Any
) -> dict[str, Any]:
    """Time the steps of a batch whose prompts have been prefilled with these parameters."""
    from compilespec.runtime.executor import PrefillChunk
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
        tokens = prompt_of(shape, row)
        for start in range(0, len(tokens), sizes.config.max_prefill_tokens):
            part = tokens[start : start + sizes.config.max_prefill_tokens]
            end = start + len(part)
            following = tokens[end] if end < len(tokens) else None
            runner.prefill(
                [PrefillChunk(row=row, start=start, tokens=tuple(part), next_token=following)]
            )

    def launch() -> Any:
        return runner.launch_decode(rows)

    emitted = [len(tokens) for tokens in runner.collect(launch())]
    times = time_steps(launch, runner.collect, setting.device, setting.num_steps)
    return {
        "emitted_per_row": sum(emitted) / batch,
        **times,
        "launches": count_launches(launch, setting.device),
    }


def measure_transformers(shape: Shape, setting: Setting, name: str) -> None:
    from transformers import GenerationConfig

    model = make_target(shape, setting.dtype, setting.device)
    model.generation_config = GenerationConfig(pad_token_id=0, eos_token_id=None)
    ids_1T = torch.tensor([prompt_of(shape, 0)], device=setting.device)
    extra = {"cache_implementation": "static"} if name == "compiled" else {}

    def generate() -> None:
        model.generate(
            ids_1T, attention_mask=torch.ones_like(ids_1T), do_sample=False,
            max_new_tokens=setting.num_tokens, **extra,
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


if __name__ == "__main__":
    sys.exit(main())
