"""What quantization costs a model: perplexity, and how often its first choice stays the same.

    python -m tools.bench.quality                 SmolLM2 (make smollm2), to results/quality.json

Two texts that any machine has, cut into windows of equal length: this project's documents, and
modules of Python's standard library.  Every config is compared with the unquantized model in
float32, window by window, so only the weights differ.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from compilespec import Quantize
from compilespec.quantization import quantize_module
from tools.bench import report
from tools.real_models import SMOLLM2

ROOT = Path(__file__).resolve().parents[2]
MODULES = (statistics,)  # of the standard library
GROUP, HEAD = 32, "lm_head"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.quality")
    parser.add_argument("--model", type=Path, default=SMOLLM2, help="(default: %(default)s)")
    parser.add_argument("--window", type=int, default=512, help="tokens of a window")
    parser.add_argument("--windows", type=int, default=6, help="of each text")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", help="only configs whose name contains this")
    parser.add_argument("--name", default="quality", help="results/NAME.json")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    console = Console(width=None if sys.stdout.isatty() else 140)
    model, texts = load(options)
    base = {name: measure(model, ids) for name, ids in texts.items()}
    result: dict[str, Any] = {
        "benchmark": "quality", **report.environment(), "model": options.model.name,
        "num_tokens": {name: ids.numel() for name, ids in texts.items()},
        "perplexity": {name: loss_and_best[0] for name, loss_and_best in base.items()},
        "configs": {},
    }  # fmt: skip
    for name, config in configs().items():
        if options.only and options.only not in name:
            continue
        changed = quantize_module(model, config)
        result["configs"][name] = {
            text: compare(base[text], measure(changed, ids)) for text, ids in texts.items()
        }
        console.print(f"{name}: {result['configs'][name]}")
    _print(console, result)
    console.print(f"written to {report.write_json(options.name, result)}")
    return 0


def load(options: argparse.Namespace) -> tuple[nn.Module, dict[str, Tensor]]:
    """The model in float32, and its texts as int64 [windows, tokens]."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(options.model, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(
        options.model, dtype=torch.float32, local_files_only=True
    )
    length = options.windows * options.window
    texts = {}
    for name, text in {"documents": documents(), "code": code()}.items():
        ids = tokenizer.encode(text)[:length]
        texts[name] = torch.tensor(ids).view(-1, options.window)
    return model.eval(), texts


def documents() -> str:
    files = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return "\n".join(file.read_text(encoding="utf-8") for file in files)


def code() -> str:
    return "\n".join(Path(str(one.__file__)).read_text(encoding="utf-8") for one in MODULES)


def configs() -> Mapping[str, Quantize]:
    """The short names, and what else was considered for the default of four bits."""
    from torchao.quantization import IntxWeightOnlyConfig, MappingType, PerGroup

    from compilespec.quantization.int4 import Int4Config

    def torchaos(mapping: Any) -> Any:
        four = getattr(torch, "int4")  # noqa: B009  (unknown to type checkers)
        return IntxWeightOnlyConfig(
            weight_dtype=four, granularity=PerGroup(GROUP), mapping_type=mapping
        )

    return {
        "int8_weight_only": Quantize("int8_weight_only"),
        "int8_dynamic": Quantize("int8_dynamic"),
        "float8_weight_only": Quantize("float8_weight_only"),
        "int4_weight_only": Quantize("int4_weight_only"),
        "int4, the head too": Quantize(Int4Config(GROUP)),
        "int4, groups of 64, but the head": Quantize(Int4Config(2 * GROUP), skip=HEAD),
        "int4, whole zero points, but the head": Quantize(
            torchaos(MappingType.ASYMMETRIC), skip=HEAD
        ),
        "int4, symmetric, but the head": Quantize(torchaos(MappingType.SYMMETRIC), skip=HEAD),
    }


@torch.no_grad()
def measure(model: nn.Module, ids_NT: Tensor) -> tuple[float, Tensor]:
    """Perplexity, and the most probable token at every place."""
    total, best = 0.0, []
    for row in ids_NT:
        scores = torch.log_softmax(model(row[None]).logits[0].float(), -1)
        total -= float(scores[:-1].gather(1, row[1:, None]).sum())
        best.append(scores.argmax(-1))
    return math.exp(total / (ids_NT.numel() - len(ids_NT))), torch.cat(best)


def compare(base: tuple[float, Tensor], changed: tuple[float, Tensor]) -> dict[str, float]:
    return {
        "perplexity_ratio": changed[0] / base[0],
        "same_choice": float((changed[1] == base[1]).float().mean()),
    }


def _print(console: Console, result: Mapping[str, Any]) -> None:
    columns = [f"{text} ({perplexity:.2f})" for text, perplexity in result["perplexity"].items()]
    rows = [
        (name, *(f"{o['perplexity_ratio']:.3f}  {o['same_choice']:.1%}" for o in texts.values()))
        for name, texts in result["configs"].items()
    ]
    title = "against float32: perplexity, and the same most probable token"
    report.print_table(console, title, ("weights", *columns), rows)


if __name__ == "__main__":
    sys.exit(main())
