"""The prompts: beginnings of Python code from no training corpus, 40 to 120 demo tokens each."""

from __future__ import annotations

import json
from pathlib import Path

PROMPTS_FILE = Path(__file__).with_name("prompts.json")


def load_prompts(num_prompts: int | None = None) -> dict[str, str]:
    """Name -> text, in the file's order."""
    prompts = json.loads(PROMPTS_FILE.read_text(encoding="utf-8"))
    return dict(list(prompts.items())[:num_prompts])


def encode_prompts(
    prompts: dict[str, str], model_dir: Path, vocab_size: int
) -> dict[str, list[int]]:
    """Name -> token ids by the model's tokenizer; without one, bytes modulo the vocabulary."""
    if (model_dir / "tokenizer.json").exists():
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
        return {name: tokenizer.encode(text).ids for name, text in prompts.items()}
    return {
        name: [byte % vocab_size for byte in text.encode()[:80]] for name, text in prompts.items()
    }
