"""Captures on disk: a traced graph as JSON, without weights, and the globals that its code read.

Only complete captures are stored; parts that JSON cannot hold raise `CannotKey`, and the capture
stays in memory.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import logging
import math
import operator
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from compilespec import _torch_compat
from compilespec._torch_compat import OpOverload, OpOverloadPacket, size_expression
from compilespec.ops._build import cache_directory
from compilespec.program import Branch, Traced, TracedInput
from compilespec.tracing.fingerprint import CannotKey

logger = logging.getLogger("compilespec")

_NAMED = (torch.dtype, torch.layout, torch.memory_format)
_SEQUENCES: Mapping[str, type] = {"tuple": tuple, "list": list, "size": torch.Size}
Reads = tuple[tuple[tuple[str, tuple[str, ...]], ...], str]  # names by module, and a digest


def directory() -> Path:
    """The folder of the captures."""
    return cache_directory() / "traces"


def load(key: str) -> tuple[Reads, Callable[[], Traced]] | None:
    """The globals that a stored capture read, and a function that rebuilds it; None where none is
    stored.
    """
    path = directory() / f"{key}.json"
    try:
        if not path.exists():
            return None
        record = json.loads(path.read_text())
        names = tuple((module, tuple(used)) for module, used in record["names"])
        return (names, str(record["digest"])), functools.partial(_rebuild, record)
    except (OSError, ValueError, KeyError, TypeError) as error:  # damaged: tracing repairs it
        logger.warning("dropping unreadable trace %s (%s); tracing again", path.name, error)
        with contextlib.suppress(OSError):
            path.unlink()
        return None


def save(key: str, reads: Reads, traced: Traced) -> None:
    """Store a capture.  Raises: CannotKey for a graph that JSON cannot hold."""
    record = {"names": reads[0], "digest": reads[1], **_record(traced)}
    try:
        directory().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory()) as scratch:
            Path(f"{scratch}/trace").write_text(json.dumps(record))
            os.replace(f"{scratch}/trace", directory() / f"{key}.json")
    except OSError as error:  # the next start traces again
        logger.warning("trace %s was not saved: %s", key, error)


def _record(traced: Traced) -> dict[str, Any]:
    texts: dict[str, int] = {}
    hints: dict[str, int] = {}
    nodes = [
        {
            "name": node.name,
            "op": node.op,
            "target": _write_target(node),
            "args": _write(node.args),
            "kwargs": _write(dict(node.kwargs)),
            "role": node.meta.get("role"),
            "custom": _write(node.meta.get("custom")),
            "text": texts.setdefault(node.meta.get("stack_trace") or "", len(texts)),
            "value": _write_value(node.meta.get("example_value"), hints),
        }
        for node in traced.graph_module.graph.nodes
    ]
    inputs = [(entry.name, entry.kind) for entry in traced.inputs]
    return {
        "name": traced.name, "inputs": inputs, "hints": hints, "texts": [*texts], "nodes": nodes,
        "branches": traced.branches,
    }  # fmt: skip


def _rebuild(record: Mapping[str, Any]) -> Traced:
    """The capture of a record, on new fakes, without weights."""
    sizes, make = _torch_compat.restored_fakes(record["hints"])
    known: dict[str, fx.Node] = {}
    fakes: dict[str, Any] = {}
    graph = fx.Graph()
    for one in record["nodes"]:
        node = graph.create_node(
            one["op"],
            _read_target(one["target"]),
            _read(one["args"], known),
            _read(one["kwargs"], known),
            one["name"],
        )
        if node.name != one["name"]:
            raise ValueError(f"node {one['name']} became {node.name}")
        known[node.name] = node
        text = record["texts"][one["text"]]
        looks = json.dumps(one["value"])
        if looks not in fakes:
            fakes[looks] = _read_value(one["value"], sizes, make)
        meta = {"role": one["role"], "custom": _read(one["custom"], known),
                "stack_trace": text or None, "example_value": fakes[looks]}  # fmt: skip
        node.meta = {name: entry for name, entry in meta.items() if entry is not None}
    return Traced(
        name=record["name"],
        graph_module=_torch_compat.graph_module(graph),
        inputs=tuple(TracedInput(name=name, kind=kind) for name, kind in record["inputs"]),
        weights={},
        trace_ms=0.0,
        branches=tuple(Branch(*branch) for branch in record["branches"]),
    )


# --- arguments ---


def _write(value: Any) -> Any:
    """A value as JSON: JSON's own types as themselves, others as {kind: content}."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, fx.Node):
        return {"node": value.name}
    if isinstance(value, _NAMED):
        return {"torch": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, slice):
        return {"slice": [_write(one) for one in (value.start, value.stop, value.step)]}
    if value is Ellipsis:
        return {"ellipsis": 0}
    if isinstance(value, torch.Size):
        return {"size": [_write(one) for one in value]}
    if isinstance(value, tuple | list) and not hasattr(value, "_fields"):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [_write(one) for one in value]}
    if isinstance(value, dict):
        return {"dict": [[_write(key), _write(one)] for key, one in value.items()]}
    raise CannotKey(f"its graph holds a {type(value).__name__}")


