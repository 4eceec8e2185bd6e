"""Measures how well the code and the documents can be read: `python -m tools.house`.

Every figure has a limit, and the value that it had before the house was put in order.  The command
fails where a figure is past its limit.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGE, PASSES = ROOT / "compilespec", ROOT / "compilespec/passes"
RECORDS = (
    "CompileFields", "ProgramConfig", "PassContext", "SpecProgram", "Geometry", "ServingOptions",
)  # fmt: skip
ADAPTIVE = ("draft_policy", "adaptive", "step_costs", "acceptance_rates", "exploration", "evidence")
NOT_A_SUBJECT = ("What", "Whether", "How", "Where", "Of", "Those")
LETTERS = re.compile(r"_([A-Z][A-Z0-9]*)$")  # the shape suffix of a name: logits_BSV
PHRASES = re.compile(
    r"\b(so many|whatever|all the same|of (?:one's|its|their) own)\b(?! [a-z])", re.I
)


class Figure(NamedTuple):
    name: str
    before: float
    most: float
    measure: Callable[[], float]


# --- reading ---


@cache
def read(folder: Path, pattern: str = "*.py") -> dict[Path, str]:
    return {path: path.read_text() for path in sorted(folder.rglob(pattern))}


@cache
def trees(folder: Path) -> dict[Path, ast.Module]:
    return {path: ast.parse(text) for path, text in read(folder).items()}


def walk(folder: Path, *kinds: type[ast.AST]) -> Iterator[ast.AST]:
    for tree in trees(folder).values():
        yield from (node for node in ast.walk(tree) if isinstance(node, kinds))


def functions(folder: Path) -> Iterator[ast.FunctionDef]:
    for node in walk(folder, ast.FunctionDef):
        assert isinstance(node, ast.FunctionDef)
        yield node


def count(pattern: str, folder: Path = PACKAGE) -> int:
    """Lines with the pattern, the line that defines it left out."""
    found = re.compile(pattern)
    return sum(bool(found.search(line)) for text in read(folder).values()
               for line in text.splitlines() if "def find_role" not in line)  # fmt: skip


def num_lines(folder: str) -> int:
    """Lines of Python."""
    return sum(text.count("\n") for text in read(ROOT / folder).values())


def num_words(*patterns: str) -> int:
    return sum(len(path.read_text().split()) for one in patterns for path in ROOT.glob(one))


# --- the step as tensor code ---


def any_percent() -> float:
    """Parameters with a shape suffix that are annotated `Any`, in percent."""
    arguments = [
        one
        for node in functions(PACKAGE)
        for one in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
        if LETTERS.search(one.arg)
    ]
    names = [one.annotation for one in arguments]
    vague = sum(isinstance(name, ast.Name) and name.id == "Any" for name in names)
    return round(100 * vague / max(1, len(names)), 1)


def loop_lines() -> int:
    """Lines of code of the function `recycled`, its docstring left out."""
    for tree in trees(PASSES).values():
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and node.name == "recycled":
                body = node.body[1:] if ast.get_docstring(node) else node.body
                return (body[-1].end_lineno or 0) - body[0].lineno + 1
    raise LookupError("no function `recycled` in compilespec/passes")


def longest(folder: Path) -> int:
    return max((node.end_lineno or 0) - node.lineno + 1 for node in functions(folder))


def long_test_files() -> int:
    return sum(text.count("\n") > 500 for text in read(ROOT / "tests/passes").values())


def passes_without_a_room() -> int:
    """Files beside the package's docstring, order, runner, context and contracts."""
    return sum(
        path.stem not in ("__init__", "order", "runner", "context", "contracts")
        for path in PASSES.glob("*.py")
    )


# --- one record for a fact ---


@cache
def fields() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for node in walk(PACKAGE, ast.ClassDef):
        assert isinstance(node, ast.ClassDef)
        if node.name in RECORDS:
            found[node.name] = [
                one.target.id
                for one in node.body
                if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
            ]
    return found


def num_fields() -> int:
    return sum(map(len, fields().values()))


def names_in_three() -> int:
    records = Counter(name for names in fields().values() for name in names)
    return sum(num >= 3 for num in records.values())


def longest_copy() -> int:
    """Keywords `name=record.name` that follow each other in one call: a record copied by hand."""
    most = 0
    for node in walk(PACKAGE, ast.Call):
        assert isinstance(node, ast.Call)
        copied = Counter(
            ast.unparse(one.value.value)
            for one in node.keywords
            if isinstance(one.value, ast.Attribute) and one.value.attr == one.arg
        )
        most = max(most, *copied.values(), 0)
    return most


def files_that_ask_the_device() -> int:
    return sum("device.type" in text for text in read(PACKAGE).values())


# --- less, and plain English ---


def adaptive_modules() -> list[Path]:
    return [
        path for path in read(PACKAGE) if path.stem in ADAPTIVE and "references" not in str(path)
    ]


