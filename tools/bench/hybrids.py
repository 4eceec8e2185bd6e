"""Step times of hybrids beside their attention twins.

    python -m tools.bench.hybrids            written to results/hybrids.json
    python -m tools.bench.hybrids --all      every family, method and context at both sizes

Random bfloat16 models with recurrent layers (gated delta rule, Mamba-2, short convolution), three
of every four; a twin is the same config with attention in all layers.  Plain steps and steps of K
drafts run by turns.  All drafts are accepted by force, so that a step takes what the one before it
kept, the most that a recurrent state can cost.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import compilespec
from compilespec import SamplingParams
from compilespec.methods.eagle3 import random_head
from compilespec.methods.mtp import random_modules
from compilespec.tracing.target_info import TargetInfo
from tools.bench import report
from tools.bench.check import Checker
from tools.bench.measure import quantiles

SIZES = {"tiny": (4, 256, 2048), "large": (12, 768, 8192)}  # layers, width, vocabulary
METHODS = ("ngram", "eagle3", "draft_model", "mtp")
# What runs by default: all methods tiny, all families large.
CASES: dict[str, dict[str, Sequence[Any]]] = {
    "tiny": {"families": ("qwen3_5",), "methods": METHODS, "context": (64, 1024)},
    "large": {"families": ("qwen3_5", "bamba", "lfm2"), "methods": ("ngram",), "context": (64,)},
}
PLAIN = "plain"
LIMIT = 1.3  # of a hybrid to its twin
NUM_WARM = 3  # warm-up turns
NUM_CHECKED = 24  # tokens of each text
# Twice the usual one: the logits of a random model are small, and the tokens that transformers' own
# bfloat16 decoding gives one of 12 layers reach 1.1 of the usual bound.
BOUND = 2.0**-5


def main(arguments: list[str] | None = None) -> int:
    """Returns 1 if tokens are wrong or a hybrid is slower than its twin by more than the limit."""
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    console = Console(width=None if sys.stdout.isatty() else 120)
    result: dict[str, Any] = {
        "benchmark": "hybrids", **report.environment(), "limit": LIMIT, "options": vars(options),
        "rows": [],
    }  # fmt: skip
    for size, family in [(s, f) for s in options.sizes for f in chosen("families", s, options)]:
        rows = compare(family, size, options, console)
        result["rows"] += rows
        print_rows(console, f"{family}, {size}", rows)
        path = report.write_json(options.name, result)  # what there is, if it is ended
    console.print(f"written to {path}")
    slow = [row for row in result["rows"] if is_slow(row)]
    for row in slow:
        console.print(
            "[red]slower than its twin by more than {limit}: {family}, {size}, {way}, batch {batch}"
            ", context {context}[/]".format(limit=LIMIT, **row)
        )
    return int(bool(slow))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.hybrids")
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--families", nargs="+", choices=list(CONFIGS))
    parser.add_argument("--methods", nargs="+", choices=METHODS)
    parser.add_argument("--context", type=int, nargs="+", help="prompt tokens before the steps")
    parser.add_argument("--all", action="store_true", help="all families, methods and contexts")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--num-draft-tokens", type=int, default=3, metavar="K")
    parser.add_argument("--rounds", type=int, default=30, help="rounds of one step in every way")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--backend", default="inductor", choices=["inductor", "eager"])
    parser.add_argument("--name", default="hybrids", help="results/NAME.json")
    return parser.parse_args(arguments)


def chosen(what: str, size: str, options: argparse.Namespace) -> Sequence[Any]:
    """What an option says, else every value with --all, else the size's own."""
    every = {"families": tuple(CONFIGS), "methods": METHODS, "context": CASES["tiny"]["context"]}
    values: Sequence[Any] = getattr(options, what) or (every if options.all else CASES[size])[what]
    return values


# --- models ---


def _qwen3_5(sizes: dict[str, Any], kinds: Sequence[bool]) -> Any:
    from transformers import Qwen3_5TextConfig

    width = sizes["hidden_size"]
    return Qwen3_5TextConfig(
        **sizes, layer_types=["linear_attention" if r else "full_attention" for r in kinds],
        num_attention_heads=width // 64, num_key_value_heads=width // 128, head_dim=128,
        linear_num_key_heads=width // 128, linear_num_value_heads=width // 64,
        linear_key_head_dim=128, linear_value_head_dim=128,
    )  # fmt: skip


def _bamba(sizes: dict[str, Any], kinds: Sequence[bool]) -> Any:
    from transformers import BambaConfig

    width = sizes["hidden_size"]
    return BambaConfig(
        **sizes, attn_layer_indices=[i for i, recurrent in enumerate(kinds) if not recurrent],
        num_attention_heads=width // 64, num_key_value_heads=width // 64,
        mamba_n_heads=width // 32, mamba_d_head=64, mamba_n_groups=1, mamba_d_state=128,
    )  # fmt: skip


