"""Batches of several adapters: each request's tokens are those of the model with its own merged.

float64 on the interpreted graphs, tokens equal; one case on Inductor, by the margin rule.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import compilespec
from compilespec import SamplingParams
from compilespec.errors import InvalidOption, InvalidRequest, NotSupported
from compilespec.quantization import quantize_target, read_quantize
from compilespec.tracing.adapter_files import LowRank, read_adapter
from compilespec.tracing.load import load_target
from tests.support.adapters import EVERYWHERE, merged_by_hand, write_adapter
from tests.support.drafters import METHODS, always_right, traced_info
from tests.support.margin import LOGIT_BOUND, shortfall
from tests.support.models import VOCAB, even_target, tiny_target

NAMES = (None, "all", "few", "down", "rs", "few")
PROMPTS = ([3, 14, 15, 9, 26], [5, 35], [8, 9, 7, 9, 3, 2, 38, 46], [11], [4] * 19, [8, 9, 7])
COUNT = 22


@functools.cache
def model(dtype: torch.dtype = torch.float64) -> torch.nn.Module:
    return tiny_target("llama", dtype, num_layers=2)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory) -> dict[str, Path]:
    """Of different ranks and modules."""
    folder = tmp_path_factory.mktemp("adapters")
    kinds = {
        "all": {"names": EVERYWHERE, "rank": 3},
        "few": {"names": ("q_proj", "v_proj"), "rank": 9},
        "down": {"names": ("down_proj",), "rank": 1},
        "rs": {"names": ("k_proj", "o_proj"), "rank": 4, "use_rslora": True},
    }
    return {
        name: write_adapter(folder / name, model(), seed=seed, **kind)
        for seed, (name, kind) in enumerate(kinds.items())
    }


def own_tokens(directory: Path | None, prompt: list[int], count: int = COUNT) -> list[int]:
    """Greedy tokens of transformers' `generate` with the adapter merged into the model."""
    merged = model() if directory is None else merged_by_hand(model(), directory)
    ids = torch.tensor([prompt])
    out = merged.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return out[0, len(prompt) :].tolist()


def compiled(adapters, spec="none", k=None, **options):
    if spec in METHODS and "draft" not in options:
        options |= METHODS[spec](model(), traced_info(model()), k)
    options = {"backend": "eager", "max_batch_size": 5, "max_seq_len": 64, **options}
    return compilespec.compile(
        model(), spec, num_draft_tokens=k, adapters=adapters, **options
    )  # fmt: skip


