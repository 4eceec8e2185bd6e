"""Evaluate an exported demo pair: held-out loss, acceptance lengths, loops, sample completions.

    python -m tools.eval_demo compilespec/demo/checkpoint --json results.json

Everything runs in float32 from the exported files.  Acceptance is that of plain chain drafting.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from tools.demo.acceptance import Scores, acceptance_length, ngram_scores
from tools.demo.card import model_card
from tools.demo.corpus import encode_stream, load_corpus, tokenizer_hash
from tools.demo.eagle import Eagle3Head, features, score
from tools.demo.generated import held_out_prompts
from tools.demo.model import Layer, LeanLlama, Shape, generate
from tools.demo.target import held_out_loss

CACHE = Path.home() / ".cache" / "compilespec-demo"
PROMPT, NEW = 64, 192
KINDS = (("greedy", 0.0), ("temperature 1", 1.0))
DEPTHS = (3, 5)


def main() -> None:
    """Parse the command line, print the table, write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path, help="target folder; the head is in eagle3/")
    parser.add_argument("--prompts", type=int, default=96, help="held-out prompts")
    parser.add_argument("--card", type=Path, help="write the model card here")
    parser.add_argument("--logs", type=Path, default=CACHE, help="training logs, for the card")
    parser.add_argument("--check", type=int, default=0, help="prompts to decode literally as well")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.set_grad_enabled(False)
    tokenizer = Tokenizer.from_file(str(args.checkpoint / "tokenizer.json"))
    corpus = load_corpus(with_packages=False)
    splits = {"held_out": encode_stream(tokenizer, corpus.held_out)}
    target = load_llama(args.checkpoint)
    head = load_eagle3(args.checkpoint / "eagle3")
    result = evaluate(target, head, splits, tokenizer, prompts=args.prompts)
    if args.check:
        result["literal"] = literal_lengths(target, head, splits, prompts=args.check)
    show(result)
    if args.card:
        hashes = load_corpus().hashes() | {"tokenizer": tokenizer_hash(tokenizer)}
        samples = completions(target, splits, tokenizer)
        args.card.write_text(model_card(result, hashes, args.logs, samples, args.checkpoint))
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


def evaluate(
    target: LeanLlama, head: Eagle3Head, splits: dict[str, Tensor], tokenizer: Tokenizer, *,
    prompts: int,
) -> dict[str, Any]:  # fmt: skip
    """Return losses, acceptance lengths by method, temperature and K, and the share of loops."""
    starts = held_out_prompts(splits, prompts, PROMPT)
    result: dict[str, Any] = {
        "held_out_loss": {
            length: held_out_loss(target, splits, length=length)["loss"] for length in (256, 1024)
        },
        "held_out_tokens": splits["held_out"].numel(),
        "prompts": prompts, "prompt_tokens": PROMPT, "new_tokens": NEW,
        "acceptance_length": {}, "accepted_by_position": {}, "loops": {},
    }  # fmt: skip
    depth = max(DEPTHS)
    for kind, temperature in KINDS:
        ids = generate(target, starts, NEW, temperature=temperature, seed=0)
        by_method: dict[str, Scores] = {
            "eagle3": score(head, target, ids, depth), "n-gram": ngram_scores(ids, depth),
        }  # fmt: skip
        for method, scores in by_method.items():
            greedy = temperature == 0
            for k in DEPTHS:
                name = f"{method}, {kind}, K={k}"
                length = acceptance_length(scores, PROMPT, k, greedy=greedy)
                result["acceptance_length"][name] = round(length, 3)
            rate = scores.top.float() if greedy else scores.ratio.clamp(max=1)
            rates = rate[:, PROMPT - 1 :].cumprod(-1).mean((0, 1))
            result["accepted_by_position"][f"{method}, {kind}"] = [
                round(r, 3) for r in rates.tolist()
            ]
        texts = [tokenizer.decode(row[PROMPT:]) for row in ids.tolist()]
        for name, looped in (("in a row", repeats_a_line), ("in all", has_a_line_thrice)):
            share = sum(looped(text) for text in texts) / len(texts)
            result["loops"][f"{kind}, {name}"] = round(share, 3)
    return result


def literal_lengths(
    target: LeanLlama, head: Eagle3Head, splits: dict[str, Tensor], *, prompts: int
) -> dict[str, float]:
    """Decode by the textbook procedure, token by token and uncached, as a check of `evaluate`."""
    starts = held_out_prompts(splits, prompts, PROMPT)
    rng = torch.Generator().manual_seed(0)
    lengths = {}
    for kind, temperature in KINDS:
        for k in DEPTHS:
            emitted = steps = 0
            for row in starts.tolist():
                ids = row
                logits = features(target, torch.tensor([ids]))[1]
                ids = [*ids, pick(logits[0, -1], temperature, rng)]
                while len(ids) < PROMPT + NEW:
                    new = literal_step(target, head, ids, k, temperature, rng)
                    ids += new
                    emitted, steps = emitted + len(new), steps + 1
            lengths[f"eagle3, {kind}, K={k}"] = round(emitted / steps, 3)
    return lengths


