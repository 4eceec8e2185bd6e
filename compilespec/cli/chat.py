"""`compilespec chat`: a conversation in the terminal.  Text goes to stdout, the rest to stderr."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compilespec.cli.flags import (
    add_draft_vocab_options,
    add_placement_options,
    add_tree_option,
)
from compilespec.cli.generate import (
    add_quantize_options,
    add_sampling_options,
    compile_engine,
    draft_counts,
    set_threads,
    spec_of,
)
from compilespec.errors import InvalidRequest, SpecError
from compilespec.runtime.sampling_params import SamplingParams

if TYPE_CHECKING:
    from compilespec.runtime.engine import Engine
    from compilespec.runtime.outputs import GenerationOutput

PROMPT = ">>> "
SETTINGS: dict[str, Callable[[str], Any]] = {
    "temperature": float, "top_p": float, "top_k": int, "min_p": float, "seed": int,
    "max_new_tokens": int, "repetition_penalty": float, "num_draft_tokens": int,
}  # fmt: skip
HELP = f"""\
/reset            begin anew; what /system said stays
/undo             take back the last question and its answer
/again            answer the last question again
/system TEXT      what the model is told first; without TEXT nothing
/set NAME VALUE   {", ".join(SETTINGS)}; without VALUE the model's own
/settings         what was set
/save FILE        the messages as JSON
/exit             or Ctrl-D
Ctrl-C stops an answer, and keeps what it has said."""


def add_parser(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "chat",
        help="hold a conversation in the terminal",
        description="Compile a model with a chat template (and a drafter), and talk to it.  /help "
        "lists what can be done there.",
    )
    add = parser.add_argument
    add(
        "--model",
        required=True,
        metavar="DIR|NAME",
        help="target: a directory, org/name of the hub, or a GGUF file, with a chat template",
    )
    add("--spec", help="drafting method (default: none)")
    add("--draft", metavar="DIR|NAME", help="drafter checkpoint (default: beside the target)")
    add(
        "--num-draft-tokens",
        type=draft_counts,
        metavar="K",
        help="drafts per step (default: checkpoint's); several, as in 0,2,5: each step uses the "
        "fastest",
    )
    add("--system", metavar="TEXT", help="what the model is told first")
    add("--max-new-tokens", type=int, metavar="N", help="of an answer (default: what fits)")
    add("--backend", choices=("inductor", "eager"), help="default: inductor")
    add_placement_options(add)
    add_quantize_options(add)
    add_draft_vocab_options(add)
    add_tree_option(add)
    add("--threads", type=int, metavar="N", help="CPU threads (default: torch's)")
    add_sampling_options(parser.add_argument_group("sampling").add_argument)
    parser.set_defaults(run=run, json=False)


def run(args: argparse.Namespace) -> int:
    given = {name: value for name in SETTINGS if (value := getattr(args, name, None)) is not None}
    given.pop("num_draft_tokens", None)  # the engine's
    SamplingParams(**given)  # check before minutes of compiling
    if args.n != 1:
        raise InvalidRequest("n: a conversation has one answer; leave it out")
    set_threads(args.threads)
    with compile_engine(args, spec_of(args), max_batch_size=1) as engine:
        if not getattr(engine.tokenizer, "chat_template", None):
            raise InvalidRequest(
                f"{args.model} has no chat template: expected a chat model; `compilespec generate` "
                "continues texts with any"
            )
        Conversation(engine, given, system=args.system).hold()
    return 0


class Conversation:
    """Questions from stdin, answers to stdout.

    Args:
        settings: fields of SamplingParams; the others are the checkpoint's.
        system: what the model is told first.
    """

    def __init__(
        self, engine: Engine, settings: dict[str, Any], *, system: str | None = None
    ) -> None:
        self.messages: list[dict[str, str]] = []
        self.settings = dict(settings)
        self._engine, self._system = engine, system
        self._is_terminal = sys.stdin.isatty()

    def hold(self) -> None:
        """Until /exit, or the end of the input."""
        if self._is_terminal:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  (gives `input` a history)
            _say("/help lists commands; Ctrl-C stops an answer, Ctrl-D ends the conversation")
        while (line := self._read()) is not None:
            try:
                if line.startswith("/"):
                    if not self._command(*line[1:].partition(" ")[::2]):
                        return
                elif line:
                    self.ask(line)
            except SpecError as error:
                _say(f"error: {' '.join(str(error).split())}")

    def ask(self, question: str) -> None:
        """Answer a question, and keep both.  Raises: SpecError; nothing is kept then."""
        self.messages.append({"role": "user", "content": question})
        try:
            text = self._answer()
        except BaseException:
            self.messages.pop()
            raise
        self.messages.append({"role": "assistant", "content": text})

    def _answer(self) -> str:
        """Print the answer as it comes; an interrupt stops it alone."""
        told = [{"role": "system", "content": self._system}] if self._system else []
        prompt = self._engine.encode({"messages": [*told, *self.messages]})
        room = self._engine.geometry.max_seq_len - len(prompt)
        params = SamplingParams.of(self._engine, **{"max_new_tokens": room, **self.settings})
        text, started, output = "", time.perf_counter(), None
        num_tokens = 0
        try:
            with contextlib.closing(self._engine.stream(prompt, params)) as deltas:
                for delta in deltas:
                    text += delta.text
                    num_tokens += len(delta.token_ids)
                    output = delta.output or output
                    print(delta.text, end="", flush=True)
        except KeyboardInterrupt:
            pass
        print(flush=True)
        if output is not None and output.error is not None:
            raise output.error
        self._tell(num_tokens, len(prompt), time.perf_counter() - started, output)
        return text

    def _tell(
        self, num_tokens: int, num_prompt: int, seconds: float, output: GenerationOutput | None
    ) -> None:
        """The status line."""
        parts = ["stopped"] if output is None else []
        parts += [f"{num_tokens} tokens", f"{num_tokens / max(seconds, 1e-9):.1f} tokens/s"]
        if output is not None and output.emitted_per_step:
            parts.append(f"{output.acceptance_length:.2f} tokens a verify step")
            parts.append(f"{output.num_accepted_drafts} of them drafts")
        most = self._engine.geometry.max_seq_len
        parts.append(f"context {num_prompt + num_tokens} of {most}")
        if output is not None and output.finish_reason == "length":
            parts.append("cut at the limit")
        _say("; ".join(parts))

    def _command(self, name: str, rest: str) -> bool:
        """Whether the conversation goes on.  Raises: InvalidRequest."""
        rest = rest.strip()
        if name in ("exit", "quit"):
            return False
        if name == "reset":
            self.messages.clear()
        elif name == "undo":
            del self.messages[-2:]
        elif name == "again":
            self._again()
        elif name == "system":
            self._system = rest or None
        elif name == "set":
            self._set(*rest.partition(" ")[::2])
        elif name == "settings":
            _say(json.dumps({**self._engine.generation_defaults, **self.settings}))
        elif name == "save":
            self._save(rest)
        elif name == "help":
            _say(HELP)
        else:
            raise InvalidRequest(f"there is no command /{name}; /help lists them")
        return True

    def _again(self) -> None:
        if not self.messages:
            raise InvalidRequest("there is no question yet")
        question = self.messages[-2]["content"]
        del self.messages[-2:]
        self.ask(question)

    def _set(self, name: str, value: str) -> None:
        if name not in SETTINGS:
            raise InvalidRequest(f"/set: expected one of {', '.join(SETTINGS)}; got {name!r}")
        if not value.strip():
            self.settings.pop(name, None)
            return
        try:
            made = {**self.settings, name: SETTINGS[name](value)}
        except ValueError as error:
            raise InvalidRequest(f"/set {name}: expected a number, got {value!r}") from error
        SamplingParams(**made)
        self.settings = made

    def _save(self, name: str) -> None:
        told = [{"role": "system", "content": self._system}] if self._system else []
        try:
            text = json.dumps([*told, *self.messages], indent=2, ensure_ascii=False)
            Path(name).write_text(f"{text}\n", encoding="utf-8")
        except OSError as error:
            raise InvalidRequest(f"/save: {error}; give the name of a file") from error

    def _read(self) -> str | None:
        """A line; None at the end."""
        while True:
            try:
                return input(PROMPT if self._is_terminal else "").strip()
            except EOFError:
                return None
            except KeyboardInterrupt:
                _say("\n/exit or Ctrl-D ends the conversation")


def _say(text: str) -> None:
    is_plain = not sys.stderr.isatty()
    print(text if is_plain else f"\033[2m{text}\033[0m", file=sys.stderr, flush=True)
