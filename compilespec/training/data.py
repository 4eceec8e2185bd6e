"""The data that a drafter learns from: documents, conversations, and texts that the target wrote.

A line of a JSONL file is one of

    {"text": "..."}                                    a document
    {"messages": [..., {"role": "assistant", ...}]}    a conversation with its answers
    {"messages": [..., {"role": "user", ...}]}         a prompt, for the target to answer
    {"prompt": "..."}                                  the same
    {"prompt_token_ids": [...], "token_ids": [...]}    what the target answered

and a .txt file is one document.  Other keys are let be; "domain" names what a line is about.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from compilespec.errors import CheckpointError, InvalidOption, InvalidRequest
from compilespec.errors.suggest import not_there
from compilespec.runtime.chat import encode_chat
from compilespec.training.files import read_records

SUFFIXES = (".jsonl", ".txt")
FORMS = '{"text"}, {"messages"}, {"prompt"} or {"prompt_token_ids", "token_ids"}'


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A sequence: a drafter learns to propose the tokens from `start` on."""

    token_ids: tuple[int, ...]
    start: int
    """The first token that was written, not given: 1 for a document."""
    domain: str = ""

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A prompt for the target to answer."""

    prompt: Any
    """A text, or `{"messages": [...]}`."""
    domain: str = ""

    @property
    def key(self) -> str:
        """A name of the prompt."""
        return digest(json.dumps(self.prompt, sort_keys=True, ensure_ascii=False))


class Loader(Protocol):
    """A source of samples; `read_data` makes the usual one.

    `samples()` gives those that there are now, always in one order: those of an earlier call come
    first, unchanged.  So a run goes on where it stopped, also over data that has grown.
    """

    def samples(self) -> Sequence[Sample]:
        """Every sample so far.  Raises: SpecError."""
        ...


class FileData:
    """The samples of files, read again when they have grown."""

    def __init__(
        self, path: str | Path, tokenizer: Any, *, vocab_size: int, max_length: int
    ) -> None:
        self.path, self.tokenizer = Path(path), tokenizer
        self.vocab_size, self.max_length = vocab_size, max_length
        self.left_out: Counter[str] = Counter()  # counts by reason
        self._read: list[Sample] = []
        self._sizes: dict[Path, int] = {}
        self._lines: dict[Path, int] = {}  # lines of each file that are in `_read`

    def samples(self) -> Sequence[Sample]:
        """Raises: CheckpointError, InvalidOption."""
        for file in data_files(self.path):
            size = file.stat().st_size
            if self._sizes.get(file) == size:
                continue
            self._sizes[file] = size
            self._read += self._new_samples(file)
        if not self._read:
            raise InvalidOption(
                f"{self.path} holds nothing to learn from; expected lines of {FORMS}, of two "
                "tokens or more" + "".join(f"; {line}" for line in self.told())
            )
        return self._read

    def told(self) -> list[str]:
        """The parts that were left out so far, with the reasons."""
        return [f"left out: {count} {why}" for why, count in self.left_out.items()]

    def _new_samples(self, file: Path) -> Iterator[Sample]:
        if file.suffix == ".txt":
            if file not in self._lines:
                self._lines[file] = 1
                yield from self._cut(self._encode(read_text(file)), 1, "")
            return
        done = self._lines.get(file, 0)
        for number, record in read_records(file):
            if number > done:
                self._lines[file] = number
                yield from self._of_record(record, f"{file}:{number}")

    def _of_record(self, record: Mapping[str, Any], place: str) -> Iterator[Sample]:
        domain = str(record.get("domain", ""))
        if "token_ids" in record:
            given = self._checked(record.get("prompt_token_ids", ()), place)
            yield from self._cut(
                [*given, *self._checked(record["token_ids"], place)], len(given), domain
            )
        elif "text" in record:
            yield from self._cut(self._encode(record["text"]), 1, domain)
        elif has_answer(record):
            yield from self._of_messages(record["messages"], place, domain)
        else:
            known = "messages" in record or "prompt" in record
            raise InvalidOption(
                f"{place} is a prompt without an answer: let the target answer it, with generate="
                if known
                else f"{place}: expected {FORMS}, got the keys {', '.join(record) or 'none'}"
            )

    def _of_messages(self, messages: Any, place: str, domain: str) -> Iterator[Sample]:
        """A sample for each answer: its loss is on the answer alone."""
        for index, message in enumerate(messages):
            if message["role"] != "assistant" or index == 0:
                continue
            given = self._chat(messages[:index], place)
            whole = self._template(messages[: index + 1])
            if whole[: len(given)] != given:
                raise InvalidOption(
                    f"{place}: with an answer, the chat template writes other tokens before it "
                    "than without; let the target answer the prompt instead, with generate="
                )
            yield from self._cut(whole, len(given), domain)

    def _chat(self, messages: Any, place: str) -> list[int]:
        try:
            return list(encode_chat({"messages": messages}, self.tokenizer))
        except InvalidRequest as error:
            raise InvalidOption(f"{place}: {error}") from error

    def _template(self, messages: Any) -> list[int]:
        ids = self.tokenizer.apply_chat_template(messages, return_dict=False)
        return [int(one) for one in ids]

    def _encode(self, text: Any) -> list[int]:
        if self.tokenizer is None:
            raise InvalidOption(
                f"{self.path} holds text and the model has no tokenizer: give tokenizer=, or token "
                "ids"
            )
        return list(self.tokenizer.encode(str(text)))

    def _checked(self, ids: Any, place: str) -> list[int]:
        """Raises: InvalidOption where they are not ids of the target's vocabulary."""
        found = list(ids)
        bad = next((i for i in found if not isinstance(i, int) or not 0 <= i < self.vocab_size), 0)
        if bad:
            raise InvalidOption(
                f"{place}: token id {bad} is not one of this model's, which are 0 to "
                f"{self.vocab_size - 1}; was the text written by another model?"
            )
        return found

    def _cut(self, ids: Sequence[int], start: int, domain: str) -> Iterator[Sample]:
        """Documents in pieces of the largest length; of an answer, its beginning."""
        step = self.max_length
        if start > 1:
            ids = ids[:step]
        if len(ids) <= max(start, 1) + 1:
            what = "prompts that leave no room below the length of a sequence"
            short = "answers of fewer than two tokens" if start > 1 else "texts of one token"
            self.left_out[what if start >= step - 1 else short] += 1
            return
        for first in range(0, len(ids), step):
            piece = tuple(ids[first : first + step])
            if len(piece) > max(start, 1) + 1:
                yield Sample(token_ids=piece, start=max(start, 1), domain=domain)


