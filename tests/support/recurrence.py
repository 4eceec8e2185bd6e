"""Requests for cached_recurrence: inputs of every token, poisoned buffers, calls of chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from compilespec.ops._tensors import wide_dtype

NAN = float("nan")
Compute = Callable[..., Tensor]


@dataclass(frozen=True)
class Case:
    """One shape of recurrent layer."""

    heads: int = 4
    key_heads: int = 2
    key_dim: int = 8
    value_dim: int = 5
    num_kept: int = 3
    per_key: bool = False
    beta: bool = True
    dtype: torch.dtype = torch.float32
    rows: int = 4
    length: int = 20

    def __str__(self) -> str:
        gate = ("k" if self.per_key else "h") + ("b" if self.beta else "")
        return f"{self.heads}x{self.key_heads}-{self.key_dim}x{self.value_dim}-{gate}"


@dataclass(frozen=True)
class Chunk:
    """Tokens [begin, end) of one request in a call; the first `commits` of them commit (all)."""

    row: int
    begin: int
    end: int
    absorbed: int | None = None  # what the state holds; all of [0, begin) by default
    commits: int | None = None
    wrong_from: int | None = None  # from this position on the inputs are other ones


@dataclass
class Pool:
    """The inputs of `rows` requests, and a state and a ring that hold NaN."""

    case: Case
    inputs: dict[str, Tensor] = field(init=False)
    other: dict[str, Tensor] = field(init=False)
    state: Tensor = field(init=False)
    recent: Tensor = field(init=False)

    def __post_init__(self) -> None:
        case, wide = self.case, wide_dtype(self.case.dtype)
        self.inputs, self.other = self._draw(), self._draw()
        width = sum(part[0, 0].numel() for name, part in self.inputs.items() if name != "query")
        heads = (case.rows, case.heads, case.key_dim, case.value_dim)
        self.state = torch.full(heads, NAN, dtype=wide)
        self.recent = torch.full((case.rows, case.num_kept, width), NAN, dtype=wide)

    def _draw(self) -> dict[str, Tensor]:
        case = self.case
        size = (case.rows, case.length)
        keys = (*size, case.key_heads, case.key_dim)
        gates = (*size, case.heads, *([case.key_dim] if case.per_key else []))
        drawn = {
            "query": F.normalize(torch.randn(keys), dim=-1),
            "key": F.normalize(torch.randn(keys), dim=-1),
            "value": torch.randn(*size, case.heads, case.value_dim),
            "decay": -torch.rand(gates),
        }
        if case.beta:
            drawn["beta"] = torch.rand(size + (case.heads,))
        wide = wide_dtype(case.dtype)
        return {
            name: part.to(wide if name == "decay" else case.dtype) for name, part in drawn.items()
        }

    def arguments(
        self, chunks: Sequence[Chunk | None], batch: int = 1
    ) -> tuple[Tensor | str | None, ...]:
        """A call over the pool's buffers; a chunk None is a padded token, whose inputs are NaN."""
        tokens = [token for chunk in chunks for token in self._tokens(chunk)]
        parts = {
            name: torch.stack([self._input(name, *token[:2], token[4]) for token in tokens])
            for name in self.inputs
        }
        views = _views_of_a_projection(parts, batch)
        row, position, absorbed = (
            torch.tensor([token[i] for token in tokens], dtype=torch.int32).view(batch, -1)
            for i in range(3)
        )
        commits = torch.tensor([token[3] for token in tokens]).view(batch, -1)
        return (*(views.get(name) for name in ("query", "key", "value", "decay", "beta")),
                self.state, self.recent, row, position, absorbed, commits, "any")  # fmt: skip

    def _tokens(self, chunk: Chunk | None) -> list[tuple[int, int, int, bool, bool]]:
        if chunk is None:
            return [(-1, 0, -(2**31), True, False)]
        absorbed = chunk.begin if chunk.absorbed is None else chunk.absorbed
        commits = self.case.length if chunk.commits is None else chunk.commits
        wrong = self.case.length if chunk.wrong_from is None else chunk.wrong_from
        return [
            (chunk.row, position, absorbed, position - chunk.begin < commits, position >= wrong)
            for position in range(chunk.begin, chunk.end)
        ]

    def _input(self, name: str, row: int, position: int, is_wrong: bool) -> Tensor:
        if row < 0:
            return torch.full_like(self.inputs[name][0, 0], NAN)
        return (self.other if is_wrong else self.inputs)[name][row, position]

    def fresh(self) -> Pool:
        """The same requests, as poisoned as at first."""
        twin = Pool.__new__(Pool)
        twin.case, twin.inputs, twin.other = self.case, self.inputs, self.other
        twin.state = torch.full_like(self.state, NAN)
        twin.recent = torch.full_like(self.recent, NAN)
        return twin

    def copy(self) -> Pool:
        """The same requests with separate buffers."""
        twin = self.fresh()
        twin.state, twin.recent = self.state.clone(), self.recent.clone()
        return twin


def _views_of_a_projection(parts: dict[str, Tensor], batch: int) -> dict[str, Tensor]:
    """[B, S, ...] of each part; all of one dtype lie side by side, as a projection gives them."""
    views = {}
    for dtype in {part.dtype for part in parts.values()}:
        mine = {name: part.flatten(1) for name, part in parts.items() if part.dtype == dtype}
        whole = torch.cat([*mine.values(), next(iter(mine.values()))[:, :1]], 1)
        split = whole[:, :-1].split([part.shape[1] for part in mine.values()], 1)
        for name, part in zip(mine, split, strict=True):
            shape = (batch, -1, *parts[name].shape[1:])
            views[name] = part.unflatten(0, shape[:2]).unflatten(-1, shape[2:])
    return views


def verify(
    pool: Pool, row: int, start: int, accepted: Sequence[int], num_drafts: int, compute: Compute
) -> tuple[Tensor, int, int]:
    """Verify steps from `start`: outputs of the accepted tokens, how many are absorbed, their end.

    The first token of a step commits, its drafts do not; of step i's drafts the first accepted[i]
    are right.  All tokens before `start` are in the state.
    """
    outputs, absorbed = [], start
    for count in accepted:
        chunk = Chunk(row, start, start + 1 + num_drafts, absorbed, 1, start + 1 + count)
        outputs.append(compute(*pool.arguments([chunk]))[0, : count + 1])
        absorbed, start = start + 1, start + 1 + count
    return torch.cat(outputs), absorbed, start
