"""A stage as a Python module that runs by itself: the graph's forward, and inputs for it."""

from __future__ import annotations

import math
import re
import types
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from compilespec.errors import NotSupported
from compilespec.inspect.graphs import GraphStage
from compilespec.ops.device import traits_of

_MAX_CONSTANT = 65536  # elements written out
_INDENT = "    "
_HEADER = '''"""{title}

Runs by itself: `python FILE` calls the graph on `example_inputs()` and prints what comes out.
Weights are random and buffers zero there; give `Graph()` real tensors to get real results.
"""

{imports}
'''
_INPUTS = '''

def example_inputs({sizes}):
    """Random weights, zeros for all else, by the graph's names and in its order."""
    generator = torch.Generator().manual_seed(0)

    def floats(dtype, *size):
        return (0.05 * torch.randn(size, generator=generator)).to(dtype)

    return {{
{entries}
    }}


if __name__ == "__main__":
    with torch.no_grad():
        results = Graph()(*example_inputs().values())
    for result in results:
        print(tuple(result.shape), result.dtype)
'''


def render_python(stage: GraphStage, title: str) -> str:
    """A module with `Graph` and `example_inputs`.

    Raises: NotSupported for a constant too large to write out.
    """
    graph = fx.Graph()  # a copy: printing must not touch the stage's own
    graph.output(graph.graph_copy(stage.graph, {}))
    code = graph.python_code("self")
    used = set(re.findall(r"\w+", code.src))
    imports = [_import(name, value) for name, value in code.globals.items() if name in used]
    lines = dict.fromkeys(["import torch", "import compilespec.ops", *imports])
    body = "\n".join(f"{_INDENT}{line}".rstrip() for line in code.src.strip().splitlines())
    return (
        _HEADER.format(title=title, imports="\n".join(sorted(lines, key=_import_order)))
        + "\n\nclass Graph(torch.nn.Module):\n"
        + "".join(_constants(stage))
        + body
        + "\n"
        + _example_inputs(stage)
    )


def _import(name: str, value: Any) -> str:
    """The line that makes a global of the generated code."""
    if isinstance(value, types.ModuleType):
        line = f"import {value.__name__}"
        return line if value.__name__ == name else f"{line} as {name}"
    if value is type(None):
        return f"{name} = type(None)"
    if isinstance(value, (torch.device, torch.dtype)):
        text = repr(value)
        return f"{name} = {text if text.startswith('torch.') else f'torch.{text}'}"
    if isinstance(value, float) and not math.isfinite(value):
        return f'{name} = float("{value}")'
    if callable(value) and getattr(value, "__module__", None):
        return f"from {value.__module__} import {value.__qualname__} as {name}"
    return f"{name} = {value!r}"


def _import_order(line: str) -> tuple[int, str]:
    return (0 if line.startswith("import ") else 1 if line.startswith("from ") else 2, line)


def _constants(stage: GraphStage) -> Iterator[str]:
    """An `__init__` that makes the tensors that the graph holds itself."""
    targets = dict.fromkeys(str(node.target) for node in stage.graph.find_nodes(op="get_attr"))
    if not targets:
        return
    yield f"{_INDENT}def __init__(self):\n{_INDENT * 2}super().__init__()\n"
    for target in targets:
        value = stage.owner.get_buffer(target) if "." in target else getattr(stage.owner, target)
        text = _literal(target, value)
        yield f'{_INDENT * 2}self.register_buffer("{target}", {text})\n'
    yield "\n"


def _literal(name: str, value: Tensor) -> str:
    if traits_of(value.device).is_meta:
        return f'torch.empty({tuple(value.shape)}, dtype={value.dtype}, device="meta")'
    if value.numel() > _MAX_CONSTANT:
        raise NotSupported(f"constant {name} has {value.numel()} elements, too many to write out")
    # `repr` of a float is exact; lists of bfloat16 come as floats that round back to it
    numbers = str(value.tolist()).replace("inf", 'float("inf")').replace("nan", 'float("nan")')
    return f'torch.tensor({numbers}, dtype={value.dtype}, device="{value.device}")'


def _example_inputs(stage: GraphStage) -> str:
    defaults = {"B": 2, "R": 2, "T": 8}
    letters: dict[str, None] = {}
    entries = []
    for node in stage.graph.find_nodes(op="placeholder"):
        value = stage.values.get(node)
        if isinstance(value, Tensor):
            sizes = [str(stage.size(size)) for size in value.shape]
            letters |= {size: None for size in sizes if size in defaults}
            entries.append(f"{node.name!r}: {_tensor(value, sizes)}")
        else:
            size = str(stage.size(value))
            letters[size] = None
            entries.append(f"{node.name!r}: {size}")
    return _INPUTS.format(
        sizes=", ".join(f"{letter}={defaults.get(letter, 2)}" for letter in sorted(letters)),
        entries="\n".join(f"{_INDENT * 2}{entry}," for entry in entries),
    )


def _tensor(value: Tensor, sizes: Sequence[str]) -> str:
    if value.is_floating_point() and not traits_of(value.device).is_meta:
        return f'floats({", ".join((str(value.dtype), *sizes))}).to("{value.device}")'
    shape = f"({', '.join(sizes)},)" if sizes else "()"
    return f'torch.zeros({shape}, dtype={value.dtype}, device="{value.device}")'
