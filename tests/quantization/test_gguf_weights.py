"""Models whose weights stay in the blocks of a GGUF file, and the tokens that they give."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import compilespec
from compilespec import SamplingParams
from compilespec.errors import InvalidOption, NotSupported
from compilespec.ops.gguf_blocks import embed_blocks
from compilespec.pipeline.options import CompileOptions
from compilespec.tracing import gguf_copies
from compilespec.tracing.gguf_tensors import GgufTensor
from compilespec.tracing.load import load_target
from tests.support.gguf_files import tiny_llama, write_gguf

pytest.importorskip("gguf")
pytest.importorskip("accelerate")
pytest.importorskip("torchao")

TYPES_OF = {"ffn_down": "Q4_1", "ffn": "Q8_0", "attn_v": "Q5_1", "attn": "Q4_0", "output": "Q5_0"}


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(gguf_copies, "cache_directory", lambda: tmp_path / "cache")
    torch.manual_seed(0)
    model = tiny_llama()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6 if parameter.dim() == 2 else 1)
    write_gguf(model, tmp_path / "tiny.gguf", {**TYPES_OF, "token_embd": "Q8_0"})
    return tmp_path / "tiny.gguf"


SIZES = {"max_batch_size": 2, "max_seq_len": 64, "backend": "eager"}
PROMPTS = [[5, 9, 12, 9, 12, 9], [7, 8, 9] * 5]
PARAMS = SamplingParams(max_new_tokens=20, ignore_eos=True)


def tokens(engine: Any) -> list[Any]:
    return [output.token_ids for output in engine.generate(PROMPTS, PARAMS)]


def num_kept(engine: Any) -> int:
    """Products of the target that keep their blocks, as the plan says."""
    (said,) = [line for line in engine.plan()["why"] if line.startswith("target quantized")]
    return sum(int(count) for count in re.findall(r"(\d+) GGUF Q\d_\d", said))


def test_weights_are_the_files_own_in_the_models_order(file: Path) -> None:
    """transformers' own reading of the file is the reference; warm as cold."""
    wide = load_target(file).model.state_dict()
    for _ in range(2):
        kept = load_target(file, keeps_blocks=True).model
        blocks = {name: one for name, one in kept.named_parameters() if type(one) is GgufTensor}
        assert len(blocks) == 16  # 14 products of layers, head and embedding
        assert kept.state_dict().keys() == wide.keys()
        for name, one in kept.named_parameters():
            own = one.dequantize() if name in blocks else one
            torch.testing.assert_close(own, wide[name], rtol=2**-7, atol=1e-5)
    ids = torch.tensor([[3, 9], [250, 0]])
    assert embed_blocks(ids, kept.model.embed_tokens.weight.blocks, "Q8_0", torch.bfloat16).equal(
        wide["model.embed_tokens.weight"][ids]
    )


def test_tokens_of_the_files_own_weights(file: Path) -> None:
    """The default on the CPU: products read packed blocks, and drafts change no token."""
    said = []
    ways: list[Any] = [
        ("none", {}),
        ("ngram", {"num_draft_tokens": 3}),
        ("none", {"quantize": "file"}),
    ]
    for spec, more in [*ways, ("draft_model", {"draft": file, "num_draft_tokens": 2})]:
        with compilespec.compile(file, spec, **SIZES, **more) as engine:
            said.append(tokens(engine))
            assert num_kept(engine) == 15
            targets = {str(n.target) for n in engine.graphs["decode"].graph_module.graph.nodes}
            assert "compilespec.packed_grouped_linear.default" in targets
            assert not targets & {"aten.mm.default", "compilespec.packed_linear.default"}
            if spec == "draft_model":
                assert engine.stats().num_verify_steps == 14  # all but the last of 7 give 3
    assert said[0] == said[1] == said[2] == said[3]
    eager = load_target(file, keeps_blocks=True).model
    ids = [*PROMPTS[0]]
    for token in said[0][0][:4]:  # the module itself computes the same, outside of a graph
        assert int(eager(torch.tensor([ids])).logits[0, -1].argmax()) == token
        ids.append(token)


def test_other_ways_begin_with_the_dequantized_weights(file: Path) -> None:
    """dequantize=, and quantize= with another name."""
    with compilespec.compile(file, dequantize=True, **SIZES) as engine:
        said = tokens(engine)
        assert "quantized" not in " ".join(engine.plan()["why"])
    with compilespec.compile(load_target(file).model, **SIZES) as engine:
        assert tokens(engine) == said
    said = []
    for one in ({"dequantize": True}, {}):
        with compilespec.compile(file, quantize="int8_dynamic", **SIZES, **one) as engine:
            said.append(tokens(engine))
            assert "15 Int8Tensor of 15 products" in " ".join(engine.plan()["why"])
    assert said[0] == said[1]
    asked = compilespec.Quantize("file", skip="model.layers.0")
    with compilespec.compile(file, quantize=asked, **SIZES) as engine:
        assert num_kept(engine) == 8


def test_it_needs_a_file_and_a_product(file: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match="quantize='file' keeps the blocks of a GGUF file"):
        compilespec.compile(tiny_llama(), quantize="file", **SIZES)
    for more, why in (
        ({"dtype": "float64"}, r"dtype=torch\.float64"),
        ({"dequantize": True}, "dequantize=True"),
    ):
        with pytest.raises(NotSupported, match=rf"does not go with {why}; leave quantize= out"):
            compilespec.compile(file, quantize="file", **SIZES, **more)
    options = CompileOptions(quantize="file", tensor_parallel_size=2)
    with pytest.raises(NotSupported, match="does not go with tensor_parallel_size="):
        options.keeps_blocks(torch.device("cpu"), None)
    write_gguf(tiny_llama(), tmp_path / "plain.gguf")
    for _ in range(2):
        with pytest.raises(NotSupported, match=r"plain\.gguf holds no blocks that"):
            compilespec.compile(tmp_path / "plain.gguf", quantize="file", **SIZES)