def _lfm2(sizes: dict[str, Any], kinds: Sequence[bool]) -> Any:
    from transformers import Lfm2Config

    width = sizes["hidden_size"]
    return Lfm2Config(
        **sizes, layer_types=["conv" if r else "full_attention" for r in kinds],
        num_attention_heads=width // 64, num_key_value_heads=width // 64,
        block_auto_adjust_ff_dim=False,
    )  # fmt: skip


CONFIGS = {"qwen3_5": _qwen3_5, "bamba": _bamba, "lfm2": _lfm2}


def random_model(
    family: str, size: tuple[int, int, int], max_seq_len: int, is_twin: bool
) -> torch.nn.Module:
    """Every fourth layer is attention; all of a twin's are."""
    from transformers import AutoModelForCausalLM

    num_layers, width, vocab_size = size
    sizes = {
        "num_hidden_layers": num_layers, "hidden_size": width, "vocab_size": vocab_size,
        "intermediate_size": 7 * width // 2, "max_position_embeddings": max_seq_len,
        "tie_word_embeddings": False,
    }  # fmt: skip
    torch.manual_seed(0)
    config = CONFIGS[family](sizes, [not is_twin and i % 4 != 3 for i in range(num_layers)])
    model: torch.nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.eval().requires_grad_(False)


