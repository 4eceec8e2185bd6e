"""Other engines, each in a separate process, that may have its own environment.

An engine's script (`run_*.py`) is run by the interpreter that has the engine, imports nothing of
compilespec, and answers JSON lines (`pipe.py`).
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tools.bench.llama_cpp import write_gguf
from tools.bench.way import Setup, Unavailable

HERE = Path(__file__).parent
FLAGS = "--guest-python, of OpenVINO --openvino-python,"


class GuestWay:
    """Greedy decoding by an engine that a script of this folder starts.

    Args:
        engine: the script's name, and that of the package that it needs.
        python: the interpreter that has the package.
        options: further values for the script.
        max_batch_size: None: that of the others.
    Raises: Unavailable without the package, or where the engine does not start.
    """

    def __init__(
        self, setup: Setup, name: str, engine: str, python: str, *,
        max_batch_size: int | None = None, **options: Any,
    ) -> None:  # fmt: skip
        self.name = name
        self.max_batch_size = max_batch_size or setup.max_batch_size
        self._max_new_tokens = setup.max_new_tokens
        if subprocess.run([python, "-c", _HAS.format(engine)], check=False).returncode:
            raise Unavailable(f"{python} has no package {engine}; {FLAGS} names another")
        self._process = subprocess.Popen(
            [python, str(HERE / f"run_{engine}.py")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        given = {
            "model": str(self._model(setup)), "batch": self.max_batch_size,
            "length": setup.max_seq_len, "threads": setup.num_threads, **options,
        }  # fmt: skip
        try:
            self._ask(given)
        except RuntimeError as error:
            raise Unavailable(str(error)) from error

    def _model(self, setup: Setup) -> Path:
        """What the engine reads; asked for once its package was found."""
        return setup.model_dir

    def generate(
        self, prompts: list[list[int]], max_new_tokens: int | None = None
    ) -> list[list[int]]:
        asked = {"prompts": prompts, "max_new_tokens": max_new_tokens or self._max_new_tokens}
        tokens: list[list[int]] = self._ask(asked)["tokens"]
        return tokens

    def stats(self) -> dict[str, object]:
        return {}

    def close(self) -> None:
        self._process.communicate()

    def _ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            raise RuntimeError(f"{self.name} ended with status {self._process.wait()}")
        found: dict[str, Any] = json.loads(answer)
        return found


class OpenVinoWay(GuestWay):
    """OpenVINO GenAI on a GGUF file that is written for it, a prompt at a time.

    Args:
        kind: of the matrices, of GGUF's.
        num_draft_tokens: of its prompt lookup.
    """

    def __init__(
        self, setup: Setup, name: str, python: str, kind: str, num_draft_tokens: int | None = None
    ) -> None:
        if find_spec("gguf") is None:
            raise Unavailable("gguf is not installed")
        self._kind = kind
        self._folder = tempfile.TemporaryDirectory(prefix="compilespec-bench-")
        super().__init__(
            setup, name, "openvino_genai", python, max_batch_size=1,
            num_draft_tokens=num_draft_tokens,
        )  # fmt: skip

    def _model(self, setup: Setup) -> Path:
        path = Path(self._folder.name) / "model.gguf"
        write_gguf(setup.model, path, self._kind, setup.model_dir / "tokenizer.json")
        return path

    def close(self) -> None:
        super().close()
        self._folder.cleanup()


_HAS = "import importlib.util, sys; sys.exit(importlib.util.find_spec({!r}) is None)"