def read_prompts(path: str | Path, *, as_messages: bool = False) -> tuple[list[Prompt], list[str]]:
    """The prompts of the files, each once, and the changes made to them, in words.

    Args:
        as_messages: a text becomes the message of a user, for a model with a chat template.
    Raises: CheckpointError, InvalidOption.
    """
    found: dict[str, Prompt] = {}
    num_lines = num_changed = 0
    for file in data_files(Path(path)):
        if file.suffix == ".txt":
            raise InvalidOption(f"{file} is a document; expected prompts, as JSON lines")
        for number, record in read_records(file):
            if has_answer(record) or not ("messages" in record or "prompt" in record):
                raise InvalidOption(
                    f"{file}:{number}: expected a prompt to answer, {{'prompt'}} or {{'messages'}} "
                    f"that end with the user's; got the keys {', '.join(record)}"
                )
            asked = {"messages": record["messages"]} if "messages" in record else record["prompt"]
            num_lines += 1
            if as_messages and isinstance(asked, str):
                asked = {"messages": [{"role": "user", "content": asked}]}
                num_changed += 1
            one = Prompt(prompt=asked, domain=str(record.get("domain", "")))
            found.setdefault(one.key, one)
    if not found:
        raise InvalidOption(
            f"{path} holds no prompt; expected lines of {{'prompt'}}, {{'messages'}}"
        )
    says = [f"prompts: {len(found)}"]
    if num_lines > len(found):
        says.append(f"{num_lines - len(found)} that came twice left out")
    if num_changed:
        says.append(f"{num_changed} bare texts asked through the model's chat template")
    return list(found.values()), [", ".join(says)]


def data_files(path: Path) -> list[Path]:
    """The file, or the files below a folder, in order.  Raises: CheckpointError."""
    if path.is_dir():
        files = sorted(one for one in path.rglob("*") if one.suffix in SUFFIXES)
        if files:
            return files
    elif path.is_file() and path.suffix in SUFFIXES:
        return [path]
    if not path.exists():
        raise CheckpointError(not_there(path))
    raise CheckpointError(
        f"{path}: expected a file with the suffix {' or '.join(SUFFIXES)}, or a folder of such"
    )


def read_text(path: Path) -> str:
    """Raises: CheckpointError."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read as UTF-8 text ({error})") from error


def has_answer(record: Mapping[str, Any]) -> bool:
    """True where a conversation holds an answer to learn."""
    messages: Any = record.get("messages")
    if "token_ids" in record or "text" in record:
        return True
    return bool(messages) and messages[-1].get("role") == "assistant"


def split_held_out(samples: Iterable[Sample], one_in: int) -> tuple[list[Sample], list[Sample]]:
    """Samples to learn from, and one in `one_in` to judge by: a hash of the given part decides, so
    that a sample is always on the same side.
    """
    learned: list[Sample] = []
    judged: list[Sample] = []
    for one in samples:
        given = one.token_ids[: max(one.start, 32)]
        is_held_out = int(digest(str(given))[:8], 16) % one_in == 0
        (judged if is_held_out else learned).append(one)
    return learned, judged


def digest(text: str) -> str:
    """A short name of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:32]
