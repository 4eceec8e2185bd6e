"""Prompts with sound: tokens are those of the model's own `generate`, float64 in eager mode."""

from __future__ import annotations

import functools
import types
from typing import Any

import numpy
import pytest
import torch
import transformers
from torch import Tensor, nn

import compilespec
from compilespec import SamplingParams
from compilespec.errors import InvalidRequest, NotSupported
from compilespec.runtime.image_features import ImageTower, split_images
from compilespec.runtime.image_prompts import ImageReader
from compilespec.tracing.load import load_target
from compilespec.tracing.media import IMAGES, SOUND, medium_of
from compilespec.tracing.processors import is_processor
from tests.support.fake_executor import geometry
from tests.support.images import TEXT_SIZES, tiny_images_target
from tests.support.models import enliven
from tests.support.toy_tokenizer import byte_level_tokenizer

PARAMS = SamplingParams(max_new_tokens=12, ignore_eos=True)
SOUND_ID, NUM_ROWS, TEXT = 90, 4, [8, 9, 7, 9, 3]
TOWER = {
    "num_mel_bins": 8, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 96,
}  # fmt: skip


def voxtral() -> Any:
    return transformers.VoxtralForConditionalGeneration, transformers.VoxtralConfig(
        audio_config={**TOWER, "max_source_positions": 16},
        text_config={**TEXT_SIZES, "model_type": "llama", "head_dim": 12},
        audio_token_id=SOUND_ID,
    )


def audioflamingo3() -> Any:
    return transformers.AudioFlamingo3ForConditionalGeneration, transformers.AudioFlamingo3Config(
        audio_config={**TOWER, "max_source_positions": 16},
        text_config={**TEXT_SIZES, "model_type": "qwen2"},
        audio_token_id=SOUND_ID,
    )


def glmasr() -> Any:
    return transformers.GlmAsrForConditionalGeneration, transformers.GlmAsrConfig(
        audio_config={**TOWER, "max_position_embeddings": 16},
        text_config={**TEXT_SIZES, "model_type": "llama", "head_dim": 12},
        audio_token_id=SOUND_ID, tie_word_embeddings=False,
    )  # fmt: skip


FAMILIES = {"voxtral": voxtral, "audioflamingo3": audioflamingo3, "glmasr": glmasr}


@functools.cache
def model(family: str) -> nn.Module:
    torch.manual_seed(0)
    kind, config = FAMILIES[family]()
    made = kind._from_config(config, attn_implementation="eager")
    return enliven(made, family).to(torch.float64).eval()


def prompt(family: str, *parts: list[int] | None, seed: int = 0) -> dict[str, Tensor]:
    """A processor's output: text as ids, a window of sound for each None."""
    generator, count = torch.Generator().manual_seed(seed), sum(part is None for part in parts)
    given = {"input_features": torch.randn(count, 8, 32, generator=generator, dtype=torch.float64)}
    if family != "voxtral":  # the last window is not full
        given["input_features_mask"] = torch.ones(count, 32, dtype=torch.long)
        given["input_features_mask"][-1, 20:] = 0
    with torch.no_grad():
        counts = [
            len(model(family).get_audio_features(
                **{name: value[i : i + 1] for name, value in given.items()}, return_dict=True
            ).pooler_output)
            for i in range(count)
        ]  # fmt: skip
    rows, ids = iter(counts), list[int]()
    for part in parts:
        ids += [SOUND_ID] * next(rows) if part is None else part
    return {"input_ids": torch.tensor([ids]), **given}


