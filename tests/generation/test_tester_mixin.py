"""The calls of transformers' own generation tests, made with an attached model.

Names are those of its `GenerationTesterMixin` and `GenerationIntegrationTests`.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import compilespec
from compilespec.errors import NotSupported
from tests.support.models import VOCAB, tiny_target

IDS = torch.tensor([[5, 9, 5, 7, 9, 11, 5], [23, 7, 8, 40, 7, 8, 40]])
PROCESSORS: dict[str, Any] = {
    "bad_words_ids": [[1, 0]], "repetition_penalty": 1.2, "remove_invalid_values": True,
}  # fmt: skip
DRAWS: dict[str, Any] = {"do_sample": True, "top_k": 10, "top_p": 0.7, "temperature": 0.7}
RECORDS: dict[str, Any] = {
    "return_dict_in_generate": True, "output_scores": True, "output_logits": True,
    "output_hidden_states": True,
}  # fmt: skip
ATTENTIONS = {**RECORDS, "output_attentions": True}


def near(ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
    """A stopping criterion that a caller wrote."""
    return (ids[:, -1] % 3 == 0) & (ids.shape[1] > 9)


class PlusThree(transformers.LogitsProcessor):
    """Prefers what is three above the last token."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        wanted = (input_ids[:, -1:] + 3) % VOCAB
        return scores.scatter_add(1, wanted, torch.full_like(scores[:, :1], 9.0))


def plain(**call: Any) -> Callable[[Any], Any]:
    """A call of `generate` over the prompts, or over `input_ids=`."""

    def run(model: Any) -> Any:
        given = {"max_new_tokens": 5, "eos_token_id": None, "pad_token_id": 0, **call}
        made = {key: value(model) if callable(value) else value for key, value in given.items()}
        ids = made.pop("input_ids", IDS)
        if ids is not None:
            made["input_ids"] = ids
            made.setdefault("attention_mask", torch.ones_like(ids))
        return model.generate(**made)

    return run