def literal_step(
    target: LeanLlama, head: Eagle3Head, ids: list[int], k: int, temperature: float,
    rng: torch.Generator,
) -> list[int]:  # fmt: skip
    """Draft k tokens after `ids`, verify them, return the emitted ones."""
    known = torch.tensor([ids])
    aux, _ = features(target, known)
    chain, drafts = known, []
    for j in range(k):
        hidden = head.unroll(aux[:, :-1], target.embed, chain, j + 1)[j][:, -1]
        full = torch.full((target.shape.vocab_size,), float("-inf"))
        full[head.draft_ids] = head.logits(hidden)[0]
        token = pick(full, temperature, rng)
        drafts.append((token, torch.softmax(full, -1)))
        chain = torch.cat([chain, torch.tensor([[token]])], 1)
    logits = features(target, chain)[1][0, len(ids) - 1 :]
    emitted: list[int] = []
    for j, (token, q) in enumerate(drafts):
        if temperature == 0:
            kept, other = token == int(logits[j].argmax()), int(logits[j].argmax())
        else:
            p = torch.softmax(logits[j], -1)
            kept = bool(torch.rand((), generator=rng) < p[token] / q[token])
            rest = (p - q).clamp(min=0)
            other = token if kept else int(torch.multinomial(rest, 1, generator=rng))
        emitted.append(token if kept else other)
        if not kept:
            return emitted
    return [*emitted, pick(logits[k], temperature, rng)]


def pick(logits: Tensor, temperature: float, rng: torch.Generator) -> int:
    """Return the argmax, or a sample."""
    if temperature == 0:
        return int(logits.argmax())
    return int(torch.multinomial(torch.softmax(logits / temperature, -1), 1, generator=rng))


def repeats_a_line(text: str) -> bool:
    """Tell whether some non-blank line occurs three times in a row."""
    lines = [line for line in text.splitlines() if line.strip()]
    return any(len(set(lines[i : i + 3])) == 1 for i in range(len(lines) - 2))


def has_a_line_thrice(text: str) -> bool:
    """Tell whether some line of ten characters or more occurs three times anywhere."""
    lines = [line.strip() for line in text.splitlines() if len(line.strip()) >= 10]
    return any(lines.count(line) >= 3 for line in lines)


def completions(target: LeanLlama, splits: dict[str, Tensor], tokenizer: Tokenizer) -> str:
    """Return 20 completions of held-out prompts as Markdown, ten greedy, ten at temperature 1."""
    parts: list[str] = []
    starts = held_out_prompts(splits, 20, PROMPT)
    for i, (kind, temperature) in enumerate(KINDS):
        rows = generate(target, starts[i::2], 96, temperature=temperature, seed=1)
        for row in rows.tolist():
            prompt = tokenizer.decode(row[:PROMPT], skip_special_tokens=False)
            new = tokenizer.decode(row[PROMPT:], skip_special_tokens=False)
            parts.append(f"### {len(parts) + 1}, {kind}\n\n````text\n{prompt}⟦{new}⟧\n````\n")
    return "\n".join(parts)


def show(result: dict[str, Any]) -> None:
    """Print the results as a table."""
    console = Console()
    losses = ", ".join(f"{v:.3f} (windows of {k})" for k, v in result["held_out_loss"].items())
    console.print(f"held-out loss, nats per token: {losses}")
    table = Table("method", "temperature", "K", "acceptance length", "accepted by position")
    for name, length in result["acceptance_length"].items():
        method, kind, k = name.split(", ")
        rates = " ".join(f"{r:.2f}" for r in result["accepted_by_position"][f"{method}, {kind}"])
        table.add_row(method, kind, k[2:], f"{length:.2f}", rates)
    console.print(table)
    for name, share in result["loops"].items():
        console.print(f"outputs that repeat a line three times, {name}: {share}")
    if "literal" in result:
        console.print("literal decoding:", result["literal"])


def load_llama(folder: Path) -> LeanLlama:
    """Read an exported target (or draft model) in float32."""
    model = LeanLlama(read_shape(folder))
    tensors = load_file(folder / "model.safetensors")
    model.embed.data = tensors["model.embed_tokens.weight"].float()
    model.norm.data = tensors["model.norm.weight"].float()
    for i, layer in enumerate(model.layers):
        assert isinstance(layer, Layer)
        read_layer(layer, tensors, f"model.layers.{i}")
    return model.requires_grad_(False)


def load_eagle3(folder: Path) -> Eagle3Head:
    """Read an exported head in float32."""
    tensors = load_file(folder / "model.safetensors")
    head = Eagle3Head(
        read_shape(folder), tensors["d2t"] + torch.arange(tensors["d2t"].numel())
    )  # fmt: skip
    for name in ("fc", "norm", "lm_head"):
        getattr(head, name).data = tensors[f"{name}.weight"].float()
    head.hidden_norm.data = tensors["midlayer.hidden_norm.weight"].float()
    read_layer(head.layer, tensors, "midlayer")
    return head.requires_grad_(False)


def read_layer(layer: Layer, tensors: dict[str, Tensor], prefix: str) -> None:
    """Fill a layer from its public names."""

    def joined(*names: str) -> Tensor:
        return torch.cat([tensors[f"{prefix}.{name}.weight"].float() for name in names])

    layer.input_norm.data = joined("input_layernorm")
    layer.post_norm.data = joined("post_attention_layernorm")
    layer.qkv.data = joined("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    layer.o.data = joined("self_attn.o_proj")
    layer.gate_up.data = joined("mlp.gate_proj", "mlp.up_proj")
    layer.down.data = joined("mlp.down_proj")


def read_shape(folder: Path) -> Shape:
    """Return the sizes in config.json."""
    config = json.loads((folder / "config.json").read_text())
    return Shape(**{name: config[name] for name in Shape.__dataclass_fields__})


if __name__ == "__main__":
    main()