def test_tokens_do_not_depend_on_the_batch_where_products_round_their_inputs(tmp_path):
    """int8_dynamic rounds each row: a bit more or less between A and B would change tokens."""
    pytest.importorskip("torchao")
    target = even_target(num_layers=2)
    some = {
        name: write_adapter(tmp_path / name, target, seed=seed) for seed, name in enumerate("ab")
    }
    draw = random.Random(1)
    prompts = [
        [draw.randrange(3, VOCAB) for _ in range(draw.choice((5, 17, 40)))] for _ in range(8)
    ]
    asked = [
        SamplingParams(max_new_tokens=30, ignore_eos=True, adapter="ab"[i % 2], seed=i,
                       temperature=(0.0, 1.0)[i // 4])
        for i in range(8)
    ]  # fmt: skip
    found = []
    for batch, spec in ((1, {}), (4, {"spec": "ngram", "num_draft_tokens": 3})):
        with compilespec.compile(
            target, backend="eager", max_seq_len=96, max_batch_size=batch, adapters=some,
            quantize="int8_dynamic", **spec,
        ) as engine:  # fmt: skip
            found.append([output.token_ids for output in engine.generate(prompts, asked)])
    assert found[1] == found[0]


def params(name, count=COUNT):
    return SamplingParams(max_new_tokens=count, ignore_eos=True, adapter=name)


@pytest.mark.parametrize(
    ("spec", "k"),
    [
        pytest.param("none", None, marks=pytest.mark.slow),
        ("ngram", 3),
        ("eagle3", 1),
        pytest.param("eagle3", 3, marks=pytest.mark.slow),
        pytest.param("draft_model", 1, marks=pytest.mark.slow),
        pytest.param("eagle3", 5, marks=pytest.mark.slow),
        pytest.param("draft_model", 3, marks=pytest.mark.slow),
        pytest.param("mtp", 3, marks=pytest.mark.slow),
    ],
)
def test_a_mixed_batch_has_the_tokens_of_merged_models(adapters, spec, k):
    """Chunks, and too few blocks for all: the last in line are preempted."""
    with compiled(
        adapters, spec, k, max_prefill_tokens=12, kv_cache_tokens=80, max_adapters=5
    ) as engine:
        outputs = engine.generate([*PROMPTS], [params(name) for name in NAMES])
        for output, name, prompt in zip(outputs, NAMES, PROMPTS, strict=True):
            assert output.token_ids == own_tokens(adapters.get(name), prompt), name
        is_preempted = any(output.num_preemptions for output in outputs)
        assert is_preempted or spec == "draft_model"  # whose drafts are right: they end before
        load_and_drop(engine, adapters)
        assert engine.stats().num_recompiles == 0


def test_the_target_that_drafts_for_itself_is_right_with_each_adapter(adapters):
    """Its products are changed as the target's own are."""
    recipe = compilespec.SelfDraft(weights=None)
    with compiled(adapters, "self", 3, draft=recipe, max_prefill_tokens=12) as engine:
        outputs = engine.generate([*PROMPTS], [params(name) for name in NAMES])
    for output, name, prompt in zip(outputs, NAMES, PROMPTS, strict=True):
        assert output.token_ids == own_tokens(adapters.get(name), prompt), name
        assert set(output.emitted_per_step[:-1]) == {4}


@pytest.mark.parametrize("k", [1, 5])
def test_a_head_that_is_always_right_beside_adapters(adapters, k):
    """The drafter is the same for all; what it should draft is each adapter's own."""
    wanted = [own_tokens(adapters.get(n), p) for n, p in zip(NAMES, PROMPTS, strict=True)]
    dial = always_right(model(), k, PROMPTS, wanted)
    with compiled(adapters, "eagle3", k, draft=dial, max_prefill_tokens=12) as engine:
        outputs = engine.generate([*PROMPTS], [params(name) for name in NAMES])
    for output, prompt, tokens in zip(outputs, PROMPTS, wanted, strict=True):
        assert output.token_ids == tokens
        assert list(output.emitted_per_step) == dial.expected_steps(len(prompt), COUNT, k)


def load_and_drop(engine, adapters):
    """Another one under a known name, and a new one; cached blocks belong to one adapter."""
    prompt = [*range(40, 59)]
    before = own_tokens(adapters["all"], prompt, 5)
    for _ in range(2):
        (output,) = engine.generate([prompt], params("all", 5))
        assert output.token_ids == before
    assert output.num_cached_tokens == 16
    engine.load_adapter("new", adapters["few"])
    engine.load_adapter("all", adapters["down"])
    for name, own in (("new", "few"), ("all", "down"), (None, None)):
        (output,) = engine.generate([prompt], params(name, 5))
        assert output.token_ids == own_tokens(adapters.get(own), prompt, 5), name
        assert output.num_cached_tokens == 0
    engine.drop_adapter("new")


def test_a_batch_of_four_adapters_is_four_engines(adapters):
    """Each of the four has one adapter, merged, and one request."""
    names = [name for name in adapters for _ in range(2)]
    prompts = [*PROMPTS, [9, 9, 1], [17]]
    with compiled(adapters, "eagle3", 3) as engine:
        together = engine.generate(prompts, [params(name) for name in names])
    for name, directory in adapters.items():
        own = [place for place, other in enumerate(names) if other == name]
        with compiled(directory, "eagle3", 3) as engine:
            alone = engine.generate([prompts[place] for place in own], params(None))
        assert [one.token_ids for one in alone] == [together[place].token_ids for place in own]


@pytest.mark.parametrize(
    "tree",
    [
        compilespec.DraftTree(choices=[(0,), (1,), (0, 0), (0, 1), (0, 0, 0)]),
        compilespec.DraftTree(top_k=3, depth=3, num_nodes=7),
    ],
    ids=["static", "dynamic"],
)
@pytest.mark.parametrize("spec", ["eagle3", "draft_model"])
def test_trees_beside_adapters(adapters, spec, tree):
    with compiled(adapters, spec, None, draft_tree=tree, max_prefill_tokens=12) as engine:
        outputs = engine.generate([*PROMPTS], [params(name) for name in NAMES])
        engine.load_adapter("all", adapters["down"])
        (swapped,) = engine.generate([PROMPTS[0]], params("all"))
        assert engine.stats().num_recompiles == 0
    for output, name, prompt in zip(outputs, NAMES, PROMPTS, strict=True):
        assert output.token_ids == own_tokens(adapters.get(name), prompt), name
    assert swapped.token_ids == own_tokens(adapters["down"], PROMPTS[0])


def test_adapters_beside_a_quantized_base(adapters):
    """The model has products of 8 bits, too, and a hook beside each adds what an adapter does."""
    pytest.importorskip("torchao")
    narrow, quantize = model(torch.float32), "int8_weight_only"
    base = quantize_target(load_target(narrow), read_quantize(quantize, "quantize")).model
    options = {"backend": "eager", "max_seq_len": 64, "max_batch_size": 5, "quantize": quantize}
    with compilespec.compile(
        narrow, "ngram", num_draft_tokens=3, adapters=adapters, **options
    ) as engine:
        outputs = engine.generate([*PROMPTS], [params(name) for name in NAMES])
        engine.load_adapter("all", adapters["few"])
        (swapped,) = engine.generate([PROMPTS[0]], params("all"))
    for output, name, prompt in zip(outputs, NAMES, PROMPTS, strict=True):
        with added(base, adapters.get(name)):
            assert shortfall(base, prompt, output.token_ids) < LOGIT_BOUND
    with added(base, adapters["few"]):
        assert shortfall(base, PROMPTS[0], swapped.token_ids) < LOGIT_BOUND
    assert shortfall(base, PROMPTS[0], swapped.token_ids) > 100 * LOGIT_BOUND  # without it


@contextlib.contextmanager
def added(base: torch.nn.Module, directory: Path | None) -> Iterator[None]:
    """Within, the products of a model have x A^T B^T added."""

    def hook(part: LowRank) -> Any:
        def add(module: torch.nn.Module, args: Any, product: torch.Tensor) -> torch.Tensor:
            (x,) = args
            return product + x @ part.down.to(x.dtype).T @ part.up.to(x.dtype).T

        return add

    parts = {} if directory is None else read_adapter(directory).modules
    handles = [
        base.get_submodule(path).register_forward_hook(hook(part)) for path, part in parts.items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def test_adapters_on_inductor(adapters, inductor_cache_dir):
    narrow = model(torch.float32)
    with compilespec.compile(
        narrow, "ngram", num_draft_tokens=3, adapters=adapters, max_seq_len=64, max_batch_size=5
    ) as engine:
        outputs = engine.generate([*PROMPTS], [params(name) for name in NAMES])
        for output, name, prompt in zip(outputs, NAMES, PROMPTS, strict=True):
            assert_near_tie_at_most(output.token_ids, adapters.get(name), prompt)
        engine.drop_adapter("few")
        engine.load_adapter("new", adapters["rs"])
        engine.load_adapter("all", adapters["down"])
        prompt = PROMPTS[2]
        for name, own in (("new", "rs"), ("all", "down"), ("rs", "rs"), (None, None)):
            (output,) = engine.generate([prompt], params(name))
            assert_near_tie_at_most(output.token_ids, adapters.get(own), prompt)
        with pytest.raises(InvalidRequest, match="no adapter 'few' is loaded"):
            engine.generate(prompt, params("few"))
        assert engine.stats().num_recompiles == 0
        assert compilespec.verify(engine).ok


def assert_near_tie_at_most(tokens, directory, prompt):
    """Equal, or parted where float64 has two logits next to each other."""
    wanted = own_tokens(directory, prompt)
    if tokens == wanted:
        return
    at = next(i for i, pair in enumerate(zip(tokens, wanted, strict=True)) if pair[0] != pair[1])
    merged = model() if directory is None else merged_by_hand(model(), directory)
    logits = merged(torch.tensor([[*prompt, *wanted[:at]]])).logits[0, -1]
    best = logits.topk(2).values
    assert float(best[0] - best[1]) < 1e-4 * float(logits.abs().max()), (tokens, wanted)


def test_room_follows_from_what_is_given(adapters):
    program = compilespec.trace(model(), adapters=adapters, max_seq_len=64)
    shape = program.config.adapters
    assert (shape.num_places, shape.rank, len(shape.modules)) == (4, 16, 14)
    empty = compilespec.trace(model(), adapters={}, max_adapters=3, max_adapter_rank=20)
    shape = empty.config.adapters
    assert (shape.num_places, shape.rank, len(shape.modules)) == (3, 32, 14)
    with pytest.raises(InvalidOption, match="max_adapters must be at least the 4 of adapters="):
        compilespec.trace(model(), adapters=adapters, max_adapters=3)
    with pytest.raises(InvalidOption, match="at least 9, the rank of adapter 'few'; got 8"):
        compilespec.trace(model(), adapters=adapters, max_adapter_rank=8)
    with pytest.raises(InvalidOption, match="max_adapters= needs adapters="):
        compilespec.trace(model(), adapters=adapters["all"], max_adapters=3)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_products_that_cannot_be_shared_are_named(tmp_path, family):
    """The head, and weights that are [in, out]: they can be merged."""
    target = tiny_target(family, num_layers=1)
    name = "lm_head" if family == "llama" else "c_attn"
    directory = write_adapter(tmp_path, target, (name,))
    with pytest.raises(NotSupported, match=rf"{name}, which .*; .* merge it with adapters=DIR"):
        compilespec.trace(target, adapters={"one": directory})