def _read(value: Any, known: Mapping[str, fx.Node]) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](_read(one, known) for one in content)
    if kind == "dict":
        return {_read(key, known): _read(one, known) for key, one in content}
    if kind == "slice":
        return slice(*(_read(one, known) for one in content))
    simple: Mapping[str, Callable[[Any], Any]] = {
        "node": known.__getitem__, "torch": functools.partial(getattr, torch),
        "device": torch.device, "ellipsis": lambda _: Ellipsis,
    }  # fmt: skip
    return simple[kind](content)


# --- targets ---


def _write_target(node: fx.Node) -> Any:
    target: Any = node.target
    if isinstance(target, str):
        return target
    if isinstance(target, OpOverloadPacket):
        return {"packet": str(target).split(".")}
    if isinstance(target, OpOverload):
        return {"overload": str(target).split(".")}
    module, name = getattr(target, "__module__", None) or "", getattr(target, "__name__", "")
    for place in (module, "torch", "torch.nn.functional", "torch._C._nn", "_operator", "math"):
        if name and getattr(sys.modules.get(place), name, None) is target:
            return {"function": [place, name]}
    raise CannotKey(f"its graph calls {target}, which has no name")


def _read_target(target: Any) -> Any:
    if isinstance(target, str):
        return target
    ((kind, names),) = target.items()
    if kind == "function":
        place, name = names
        return getattr(importlib.import_module(place), name)
    return functools.reduce(getattr, names, torch.ops)


# --- example values ---


def _write_value(value: Any, hints: dict[str, int]) -> Any:
    """A fake as its sizes, strides, dtype and device; `hints`: example values of its symbols."""
    if isinstance(value, Tensor):
        sizes, strides = (
            [_write_size(one, hints) for one in many] for many in (value.shape, value.stride())
        )
        return {"tensor": [sizes, strides, _write(value.dtype), _write(value.device)]}
    if isinstance(value, torch.SymInt):
        return {"symbol": _write_size(value, hints)}
    if isinstance(value, tuple | list) and not hasattr(value, "_fields"):
        kind = "tuple" if isinstance(value, tuple) else "list"
        kind = "size" if isinstance(value, torch.Size) else kind
        return {kind: [_write_value(one, hints) for one in value]}
    return {"plain": _write(value)}


def _write_size(size: Any, hints: dict[str, int]) -> Any:
    if isinstance(size, int):
        return size
    return _write_expression(size_expression(size), size, hints)


def _write_expression(expression: Any, size: Any, hints: dict[str, int]) -> Any:
    """Sums and products of symbols and whole numbers, as nested lists."""
    if expression.is_Integer:
        return int(expression)
    if expression.is_Symbol:
        hints[str(expression)] = _torch_compat.example_of_symbol(size, expression)
        return str(expression)
    kind, parts = "+" if expression.is_Add else "*", expression.args
    if expression.is_Pow and expression.exp.is_Integer and expression.exp > 0:
        parts = [expression.base] * int(expression.exp)
    elif not expression.is_Add and not expression.is_Mul:
        raise CannotKey(f"its graph has the size {expression}")
    return [kind, *(_write_expression(one, size, hints) for one in parts)]


def _read_value(value: Any, sizes: Mapping[str, Any], make: Callable[..., Tensor]) -> Any:
    ((kind, content),) = value.items()
    if kind == "tensor":
        shape, strides = ([_read_size(one, sizes) for one in many] for many in content[:2])
        return make(shape, strides, _read(content[2], {}), _read(content[3], {}))
    if kind == "symbol":
        return _read_size(content, sizes)
    if kind == "plain":
        return _read(content, {})
    return _SEQUENCES[kind](_read_value(one, sizes, make) for one in content)


def _read_size(size: Any, sizes: Mapping[str, Any]) -> Any:
    if isinstance(size, int):
        return size
    if isinstance(size, str):
        return sizes[size]
    parts: Sequence[Any] = [_read_size(one, sizes) for one in size[1:]]
    return math.prod(parts) if size[0] == "*" else functools.reduce(operator.add, parts)
