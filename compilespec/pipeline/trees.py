"""Checks that a program can have a tree of drafts, before its graphs are made."""

from __future__ import annotations

from collections.abc import Mapping

from compilespec.errors import InvalidOption, NotSupported, UnsupportedState
from compilespec.methods.capabilities import Capabilities
from compilespec.passes.splice.acceptance.registry import RULES
from compilespec.passes.splice.acceptance.tree_rules import check_tree_rule
from compilespec.passes.splice.draft_loops import LOOPS
from compilespec.passes.splice.draft_loops.tree import check_drafter
from compilespec.pipeline.options import CompileOptions
from compilespec.program import ProgramConfig, Traced


def check_tree(
    options: CompileOptions,
    config: ProgramConfig,
    capabilities: Capabilities,
    target: Traced,
    draft: Mapping[str, Traced],
) -> None:
    """Refuse a tree that the program could not grow or judge.

    Raises: InvalidOption, NotSupported, UnsupportedState, DraftMismatch.
    """
    if config.tree is None:
        return
    name = capabilities.name
    if not LOOPS[capabilities.kind].grows_trees:
        able = ", ".join(repr(kind) for kind, loop in LOOPS.items() if loop.grows_trees)
        raise InvalidOption(
            f"spec={name!r} drafts no trees, only methods of the kinds {able} do (eagle3, eagle, "
            "mtp_eagle, draft_model, medusa); leave draft_tree= out"
        )
    if capabilities.combines:
        raise NotSupported(
            f"spec={name!r} and draft_tree= do not go together yet; leave draft_tree= out, or name "
            f"{capabilities.drafter!r} alone"
        )
    recurrent = [
        who
        for who, traced in (("the target", target), *(("the drafter", c) for c in draft.values()))
        if traced.num_recurrent_markers
    ]
    if recurrent:
        raise UnsupportedState(
            f"{recurrent[0]} has recurrent layers, whose state follows one path alone; leave "
            "draft_tree= out"
        )
    proposals = (call for one, call in draft.items() if one.startswith("propose"))
    check_drafter(next(proposals), config.tree, name, options.draft_vocab_size)
    acceptance = options.acceptance_rule
    if RULES[acceptance.rule].decode_tree is None:
        raise NotSupported(
            f"acceptance={acceptance.rule!r} judges no trees yet; leave acceptance= or draft_tree= "
            "out"
        )
    check_tree_rule(acceptance)
    processor = options.processor
    if processor is not None and "context_BL" in processor.inputs:
        raise NotSupported(
            "draft_tree= has no context_BL for logits_processor=, for each row has a path of its "
            "own; read ids_BS alone, give requests a processor on the host, or leave one out"
        )
    if acceptance.force_num_accepted:
        raise NotSupported(
            "force_num_accepted= and draft_tree= do not go together yet; leave one out"
        )
