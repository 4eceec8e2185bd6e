"""A deterministic toy program behind the `Executor` protocol, strict about every slot it touches.

The toy target's next token is a hash of ALL tokens before it, read back from a paged cache through
the row's block table.  So a wrong block, a stale slot, a skipped prompt token or a row mix-up
changes the tokens or raises.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from compilespec.runtime.executor import Geometry, PrefillChunk
from compilespec.runtime.sampling_rows import RowSampling


class FakeExecutorError(AssertionError):
    """The scheduler broke the protocol."""


def geometry(**changes: int) -> Geometry:
    """Small awkward sizes; vocabulary and blocks are no powers of two."""
    num_draft_tokens = changes.setdefault("num_draft_tokens", 3)
    sizes = {
        "max_batch_size": 4,
        "max_seq_len": 96,
        "max_prefill_tokens": 48,
        "block_size": 8,
        "num_blocks": 48,
        "vocab_size": 259,
        "reserve_tokens": 2 * num_draft_tokens + 1,
    }
    return Geometry(**{**sizes, **changes})


def toy_next(tokens: Sequence[int], vocab_size: int) -> int:
    """The toy target: greedy next token of a context."""
    return zlib.crc32(b"".join(token.to_bytes(4, "little") for token in tokens)) % vocab_size


def toy_decode(prompt: Sequence[int], count: int, vocab_size: int) -> list[int]:
    """Plain decoding of the toy target: what every schedule must reproduce."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(toy_next(tokens, vocab_size))
    return tokens[len(prompt) :]


@dataclass
class _Row:
    blocks: tuple[int, ...] = ()
    num_committed: int = 0  # tokens whose KV is in the cache for good
    last: int | None = None  # last emitted token, once the prompt is in
    drafts: list[int] = field(default_factory=list)
    expected: int | None = None  # token that the next prefill chunk must begin with
    live: bool = False


