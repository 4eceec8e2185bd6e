"""The cost model against hand counts, another K, and torch's own counter on the eager model."""

from __future__ import annotations

import dataclasses
import importlib
import json
import pkgutil
from typing import Any

import pytest
import sympy
import torch
from torch.utils.flop_counter import FlopCounterMode

import compilespec
from compilespec import ops
from compilespec.errors import InvalidOption
from compilespec.inspect import devices
from compilespec.inspect.cost import StepCost, estimate
from compilespec.inspect.devices import Device, find_device
from compilespec.inspect.node_costs import RULES, C, Cost, NodeCosts
from compilespec.methods.eagle3 import random_head
from compilespec.passes.proofs.sizes import B, K, R, T
from tests.support.hand_graphs import graph_of
from tests.support.models import FAMILIES, VOCAB, target_info, tiny_target

WIDTH, INNER, NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 48, 80, 2, 4, 2, 12
QUERY, KEY = NUM_HEADS * HEAD_DIM, NUM_KV_HEADS * HEAD_DIM
LAYER = WIDTH * (QUERY + 2 * KEY + QUERY) + 3 * WIDTH * INNER  # weights of a layer's products
HEAD = WIDTH * VOCAB
ATTENTION = 4 * NUM_LAYERS * NUM_HEADS * HEAD_DIM  # FLOPs for one token and one key


def program_of(num_draft_tokens: int, *, keep_graphs: bool = False) -> Any:
    model = tiny_target("llama", torch.float32, num_layers=NUM_LAYERS)
    head = random_head(
        target_info(model, 64), aux_layers=(0, 1, 2), num_draft_tokens=num_draft_tokens
    ).eval()
    return compilespec.trace(
        model, spec="eagle3", draft=head, max_seq_len=64, num_draft_tokens=num_draft_tokens,
        keep_graphs=keep_graphs,
    )  # fmt: skip


@pytest.fixture(scope="module")
def program() -> Any:
    return program_of(3, keep_graphs=True)


def phases_of(program: Any, **options: Any) -> dict[str, StepCost]:
    return estimate(program, **options).graphs


def stage(one: StepCost, name: str) -> Cost:
    return next(row.cost for row in one.stages if row.name == name)


def assert_equal(got: Any, want: Any) -> None:
    assert sympy.expand(got - want) == 0


# --- hand counts ---


def test_a_token_costs_two_flops_a_weight_and_its_attention(program):
    """2 * parameters + 4 * layers * heads * head_dim * C, for each of the (K + 1) * B tokens."""
    target = stage(phases_of(program)["decode"], "target")
    weights = NUM_LAYERS * LAYER + HEAD
    assert_equal(target.flops, (K + 1) * B * (2 * weights + ATTENTION * C))


def test_prefill_runs_the_head_once_a_prompt(program):
    target = stage(phases_of(program)["prefill"], "target")
    assert_equal(target.flops, T * (2 * NUM_LAYERS * LAYER + ATTENTION * C) + R * 2 * HEAD)


