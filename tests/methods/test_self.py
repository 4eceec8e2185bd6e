"""spec="self": the target drafts on its own cache; tokens, the entries it leaves, recipes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

import compilespec
from compilespec import SamplingParams, SelfDraft
from compilespec.errors import InvalidOption, NotSupported
from compilespec.ops.grouped_linear.reference import quantize_blocks
from compilespec.runtime.engine import Engine
from tests.support.direct_methods import MAX_SEQ_LEN, SIZES, check_traffic
from tests.support.models import HYBRIDS, Ask, ask_all, even_target, tiny_hybrid, tiny_target

OPTIONS: dict[str, Any] = {
    "backend": "eager", "max_batch_size": 5, "max_seq_len": MAX_SEQ_LEN,
    "max_prefill_tokens": 16, "buckets": [1, 2, 5],
}  # fmt: skip
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("family", "count"),
    [
        ("llama", 3),
        ("qwen3_5", 2),  # recurrent layers
        pytest.param("deepseek_v3", 3, marks=SLOW),  # latents
        pytest.param("qwen3_moe", 3, marks=SLOW),
        pytest.param("gpt_oss", 5, marks=SLOW),  # sinks and windows
        pytest.param("gemma3", 2, marks=SLOW),
        pytest.param("plain", 1, marks=SLOW),
        pytest.param("lfm2", 4, marks=SLOW),  # convolutions
        pytest.param("bamba", 3, marks=SLOW),
    ],
)
def test_the_target_itself_is_right_every_time(family: str, count: int) -> None:
    """Only if each token that it drafts after sees the entries of all tokens before."""
    is_hybrid = family in HYBRIDS
    model = tiny_hybrid(family) if is_hybrid else tiny_target(family, num_layers=2)
    asks = ask_all(model, SIZES)
    with compilespec.compile(
        model, spec="self", draft=SelfDraft(weights=None), num_draft_tokens=count, **OPTIONS
    ) as engine:
        for request in check_traffic(engine, asks):
            *whole, last = request.emitted_per_step or [1]
            assert whole == [count + 1] * len(whole)
            assert 1 <= last <= count + 1


# --- a drafter with a window, which errs now and then ---

SMALL: dict[str, Any] = {
    "backend": "eager", "max_batch_size": 3, "max_seq_len": MAX_SEQ_LEN, "max_prefill_tokens": 16,
    "kv_cache_tokens": 160,
}  # fmt: skip


@pytest.fixture(scope="module")
def target() -> torch.nn.Module:
    return even_target(num_layers=2).double()


@pytest.fixture(scope="module")
def asks(target: torch.nn.Module) -> list[Ask]:
    return ask_all(target, [(40, 34), (33, 30), (20, 40), (5, 9)])


@pytest.fixture(scope="module")
def engine(target: torch.nn.Module) -> Iterator[Engine]:
    recipe = SelfDraft(weights=None, window=(0, 24))
    with compilespec.compile(
        target, spec="self", draft=recipe, num_draft_tokens=3, **SMALL
    ) as made:
        yield made


@pytest.fixture(scope="module")
def plain(target: torch.nn.Module) -> Iterator[Engine]:
    with compilespec.compile(target, **SMALL) as made:
        yield made


def params(asks: Sequence[Ask], **more: Any) -> list[SamplingParams]:
    return [SamplingParams(max_new_tokens=len(a.tokens), ignore_eos=True, **more) for a in asks]


def test_tokens_are_the_targets_with_preemption_and_found_prefixes(
    engine: Engine, asks: list[Ask]
) -> None:
    prompts = [ask.prompt for ask in asks]
    for _ in range(2):
        outputs = engine.generate(prompts, params(asks))
        assert [tuple(output.token_ids) for output in outputs] == [ask.tokens for ask in asks]
    assert any(output.num_preemptions for output in outputs)
    assert any(output.num_cached_tokens for output in outputs)
    assert 1.05 < engine.stats().acceptance_length < 3.5


def test_sampled_tokens_are_those_of_plain_decoding(
    engine: Engine, plain: Engine, asks: list[Ask]
) -> None:
    sampled = params(asks, temperature=0.8, seed=7)
    found, wanted = (
        [output.token_ids for output in one.generate([ask.prompt for ask in asks], sampled)]
        for one in (engine, plain)
    )
    assert found == wanted


def test_committed_entries_are_those_of_plain_decoding(
    engine: Engine, plain: Engine, asks: list[Ask]
) -> None:
    """The drafter's own entries lie past the request's length alone."""
    found, wanted = (entries(one, asks[0], num_tokens=20) for one in (engine, plain))
    assert_same_entries(found, wanted, len(asks[0].prompt) + 15)


def test_a_drafter_in_4_bits_has_its_own_weights_and_no_cache() -> None:
    """Without a number of drafts, each step chooses one."""
    model = even_target(num_layers=2)
    (ask,) = ask_all(model, [(30, 30)])
    options = {**SMALL, "max_batch_size": 1, "kv_cache_tokens": None}
    with (
        compilespec.compile(model, **options) as plain,
        compilespec.compile(model, spec="self", **options) as engine,
    ):
        wanted = entries(plain, ask, num_tokens=20)
        assert_same_entries(entries(engine, ask, num_tokens=20), wanted, 45)
        output = engine.generate([ask.prompt], params([ask], num_draft_tokens=3)[0])[0]
        assert tuple(output.token_ids) == ask.tokens
        plan = engine.plan()
        assert any("verifies 0, 1, 3 or 5 drafts" in line for line in plan["why"])
        assert any("on its own cache, with 2 layers" in line for line in plan["why"])
        assert any("its own copies of 15 of 15 products" in line for line in plan["why"])
        assert plan["kv_cache_mib"] == plain.plan()["kv_cache_mib"]


def assert_same_entries(found: Any, wanted: Any, num_tokens: int) -> None:
    assert found.keys() == wanted.keys()
    for name, cells in wanted.items():
        length = min(len(cells), len(found[name]))
        assert length >= num_tokens
        torch.testing.assert_close(found[name][:length], cells[:length])


def entries(engine: Engine, ask: Ask, num_tokens: int) -> dict[str, torch.Tensor]:
    """What the target's caches hold of a request once it has given `num_tokens` tokens."""
    request = engine.submit(list(ask.prompt), params([ask])[0])
    while len(request.output_token_ids) < num_tokens:
        engine.step()
    buffers = engine._executor.buffers  # type: ignore[attr-defined]
    length = int(buffers["seq_len_R"][request.row])
    cells = {
        name: cache[list(request.blocks)].flatten(0, 1)[:length].clone()
        for name, cache in buffers.items()
        if name.startswith("cache.")
    }
    engine.abort(request)
    engine.step()
    return cells


