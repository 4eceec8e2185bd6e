"""The blocks of the KV cache that are free, and who may write the others."""

from __future__ import annotations

from collections.abc import Iterable


class BlockPool:
    """A free list over the physical blocks 0..num_blocks - 1.

    The spare block that swallows masked writes is the executor's own and not among them.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: low ids first, hot blocks again
        self._is_free = [True] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> tuple[int, ...] | None:
        """Take `count` blocks, or none at all: None when fewer are free."""
        if count > len(self._free):
            return None
        taken = tuple(self._free.pop() for _ in range(count))
        for block in taken:
            self._is_free[block] = False
        return taken

    def free(self, blocks: Iterable[int]) -> None:
        """Give blocks back.  Freeing one twice is a bug of ours, hence the assert."""
        for block in blocks:
            assert not self._is_free[block], f"block {block} freed twice"
            self._is_free[block] = True
            self._free.append(block)
