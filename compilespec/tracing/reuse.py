"""Reuses captures: a model like an earlier one is not traced again.

They are kept in memory, and on disk for other processes (`capture_files`).

What a capture depends on is known in two parts.  `key_of` digests what the call can reach from its
module: classes and their code, attributes, configurations, and the forms of weights.  What the code
that was traced takes from its modules' globals is digested beside the capture, in `Reads`, and
compared when it is found again.  Anything that cannot be digested means: trace again.
"""

from __future__ import annotations

import collections
import dataclasses
import dis
import functools
import hashlib
import importlib.util
import itertools
import logging
import os
import sys
import sysconfig
import time
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules import module as module_hooks

from compilespec import _torch_compat
from compilespec.program import Traced
from compilespec.tracing import capture_files
from compilespec.tracing.capture_files import Reads
from compilespec.tracing.classes import is_library
from compilespec.tracing.fingerprint import IMPORTED, CannotKey, Fingerprint

logger = logging.getLogger("compilespec")

_MAX_KEPT = 64  # captures in memory, which are graphs without weights
_KEPT_METADATA = ("example_value", "custom", "role", "stack_trace")


_kept: collections.OrderedDict[str, list[tuple[Reads, Traced]]] = collections.OrderedDict()


def forget_captures() -> None:
    """Forget all captures of this process."""
    _kept.clear()


def reused(
    module: nn.Module,
    call: Callable[..., Any],
    arguments: Mapping[str, tuple[Tensor, Sequence[int]]],
    names: tuple[str, str],
    capture: Callable[[], tuple[Traced, list[types.CodeType]]],
) -> Traced:
    """An earlier capture of a module like this one, bound to its weights; else a new one, kept.

    Args:
        names: of the capture, and the prefix of its weights' names.
        capture: makes a new one, and returns the traced code objects too.
    """
    started, owner = time.perf_counter(), names[1]
    try:
        key, found = _key_of(module, call, arguments, names)
    except CannotKey as error:
        return dataclasses.replace(capture()[0], why_traced=str(error))
    if kept := _recall(key, found):
        traced = _rebound(kept, module, owner)
        elapsed_ms = (time.perf_counter() - started) * 1e3
        return dataclasses.replace(traced, trace_ms=elapsed_ms, reused=True)
    traced, codes = capture()
    try:
        _keep(key, found, traced, codes, owner)
    except CannotKey as error:
        return dataclasses.replace(traced, why_traced=str(error))
    traced = _rebound(traced, module, owner)
    return dataclasses.replace(traced, why_traced="no model like it was traced before")


def _recall(key: str, found: Fingerprint) -> Traced | None:
    """The capture with this key, of this process or on disk, if the globals that it read are
    unchanged.
    """
    for reads, kept in _kept.get(key, ()):
        if _digest_of(reads[0], found) == reads[1]:
            _kept.move_to_end(key)
            return kept
    stored = capture_files.load(key)
    if stored is None or _digest_of(stored[0][0], found) != stored[0][1]:
        return None
    try:
        traced = stored[1]()
    except Exception as error:  # written by another torch, or damaged: tracing repairs it
        logger.warning("trace %s cannot be read (%s); tracing again", key, error)
        return None
    _remember(key, stored[0], traced)
    return traced


def _key_of(
    module: nn.Module,
    call: Callable[..., Any],
    arguments: Mapping[str, tuple[Tensor, Sequence[int]]],
    names: tuple[str, str],
) -> tuple[str, Fingerprint]:
    """The key of a capture, and the fingerprint that met the call's code.  Raises: CannotKey."""
    _refuse_modes()
    found = Fingerprint()
    found.add((_settings(), names))
    for name, (tensor, dims) in arguments.items():
        found.add((name, tuple(tensor.shape), tensor.dtype, tensor.device, tuple(dims)))
    found.add(Tensor)  # code that replaced its methods
    found.add(call, "call")
    found.add(module, "module")
    return found.hexdigest(), found


def _keep(
    key: str, found: Fingerprint, traced: Traced, codes: Iterable[types.CodeType], owner: str
) -> None:
    """Keep a capture for later calls.  Raises: CannotKey."""
    if any(name.startswith(f"{owner}.captured_") for name in traced.weights):
        raise CannotKey("it holds a tensor that is no parameter or buffer of its module")
    for node in traced.graph_module.graph.nodes:
        if node.op == "get_attr":
            raise CannotKey("its graph holds a constant tensor, or another graph")
        module = getattr(node.target, "__module__", None) or ""
        if isinstance(node.target, types.FunctionType) and not is_library(module):
            raise CannotKey(f"its graph calls {node.target.__qualname__} of {module} as it is")
    reads = _reads(found, codes)
    _remember(key, reads, dataclasses.replace(traced, weights={}))
    try:
        capture_files.save(key, reads, traced)
    except CannotKey as error:
        logger.info("the trace is not kept on disk: %s", error)


def _remember(key: str, reads: Reads, traced: Traced) -> None:
    _kept.setdefault(key, []).append((reads, traced))
    while len(_kept) > _MAX_KEPT:
        _kept.popitem(last=False)


