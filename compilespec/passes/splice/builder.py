"""The step as tensor code: what a splicing pass is given, and writes with."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, fx

from compilespec.passes.context import PassContext
from compilespec.passes.graph import nodes
from compilespec.passes.graph.fragments import copy_fragment
from compilespec.passes.splice.roles import StepRoles
from compilespec.program import BufferSpec, InputSpec, ProgramConfig, Traced

Result = TypeVar("Result")


class Writer:
    """Writes tensor code into a graph.

    A value is a proxy, annotated as the tensor that it stands for.  An operation on values becomes
    a node of the graph at the cursor, which is before the output unless a `with` block moves it.
    """

    def __init__(self, gm: fx.GraphModule) -> None:
        self.gm = gm
        self._tracer = _AtCursor(self)
        self._cursor: fx.Node | None = None

    @property
    def graph(self) -> fx.Graph:
        return self.gm.graph

    # --- the cursor ---

    @property
    def cursor(self) -> fx.Node:
        """The node before which code is written."""
        return nodes.output_node(self.gm) if self._cursor is None else self._cursor

    @contextlib.contextmanager
    def before(self, place: fx.Node | Tensor) -> Iterator[None]:
        """Write before a node."""
        outer, self._cursor = self._cursor, node_of(place)
        try:
            yield
        finally:
            self._cursor = outer

    def after(self, place: fx.Node | Tensor) -> contextlib.AbstractContextManager[None]:
        """Write after a node."""
        return self.before(node_of(place).next)

    def at_start(self) -> contextlib.AbstractContextManager[None]:
        """Write before all that is computed."""
        return self.before(nodes.after_placeholders(self.gm))

    # --- values ---

    def value(self, node: fx.Node) -> Tensor:
        """The value of a node, to compute with."""
        return cast(Tensor, fx.Proxy(node, self._tracer))

    def values(self, arguments: Iterable[Any]) -> list[Any]:
        """A node's arguments, of which nodes are values."""
        return [self.value(a) if isinstance(a, fx.Node) else a for a in arguments]

    def constant(self, name: str, tensor: Tensor) -> Tensor:
        """A tensor that the graph holds."""
        self.gm.register_buffer(name, tensor, persistent=False)
        return cast(Tensor, self._tracer.create_proxy("get_attr", name, (), {}))

    def take_place(self, old: fx.Node, new: Tensor) -> None:
        """Let the readers of a node read a value instead, which is described as the node was."""
        node = node_of(new)
        node.meta = dict(old.meta)
        nodes.copy_origin(old, node)
        old.replace_all_uses_with(node)
        self.graph.erase_node(old)

    def wrap(self, node: fx.Node, function: Callable[..., Tensor], *arguments: Any) -> None:
        """Let the readers of a node read `function(node, *arguments)`, a node that stays one call
        until the retrace.
        """
        with self.graph.inserting_after(node):
            new = self.graph.call_function(function, (node, *map(_plain, arguments)))
        node.replace_all_uses_with(new)
        new.update_arg(0, node)  # which it read before
        new.meta["example"] = node.meta["example"]
        nodes.copy_origin(node, new)
        if "role" in node.meta:
            new.meta["role"] = node.meta.pop("role")


