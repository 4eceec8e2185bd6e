"""Follows one request through its guide: the ids that may come next, and after each draft."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from compilespec.errors import GuideFailed
from compilespec.program import PAD
from compilespec.runtime.guides.base import Matcher, only_bit


class _Place(NamedTuple):
    num_tokens: int  # tokens of the output
    num_matched: int  # tokens that the matcher has seen
    has_begun: bool
    has_ended: bool


class GuideFollower:
    """Keeps a matcher in step with a request's output, and looks ahead along its drafts.

    Args:
        end_ids: ids that may come, and end the output, once the guide's text is complete.
        starts_after: the guide begins after this token; None: with the first one.
        banned: ids that the request may not choose anyway.
        held_ids: ids that it may not choose among its first `min_new_tokens`.
    """

    def __init__(
        self,
        matcher: Matcher,
        num_words: int,
        *,
        end_ids: Collection[int] = (),
        starts_after: int | None = None,
        banned: Collection[int] = (),
        held_ids: Collection[int] = (),
        min_new_tokens: int = 0,
    ) -> None:
        self._matcher, self._num_words = matcher, num_words
        self._end_ids, self._starts_after = end_ids, starts_after
        self._banned, self._held_ids, self._num_held = banned, held_ids, min_new_tokens
        self._place = _Place(0, 0, has_begun=starts_after is None, has_ended=False)

    @property
    def is_complete(self) -> bool:
        """True where nothing may come any more: EOS came, or only EOS may come and there is
        none.
        """
        if self._place.has_ended or self._end_ids or not self._place.has_begun:
            return self._place.has_ended
        return self._matcher.may_end() and not bool(self._matcher.allowed().any())

    def masks(self, drafts: Sequence[int] = (), parents: Sequence[int] | None = None) -> Tensor:
        """Masks of the ids that may come next, and after each draft that may come itself.

        Args:
            parents: for a tree of drafts, the row that each follows: 0 the next token, i draft i;
                None: each follows the one before.
        Returns:
            int32 [1 + the last draft that may come, ceil(V / 32)], 0 after those that may not; the
            follower stays where it is.
        Raises: GuideFailed when nothing may come next.
        """
        rows = {0: self._next_mask()}
        self._look_ahead(0, drafts, range(len(drafts)) if parents is None else parents, rows)
        none = torch.zeros_like(rows[0])
        return torch.stack([rows.get(row, none) for row in range(max(rows) + 1)])

    def steer(self, drafts: Sequence[int], most: int) -> tuple[list[int], Tensor]:
        """The drafts of a chain for the next step, `most` at most, and the masks along them.

        Where the guide leaves one id to choose, that is the draft; elsewhere it is the given one,
        if it may come.  The follower stays where it is.
        Returns: ids; int32 [1 + their number, ceil(V / 32)].
        Raises: GuideFailed when nothing may come next.
        """
        start, chosen, rows = self._place, list[int](), [self._next_mask()]
        try:
            for given in (*drafts[:most], *[PAD] * (most - len(drafts))):
                forced = only_bit(rows[-1])
                token = given if forced is None else forced
                if token < 0 or not self._step(token):
                    break
                chosen.append(token)
                rows.append(self._allowed())
        except GuideFailed:  # only if the output goes there
            rows = rows[: len(chosen) + 1]
        finally:
            self._matcher.rewind(self._place.num_matched - start.num_matched)
            self._place = start
        none = torch.zeros_like(rows[0])
        return chosen, torch.stack([*rows, *[none] * (len(chosen) + 1 - len(rows))])

    def _next_mask(self) -> Tensor:
        """Raises: GuideFailed when nothing may come next."""
        words = self._allowed()
        if not bool(words.any()):
            raise GuideFailed(
                f"the guide leaves nothing to choose after {self._place.num_tokens} tokens: no id "
                "of the vocabulary continues it"
            )
        return words

    def _look_ahead(
        self, row: int, drafts: Sequence[int], parents: Sequence[int], rows: dict[int, Tensor]
    ) -> None:
        """Add the masks after the drafts that follow `row`, and after those that follow them."""
        start = self._place
        for child, (token, parent) in enumerate(zip(drafts, parents, strict=True), 1):
            if parent != row or token < 0:
                continue
            try:
                if self._step(token):
                    rows[child] = self._allowed()
                    self._look_ahead(child, drafts, parents, rows)
            except GuideFailed:  # only if the output goes there
                continue
            finally:
                self._matcher.rewind(self._place.num_matched - start.num_matched)
                self._place = start

    def follow(self, tokens: Sequence[int]) -> tuple[int, GuideFailed | None]:
        """Go past chosen tokens; returns how many of them belong to the output, and the error of
        the next one.
        """
        for count, token in enumerate(tokens):
            if self.is_complete:
                return count, None
            if not self._step(token):
                return count, GuideFailed(
                    f"token {token} after {self._place.num_tokens} tokens is not what the guide "
                    "allows, together with allowed_token_ids, bad_token_ids and min_new_tokens: "
                    "nothing is left to choose, or the acceptance is lossy"
                )
        return len(tokens), None

    def _allowed(self) -> Tensor:
        if not self._place.has_begun:
            return torch.full((self._num_words,), -1, dtype=torch.int32)
        if self._place.has_ended:
            return torch.zeros(self._num_words, dtype=torch.int32)
        words = self._matcher.allowed().clone()
        may_end = self._matcher.may_end()
        for token in self._end_ids:
            bit = 1 << token % 32 if token % 32 < 31 else -(1 << 31)
            words[token // 32] &= ~bit
            words[token // 32] |= bit if may_end else 0
        return words

    def _step(self, token: int) -> bool:
        """Go past one token; returns False, and changes nothing, if it may not come."""
        place = self._place
        is_held = place.num_tokens < self._num_held and token in self._held_ids
        if place.has_ended or is_held or token in self._banned:
            return False
        matched = begun = ended = False
        if not place.has_begun:
            begun = token == self._starts_after
        elif token in self._end_ids:
            ended = self._matcher.may_end()
            if not ended:
                return False
        else:
            matched = self._matcher.advance(token)
            if not matched:
                return False
        self._place = _Place(
            place.num_tokens + 1, place.num_matched + matched, place.has_begun or begun, ended
        )
        return True
