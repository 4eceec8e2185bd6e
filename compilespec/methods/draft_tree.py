"""Trees of drafts as users describe them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from compilespec.errors import InvalidOption, is_integer
from compilespec.program import TreeShape

MAX_NODES = 256  # rows of a verify step


@dataclass(frozen=True)
class DraftTree:
    """What a step drafts instead of a chain: `compile(..., draft_tree=DraftTree(...))`.

    A static tree has the same form in every step:

    choices     a path for each node, as EAGLE and Medusa write them: (0, 2) is the third best token
                after the best one.  The beginnings of a path are nodes themselves.

    A dynamic one grows where the drafter is sure:

    top_k       how many nodes of each depth are continued, and by how many tokens each
    depth       drafts on the longest path (EAGLE's code calls this depth less one)
    num_nodes   of all that were drafted, the nodes that are verified: those whose paths are the
                most probable.  The root is not counted (EAGLE's total_token counts it)

    Raises: InvalidOption.
    Source: Cai et al. 2024 (Medusa), Li et al. 2024 (EAGLE-2).
    """

    choices: Sequence[Sequence[int]] | None = None
    top_k: int | None = None
    depth: int | None = None
    num_nodes: int | None = None

    def __post_init__(self) -> None:
        self.shape  # reading it checks it  # noqa: B018

    @property
    def shape(self) -> TreeShape:
        """The sizes that follow."""
        sizes = (self.top_k, self.depth, self.num_nodes)
        if self.choices is not None:
            if sizes != (None, None, None):
                raise InvalidOption(
                    "DraftTree takes choices= or top_k=, depth= and num_nodes=, not both"
                )
            return _static(self.choices)
        for name, value in zip(("top_k", "depth", "num_nodes"), sizes, strict=True):
            if value is None or not is_integer(value) or value < 1:
                raise InvalidOption(
                    f"DraftTree takes choices=, or top_k=, depth= and num_nodes=, positive "
                    f"integers; got {name}={value!r}"
                )
        return _dynamic(*sizes)  # type: ignore[arg-type]


def _static(choices: Sequence[Sequence[int]]) -> TreeShape:
    is_nested = isinstance(choices, Iterable) and not isinstance(choices, str)
    paths = (
        [tuple(path) if isinstance(path, list | tuple) else () for path in choices]
        if (is_nested)
        else []
    )
    wrong = [path for path in paths if not path or not all(is_integer(r) and r >= 0 for r in path)]
    if not paths or wrong:
        raise InvalidOption(
            "DraftTree.choices must be paths of ranks from 0 on, such as [(0,), (1,), (0, 0)]; got "
            f"{choices if not paths else list(choices)[paths.index(wrong[0])]!r}"
        )
    known = set(paths)
    if len(known) < len(paths):
        twice = next(path for path in paths if paths.count(path) > 1)
        raise InvalidOption(f"DraftTree.choices has the path {twice} twice; leave one out")
    orphans = [path for path in paths if len(path) > 1 and path[:-1] not in known]
    if orphans:
        raise InvalidOption(
            f"DraftTree.choices has {orphans[0]} without the node before it, {orphans[0][:-1]}; "
            "give that too, or leave it out"
        )
    _check_num_nodes(len(paths))
    ordered = tuple(sorted(paths, key=lambda path: (len(path), path)))
    return TreeShape(depth=len(ordered[-1]), num_nodes=len(paths), choices=ordered)


def _dynamic(top_k: int, depth: int, num_nodes: int) -> TreeShape:
    _check_num_nodes(num_nodes)
    drafted = top_k + (depth - 1) * top_k**2
    if num_nodes > drafted:
        raise InvalidOption(
            f"DraftTree(top_k={top_k}, depth={depth}) drafts {drafted} tokens, of which "
            f"num_nodes={num_nodes} cannot be chosen; lower it, or raise the others"
        )
    if depth > num_nodes:
        raise InvalidOption(
            f"DraftTree(depth={depth}) cannot be reached with num_nodes={num_nodes}; raise "
            "num_nodes, or lower depth"
        )
    return TreeShape(depth=depth, num_nodes=num_nodes, top_k=top_k)


def _check_num_nodes(count: int) -> None:
    if count > MAX_NODES:
        raise InvalidOption(
            f"DraftTree takes at most {MAX_NODES} nodes, for each is a row of the step; got {count}"
        )
