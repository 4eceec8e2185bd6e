"""Checks that a step writes only its state and its caches, each through one storage."""

from __future__ import annotations

from compilespec.errors import PassError
from compilespec.passes.graph.aliases import written_roots
from compilespec.passes.splice.builder import Splice


def check_mutations(step: Splice) -> int:
    """Check that every written input is a state or cache buffer; temporaries may be written.
    Returns: inputs written.

    This catches caches that were cloned, or written through two storages.  Numerics: exact.  ATen.
    """
    written = {
        root.meta.get("role")
        for root in written_roots(step.graph)
        if root.op in ("placeholder", "get_attr")
    }
    foreign = sorted(str(role) for role in written if role not in step.ctx.buffers)
    if foreign:
        raise PassError(f"the graph writes {', '.join(foreign)}, which is neither state nor cache")
    return len(written)
