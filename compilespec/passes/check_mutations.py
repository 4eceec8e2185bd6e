"""Checks that a step writes only its state and its caches, each through one storage."""

from __future__ import annotations

from torch import fx

from compilespec.errors import PassError
from compilespec.passes.aliases import written_roots
from compilespec.passes.context import PassContext


def check_mutations(gm: fx.GraphModule, ctx: PassContext) -> int:
    """Check that every written input is a state or cache buffer; temporaries may be written.
    Returns: inputs written.

    This catches caches that were cloned, or written through two storages.  Numerics: exact.  ATen.
    """
    written = {
        root.meta.get("role")
        for root in written_roots(gm.graph)
        if root.op in ("placeholder", "get_attr")
    }
    foreign = sorted(str(role) for role in written if role not in ctx.buffers)
    if foreign:
        raise PassError(f"the graph writes {', '.join(foreign)}, which is neither state nor cache")
    return len(written)
