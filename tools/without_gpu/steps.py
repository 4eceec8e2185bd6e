"""Step graphs at real size: traced without weights, and copied to fake tensors on cuda:0."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import fx

import compilespec
from compilespec.inspect.meta import meta_draft
from compilespec.ops.device import traits_of
from compilespec.passes.context import PassContext
from compilespec.pipeline import build
from compilespec.program import InputSpec, SpecProgram

CUDA = torch.device("cuda:0")


def program_on_cuda(
    target: Any, spec: str, *, optimised: bool = True, **keywords: Any
) -> SpecProgram:
    """The program of a model on the meta device, with the passes that CUDA has."""
    draft = None if spec == "none" else meta_draft(target, spec)
    with passes_of_cuda(optimised=optimised):
        return compilespec.trace(
            target, spec, draft=draft, keep_graphs=False, greedy_step=True, **keywords
        )


@contextlib.contextmanager
def passes_of_cuda(*, fuse_head: bool | None = None, optimised: bool = True) -> Iterator[None]:
    """Within, graphs are rewritten as they are on CUDA, wherever their weights are.

    Args:
        fuse_head: true: heads of any size are fused with their argmax.
        optimised: False leaves out what only makes steps faster, to compare with.
    """
    traits = traits_of(CUDA if optimised else torch.device("meta"))
    if optimised and fuse_head is not None:
        traits = dataclasses.replace(traits, fuses_heads=fuse_head)

    def context(**given: Any) -> PassContext:
        return PassContext(**{**given, "traits": traits})

    with mock.patch.object(build, "PassContext", context):
        yield


def meta_target(family: str, config: Mapping[str, Any], dtype: torch.dtype) -> Any:
    """A model of transformers with no weights behind it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **config), dtype=dtype)
    return made.eval().requires_grad_(False)


@dataclass(frozen=True, kw_only=True)
class CudaStep:
    """A step graph on fake tensors of cuda:0.  Its constants are inputs too, after the others."""

    graph_module: fx.GraphModule = field(repr=False)
    fakes: tuple[Any, ...] = field(repr=False)
    inputs: tuple[InputSpec, ...] = field(repr=False)
    constants: tuple[torch.Tensor, ...] = field(repr=False)


def on_cuda(gm: fx.GraphModule, fakes: Sequence[Any], inputs: Sequence[InputSpec] = ()) -> CudaStep:
    """A copy of a step graph (ATen) with the same symbols, sizes and strides on cuda:0.

    What is on another device than the inputs stays there: it is a stray, on a GPU too.
    """
    first: Any = next(filter(_is_tensor, fakes))
    graph, names = _copied(gm.graph, first.device)
    constants = tuple(getattr(gm, name) for name in names)
    with torch.no_grad(), first.fake_mode:
        moved = tuple(_moved(value, first.device) for value in (*fakes, *constants))
    infer(graph, moved)
    return CudaStep(
        graph_module=fx.GraphModule(torch.nn.Module(), graph),
        fakes=moved,
        inputs=tuple(inputs),
        constants=constants,
    )


def _moved(value: Any, own: torch.device) -> Any:
    if not _is_tensor(value):
        return value
    device = CUDA if value.device == own else value.device
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)


def _copied(source: fx.Graph, own: torch.device) -> tuple[fx.Graph, list[str]]:
    """The graph, on CUDA where its own device is an argument, and the names of its constants."""

    def there(argument: Any) -> Any:
        return CUDA if isinstance(argument, torch.device) and argument == own else argument

    graph = fx.Graph()
    names: list[str] = []
    copies: dict[fx.Node, fx.Node] = {}
    for node in source.find_nodes(op="placeholder"):
        copies[node] = graph.node_copy(node)
    for node in source.find_nodes(op="get_attr"):
        copies[node] = graph.placeholder(f"constant_{len(names)}")
        names.append(str(node.target))
    for node in source.nodes:
        if node in copies:
            continue
        copy = graph.node_copy(node, lambda given: copies[given])
        copy.args = fx.node.map_aggregate(copy.args, there)
        copy.kwargs = fx.node.map_aggregate(copy.kwargs, there)
        copies[node] = copy
    for node in graph.nodes:
        node.meta.pop("tensor_meta", None)
    return graph, names


def infer(graph: fx.Graph, fakes: Sequence[Any]) -> None:
    """Give every node the value that it has where the inputs are `fakes`."""
    mode: Any = next(getattr(fake, "fake_mode") for fake in fakes if _is_tensor(fake))  # noqa: B009
    values = iter(fakes)
    with torch.no_grad(), mode:
        for node in graph.nodes:
            if node.op == "placeholder":
                node.meta["val"] = next(values)
            elif node.op == "call_function":
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
                node.meta["val"] = node.target(*args, **kwargs)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)
