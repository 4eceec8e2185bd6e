"""Closed lists of batch sizes: B rows of decode, R requests and T tokens of prefill."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from compilespec.errors import InvalidOption
from compilespec.program import Phase

Bucket = tuple[int, ...]  # (B,) or (R, T)
BUCKET_DIMS: Mapping[Phase, tuple[str, ...]] = {"decode": ("B",), "prefill": ("R", "T")}
_SMALLEST_PREFILL = 64
_PREFILL_GROWTH = (1.0, 1.5)  # 64, 96, 128, 192, ...: at most half of a batch is padding


@dataclass(frozen=True, kw_only=True)
class Buckets:
    """The sizes that batches are padded to, ascending; a phase without any is never padded."""

    decode: tuple[Bucket, ...] = ()
    """Buckets (B,); the last is the largest batch."""

    prefill: tuple[Bucket, ...] = ()
    """Buckets (R, T); one of them holds the largest batch."""

    def of(self, phase: Phase) -> tuple[Bucket, ...]:
        return self.decode if phase == "decode" else self.prefill


def smallest(buckets: Iterable[Bucket], sizes: Bucket) -> Bucket | None:
    """The bucket that holds `sizes` with the fewest tokens, then requests; None if none does."""
    holding = [b for b in buckets if all(x >= y for x, y in zip(b, sizes, strict=True))]
    return min(holding, key=lambda bucket: bucket[::-1], default=None)


def read_buckets(given: Any, *, max_batch_size: int, max_prefill_tokens: int) -> Buckets | None:
    """Read `buckets=`: decode batch sizes, or {"decode": sizes, "prefill": (R, T) pairs}.

    Raises: InvalidOption when a list is empty or does not end at the maximum.
    """
    if given is None:
        return None
    if isinstance(given, Mapping):
        unknown = sorted(set(given) - {"decode", "prefill"})
        if unknown or not given:
            raise InvalidOption(
                f'buckets must name "decode" sizes, "prefill" (R, T) pairs, or both; got '
                f"{dict(given)!r}"
            )
        decode, prefill = given.get("decode"), given.get("prefill")
    elif isinstance(given, Sequence) and not isinstance(given, str):
        decode, prefill = given, None
    else:
        raise InvalidOption(
            f"buckets must be a list of batch sizes that ends at max_batch_size={max_batch_size}, "
            f'or a dict of "decode" and "prefill"; got {given!r}'
        )
    return Buckets(
        decode=() if decode is None else _decode(decode, max_batch_size),
        prefill=() if prefill is None else _prefill(prefill, max_batch_size, max_prefill_tokens),
    )


def choose_buckets(
    given: Sequence[int] | Buckets | None,
    *,
    has_graphs: Container[Phase],
    max_batch_size: int,
    max_prefill_tokens: int,
) -> Buckets:
    """The given ones; else defaults of the phases that have graphs, else decode as it comes."""
    if given is not None and not isinstance(given, Buckets):
        given = Buckets(decode=tuple((size,) for size in sorted(given)))
    decode, prefill = (given.decode, given.prefill) if given else ((), ())
    if not decode:
        every = tuple((size,) for size in range(1, max_batch_size + 1))
        decode = default_decode(max_batch_size) if "decode" in has_graphs else every
    if not prefill and "prefill" in has_graphs:
        prefill = default_prefill(max_batch_size, max_prefill_tokens)
    return Buckets(decode=decode, prefill=prefill)


def default_decode(max_batch_size: int) -> tuple[Bucket, ...]:
    """1, 2, 4, then multiples of 8, from 64 on of 16, up to the maximum."""
    sizes = {1, 2, 4, *range(8, 65, 8), *range(80, max_batch_size, 16)}
    return (*((size,) for size in sorted(sizes) if size < max_batch_size), (max_batch_size,))


def default_prefill(max_batch_size: int, max_prefill_tokens: int) -> tuple[Bucket, ...]:
    """Token counts that grow by a third or a half, each for one request and for as many as fit."""
    tokens, size = {max_prefill_tokens}, _SMALLEST_PREFILL
    while size < max_prefill_tokens:
        tokens |= {int(size * growth) for growth in _PREFILL_GROWTH}
        size *= 2
    pairs = {(1, t) for t in tokens} | {(min(max_batch_size, t), t) for t in tokens}
    return tuple(sorted((p for p in pairs if p[1] <= max_prefill_tokens), key=lambda p: p[::-1]))


def _decode(given: Sequence[Any], max_batch_size: int) -> tuple[Bucket, ...]:
    sizes = list(given)
    good = all(_is_size(size) for size in sizes)
    if not good or not sizes or max(sizes) != max_batch_size:
        raise InvalidOption(
            f"buckets must be positive and end at max_batch_size={max_batch_size}; got {sizes}"
        )
    return tuple((size,) for size in sorted(set(sizes)))


def _prefill(given: Sequence[Any], max_batch_size: int, max_tokens: int) -> tuple[Bucket, ...]:
    pairs = [tuple(pair) if isinstance(pair, Sequence) else (pair,) for pair in given]
    good = all(len(pair) == 2 and all(map(_is_size, pair)) for pair in pairs)
    largest = (min(max_batch_size, max_tokens), max_tokens)
    if not good or smallest(pairs, largest) is None:
        raise InvalidOption(
            f"buckets must hold, for prefill, pairs (requests, tokens), one of them at least "
            f"{largest}; got {list(given)}"
        )
    return tuple(sorted(set(pairs), key=lambda pair: pair[::-1]))


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
