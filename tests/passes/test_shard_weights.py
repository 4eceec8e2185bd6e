"""A model cut among ranks: what is cut, what the ranks' steps compute, and faults that are named.

Here threads are the ranks; `tests/runtime/test_ranks.py` runs processes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

import compilespec
from compilespec.errors import InvalidOption, PassError
from compilespec.inspect.cost import estimate
from compilespec.inspect.lockstep import check_lockstep
from compilespec.inspect.stages import context_of
from compilespec.passes.proofs.sizes import B, K
from compilespec.passes.splice.shard_weights import collectives_of
from compilespec.passes.splice.sharding.plan import Cut, Sharding
from compilespec.program import SpecProgram
from tests.support.drafters import METHODS
from tests.support.models import even_target, target_info, tiny_target
from tests.support.untouched import check_left_alone, step

OPS = torch.ops.compilespec


def traced(family: str = "llama", size: int = 2, spec: str = "none", **keywords: Any) -> Any:
    model = tiny_target(family, num_layers=keywords.pop("num_layers", 1))
    drafts = {} if spec == "none" else {"num_draft_tokens": 2}
    return compilespec.trace(
        model, spec, max_seq_len=64, max_batch_size=3, tensor_parallel_size=size,
        **drafts, **keywords,
    )  # fmt: skip


@pytest.fixture(scope="module")
def llama() -> SpecProgram:
    return traced(spec="ngram")


def cuts(program: SpecProgram) -> dict[str, Cut | None]:
    sharding = context_of(program.graphs["decode"]).sharding
    assert sharding is not None
    return sharding.cuts


def test_a_layer_is_cut_by_columns_then_by_rows(llama):
    found = {
        name.removeprefix("target.").removesuffix(".weight"): cut.dim
        for name, cut in cuts(llama).items()
        if cut is not None
    }
    attention = {"q_proj": 0, "k_proj": 0, "v_proj": 0, "o_proj": 1}
    assert found == {
        "model.embed_tokens": 0,
        **{f"model.layers.0.self_attn.{name}": dim for name, dim in attention.items()},
        "model.layers.0.mlp.gate_proj": 0,
        "model.layers.0.mlp.up_proj": 0,
        "model.layers.0.mlp.down_proj": 1,
        "lm_head": 0,
    }


def test_two_sums_a_layer_one_for_the_embedding_and_one_choice(llama):
    for graph in llama.graphs.values():
        assert collectives_of(graph.graph_module.graph) == {"all_reduce": 3, "argmax_shard": 1}


def test_what_a_rank_holds_and_sends_is_counted(llama):
    report = estimate(llama)
    decode = report.graphs["decode"]
    num_rows, size = 2 * 3, llama.config.dtype.itemsize  # of B = 2 and K = 2
    sent = decode.total.cost.at({B: 2, K: 2}).sent_bytes
    assert sent == num_rows * (3 * 48 * size + size + 8)  # three sums of a row, its best and an id
    assert decode.collectives == {"all_reduce": 3, "argmax_shard": 1}
    assert decode.uncounted == {}
    attention, mlp, others = 48 * (24 + 12 + 12) + 24 * 48, 3 * 40 * 48, 3 * 48 + 6  # and rope
    assert report.weight_memory == (2 * 49 * 48 + attention + mlp + others) * size
    assert report.cache_memory_per_token == 2 * 12 * size
    assert "all_reduce x3" in str(report)


def test_a_rank_has_its_heads_caches_and_pieces_alone(llama):
    caches = [buffer for buffer in llama.buffers if buffer.kind == "cache"]
    assert {buffer.shape[2] for buffer in caches} == {1}
    assert llama.weights["target.model.layers.0.mlp.up_proj.weight.shard"].shape == (40, 48)
    assert llama.weights["target.lm_head.weight.shard"].shape == (49, 48)  # 97 rows, one of zeros
    names = {spec.name for spec in llama.graphs["decode"].inputs if spec.kind == "weight"}
    assert not any("up_proj" in name and ".shard" not in name for name in names)


def test_the_ranks_together_compute_the_step_of_one_process(llama):
    check_lockstep(llama)


@pytest.mark.parametrize(
    ("family", "size"),
    [
        pytest.param(family, size, marks=() if family == "phi3" else pytest.mark.slow)
        for family, size in (
            ("llama", 4), ("qwen3", 2), ("gemma3", 2), ("phi3", 2), ("olmo2", 2), ("gpt2", 2),
            ("mixtral", 2), ("gpt_oss", 2), ("deepseek_v3", 4), ("gpt_neox", 2), ("qwen3_moe", 2),
        )
    ],
)  # fmt: skip
def test_families_in_lockstep(family, size):
    """Four ranks of two heads of keys hold each head twice."""
    program = traced(family, size, num_layers=2)
    check_lockstep(program)
    why = "; ".join(program.notes)
    assert ("q_proj" in why) == (family == "olmo2"), why  # a norm over all its heads


def reduction_dropped(graph: fx.Graph) -> None:
    """A sum over ranks is left out."""
    total = graph.find_nodes(op="call_function", target=OPS.all_reduce.default)[1]
    total.replace_all_uses_with(total.args[0])
    total.args[0].meta["stands_for"] = total.meta["stands_for"]
    graph.erase_node(total)


def other_piece(graph: fx.Graph) -> None:
    """Rank 1 has the piece of rank 0."""
    node = next(n for n in graph.nodes if n.op == "placeholder" and "up_proj" in n.name)
    user = next(iter(node.users))
    with graph.inserting_before(user):
        other = graph.call_function(torch.flip, (node, [0]))
    user.replace_input_with(node, other)


def test_planted_faults_are_named() -> None:
    """Prefill is compared first, so that its fault comes last."""
    program = traced()
    for phase, plant, named in (
        ("decode", reduction_dropped, "o_proj"),
        ("prefill", other_piece, "up_proj"),
    ):
        plant(program.graphs[phase].spliced.graph)
        with pytest.raises(PassError, match=rf"{phase} step is not that of one process.*{named}"):
            check_lockstep(program)


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        ({"*.down_proj": "columns"}, "down_proj.*cut by columns does not fit"),
        ({"*.q_proj": "rows"}, "q_proj.*cut by rows does not fit"),
    ],
)
def test_a_plan_that_does_not_fit_names_the_weight(plan, says):
    with pytest.raises(InvalidOption, match=says):
        traced(tensor_parallel_plan=plan)


def test_a_plan_keeps_modules_whole():
    program = traced(tensor_parallel_plan={"*.mlp.*": "whole"})
    assert cuts(program)["target.model.layers.0.mlp.up_proj.weight"] is None
    assert collectives_of(program.graphs["decode"].spliced.graph)["all_reduce"] == 2
    assert any("mlp" in note and "the plan says so" in note for note in program.notes)


@pytest.mark.parametrize(
    ("keyword", "says"),
    [
        ({"tensor_parallel_size": 0}, "tensor_parallel_size must be a positive integer"),
        ({"draft_tensor_parallel_size": 2}, "must be 1 or tensor_parallel_size=1; got 2"),
        ({"tensor_parallel_plan": "rows"}, "tensor_parallel_plan must be a dict"),
        ({"tensor_parallel_plan": {"*": "diagonal"}}, "columns"),
    ],
)
def test_bad_options_are_refused(keyword, says):
    with pytest.raises(InvalidOption, match=says):
        compilespec.trace(tiny_target("llama", num_layers=1), **keyword)


def test_pieces_of_several_stretches_and_of_a_padded_dimension():
    whole = torch.arange(12.0).view(12, 1)
    cut = Cut(0, 2, segments=(8, 4))
    assert cut.piece(whole, 1, 2).flatten().tolist() == [4, 5, 6, 7, 10, 11]
    padded = Cut(0, 3, length=7)
    assert padded.piece(whole[:7], 2, 3).flatten().tolist() == [6, 0, 0]
    assert Cut(0, 2).piece(whole, 2, 4).flatten().tolist() == [6, 7, 8, 9, 10, 11]


@pytest.mark.parametrize(
    "spec", ["draft_model", *(pytest.param(s, marks=pytest.mark.slow) for s in ("eagle3", "mtp"))]
)
def test_a_drafter_is_cut_with_the_target(spec):
    """Its heads of keys, 3, stay whole in eagle3."""
    model = tiny_target("llama", num_layers=3 if spec == "eagle3" else 1)
    torch.manual_seed(1)
    program = compilespec.trace(
        model, spec, max_seq_len=64, max_batch_size=3, num_draft_tokens=2, tensor_parallel_size=2,
        draft_tensor_parallel_size=2, **METHODS[spec](model, target_info(model, max_seq_len=64), 2),
    )  # fmt: skip
    found = {n for n, cut in cuts(program).items() if cut is not None and n.startswith("draft.")}
    assert any("down_proj" in name for name in found)
    check_lockstep(program)


def test_adapters_change_a_ranks_part_of_a_product():
    """One sum more where a product is cut by rows: of the numbers between A and B."""
    program = traced(adapters={}, max_adapters=2, max_adapter_rank=4)
    check_lockstep(program)
    assert collectives_of(program.graphs["decode"].spliced.graph)["all_reduce"] == 3 + 2
    assert cuts(program)["target.model.layers.0.self_attn.o_proj.weight"] is not None


QUANTIZED = ("int8_weight_only", "int8_dynamic", "int4_weight_only", "float8_weight_only")


@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_weights_are_cut_with_their_scales(name):
    """Of numbers made of whole weights; four bits by rows between groups of 32, where there are."""
    pytest.importorskip("torchao.quantization")
    program = compilespec.trace(
        even_target(), max_seq_len=64, max_batch_size=3, tensor_parallel_size=2, quantize=name
    )
    found = cuts(program)
    layer, is_int4 = "target.model.layers.0", name.startswith("int4")
    for product, dims in (("mlp.up_proj", (0, 0)), ("mlp.down_proj", (1, 1 if is_int4 else None))):
        weight, numbers, *zeros = (
            found.get(f"{layer}.{product}.weight.{part}")
            for part in ("qdata", "scale", "zero_point")[: 2 + is_int4]
        )
        assert tuple(cut and cut.dim for cut in (weight, numbers)) == dims
        assert zeros == [numbers][:is_int4]
    check_lockstep(program)
    assert sum(collectives_of(program.graphs["decode"].spliced.graph).values()) == 4


def test_a_plan_that_keeps_all_weights_whole_changes_nothing() -> None:
    sharding = Sharding(size=2, wanted={"*": "whole"})
    case = step("decode", "read_state", "insert_paged_attention", sharding=sharding)
    check_left_alone("shard_weights", case)
