"""lm-eval over HTTP against its own transformers backend; with speculation against without.

    python -m tools.serving.evals --model demo --spec eagle3

Multiple choice, perplexity (rolling, over documents longer than a window) and generation, on tasks
made of the benchmark's prompts: nothing is fetched.  Needs `pip install "lm_eval[api]"`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console

from compilespec.demo import demo_directory
from tools.bench import report
from tools.bench.prompts import load_prompts
from tools.serving.process import served

TOLERANCE = 1e-3  # of a log-likelihood, in float32
NEW_TOKENS = 24
HEAD_CHARACTERS = 120  # of prompts for generation, which nobody has to cut
METRICS = {"choice": "acc,none", "documents": "word_perplexity,none", "lines": "exact_match,none"}

Results = Mapping[str, Any]


def main(arguments: list[str] | None = None) -> int:
    """Returns 1 where scores differ, else 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo", help="a checkpoint directory, or demo")
    parser.add_argument("--spec", default="eagle3", help="compared with plain decoding")
    parser.add_argument("--backend", default="eager", choices=["inductor", "eager"])
    parser.add_argument("--num-prompts", type=int, default=8)
    parser.add_argument("--window", type=int, default=96, help="tokens that a document is cut into")
    parser.add_argument("--concurrent", type=int, default=4, help="requests at once")
    parser.add_argument("--name", default="lm-eval", help="results/NAME.json")
    options = parser.parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else 140)
    result = compare(options)
    for way, found in result["ways"].items():
        console.print(f"{way:>12}: {found['scores']}")
    console.print(f"largest difference of a log-likelihood: {result['largest_difference']:.2g}")
    for line in result["differences"]:
        console.print(f"[red]{line}[/]")
    console.print(f"written to {report.write_json(options.name, result)}")
    return int(bool(result["differences"]))


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Scores of all ways, and where they differ."""
    model = str(demo_directory()) if options.model == "demo" else options.model
    found: dict[str, Results] = {}
    with tempfile.TemporaryDirectory(prefix="compilespec-evals-") as folder:
        os.environ["HF_DATASETS_CACHE"] = folder
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        tasks = local_tasks(Path(folder), list(load_prompts(options.num_prompts).values()))
        for spec in ("none", options.spec):
            arguments = ("--model", model, "--spec", spec, "--backend", options.backend,
                         "--dtype", "float32", "--prompt-logprobs", "--served-model-name", "m",
                         "--max-batch-size", "4", "--max-seq-len", "512")  # fmt: skip
            with served(*arguments) as url:
                found[spec] = ask_server(url, model, tasks, options)
        found["transformers"] = ask_transformers(model, tasks, options)
    differences, largest = _differences(found, options.spec)
    return {
        "benchmark": "lm-eval", **report.environment(), "model": options.model,
        "backend": options.backend, "num_prompts": options.num_prompts,
        "ways": {way: {"scores": _scores(one)} for way, one in found.items()},
        "tolerance": TOLERANCE, "largest_difference": largest, "differences": differences,
    }  # fmt: skip


def local_tasks(folder: Path, texts: Sequence[str]) -> list[dict[str, Any]]:
    """Tasks of lm-eval over these texts, whose data lies in the folder."""
    heads = [text[: len(text) * 2 // 3] for text in texts]
    tails = [text[len(text) * 2 // 3 :] for text in texts]
    rows: dict[str, list[dict[str, Any]]] = {
        "choice": [
            {"head": head, "tails": [tails[(at + step) % len(tails)] for step in range(3)]}
            for at, head in enumerate(heads)
        ],
        "documents": [{"text": one + other} for one, other in pairwise(texts)],
        "lines": [{"head": text[:HEAD_CHARACTERS], "line": "pass"} for text in texts],
    }
    fields: dict[str, dict[str, Any]] = {
        "choice": {"output_type": "multiple_choice", "doc_to_text": "{{head}}",
                   "doc_to_choice": "tails", "doc_to_target": 0, "target_delimiter": "",
                   "metric_list": [{"metric": "acc"}]},
        "documents": {"output_type": "loglikelihood_rolling", "doc_to_text": "",
                      "doc_to_target": "{{text}}", "metric_list": [{"metric": "word_perplexity"}]},
        "lines": {"output_type": "generate_until", "doc_to_text": "{{head}}",
                  "doc_to_target": "{{line}}", "metric_list": [{"metric": "exact_match"}],
                  "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": NEW_TOKENS,
                                        "do_sample": False}},
    }  # fmt: skip
    tasks = []
    for name, entries in rows.items():
        file = folder / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in entries), encoding="utf-8")
        data = {"data_files": {"test": str(file)}, "cache_dir": str(folder)}
        tasks.append(
            {"task": name, "dataset_path": "json", "dataset_kwargs": data, "test_split": "test",
             **fields[name]}
        )  # fmt: skip
    return tasks


def ask_server(
    url: str, tokenizer: str, tasks: list[dict[str, Any]], options: argparse.Namespace
) -> Results:
    """What lm-eval finds over HTTP."""
    return _evaluate(
        "local-completions",
        {"model": "m", "base_url": f"{url}/v1/completions", "tokenizer": tokenizer,
         "tokenizer_backend": "huggingface", "num_concurrent": options.concurrent,
         "max_length": options.window + 2},  # it keeps one for an answer, and one for a context
        tasks,
    )  # fmt: skip


def ask_transformers(
    model: str, tasks: list[dict[str, Any]], options: argparse.Namespace
) -> Results:
    """What lm-eval finds with its own backend."""
    return _evaluate(
        "hf",
        {"pretrained": model, "dtype": "float32", "device": "cpu", "batch_size": 1,
         "max_length": options.window},
        tasks,
    )  # fmt: skip


def _evaluate(kind: str, arguments: dict[str, Any], tasks: list[dict[str, Any]]) -> Results:
    import lm_eval

    found = lm_eval.simple_evaluate(
        model=kind, model_args=arguments, tasks=[dict(task) for task in tasks], bootstrap_iters=0,
        log_samples=True,
    )  # fmt: skip
    assert found is not None, "only ranks above 0 get none"
    return found


def _scores(found: Results) -> dict[str, float]:
    return {task: float(found["results"][task][metric]) for task, metric in METRICS.items()}


def _answers(found: Results) -> list[tuple[str, Any]]:
    """What the model answered to each request: a text, a log-likelihood, or that and greedy."""
    return [
        (f"{task} {sample['doc_id']}", answer)
        for task in METRICS
        for sample in sorted(found["samples"][task], key=lambda one: one["doc_id"])
        for answer in sample["filtered_resps"]
    ]


def _differences(found: Mapping[str, Results], spec: str) -> tuple[list[str], float]:
    """Where ways disagree, and the largest difference that is allowed."""
    plain, largest = _answers(found["none"]), 0.0
    told = [
        f"{place}: {ours} with {spec}, {theirs} without"
        for (place, theirs), (_, ours) in zip(plain, _answers(found[spec]), strict=True)
        if ours != theirs
    ]
    for (place, ours), (_, theirs) in zip(plain, _answers(found["transformers"]), strict=True):
        if isinstance(theirs, str):
            is_equal = ours == theirs
        else:
            one, other = _parts(ours), _parts(theirs)
            difference = abs(one[0] - other[0])
            largest = max(largest, difference)
            is_equal = difference <= TOLERANCE and one[1:] == other[1:]
        if not is_equal:
            told.append(f"{place}: {ours!r} over HTTP, {theirs!r} by transformers")
    return told, largest


def _parts(answer: Any) -> tuple[float, ...]:
    """A log-likelihood, and whether its tokens are the greedy ones where the task asks."""
    parts = answer if isinstance(answer, list | tuple) else (answer,)
    return (float(parts[0]), *(float(part in (True, "True")) for part in parts[1:]))


if __name__ == "__main__":
    sys.exit(main())
