"""What the parts of a tree's draft loop hand each other."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from compilespec.passes.splice.builder import Splice
from compilespec.passes.splice.insert_paged_attention import Branches
from compilespec.passes.splice.places import Places


class TreeNodes(NamedTuple):
    """Nodes of one depth that go on: F of each request."""

    ids: Tensor  # int32 [B, F], target ids, PAD where there is none
    parent: Tensor  # int64 [B, F]: which node of the depth before
    places: Places  # for their attention; their slots are -1
    branches: Branches


class Chosen(NamedTuple):
    """The nodes of a depth that go on, F of each request."""

    ids: Tensor  # int32 [B, F]
    parent: Tensor  # int64 [B, F]: which node of the depth before
    path: Tensor  # int32 [B, F, depth]: by the keys of the drafter's passes
    num: int  # F


class Grower(Protocol):
    """One form of trees."""

    def grow(
        self, step: Splice, scores: Tensor, ids: Tensor | None, *, is_last: bool
    ) -> Chosen | None:
        """Choose the nodes of the next depth from the scores of what follows each row."""

    def finish(self, step: Splice) -> tuple[Tensor, Tensor]:
        """Drafts and parents."""
