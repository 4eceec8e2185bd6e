"""docs/extending.md, followed to the letter: its code, put where it says, passes its commands.

The walks run in a copy of the project, in one process.  What takes long is left to the slow run.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.documents import PAGES, ROOT

PAGE = PAGES["docs/extending.md"]
COPIED = (
    "ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "Dockerfile", "README.md",
    "pyproject.toml",
)  # fmt: skip
TREES = ("compilespec", "docs", "examples", "tests", "tools")
LINKED = ("compilespec/demo/checkpoint", "tests/data")  # read only, and large
LONG = ("tests/inspect/test_faults.py",)
DRIVER = """
import json, runpy, sys
failed = []
for command in json.loads(sys.argv[1]):
    sys.argv = command[2:]
    try:
        runpy.run_module(command[2], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code:
            failed.append(" ".join(command))
sys.exit("\\n".join(["failed:", *failed]) if failed else 0)
"""


@dataclass(frozen=True, kw_only=True)
class Block:
    """One fenced block."""

    language: str
    path: str  # of the file it changes; "" of a console's
    text: str


def blocks(page: str) -> Iterator[Block]:
    """In order; a block without a file's name is for the file named last."""
    path = ""
    for name, language, text in re.findall(
        r"^`([\w./]+)`:$|^```(\w+)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL
    ):
        path = name or path
        if language:
            yield Block(language=language, path="" if language == "console" else path, text=text)


def walks() -> dict[str, str]:
    """The walks, by heading."""
    parts = re.split(r"^## (.+)\n", PAGE, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def apply(block: Block, root: Path) -> None:
    """Put a block where the page says."""
    path = root / block.path
    if block.language != "diff":
        path.parent.mkdir(parents=True, exist_ok=True)
        text = f"\n\n{block.text}" if path.exists() else block.text
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
        return
    lines = block.text.splitlines(keepends=True)
    assert all(line[0] in " +-\n" for line in lines), block.text
    before = "".join(line[1:] or line for line in lines if line[0] != "+")
    after = "".join(line[1:] or line for line in lines if line[0] != "-")
    text = path.read_text(encoding="utf-8")
    assert text.count(before) == 1, f"{block.path} has {text.count(before)} places like\n{before}"
    path.write_text(text.replace(before, after), encoding="utf-8")


def commands(block: Block) -> Iterator[list[str]]:
    for line in block.text.splitlines():
        python, *rest = shlex.split(line.removeprefix("$ "))
        assert (python, rest[0]) == ("python", "-m"), line
        yield [python, *rest]


def copy_of_the_project(root: Path) -> Path:
    ignored = shutil.ignore_patterns("__pycache__", "checkpoint", "data", "results", "node_modules")
    for name in TREES:
        shutil.copytree(ROOT / name, root / name, ignore=ignored)
    for name in COPIED:
        shutil.copy(ROOT / name, root / name)
    for name in LINKED:
        (root / name).symlink_to(ROOT / name)
    (root / "tools" / "bench" / "results").symlink_to(ROOT / "tools" / "bench" / "results")
    return root


def run(each: Sequence[list[str]], root: Path, **variables: str) -> str:
    """All commands, one after another in one process; returns what they printed."""
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    environment |= {"PYTEST_ADDOPTS": "-q -p no:cacheprovider", **variables}
    environment = {k: v for k, v in environment.items() if not k.startswith("PYTEST_XDIST")}
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, json.dumps(each)],
        cwd=root, env=environment, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-2000:]}"
    return done.stdout


def test_the_walks_change_places_that_there_are(tmp_path: Path) -> None:
    """All four in one copy; every module that they leave can be compiled to bytecode."""
    root = copy_of_the_project(tmp_path)
    for walk in walks().values():
        for block in blocks(walk):
            if block.language != "console":
                apply(block, root)
                if block.path.endswith(".py"):
                    compile((root / block.path).read_text(encoding="utf-8"), block.path, "exec")


def test_the_walks_work(tmp_path: Path) -> None:
    """All four in one copy, without the kernel and without what takes long."""
    root = copy_of_the_project(tmp_path)
    found: list[list[str]] = []
    for walk in walks().values():
        for block in blocks(walk.split("\n5\\. A kernel")[0]):
            if block.language == "console":
                found += commands(block)
            else:
                apply(block, root)
    assert len(found) == 9
    printed = run([one for one in found if not set(one) & set(LONG)], root)
    assert printed.count(" passed") == 7
    assert "period" in printed


@pytest.mark.parametrize("title", walks())
def test_each_walk_works_alone_and_to_its_end(title: str, tmp_path: Path) -> None:
    """The operator's kernel is compiled: into a separate cache."""
    root = copy_of_the_project(tmp_path)
    own = {"COMPILESPEC_CACHE_DIR": str(tmp_path / "cache")} if title == "An operator" else {}
    for block in blocks(walks()[title]):
        if block.language == "console":
            run(list(commands(block)), root, **own)
        else:
            apply(block, root)
