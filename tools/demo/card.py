"""The model card of the demo pair, written from the logs and the evaluation."""

from __future__ import annotations

import json
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

from transformers import LlamaConfig

from .corpus import HELD_OUT_ONE_IN, PACKAGES, VOCAB_SIZE
from .drafters import OPTIONS, STDLIB_SHARE
from .target import SIZES, STDLIB_SHARES

ROWS = 16
LAYOUTS = {
    "eagle3": "EAGLE-3 as SafeAILab writes it, one layer",
    "mtp": "MTP modules under DeepSeek's names, llama layers of the target's shape, its embedding "
    "and head",
    "draft_model": "LlamaForCausalLM, two layers, the target's tokenizer",
}


def drafters(logs: Path, checkpoint: Path) -> tuple[str, str]:
    """Table rows and training of the drafters that were exported."""
    rows, steps = "", ""
    for name in OPTIONS:
        weights = checkpoint / name / "model.safetensors"
        if weights.exists():
            size = weights.stat().st_size / 1e6
            last = read_log(logs / name / "training" / "log.jsonl")[-1]
            rows += f"| `{name}/` | {LAYOUTS[name]} | {size / 2:.2f}M | {size:.1f} MB, bf16 |\n"
            steps += (
                f"- `{name}`: {last['step'] + 1} steps, {last['num_tokens'] / 1e6:.1f}M tokens, "
                f"{last['seconds'] / 60:.0f} minutes.\n"
            )
    return rows, steps


def model_card(
    result: dict[str, Any], hashes: dict[str, str], logs: Path, samples: str, checkpoint: Path
) -> str:
    """Return the card as Markdown.

    Args:
        result: what `eval_demo.evaluate` returned.
        logs: folder of the training, with target.jsonl and the drafters' own folders.
        samples: completions, already Markdown.
        checkpoint: the exported folder, for sizes.
    """
    target = read_log(logs / "target.jsonl")
    rows, steps = drafters(logs, checkpoint)
    parts = _parts(checkpoint, rows) + _results(result) + _training(target, steps)
    return f"""{parts}{_data(hashes)}## Twenty completions of held-out prompts, unedited

The completion is between ⟦ and ⟧.

{samples}"""


def _parts(checkpoint: Path, rows: str) -> str:
    size, shape = (checkpoint / "model.safetensors").stat().st_size, LlamaConfig(**SIZES)
    return f"""# The demo checkpoints: a small target and its drafters

Checkpoints that let compilespec run, be tested and be timed without a download.  The target
writes Python-like text; it is far too small to be useful for anything else.

| part | layout | parameters | file |
|---|---|---|---|
| target | LlamaForCausalLM, {shape.num_hidden_layers} layers x {shape.hidden_size}, \
{shape.num_attention_heads} heads x {shape.head_dim}, {shape.num_key_value_heads} KV heads, \
MLP {shape.intermediate_size}, tied embeddings | {size / 2e6:.2f}M | {size / 1e6:.1f} MB, bf16 |
{rows}
"""


def _results(result: dict[str, Any]) -> str:
    losses = ", ".join(f"{v:.3f} (windows of {k})" for k, v in result["held_out_loss"].items())
    loops = "\n".join(f"- {name}: {share:.0%}" for name, share in result["loops"].items())
    return f"""## Results

Held-out loss of the exported target in float32, nats per token over {result["held_out_tokens"]:,}
tokens: {losses}.

Acceptance length (bonus token included) by the engine in float32, {result["prompts"]} held-out
prompts of {result["prompt_tokens"]} tokens, {result["new_tokens"]} new tokens each; at temperature
1 drafts are judged by rejection:

{acceptance_table(result)}

Greedy text that repeats itself flatters every drafter, prompt lookup most of all: read the rows at
temperature 1 beside it.  Outputs in which a line occurs three times
("in all": a line of ten characters or more, anywhere in the output):

{loops}

"""


