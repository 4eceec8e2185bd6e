"""The map of the passes and the legend of dimension suffixes say what is there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import compilespec
from compilespec import passes, program
from compilespec.passes.order import ATEN_PASSES, REPLAY_PASSES, SPLICE_PASSES
from compilespec.passes.splice.roles import StepRoles

PACKAGE = Path(compilespec.__file__).parent
SUFFIXED = re.compile(r"[a-z]\w*_([A-Z0-9][A-Z0-9d]*)")


def entries(doc: str | None) -> list[str]:
    """The first words of a docstring's indented lines."""
    return re.findall(r"^    (\S+)  +\S", doc or "", re.MULTILINE)


def test_every_pass_has_a_line_on_the_map_in_their_order() -> None:
    on_map = [entry for entry in entries(passes.__doc__) if re.fullmatch(r"[a-z_]+", entry)]
    names = [entry.name for entry in (*SPLICE_PASSES, *REPLAY_PASSES, *ATEN_PASSES)]
    assert on_map == list(dict.fromkeys(names))


@pytest.mark.parametrize("name", [entry.name for entry in (*SPLICE_PASSES, *ATEN_PASSES)])
def test_every_pass_has_a_test_file_with_a_graph_that_it_leaves_alone(name: str) -> None:
    text = (Path(__file__).parent / f"test_{name}.py").read_text(encoding="utf-8")
    assert re.search(rf'check_left_alone\(\s*"{name}", ', text)


def test_every_room_and_file_on_the_map_is_there() -> None:
    rooms = [entry for entry in entries(passes.__doc__) if re.search(r"[./]", entry)]
    assert all((PACKAGE / "passes" / room).exists() for room in rooms)
    here = {path.name for path in (PACKAGE / "passes").iterdir()} - {"__init__.py", "__pycache__"}
    assert here == {room.rstrip("/") for room in rooms}


def suffixes() -> Iterator[tuple[str, str]]:
    """Names with a suffix of dimensions, and the suffix."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = {"arg": ast.arg, "id": ast.Name, "value": ast.Constant, "target": ast.AnnAssign}
            for field, kind in names.items():
                name = getattr(node, field) if isinstance(node, kind) else None
                found = SUFFIXED.fullmatch(name) if isinstance(name, str) else None
                if found is not None:
                    yield found[0], found[1]


def test_every_letter_of_a_suffix_is_in_the_legend() -> None:
    legend = set(entries(program.__doc__))
    used: dict[str, str] = {}
    for name, suffix in suffixes():
        used |= {letter: name for letter in suffix if not letter.isdigit() or letter == "1"}
    assert legend == used.keys(), {letter: used.get(letter) for letter in legend ^ used.keys()}


def test_every_role_of_a_step_is_described() -> None:
    """A line each, which begins with a dtype or a shape."""
    tree = ast.parse((PACKAGE / "passes" / "splice" / "roles.py").read_text(encoding="utf-8"))
    (roles,) = (node for node in tree.body if isinstance(node, ast.ClassDef))
    described = {}
    for field, text in zip(roles.body, roles.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            described[ast.unparse(field.target)] = str(ast.literal_eval(text.value))
    assert described.keys() == StepRoles.__annotations__.keys()
    assert all(len(text.splitlines()) == 1 for text in described.values())
    form = re.compile(r"(int|int32|int64|bool|\[)")
    assert all(form.match(text) for text in described.values())
