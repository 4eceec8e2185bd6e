"""LoRA adapters while serving: the loaded ones, their places, and the requests that use them."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol
from weakref import WeakSet

import torch

from compilespec.errors import CheckpointError, InvalidRequest
from compilespec.errors.suggest import did_you_mean
from compilespec.lowering.artifacts import tensor_bytes
from compilespec.program import AdapterShape
from compilespec.runtime.executor import Executor
from compilespec.tracing.adapter_files import Adapter, check_finite, describe_misfits, read_adapter


@dataclass(frozen=True, kw_only=True, eq=False)
class LoadedAdapter:
    """A loaded adapter in its place.  Loading it again makes another object."""

    name: str
    place: int
    source: str
    key: bytes  # of its values; begins the keys of its requests' cache blocks


class UsesAdapter(Protocol):
    """A request, seen only for its adapter."""

    adapter: LoadedAdapter | None

    @property
    def finished(self) -> bool:
        """True once it needs its adapter no more."""


@dataclass(kw_only=True)
class Adapters:
    """The adapters of an engine.  From any thread, but for `put` and `drop`: these write between
    two steps.

    A place is free when no name has it and no unfinished request uses it, queued or not: a replaced
    or dropped adapter serves its requests to their end.

    Args:
        shape: None where the program has no room for any.
    """

    executor: Executor
    shape: AdapterShape | None
    dtype: torch.dtype = torch.float32
    _users: WeakSet[UsesAdapter] = field(default_factory=WeakSet)
    _loaded: dict[str, LoadedAdapter] = field(default_factory=dict)
    _places: dict[int, LoadedAdapter] = field(default_factory=dict)  # the adapter in each
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._loaded)

    def find(self, name: str | None) -> LoadedAdapter | None:
        """The adapter of this name; None for a request that names none.

        Raises: InvalidRequest where no adapter of the name is loaded.
        """
        if name is None:
            return None
        self._check_room()
        found = self._loaded.get(name)
        if found is None:
            known = ", ".join(self._loaded) or "none"
            cure = did_you_mean(name, self.names) or "; load it with load_adapter()"
            raise InvalidRequest(f"no adapter {name!r} is loaded; loaded: {known}{cure}")
        return found

    def assign(self, name: str | None, users: Sequence[UsesAdapter]) -> None:
        """Give requests the adapter that they ask for: they keep its place until they end.

        Raises: InvalidRequest where there is none of that name, any more.
        """
        with self._lock:
            adapter = self.find(name)
            for user in users if adapter is not None else ():
                user.adapter = adapter
                self._users.add(user)

    def read(self, directory: str | Path | Adapter) -> Adapter:
        """Read an adapter and check that it fits.

        Raises: CheckpointError, NotSupported (see `read_adapter` and `check_finite`; another
            model's, a rank or modules that the program has no room for), InvalidRequest.
        """
        shape = self._check_room()
        adapter = read_adapter(directory)
        if adapter.rank > shape.rank:
            raise CheckpointError(
                f"{adapter.source} has rank {adapter.rank}, and there is room for {shape.rank}; "
                f"compile with max_adapter_rank={adapter.rank}"
            )
        if misfits := describe_misfits(adapter, self.executor.adapter_products()):
            raise CheckpointError(
                f"{adapter.source} {misfits} as a product that adapters may change; compile with "
                "adapters= of one that changes the same modules, or with adapters={}, for all"
            )
        check_finite(adapter, self.dtype)
        return adapter

    def put(self, name: str, adapter: Adapter) -> None:
        """Give a place to an adapter, under a new name or instead of another.

        Raises: InvalidRequest where no place is free.
        """
        shape = self._check_room()
        if not isinstance(name, str) or not name:
            raise InvalidRequest(f"an adapter's name is a text; got {name!r}")
        with self._lock:
            place = self._free_place(name, shape)
            self.executor.write_adapter(place, adapter.modules)
            loaded = LoadedAdapter(
                name=name, place=place, source=adapter.source,
                key=_digest(adapter),
            )  # fmt: skip
            self._places[place] = self._loaded[name] = loaded
            self._clear_places()

    def drop(self, name: str) -> None:
        """Give it to no new request.  Raises: InvalidRequest where it is not loaded."""
        self.find(name)
        with self._lock:
            self._loaded.pop(name, None)
            self._clear_places()

    def _clear_places(self) -> None:
        """Write zeros into places whose contents nobody needs."""
        needed = self._used_places() | {one.place for one in self._loaded.values()}
        for place in sorted(self._places.keys() - needed):
            self.executor.write_adapter(place, {})
            del self._places[place]

    def _used_places(self) -> set[int]:
        adapters = [user.adapter for user in self._users if not user.finished]
        return {adapter.place for adapter in adapters if adapter is not None}

    def _free_place(self, name: str, shape: AdapterShape) -> int:
        """A free place; if none is free, the place this name already has."""
        used = self._used_places()
        named = {one.place for one in self._loaded.values()}
        own = self._loaded.get(name)
        candidates = [*(s for s in range(shape.num_places) if s not in named)]
        candidates += [own.place] if own is not None else []
        free = next((place for place in candidates if place not in used), None)
        if free is None:
            raise InvalidRequest(
                f"all {shape.num_places} places for adapters are taken; drop_adapter() one, wait "
                "for its requests to end, or compile with a higher max_adapters"
            )
        return free

    def _check_room(self) -> AdapterShape:
        if self.shape is None:
            raise InvalidRequest(
                "the engine has no room for adapters that requests choose; compile with "
                "adapters={name: directory}"
            )
        return self.shape


def _digest(adapter: Adapter) -> bytes:
    digest = hashlib.sha256(b"adapter")
    for path, module in sorted(adapter.modules.items()):
        for matrix in (module.down, module.up):
            digest.update(f"{path} {matrix.dtype} {tuple(matrix.shape)}".encode())
            digest.update(tensor_bytes(matrix))
    return digest.digest()
