"""Graphs compiled by Inductor, with their tensor constants.

Inductor makes inputs of the tensors that a graph has as attributes, and binds them where it
compiles; an artifact that is loaded again asks for them.  So they are inputs here from the start,
and are stored beside the artifact.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from compilespec import _torch_compat


@dataclass(frozen=True)
class Compiled:
    """A compiled graph: a callable that takes the graph's inputs."""

    artifact: Any
    """A callable with `save` that takes the graph's inputs, then the constants.  None where only
    the library was opened.
    """
    constants: tuple[Tensor, ...] = ()
    library: Path | None = None
    """The loaded library whose C++ function is the whole graph, if there is one
    (`_torch_compat.cpp_entry`).
    """

    def __call__(self, *inputs: Any) -> Any:
        return self.artifact(*inputs, *self.constants)


def compile_graph(gm: fx.GraphModule, fakes: Sequence[Any], options: dict[str, Any]) -> Compiled:
    """Compile an ATen graph for fake inputs; `gm` stays as it is."""
    return begin_compiling(gm, fakes, options)()


def begin_compiling(
    gm: fx.GraphModule, fakes: Sequence[Any], options: dict[str, Any]
) -> Callable[[], Compiled]:
    """Generate the code of a graph; a C++ compiler works on it in the background, and the returned
    function waits for it.
    """
    constants = constants_in(gm)
    if constants:
        tensors: list[Any] = [fake for fake in fakes if isinstance(fake, Tensor)]
        mode = tensors[0].fake_mode if tensors else _torch_compat.fake_mode()
        fakes = [*fakes, *(_torch_compat.fake_tensor(mode, one) for one in constants.values())]
        gm = _with_inputs(gm, list(constants), fakes)
    with _torch_compat.compilers_in_background() as builds:
        artifact = _torch_compat.standalone_compile(gm, fakes, options)

    def finish() -> Compiled:
        for build in builds:
            build.wait()
        return Compiled(artifact, tuple(constants.values()), _torch_compat.cpp_entry(artifact))

    return finish


def constants_in(gm: fx.GraphModule) -> dict[fx.Node, Tensor]:
    """The tensors that a graph has as attributes, by the nodes that read them."""
    found = {
        node: operator.attrgetter(str(node.target))(gm)
        for node in gm.graph.find_nodes(op="get_attr")
    }
    return {node: value for node, value in found.items() if isinstance(value, Tensor)}


def _with_inputs(
    gm: fx.GraphModule, nodes: Sequence[fx.Node], fakes: Sequence[Any]
) -> fx.GraphModule:
    """A copy of a graph in which `nodes` are further inputs, behind those that it has."""
    graph, old = fx.Graph(), gm.graph.find_nodes(op="placeholder")
    copies: dict[fx.Node, fx.Node] = {}
    for node, fake in zip([*old, *nodes], fakes, strict=True):
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = {**node.meta, "val": fake}
    for node in gm.graph.nodes:
        if node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    return fx.GraphModule(gm, graph)


def to_record(constants: Sequence[Tensor]) -> list[dict[str, Any]]:
    """The constants in JSON's form."""
    return [
        {
            "dtype": str(one.dtype).removeprefix("torch."),
            "device": str(one.device),
            "shape": list(one.shape),
            "values": one.flatten().tolist(),
        }
        for one in constants
    ]


def constants_of(record: Sequence[Mapping[str, Any]]) -> tuple[Tensor, ...]:
    """The constants that `to_record` was given."""
    return tuple(
        torch.tensor(one["values"], dtype=getattr(torch, one["dtype"]), device=one["device"]).view(
            one["shape"]
        )
        for one in record
    )
