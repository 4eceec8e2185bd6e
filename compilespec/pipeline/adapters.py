"""The target's LoRA adapters: merged into it, or beside it, with the room that they need."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from compilespec.errors import InvalidOption, NotSupported
from compilespec.pipeline.options import CompileOptions
from compilespec.program import AdapterShape, Traced
from compilespec.tracing.adapter_files import Adapter, check_finite, describe_misfits, read_adapter
from compilespec.tracing.adapters import adaptable_products, merge_adapter
from compilespec.tracing.load import Target

RANKS = (8, 16, 32, 64, 128, 256, 512)  # ranks that adapters are padded to: few sizes, few programs
DEFAULT_RANK = 16  # where no adapter says its rank


def with_adapters(target: Target, options: CompileOptions) -> Target:
    """The target with the adapter of `adapters=` merged into it, or with those beside it.

    Raises: CheckpointError, NotSupported (see `read_adapter`).
    """
    given = options.adapters
    if given is None:
        return target
    if not isinstance(given, Mapping):
        return merge_adapter(target, given)
    adapters = {name: read_adapter(directory) for name, directory in given.items()}
    for adapter in adapters.values():
        check_finite(adapter, target.dtype)
    return dataclasses.replace(target, adapters=adapters)


def adapter_shape(options: CompileOptions, target: Target, traced: Traced) -> AdapterShape | None:
    """The room for adapters: their number, rank and products; None: no room.

    Raises: InvalidOption (more of them than `max_adapters`, a higher rank than
        `max_adapter_rank`), NotSupported (a module that requests' adapters cannot change).
    """
    adapters = target.adapters
    if adapters is None:
        return None
    products = adaptable_products(traced)
    for adapter in adapters.values():
        if misfits := describe_misfits(adapter, products):
            raise NotSupported(
                f"{adapter.source} {misfits} as a product that requests may share; give an adapter "
                "of this model, or merge it with adapters=DIRECTORY"
            )
    modules = sorted({path for one in adapters.values() for path in one.modules} or products)
    return AdapterShape(
        num_places=_num_places(options.max_adapters, len(adapters)),
        rank=_rank(options.max_adapter_rank, adapters),
        modules=tuple(modules),
    )


def describe_adapters(shape: AdapterShape, adapters: Mapping[str, Adapter]) -> str:
    """A line for `Engine.plan()`."""
    names = ", ".join(f"{name} (rank {one.rank})" for name, one in adapters.items()) or "none yet"
    return (
        f"adapters: {names}; room for {shape.num_places} of rank {shape.rank} beside "
        f"{len(shape.modules)} products"
    )


def _num_places(most: int | None, count: int) -> int:
    if most is not None and most < count:
        raise InvalidOption(
            f"max_adapters must be at least the {count} of adapters=; got {most}: raise it, or "
            "leave it out"
        )
    return most or max(1, count)


def _rank(most: int | None, adapters: Mapping[str, Adapter]) -> int:
    """The smallest of `RANKS` that holds all; above them the rank itself."""
    wanted = max((one.rank for one in adapters.values()), default=0)
    if most is not None and most < wanted:
        name = next(name for name, one in adapters.items() if one.rank == wanted)
        raise InvalidOption(
            f"max_adapter_rank must be at least {wanted}, the rank of adapter {name!r}; got "
            f"{most}: raise it, or leave it out"
        )
    wanted = most or wanted or DEFAULT_RANK
    return next((rank for rank in RANKS if rank >= wanted), wanted)
