"""Turns attention markers into reads and writes of the block-paged KV cache."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from compilespec.errors import NotSupported, PassError
from compilespec.passes.splice.builder import Splice, node_of
from compilespec.passes.splice.kv_groups import KVGroup, group_places
from compilespec.passes.splice.places import Places, step_places
from compilespec.passes.splice.sights import Sights, read_sights
from compilespec.passes.splice.trees import verifies_tree
from compilespec.program import BufferSpec, markers, module_path
from compilespec.tracing.structure import shape_of

# Memory order of a cache [num_blocks, block_size, Nkv, H] where attention reads one head's cells
# at a time, as on the CPU: they follow each other, from block to block.
HEADS_FIRST = (2, 0, 1, 3)
_PAGED = torch.ops.compilespec.paged_attention.default
_MASKED = torch.ops.compilespec.masked_attention.default
Part = tuple[Tensor, Tensor | None]  # keys and values of a layer; values: None of latents


def insert_paged_attention(step: Splice) -> int:
    """Marker -> `compilespec::paged_attention` with the layer's caches and this step's places.
    Numerics: rounding (the same sums over the same keys, in another order).  Runs on torch IR."""
    places, found = step_places(step), markers(step.gm)
    if not found:
        return 0
    branches = None
    with step.before(found[0]):
        if verifies_tree(step.ctx):  # what is accepted is written later
            places = places._replace(slot=torch.full_like(places.slot, -1))
            branches = Branches(path=step.roles.path)
        sights = read_sights(step, places.position)
    return page_markers(step, found, "target", places, branches=branches, sights=sights)


@dataclass(kw_only=True)
class Branches:
    """Tokens that see keys of the call, by `path`, before those of the cache end."""

    path: Tensor  # int32 [B, S, P]
    first: Tensor | None = None  # int32 [B, S]: of rows of a block, see `paged_attention`
    earlier: dict[int, Part] = field(default_factory=dict)
    """By layer, keys and values of calls before, which the paths count first; kept up to date."""

    def with_earlier(self, layer: int, key: Tensor, value: Tensor | None) -> Part:
        """Keys and values of a layer, those of the calls before first."""
        if layer in self.earlier:
            keys, values = self.earlier[layer]
            key = torch.cat((keys, key), 2)
            value = None if values is None or value is None else torch.cat((values, value), 2)
        self.earlier[layer] = key, value
        return key, value


def page_markers(
    step: Splice,
    markers: list[fx.Node],
    owner: str,
    places: Places,
    *,
    block_size: int | None = None,
    layers: Sequence[int] | None = None,
    branches: Branches | None = None,
    sights: Sights | None = None,
) -> int:
    """Rewrite `markers`, one per layer in order, onto the caches of `owner`.

    Args:
        places: those of these markers' tokens; tokens with slot -1 write nothing.
        layers: the layer whose cache each marker uses; None: 0, 1, ...
        block_size: block size of the markers' own KV group; None: the program's.
        branches: of nodes of a tree; None: all keys are in the caches.
        sights: where tokens see later ones; None: they do not.
    """
    for layer, node in zip(layers or range(len(markers)), markers, strict=True):
        marker = _Marker(*step.values(node.args))
        with step.before(node):
            at, blocks = _cells(step, marker, places, block_size)
            if sights is not None and sights.are_of(int(marker.window)):
                at = at._replace(position=sights.last)
            width = leading_part(node.args[2], node.args[1])
            caches = _caches(step, f"{owner}.{layer}", marker, blocks, has_values=not width)
            key, value = marker.key, None if width else marker.value
            if branches is not None:
                key, value = branches.with_earlier(layer, key, value)
            parts = (marker.query, key, value, *caches)
            if marker.mask is None:
                extra = _extra(node, marker, at.position, width, branches, sights)
                paged = _PAGED(*parts, *at, *marker[3:7], *extra)
            else:
                _refuse_beside_masks(node, branches or sights or block_size)
                paged = _MASKED(*parts, *at, *_under_mask(marker, width))
        step.take_place(node, paged)
    return len(markers)


class _Marker(NamedTuple):
    """The arguments of an attention marker."""

    query: Tensor
    key: Tensor
    value: Tensor
    scale: Any
    window: Any
    softcap: Any
    sinks: Any
    chunk: int | None = None  # tokens of a chunk, which attention does not leave
    mask: Tensor | None = None  # [B, 1 or N, S, L], computed by the model over all positions


def _cells(
    step: Splice, marker: _Marker, places: Places, block_size: int | None
) -> tuple[Places, tuple[int, int]]:
    """Where a marker's tokens are in its cache, and that cache's blocks: number and size."""
    if block_size is None:
        return places, (step.config.num_blocks, step.config.block_size)
    group = KVGroup(block_size=block_size, window=int(marker.window))
    return group_places(step, group, places), (group.num_blocks(step.config), block_size)


def _caches(
    step: Splice, layer: str, marker: _Marker, blocks: tuple[int, int], *, has_values: bool
) -> tuple[Tensor, Tensor | None]:
    """The caches of a layer's keys and values, or of keys that begin with the values."""
    keys = cache_of(step, f"{layer}.key", marker.key, blocks)
    return keys, cache_of(step, f"{layer}.value", marker.value, blocks) if has_values else None


