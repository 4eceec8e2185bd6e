"""The model card of the demo pair, written from the logs and the evaluation."""

from __future__ import annotations

import json
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

from .corpus import HELD_OUT_ONE_IN, PACKAGES, VOCAB_SIZE
from .eagle import DRAFT_VOCAB, HEAD_SHAPE, STEP_WEIGHTS, UNROLL
from .target import STDLIB_SHARES, TARGET_SHAPE

ROWS = 16


OTHERS = {
    "mtp": "three MTP modules in DeepSeek's layout around llama layers as wide as the target's, "
    "its embedding and head",
    "draft_model": "LlamaForCausalLM, 2 layers x 128, 4 heads x 32, 2 KV heads, MLP 448, the "
    "target's tokenizer",
}
LOGS = {"mtp": "mtp.jsonl", "draft_model": "draft.jsonl"}


def other_drafters(logs: Path, checkpoint: Path) -> tuple[str, str, str]:
    """Table rows, results and training of the drafters beside the head that were exported."""
    rows, results, steps = "", "", ""
    for name, layout in OTHERS.items():
        weights = checkpoint / name / "model.safetensors"
        if not weights.exists():
            continue
        judged = [r for r in read_log(logs / LOGS[name]) if "held_out_length_greedy" in r]
        size, last = weights.stat().st_size / 1e6, max(judged, key=lambda row: row["step"])
        rows += f"| `{name}/` | {layout} | {size / 2:.2f}M | {size:.1f} MB, bf16 |\n"
        results += (
            f"`{name}` at the end of its training, K=3, on text that the target wrote after "
            f"held-out\nprompts: {last['held_out_length_greedy']:.2f} greedy, "
            f"{last['held_out_length_sampled']:.2f} at temperature 1 (the head in the same way: "
            f"the last\nrow of its table).\n\n"
        )
        steps += f"  `{name}`: {last['step'] + 1} steps, {last['tokens'] / 1e6:.1f}M tokens."
    return rows, results, steps


def model_card(
    result: dict[str, Any], hashes: dict[str, str], logs: Path, samples: str, checkpoint: Path
) -> str:
    """Return the card as Markdown.

    Args:
        result: what `eval_demo.evaluate` returned.
        logs: folder with target.jsonl and eagle3.jsonl.
        samples: completions, already Markdown.
        checkpoint: the exported folder, for sizes.
    """
    target, head = read_log(logs / "target.jsonl"), read_log(logs / "eagle3.jsonl")
    rows, results, steps = other_drafters(logs, checkpoint)
    parts = _parts(checkpoint, rows) + _results(result, results) + _training(target, head, steps)
    return f"""{parts}{_data(hashes)}## Twenty completions of held-out prompts, unedited

The completion is between ⟦ and ⟧.

{samples}"""


def _parts(checkpoint: Path, rows: str) -> str:
    sizes = {
        name: (checkpoint / folder / "model.safetensors").stat().st_size / 1e6
        for name, folder in (("target", "."), ("head", "eagle3"))
    }
    shape = TARGET_SHAPE
    return f"""# The demo checkpoints: a small target and its drafters

Checkpoints that let compilespec run, be tested and be timed without a download.  The target
writes Python-like text; it is far too small to be useful for anything else.

| part | layout | parameters | file |
|---|---|---|---|
| target | LlamaForCausalLM, {shape.num_hidden_layers} layers x {shape.hidden_size}, \
{shape.num_attention_heads} heads x {shape.head_dim}, {shape.num_key_value_heads} KV heads, \
MLP {shape.intermediate_size}, tied embeddings | {sizes["target"] / 2:.2f}M \
| {sizes["target"]:.1f} MB, bf16 |
| `eagle3/` | EAGLE-3 as SafeAILab writes it, one layer, MLP {HEAD_SHAPE.intermediate_size}, \
draft vocabulary {DRAFT_VOCAB} of {VOCAB_SIZE}, features hs[2], hs[4], hs[5] \
| {sizes["head"] / 2:.2f}M | {sizes["head"]:.1f} MB, bf16 |
{rows}
"""


def _results(result: dict[str, Any], results: str) -> str:
    losses = ", ".join(f"{v:.3f} (windows of {k})" for k, v in result["held_out_loss"].items())
    loops = "\n".join(f"- {name}: {share:.0%}" for name, share in result["loops"].items())
    return f"""## Results

Held-out loss of the exported target in float32, nats per token over {result["held_out_tokens"]:,}
tokens: {losses}.

Acceptance length (bonus token included) by plain chain drafting in float32, {result["prompts"]}
held-out prompts of {result["prompt_tokens"]} tokens, {result["new_tokens"]} new tokens each:

{acceptance_table(result)}

{results}
The last column is the mean over every position of the text, not only those where a step began.
Greedy text that repeats itself flatters every drafter, prompt lookup most of all: read the rows at
temperature 1 beside it.  Outputs in which a line occurs three times
("in all": a line of ten characters or more, anywhere in the output):

{loops}

"""


def _training(target: list[dict[str, Any]], head: list[dict[str, Any]], steps: str) -> str:
    last, last_head = target[-1], head[-1]
    return f"""## Training

Target: {last["step"] + 1} steps, {last["tokens"] / 1e6:.1f}M tokens of 4,096 a step, \
{last["seconds"] / 60:.0f} minutes on two shared
cores in float32.  Head: {last_head["step"] + 1} steps, {last_head["tokens"] / 1e6:.1f}M tokens, \
{last_head["seconds"] / 60:.0f} minutes.{steps}  Muon (update scaled to AdamW's) on the matrices of
the layers, AdamW on the rest, 60 warm-up steps, a flat part, linear decay to zero: the defaults of
`tools/train_demo.py`.
Windows of 256 tokens; every third step of the target's decay reads windows of 1,024.  Share of
standard-library windows: {STDLIB_SHARES[0]} before the decay, {STDLIB_SHARES[1]} in it.  The head \
trains on {UNROLL} unrolled steps (weights
{STEP_WEIGHTS}) against the target's softmax, half of each batch from the corpus and half
from text that the target wrote (greedy and temperature 1 in equal parts).

Target, training loss (mean of the steps since the row before) and held-out loss:

{curve(target, "loss", {"held_out_loss": "held out"})}

The target's flat part had all but levelled off: most of the last gain comes from the decay, and
it had read its standard-library text about four times.

Head, training loss and acceptance length at K=3 on text of held-out prompts:

{curve(head, "loss", {"held_out_length_greedy": "greedy", "held_out_length_sampled": "temp. 1"})}

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

To repeat it: `python -m tools.train_demo --part target`, then `--part eagle3` and `--part export`,
with torch {version("torch").split("+")[0]} and the versions above.

"""


def acceptance_table(result: dict[str, Any]) -> str:
    """Return the acceptance lengths and the rate of each draft position."""
    lines = ["| drafter | temperature | K | acceptance length | accepted up to draft 1, 2, ... |"]
    lines.append("|---|---|---|---|---|")
    for name, length in result["acceptance_length"].items():
        method, kind, k = name.split(", ")
        rates = result["accepted_by_position"][f"{method}, {kind}"][: int(k[2:])]
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
