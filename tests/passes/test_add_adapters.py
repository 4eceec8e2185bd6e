"""The pass that adds adapters: where it does, what other passes make of it, what it refuses."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import compilespec
from compilespec.passes.splice.add_adapters import adapted
from compilespec.program import AdapterShape
from tests.support.adapters import EVERYWHERE, write_adapter
from tests.support.hand_graphs import HAND_CONFIG
from tests.support.models import tiny_target
from tests.support.untouched import check_left_alone, step


def nodes(graph, target):
    return graph.find_nodes(op="call_function", target=target)


def traced(model, adapters, **options):
    return compilespec.trace(model, adapters=adapters, max_seq_len=64, max_batch_size=5, **options)


def test_every_product_of_the_modules_is_followed_by_its_change(tmp_path):
    model = tiny_target("qwen2", num_layers=2)  # some products have a bias
    directory = write_adapter(tmp_path, model, EVERYWHERE)
    program = traced(model, {"one": directory}, spec="ngram")
    for graph in program.graphs.values():
        (record,) = [r for r in graph.splice_records if r.name == "add_adapters"]
        assert record.matches == len(nodes(graph.spliced.graph, adapted)) == 14
    held = {b.name: b.shape for b in program.buffers if b.name.startswith("adapter")}
    assert len(held) == 1 + 2 * 14
    assert held["adapter.model.layers.1.mlp.up_proj.down"] == (8, 48)
    assert held["adapter.model.layers.1.mlp.up_proj.up"] == (8, 80)
    assert held["adapter_R"] == (6,)


def test_rows_that_nothing_reads_are_not_adapted_either(tmp_path):
    """In prefill the last layer behind its attention runs on each prompt's last token."""
    model = tiny_target("llama", num_layers=2)
    directory = write_adapter(tmp_path, model, EVERYWHERE)
    graph = traced(model, {"one": directory}, spec="ngram").graphs["prefill"].spliced.graph
    named = {str(n.meta["custom"]["module"]).split(".", 2)[2]: n for n in nodes(graph, adapted)}
    assert named["0.mlp.down_proj"].meta["example"][0] == (None, None, 48)
    narrowed = named["1.mlp.down_proj"]
    assert "rows" in narrowed.args[2].meta, "of each prompt one row says which adapter"


def test_a_product_that_may_be_adapted_is_not_absorbed(tmp_path):
    model = tiny_target("deepseek_v3", num_layers=1)
    directory = write_adapter(tmp_path, model, ("kv_b_proj", "o_proj"))
    program = traced(model, {"one": directory})
    assert any("quantized, adapted or computed" in note for note in program.notes)
    assert compilespec.verify(program, passes=("add_adapters",), batch_sizes=[3]).ok
    other = write_adapter(tmp_path, model, ("kv_a_proj_with_mqa", "o_proj"))
    program = traced(model, {"one": other})
    assert any("cached as latents" in note for note in program.notes)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=lambda d: str(d).split(".")[1]
)
def test_a_row_does_not_depend_on_the_rows_beside_it(dtype):
    """To the bit: alone, in a verify step, in a batch and in a prefill."""
    generator = torch.Generator().manual_seed(0)
    down, up, x, product = (
        torch.randn(shape, generator=generator).to(dtype)
        for shape in ((24, 200), (24, 77), (1, 61, 200), (1, 61, 77))
    )
    keeps = torch.arange(24) // 8 == torch.arange(61).unsqueeze(-1) % 4 - 1
    keeps = keeps.unsqueeze(0)
    whole = adapted(product, x, keeps, down, up)
    for first, count in ((0, 1), (3, 4), (7, 9), (20, 33), (60, 1)):
        rows = slice(first, first + count)
        part = adapted(product[:, rows], x[:, rows], keeps[:, rows], down, up)
        assert torch.equal(part, whole[:, rows])
        turned = [one[:, rows].transpose(0, 1) for one in (product, x, keeps)]
        assert torch.equal(adapted(*turned, down, up), whole[:, rows].transpose(0, 1))
    assert torch.equal(whole[:, ::4], product[:, ::4])  # these have no adapter
    wide = [one.double() for one in (x, down, up)]
    exact = product + torch.where(keeps, wide[0] @ wide[1].T, 0.0) @ wide[2]
    assert (whole - exact).abs().max() < 400 * torch.finfo(dtype).eps


@pytest.mark.parametrize("quantize", ["int8_weight_only", "int8_dynamic"])
def test_quantized_products_are_adapted_like_others(tmp_path, quantize):
    pytest.importorskip("torchao")
    model = tiny_target("llama", torch.float32, num_layers=1)
    directory = write_adapter(tmp_path, model, EVERYWHERE)
    program = traced(model, {"one": directory}, quantize=quantize)
    report = compilespec.verify(
        program, passes=("add_adapters", "lower_quantized"), batch_sizes=[3]
    )
    assert report.ok, "\n".join(" ".join(row) for row in report.rows())
    assert {check.pass_name for check in report.checks} == {"add_adapters", "lower_quantized"}


def test_products_of_other_modules_are_left_alone() -> None:
    shape = AdapterShape(num_places=2, rank=8, modules=("model.layers.0.mlp",))
    config = dataclasses.replace(HAND_CONFIG, adapters=shape)
    check_left_alone("add_adapters", step("decode", "read_state", config=config))