def adaptive_lines() -> int:
    return sum(read(PACKAGE)[path].count("\n") for path in adaptive_modules())


def adaptive_constants() -> int:
    """Numbers that somebody chose: each name of a tuple assignment counts."""
    found = 0
    for path in adaptive_modules():
        for node in trees(PACKAGE)[path].body:
            if isinstance(node, ast.Assign) and "runtime" in path.parts:
                names = [one.id for one in ast.walk(node.targets[0]) if isinstance(one, ast.Name)]
                values = [one for one in ast.walk(node.value) if isinstance(one, ast.Constant)]
                numbers = any(isinstance(one.value, int | float) for one in values)
                found += sum(name.isupper() for name in names) if numbers else 0
    return found


def docstrings_without_subject() -> int:
    found = 0
    for node in walk(PACKAGE, ast.FunctionDef, ast.ClassDef, ast.Module):
        text = ast.get_docstring(node) or ""  # type: ignore[arg-type]
        found += text.startswith(tuple(f"{word} " for word in NOT_A_SUBJECT))
    return found


def classes_defined_twice() -> int:
    names: dict[str, set[Path]] = defaultdict(set)
    for path, tree in trees(PACKAGE).items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                names[node.name].add(path)
    return sum(len(paths) > 1 for paths in names.values())


def phrases() -> int:
    """Phrases of the package that the conventions forbid."""
    return sum(len(PHRASES.findall(text)) for text in read(PACKAGE).values())


def long_subjects() -> int:
    """Of the last fifty commits."""
    log = subprocess.run(
        ["git", "log", "-50", "--no-merges", "--format=%s"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return sum(len(line) > 72 for line in log.stdout.splitlines())


def long_decisions() -> int:
    """Decisions of over twelve lines."""
    found = 0
    for path in (ROOT / "docs/decisions").glob("*.md"):
        sections = re.split(r"^##+ ", path.read_text(), flags=re.M)[1:]
        found += sum(len(one.strip().splitlines()) - 1 > 12 for one in sections)
    return found


FIGURES = (
    Figure("find_role( in the package", 169, 30, lambda: count(r"\bfind_role\(")),
    Figure("before= in passes", 231, 40, lambda: count(r"\bbefore=", PASSES)),
    Figure("(gm, ctx in the package", 281, 60, lambda: count(r"\(gm, ctx")),
    Figure("fmt: skip in passes", 146, 20, lambda: count("# fmt: skip", PASSES)),
    Figure("tensor parameters annotated Any, %", 30.2, 5, any_percent),
    Figure("lines of the draft loop `recycled`", 65, 30, loop_lines),
    Figure("lines of the longest function in passes", 69, 40, lambda: longest(PASSES)),
    Figure("files in passes outside a room", 55, 0, passes_without_a_room),
    Figure("test files of passes over 500 lines", 3, 0, long_test_files),
    Figure("fields of the six records", 130, 90, num_fields),
    Figure("names in three or more records", 9, 2, names_in_three),
    Figure("longest copy of a record by hand", 9, 6, longest_copy),
    Figure("files that ask device.type", 32, 3, files_that_ask_the_device),
    Figure("lines of adaptive K", 1216, 650, adaptive_lines),
    Figure("constants of adaptive K", 25, 10, adaptive_constants),
    Figure("lines of compilespec", 61802, 54000, lambda: num_lines("compilespec")),
    Figure("lines of tests", 48899, 45000, lambda: num_lines("tests")),
    Figure("lines of tools", 9091, 7000, lambda: num_lines("tools")),
    Figure("lines of README.md", 129, 100, lambda: num_lines_of("README.md")),
    Figure("lines of ARCHITECTURE.md", 216, 130, lambda: num_lines_of("ARCHITECTURE.md")),
    Figure("words of the decisions", 26600, 8000,
           lambda: num_words("docs/decisions/*.md")),
    Figure("decisions of over twelve lines", 60, 0, long_decisions),
    Figure("docstrings that open without a subject", 449, 100, docstrings_without_subject),
    Figure("class names defined twice", 22, 0, classes_defined_twice),
    Figure("phrases that need a second reading", 120, 0, phrases),
    Figure("commit subjects over 72 columns", 4, 0, long_subjects),
)  # fmt: skip


def num_lines_of(name: str) -> int:
    return (ROOT / name).read_text().count("\n")


def main() -> int:
    width = max(len(one.name) for one in FIGURES)
    print(f"{'':{width}}  before    now  at most")
    past = 0
    for one in FIGURES:
        now = one.measure()
        past += now > one.most
        mark = "  <- past its limit" if now > one.most else ""
        print(f"{one.name:{width}}  {one.before:6}  {now:5}  {one.most:7}{mark}")
    print(f"{past} of {len(FIGURES)} figures are past their limits")
    return int(past > 0)


if __name__ == "__main__":
    sys.exit(main())
