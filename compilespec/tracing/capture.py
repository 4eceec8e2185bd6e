"""Captures one call of a module as one graph of torch IR, with symbolic sizes."""

from __future__ import annotations

import dataclasses
import itertools
import time
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

import compilespec.ops  # noqa: F401  (registers the operators)
from compilespec import _torch_compat
from compilespec.errors import SpecError, TraceError, UnsupportedModel
from compilespec.program import Traced, module_path
from compilespec.tracing.branches import branches_of
from compilespec.tracing.naming import clean_module_paths, name_inputs, source_line
from compilespec.tracing.quantized_weights import stand_ins
from compilespec.tracing.reuse import reused

EXAMPLE_SHAPE = (7, 13)  # rare as static sizes: torch 2.11 merges equal sizes

_unique = itertools.count()


def trace_call(
    module: nn.Module,
    call: Callable[..., Any],
    arguments: Mapping[str, tuple[Tensor, Sequence[int]]],
    *,
    name: str,
    owner: str | None = None,
) -> Traced:
    """Capture `call(**arguments)` as one graph; weights are named by their path in `module`.

    If a module like this one was captured before, that graph is reused (`reuse`).

    Args:
        arguments: an example tensor and its dynamic dimensions by name.
        owner: prefix of the weights' names where several calls share a module; default `name`.
    Raises: TraceError.
    """

    def capture() -> tuple[Traced, list[types.CodeType]]:
        return _capture(module, call, arguments, name=name, owner=owner or name)

    with stand_ins(module) as quantized:
        traced = reused(module, call, arguments, (name, owner or name), capture)
    weights = {
        path: quantized.get(_torch_compat.storage_place(weight), weight)
        for path, weight in traced.weights.items()
    }
    return dataclasses.replace(traced, weights=weights)


def _capture(
    module: nn.Module,
    call: Callable[..., Any],
    arguments: Mapping[str, tuple[Tensor, Sequence[int]]],
    *,
    name: str,
    owner: str,
) -> tuple[Traced, list[types.CodeType]]:
    """A new capture, and the code objects that were traced for it."""
    started = time.perf_counter()
    captured: dict[str, Any] = {}

    def keep(gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        captured.update(gm=gm, inputs=inputs, codes=_torch_compat.traced_codes())
        captured["guards"] = _torch_compat.size_guards()

        def stop(*_: Any) -> Any:
            raise _Captured

        return stop

    for tensor, dims in arguments.values():
        for dim in dims:
            _torch_compat.mark_dynamic(tensor, dim)
    names = list(arguments)
    examples = [tensor for tensor, _ in arguments.values()]
    function = _with_own_code(call)
    was_training = module.training
    module.eval()
    try:
        with torch.no_grad(), _torch_compat.capture_config():
            torch.compile(function, backend=keep, fullgraph=True)(*examples)
    except _Captured:
        pass
    except _torch_compat.dynamo_errors() as error:
        raise _trace_error(error, module, name) from error
    finally:
        module.train(was_training)
    if "gm" not in captured:
        raise TraceError(
            f"{name}: tracing {type(module).__name__} gave no graph: its output does not depend "
            f"on tensors"
        )
    gm: fx.GraphModule = captured["gm"]
    inputs, weights = name_inputs(
        gm, captured["inputs"], module, dict(zip(names, examples, strict=True)), owner
    )
    clean_module_paths(gm)
    _refuse_sizes_of_data(gm, module, name)
    sizes = {node.meta["role"]: node for node in gm.graph.nodes if node.op == "placeholder"}
    shapes = [sizes[one].meta["example_value"].shape for one in names if one in sizes]
    traced = Traced(
        name=name,
        graph_module=gm,
        inputs=tuple(inputs),
        weights=weights,
        branches=branches_of(captured["guards"], shapes, arguments[names[0]][1]),
        trace_ms=(time.perf_counter() - started) * 1e3,
    )
    own = function.__code__  # a copy of `call`'s
    return traced, [call.__code__, *(code for code in captured["codes"] if code is not own)]


class _Captured(Exception):
    """Ends the traced call once the graph is captured."""


def _with_own_code(call: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of `call` with its own code object, by which Dynamo caches and counts recompiles."""
    code = call.__code__.replace(co_name=f"{call.__name__}_{next(_unique)}")
    copy = types.FunctionType(
        code, call.__globals__, call.__name__, call.__defaults__, call.__closure__
    )
    copy.__kwdefaults__ = call.__kwdefaults__
    return copy


def _refuse_sizes_of_data(gm: fx.GraphModule, module: nn.Module, name: str) -> None:
    """Raises: TraceError where a size follows from values, such as the tokens of each expert."""
    for node in gm.graph.nodes:
        if _torch_compat.has_size_of_data(node.meta.get("example_value")):
            raise TraceError(
                f"{name} cannot be traced as one graph: module "
                f"{module_path(node) or type(module).__name__}, {source_line(node)}: a size there "
                "depends on the values of a tensor; expected sizes that follow from the number of "
                "tokens (of experts: a product over all of them, or grouped)"
            )


def _trace_error(error: BaseException, module: nn.Module, name: str) -> SpecError:
    """An error of one line: the module, the source line, the cause, and what to try."""
    cause, frames = _torch_compat.dynamo_cause(error)
    raised = _torch_compat.raised_while_traced(error)
    where, line = type(module).__name__, ""
    for filename, lineno, _function in frames:
        found = _module_at(module, filename, lineno)
        if found is not None:
            where, line = found, f"{filename.rsplit('/', 1)[-1]}:{lineno}"
    if not line and frames:
        line = f"{frames[-1][0].rsplit('/', 1)[-1]}:{frames[-1][1]}"
    if raised is not None and raised[0] == UnsupportedModel.__name__:
        return UnsupportedModel(f"{type(module).__name__}: {where}, {line}: {raised[1]}")
    if raised is not None:
        return TraceError(
            f"{name}: module {where}, {line or 'line unknown'} raises {cause.rstrip('.')}; "
            "expected forward(input_ids, position_ids) to run: mend the model or its config"
        )
    return TraceError(
        f"{name} cannot be traced as one graph: module {where}, {line or 'line unknown'}: "
        f"{cause.rstrip('.')}; rewrite that line in tensor operations (no .item(), no "
        "data-dependent branch, no print)"
    )


def _module_at(root: nn.Module, filename: str, lineno: int) -> str | None:
    """The deepest module whose forward contains this source line."""
    best: str | None = None
    for path, module in root.named_modules():
        code = getattr(type(module).forward, "__code__", None)
        if code is None or code.co_filename != filename:
            continue
        lines = [line for _, _, line in code.co_lines() if line is not None]
        if lines and min(lines) <= lineno <= max(lines):
            best = f"{path or type(root).__name__} ({type(module).__name__})"
            break
    return best


def fresh(outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return views: a tensor that is returned twice, or is an argument, would get no output
    node.
    """
    return tuple(output.view_as(output) for output in outputs)


def output_widths(traced: Traced) -> tuple[int, ...]:
    output = next(node for node in reversed(traced.graph_module.graph.nodes) if node.op == "output")
    return tuple(int(node.meta["example_value"].shape[-1]) for node in output.args[0])