def _under_mask(marker: _Marker, value_dim: int) -> tuple[Any, ...]:
    """The last arguments of `masked_attention`."""
    return marker.scale, marker.softcap, marker.sinks, value_dim, marker.mask


def _refuse_beside_masks(node: fx.Node, other_keys: object) -> None:
    """Raises: NotSupported where tokens see other keys than those before them, in the blocks of the
    program.
    """
    if other_keys is not None:
        raise NotSupported(
            f"attention under a mask that the model computes ({module_path(node)}) does not go "
            "with draft_tree=, with images or with kv_block_sizes= yet: leave them out"
        )


def _extra(
    node: fx.Node,
    marker: _Marker,
    position: Tensor,
    value_dim: int,
    branches: Branches | None,
    sights: Sights | None,
) -> tuple[int | Tensor, ...]:
    """The last arguments of `paged_attention`: the width of values that are part of the keys, and
    what tokens see besides the keys before their own.
    """
    if marker.chunk:
        if branches is not None or sights is not None:
            raise NotSupported(
                f"attention in chunks of {marker.chunk} tokens ({module_path(node)}) does not go "
                "with draft_tree= or with images yet: leave them out"
            )
        return (value_dim, *begin_of_chunk(position, size=marker.chunk))
    if sights is not None and int(marker.window) > 0:
        return (value_dim, sights.path, sights.first(int(marker.window)))
    if branches is not None:
        first = () if branches.first is None else (branches.first,)
        return (value_dim, branches.path, *first)
    return (value_dim,) if value_dim else ()


def begin_of_chunk(position_BS: Tensor, *, size: int) -> tuple[Tensor, Tensor]:
    """Paths of no tokens, and the first position of each token's chunk."""
    none_BS1 = torch.full_like(position_BS, -1).unsqueeze(2)
    return none_BS1, position_BS - position_BS % size


def leading_part(value: object, key: object) -> int:
    """How many of a key's first numbers the value is; 0 if it is something else."""
    if not isinstance(value, fx.Node) or value.target is not operator.getitem:
        return 0
    source, index = value.args
    width = (shape_of(value) or (None,))[-1]
    is_first = source is key and index == (Ellipsis, slice(None, width, None))
    return int(width) if is_first and isinstance(width, int) else 0


def cache_of(step: Splice, name: str, part: Tensor, blocks: tuple[int, int]) -> Tensor:
    """The cache `cache.<name>` of keys or values, [B, N, S, H], made on first use."""
    shape = node_of(part).meta.get("example")
    if shape is None or len(shape[0]) != 4:
        raise PassError(f"cache.{name}: its attention marker has no known [B, N, T, H] shape")
    _, heads, _, head_dim = shape[0]
    buffer = BufferSpec(
        name=f"cache.{name}",
        kind="cache",
        shape=(*blocks, int(heads or 0), int(head_dim or 0)),
        dtype=shape[1],
        order=HEADS_FIRST if step.ctx.traits.caches_heads_first else (),
    )
    if step.ctx.sharding is not None:
        buffer = step.ctx.sharding.own(buffer)
    known = step.ctx.buffers.get(buffer.name, buffer)
    if known != buffer:
        raise PassError(
            f"{buffer.name} is {list(known.shape)}, a marker needs {list(buffer.shape)}; a drafter "
            "on the target's cache must have its sizes"
        )
    return step.buffer(buffer)
