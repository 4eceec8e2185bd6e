"""Random requests over a poisoned pool of cache blocks."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

NAN = float("nan")


@dataclasses.dataclass(frozen=True)
class Case:
    """Everything that decides the shape of one call."""

    batch: int = 3
    num_tokens: int = 4
    num_kv_heads: int = 2
    group: int = 2
    head_dim: int = 16
    value_dim: int = 16
    block_size: int = 16
    context: int = 70
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    latent: bool = False  # values are the beginning of the keys, and have no cache
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        values = ((field, getattr(self, field.name)) for field in dataclasses.fields(self))
        return (
            "-".join(f"{field.name}={value}" for field, value in values if value != field.default)
            or "plain"
        )


@dataclasses.dataclass
class Request:
    """All K, V and Q of one request, positions 0..length-1, as [N, J, H]."""

    query: Tensor
    key: Tensor
    value: Tensor


class Pool:
    """Paged caches (poisoned with NaN) and the block table of `case.batch` requests."""

    def __init__(self, case: Case, seed: int = 0) -> None:
        self.case, generator = case, torch.Generator().manual_seed(seed)
        length = case.context + case.num_tokens
        blocks = (length + case.block_size - 1) // case.block_size
        num_blocks = case.batch * blocks + 2

        def fill(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(case.dtype)

        num_heads = case.num_kv_heads * case.group
        self.requests = [
            Request(
                fill(num_heads, length, case.head_dim),
                fill(case.num_kv_heads, length, case.head_dim),
                fill(case.num_kv_heads, length, case.value_dim),
            )
            for _ in range(case.batch)
        ]
        for request in self.requests if case.latent else ():
            request.value = request.key[..., : case.value_dim]
        self.sinks = fill(num_heads) if case.sinks else None
        order = torch.randperm(num_blocks, generator=generator)[: case.batch * blocks].int()
        unused = torch.full((case.batch, 2), -1, dtype=torch.int32)
        self.table_RM = torch.cat([order.view(case.batch, blocks), unused], dim=1)
        shape = (num_blocks, case.block_size, case.num_kv_heads)
        self.key_cache = torch.full((*shape, case.head_dim), NAN, dtype=case.dtype)
        self.value_cache = torch.full((*shape, case.value_dim), NAN, dtype=case.dtype)
        for row in range(case.batch):
            for position in range(case.context):
                cell = divmod(self.slot(row, position), case.block_size)
                self.key_cache[cell] = self.requests[row].key[:, position]
                self.value_cache[cell] = self.requests[row].value[:, position]

    def slot(self, row: int, position: int) -> int:
        block, offset = divmod(position, self.case.block_size)
        return int(self.table_RM[row, block]) * self.case.block_size + offset

    def arguments(self, tokens_BS: list[list[tuple[int, int] | None]]) -> tuple:
        """Operator arguments for the (row, position) of each token; None is a padded token."""
        batch, num_tokens = len(tokens_BS), len(tokens_BS[0]) if tokens_BS else self.case.num_tokens
        case = self.case
        num_heads = case.num_kv_heads * case.group
        query = torch.full((batch, num_tokens, num_heads, case.head_dim), NAN, dtype=case.dtype)
        key = torch.full(
            (batch, num_tokens, case.num_kv_heads, case.head_dim), NAN, dtype=case.dtype
        )
        value = torch.full(
            (batch, case.num_kv_heads, num_tokens, case.value_dim), NAN, dtype=case.dtype
        )
        metadata = torch.full((3, batch, num_tokens), -1, dtype=torch.int32)
        for b, tokens in enumerate(tokens_BS):
            for s, token in enumerate(tokens):
                if token is not None:
                    row, position = token
                    query[b, s] = self.requests[row].query[:, position]
                    key[b, s] = self.requests[row].key[:, position]
                    value[b, :, s] = self.requests[row].value[:, position]
                    metadata[:, b, s] = torch.tensor([self.slot(row, position), row, position])
        scale = case.head_dim**-0.5
        return (
            *(
                query.transpose(1, 2),
                key.transpose(1, 2),
                None if case.latent else value,
                self.key_cache.clone(),
                None if case.latent else self.value_cache.clone(),
            ),
            *(*metadata, self.table_RM, scale, case.window, case.softcap, self.sinks),
            *((case.value_dim,) if case.latent else ()),
        )

    def decode(self) -> list[list[tuple[int, int] | None]]:
        case = self.case
        return [
            [(row, case.context + s) for s in range(case.num_tokens)] for row in range(case.batch)
        ]
