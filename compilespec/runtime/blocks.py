"""The blocks of the KV cache: their holders, and those that are free."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from compilespec.runtime.executor import Geometry


def num_blocks_for(sizes: Geometry, num_tokens: int) -> int:
    """Blocks for a request's tokens, and for every slot that a step may write past them."""
    slots = min(sizes.config.max_seq_len, num_tokens + sizes.reach.num_reserved_tokens)
    return -(-slots // sizes.config.block_size)


class BlockPool:
    """The physical blocks 0..num_blocks - 1, each free or held by one request or more.

    A block whose contents may be wanted again is `keep`t: once nobody holds it, it is free like the
    others, but is given out last, the one released longest ago first.  The spare block that takes
    masked writes belongs to the executor and is not among them.

    Args:
        on_reuse: called with a kept block that is about to get another owner's contents.
    """

    def __init__(
        self, num_blocks: int, *, on_reuse: Callable[[int], None] = lambda block: None
    ) -> None:
        self.num_blocks = num_blocks
        self.on_reuse = on_reuse
        self._empty = list(range(num_blocks - 1, -1, -1))  # a stack: low ids first, hot ones again
        self._idle: dict[int, None] = {}  # kept, held by nobody; the oldest first
        self._kept: set[int] = set()
        self._num_holders = [0] * num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, kept ones included."""
        return len(self._empty) + len(self._idle)

    def allocate(self, count: int) -> tuple[int, ...] | None:
        """Take `count` blocks, or none at all: None when fewer are free."""
        if count > self.num_free:
            return None
        return tuple(self._take() for _ in range(count))

    def share(self, blocks: Iterable[int]) -> None:
        """Hold kept blocks, which others may hold too."""
        for block in blocks:
            assert block in self._kept, f"block {block} holds nothing that can be shared"
            self._idle.pop(block, None)
            self._num_holders[block] += 1

    def free(self, blocks: Iterable[int]) -> None:
        """Release blocks, in the order in which a request has them.  Of kept ones the last are
        given out first, because nobody can use them without the ones before.
        """
        for block in reversed(tuple(blocks)):
            assert self._num_holders[block], f"block {block} freed twice"
            self._num_holders[block] -= 1
            if not self._num_holders[block]:
                self._put_back(block)

    def keep(self, block: int) -> None:
        """Mark the contents of a held block as possibly wanted again."""
        assert self._num_holders[block], f"block {block} is held by nobody"
        self._kept.add(block)

    def discard(self, block: int) -> None:
        """Mark the contents of a kept block as not wanted any more."""
        self._kept.remove(block)
        if block in self._idle:
            del self._idle[block]
            self._empty.append(block)

    def _take(self) -> int:
        if self._empty:
            block = self._empty.pop()
        else:
            block = next(iter(self._idle))
            del self._idle[block]
            self._kept.remove(block)
            self.on_reuse(block)
        self._num_holders[block] = 1
        return block

    def _put_back(self, block: int) -> None:
        if block in self._kept:
            self._idle[block] = None
        else:
            self._empty.append(block)
