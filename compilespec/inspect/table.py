"""Graphs as tables: one row a node, filters, operator counts, and differences of two stages."""

from __future__ import annotations

import collections
import difflib
import fnmatch
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from compilespec._torch_compat import OpOverload, OpOverloadPacket
from compilespec.errors import InvalidOption
from compilespec.inspect.graphs import GraphStage
from compilespec.program import module_path
from compilespec.tracing.naming import source_line

_SHORT_OPS = {"call_function": "call", "call_method": "method", "get_attr": "constant"}


@dataclass(frozen=True, kw_only=True)
class Row:
    """The facts of a node at one stage."""

    name: str
    op: str  # "input", "call", "method", "constant", "output"
    target: str
    args: str
    shape: tuple[int | str, ...] | None  # None: not a tensor, or not known
    dtype: str
    module: str  # path in its fragment
    module_class: str
    fragment: str  # "target", "draft.forward", ...; "" for what a pass wrote
    copy: int  # of the fragment
    role: str  # the name by which later passes find it; an input's name
    source: str  # "file.py:12: code"
    made_by: str  # the pass

    @property
    def value(self) -> str:
        if self.shape is None:
            return self.dtype
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"

    @property
    def place(self) -> str:
        """The module as a reader names it: copies of a draft loop counted from 1."""
        fragment = f"{self.fragment}#{self.copy + 1}" if self.copy else self.fragment
        return f"{fragment} {self.module}".strip()

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "shape": list(self.shape) if self.shape is not None else None}


@dataclass(frozen=True, kw_only=True)
class Change:
    """One row of a difference; `old` or `new` is None where there is none."""

    old: Row | None
    new: Row | None

    @property
    def sign(self) -> str:
        if self.old is None:
            return "+"
        if self.new is None:
            return "-"
        return " " if self.old == self.new else "~"


def rows_of(stage: GraphStage) -> list[Row]:
    """One row a node, in execution order."""
    return [_row(stage, node) for node in stage.graph.nodes]


def row_filter(pattern: str | None) -> Callable[[Row], bool]:
    """A predicate of rows: name, target, role or module path matches a part, a glob, or a regular
    expression between slashes.

    Raises: InvalidOption for a bad regular expression.
    """
    if not pattern:
        return lambda row: True
    if len(pattern) > 2 and pattern[0] == pattern[-1] == "/":
        text = pattern[1:-1]
    else:
        is_glob = any(char in pattern for char in "*?[")
        text = fnmatch.translate(pattern) if is_glob else re.escape(pattern)
    try:
        search = re.compile(text).match if text.endswith(r"\Z") else re.compile(text).search
    except re.error as error:
        raise InvalidOption(f"--where {pattern}: {error}") from error
    return lambda row: any(
        search(text) is not None for text in (row.name, row.target, row.role, row.module, row.place)
    )


def count_operators(rows: Sequence[Row]) -> dict[str, int]:
    """The number of nodes of each operator, the most frequent first."""
    counted = collections.Counter(row.target for row in rows if row.op in ("call", "method"))
    return dict(counted.most_common())


def difference(old: Sequence[Row], new: Sequence[Row]) -> Iterator[Change]:
    """Both stages side by side; nodes of the same name are the same node."""
    matcher = difflib.SequenceMatcher(
        a=[row.name for row in old], b=[row.name for row in new], autojunk=False
    )
    for tag, start, end, first, last in matcher.get_opcodes():
        if tag == "equal":
            for one, other in zip(old[start:end], new[first:last], strict=True):
                yield Change(old=one, new=other)
        else:
            yield from (Change(old=row, new=None) for row in old[start:end])
            yield from (Change(old=None, new=row) for row in new[first:last])


def _row(stage: GraphStage, node: fx.Node) -> Row:
    custom: Mapping[str, Any] = node.meta.get("custom") or {}
    is_input, is_output = node.op == "placeholder", node.op == "output"
    shape, dtype = _value(stage, node)
    return Row(
        name=node.name,
        op={"placeholder": "input", **_SHORT_OPS}.get(node.op, node.op),
        target="" if is_input or is_output else target_name(node),
        args="" if is_input else _arguments(node),
        shape=shape,
        dtype=dtype,
        module=module_path(node),
        module_class=str(custom.get("class", "")),
        fragment=str(custom.get("fragment", "")),
        copy=int(custom.get("copy", 0)),
        role=", ".join(node.meta.get("names", ())) if is_output else str(node.meta.get("role", "")),
        source=source_line(node) if node.meta.get("stack_trace") else "",
        made_by=str(custom.get("pass", "") or ("trace" if is_input else "")),
    )


def target_name(node: fx.Node) -> str:
    """An operator's name: `aten.add.Tensor`, `torch.rsqrt`, `.view` for a method."""
    target: Any = node.target
    if node.op == "call_method":
        return f".{target}"
    if isinstance(target, (str, OpOverload, OpOverloadPacket)):
        return str(target)
    module = (getattr(target, "__module__", None) or "torch").strip("_")
    module = {"torch._C._nn": "torch.nn.functional"}.get(module, module)
    return f"{module}.{getattr(target, '__name__', target)}"


def _value(stage: GraphStage, node: fx.Node) -> tuple[tuple[int | str, ...] | None, str]:
    value = stage.values.get(node)
    if isinstance(value, Tensor):
        return tuple(stage.size(size) for size in value.shape), _dtype(value.dtype)
    if isinstance(value, (int, torch.SymInt)):
        return None, str(stage.size(value))
    if isinstance(value, (torch.device, torch.dtype)):
        return None, str(value)
    if isinstance(value, (list, tuple)) and node.op != "output":
        return None, f"{len(value)} values"
    return None, ""


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _arguments(node: fx.Node) -> str:
    parts = [_argument(value) for value in node.args]
    parts += [f"{key}={_argument(value)}" for key, value in node.kwargs.items()]
    return ", ".join(parts)


def _argument(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_argument, value))}]"
    if isinstance(value, slice):
        parts = (value.start, value.stop, value.step)[: 2 if value.step is None else 3]
        return ":".join("" if part is None else _argument(part) for part in parts)
    return "end" if value == 2**63 - 1 else str(value).removeprefix("torch.")
