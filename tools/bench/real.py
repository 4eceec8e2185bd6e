"""Speeds on a real public model: SmolLM2-135M-Instruct, as `make smollm2` writes it.

    python -m tools.bench.real            written to results/real.json

Eight prompts of four kinds through the chat template, every way by turns: compilespec plain, with
n-grams and with the trained head, in bfloat16 and with quantized weights; transformers; llama.cpp
where llama-cpp-python and gguf are installed; vLLM and OpenVINO GenAI, which is given a GGUF file,
where the interpreters of `--guest-python` and `--openvino-python` have them.  Outputs are checked
first: those in bfloat16 against transformers' own logits, quantized ones against plain
decoding with the same weights.  Prefill and decoding are also timed apart: calls for one token,
after the same prompts and after a long one.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from compilespec import DraftTree
from tools.bench import gates, report
from tools.bench.check import Checker
from tools.bench.guests import GuestWay, OpenVinoWay
from tools.bench.llama_cpp import LlamaCppWay
from tools.bench.measure import Samples, interleave, quantiles
from tools.bench.speed import generate, load_model, make_batches
from tools.bench.way import Setup, Unavailable, Way
from tools.bench.ways import CompilespecWay, TransformersWay
from tools.real_models import SMOLLM2

PROMPTS = Path(__file__).with_name("real_prompts.json")
HEAD = Path(__file__).resolve().parents[2] / "drafts" / "smollm2-135m-instruct-eagle3"
PREFILL_TOKENS = 1500
BF16 = "bf16"
DRAFT_WEIGHTS = "int8_dynamic"  # costs drafts, never tokens: the target judges each
TREE = DraftTree(top_k=3, depth=3, num_nodes=5)  # verifies six rows, the most of a register tile
OPENVINO_WEIGHTS = "OpenVINO's Q8_0"  # its plain decoding is the reference of its prompt lookup
GUEST_HELP = "interpreter of the environment that has vLLM (default: this one)"
# Ratios that the head is to reach at batch 1, over the fastest of the others.
GOALS = {
    ("eagle3", ""): {"compilespec none": 1.5, "llama.cpp": 1.6},
    ("eagle3", "int8"): {"llama.cpp Q8_0": 1.4},
}
BASES = sorted({other for over in GOALS.values() for other in over})


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """A way to make, and the weights it decodes with: ways of one kind are compared."""

    name: str
    weights: str
    make: Callable[[str], Way]


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 1 if tokens are wrong or a program recompiled; a missed goal is printed."""
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    console = Console(width=None if sys.stdout.isatty() else 140)
    model = load_model(options.model, "bfloat16")
    prompts = read_prompts(options.model, options.num_prompts)
    setup = Setup(
        model_dir=options.model, model=model, max_new_tokens=options.max_new_tokens,
        max_batch_size=max(options.batch), num_threads=options.threads,
        draft=options.draft if options.draft.is_dir() else None, max_seq_len=2048,
    )  # fmt: skip
    guests = (options.guest_python, options.openvino_python)
    wanted = contestants(setup, options.num_draft_tokens, *guests)
    ways, skipped = build(wanted, options.only, console)
    result: dict[str, Any] = {
        "benchmark": "real", **report.environment(), "skipped": skipped,
        "prompt_tokens": {name: len(ids) for name, ids in prompts.items()},
    }  # fmt: skip
    try:
        result["outputs"] = check(ways, prompts, options.batch, Checker(model))
        wrong = [name for name, found in result["outputs"].items() if not found["right"]]
        for _, way in [one for one in ways if isinstance(one[1], GuestWay)]:
            if way.name in wrong:  # not ours to mend: it is left out
                wrong.remove(way.name)
                skipped[way.name] = "its tokens differ from transformers' by more than rounding"
                console.print(f"left out {way.name}: {skipped[way.name]}")
                ways = [one for one in ways if one[1] is not way]
                way.close()
        if wrong:
            console.print(f"[red]wrong tokens from {', '.join(wrong)}; no speed is printed[/]")
            return 1
        result["speeds"] = {
            size: time_batch(ways, prompts, size, options.rounds) for size in options.batch
        }
        result["prefill"] = time_prefill(ways, prompts, options.rounds)
    finally:
        for _, way in ways:
            way.close()
    print_tables(console, result)
    console.print(f"written to {report.write_json(options.name, result)}")
    summaries = [one for by_way in result["speeds"].values() for one in by_way.values()]
    return int(any(one.get("num_recompiles") for one in summaries))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.real")
    parser.add_argument("--model", type=Path, default=SMOLLM2, help="(default: %(default)s)")
    parser.add_argument("--draft", type=Path, default=HEAD, help="the EAGLE-3 head")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--num-draft-tokens", type=int, nargs="+", default=[2, 3], metavar="K")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--num-prompts", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2, help="how often each prompt is timed")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--guest-python", default=sys.executable, metavar="PYTHON", help=GUEST_HELP)
    parser.add_argument(
        "--openvino-python", default=sys.executable, metavar="PYTHON",
        help="the same for OpenVINO GenAI",
    )  # fmt: skip
    parser.add_argument("--only", nargs="+", help="only ways whose name contains one of these")
    parser.add_argument("--name", default="real", help="results/NAME.json")
    return parser.parse_args(arguments)