def twice(run: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Seeded draws, which are ours alone: that they are repeated, and their shape."""

    def both(model: Any) -> Any:
        drawn = []
        for _ in range(2):
            torch.manual_seed(0)
            output = run(model)
            drawn.append(output if isinstance(output, Tensor) else output.sequences)
        assert torch.equal(*drawn)
        return list(drawn[0].shape), drawn[0][:, : IDS.shape[1]]

    return both


def embeds(model: Any) -> Tensor:
    return model.get_input_embeddings()(IDS).detach()


def filled(model: Any) -> Any:
    return model(IDS[:, :-1], use_cache=True).past_key_values


def padded(count: int) -> dict[str, Tensor]:
    pads = torch.zeros(len(IDS), count, dtype=torch.long)
    return {
        "input_ids": torch.cat([pads, IDS], 1),
        "attention_mask": torch.cat([pads, torch.ones_like(IDS)], 1),
    }


def transition_scores(model: Any) -> Any:
    output = plain(**RECORDS)(model)
    return model.compute_transition_scores(output.sequences, output.scores, normalize_logits=True)


def criteria(_: Any) -> Any:
    return transformers.StoppingCriteriaList([near])


def processors(_: Any) -> Any:
    return transformers.LogitsProcessorList([PlusThree()])


@dataclass(frozen=True)
class Case:
    run: Callable[[Any], Any]
    refused: str | None = None


BEAMS, ASSISTED, EMBEDS = "beam search", "assisted generation", "inputs_embeds is not read"
CASES: dict[str, Case] = {
    "greedy_generate": Case(plain(**PROCESSORS)),
    "greedy_generate_dict_outputs": Case(
        plain(**PROCESSORS, **ATTENTIONS, use_cache=False), "output_attentions"
    ),
    "greedy_generate_dict_outputs, without attentions": Case(
        plain(**PROCESSORS, **RECORDS, use_cache=False)
    ),
    "greedy_generate_dict_outputs_use_cache": Case(
        plain(**PROCESSORS, **ATTENTIONS, use_cache=True), "output_attentions"
    ),
    "greedy_generate_dict_outputs_use_cache, without attentions": Case(
        plain(**PROCESSORS, **RECORDS, use_cache=True)
    ),
    "sample_generate": Case(twice(plain(**PROCESSORS, **DRAWS))),
    "sample_generate_dict_output": Case(
        twice(plain(**PROCESSORS, **DRAWS, **RECORDS, num_return_sequences=2, use_cache=False))
    ),
    "beam_search_generate": Case(plain(num_beams=2, length_penalty=2.0), BEAMS),
    "beam_search_generate_dict_output": Case(plain(num_beams=2, **RECORDS), BEAMS),
    "beam_search_generate_dict_outputs_use_cache": Case(
        plain(num_beams=2, **RECORDS, use_cache=True), BEAMS
    ),
    "beam_sample_generate": Case(plain(num_beams=2, **DRAWS), BEAMS),
    "beam_sample_generate_dict_output": Case(plain(num_beams=2, **DRAWS, **RECORDS), BEAMS),
    "generate_without_input_ids": Case(
        lambda model: model.generate(do_sample=False, max_new_tokens=5, remove_invalid_values=True)
    ),
    "assisted_decoding_matches_greedy_search_random": Case(
        plain(input_ids=IDS[:1], assistant_model=lambda model: copy.deepcopy(model)), ASSISTED
    ),
    "assisted_decoding_matches_greedy_search_same": Case(
        plain(input_ids=IDS[:1], assistant_model=lambda model: model), ASSISTED
    ),
    "assisted_decoding_sample": Case(
        plain(input_ids=IDS[:1], assistant_model=lambda model: model, do_sample=True), ASSISTED
    ),
    "assisted_decoding_with_logits_to_keep": Case(
        plain(input_ids=IDS[:1], assistant_model=lambda model: model, logits_to_keep=0), ASSISTED
    ),
    "prompt_lookup_decoding_matches_greedy_search": Case(
        plain(input_ids=IDS[:1], prompt_lookup_num_tokens=2), ASSISTED
    ),
    "left_padding_compatibility": Case(plain(**padded(32))),
    "generate_with_and_without_position_ids": Case(
        plain(position_ids=torch.arange(7).expand(2, 7))
    ),
    "generate_from_inputs_embeds_greedy": Case(plain(inputs_embeds=embeds), EMBEDS),
    "generate_from_inputs_embeds_greedy, without ids": Case(
        plain(input_ids=None, inputs_embeds=embeds), EMBEDS
    ),
    "generate_from_inputs_embeds_beam_search": Case(
        plain(inputs_embeds=embeds, num_beams=2), BEAMS
    ),
    "generate_from_inputs_embeds_with_static_cache": Case(
        plain(input_ids=None, inputs_embeds=embeds, cache_implementation="static"), EMBEDS
    ),
    "generate_continue_from_past_key_values": Case(
        plain(past_key_values=filled), "past_key_values holds tokens"
    ),
    "generate_continue_from_inputs_embeds": Case(
        plain(input_ids=None, inputs_embeds=embeds, past_key_values=filled), EMBEDS
    ),
    "generate_with_static_cache": Case(plain(cache_implementation="static", max_new_tokens=20)),
    "generate_methods_with_logits_to_keep": Case(plain(logits_to_keep=0, max_new_tokens=10)),
    "max_new_tokens_decoder_only": Case(plain(max_length=12, max_new_tokens=None)),
    "min_length_if_input_embeds": Case(
        plain(input_ids=None, inputs_embeds=embeds, min_length=9), EMBEDS
    ),
    "eos_token_id_int_and_list": Case(plain(eos_token_id=list(range(0, 90, 4)), max_new_tokens=20)),
    "custom_stopping_criteria": Case(
        plain(stopping_criteria=criteria, eos_token_id=2, max_new_tokens=20)
    ),
    "custom_logits_processor": Case(plain(logits_processor=processors, min_length=10)),
    "logits_processor_not_inplace": Case(plain(**RECORDS, temperature=1.0, suppress_tokens=[3])),
    "return_unprocessed_logit_scores": Case(
        plain(return_dict_in_generate=True, output_logits=True, no_repeat_ngram_size=2)
    ),
    "transition_scores_greedy_search": Case(transition_scores),
    "cfg_mixin": Case(plain(guidance_scale=1.5), "more than a row"),
    "watermark_generation": Case(
        plain(watermarking_config=lambda _: transformers.WatermarkingConfig(bias=2.5))
    ),
    "synthid_text_watermark_generation": Case(
        plain(
            watermarking_config=lambda _: transformers.SynthIDTextWatermarkingConfig(
                keys=[30, 20, 8], ngram_len=3
            )
        ),
        "more than a row",
    ),
    "prefill_chunking": Case(plain(prefill_chunk_size=3)),
}


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Any, Any]]:
    """A model as it is, and one with the same weights and an engine."""
    model: Any = tiny_target(request.param, torch.float32, num_layers=2)
    attached: Any = copy.deepcopy(model)
    compilespec.attach(attached, "ngram", num_draft_tokens=3, backend="eager")
    yield model, attached
    compilespec.detach(attached)


@pytest.mark.parametrize("name", CASES)
def test_a_call_is_as_without_an_engine_or_refused(pair: tuple[Any, Any], name: str) -> None:
    case = CASES[name]
    if case.refused:
        with pytest.raises(NotSupported, match=case.refused):
            case.run(pair[1])
        return
    before = compilespec.engine_of(pair[1]).stats().num_emitted
    expected, got = (case.run(model) for model in pair)
    _check_same(got, expected)
    started = pair[1].__dict__["_compilespec_engines"].started.values()
    assert sum(engine.stats().num_emitted for engine in started) > before


def _check_same(got: Any, expected: Any) -> None:
    if not isinstance(expected, dict):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
        return
    assert type(got) is type(expected)
    assert torch.equal(got["sequences"], expected["sequences"])
    assert got.keys() == expected.keys() - {"past_key_values"}
    for name in got:
        torch.testing.assert_close(got[name], expected[name], rtol=1e-4, atol=1e-4)


def test_sdpa_gives_the_tokens_of_eager_attention() -> None:
    """`eager_matches_sdpa_generate`, for the module's attention and the engine's."""
    model: Any = tiny_target("llama", torch.float32, num_layers=2)
    expected = plain(max_new_tokens=30)(model)
    model.set_attn_implementation("sdpa")
    attached = compilespec.attach(model, "ngram", num_draft_tokens=3, backend="eager")
    assert torch.equal(plain(max_new_tokens=30)(attached), expected)
    compilespec.detach(attached)


def test_the_page_has_the_counts() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "use.md").read_text(encoding="utf-8")
    refused = sum(case.refused is not None for case in CASES.values())
    found = re.search(
        r"(\d+) calls of transformers'\s+own\s+generation\s+tests.*?(\d+)\s+are\s+equal.*?(\d+)",
        page,
        re.S,
    )
    assert found is not None
    assert [int(one) for one in found.groups()] == [
        len(CASES) + 1, len(CASES) + 1 - refused, refused,
    ]  # fmt: skip
