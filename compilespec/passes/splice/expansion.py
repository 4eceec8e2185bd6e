"""How the cached latents of an attention layer become its keys and values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Expansion:
    """How the cached numbers of a token become its keys and values."""

    weight: str  # name of the product's weight, [num_heads * width, rank]
    num_heads: int
    width: int  # columns of a head in the product
    rank: int
    key: tuple[int, int]  # columns of a head that are part of the key
    value: tuple[int, int]
    parts: tuple[tuple[int, bool], ...]  # of a key, in order: size, and whether it is the product's

    @property
    def num_cached(self) -> int:
        """Numbers a token: the latent, then what the heads share."""
        return self.rank + sum(size for size, is_product in self.parts if not is_product)

    @property
    def num_expanded(self) -> int:
        key_dim = sum(size for size, _ in self.parts)
        return self.num_heads * (key_dim + self.value[1] - self.value[0])

    def expand(self, cached: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [.., N, H] and values [.., N, Hv] of cached tokens [.., num_cached]."""
        product = cached[..., : self.rank] @ weight.T
        heads = product.unflatten(-1, (self.num_heads, self.width))
        parts, end = [], self.rank
        for size, is_product in self.parts:
            if is_product:
                parts.append(heads[..., slice(*self.key)])
                continue
            begin, end = end, end + size
            shared = cached[..., begin:end].unsqueeze(-2)
            parts.append(shared.expand(*shared.shape[:-2], self.num_heads, size))
        return torch.cat(parts, -1), heads[..., slice(*self.value)]
