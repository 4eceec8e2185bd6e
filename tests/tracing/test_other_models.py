"""What is no causal language model of text is refused in one line, by what its graph does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import compilespec
from compilespec import SamplingParams
from compilespec.cli import main
from compilespec.errors import InvalidRequest, UnsupportedModel
from compilespec.tracing.load import load_target
from compilespec.tracing.target import trace_target
from compilespec.tracing.target_info import describe_target
from tests.families import check as families
from tests.support.models import VOCAB, PlainModel, greedy_reference, recomputed

SIZES = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip


def llama_config() -> Any:
    return transformers.LlamaConfig(num_key_value_heads=2, **SIZES)


def llava() -> Any:
    vision = transformers.CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        image_size=30, patch_size=15,
    )  # fmt: skip
    return transformers.LlavaForConditionalGeneration(
        transformers.LlavaConfig(
            vision_config=vision, text_config=llama_config(), image_token_index=96
        )
    )


def qwen2_audio() -> Any:
    audio = transformers.Qwen2AudioEncoderConfig(
        d_model=32, encoder_ffn_dim=64, encoder_layers=1, encoder_attention_heads=4, num_mel_bins=8
    )
    text = transformers.Qwen2Config(num_key_value_heads=2, **SIZES)
    config = transformers.Qwen2AudioConfig(audio_config=audio, text_config=text)
    return transformers.Qwen2AudioForConditionalGeneration(config)


def t5() -> Any:
    config = transformers.T5Config(
        vocab_size=VOCAB, d_model=48, d_kv=12, d_ff=80, num_layers=2, num_heads=4
    )
    return transformers.T5ForConditionalGeneration(config)


def gemma3(**changes: Any) -> Any:
    config = transformers.Gemma3TextConfig(head_dim=16, num_key_value_heads=2, **SIZES, **changes)
    return transformers.Gemma3ForCausalLM(config)


class Mixing(PlainModel):
    """Tokens meet before the attention, in a way of `mix`'s."""

    def __init__(self, mix: Any) -> None:
        super().__init__(num_layers=1)
        self.mix = mix
        self.convolution = nn.Conv1d(48, 48, 2, padding=1)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        hidden = hidden + self.mix(self, hidden)  # where tokens meet
        return self.head(self.norm(self.blocks[0](hidden)))


def causal_convolution(model: Mixing, hidden: Tensor) -> Tensor:
    return model.convolution(hidden.transpose(1, 2)).transpose(1, 2)[:, : hidden.shape[1]]


MIXERS = {
    "causal convolution": causal_convolution,
    "pooling": lambda model, hidden: hidden.mean(1, keepdim=True),
    "shift": lambda model, hidden: hidden.roll(1, 1),
    "sum so far": lambda model, hidden: hidden.cumsum(1),
}

REFUSED = {
    "BERT": (
        lambda: transformers.BertForMaskedLM(transformers.BertConfig(**SIZES)),
        r"BertForMaskedLM: bert.encoder.layer.0.attention.self; modeling_bert.py:\d+.*"
        r"expected a mask that is causal.*; it has another form, and tokens see later ones",
    ),
    "gemma3, bidirectional": (
        lambda: gemma3(use_bidirectional_attention=True),
        "Gemma3ForCausalLM: .*: expected a mask that is causal, .*, and tokens see later ones",
    ),
    "T5": (t5, "T5ForConditionalGeneration is an encoder-decoder; .* AutoModelForCausalLM"),
    "classifier": (
        lambda: transformers.LlamaForSequenceClassification(llama_config()),
        r"expected logits \[B, T, 97\].* got \[B, 2\]; give a model with its language head",
    ),
    "classifier of tokens": (
        lambda: transformers.LlamaForTokenClassification(llama_config()),
        r"expected logits \[B, T, 97\].* got \[B, T, 2\]",
    ),
    "without a head": (
        lambda: transformers.LlamaModel(llama_config()),
        r"LlamaModel: expected logits \[B, T, 97\].* got \[B, T, 48\]",
    ),
    "BLIP": (
        lambda: families.build("blip", auto=families.WITH_IMAGES),
        r"BlipForConditionalGeneration takes pixel_values .* give its language model",
    ),
    "PI0": (
        lambda: families.build("pi0", auto=families.WITH_IMAGES),
        r"PI0ForConditionalGeneration takes state beside token ids, .* give its language model",
    ),
    **{
        name: (lambda mix=mix: Mixing(mix), r"they are mixed in .*test_other_models.py:\d+: ")
        for name, mix in MIXERS.items()
    },
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_models_are_refused_in_one_line(name: str) -> None:
    make, message = REFUSED[name]
    with pytest.raises(UnsupportedModel, match=message) as caught:
        compilespec.compile(make(), backend="eager", max_seq_len=64)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["BERT", "T5", "classifier", "without a head"])
def test_their_directories_too(name: str, tmp_path: Path, capsys: Any) -> None:
    REFUSED[name][0]().save_pretrained(tmp_path)
    options = ["--model", str(tmp_path), "--backend", "eager", "--prompt", "a"]
    assert main(["generate", *options]) == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    assert error.splitlines()[-1].startswith("compilespec: error: ")


def test_text_of_a_model_whose_sound_is_not_served() -> None:
    model = qwen2_audio().double().eval()
    prompt = [5, 6, 7, 8, 9, 10, 11]
    expected = recomputed(model, prompt, 6)
    with compilespec.compile(model, backend="eager", max_seq_len=32) as engine:
        params = SamplingParams(max_new_tokens=6, ignore_eos=True)
        assert engine.generate([prompt], params)[0].token_ids == expected
        with pytest.raises(InvalidRequest, match="images or sound and the model takes none"):
            engine.generate({"prompt": "a", "audio": [[0.0]]})


def load_and_describe(model: Any) -> Any:
    target = load_target(model)
    return describe_target(trace_target(target.model), target)


def test_the_language_model_of_one_with_images_is_taken() -> None:
    """As the message says."""
    torch.manual_seed(0)
    model = llava().double().eval()
    lm = transformers.AutoModelForCausalLM.from_config(model.config.get_text_config())
    lm.model, lm.lm_head = model.get_decoder(), model.get_output_embeddings()
    prompt = [5, 9, 33, 2, 41]
    params = SamplingParams(max_new_tokens=12, ignore_eos=True)
    with compilespec.compile(lm, backend="eager", max_seq_len=64) as engine:
        (output,) = engine.generate(prompt, params)
    assert output.token_ids == greedy_reference(model, prompt, 12)


def test_a_bert_that_decodes_is_taken() -> None:
    torch.manual_seed(0)
    model = transformers.BertLMHeadModel(transformers.BertConfig(is_decoder=True, **SIZES))
    assert load_and_describe(model.eval()).vocab_size == VOCAB


def test_without_values_nothing_is_run() -> None:
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(llama_config())
    assert load_and_describe(model.eval()).vocab_size == VOCAB


def test_nan_of_the_models_own_tells_nothing() -> None:
    model = PlainModel(num_layers=1).eval()
    model.norm.weight.data.fill_(torch.nan)
    assert load_and_describe(model).num_layers == 1