def _training(target: list[dict[str, Any]], steps: str) -> str:
    last = target[-1]
    return f"""## Training

Target: {last["step"] + 1} steps, {last["tokens"] / 1e6:.1f}M tokens of 4,096 a step, \
{last["seconds"] / 60:.0f} minutes on two shared
cores in float32.  Muon (update scaled to AdamW's) on the matrices of the layers, AdamW on the rest,
60 warm-up steps, a flat part, linear decay to zero: the defaults of `tools/train_demo.py`.  Windows
of 256 tokens; every third step of the decay reads windows of 1,024.  Share of standard-library
windows: {STDLIB_SHARES[0]} before the decay, {STDLIB_SHARES[1]} in it.

The drafters are trained by `compilespec.training` with the options in `tools/demo/drafters.py`:
half of their text are windows of the corpus ({STDLIB_SHARE:.0%} standard library), half begins with
such and was written on by the target, greedily or at temperature 1.

{steps}
Target, training loss (mean of the steps since the row before) and held-out loss:

{curve(target, "loss", {"held_out_loss": "held out"})}

The target's flat part had all but levelled off: most of the last gain comes from the decay, and
it had read its standard-library text about four times.

"""


def _data(hashes: dict[str, str]) -> str:
    packages = "\n".join(
        f"| {p.name} {p.version} | {p.licence} | training, up to {p.quota_bytes / 1e6:.0f} MB, "
        "files by content hash |"
        for p in PACKAGES
    )
    return f"""## Data

| source | licence | use |
|---|---|---|
| Python {platform.python_version()} standard library, without tests, encodings, idlelib and \
the like | PSF-2.0 | training, tokenizer; one file in {HELD_OUT_ONE_IN} held out by hash |
{packages}

Files that share a third of their long lines with held-out files are left out.  The tokenizer is a
byte-level BPE of {VOCAB_SIZE} tokens, `<|endoftext|>` between files.  Hashes (sha256):

{chr(10).join(f"- {name}: `{digest}`" for name, digest in hashes.items())}

To repeat it: `python -m tools.train_demo --part target`, then the parts `text`, `eagle3`, `mtp`,
`draft_model` and `export`, with torch {version("torch").split("+")[0]} and the versions above.

"""


def acceptance_table(result: dict[str, Any]) -> str:
    """Return the acceptance lengths and the rate of each draft position."""
    lines = ["| drafter | temperature | K | acceptance length | accepted up to draft 1, 2, ... |"]
    lines.append("|---|---|---|---|---|")
    for name, length in result["acceptance_length"].items():
        method, kind, k = name.split(", ")
        rates = result["accepted_by_position"][name]
        temperature = "0 (greedy)" if kind == "greedy" else "1"
        rated = " ".join(f"{r:.2f}" for r in rates)
        lines.append(f"| {method} | {temperature} | {k[2:]} | {length:.2f} | {rated} |")
    return "\n".join(lines)


def curve(log: list[dict[str, Any]], name: str, held_out: dict[str, str]) -> str:
    """Return a table of about ROWS rows of a log: every evaluation and evenly spaced means."""
    stride = max(1, len(log) // ROWS)
    ends = set(range(stride - 1, len(log), stride)) | {len(log) - 1}
    ends |= {i for i, record in enumerate(log) if set(held_out) & set(record)}
    lines = [
        f"| step | {name} | {' | '.join(held_out.values())} |",
        "|---" * (2 + len(held_out)) + "|",
    ]
    start = 0
    for end in sorted(ends):
        mean = sum(record[name] for record in log[start : end + 1]) / (end + 1 - start)
        cells = [f"{log[end][key]:.3f}" if key in log[end] else "" for key in held_out]
        lines.append(f"| {end + 1} | {mean:.3f} | {' | '.join(cells)} |")
        start = end + 1
    return "\n".join(lines)


def read_log(path: Path) -> list[dict[str, Any]]:
    """Return the records of a JSONL log."""
    return [json.loads(line) for line in path.read_text().splitlines()]