# --- weights in two planes ---


def test_a_target_in_two_planes_drafts_from_the_upper_one_without_more_bytes() -> None:
    model = even_target(num_layers=2)
    (ask,) = ask_all(model, [(30, 30)])
    options = {**SMALL, "quantize": "int8_nested"}
    with (
        compilespec.compile(model, **options) as plain,
        compilespec.compile(model, spec="self", num_draft_tokens=3, **options) as engine,
    ):
        (wanted,), (found,) = (one.generate([ask.prompt], params([ask])) for one in (plain, engine))
        assert found.token_ids == wanted.token_ids
        assert found.acceptance_length > 1.5
        assert engine.plan()["weights_mib"] == plain.plan()["weights_mib"]
        assert "drafter: the upper halves of 15 of 15 products" in engine.plan()["why"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("offset", [0.0, 3.0])
def test_both_planes_are_nearer_than_int8_and_the_upper_one_has_four_bits(
    dtype: torch.dtype, offset: float
) -> None:
    from compilespec.quantization.nested import quantize_nested  # needs torchao

    torch.manual_seed(0)
    weight = (torch.randn(48, 128) + offset).to(dtype)
    whole, step = quantize_nested(weight, 32), weight.float().abs().amax(1, keepdim=True) / 127
    upper = whole.upper_plane()
    assert upper.qdata is whole.upper

    def error(other: torch.Tensor) -> float:
        return float((other.float() - weight.float()).square().mean().sqrt())

    assert error(whole.dequantize()) < error((weight.float() / step).round() * step)
    assert 8 < error(upper.dequantize()) / error(whole.dequantize()) < 32
    x = torch.randn(3, 128).to(dtype)
    ints, scale = quantize_blocks(x)  # as the product does
    rows = ints * scale.repeat_interleave(32, -1)
    found = torch.nn.functional.linear(x, whole).float()
    slack = 1e-5 if dtype == torch.float32 else 0.01
    wanted = rows @ whole.dequantize().float().T
    torch.testing.assert_close(found, wanted, rtol=slack, atol=slack * float(wanted.abs().max()))


# --- recipes ---


def test_layers_that_stay() -> None:
    assert SelfDraft().kept_layers(4) == (0, 1, 2, 3)
    assert SelfDraft(layers=[2, 0, 2]).kept_layers(4) == (0, 2)
    assert SelfDraft(layers=0.5).kept_layers(8) == (0, 2, 5, 7)
    assert SelfDraft(layers=0.01).kept_layers(8) == (0,)
    assert SelfDraft(layers=1.0).kept_layers(3) == (0, 1, 2)


@pytest.mark.parametrize(
    ("recipe", "says"),
    [
        ({"weights": "int9"}, "must be one of int4, upper, or None; got 'int9'"),
        ({"layers": []}, "leaves no layer to draft with: name those that stay"),
        ({"layers": 0.0}, "above 0 and up to 1; got 0.0"),
        ({"layers": "all"}, "takes the layers that stay, or their share; got 'all'"),
        ({"layers": [-1]}, "takes the layers that stay"),
        ({"window": (0, 0)}, "1 or more, such as"),
        ({"window": 5}, "takes .first tokens, newest tokens."),
        ({"vocab": 0}, "at least 1; got 0"),
    ],
)
def test_a_bad_recipe_is_refused(recipe: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidOption, match=says):
        SelfDraft(**recipe)


def test_a_recipe_that_does_not_suit_the_target_is_refused(target: torch.nn.Module) -> None:
    with pytest.raises(InvalidOption, match="has layers 0 to 1, there is no layer 2"):
        compilespec.trace(target, spec="self", draft=SelfDraft(layers=[0, 2]), **SMALL)
    with pytest.raises(InvalidOption, match=r"give draft=compilespec\.SelfDraft"):
        compilespec.trace(target, spec="self", draft=target, **SMALL)
    with pytest.raises(InvalidOption, match="finds no product that it can copy"):
        compilespec.trace(tiny_target("llama", num_layers=1), spec="self", **SMALL)
    with pytest.raises(InvalidOption, match="give quantize='int8_nested'"):
        compilespec.trace(target, spec="self", draft="upper", **SMALL)
    with pytest.raises(InvalidOption, match="leave draft_quantize= out"):
        compilespec.trace(target, spec="self", draft_quantize="int8_dynamic", **SMALL)
    with pytest.raises(NotSupported, match=r"give \(0, 8\)"):
        SelfDraft(window=(4, 8))