def own_tokens(family: str, given: Any) -> list[int]:
    given = {"input_ids": torch.tensor([given])} if isinstance(given, list) else given
    ids = given["input_ids"]
    with torch.no_grad():
        out = model(family).generate(
            **given, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
    return out[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize(
    ("family", "spec"),
    [
        ("voxtral", "ngram"),
        pytest.param("audioflamingo3", "none", marks=pytest.mark.slow),
        pytest.param("glmasr", "ngram", marks=pytest.mark.slow),
    ],
)
def test_batches_that_mix_sound_and_text(family, spec):
    """Chunks of 11 cut sounds; a sound of two windows is two in a row."""
    prompts = [
        prompt(family, [5, 6], None, None, [7, 8]),
        TEXT,
        prompt(family, [5] * 8, None, [7, 3], None, seed=3),
    ]
    sizes = {"max_batch_size": 3, "max_seq_len": 64, "max_prefill_tokens": 11}
    with compilespec.compile(model(family), spec, backend="eager", **sizes) as engine:
        spoilt = {**prompts[0], "input_features": prompts[0]["input_features"] * torch.nan}
        refused, *outputs = engine.generate([spoilt, *prompts], PARAMS)
        assert [one.token_ids for one in outputs] == [own_tokens(family, one) for one in prompts]
        assert "input_features holds NaN" in str(refused.error)
        assert engine.plan()["tower"].startswith("eager mode")
        pictures = {"input_ids": [[5]], "pixel_values": torch.zeros(1, 3, 4, 4)}
        fewer = {**prompts[0], "input_ids": torch.tensor([[5, SOUND_ID]])}
        for bad, says in (
            (pictures, "has pixel_values: expected text and sounds alone"),
            ({"prompt": "a", "images": [1]}, "has images: expected text and sounds alone"),
            (fewer, r"2 sounds have \d+ rows and it has 1 placeholders"),
            ({"prompt": "a", "audio": [[0.0]]}, "the engine has no processor"),
        ):
            with pytest.raises((InvalidRequest, NotSupported), match=says) as caught:
                engine.generate(bad)
            assert "\n" not in str(caught.value)


class ToyProcessor:
    """A sound is one window of 4 rows; "*" stands for it."""

    feature_extractor, chat_template = object(), "{{ messages }}"

    def __init__(self) -> None:
        self.tokenizer = byte_level_tokenizer([bytes([byte]) for byte in range(256)], eos="<eos>")

    def __call__(self, text: str, audio: list[Any], return_tensors: str) -> dict[str, Tensor]:
        ids: list[int] = []
        for word in text.split():
            ids += [SOUND_ID] * NUM_ROWS if word == "*" else [len(word)]
        features = torch.stack([torch.as_tensor(one).reshape(8, 32) for one in audio])
        return {"input_ids": torch.tensor([ids]), "input_features": features}

    def apply_chat_template(self, messages: Any, **_: Any) -> dict[str, Tensor]:
        parts = [part for message in messages for part in message["content"]]
        words = " ".join("*" if part["type"] == "audio" else part["text"] for part in parts)
        return self(words, [p["audio"] for p in parts if p["type"] == "audio"], "pt")


def reader() -> ImageReader:
    sizes = geometry(embeds_width=48, vocab_size=97)
    return ImageReader(model("voxtral"), SOUND, ToyProcessor(), sizes)


def test_messages_with_sound():
    samples = numpy.random.default_rng(0).normal(size=256)
    part = {"type": "audio", "audio": samples}
    said = [{"role": "user", "content": [{"type": "text", "text": "hear"}, part]}]
    first = reader().read({"messages": said})
    second = reader().read({"prompt": "hear *", "audio": [torch.tensor(samples)]})
    assert first.ids == second.ids == (4, *[SOUND_ID] * NUM_ROWS)
    assert first.content_ids == second.content_ids
    assert list(first.rows.places) == [1, 2, 3, 4]


@pytest.mark.parametrize("sound", ["a.wav", b"RIFF", None, [[0.0]], [], [numpy.nan]], ids=range(6))
def test_what_is_no_sound_is_refused_in_one_line(sound):
    with pytest.raises(InvalidRequest, match="a sound") as caught:
        reader().read({"prompt": "*", "audio": [sound]})
    assert "\n" not in str(caught.value)


def test_windows_are_encoded_one_at_a_time_where_the_tower_does_not_tell_them_apart(monkeypatch):
    """The first call of several shows it."""
    calls, own = [], model("voxtral").get_audio_features

    def counting(input_features, **options):
        calls.append(len(input_features))
        return own(input_features, **options)

    monkeypatch.setattr(model("voxtral"), "get_audio_features", counting)
    tower = ImageTower(model("voxtral"), SOUND)
    for seed in (1, 2):
        given = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(seed))
        rows = tower.features(split_images({"input_features": given}, SOUND))
        assert [len(one) for one in rows] == [NUM_ROWS, NUM_ROWS]
    assert calls == [2, 1, 1, 1, 1]


def test_what_a_model_takes_is_read_off_it(tmp_path):
    assert medium_of(model("voxtral")) is SOUND
    assert medium_of(tiny_images_target("llava")) is IMAGES
    assert medium_of(nn.Linear(2, 2)) is None
    switches = nn.Module()
    switches.config = types.SimpleNamespace(audio_token_id=3, has_lora_adapter=True)
    switches.get_audio_features = None
    assert medium_of(switches) is None
    for family in FAMILIES:
        model(family).save_pretrained(tmp_path / family)
        loaded = load_target(tmp_path / family)
        assert type(loaded.model) is type(model(family))
        assert loaded.processor is None
    processor = ToyProcessor()
    assert is_processor(processor)
    assert load_target(model("voxtral"), tokenizer=processor).processor is processor
