"""Attention with heads shared out among the ranks, and their caches."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from torch import fx

from compilespec.passes.splice.sharding.flow import Flow, Placed, Refused, Shard

HEADS = 1  # of queries, keys and values [B, N, S, H]
CACHE_HEADS = 2  # of caches [blocks, tokens, N, H]
SINKS = 12  # among the arguments


def paged_attention(flow: Flow, node: fx.Node) -> Placed:
    """A piece of the query heads each, with the heads of keys and values that they see."""
    query, key, value, key_cache, value_cache = node.args[:5]
    sinks = node.args[SINKS]
    operands = [x for x in (query, key, value) if isinstance(x, fx.Node)]
    found = [flow.of(x, node) for x in operands]
    caches = [x for x in (key_cache, value_cache) if isinstance(x, fx.Node)]
    known = [flow.caches.get(str(x.meta["role"])) for x in caches]
    if not any((*found, *known)):
        return None
    asked, *kept = found
    parts = _parts(flow, operands, asked, kept)
    assert asked is not None
    for cache, before in zip(caches, known, strict=True):
        if before is not None and before.cut.parts != parts:
            raise Refused("attention over a cache that is cut in another way", *operands)
        if parts > 1 and kept[0] is not None:
            flow.caches[str(cache.meta["role"])] = kept[0].at(CACHE_HEADS)
    has_whole_sinks = isinstance(sinks, fx.Node) and flow.of(sinks, node) is None
    if isinstance(sinks, fx.Node) and has_whole_sinks and not flow.propose(sinks, 0, asked.cut):
        raise Refused("attention with sinks that are whole", *operands)
    return asked.at(2, *(s for s in kept if s is not None))


def _parts(
    flow: Flow,
    operands: list[fx.Node],
    asked: Shard | None,
    kept: list[Shard | None],
) -> int:
    """Pieces of keys and values, 1 if every rank has the one head.  Raises: Refused."""
    size = flow.sharding.size
    heads = [int(flow.shape(x)[HEADS]) for x in operands[:2]]
    if any(s is not None and (s.cut.dim != HEADS or s.cut.segments) for s in (asked, *kept)):
        raise Refused("attention whose heads are whole", *operands)
    if asked is None or asked.cut.parts != size:
        raise Refused("attention whose queries are not cut for every rank", *operands)
    parts = {1 if s is None else s.cut.parts for s in kept}
    if len(parts) > 1:
        raise Refused("keys and values that are cut in different ways", *operands, parts=min(parts))
    (number,) = parts
    if number == size or (number == heads[1] and size % number == 0):
        return number
    raise Refused(
        f"{heads[1]} heads of keys cannot be shared out among {size} ranks",
        *operands,
        parts=math.gcd(heads[1], size) if number > 1 else 1,
    )


def write_cache(flow: Flow, node: fx.Node) -> Placed:
    """Keys and values, cut as their caches are."""
    found = [flow.of(x, node) for x in node.args[:2]]
    caches = [x for x in node.args[2:4] if isinstance(x, fx.Node)]
    known = [flow.caches.get(str(x.meta["role"])) for x in caches]
    for have, want in zip(found, known, strict=False):
        if (have.cut.parts if have else 1) != (want.cut.parts if want else 1):
            raise Refused("a cache that is cut in another way", *flow.tensors(node))
    return None


RULES: Mapping[str, Callable[[Flow, fx.Node], Placed]] = {
    "compilespec::paged_attention": paged_attention,
    "compilespec::write_cache": write_cache,
}
