"""Evaluate an exported demo pair: held-out loss, acceptance lengths, loops, sample completions.

    python -m tools.eval_demo compilespec/demo/checkpoint --json results.json

Everything runs in float32 from the exported files, and is drafted by the engine.  At temperature 1
drafts are judged by rejection.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F

import compilespec
from compilespec import SamplingParams
from compilespec.runtime.outputs import GenerationOutput
from compilespec.tracing.load import load_target
from compilespec.training.measure import mean_length
from tools.bench.report import print_table
from tools.demo.card import model_card
from tools.demo.corpus import encode_stream, load_corpus, tokenizer_hash
from tools.demo.drafters import held_out_prompts

CACHE = Path.home() / ".cache" / "compilespec-demo"
PROMPT, NEW = 64, 192
KINDS = (("greedy", 0.0), ("temperature 1", 1.0))
METHODS = (("eagle3", 3), ("eagle3", 5), ("ngram", 3), ("ngram", 5), ("mtp", 3), ("draft_model", 3))


def main() -> None:
    """Parse the command line, print the table, write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path, help="target folder; drafters lie below it")
    parser.add_argument("--prompts", type=int, default=96, help="held-out prompts")
    parser.add_argument("--card", type=Path, help="write the model card here")
    parser.add_argument("--logs", type=Path, default=CACHE, help="training logs, for the card")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.set_grad_enabled(False)
    tokenizer = Tokenizer.from_file(str(args.checkpoint / "tokenizer.json"))
    corpus = load_corpus(with_packages=False)
    splits = {"held_out": encode_stream(tokenizer, corpus.held_out)}
    result = evaluate(args.checkpoint, splits, tokenizer, num_prompts=args.prompts)
    show(result)
    if args.card:
        hashes = load_corpus().hashes() | {"tokenizer": tokenizer_hash(tokenizer)}
        samples = completions(args.checkpoint, splits, tokenizer)
        args.card.write_text(model_card(result, hashes, args.logs, samples, args.checkpoint))
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


def evaluate(
    folder: Path, splits: dict[str, Tensor], tokenizer: Tokenizer, *, num_prompts: int,
    num_new: int = NEW, methods: Sequence[tuple[str, int]] = METHODS, backend: str = "inductor",
) -> dict[str, Any]:  # fmt: skip
    """Losses, acceptance lengths by method, temperature and K, and the share of loops."""
    prompts = held_out_prompts(splits, num_prompts, PROMPT).tolist()
    model = load_target(str(folder), dtype="float32").model
    result: dict[str, Any] = {
        "held_out_loss": {length: held_out_loss(model, splits, length) for length in (256, 1024)},
        "held_out_tokens": splits["held_out"].numel(),
        "prompts": num_prompts, "prompt_tokens": PROMPT, "new_tokens": num_new,
        "acceptance_length": {}, "accepted_by_position": {}, "loops": {},
    }  # fmt: skip
    for method, k in methods:
        if (folder / method).is_dir() or method == "ngram":
            found = decode(folder, prompts, num_new, method, k, backend=backend)
            for kind, outputs in found.items():
                name = f"{method}, {kind}, K={k}"
                result["acceptance_length"][name] = round(mean_length(outputs), 3)
                result["accepted_by_position"][name] = accepted_by_position(outputs, k)
    for kind, outputs in decode(folder, prompts, num_new, backend=backend).items():
        texts = [tokenizer.decode(output.token_ids) for output in outputs]
        for name, looped in (("in a row", repeats_a_line), ("in all", has_a_line_thrice)):
            share = sum(looped(text) for text in texts) / len(texts)
            result["loops"][f"{kind}, {name}"] = round(share, 3)
    return result


def decode(
    folder: Path, prompts: list[list[int]], num_new: int, method: str = "none", k: int = 0, *,
    seed: int = 0, backend: str = "inductor",
) -> dict[str, list[GenerationOutput]]:  # fmt: skip
    """What the engine writes after every prompt, by kind; end tokens do not stop it."""
    given: dict[str, Any] = {}
    if method != "none":
        given = {"num_draft_tokens": k, "acceptance": "rejection"}
        if method != "ngram":
            given["draft"] = str(folder / method)
    with compilespec.compile(
        str(folder), method, dtype="float32", max_batch_size=8, max_seq_len=PROMPT + num_new,
        backend=backend, **given,
    ) as engine:  # fmt: skip

        def params(heat: float, seed: int) -> SamplingParams:
            return SamplingParams(
                max_new_tokens=num_new, temperature=heat, seed=seed, ignore_eos=True
            )

        return {
            kind: engine.generate(prompts, [params(heat, seed + i) for i in range(len(prompts))])
            for kind, heat in KINDS
        }


def accepted_by_position(outputs: Sequence[GenerationOutput], k: int) -> list[float]:
    """The part of the verify steps that accepted their first 1, 2, ... K drafts."""
    steps = [count for output in outputs for count in output.emitted_per_step]
    return [round(sum(count > j for count in steps) / len(steps), 3) for j in range(1, k + 1)]


@torch.no_grad()
def held_out_loss(model: Any, splits: dict[str, Tensor], length: int) -> float:
    """Nats per token over evenly spaced windows of the held-out text."""
    stream = splits["held_out"].long()
    starts = range(0, stream.numel() - length - 1, length)
    losses = []
    for start in starts:
        ids = stream[None, start : start + length + 1]
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
        losses.append(float(F.cross_entropy(logits[0], ids[0, 1:])))
    return sum(losses) / len(losses)


def repeats_a_line(text: str) -> bool:
    """Tell whether some non-blank line occurs three times in a row."""
    lines = [line for line in text.splitlines() if line.strip()]
    return any(len(set(lines[i : i + 3])) == 1 for i in range(len(lines) - 2))


def has_a_line_thrice(text: str) -> bool:
    """Tell whether some line of ten characters or more occurs three times anywhere."""
    lines = [line.strip() for line in text.splitlines() if len(line.strip()) >= 10]
    return any(lines.count(line) >= 3 for line in lines)


def completions(folder: Path, splits: dict[str, Tensor], tokenizer: Tokenizer) -> str:
    """Return 20 completions of held-out prompts as Markdown, ten greedy, ten at temperature 1."""
    parts: list[str] = []
    prompts = held_out_prompts(splits, 20, PROMPT).tolist()
    for number, (kind, outputs) in enumerate(decode(folder, prompts, 96, seed=1).items()):
        for ids, output in list(zip(prompts, outputs, strict=True))[number::2]:
            prompt = tokenizer.decode(ids, skip_special_tokens=False)
            new = tokenizer.decode(output.token_ids, skip_special_tokens=False)
            parts.append(f"### {len(parts) + 1}, {kind}\n\n````text\n{prompt}⟦{new}⟧\n````\n")
    return "\n".join(parts)


def show(result: dict[str, Any]) -> None:
    """Print the results as a table."""
    console = Console()
    losses = ", ".join(f"{v:.3f} (windows of {k})" for k, v in result["held_out_loss"].items())
    console.print(f"held-out loss, nats per token: {losses}")
    rows = []
    for name, length in result["acceptance_length"].items():
        method, kind, k = name.split(", ")
        rates = " ".join(f"{r:.2f}" for r in result["accepted_by_position"][name])
        rows.append((method, kind, k[2:], f"{length:.2f}", rates))
    columns = ("method", "temperature", "K", "acceptance length", "accepted by position")
    print_table(console, "the demo's drafters", columns, rows)
    for name, share in result["loops"].items():
        console.print(f"outputs that repeat a line three times, {name}: {share}")


if __name__ == "__main__":
    main()
