"""The layout: imports from higher floors to lower ones and never in a circle, short functions.

Read from the source, so that lazy imports, and those for type checkers alone, count as well.
"""

from __future__ import annotations

import ast
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "compilespec"

# A package (or a module at the top) may import those of lower floors, and itself.  Ground first.
FLOORS = (
    ("_torch_compat",),
    ("errors", "program", "demo"),
    ("progress", "ops"),
    ("tracing", "lowering"),
    ("methods", "cudagraphs"),
    ("quantization", "passes", "reference_ops"),
    ("runtime",),
    ("metrics", "inspect"),
    ("pipeline",),
    ("serving", "training", "generation"),
    ("__init__",),  # the package's face: hands names on
    ("cli",),
    ("__main__",),
)
FLOOR_OF = {name: number for number, names in enumerate(FLOORS) for name in names}

Arrows = Mapping[str, Mapping[str, int]]  # importer -> imported -> line


def modules(root: Path) -> dict[str, Path]:
    """The dotted name of every source file below `root`."""
    found = {}
    for path in sorted(root.rglob("*.py")):
        parts = (root.name, *path.relative_to(root).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def arrows(files: Mapping[str, Path]) -> dict[str, dict[str, int]]:
    """Who imports whom, and where.  Importing a module imports the packages that it lies in."""
    graph: dict[str, dict[str, int]] = {}
    for name, path in files.items():
        found = graph[name] = {}
        for imported, line in _imports(ast.parse(path.read_text(encoding="utf-8"))):
            target = _module(imported, files)
            while target is not None and not f"{name}.".startswith(f"{target}."):
                found.setdefault(target, line)
                target = _module(target.rpartition(".")[0], files)
    return graph


def _imports(tree: ast.Module) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute"
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def _module(imported: str, files: Mapping[str, Path]) -> str | None:
    """The module that an import reads: what it names, or the module that defines the name."""
    if imported in files:
        return imported
    parent = imported.rpartition(".")[0]
    return parent if parent in files else None


def circles(graph: Arrows) -> list[list[str]]:
    """Each circle of imports once, as the modules on the way round."""
    done: set[str] = set()
    found: list[list[str]] = []

    def visit(name: str, way: list[str]) -> None:
        if name in way:
            found.append([*way[way.index(name) :], name])
        elif name not in done:
            for target in graph[name]:
                visit(target, [*way, name])
            done.add(name)

    for name in graph:
        visit(name, [])
    return found


def against_the_floors(graph: Arrows, files: Mapping[str, Path]) -> list[str]:
    """Imports of a floor that is not below, as `file:line imports module`."""
    return [
        f"{files[name].relative_to(PACKAGE.parent)}:{line} imports {target}"
        for name, targets in graph.items()
        for target, line in targets.items()
        if _part(name) != _part(target) and FLOOR_OF[_part(name)] <= FLOOR_OF[_part(target)]
    ]


def _part(name: str) -> str:
    return name.split(".")[1] if "." in name else "__init__"


@pytest.fixture(scope="module")
def files() -> dict[str, Path]:
    return modules(PACKAGE)


def test_no_circle(files):
    assert circles(arrows(files)) == []


def test_every_module_can_be_imported_first(files):
    """In a separate process, which has the libraries but nothing of ours."""
    script = (
        "import importlib, os, sys, torch, transformers\n"
        "def works(name):\n"
        "    child = os.fork()\n"
        "    if not child:\n"
        "        try:\n"
        "            importlib.import_module(name)\n"
        "        except ModuleNotFoundError as error:\n"
        "            if error.name != 'ray':  # an extra that development does not need\n"
        "                raise\n"
        "        os._exit(0)\n"
        "    return os.waitpid(child, 0)[1] == 0\n"
        "print([name for name in sys.argv[1:] if not works(name)])\n"
    )
    names = [name for name in files if not name.endswith("__main__")]
    done = subprocess.run(
        [sys.executable, "-c", script, *names], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


def test_every_import_goes_down(files):
    assert against_the_floors(arrows(files), files) == []


def test_few_modules_stand_at_the_top(files):
    assert len(list(PACKAGE.glob("*.py"))) <= 6


def test_the_order_names_what_there_is(files):
    assert {_part(name) for name in files} == set(FLOOR_OF)


def test_a_lazy_circle_and_an_import_upwards_are_found(tmp_path):
    (tmp_path / "house").mkdir()
    (tmp_path / "house" / "a.py").write_text("import house.b\n")
    (tmp_path / "house" / "b.py").write_text("def f():\n    from house import a\n")
    assert circles(arrows(modules(tmp_path / "house"))) == [["house.a", "house.b", "house.a"]]
    planted = {"compilespec.errors": {"compilespec.runtime.engine": 3}}
    paths = {"compilespec.errors": PACKAGE / "errors" / "__init__.py"}
    assert against_the_floors(planted, paths) == [
        "compilespec/errors/__init__.py:3 imports compilespec.runtime.engine"
    ]


def test_no_test_imports_another_test_file():
    """What several need stands in tests/support."""
    files = modules(PACKAGE.parent / "tests")
    found = [
        f"{path.relative_to(PACKAGE.parent)}:{line} imports {target}"
        for name, path in files.items()
        for imported, line in _imports(ast.parse(path.read_text(encoding="utf-8")))
        for target in (_module(imported, files),)
        if target is not None and ".test_" in target
    ]
    assert found == []


def test_only_inspect_reads_the_rewriters_context(files):
    """Stages after the rewriting take what they need from fields of the program."""
    found = [
        f"{name}:{node.lineno}"
        for name, path in files.items()
        if _part(name) in ("program", "lowering", "cudagraphs", "runtime", "pipeline", "inspect")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr == "context"
    ]
    assert [place.partition(":")[0] for place in found] == ["compilespec.inspect.stages"], found


def functions(files: Mapping[str, Path]) -> Iterator[tuple[str, Any]]:
    """Every function of the package by its dotted name."""
    for name, path in files.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{name}.{node.name}", node


def test_functions_are_short_and_take_few_arguments(files):
    """Kernels aside: their arguments are those of an operator, their bodies one loop."""
    lengths, found = [], []
    for name, node in functions(files):
        lengths.append(node.end_lineno - node.lineno + 1)
        num_arguments = len(node.args.args) + len(node.args.kwonlyargs)
        if not name.startswith("compilespec.ops.") and (lengths[-1] > 80 or num_arguments > 12):
            found.append(f"{name}: {lengths[-1]} lines, {num_arguments} arguments")
    assert found == []
    middle, tenth = statistics.median(lengths), sorted(lengths)[int(0.9 * len(lengths))]
    assert middle <= 8
    assert tenth <= 24


def test_no_two_test_files_share_a_name() -> None:
    """pytest imports test files by their bare names."""
    names = Counter(path.name for path in (PACKAGE.parent / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


def test_slow_tests_stand_in_one_list():
    """`tests/slow_tests.txt` names whole tests and files; cases may be marked by a rule."""
    found = [
        f"{path.name}:{number}"
        for path in (PACKAGE.parent / "tests").rglob("test_*.py")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if line.lstrip().startswith(("@pytest.mark.slow", "pytestmark = pytest.mark.slow"))
    ]
    assert found == []