def _rebound(traced: Traced, module: nn.Module, owner: str) -> Traced:
    """A copy of a capture, with the weights of `module`."""
    parameters = module.named_parameters(remove_duplicate=False)
    tensors = dict(itertools.chain(parameters, module.named_buffers(remove_duplicate=False)))
    names = [entry.name for entry in traced.inputs if entry.kind == "weight"]
    weights = {name: tensors[name.removeprefix(f"{owner}.")].detach() for name in names}
    graph_module = _copy(traced.graph_module)
    return dataclasses.replace(traced, graph_module=graph_module, weights=weights)


def _copy(gm: fx.GraphModule) -> fx.GraphModule:
    """A graph of the same nodes and names, with the metadata that later stages read."""
    graph = fx.Graph()
    output = graph.output(graph.graph_copy(gm.graph, {}))
    output.meta = dict(gm.graph.output_node().meta)
    for node in graph.nodes:
        node.type = None
        node.meta = {name: node.meta[name] for name in _KEPT_METADATA if name in node.meta}
    return _torch_compat.graph_module(graph, gm)


# --- what the traced code reads ---


def _reads(found: Fingerprint, codes: Iterable[types.CodeType]) -> Reads:
    """The globals that `codes` read.  Each of them must have been seen: its text is in a digest.
    Names lead to functions, whose code reads names from other modules, and so on.

    Names lead to functions, whose code takes names from other modules, and so on.
    Raises: CannotKey.
    """
    left = {id(code): code for code in codes}
    steps: list[tuple[str, tuple[str, ...]]] = []
    inner = found.copy()
    while left:
        met = [code for number, code in left.items() if number in inner.codes]
        if not met:
            code = next((code for code in left.values() if not _is_of_library(code)), None)
            if code is None:  # torch's own code and Dynamo's, for which versions stand
                break
            raise CannotKey(f"{code.co_qualname} ({code.co_filename}) was traced from out of sight")
        names: dict[str, set[str]] = {}
        for code in met:
            del left[id(code)]
            space = inner.codes[id(code)]
            module = str(space.get("__name__"))
            if is_library(module) and not module.startswith("torch."):
                continue
            if getattr(sys.modules.get(module), "__dict__", None) is not space:
                raise CannotKey(f"{code.co_qualname} is of no module")
            names.setdefault(module, set()).update(_names_in(code, str(space.get("__package__"))))
        for module, used in names.items():
            step = (module, tuple(sorted(used)))
            inner.add_globals(vars(sys.modules[module]), step[1])
            steps.append(step)
    return tuple(steps), inner.hexdigest()


def _digest_of(names: Iterable[tuple[str, tuple[str, ...]]], found: Fingerprint) -> str | None:
    """The digest of the names' present values; None where there is none."""
    inner = found.copy()
    try:
        for module, used in names:
            if module not in sys.modules:
                return None
            inner.add_globals(vars(sys.modules[module]), used)
    except CannotKey:
        return None
    return inner.hexdigest()


def _names_in(code: types.CodeType, package: str) -> set[str]:
    """The names that a package's code uses, and the modules that it imports itself."""
    names, steps = {*code.co_names}, list(dis.get_instructions(code))
    for level, step in zip(steps, steps[2:], strict=False):  # level, names to import, import
        if step.opname == "IMPORT_NAME":
            relative = "." * int(level.argval or 0) + str(step.argval or "")
            names.add(IMPORTED + importlib.util.resolve_name(relative, package))
    inner = (_names_in(one, package) for one in code.co_consts if isinstance(one, types.CodeType))
    return names.union(*inner)


def _is_of_library(code: types.CodeType) -> bool:
    name = code.co_filename
    is_stdlib = name.startswith(_stdlib()) and "-packages" not in name
    return name.startswith(("<frozen ", f"{os.path.dirname(torch.__file__)}{os.sep}")) or is_stdlib


@functools.cache
def _stdlib() -> str:
    return sysconfig.get_paths()["stdlib"] + os.sep


# --- settings of the process ---


def _settings() -> tuple[Any, ...]:
    """The settings that tracing depends on beside the model: versions, and torch's settings."""
    transformers = sys.modules.get("transformers")
    return (
        torch.__version__, getattr(transformers, "__version__", ""), sys.version,
        torch.get_default_dtype(), str(torch.get_default_device()),
        torch.are_deterministic_algorithms_enabled(), torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda"),
        torch.get_float32_matmul_precision(), _torch_compat.capture_settings(), _own_code(),
    )  # fmt: skip


@functools.cache
def _own_code() -> str:
    """A digest of the files that make captures."""
    digest, root = hashlib.sha256(), Path(__file__).parents[1]
    files = [*root.glob("tracing/*.py"), *root.rglob("ops/**/*.py"), *root.glob("*.py")]
    for path in sorted(files):
        digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()


def _refuse_modes() -> None:
    """Raises: CannotKey where hooks of all modules, or modes of torch, could change a trace."""
    tables = (one for name, one in vars(module_hooks).items() if name.startswith("_global_"))
    if any(isinstance(one, dict) and one for one in tables):
        raise CannotKey("torch has hooks for all modules")
    if _torch_compat.has_modes():
        raise CannotKey("a mode of torch is active")