class Splice(Writer):
    """A step that passes build: its graph, its context, and the values that they hand each other.

    A tensor function is called directly, or by `call` if it takes sizes of the program.
    """

    def __init__(self, gm: fx.GraphModule, ctx: PassContext) -> None:
        super().__init__(gm)
        self.ctx = ctx
        self.roles = StepRoles(gm, self.value)

    @property
    def config(self) -> ProgramConfig:
        return self.ctx.config

    @property
    def is_decode(self) -> bool:
        return self.ctx.phase == "decode"

    # --- roles ---

    def find(self, role: str) -> Tensor | None:
        """The value that plays a role; None if no node does."""
        return self.role(role) if nodes.has_role(self.gm, role) else None

    def role(self, name: str) -> Tensor:
        """The value of a role whose name is computed.  Raises: PassError."""
        return self.value(nodes.find_role(self.gm, name))

    def name(self, role: str, value: Tensor) -> Tensor:
        """Give a value a role whose name is computed."""
        nodes.give_role(self.gm, role, node_of(value))
        return value

    def taps(self) -> tuple[Tensor, ...]:
        """The hidden states that the drafter reads, [B, S, D] each."""
        return tuple(self.role(f"aux.{index}") for index in range(len(self.ctx.drafter.aux_layers)))

    # --- inputs and outputs ---

    def batch(self, name: str) -> Tensor:
        """An input that the host gives with each call."""
        return self.value(nodes.add_input(self.gm, self.ctx, InputSpec(name=name, kind="batch")))

    def buffer(self, spec: BufferSpec) -> Tensor:
        """A persistent buffer, declared on first use."""
        return self.value(nodes.add_buffer(self.gm, self.ctx, spec))

    def state(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, **options: Any
    ) -> Tensor:
        """A buffer with an entry of this shape in each state row."""
        rows = (self.config.num_rows, *shape)
        return self.buffer(BufferSpec(name=name, kind="state", shape=rows, dtype=dtype, **options))

    def weight(self, name: str, tensor: Tensor) -> Tensor:
        """The input of a weight, shared with others that are the same tensor."""
        return self.value(nodes.add_weight(self.gm, self.ctx, name, tensor))

    def outputs(self) -> dict[str, Tensor]:
        """The outputs of the graph, by name."""
        found = nodes.get_outputs(self.gm)
        return {name: self.value(node) for name, node in found.items()}

    def set_outputs(self, outputs: Mapping[str, Tensor]) -> None:
        """Make these the outputs, in this order."""
        nodes.set_outputs(self.gm, {name: node_of(value) for name, value in outputs.items()})

    # --- code ---

    def call(self, function: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
        """Call a tensor function; its keyword-only parameters are sizes of the program's config,
        by name, unless they are given or have a default.
        """
        missing = (name for name in _keywords(function) if name not in kwargs)
        sizes = {name: getattr(self.config, name) for name in missing}
        return function(*args, **kwargs, **sizes)

    def fragment(self, call: str | Traced, /, **arguments: Tensor) -> tuple[Tensor, ...]:
        """Copy a captured graph to the cursor, one of the drafter's calls if a name is given.

        Returns: its outputs.
        """
        traced = self.ctx.draft[call] if isinstance(call, str) else call
        given = {name: node_of(value) for name, value in arguments.items()}
        found = copy_fragment(self.gm, self.ctx, traced, given, before=self.cursor)
        return tuple(map(self.value, found))


class _AtCursor(fx.proxy.GraphAppendingTracer):
    """Creates the nodes of proxies at the cursor of a writer."""

    def __init__(self, writer: Writer) -> None:
        super().__init__(writer.graph)
        self._writer = writer

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        with self.graph.inserting_before(self._writer.cursor):
            return super().create_node(*args, **kwargs)


def node_of(value: fx.Node | Tensor) -> fx.Node:
    """The node whose value this is."""
    return value if isinstance(value, fx.Node) else cast(fx.Proxy, value).node


def _plain(argument: Any) -> Any:
    return argument.node if isinstance(argument, fx.Proxy) else argument


@functools.cache
def _keywords(function: Callable[..., Any]) -> tuple[str, ...]:
    """Keyword-only parameters without a default."""
    parameters = inspect.signature(function).parameters.values()
    return tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty)


def arange_like(reference: Tensor, end: int) -> Tensor:
    """`torch.arange(end)`, int32, where the reference is."""
    if isinstance(reference, fx.Proxy):
        options = {"dtype": torch.int32, "device": reference.device}
        proxy = reference.tracer.create_proxy("call_function", torch.arange, (end,), options)
        return cast(Tensor, proxy)
    return torch.arange(end, dtype=torch.int32, device=reference.device)
