"""Ranks started as commands, each with its own stderr: by this process, or by compilespec."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.support.live_server import VOCAB, toy_tokenizer
from tests.support.models import enliven

ROOT = Path(__file__).parents[2]
# Rank 1 runs in a separate folder, with the package that lies there, if one does.
SITE = """
import os, sys
other = os.path.join(os.path.dirname(__file__), "rank1")
if os.environ.get("RANK") == "1" and os.path.isdir(other):
    os.chdir(other)
    sys.path.insert(0, other)
"""


def save_toy(path: Path, seed: int = 0, max_positions: int = 128) -> Path:
    """A llama of one layer and four heads, with its tokenizer."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=48, intermediate_size=80, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=max_positions,
    )  # fmt: skip
    enliven(transformers.LlamaForCausalLM(config), "llama").save_pretrained(path)
    toy_tokenizer().save_pretrained(path)
    return path


def copy_package(place: Path) -> None:
    """compilespec as it is but for a comment, in `place`."""
    ignored = shutil.ignore_patterns("__pycache__", "*.safetensors", "*.so")
    shutil.copytree(ROOT / "compilespec", place / "compilespec", ignore=ignored)
    with (place / "compilespec" / "progress.py").open("a") as source:
        source.write("# another version\n")


@dataclass
class Command:
    """A process and where its stderr goes."""

    process: subprocess.Popen[str]
    log: Path

    @property
    def errors(self) -> list[str]:
        """The lines of stderr, without what libraries log on their way up."""
        lines = self.log.read_text().splitlines()
        return [line for line in lines if line.strip() and not is_noise(line)]


def is_noise(line: str) -> bool:
    """What torch and torchao say when they are imported, and Gloo's own log."""
    return line.startswith(("Failed to load ", "W1", "W0", "[Gloo]", "[W"))


def start_command(
    arguments: Sequence[str], folder: Path, *, name: str = "command", **place: int | str
) -> Command:
    """`python -m compilespec ARGUMENTS` in a folder; `place` goes into the environment."""
    environment: Mapping[str, str] = {
        **os.environ,
        "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}",
        "OMP_NUM_THREADS": "1",
        **{key: str(value) for key, value in place.items()},
    }
    (folder / "sitecustomize.py").write_text(SITE)
    log = folder / f"{name}.stderr"
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "compilespec", *arguments],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=folder,
            env=environment,
        )  # fmt: skip
    return Command(process, log)


def start_as_torchrun(arguments: Sequence[str], folder: Path, size: int) -> list[Command]:
    """The processes of a job, with the environment that torchrun gives; nobody watches them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common: dict[str, Any] = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": size
    }  # fmt: skip
    return [
        start_command(arguments, folder, name=f"rank{rank}", RANK=rank, LOCAL_RANK=rank, **common)
        for rank in range(size)
    ]


def wait_for_text(command: Command) -> None:
    """Until the command has printed something, so that it is generating."""
    assert command.process.stdout is not None
    assert command.process.stdout.read(1), command.log.read_text()[-3000:]


def wait_for_end(commands: Sequence[Command], seconds: float) -> list[int]:
    """The exit codes."""
    until = time.monotonic() + seconds
    return [one.process.wait(max(0.1, until - time.monotonic())) for one in commands]


def end_all(commands: Sequence[Command]) -> None:
    for one in commands:
        one.process.kill()
        one.process.communicate()


def rank_of(parent: int, rank: int) -> int:
    """The process id of a rank, among the children of the command."""
    for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
        environment = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        if f"RANK={rank}".encode() in environment:
            return int(child)
    raise AssertionError(f"no rank {rank}")
