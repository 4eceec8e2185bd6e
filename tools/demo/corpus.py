"""The demo corpus: Python sources that any machine with the pinned dependencies already has.

The standard library is the domain of interest: only its files are held out, and only its training
files train the tokenizer.  Sources of the pinned packages widen the target's training text.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

END_OF_TEXT = "<|endoftext|>"
VOCAB_SIZE = 2048
HELD_OUT_ONE_IN = 17
MAX_FILE_BYTES = 200_000
SKIPPED_FOLDERS = frozenset(
    ("test", "tests", "testing", "idle_test", "idlelib", "lib2to3", "encodings", "site-packages")
    + ("turtledemo", "ensurepip", "pydoc_data", "__pycache__", "_vendor", "vendor", "conformance")
)


@dataclass(frozen=True, kw_only=True)
class Package:
    """An installed package whose own sources join the training text."""

    name: str
    # Public version the recorded corpus hash was made with.
    version: str
    licence: str
    # Bytes taken, smallest content hash first, so that the choice needs no random state.
    quota_bytes: int


PACKAGES = (
    Package(name="torch", version="2.13.0", licence="BSD-3-Clause", quota_bytes=5_000_000),
    Package(name="transformers", version="5.23.0", licence="Apache-2.0", quota_bytes=4_000_000),
    Package(name="sympy", version="1.14.0", licence="BSD-3-Clause", quota_bytes=4_000_000),
    Package(name="numpy", version="2.4.6", licence="BSD-3-Clause", quota_bytes=2_000_000),
)


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Texts of the three splits, in a fixed order, with the hash of each."""

    stdlib: tuple[str, ...]
    packages: tuple[str, ...]
    held_out: tuple[str, ...]
    held_out_names: tuple[str, ...]

    def hashes(self) -> dict[str, str]:
        """Return one sha256 per split: the corpus is the same if and only if they are."""
        return {
            name: _digest("\0".join(getattr(self, name)))
            for name in ("stdlib", "packages", "held_out")
        }


def load_corpus(*, with_packages: bool = True) -> Corpus:
    """Read the corpus.

    Args:
        with_packages: read the pinned packages too; the tokenizer and the held-out text need only
            the standard library, so checks of those can skip this.
    Raises:
        RuntimeError: a pinned package has another version than the one named in PACKAGES.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    seen: set[str] = set()
    train: list[str] = []
    held_out: list[tuple[str, str]] = []
    for path in python_files(root):
        text = _read(path)
        if text is None or (digest := _digest(text)) in seen:
            continue
        seen.add(digest)
        if int(digest[:8], 16) % HELD_OUT_ONE_IN == 0:
            held_out.append((str(path.relative_to(root)), text))
        else:
            train.append(text)
    held_lines = {line for _, text in held_out for line in _long_lines(text)}
    train = [text for text in train if not _copies(text, held_lines)]
    extra: list[str] = []
    for package in PACKAGES if with_packages else ():
        extra += _package_texts(package, seen, held_lines)
    return Corpus(
        stdlib=tuple(train),
        packages=tuple(extra),
        held_out=tuple(text for _, text in held_out),
        held_out_names=tuple(name for name, _ in held_out),
    )


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Train the byte-level BPE of VOCAB_SIZE tokens; the same texts give the same file."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def tokenizer_hash(tokenizer: Tokenizer) -> str:
    """Return the sha256 of the tokenizer's vocabulary and merges."""
    return _digest(json.dumps(json.loads(tokenizer.to_str())["model"], sort_keys=True))


def end_of_text(tokenizer: Tokenizer) -> int:
    """Return the id of the token that separates files."""
    return int(tokenizer.token_to_id(END_OF_TEXT) or 0)


def encode_stream(tokenizer: Tokenizer, texts: Iterable[str]) -> Tensor:
    """Return one int32 stream: an end-of-text token before each file and one at the end."""
    end = end_of_text(tokenizer)
    ids = [end]
    for text in texts:
        ids += tokenizer.encode(text).ids
        ids.append(end)
    return torch.tensor(ids, dtype=torch.int32)


def encoded_splits(cache: Path) -> tuple[Tokenizer, dict[str, Tensor], dict[str, str]]:
    """Return the tokenizer, the token stream of each split and the hashes; cached under `cache`."""
    corpus = load_corpus()
    hashes = corpus.hashes()
    tokenizer = train_tokenizer(corpus.stdlib)
    hashes["tokenizer"] = tokenizer_hash(tokenizer)
    path = cache / f"tokens-{_digest(json.dumps(hashes))[:16]}.pt"
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        splits = {
            name: encode_stream(tokenizer, getattr(corpus, name))
            for name in ("stdlib", "packages", "held_out")
        }
        torch.save(splits, path)
    return tokenizer, torch.load(path), hashes


def sample_windows(
    splits: dict[str, Tensor], *, batch: int, length: int, stdlib_share: float, seed: int, step: int
) -> Tensor:
    """Return int64 ids [batch, length] of random windows; a function of (seed, step) alone."""
    rng = torch.Generator().manual_seed(seed * 1_000_003 + step)
    rows = []
    for _ in range(batch):
        pick = torch.rand((), generator=rng).item() < stdlib_share
        stream = splits["stdlib" if pick else "packages"]
        start = int(torch.randint(stream.numel() - length, (), generator=rng))
        rows.append(stream[start : start + length])
    return torch.stack(rows).long()


def python_files(root: Path) -> Iterator[Path]:
    """Source files below `root`, in a fixed order; no tests, generated or vendored ones."""
    for folder, names, files in os.walk(root):
        names[:] = sorted(n for n in names if n not in SKIPPED_FOLDERS and "config-" not in n)
        for name in sorted(files):
            if name.endswith(".py") and not name.startswith(("_sysconfigdata", "test_")):
                yield Path(folder, name)


def _read(path: Path) -> str | None:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    return text if 200 <= len(text.encode()) <= MAX_FILE_BYTES else None


def _package_texts(package: Package, seen: set[str], held_lines: set[str]) -> list[str]:
    installed = importlib.metadata.version(package.name).split("+")[0]
    if installed != package.version:
        raise RuntimeError(
            f"the demo corpus is defined with {package.name} {package.version}, found {installed}; "
            f"install that version, or change PACKAGES and expect other losses"
        )
    spec = importlib.util.find_spec(package.name)
    assert spec is not None
    assert spec.origin is not None
    found: dict[str, str] = {}
    for path in python_files(Path(spec.origin).parent):
        text = _read(path) if path.name != "version.py" else None
        if text is not None and (digest := _digest(text)) not in seen:
            found[digest] = text
    taken: list[str] = []
    used = 0
    for digest in sorted(found):
        text = found[digest]
        if used + len(text.encode()) > package.quota_bytes:
            break
        if not _copies(text, held_lines):
            taken.append(text)
            used += len(text.encode())
    seen.update(found)
    return taken


def _long_lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if len(line.strip()) >= 30]


def _copies(text: str, held_lines: set[str]) -> bool:
    """Tell whether a third of the file's long lines occur in the held-out files."""
    lines = _long_lines(text)
    return bool(lines) and sum(line in held_lines for line in lines) * 3 > len(lines)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
