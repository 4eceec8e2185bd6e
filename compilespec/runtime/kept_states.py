"""States of recurrent layers at the ends of blocks, kept for requests that begin alike.

A recurrent state cannot be read by position, so a request that shares a prefix can start only
where a copy of the state was kept.  A prompt is cut at a few ends of blocks, and the state there is
copied from the request's row into a place: at the last block (the next turn of a conversation goes
on there), 8, 64, 512, ... blocks before it (the next prompt ends in other words), and where blocks
of another prompt end that began alike.  The place that was used longest ago makes room.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

FEWEST_BLOCKS = 8  # a copy that saves fewer is not worth the call that ends there
RUNG = 8  # each distance from the last block over the one before


class KeptCopies:
    """The places of the copies, by the key of the block at whose end each was made.

    Args:
        on_reuse: called with the key and the place of a settled copy that makes room.
    """

    def __init__(
        self, num_places: int, on_reuse: Callable[[bytes, int], None] = lambda key, place: None
    ) -> None:
        self._on_reuse = on_reuse
        self._settled: set[bytes] = set()  # those that were made, and are right
        self._place_of: OrderedDict[bytes, int] = OrderedDict()  # the latest used last
        self._free = list(range(num_places))

    def __len__(self) -> int:
        return len(self._place_of)

    def find(self, keys: Sequence[bytes]) -> tuple[int, int | None]:
        """The number of blocks before the deepest copy along these keys, and its place."""
        for count in range(len(keys), 0, -1):
            place = self._place_of.get(keys[count - 1])
            if place is not None:
                self._place_of.move_to_end(keys[count - 1])
                return count, place
        return 0, None

    def keep(self, key: bytes) -> int | None:
        """The place for a copy at this key; None where there is one."""
        if key in self._place_of:
            self._place_of.move_to_end(key)
            return None
        place = self._free.pop() if self._free else self._make_room()
        self._place_of[key] = place
        return place

    def settle(self, key: bytes) -> int | None:
        """The place of a copy that was made, and is right; None where there is none any more, or
        it was settled before.
        """
        if key in self._settled or key not in self._place_of:
            return None
        self._settled.add(key)
        return self._place_of[key]

    def _make_room(self) -> int:
        key, place = next(iter(self._place_of.items()))
        if key in self._settled:
            self._on_reuse(key, place)
        del self._place_of[key]
        self._settled.discard(key)
        return place

    def forget(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            if key in self._place_of:
                self._settled.discard(key)
                self._free.append(self._place_of.pop(key))

    def clear(self) -> None:
        self.forget(tuple(self._place_of))


def places_to_keep(last: int, found: int, known: int) -> tuple[int, ...]:
    """The numbers of blocks after which a prompt's states are kept, rising.

    Args:
        last: the largest number possible.
        found: blocks before the state that the request starts from.
        known: blocks of the prompt that the cache holds.
    """
    numbers = {last} | ({known} if known <= last else set())
    distance = RUNG
    while last - found >= 2 * distance:
        numbers.add(last - distance)
        distance *= RUNG
    return tuple(sorted(n for n in numbers if n - found >= FEWEST_BLOCKS))