class FakeExecutor:
    """Implements `Executor` on plain lists.

    Args:
        hit_rate: how often the drafter proposes what the target will say, 0.0 to 1.0.
        fail: called with the phase before every call; may raise.
        next_token: the target, a function of the whole context; the hash by default.
    """

    def __init__(
        self,
        sizes: Geometry | None = None,
        *,
        hit_rate: float = 0.7,
        fail: Callable[[str], None] = lambda phase: None,
        next_token: Callable[[Sequence[int]], int] | None = None,
    ) -> None:
        self.geometry = sizes or geometry()
        self.hit_rate = hit_rate
        self.fail = fail
        self.next_token = next_token or (lambda t: toy_next(t, self.geometry.vocab_size))
        self.closed = False
        self.prefill_calls: list[tuple[PrefillChunk, ...]] = []
        self.decode_calls: list[tuple[int, ...]] = []
        self._rows = [_Row() for _ in range(self.geometry.max_batch_size)]
        num_slots = self.geometry.num_blocks * self.geometry.block_size
        self._cache: list[int | None] = [None] * num_slots

    def set_blocks(self, row: int, blocks: Sequence[int]) -> None:
        _check(not self.closed, "called after close")
        _check(len(set(blocks)) == len(blocks), f"row {row}: a block twice in one table")
        _check(len(blocks) <= self.geometry.blocks_per_row, f"row {row}: too many blocks")
        _check(all(0 <= b < self.geometry.num_blocks for b in blocks), "block outside the cache")
        for other in self._rows:  # whoever held one of these blocks may never run again
            if set(other.blocks) & set(blocks):
                other.live = False
        self._rows[row] = _Row(blocks=tuple(blocks), live=True)
        for block in blocks:  # poison
            start = block * self.geometry.block_size
            self._cache[start : start + self.geometry.block_size] = [
                None
            ] * self.geometry.block_size

    def set_sampling(self, row: int, sampling: RowSampling) -> None:
        _check(self._rows[row].live, f"row {row}: sampling of a row without blocks")
        _check(sampling.params.temperature == 0, "the toy target is greedy")

    def prefill(self, chunks: Sequence[PrefillChunk]) -> list[int | None]:
        _check(not self.closed, "called after close")
        num_tokens = sum(len(chunk.tokens) for chunk in chunks)
        _check(0 < num_tokens <= self.geometry.max_prefill_tokens, f"{num_tokens} packed tokens")
        _check(all(chunk.tokens for chunk in chunks), "an empty chunk")
        _check(len({chunk.row for chunk in chunks}) == len(chunks), "a row twice in one prefill")
        self.fail("prefill")
        self.prefill_calls.append(tuple(chunks))
        return [self._prefill_chunk(chunk) for chunk in chunks]

    def decode(self, rows: Sequence[int]) -> list[list[int]]:
        _check(not self.closed, "called after close")
        _check(0 < len(rows) <= self.geometry.max_batch_size, f"{len(rows)} rows")
        _check(len(set(rows)) == len(rows), "a row twice in one decode")
        self.fail("decode")
        self.decode_calls.append(tuple(rows))
        return [self._decode_row(row) for row in rows]

    def close(self) -> None:
        self.closed = True

    def _prefill_chunk(self, chunk: PrefillChunk) -> int | None:
        row = self._live_row(chunk.row)
        _check(row.last is None, f"row {chunk.row}: prefill after its prompt ended")
        _check(chunk.start == row.num_committed, f"row {chunk.row}: chunk starts at {chunk.start}")
        _check(row.expected in (None, chunk.tokens[0]), f"row {chunk.row}: wrong next_token before")
        for offset, token in enumerate(chunk.tokens):
            self._write(row, chunk.start + offset, token)
        row.num_committed += len(chunk.tokens)
        row.expected = chunk.next_token
        if chunk.next_token is not None:
            return None
        row.last = self.next_token(self._read(row, row.num_committed))
        self._draft(row)
        return row.last

    def _decode_row(self, index: int) -> list[int]:
        sizes, row = self.geometry, self._live_row(index)
        _check(row.last is not None, f"row {index}: decode before its prompt is in")
        _check(row.num_committed < sizes.max_seq_len, f"row {index}: at the maximum length")
        window = [row.last, *row.drafts]
        start = row.num_committed
        for position in range(start, min(start + sizes.reserve_tokens, sizes.max_seq_len)):
            in_window = position - start < len(window)
            self._write(row, position, window[position - start] if in_window else -1)
        emitted: list[int] = []
        for j in range(len(window)):
            emitted.append(self.next_token(self._read(row, start) + window[: j + 1]))
            past_end = start + j + 1 >= sizes.max_seq_len
            if past_end or j + 1 == len(window) or window[j + 1] != emitted[-1]:
                break
        row.num_committed += len(emitted)
        row.last = emitted[-1]
        self._draft(row)
        return emitted

    def _draft(self, row: _Row) -> None:
        context = [*self._read(row, row.num_committed), row.last]
        row.drafts = []
        for _ in range(self.geometry.num_draft_tokens):
            right = self.next_token(context)
            hits = zlib.crc32(bytes(str(context), "ascii")) % 1000 < self.hit_rate * 1000
            row.drafts.append(right if hits else (right + 1) % self.geometry.vocab_size)
            context.append(row.drafts[-1])

    def _live_row(self, index: int) -> _Row:
        row = self._rows[index]
        _check(row.live, f"row {index}: used without blocks of its own")
        return row

    def _slot(self, row: _Row, position: int) -> int:
        block, offset = divmod(position, self.geometry.block_size)
        _check(block < len(row.blocks), f"position {position} has no allocated block")
        return row.blocks[block] * self.geometry.block_size + offset

    def _write(self, row: _Row, position: int, token: int) -> None:
        self._cache[self._slot(row, position)] = token

    def _read(self, row: _Row, length: int) -> list[int]:
        tokens = [self._cache[self._slot(row, position)] for position in range(length)]
        _check(None not in tokens, "read a slot that was never written")
        return [token for token in tokens if token is not None]


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise FakeExecutorError(message)