def drafter(method: str, family: str, model: Any, max_seq_len: int, is_twin: bool) -> Any:
    """A random drafter for the model; None for methods without one."""
    head = model.get_output_embeddings().weight
    num_layers, (vocab_size, width) = model.config.num_hidden_layers, head.shape
    info = TargetInfo(
        hidden_size=width, vocab_size=vocab_size, num_layers=num_layers, dtype=head.dtype,
        device=head.device, embedding=model.get_input_embeddings().weight, lm_head=head,
        config=model.config, max_seq_len=max_seq_len,
    )  # fmt: skip
    if method == "eagle3":
        return random_head(info, aux_layers=(0, num_layers // 2, num_layers - 1))
    if method == "mtp":
        return random_modules(info, 3)
    if method == "draft_model":
        return random_model(family, (4, 128, vocab_size), max_seq_len, is_twin)
    return None


class Ways:
    """A model's engines, by name: plain decoding, and one for each method."""

    def __init__(self, family: str, size: str, options: argparse.Namespace, is_twin: bool) -> None:
        self.is_twin, self.options = is_twin, options
        self.max_seq_len = max(chosen("context", size, options)) + 4 * (options.rounds + 16)
        self.model = random_model(family, SIZES[size], self.max_seq_len, is_twin)
        self.keywords = {
            name: {
                "spec": name, "num_draft_tokens": options.num_draft_tokens,
                "draft": drafter(name, family, self.model, self.max_seq_len, is_twin),
            }
            for name in chosen("methods", size, options)
        }  # fmt: skip
        self.engines = {PLAIN: self.compile()}

    def compile(self, backend: str | None = None, **keywords: Any) -> Any:
        return compilespec.compile(
            self.model, backend=backend or self.options.backend, max_seq_len=self.max_seq_len,
            max_batch_size=max(self.options.batch), enable_prefix_caching=False,
            **{"spec": "none", **{k: v for k, v in keywords.items() if v is not None}},
        )  # fmt: skip

    def compile_forced(self) -> None:
        """Engines whose steps accept all drafts, regardless of their tokens: what is timed."""
        for name, keywords in self.keywords.items():
            self.engines[name] = self.compile(
                **keywords, force_num_accepted=self.options.num_draft_tokens
            )

    def check(self) -> None:
        """Whether tokens are those of plain decoding, by the margin rule.  Drafts are judged by the
        interpreted steps, which have the operators of the compiled ones.

        Raises: SystemExit.
        """
        params = SamplingParams(max_new_tokens=NUM_CHECKED, ignore_eos=True)
        texts = prompts(self.model, 3, 40)
        plain = [list(output.token_ids) for output in self.engines[PLAIN].generate(texts, params)]
        said = {PLAIN: plain}
        for name, keywords in self.keywords.items():
            with self.compile("eager", **keywords) as engine:
                said[name] = [list(output.token_ids) for output in engine.generate(texts, params)]
        checker = Checker(self.model, bound=BOUND)
        for (name, tokens), i in itertools.product(said.items(), range(len(texts))):
            judged = checker.compare(name, len(texts), str(i), texts[i], tokens[i], plain[i])
            if not judged.ok:
                raise SystemExit(f"error: wrong tokens, no speed is printed: {judged}")

    def close(self) -> None:
        for engine in self.engines.values():
            engine.close()


def prompts(model: Any, number: int, length: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(length)
    vocab_size = model.get_output_embeddings().weight.shape[0]
    drawn: list[list[int]] = torch.randint(
        3, vocab_size, (number, length), generator=generator
    ).tolist()
    return drawn


# --- times ---


def compare(
    family: str, size: str, options: argparse.Namespace, console: Console
) -> list[dict[str, Any]]:
    """A row for each way, batch and context: the hybrid's step beside its twin's."""
    both = []
    for is_twin in (False, True):
        console.print(f"{family}, {size}: {'attention twin' if is_twin else 'hybrid'}")
        ways = Ways(family, size, options, is_twin)
        if not is_twin:
            ways.check()
        ways.compile_forced()
        both.append(ways)
    rows = []
    for batch, context in itertools.product(options.batch, chosen("context", size, options)):
        samples = take_turns(both, batch, context, options.rounds)
        for row in judge(samples):
            case = {"family": family, "size": size, "batch": batch, "context": context}
            rows.append({**case, **row})
    for ways in both:
        ways.close()
    gc.collect()
    return rows


Samples = dict[tuple[bool, str], list[tuple[float, float]]]


def take_turns(both: Sequence[Ways], batch: int, context: int, rounds: int) -> Samples:
    """Milliseconds of each step by (is twin, way): of the clock, and of the processor."""
    engines = {
        (ways.is_twin, name): engine for ways in both for name, engine in ways.engines.items()
    }
    samples: Samples = {key: [] for key in engines}
    requests = {
        key: list(start(engine, prompts(both[0].model, batch, context)))
        for key, engine in engines.items()
    }
    keys = list(engines)
    for turn in range(rounds + NUM_WARM):
        shift = turn % len(keys)
        for key in keys[shift:] + keys[:shift]:
            begin, busy = time.perf_counter(), time.process_time()
            engines[key].step()
            elapsed = (time.perf_counter() - begin) * 1e3, (time.process_time() - busy) * 1e3
            if turn >= NUM_WARM:
                samples[key].append(elapsed)
    for key, engine in engines.items():
        for request in requests[key]:
            engine.abort(request)
        while engine.has_work:
            engine.step()
    return samples


def start(engine: Any, texts: list[list[int]]) -> Iterator[Any]:
    """Requests that have taken their prompts and will not finish."""
    room = engine.geometry.max_seq_len - len(texts[0])
    params = SamplingParams(max_new_tokens=room, ignore_eos=True)
    requests = [engine.submit(text, params) for text in texts]
    while not all(request.output_token_ids for request in requests):
        engine.step()
    yield from requests


def judge(samples: Samples) -> Iterator[dict[str, Any]]:
    """By processor time, which other programs on the machine disturb least."""
    for name in (way for is_twin, way in samples if not is_twin):
        row: dict[str, Any] = {"way": name}
        busy = {}
        for label, is_twin in (("hybrid", False), ("twin", True)):
            busy[label] = [own for _, own in samples[is_twin, name]]
            plain = [own for _, own in samples[is_twin, PLAIN]]
            row[f"{label}_ms"] = quantiles([elapsed for elapsed, _ in samples[is_twin, name]])
            row[f"{label}_busy_ms"] = quantiles(busy[label])
            row[f"{label}_to_plain"] = statistics.median(busy[label]) / statistics.median(plain)
        # by turns, so that a slow spell of the machine affects both
        row["to_twin"] = statistics.median(
            own / other for own, other in zip(busy["hybrid"], busy["twin"], strict=True)
        )
        row["ratio_to_twin"] = row["hybrid_to_plain"] / row["twin_to_plain"]
        yield row


def is_slow(row: dict[str, Any]) -> bool:
    return bool(max(row["to_twin"], row["ratio_to_twin"]) > LIMIT)


def print_rows(console: Console, title: str, rows: list[dict[str, Any]]) -> None:
    table = Table(title=f"{title}: decode step, ms")
    for column in ("way", "batch", "context", "hybrid p50", "twin p50", "hybrid busy", "twin busy",
                   "x plain", "twin's", "hybrid / twin", ""):  # fmt: skip
        table.add_column(column, justify="left" if column == "way" else "right")
    for row in rows:
        times = (row[name]["p50"] for name in ("hybrid_ms", "twin_ms", "hybrid_busy_ms",
                                               "twin_busy_ms"))  # fmt: skip
        table.add_row(
            row["way"], str(row["batch"]), str(row["context"]), *(f"{ms:.2f}" for ms in times),
            f"{row['hybrid_to_plain']:.2f}", f"{row['twin_to_plain']:.2f}",
            f"{row['to_twin']:.2f}", "[red]slow[/]" if is_slow(row) else "",
        )  # fmt: skip
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
