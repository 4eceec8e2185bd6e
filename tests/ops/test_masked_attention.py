"""Attention under a mask over all positions gives what paged attention gives, by its forms."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import compilespec.ops as ops

BLOCK, NUM_BLOCKS, LENGTH = 4, 9, 12  # a row has three blocks
SCALE = 0.3


def caches(dtype: torch.dtype = torch.float64, heads: int = 2, width: int = 6) -> list[Tensor]:
    drawn = torch.Generator().manual_seed(1)
    shape = (NUM_BLOCKS, BLOCK, heads, width)
    return [torch.randn(shape, generator=drawn, dtype=torch.float64).to(dtype) for _ in range(2)]


def call(num_tokens: int = 4, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Two requests and a padded one, the first in the middle of its second block."""
    drawn = torch.Generator().manual_seed(2)

    def rows(heads: int) -> Tensor:
        shape = (3, heads, num_tokens, 6)
        return torch.randn(shape, generator=drawn, dtype=torch.float64).to(dtype)

    table = torch.tensor([[3, 1, 7], [0, 8, -1], [-1, -1, -1]], dtype=torch.int32)
    place = torch.arange(num_tokens, dtype=torch.int32)
    position = torch.stack([5 + place, 1 + place, 0 * place])
    row = torch.tensor([[0], [1], [-1]], dtype=torch.int32).expand(3, num_tokens).contiguous()
    block = table[row.clamp(min=0).long(), (position // BLOCK).long()]
    slot = torch.where(row >= 0, block * BLOCK + position % BLOCK, -1).int()
    return {
        "query": rows(4), "key": rows(2), "value": rows(2), "slot": slot, "row": row,
        "position": position.contiguous(), "table": table,
    }  # fmt: skip


def age(given: dict[str, Tensor]) -> Tensor:
    return (given["position"].unsqueeze(-1) - torch.arange(LENGTH)).unsqueeze(1)


def masked(given: dict[str, Tensor], mask: Tensor, kept: list[Tensor], softcap: float = 0.0):
    parts = [given[name] for name in ("query", "key", "value")]
    places = [given[name] for name in ("slot", "row", "position", "table")]
    return ops.masked_attention(*parts, *kept, *places, SCALE, softcap, None, 0, mask)


@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_a_causal_mask_and_a_window_give_what_paged_attention_gives(window, softcap) -> None:
    given, kept, other = call(), caches(), caches()
    mask = (age(given) >= 0) & (age(given) < (window or LENGTH))
    got = masked(given, mask, kept, softcap)
    parts = [given[name] for name in ("query", "key", "value")]
    places = [given[name] for name in ("slot", "row", "position", "table")]
    want = ops.paged_attention(*parts, *other, *places, SCALE, window, softcap, None)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    assert all(torch.equal(a, b) for a, b in zip(kept, other, strict=True))
    assert not got[2].any(), "a padded request"


def test_numbers_are_added_to_scores_and_the_lowest_hides() -> None:
    given, kept = call(), caches()
    visible = (age(given) >= 0) & (age(given) % 2 == 0)
    lowest = torch.finfo(torch.float64).min
    hides = torch.where(visible, torch.zeros((), dtype=torch.float64), lowest)
    torch.testing.assert_close(masked(given, hides, caches()), masked(given, visible, kept))
    bias = torch.where(visible, -0.5 * age(given).double(), lowest)
    assert not torch.allclose(masked(given, bias, caches()), masked(given, visible, kept))


def test_what_lies_behind_a_token_is_never_seen() -> None:
    """A mask that shows later keys shows none, and what was never written may be NaN."""
    given, kept = call(), caches()
    every = torch.ones(3, 1, 4, LENGTH, dtype=torch.bool)
    want = masked(given, age(given) >= 0, caches())
    torch.testing.assert_close(masked(given, every, kept), want)
    for cache in kept:
        cache[7, 3] = float("nan")  # position 11 of the first request
    torch.testing.assert_close(masked(given, every, kept), want)


def test_a_row_of_a_verify_step_has_the_bits_of_a_plain_step() -> None:
    given, kept = call(dtype=torch.float32), caches(torch.float32)
    mask = age(given) >= 0
    together = masked(given, mask, kept)
    alone = {
        name: x if name == "table" else x[..., 3:4, :] if x.dim() == 4 else x[:, 3:4]
        for name, x in given.items()
    }
    assert torch.equal(masked(alone, mask[:, :, 3:], kept)[:, 0], together[:, 3])


def test_cached_keys_are_written_and_read_by_position() -> None:
    given = call()
    x_BSE = torch.randn(3, 4, 5, dtype=torch.float64)
    cache = torch.full((NUM_BLOCKS, BLOCK, 1, 5), -7.0, dtype=torch.float64)
    read = ops.cached_keys(x_BSE, cache, given["slot"], given["row"], given["table"])
    assert read.shape == (3, LENGTH, 5)
    assert torch.equal(read[0, 5:9], x_BSE[0])
    assert torch.equal(read[1, 1:5], x_BSE[1])
    assert bool((read[0, :5] == -7).all())
    assert int((cache != -7).any(-1).sum()) == 8, "the padded request wrote nothing"


def test_keys_that_nobody_has_written_are_never_nan() -> None:
    """A choice of the best keys takes NaN for the largest of all scores."""
    given, x_BSE = call(), torch.randn(3, 4, 5, dtype=torch.float64)
    cache = torch.full((NUM_BLOCKS, BLOCK, 1, 5), float("nan"), dtype=torch.float64)
    read = ops.cached_keys(x_BSE, cache, given["slot"], given["row"], given["table"])
    assert torch.equal(read[0, 5:9], x_BSE[0])
    assert not read.isnan().any()


def test_a_wrong_row_or_a_stale_key_shows() -> None:
    given, mask = call(), age(call()) >= 0
    want = masked(given, mask, caches())
    swapped = given | {"row": given["row"][[1, 0, 2]].contiguous()}
    assert not torch.allclose(masked(swapped, mask, caches())[:2], want[:2])
    stale = given | {"slot": torch.full_like(given["slot"], -1)}
    assert not torch.allclose(masked(stale, mask, caches())[:2], want[:2])