def test_weights_are_read_once_a_product_and_caches_once_a_request(program):
    """float32; rows of packed weights are padded to 16, the embedding gives a row a token."""
    target = stage(phases_of(program)["decode"], "target")
    head = WIDTH * -(-VOCAB // 16) * 16
    embedding = (K + 1) * B * WIDTH
    assert_equal(target.weight_bytes, 4 * (NUM_LAYERS * LAYER + head + embedding))
    cell = NUM_LAYERS * 2 * KEY
    assert_equal(target.cache_bytes, 4 * cell * (B * C + (K + 1) * B))


def test_activations_are_what_products_and_attention_move(program):
    target = stage(phases_of(program)["decode"], "target")
    qkv = WIDTH + QUERY + 2 * KEY  # in and out
    attention = QUERY + 2 * KEY + QUERY
    rest = (QUERY + WIDTH) + (WIDTH + 2 * INNER) + (INNER + WIDTH)
    outside = WIDTH + (WIDTH + VOCAB)  # embedding, head
    numbers = NUM_LAYERS * (qkv + attention + rest) + outside
    assert_equal(target.activation_bytes, 4 * (K + 1) * B * numbers)


def test_formulas_in_k_hold_for_another_k(program):
    """Read off the graph for K = 3, checked on the graphs for K = 5 and K = 2."""
    for num_draft_tokens in (2, 5):
        others = phases_of(program_of(num_draft_tokens))
        for key, one in phases_of(program).items():
            for name, expr in vars(one.total.cost).items():
                want = vars(others[key.phase].total.cost)[name].subs(K, num_draft_tokens)
                assert_equal(expr.subs(K, num_draft_tokens), want)


def test_parts_add_up(program):
    for one in phases_of(program).values():
        for rows in (one.stages, one.modules):
            total = sum((row.cost for row in rows), Cost())
            for name, expr in vars(one.total.cost).items():
                assert_equal(expr, vars(total)[name])
        assert [row.name for row in one.passes] == ["to_aten", "merge_projections"] + (
            ["prepack_linears"] if one.passes[-1].name == "prepack_linears" else []
        )
        assert_equal(one.passes[-1].cost.flops, one.total.cost.flops)
        assert all(sympy.degree(expr, K) <= 1 for expr in vars(one.total.cost).values())
    stages = [row.name for row in phases_of(program)["decode"].stages]
    assert stages == [
        "target", "draft.combine", "draft.forward #1", "draft.propose x (K)",
        "draft.forward x (K - 1)",
    ]  # fmt: skip


def test_weights_without_memory_cost_the_same():
    """On the meta device, where nothing has an address, equal shapes are not one weight."""
    model = tiny_target("llama", torch.float32, num_layers=NUM_LAYERS).to("meta")
    decode = phases_of(compilespec.trace(model, max_seq_len=64, keep_graphs=False))["decode"]
    assert_equal(decode.total.cost.flops, B * (2 * (NUM_LAYERS * LAYER + HEAD) + ATTENTION * C))
    weights = NUM_LAYERS * LAYER + HEAD  # not packed: no padding
    assert_equal(decode.total.cost.weight_bytes, 4 * (weights + B * WIDTH))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_flops_equal_those_torch_counts_on_the_eager_model(family):
    """Dense eager attention lets every token see all T keys: C = T.  It runs the head T times, and
    so what of the last layer stands behind its attention.
    """
    model = tiny_target(family, torch.float32, num_layers=NUM_LAYERS)
    num_tokens = 13
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        logits = model(torch.zeros(1, num_tokens, dtype=torch.int64), use_cache=False).logits
    assert logits.shape[1] == num_tokens
    program = compilespec.trace(model, max_seq_len=64, keep_graphs=False)
    flops = phases_of(program)["prefill"].total.cost.flops
    once = HEAD
    if family == "llama":  # gpt2's products are no `linear`, which `narrow_rows` moves past
        layer = model.model.layers[-1]
        once += sum(w.numel() for w in (layer.self_attn.o_proj.weight, *layer.mlp.parameters()))
    ours = flops.subs({T: num_tokens, C: num_tokens, R: 1}) + 2 * (num_tokens - 1) * once
    assert int(ours) == counter.get_total_flops()


def test_every_operator_of_ours_in_a_step_has_a_rule():
    """But those that are only in graphs before the passes, and those inside others."""
    for module in pkgutil.walk_packages(ops.__path__, f"{ops.__name__}."):
        importlib.import_module(module.name)
    before = {"attention", "recurrence", "causal_conv", "cached", "all_positions"}
    inside = {"pack_weight", "philox", "draw_part", "score_linear", "use_thread_pool"}
    inside |= {"pack_gguf_blocks"}  # as weights are bound
    schemas = [schema.name.split("::") for schema in torch._C._jit_get_all_schemas()]
    ours = {name for namespace, name in schemas if namespace == "compilespec"}
    counted = {str(target).split(".")[1] for target in RULES if "compilespec" in str(target)}
    assert ours == counted | before | inside


@pytest.mark.parametrize("family", [*FAMILIES, "plain"])
def test_every_operator_of_every_family_is_counted_or_fused(family):
    experts = "grouped_mm" if family in ("qwen3_moe", "mixtral") else "batched_mm"
    model = tiny_target(family, torch.float32, num_layers=1, experts=experts)
    for one in phases_of(compilespec.trace(model, max_seq_len=64, keep_graphs=False)).values():
        assert one.uncounted == {}
        assert one.total.cost.flops.free_symbols


# --- single operators ---


def only_cost(function: Any, **specs: Any) -> Cost:
    gm, ctx = graph_of(function, **specs)
    costs = [cost for _, cost in NodeCosts(gm.graph, ctx.inputs, 0)]
    return sum(costs, Cost())


def test_a_window_bounds_the_context():
    def function(key_cache: Any, value_cache: Any, x: Any, i: Any, table: Any) -> Any:
        return torch.ops.compilespec.paged_attention(
            x, x, x, key_cache, value_cache, i, i, i, table, 1.0, 7, 0.0, None
        )

    cache = torch.zeros(6, 4, 2, 8, dtype=torch.bfloat16)
    cost = only_cost(
        function, key_cache=("cache", cache), value_cache=("cache", cache),
        x=("batch", torch.zeros(3, 2, 5, 8, dtype=torch.bfloat16)),
        i=("batch", torch.zeros(3, 5, dtype=torch.int32)),
        table=("state", torch.zeros(3, 2, dtype=torch.int32)),
    )  # fmt: skip
    keys = sympy.Min(C, 7)
    assert_equal(cost.flops, 4 * 3 * 5 * 2 * 8 * keys)
    assert_equal(cost.cache_bytes, 2 * (2 * 2 * 8) * (3 * keys + 15))
    assert cost.activation_bytes == 2 * (4 * 3 * 5 * 2 * 8)


def test_a_recurrence_moves_its_states_once_and_a_delta_rule_reads_them_before():
    def mamba(query: Any, value: Any, decay: Any, state: Any, recent: Any, i: Any) -> Any:
        return torch.ops.compilespec.cached_recurrence(
            query, query, value, decay, None, state, recent, i, i, i, i > 0, "mamba2"
        )

    def delta(query: Any, value: Any, decay: Any, state: Any, recent: Any, i: Any) -> Any:
        return torch.ops.compilespec.cached_recurrence(
            query, query, value, decay, decay, state, recent, i, i, i, i > 0, "gated_delta"
        )

    inputs = {
        "query": ("batch", torch.zeros(3, 5, 1, 6)), "value": ("batch", torch.zeros(3, 5, 2, 4)),
        "decay": ("batch", torch.zeros(3, 5, 2)), "state": ("state", torch.zeros(7, 2, 6, 4)),
        "recent": ("state", torch.zeros(7, 4, 18)),
        "i": ("batch", torch.zeros(3, 5, dtype=torch.int32)),
    }  # fmt: skip
    one_state = 2 * 6 * 4
    for function, operations in ((mamba, 1 + 2 + 2), (delta, 1 + 2 + 2 + 2)):
        cost = only_cost(function, **inputs)
        assert cost.flops == 3 * 5 * one_state * operations
        assert cost.cache_bytes == 2 * 3 * one_state * 4  # nothing was left by a step of drafts
        assert cost.activation_bytes == 4 * 3 * 5 * (6 + 6 + 2 * 8)


def test_a_convolution_reads_the_ring_once_a_request():
    cost = only_cost(
        lambda x, weight, recent, i: torch.ops.compilespec.cached_conv(
            x, weight, None, recent, i, i
        ),
        x=("batch", torch.zeros(3, 5, 8)), weight=("weight", torch.zeros(8, 4)),
        recent=("state", torch.zeros(7, 6, 8)), i=("batch", torch.zeros(3, 5, dtype=torch.int32)),
    )  # fmt: skip
    assert cost == Cost(
        flops=2 * 15 * 8 * 4, weight_bytes=4 * 32, cache_bytes=4 * 8 * (3 * 3 + 15),
        activation_bytes=4 * 2 * 15 * 8,
    )  # fmt: skip


def test_products_know_weights_from_activations():
    x, w = ("batch", torch.zeros(5, 4)), ("weight", torch.zeros(3, 4))
    weighted = only_cost(lambda x, w: x @ w.t(), x=x, w=w)
    assert weighted == Cost(
        flops=sympy.Integer(2 * 5 * 4 * 3), weight_bytes=sympy.Integer(4 * 12),
        activation_bytes=sympy.Integer(4 * (20 + 15)),
    )  # fmt: skip
    both = only_cost(lambda x, w: x @ w.t(), x=x, w=("batch", w[1]))
    assert (both.weight_bytes, both.activation_bytes) == (0, 4 * (20 + 12 + 15))


def test_what_is_not_counted_is_said():
    gm, ctx = graph_of(lambda x: torch.linalg.inv(x).sin() + 1, x=("batch", torch.eye(3)))
    costs = NodeCosts(gm.graph, ctx.inputs, 0)
    assert list(costs) == []
    assert costs.uncounted()["aten.linalg_inv_ex.default"] == 1
    assert not any("sin" in name or "add" in name for name in costs.uncounted())


# --- devices and times ---


def test_a_roofline_is_the_slower_of_memory_and_arithmetic(program):
    compute = Device(name="x", bytes_per_s=1e30, flops_per_s=1e9)
    memory = Device(name="x", bytes_per_s=1e9, flops_per_s=1e30)
    for device, quantity in ((compute, "flops"), (memory, "num_bytes")):
        report = estimate(program, device=device, batch_size=2, context_length=10)
        for one in report.graphs.values():
            amount = getattr(one.total.cost.at(report.sizes), quantity)
            assert one.total.ms == pytest.approx(float(amount) / 1e6)
            assert sum(row.ms for row in one.stages) == pytest.approx(one.total.ms)
    both = Device(name="x", bytes_per_s=1e9, flops_per_s=1e9)
    ms = phases_of(program, device=both)["decode"].total.ms
    assert ms >= phases_of(program, device=compute)["decode"].total.ms


def test_published_and_given_devices(monkeypatch):
    h200 = find_device("h200", torch.bfloat16)
    assert (h200.bytes_per_s, h200.flops_per_s) == (4.8e12, 989e12)
    monkeypatch.setattr(devices, "measure_cpu", lambda dtype: pytest.fail("measured"))
    given = find_device("cpu", torch.float32, bytes_per_s=1e10, flops_per_s=2e11)
    assert (given.bytes_per_s, given.flops_per_s) == (1e10, 2e11)
    with pytest.raises(InvalidOption, match="roofline must be one of h200, cpu; got 'tpu'"):
        find_device("tpu", torch.float32)
    with pytest.raises(InvalidOption, match=r"no rate is known for .*float64 on an H200"):
        find_device("h200", torch.float64)


def test_the_cpu_is_measured_once(monkeypatch, tmp_path):
    monkeypatch.setenv("COMPILESPEC_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(devices, "_COPY_BYTES", 2**20)
    monkeypatch.setattr(devices, "_MATMUL_SIZE", 64)
    first = find_device("cpu", torch.float32)
    assert 1e7 < first.bytes_per_s < 1e13
    assert 1e6 < first.flops_per_s < 1e15
    monkeypatch.setattr(devices, "measure_cpu", lambda dtype: pytest.fail("measured again"))
    assert find_device("cpu", torch.float32) == first
    (tmp_path / "cpu.json").write_text("torn")
    monkeypatch.setattr(devices, "measure_cpu", lambda dtype: (1.0, 2.0))
    assert find_device("cpu", torch.float32).flops_per_s == 2.0


def test_the_report_is_text_and_data(program):
    report = estimate(program, device=Device(name="x", bytes_per_s=1e9, flops_per_s=1e9))
    text = str(report)
    assert "cost at B = 1, K = 3, C = 1024, T = 512, R = 1; x: 1 GB/s, 0.001 TFLOP/s" in text
    assert "target model.layers.*.mlp.down_proj" in text
    data = json.loads(json.dumps(report.to_dict()))
    total = data["phases"]["decode"]["total"]
    values = {str(symbol): value for symbol, value in report.sizes.items()}
    assert int(sympy.sympify(total["formulas"]["flops"]).subs(values)) == total["amounts"]["flops"]
    assert estimate(dataclasses.replace(program)).device is None
