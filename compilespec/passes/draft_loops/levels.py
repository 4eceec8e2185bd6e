"""What the parts of a tree's draft loop hand each other."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import fx

from compilespec.passes.insert_paged_attention import Branches
from compilespec.passes.kv_groups import Metadata


class Level(NamedTuple):
    """Nodes of one depth that go on: F of each request."""

    ids: fx.Node  # int32 [B, F], target ids, PAD where there is none
    parent: fx.Node  # int64 [B, F]: which node of the level before
    metadata: Metadata  # for their attention; their slots are -1
    branches: Branches


class Chosen(NamedTuple):
    """The nodes of a depth that go on, F of each request."""

    ids: fx.Node  # int32 [B, F]
    parent: fx.Node  # int64 [B, F]: which node of the level before
    path: fx.Node  # int32 [B, F, depth]: by the keys of the drafter's passes
    num: int  # F


class Grower(Protocol):
    """One form of trees."""

    def grow(
        self, gm: fx.GraphModule, scores: fx.Node, ids: fx.Node | None, *, is_last: bool,
        before: fx.Node,
    ) -> Chosen | None:  # fmt: skip
        """Choose the nodes of the next depth from the scores of what follows each row."""

    def finish(self, gm: fx.GraphModule, *, before: fx.Node) -> tuple[fx.Node, fx.Node]:
        """Drafts and parents."""
