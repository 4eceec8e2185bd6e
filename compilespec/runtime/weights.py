"""Weights in the layout that the lowered graphs ask for."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from compilespec import _torch_compat
from compilespec.ops.device import traits_of
from compilespec.ops.quantized_linear import lay_out
from compilespec.program import PIECE, InputSpec, LoweredPhase, SpecProgram, StepKey
from compilespec.runtime.mapped_pages import MappedPages
from compilespec.tracing.quantized_weights import is_quantized, plain_tensors

GIVEN_BACK = 2**25  # bytes at a time


def bind_weights(
    program: SpecProgram, graphs: Mapping[StepKey, LoweredPhase], model: nn.Module | None = None
) -> dict[str, Tensor]:
    """Every weight input by name, merged and packed once for all graphs that read it.

    The parameters of `model` and of the drafter become rows of the merged weights that were made
    from them, each right after it was made: at most one merged weight is in memory twice at a
    time.  Their values stay the same; packed weights are left alone.  The program forgets pieces
    that were cut for a rank; pages of a mapped checkpoint go back to the system.

    Args: model: None: all parameters stay what they are.
    """
    weights = cast(dict[str, Tensor], program.weights)
    specs = weight_inputs(graphs)
    unread = Counter(source for spec in specs.values() for source in spec.sources)
    as_they_are = {s.sources[0] for s in specs.values() if len(s.sources) == 1 and not s.packed}
    holders = {} if model is None else _holders(program, model)
    bound: dict[str, Tensor] = {}
    mapped, freed = MappedPages(), 0
    for name, spec in specs.items():
        bound[name] = materialise(spec, weights)
        unread.subtract(spec.sources)
        done = [s for s in spec.sources if not unread[s] and s not in as_they_are]
        mapped.give_back(weights[source] for source in done)
        for piece in (s for s in spec.sources if s.endswith(PIECE) and not unread[s]):
            freed += weights[piece].nbytes
            weights[piece] = weights[piece].to("meta")
        if len(spec.sources) > 1 and not spec.packed:
            freed += _share(bound[name], [weights[source] for source in spec.sources], holders)
        if freed > GIVEN_BACK:
            freed = 0
            _give_back(program.config.device)
    return bound


def weight_inputs(graphs: Mapping[StepKey, LoweredPhase]) -> dict[str, InputSpec]:
    """The weight inputs of all graphs, by name."""
    return {s.name: s for graph in graphs.values() for s in graph.inputs if s.kind == "weight"}


def panels_of(
    program: SpecProgram, graphs: Mapping[StepKey, LoweredPhase], bound: Mapping[str, Tensor]
) -> Callable[[Tensor], Tensor | None]:
    """A function that gives a weight as steps read it in panels; None where none does."""
    place = _torch_compat.storage_place
    found = {
        place(program.weights[spec.sources[0]]): bound[name]
        for name, spec in weight_inputs(graphs).items()
        if spec.packed == "panels" and len(spec.sources) == 1
    }
    return lambda weight: None if is_quantized(weight) else found.get(place(weight))


def bind_again(spec: InputSpec, weights: Mapping[str, Tensor], bound: Tensor) -> None:
    """Give a bound input the present values of its sources, in place."""
    parts = [weights[source] for source in spec.sources]
    if not spec.packed:  # often its sources are its rows
        rows = bound.split([len(part) for part in parts]) if len(parts) > 1 else (bound,)
        place = _torch_compat.storage_place
        if all(place(a) == place(b) for a, b in zip(parts, rows, strict=True)):
            return
    bound.copy_(materialise(spec, weights))


def _give_back(device: torch.device) -> None:
    """Give freed memory back to the system; glibc and torch's allocator otherwise keep it, in
    places that are too small for the next merged weight.
    """
    if traits_of(device).is_cuda:
        torch.cuda.empty_cache()
        return
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


Holders = dict[tuple[int, ...], list[Tensor]]  # the tensors that hold a memory, by its place


def _holders(program: SpecProgram, model: nn.Module) -> Holders:
    """All plain tensors through which weights are kept; not those of pieces, which are let go."""
    modules = [one for one in (model, program.drafter) if isinstance(one, nn.Module)]
    kept = [tensor for one in modules for tensor in (*one.parameters(), *one.buffers())]
    kept += [weight for name, weight in program.weights.items() if not name.endswith(PIECE)]
    kept += program.target.weights.values()
    holders: Holders = {}
    for tensor in itertools.chain.from_iterable(map(plain_tensors, kept)):
        if not tensor.is_meta:  # else let go of
            holders.setdefault(_torch_compat.storage_place(tensor), []).append(tensor)
    return holders


def _share(merged: Tensor, parts: Sequence[Tensor], holders: Holders) -> int:
    """Make the holders of the parts rows of the merged weight; returns the bytes that are free."""
    given_back = 0
    for part, rows in zip(parts, merged.split([len(part) for part in parts]), strict=True):
        same = holders.pop(_torch_compat.storage_place(part), [])
        given_back += rows.nbytes if same else 0  # else of an earlier merged weight
        for tensor in same:
            if tensor.shape == rows.shape:
                tensor.data = rows
    return given_back


def materialise(spec: InputSpec, weights: Mapping[str, Tensor]) -> Tensor:
    """A weight input: its sources, concatenated by rows and packed as the graph asks."""
    parts = [weights[name] for name in spec.sources]
    tensor = parts[0] if len(parts) == 1 else torch.cat(parts)
    return lay_out(spec.packed, tensor) if spec.packed else tensor
