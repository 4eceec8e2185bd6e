"""quantize="file": the blocks of a GGUF file, without loss, and the tokens that they give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import compilespec
from compilespec import SamplingParams
from compilespec.errors import InvalidOption, NotSupported
from compilespec.quantization import gguf_weights
from compilespec.quantization.gguf_blocks import READERS, read_blocks
from compilespec.tracing import gguf_copies
from tests.support.gguf_files import tiny_llama, write_gguf

gguf: Any = pytest.importorskip("gguf")
pytest.importorskip("accelerate")
pytest.importorskip("torchao")

FLOATS = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
TYPES = {"ffn_down": "Q4_1", "ffn": "Q8_0", "attn_v": "Q5_1", "attn": "Q4_0", "output": "Q5_0"}


@pytest.mark.parametrize("kind", READERS)
def test_blocks_are_what_gguf_reads(kind: str) -> None:
    """Random bytes: every bit of a block counts; a step of zero, too."""
    draw = np.random.default_rng(0)
    type_, (_, block_bytes) = gguf.GGMLQuantizationType[kind], READERS[kind]
    depth = 2 * gguf.QK_K
    num_blocks = depth // gguf.GGML_QUANT_SIZES[type_][0]
    data = draw.integers(0, 256, (5, num_blocks, block_bytes), dtype=np.uint8)
    for first in FLOATS.get(kind, (0,)):
        steps = (draw.standard_normal((5, num_blocks)) * 0.01).astype(np.float16)
        data[..., first : first + 2] = steps.view(np.uint8).reshape(5, num_blocks, 2)
    data[0, 0, FLOATS.get(kind, (0,))[0] :][:2] = 0
    flat = data.reshape(5, -1)
    want = torch.from_numpy(gguf.dequantize(flat, type_))
    got = read_blocks(kind, flat)
    assert got.bits == (4 if kind.startswith("Q4") else 8)
    assert got.group == (16 if kind == "Q6_K" else 32)
    if got.bits == 4:
        assert got.values.min() >= -8
        assert got.values.max() <= 7
    exact = 0 if not bool(got.zero.any()) else 2**-22
    assert ((got.wide() - want).abs() <= exact * want.abs().max()).all()


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(gguf_copies, "cache_directory", lambda: tmp_path / "cache")
    torch.manual_seed(0)
    model = tiny_llama()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6 if parameter.dim() == 2 else 1)
    write_gguf(model, tmp_path / "tiny.gguf", TYPES)
    return tmp_path / "tiny.gguf"


def test_tokens_of_the_files_own_weights(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products hold the file's numbers, in the model's order; drafts change no token."""
    read = gguf_weights.with_stored_weights
    checked = []

    def compare(*args: Any) -> Any:
        model, stored = args[0], read(*args)
        for path, module in stored.named_modules():
            if type(module) is torch.nn.Linear:
                assert type(module.weight).__name__ == "StoredIntTensor", path
                own = module.weight
                size = own.block_size[1]
                wide = own.qdata.float().unflatten(1, (-1, size)) - own.zero_point.unsqueeze(-1)
                wide = (wide * own.scale.unsqueeze(-1)).flatten(1)
                want = model.get_submodule(path).weight.float()
                torch.testing.assert_close(wide, want, rtol=2**-7, atol=1e-5)
                checked.append(own)
        return stored

    monkeypatch.setattr(gguf_weights, "with_stored_weights", compare)
    prompts = [[5, 9, 12, 9, 12, 9], [7, 8, 9] * 5]
    params, said = SamplingParams(max_new_tokens=20, ignore_eos=True), []
    sizes = {"max_batch_size": 2, "max_seq_len": 64, "backend": "eager"}
    for spec, more in (("none", {}), ("ngram", {"num_draft_tokens": 3})):
        with compilespec.compile(file, spec, quantize="file", **sizes, **more) as engine:
            said.append([output.token_ids for output in engine.generate(prompts, params)])
            assert "15 StoredIntTensor of 15 products" in " ".join(engine.plan()["why"])
            targets = {str(n.target) for n in engine.graphs["decode"].graph_module.graph.nodes}
            assert "compilespec.packed_grouped_linear.default" in targets
            assert not targets & {"aten.mm.default", "compilespec.packed_linear.default"}
    assert said[0] == said[1]
    assert len(checked) == 30
    parts = [part for own in checked for part in (own.qdata, own.scale)]
    assert all(part.untyped_storage().nbytes() == 0 for part in parts)  # packed, and given up


def test_it_needs_a_file_and_a_product(file: Path) -> None:
    sizes = {"max_batch_size": 1, "max_seq_len": 64, "backend": "eager"}
    with pytest.raises(InvalidOption, match="quantize='file' keeps the blocks of a GGUF file"):
        compilespec.compile(tiny_llama(), quantize="file", **sizes)
    with pytest.raises(NotSupported, match=r"got torch\.float64 on cpu; leave quantize= out"):
        compilespec.compile(file, quantize="file", dtype="float64", **sizes)