def read_prompts(model_dir: Path, count: int) -> dict[str, list[int]]:
    """Name -> token ids, a user's message through the chat template."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
    texts = json.loads(PROMPTS.read_text(encoding="utf-8"))
    return {
        name: [
            int(one)
            for one in tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
            )
        ]
        for name, text in list(texts.items())[:count]
    }


def contestants(
    setup: Setup,
    draft_tokens: Sequence[int],
    guest_python: str = sys.executable,
    openvino_python: str = sys.executable,
) -> list[Contestant]:
    """transformers first: the reference of what decodes in bfloat16."""
    ours = partial(_compilespec, setup)
    batch = setup.max_batch_size
    found = [
        Contestant(
            name=gates.EAGER, weights=BF16, make=lambda name: TransformersWay(setup, name, batch)
        ),
        Contestant(
            name=gates.LOOKUP, weights=BF16,
            make=lambda name: TransformersWay(setup, name, 1, prompt_lookup_num_tokens=3),
        ),
        Contestant(name="llama.cpp", weights=BF16, make=lambda name: LlamaCppWay(setup, name)),
        Contestant(
            name="llama.cpp Q8_0", weights="Q8_0",
            make=lambda name: LlamaCppWay(setup, name, "Q8_0"),
        ),
        Contestant(
            name="llama.cpp Q4_1", weights="Q4_1",
            make=lambda name: LlamaCppWay(setup, name, "Q4_1"),
        ),
    ]  # fmt: skip
    for name, drafted in (("vLLM", {}), ("vLLM ngram K=4", {"num_draft_tokens": 4})):
        make = partial(_guest, setup, engine="vllm", python=guest_python, options=drafted)
        found.append(Contestant(name=name, weights=BF16, make=make))
    for name, drafts in (("OpenVINO Q8_0", None), ("OpenVINO lookup K=4 Q8_0", 4)):
        read = partial(
            OpenVinoWay, setup, python=openvino_python, kind="Q8_0", num_draft_tokens=drafts
        )
        found.append(Contestant(name=name, weights=OPENVINO_WEIGHTS, make=read))
    for quantize in (None, "int8", "int8_dynamic", "int4"):
        weights = quantize or BF16
        suffix = "" if quantize is None else f" {quantize}"
        found.append(ours(f"compilespec none{suffix}", weights, "none"))
        found.append(ours(f"compilespec ngram K=4{suffix}", weights, "ngram", 4))
        for k in draft_tokens if quantize is None else ():
            found.append(ours(f"compilespec eagle3 K={k}", weights, "eagle3", k))
        k = draft_tokens[-1]
        name = f"compilespec eagle3 K={k}{suffix}, draft in {DRAFT_WEIGHTS}"
        found.append(ours(name, weights, "eagle3", k, DRAFT_WEIGHTS))
        if quantize in (None, "int8"):
            name = f"compilespec eagle3 tree of {TREE.num_nodes}{suffix}, draft in {DRAFT_WEIGHTS}"
            found.append(ours(name, weights, "eagle3", None, DRAFT_WEIGHTS, TREE))
    return found


def _guest(setup: Setup, name: str, *, engine: str, python: str, options: dict[str, Any]) -> Way:
    return GuestWay(setup, name, engine, python, **options)


def _compilespec(
    setup: Setup, name: str, weights: str, spec: str, k: int | None = None,
    draft_weights: str | None = None, tree: DraftTree | None = None,
) -> Contestant:  # fmt: skip
    quantize = None if weights == BF16 else weights

    def make(name: str) -> Way:
        if spec == "eagle3" and setup.draft is None:
            raise Unavailable("there is no head; give --draft")
        return CompilespecWay(setup, name, spec, k, quantize, draft_weights, tree)

    return Contestant(name=name, weights=weights, make=make)


def build(
    wanted: Sequence[Contestant], only: Sequence[str] | None, console: Console
) -> tuple[list[tuple[str, Way]], dict[str, str]]:
    """The ways that run here, with the weights of each, and why the others do not."""
    ways, skipped = [], {}
    for one in wanted:
        if only and one.name != gates.EAGER and not any(part in one.name for part in only):
            continue
        try:
            ways.append((one.weights, one.make(one.name)))
        except Unavailable as reason:
            skipped[one.name] = str(reason)
            console.print(f"skipped {one.name}: {reason}")
    return ways, skipped


def check(
    ways: Sequence[tuple[str, Way]],
    prompts: dict[str, list[int]],
    batches: Sequence[int],
    checker: Checker,
) -> dict[str, dict[str, Any]]:
    """Run every way on every prompt, which warms it up; what it wrote, judged."""
    reference = {name: ways[0][1].generate([ids])[0] for name, ids in prompts.items()}
    plain: dict[str, dict[str, list[int]]] = {}
    found = {}
    for weights, way in ways:
        written = {name: way.generate([ids])[0] for name, ids in prompts.items()}
        for size in batches:
            if 1 < size <= way.max_batch_size:
                for group in make_batches(list(prompts), size):
                    way.generate([prompts[name] for name in group])
        if weights == BF16:
            judged = [
                checker.compare(way.name, 1, name, prompts[name], tokens, reference[name])
                for name, tokens in written.items()
            ]
            right = all(one.ok for one in judged)
            same = sum(one.first_difference is None for one in judged)
        else:
            expected = plain.setdefault(weights, written)
            same = sum(written[name] == expected[name] for name in written)
            right = same == len(written)
        found[way.name] = {"right": right, "identical": same, "of": len(written)}
    return found


def time_batch(
    ways: Sequence[tuple[str, Way]], prompts: dict[str, list[int]], size: int, rounds: int
) -> dict[str, dict[str, Any]]:
    """Whole calls, and calls for the first token alone: what they take less is decoding."""
    inputs = [[prompts[name] for name in group] for group in make_batches(list(prompts), size)]
    running = [way for _, way in ways if size <= way.max_batch_size]
    rounds = rounds if size == 1 else rounds * 2
    calls = {way.name: partial(generate, way, inputs) for way in running}
    whole = interleave(calls, len(inputs), rounds)
    found = {way.name: {**whole[way.name].summary(), **way.stats()} for way in running}
    begun = {name: partial(call, max_new_tokens=1) for name, call in calls.items()}
    first = interleave(begun, len(inputs), rounds)
    decoding = {name: less(whole[name], first[name]) for name in calls}
    for name, summary in found.items():
        summary["first_token_ms"] = quantiles(first[name].ms)
        summary["decode_tokens_per_s"] = quantiles(decoding[name].tokens_per_s)
        for what, samples in (("times", whole), ("decode_times", decoding)):
            summary[what] = {b: times(samples[name], samples[b]) for b in BASES if b in samples}
    return found


def less(whole: Samples, first: Samples) -> Samples:
    """What comes after the first token, of the same inputs in the same order."""
    return Samples(
        ms=[one - begun for one, begun in zip(whole.ms, first.ms, strict=True)],
        num_tokens=[
            one - begun for one, begun in zip(whole.num_tokens, first.num_tokens, strict=True)
        ],
    )


def times(mine: Samples, base: Samples) -> float:
    """How many times as fast as `base`: the median over pairs of calls, which were neighbours."""
    pairs = zip(mine.tokens_per_s, base.tokens_per_s, strict=True)
    return quantiles([one / other for one, other in pairs])["p50"]


def time_prefill(
    ways: Sequence[tuple[str, Way]], prompts: dict[str, list[int]], rounds: int
) -> dict[str, dict[str, Any]]:
    """Tokens of a long prompt a second, up to the first token after it."""
    ids = [one for ids in prompts.values() for one in ids]
    long = [[(ids * (PREFILL_TOKENS // len(ids) + 1))[:PREFILL_TOKENS]]]
    calls = {way.name: partial(generate, way, long, max_new_tokens=1) for _, way in ways}
    interleave(calls, 1, 1)  # warms up
    return {
        name: {"prompt_tokens": PREFILL_TOKENS, "tokens_per_s": PREFILL_TOKENS / min(one.ms) * 1e3}
        for name, one in interleave(calls, 1, rounds).items()
    }


def print_tables(console: Console, result: dict[str, Any]) -> None:
    for size, summaries in result["speeds"].items():
        report.print_speeds(console, size, summaries, gates.EAGER)
    title = f"prompt of {PREFILL_TOKENS} tokens: tokens per second"
    rows = [(name, f"{row['tokens_per_s']:,.0f}") for name, row in result["prefill"].items()]
    report.print_table(console, title, ("way", "tokens/s"), rows)
    speeds = result["speeds"].get(1, {})
    for what, key in (("in all", "times"), ("decoding alone", "decode_times")):
        for (first, bits), over in GOALS.items():
            mine = [
                one[key] for name, one in speeds.items() if first in name and bits == bits_of(name)
            ]
            for other, goal in over.items():
                if mine and other in speeds:
                    best = max(one[other] for one in mine)
                    console.print(f"{first} {bits}, {what}: {best:.2f} x {other} (goal {goal:.1f})")


def bits_of(name: str) -> str:
    """The bits of our way's target: "int8", "int4", or "" for bfloat16."""
    target = name.partition(",")[0]
    return next((bits for bits in ("int8", "int4") if f" {bits}" in target), "")


if __name__ == "__main__":
    sys.exit(main())
