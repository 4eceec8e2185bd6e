"""Functions, docstrings and documentation of the standard library and the installed packages.

Files are parsed, never imported.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.metadata
import importlib.util
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tools.demo.corpus import python_files

PACKAGES = ("torch", "transformers", "numpy", "sympy", "rich", "safetensors", "huggingface_hub")
MAX_FILES = 150  # of one package, by hash
CODE_CHARS = (120, 1400)
PROSE_CHARS = (200, 1500)


@dataclass(frozen=True, kw_only=True)
class Function:
    """A documented function or class of a package."""

    name: str
    package: str
    docstring: str
    code: str  # without its docstring

    @property
    def signature(self) -> str:
        """The first lines of the code, up to the colon that begins the body."""
        head = re.split(r":\s*\n", self.code, maxsplit=1)[0]
        return f"{head}:"


@dataclass(frozen=True, kw_only=True)
class Passage:
    """Some paragraphs of documentation."""

    title: str
    text: str


@functools.cache
def functions() -> tuple[Function, ...]:
    """Every documented function of moderate length."""
    return tuple(_functions())


def _functions() -> Iterator[Function]:
    for package, root in _roots():
        for path in sorted(python_files(root), key=_hash_of)[:MAX_FILES]:
            yield from _functions_of(path, package)


def passages() -> Iterator[Passage]:
    """The language reference that pydoc carries, what packages say of themselves, and what modules
    and classes do.
    """
    yield from _pydoc_topics()
    for package, root in _roots():
        for path in sorted(python_files(root), key=_hash_of)[:MAX_FILES]:
            yield from _docstrings_of(path, package)
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"] or ""
        _, _, body = (distribution.read_text("METADATA") or "").partition("\n\n")
        for text in _cut(_without_markup(body)):
            yield Passage(title=name, text=text)


def _hash_of(path: Path) -> str:
    return hashlib.sha256("/".join(path.parts[-3:]).encode()).hexdigest()


def _roots() -> Iterator[tuple[str, Path]]:
    yield "python", Path(sysconfig.get_paths()["stdlib"])
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            yield name, Path(spec.origin).parent


def _docstrings_of(path: Path, package: str) -> Iterator[Passage]:
    tree = _parsed(path)
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, ast.Module | ast.ClassDef):
            name = getattr(node, "name", path.stem)
            for text in _cut(_without_markup(ast.get_docstring(node) or "")):
                yield Passage(title=f"{name} ({package})", text=text)


def _parsed(path: Path) -> ast.Module | None:
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, SyntaxError, ValueError):
        return None


def _functions_of(path: Path, package: str) -> Iterator[Function]:
    tree = _parsed(path)
    if tree is None:
        return
    lines = path.read_text(encoding="utf-8").splitlines()
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or node.name.startswith("__"):
            continue
        docstring = ast.get_docstring(node)
        if docstring is None or len(node.body) < 2:
            continue
        code = _without_docstring(lines, node)
        if CODE_CHARS[0] <= len(code) <= CODE_CHARS[1] and 40 <= len(docstring) <= 1200:
            yield Function(name=node.name, package=package, docstring=docstring, code=code)


def _without_docstring(lines: list[str], node: ast.FunctionDef) -> str:
    first, last = node.lineno - 1, node.end_lineno or node.lineno
    doc = node.body[0]
    kept = lines[first : doc.lineno - 1] + lines[doc.end_lineno : last]
    indent = min((len(x) - len(x.lstrip()) for x in kept if x.strip()), default=0)
    return "\n".join(line[indent:].rstrip() for line in kept)


def _pydoc_topics() -> Iterator[Passage]:
    path = Path(sysconfig.get_paths()["stdlib"], "pydoc_data", "topics.py")
    if not path.is_file():
        return
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and isinstance(value, ast.Constant):
                    for text in _cut(str(value.value)):
                        yield Passage(title=str(key.value), text=text)


def _without_markup(text: str) -> str:
    """Without badges, links, images, HTML and tables, of which little is prose."""
    text = re.sub(r"<[^>]+>|!\[[^\]]*\]\([^)]*\)|\.\. \S+::.*", " ", text)
    text = re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", text)
    return "\n".join(x for x in text.splitlines() if "|" not in x and "http" not in x)


def _cut(text: str) -> Iterator[str]:
    """Runs of paragraphs of moderate length."""
    run = ""
    for paragraph in re.split(r"\n\s*\n", text):
        one = paragraph.strip("\n")
        if len(one) > PROSE_CHARS[1]:
            run = ""
            continue
        if len(run) + len(one) > PROSE_CHARS[1]:
            if len(run) >= PROSE_CHARS[0]:
                yield run
            run = ""
        run = f"{run}\n\n{one}" if run else one
    if len(run) >= PROSE_CHARS[0]:
        yield run
