"""Prompts with images: tokens are those of the model's own `generate` from the same images.

float64 on the interpreted graphs, tokens equal.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
from torch import nn

import compilespec
from compilespec import EmbedsPrompt, SamplingParams
from compilespec.errors import InvalidRequest, NotSupported, UnsupportedModel
from compilespec.quantization import quantize_target, read_quantize
from compilespec.runtime.chunks import next_chunks
from compilespec.runtime.image_features import ImageTower, split_images
from compilespec.runtime.image_prompts import ImageReader
from compilespec.runtime.request import Request, RequestState
from compilespec.tracing import images as image_models
from compilespec.tracing.load import load_target
from compilespec.tracing.media import IMAGES
from compilespec.tracing.quantized_weights import is_quantized
from compilespec.tracing.target import trace_target
from tests.support.adapters import merged_by_hand, write_adapter
from tests.support.drafters import METHODS, always_right, traced_info
from tests.support.fake_executor import FakeExecutor, engine_over, geometry
from tests.support.images import (
    FAMILIES,
    IMAGE,
    TEXT_SIZES,
    VIDEO,
    num_places,
    prompt,
    tiny_images_target,
)
from tests.support.qwen_mtp import whole_model

COUNT = 18
PARAMS = SamplingParams(max_new_tokens=COUNT, ignore_eos=True)
TEXT = [8, 9, 7, 9, 3, 2, 38, 46]


@functools.cache
def model(family: str) -> nn.Module:
    return tiny_images_target(family)


def own_tokens(target: str | nn.Module, given: Any, count: int = COUNT) -> list[int]:
    target = model(target) if isinstance(target, str) else target
    if isinstance(given, list):
        given = {"input_ids": torch.tensor([given]), "attention_mask": torch.ones(1, len(given))}
    with torch.no_grad():
        out = target.generate(
            **given, max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    return out[0, given["input_ids"].shape[1] :].tolist()


def compiled(family: str, spec: str = "none", k: int | None = None, **options: Any) -> Any:
    if spec in METHODS and "draft" not in options:
        options |= METHODS[spec](model(family), traced_info(model(family)), k)
    options = {"backend": "eager", "max_batch_size": 4, "max_seq_len": 64, **options}
    return compilespec.compile(model(family), spec, num_draft_tokens=k, **options)


@pytest.mark.parametrize(
    ("family", "spec", "k"),
    [
        ("qwen2_5_vl", "ngram", 1),
        ("qwen3_vl", "ngram", 1),
        pytest.param("qwen3_vl", "eagle3", 3, marks=pytest.mark.slow),
        pytest.param("gemma3", "ngram", 5, marks=pytest.mark.slow),
        ("gemma4", "ngram", 5),
        pytest.param("llava", "ngram", 3, marks=pytest.mark.slow),
        pytest.param("llava", "none", None, marks=pytest.mark.slow),
        pytest.param("llava", "eagle3", 5, marks=pytest.mark.slow),
        pytest.param("llava", "draft_model", 1, marks=pytest.mark.slow),
        pytest.param("qwen2_5_vl", "none", None, marks=pytest.mark.slow),
        pytest.param("qwen2_5_vl", "eagle3", 3, marks=pytest.mark.slow),
        pytest.param("qwen2_5_vl", "draft_model", 5, marks=pytest.mark.slow),
        pytest.param("qwen2_5_vl", "mtp", 3, marks=pytest.mark.slow),
        pytest.param("gemma3", "none", None, marks=pytest.mark.slow),
        pytest.param("gemma3", "eagle3", 1, marks=pytest.mark.slow),
        pytest.param("gemma3", "draft_model", 3, marks=pytest.mark.slow),
        pytest.param("gemma3", "mtp", 3, marks=pytest.mark.slow),
    ],
)
def test_batches_that_mix_images_and_text(family, spec, k):
    """Chunks of 13 cut the prompts, and images where these may be cut; too few blocks for all."""
    prompts = [
        prompt(family, [5, 6], None, [7, 8], None, [9]),
        TEXT,
        prompt(family, [5, 6] * 8, None, [7, 3], seed=3),
        prompt(family, None, [11], seed=4),
    ]
    with compiled(family, spec, k, max_prefill_tokens=13, kv_cache_tokens=96) as engine:
        outputs = engine.generate(prompts, PARAMS)
        assert [one.token_ids for one in outputs] == [own_tokens(family, one) for one in prompts]
        is_preempted = any(output.num_preemptions for output in outputs)
        assert (
            is_preempted or spec != "ngram" or family == "llava"
        )  # others may end before blocks run out
        assert outputs[0].prompt_token_ids == prompts[0]["input_ids"][0].tolist()
        assert engine.encode(prompts[0]) == outputs[0].prompt_token_ids
        prefixes_are_found_by_content(engine, family)
        bad_prompts_are_refused(engine, family)
        assert engine.stats().num_recompiles == 0


def test_prompts_whose_tokens_all_see_each_other():
    """PaliGemma: a prompt with images is one piece; text alone is causal.  Too few blocks."""
    prompts = [
        prompt("paligemma", None, [5, 6, 7, 8]),
        TEXT,
        prompt("paligemma", None, None, [9] * 4, seed=3),
        prompt("paligemma", None, [5, 6, 7, 3], seed=4),
    ]
    with compiled("paligemma", "ngram", 3, max_prefill_tokens=24, kv_cache_tokens=96) as engine:
        outputs = engine.generate(prompts, PARAMS)
        wanted = [own_tokens("paligemma", one) for one in prompts]
        assert [one.token_ids for one in outputs] == wanted
        (again,) = engine.generate(prompts[2], PARAMS)
        assert (again.num_cached_tokens, again.token_ids) == (16, wanted[2])
        (other,) = engine.generate(
            prompt("paligemma", None, None, [9] * 3 + [4], seed=3), PARAMS
        )  # its last token is seen by the first
        assert other.num_cached_tokens == 0
        without = {n: value for n, value in prompts[0].items() if n != "token_type_ids"}
        (causal,) = engine.generate(without, PARAMS)
        assert causal.token_ids == own_tokens("paligemma", without) != wanted[0]
        with pytest.raises(InvalidRequest, match=r"see each other, 30 of them: .* larger max_pre"):
            engine.generate(prompt("paligemma", None, [5] * 21))
        with pytest.raises(NotSupported, match=r"none that is served: .* in its window"):
            engine.generate(prompt("paligemma", None, [5] * 24))


def test_images_are_refused_where_a_models_two_masks_differ():
    """Gemma 4 unified of transformers 5.23: its forward and its `create_masks_for_generate`."""
    with compiled("gemma4_unified", "ngram", 3) as engine:
        with pytest.raises(NotSupported, match="differ in what tokens of an image see"):
            engine.generate(prompt("gemma4_unified", [5], None, [6]))
        (output,) = engine.generate([TEXT], PARAMS)
        assert output.token_ids == own_tokens("gemma4_unified", TEXT)


def prefixes_are_found_by_content(engine: Any, family: str) -> None:
    """The same ids, with other images: what is before the image is found, and no more."""
    first, other = (prompt(family, [4] * 19, None, [6] * 12, seed=seed) for seed in (6, 9))
    whole = first["input_ids"].shape[1] // 16 * 16
    for given, num_cached in ((first, 0), (other, 16), (first, whole)):
        (output,) = engine.generate([given], PARAMS)
        assert output.token_ids == own_tokens(family, given)
        assert output.num_cached_tokens == num_cached


def bad_prompts_are_refused(engine: Any, family: str) -> None:
    good = prompt(family, [5], None, [6])
    ids, pixels = good["input_ids"], good["pixel_values"]
    spoilt = pixels.clone()
    spoilt.view(-1)[3] = torch.nan
    fewer, more = prompt(family, [5], None, None, [6]), prompt(family, [5], None, [6])
    fewer["input_ids"] = ids
    more["input_ids"] = prompt(family, [5], None, None, [6])["input_ids"]
    for bad, says in (
        ({**good, "pixel_values": spoilt}, "pixel_values holds NaN"),
        (strip(fewer), r"2 images have \d+ rows and it has \d+ placeholders \(id 90\)"),
        (strip(more), r"1 image has \d+ rows and it has \d+ placeholders"),
        ({"input_ids": ids, "pixel_values": pixels[:, :-1]}, "get_image_features refuses pixel"),
        ({"input_ids": torch.cat([ids, ids]), "pixel_values": pixels}, "2 rows of input_ids"),
        ({"pixel_values": pixels}, "without input_ids"),
        ({"input_ids": ids, "pixel_values": [["a"]]}, "pixel_values is a list and no tensor"),
        ({"input_ids": ids, "pixel_values_videos": pixels}, "has pixel_values_videos"),
        ({"prompt": "a", "images": [pixels]}, "no processor"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "no processor"),
        (prompt(family, [5] * 60, None), "tokens: expected at most 63"),
    ):
        with pytest.raises((InvalidRequest, NotSupported), match=says) as caught:
            engine.generate(bad)
        assert "\n" not in str(caught.value)
    refused, served, text = engine.generate([{**good, "pixel_values": spoilt}, good, TEXT], PARAMS)
    assert refused.finish_reason == "error"
    assert served.token_ids == own_tokens(family, good)
    assert text.token_ids == own_tokens(family, TEXT)


def strip(given: dict[str, Any]) -> dict[str, Any]:
    """Without what counts tokens."""
    wanted = ("input_ids", "pixel_values", "image_grid_thw", "image_position_ids")
    return {name: value for name, value in given.items() if name in wanted}


def test_the_tower_runs_once_an_image_and_many_at_a_time(monkeypatch):
    calls = []
    whole = ImageTower._run
    monkeypatch.setattr(
        ImageTower, "_run", lambda self, batch: calls.append(len(batch)) or whole(self, batch)
    )
    given = prompt("qwen2_5_vl", None, [5], None, None, [6])
    images = split_images({name: given[name] for name in ("pixel_values", "image_grid_thw")})
    tower = ImageTower(model("qwen2_5_vl"), max_bytes=10_000)
    tower.encode([*images, images[0]])
    rows = tower.features([images[2], images[0]])
    assert calls == [3]
    places = num_places("qwen2_5_vl", given)
    assert [len(one) for one in rows] == [places[2], places[0]]
    alone = ImageTower(model("qwen2_5_vl")).features([images[2]])[0]
    torch.testing.assert_close(rows[0], alone)
    small = ImageTower(model("qwen2_5_vl"), max_bytes=1)
    assert [len(one) for one in small.features(images)] == places  # kept by nobody
    small.features(images[:1])
    assert calls == [3, 1, 3, 1]


def test_images_without_text_between_are_refused_where_positions_need_it():
    reader = ImageReader(
        model("qwen2_5_vl"),
        IMAGES,
        None,
        geometry(embeds_width=48),
    )
    assert reader.read(prompt("qwen2_5_vl", [5], None, [6])).rope.after < 0
    with pytest.raises(InvalidRequest, match=r"get_rope_index refuses .* text between any two"):
        reader.read(prompt("qwen2_5_vl", [5], None, None, [6]))


def test_tokens_that_see_each_other_stand_in_one_chunk():
    """Gemma 3: an image that is cut waits for the next call, and goes before `max_step_tokens`."""
    sees = image_models.tokens_ahead(model("gemma3"), [0, 0, *[1] * 6, 0, *[1] * 3])
    assert sees == [0, 0, 5, 4, 3, 2, 1, 0, 0, 2, 1, 0]

    request = Request(
        id=0, prompt_token_ids=(5,) * 12, params=PARAMS, seed=0, stop_token_ids=frozenset(),
        ahead=tuple(sees), state=RequestState.PREFILL, prefill_token_ids=(5,) * 12,
    )  # fmt: skip
    for start, limit, end in ((0, None, 9), (9, None, 12), (0, 4, 2), (2, 4, 8), (5, None, 12)):
        request.num_prefilled = start
        small = geometry(max_prefill_tokens=10, block_size=4)
        (chunk,) = next_chunks([request], small, limit).values()
        assert (chunk.start, chunk.end) == (start, end)
        assert chunk.ahead == sees[start:end] or not any(sees[start:end])


def test_a_call_must_hold_an_image():
    given = prompt("gemma3", [5], None, [6])
    with compiled("gemma3", max_prefill_tokens=8) as engine:
        with pytest.raises(InvalidRequest, match=r"see each other, 9 of them: .* larger max_pre"):
            engine.generate(given)


def test_embeddings_and_trees_beside_images():
    """Rows that a user gives have no features for layers, where an image had some before; drafts
    along a tree have the offsets of their request, too.
    """
    given = prompt("qwen3_vl", None, [6], None, [7])
    weight = model("qwen3_vl").get_input_embeddings().weight.detach()
    tree = compilespec.DraftTree(choices=[(0,), (1,), (0, 0), (0, 1), (0, 0, 0)])
    with compiled("qwen3_vl", "eagle3", None, draft_tree=tree) as engine:
        first = engine.generate([given], PARAMS)
        outputs = first + engine.generate([EmbedsPrompt(weight[TEXT]), TEXT], PARAMS)
    wanted = own_tokens("qwen3_vl", TEXT)
    assert [one.token_ids for one in outputs] == [own_tokens("qwen3_vl", given), wanted, wanted]


def test_features_of_layers_change_tokens(monkeypatch):
    """Without them, or with those of the wrong layer, tokens are others."""
    whole = ImageTower._run
    width = TEXT_SIZES["hidden_size"]

    def run(change: Any) -> Any:
        return lambda self, batch: [change(one) for one in whole(self, batch)]

    changes = (
        lambda one: torch.cat([one[:, :width], one[:, width:] * 0], 1),
        lambda one: torch.cat([one[:, :width], one[:, width:].roll(width, 1)], 1),
    )
    with compiled("qwen3_vl", "none") as engine:
        for seed, change in enumerate(changes):
            given = prompt("qwen3_vl", [5], None, [6], None, [7], seed=seed)
            monkeypatch.setattr(ImageTower, "_run", run(change))
            (output,) = engine.generate([given], PARAMS)
            assert output.token_ids != own_tokens("qwen3_vl", given)


@pytest.mark.parametrize(("family", "k"), [("llava", 3), ("qwen2_5_vl", 5)])
def test_a_head_that_is_always_right_beside_images(family, k):
    """Its cache holds placeholders as the tokens that they are."""
    prompts = [
        prompt(family, [5, 6], None, [7, 8]),
        prompt(family, [9] * 18, None, [7], seed=3),
        TEXT,
    ]
    ids = [one if one is TEXT else one["input_ids"][0].tolist() for one in prompts]
    wanted = [own_tokens(family, one) for one in prompts]
    dial = always_right(model(family), k, ids, wanted)
    with compiled(family, "eagle3", k, draft=dial, max_prefill_tokens=13) as engine:
        outputs = engine.generate(prompts, PARAMS)
    assert [one.token_ids for one in outputs] == wanted
    for output, before in zip(outputs, ids, strict=True):
        assert list(output.emitted_per_step) == dial.expected_steps(len(before), COUNT, k)


def test_images_beside_adapters(tmp_path):
    """Each request with its own adapter, or none; an image is read with all of them."""
    names = ("o_proj", "up_proj", "down_proj")  # of the language model alone
    adapters = {
        name: write_adapter(tmp_path / name, model("llava"), names, seed=seed)
        for seed, name in enumerate(("first", "second"))
    }
    given = prompt("llava", [5, 6], None, [7, 8])
    asked = [(given, "first"), (TEXT, "second"), (given, None), (given, "second"), (TEXT, None)]
    with compiled("llava", "ngram", 3, adapters=adapters, max_prefill_tokens=13) as engine:
        outputs = engine.generate(
            [one for one, _ in asked],
            [dataclasses.replace(PARAMS, adapter=name) for _, name in asked],
        )
    for output, (one, name) in zip(outputs, asked, strict=True):
        target = merged_by_hand(model("llava"), adapters[name]) if name else "llava"
        assert output.token_ids == own_tokens(target, one), name


@pytest.mark.parametrize(
    ("family", "tower"),
    [("qwen2_5_vl", "eager mode: its inputs have no one"), ("gemma3", "compiled for images of 3")],
    ids=["qwen2_5_vl", "gemma3"],
)
def test_compiled_by_inductor(family, tower, inductor_cache_dir):
    prompts = [prompt(family, [5, 6], None, [7, 8], None, [9]), TEXT]
    with compiled(family, "ngram", 3, backend="inductor", max_prefill_tokens=13) as engine:
        assert engine.plan()["tower"].startswith(tower)
        outputs = engine.generate(prompts, PARAMS)
        assert [one.token_ids for one in outputs] == [own_tokens(family, one) for one in prompts]
        assert engine.stats().num_recompiles == 0


def test_a_hybrid_with_images():
    """Qwen3.5: recurrent layers, and rotary positions of three axes."""
    whole = whole_model("qwen3_5")
    whole.config.image_token_id = IMAGE
    given = prompt("qwen2_5_vl", [5, 6] * 4, None, [7, 8], None, [9])
    sizes = {"max_batch_size": 4, "max_seq_len": 64, "max_prefill_tokens": 13}
    with compilespec.compile(
        whole, "ngram", num_draft_tokens=3, backend="eager", **sizes
    ) as engine:
        outputs = engine.generate([given, TEXT], PARAMS)
    assert outputs[0].token_ids == own_tokens(whole, given)
    assert outputs[1].token_ids == own_tokens(whole, TEXT)


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3", "gemma4"])
def test_the_passes_are_what_their_references_say(family):
    program = compilespec.trace(model(family), max_seq_len=64, max_batch_size=4)
    passes = ["read_embeds", "insert_paged_attention"]
    passes += ["read_rope_offsets", "add_deep_rows"] * (family == "qwen3_vl")
    report = compilespec.verify(program, passes=passes, batch_sizes=[3])
    assert report.ok, "\n".join(" ".join(row) for row in report.rows())


def test_offsets_are_an_argument_where_they_are_asked_for():
    assert not trace_target(model("qwen2_5_vl")).has_rope_offsets
    assert not trace_target(model("llava"), offsets=True).has_rope_offsets


def test_a_text_model_takes_no_images():
    with engine_over(FakeExecutor()) as engine:
        for given in (prompt("llava", None), {"prompt": "a", "images": [1]}):
            with pytest.raises(InvalidRequest, match="images or sound and the model takes none"):
                engine.generate(given)


def test_text_that_sees_later_text_is_refused(monkeypatch):
    def all_ones(*, inputs_embeds: Any, **_: Any) -> Any:
        count = inputs_embeds.shape[1]
        return torch.ones(1, 1, count, count, dtype=torch.bool)

    monkeypatch.setattr(model("llava"), "create_masks_for_generate", all_ones, raising=False)
    with pytest.raises(UnsupportedModel, match="tokens of text see later ones"):
        image_models.has_own_masks(model("llava"))


def test_features_of_several_layers_are_refused(monkeypatch):
    class Output:
        pooler_output, deepstack_features = [torch.ones(9, 48)], [1]

    monkeypatch.setattr(model("llava"), "get_image_features", lambda **_: Output())
    images = split_images({"pixel_values": prompt("llava", None)["pixel_values"]})
    with pytest.raises(NotSupported, match="adds features of images to several of its layers"):
        ImageTower(model("llava")).features(images)


def test_towers_stay_as_they_are_where_the_model_is_quantized():
    pytest.importorskip("torchao")
    target = load_target(tiny_images_target("llava").float())
    quantized = quantize_target(target, read_quantize("int8_weight_only", "quantize")).model
    assert is_quantized(quantized.lm_head.weight)
    assert is_quantized(quantized.model.language_model.layers[1].mlp.up_proj.weight)
    linear = [
        path for path in image_models.tower_paths(quantized)
        if isinstance(quantized.get_submodule(path), nn.Linear)
    ]  # fmt: skip
    assert "model.multi_modal_projector.linear_1" in linear
    assert not any(is_quantized(quantized.get_submodule(path).weight) for path in linear)


def test_placeholders_are_known():
    assert {IMAGES.token_id(model(family)) for family in FAMILIES} == {IMAGE}
    assert VIDEO != IMAGE
