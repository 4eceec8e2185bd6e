"""A step writes its state and its caches, each through one storage, and nothing else."""

from __future__ import annotations

from torch import fx

from compilespec import _torch_compat
from compilespec.errors import PassError
from compilespec.passes.runner import PassContext


def check_mutations(gm: fx.GraphModule, ctx: PassContext) -> int:
    """Every written argument is a state or cache input.  Returns: how many inputs are written.

    Source: EVIDENCE on caches that were cloned, or written twice through one storage.  Numerics: exact.  ATen.
    """
    written: set[str] = set()
    for node in gm.graph.nodes:
        if node.op != "call_function":
            continue
        for index in _torch_compat.mutated_arguments(node.target):
            argument = node.args[index]
            role = argument.meta.get("role") if isinstance(argument, fx.Node) else None
            if role not in ctx.buffers:
                raise PassError(f"{node.name} ({node.target}) writes {argument}, which is neither state nor cache")
            written.add(str(role))
    return len(written)
