"""The blocks of a GGUF file: what gguf reads of them, and their layouts for products."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from compilespec.ops.gguf_blocks import TYPES, embed_blocks, pack_gguf_blocks, read_blocks
from compilespec.ops.gguf_blocks.reference import CHUNK, by_rows, pack_gguf_blocks_reference

FLOATS = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
ROWS = 37  # the last panel of 16 is not full


def random_blocks(kind: str) -> Tensor:
    """Random bytes, so that every bit of a block counts; a step of zero, too."""
    draw, one = np.random.default_rng(0), TYPES[kind]
    num_blocks = 512 // one.num_weights
    data = draw.integers(0, 256, (ROWS, num_blocks, one.num_bytes), dtype=np.uint8)
    for first in FLOATS.get(kind, (0,)):
        steps = (draw.standard_normal((ROWS, num_blocks)) * 0.01).astype(np.float16)
        data[..., first : first + 2] = steps.view(np.uint8).reshape(ROWS, num_blocks, 2)
    data[0, 0, FLOATS.get(kind, (0,))[0] :][:2] = 0
    return torch.from_numpy(data.reshape(ROWS, -1))


@pytest.mark.parametrize("kind", TYPES)
def test_blocks_are_what_gguf_reads(kind: str) -> None:
    gguf: Any = pytest.importorskip("gguf")
    blocks, type_ = random_blocks(kind), gguf.GGMLQuantizationType[kind]
    want = torch.from_numpy(gguf.dequantize(blocks.numpy(), type_))
    got = read_blocks(kind, blocks)
    assert got.values.shape == (ROWS, TYPES[kind].depth(blocks.shape[1]))
    assert got.scale.shape[1] == got.values.shape[1] // TYPES[kind].group
    assert (got.zero is None) == TYPES[kind].is_symmetric
    assert (got.values.amax() <= 7) == (TYPES[kind].bits == 4)
    exact = 0 if got.zero is None else 2**-22
    assert ((got.wide() - want).abs() <= exact * want.abs().max()).all()
    ids = torch.tensor([[3, 36], [0, 5]])
    rows = embed_blocks(ids, blocks, kind, torch.float32)
    assert torch.equal(rows, got.wide()[ids])


@pytest.mark.parametrize("kind", TYPES)
def test_the_kernel_packs_as_the_reference(kind: str) -> None:
    blocks = random_blocks(kind)
    for part in TYPES[kind].parts:
        want = pack_gguf_blocks_reference(blocks, kind, part)
        assert torch.equal(pack_gguf_blocks(blocks, kind, part), want), part


def test_wrong_blocks_are_refused() -> None:
    blocks = random_blocks("Q4_0")
    for wrong, kind, part, said in (
        (blocks[:, :-1].contiguous(), "Q4_0", "values", "a multiple of 18"),
        (blocks, "Q4_0", "zero", "no part 'zero'"),
        (blocks, "Q3_K", "values", "no type 'Q3_K'"),
    ):
        with pytest.raises(RuntimeError, match=said):
            pack_gguf_blocks(wrong, kind, part)


def test_rows_are_read_in_chunks() -> None:
    """Of a function that gives a row, and of one that gives a panel of 16."""
    rows = torch.arange(16 * 5 + 3, dtype=torch.float32).unsqueeze(1)
    depth = CHUNK // 32
    assert torch.equal(by_rows(lambda some: some * 2, rows, depth), rows * 2)
    padded = torch.nn.functional.pad(rows, (0, 0, 0, 13)).view(-1, 16)

    def panels(some: Tensor) -> Tensor:
        return torch.nn.functional.pad(some, (0, 0, 0, -len(some) % 16)).view(-1, 16)

    assert torch.equal(by_rows(panels, rows, depth), padded)
