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

from compilespec.cli.flags import add_engine_options, in_flags
from compilespec.cli.generate import add_sampling_options, compile_engine, set_threads, spec_of
from compilespec.errors import ContextExceeded, InvalidRequest, SpecError
from compilespec.runtime.sampling_params import SamplingParams

if TYPE_CHECKING:
    from compilespec.runtime.engine import Engine
    from compilespec.runtime.outputs import GenerationOutput

PROMPT, MORE = ">>> ", "... "
FENCE = '"""'  # around a question of several lines
MIN_ANSWER = 256  # tokens that are kept free for an answer, or a quarter of the context
UNUSED = (
    "prompt_logprobs", "adapters", "max_adapters", "max_adapter_rank", "tensor_parallel_size",
    "draft_tensor_parallel_size",
)  # fmt: skip
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
/load FILE        go on with messages that /save wrote
/exit             or Ctrl-D
A pasted block is one question; so are lines between {FENCE} and {FENCE}.
Ctrl-C stops an answer, and keeps what it has said.  Where the context is full, the oldest
questions and answers are left out."""


def add_parser(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "chat",
        help="hold a conversation in the terminal",
        description="Compile a model with a chat template (and a drafter), and talk to it.  /help "
        "lists what can be done there.",
    )
    add = parser.add_argument
    add_engine_options(parser, default=None, without=UNUSED)
    add("--system", metavar="TEXT", help="what the model is told first")
    add("--max-new-tokens", type=int, metavar="N", help="of an answer (default: what fits)")
    add_sampling_options(parser.add_argument_group("sampling").add_argument)
    parser.set_defaults(run=run, n=1, json=False)


def run(args: argparse.Namespace) -> int:
    given = {name: value for name in SETTINGS if (value := getattr(args, name, None)) is not None}
    given.pop("num_draft_tokens", None)  # of the engine
    SamplingParams(**given)  # check before minutes of compiling
    if args.n != 1:
        raise InvalidRequest("n: a conversation has one answer; leave it out")
    if args.stop:
        given["stop"] = tuple(args.stop)
    tokenizer = chat_tokenizer(args.model)
    set_threads(args.threads)
    with compile_engine(args, spec_of(args), tokenizer=tokenizer) as engine:
        Conversation(engine, given, system=args.system, args=args).hold()
    return 0


def chat_tokenizer(model: str) -> Any:
    """The model's tokenizer, before minutes of compiling.

    Raises: InvalidRequest (it has no chat template), ModelNotFound, CheckpointError.
    """
    from compilespec.tracing.load import find_tokenizer

    tokenizer = find_tokenizer(model)
    if not getattr(tokenizer, "chat_template", None):
        raise InvalidRequest(
            f"{model} has no chat template: expected a chat model; `compilespec generate` "
            "continues texts with any"
        )
    return tokenizer


class Conversation:
    """Questions from stdin, answers to stdout.

    Args:
        settings: fields of SamplingParams; the others are the checkpoint's.
        system: what the model is told first.
        args: of the command, whose flags errors name.
    """

    def __init__(
        self, engine: Engine, settings: dict[str, Any], *, system: str | None = None,
        args: argparse.Namespace | None = None,
    ) -> None:  # fmt: skip
        self.messages: list[dict[str, str]] = []
        self.settings = dict(settings)
        self._engine, self._system, self._args = engine, system, args or argparse.Namespace()
        self._first = 0  # of the messages that the context has room for
        self._is_terminal = sys.stdin.isatty()

    def hold(self) -> None:
        """Until /exit, or the end of the input."""
        if self._is_terminal:
            with contextlib.suppress(ImportError):
                import readline  # gives `input` a history

                readline.parse_and_bind("set enable-bracketed-paste on")  # a block is one line
            _say("/help lists commands; Ctrl-C stops an answer, Ctrl-D ends the conversation")
        while (line := self._read()) is not None:
            try:
                if line.startswith("/") and "\n" not in line:
                    if not self._command(*line[1:].partition(" ")[::2]):
                        return
                elif line:
                    self.ask(line)
            except SpecError as error:
                _say(f"error: {in_flags(' '.join(str(error).split()), self._args)}")

    def ask(self, question: str) -> None:
        """Answer a question, and keep both.  Raises: SpecError; nothing is kept then."""
        first = self._first
        self.messages.append({"role": "user", "content": question})
        try:
            text = self._answer()
        except BaseException:
            self.messages.pop()
            self._first = first
            raise
        self.messages.append({"role": "assistant", "content": text})

    def _answer(self) -> str:
        """Print the answer as it comes; an interrupt stops it alone."""
        prompt = self._prompt()
        room = self._engine.geometry.config.max_seq_len - len(prompt)
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

    @property
    def _told(self) -> list[dict[str, str]]:
        return [{"role": "system", "content": self._system}] if self._system else []

    def _prompt(self) -> list[int]:
        """The conversation's ids; its oldest turns are left out where there is no room for them
        and an answer.  Raises: InvalidRequest.
        """
        most, first = self._engine.geometry.config.max_seq_len, self._first
        wanted = min(self.settings.get("max_new_tokens", MIN_ANSWER), most // 4)
        while True:
            is_last = len(self.messages) - self._first == 1
            try:
                messages = [*self._told, *self.messages[self._first :]]
                ids = self._engine.encode({"messages": messages})
                if is_last or len(ids) + wanted <= most:
                    break
            except ContextExceeded:
                if is_last:
                    raise
            self._first += 2
        if self._first > first:
            _say(
                f"the context is full: {self._first // 2} of {len(self.messages) // 2} questions, "
                "the oldest, are left out with their answers (--max-seq-len makes room for more)"
            )
        return ids

    def _tell(
        self, num_tokens: int, num_prompt: int, seconds: float, output: GenerationOutput | None
    ) -> None:
        """The status line."""
        parts = ["stopped"] if output is None else []
        parts += [f"{num_tokens} tokens", f"{num_tokens / max(seconds, 1e-9):.1f} tokens/s"]
        if output is not None and output.emitted_per_step:
            parts.append(f"{output.acceptance_length:.2f} tokens a verify step")
            parts.append(f"{output.num_accepted_drafts} of them drafts")
        most = self._engine.geometry.config.max_seq_len
        parts.append(f"context {num_prompt + num_tokens} of {most}")
        if output is not None and output.finish_reason == "length":
            parts.append("cut at the limit")
        _say("; ".join(parts))

    def _command(self, name: str, rest: str) -> bool:
        """Run a command; True where the conversation goes on.  Raises: InvalidRequest."""
        rest = rest.strip()
        if name in ("exit", "quit"):
            return False
        if name == "reset":
            self._take([])
        elif name == "undo":
            self._take(self.messages[:-2])
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
        elif name == "load":
            self._load(rest)
        elif name == "help":
            _say(HELP)
        else:
            raise InvalidRequest(f"there is no command /{name}; /help lists them")
        return True

    def _again(self) -> None:
        if not self.messages:
            raise InvalidRequest("there is no question yet")
        question = self.messages[-2]["content"]
        self._take(self.messages[:-2])
        self.ask(question)

    def _take(self, messages: list[dict[str, str]]) -> None:
        """Continue from these turns; recomputes which of them fit."""
        self.messages, self._first = messages, 0

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
        try:
            text = json.dumps([*self._told, *self.messages], indent=2, ensure_ascii=False)
            Path(name).write_text(f"{text}\n", encoding="utf-8")
        except OSError as error:
            raise InvalidRequest(f"/save: {error}; give the name of a file") from error

    def _load(self, name: str) -> None:
        try:
            given = json.loads(Path(name).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InvalidRequest(f"/load: {error}; give a file that /save wrote") from error
        is_list = isinstance(given, list) and all(
            isinstance(one, dict) and isinstance(one.get("content"), str) for one in given
        )
        roles = [one.get("role") for one in given] if is_list else []
        told = roles[:1] == ["system"]
        turns = roles[told:]
        if not is_list or turns != ["user", "assistant"] * (len(turns) // 2):
            raise InvalidRequest(
                f"/load {name}: expected messages by turns of user and assistant, after one of "
                "system if there is one; give a file that /save wrote"
            )
        self._system = given[0]["content"] if told else None
        self._take(given[told:])
        _say(f"{len(turns) // 2} questions and answers loaded")

    def _read(self) -> str | None:
        """A line, or a block between two fences; None at the end."""
        while True:
            try:
                line = self._input(PROMPT).strip()
                return self._block(line) if line.startswith(FENCE) else line
            except EOFError:
                return None
            except KeyboardInterrupt:
                _say("\n/exit or Ctrl-D ends the conversation")

    def _block(self, first: str) -> str:
        """The lines from a fence to the next one, or to the end of the input."""
        text = first.removeprefix(FENCE)
        with contextlib.suppress(EOFError):
            while not text.rstrip().endswith(FENCE):
                text += f"\n{self._input(MORE)}"
        return text.rstrip().removesuffix(FENCE).strip("\n")

    def _input(self, prompt: str) -> str:
        return input(prompt if self._is_terminal else "")


def _say(text: str) -> None:
    is_plain = not sys.stderr.isatty()
    print(text if is_plain else f"\033[2m{text}\033[0m", file=sys.stderr, flush=True)
