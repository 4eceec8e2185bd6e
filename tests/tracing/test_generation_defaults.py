"""generation_config.json: EOS lists are honoured, sampling where it is asked for."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import transformers

import compilespec
from compilespec import SamplingParams
from compilespec.errors import InvalidRequest
from compilespec.tracing.generation_defaults import read_generation_defaults
from compilespec.tracing.load import load_target
from tests.support.models import greedy_reference, tiny_target


class Holder:
    def __init__(self, **settings: Any) -> None:
        self.generation_config = transformers.GenerationConfig(**settings)
        self.generation_defaults = read_generation_defaults(self).params


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {}),
        ({"temperature": 0.6, "top_p": 0.9}, {}),  # do_sample is not set: greedy
        ({"do_sample": True}, {"temperature": 1.0, "top_k": 50}),
        (
            {"do_sample": True, "temperature": 0.6, "top_k": 1, "top_p": 0.95, "min_p": 0.1},
            {"temperature": 0.6, "top_k": 1, "top_p": 0.95, "min_p": 0.1},
        ),
        ({"do_sample": True, "top_k": 0}, {"temperature": 1.0}),
        (
            {"repetition_penalty": 1.1, "max_new_tokens": 1, "min_new_tokens": 1},
            {"repetition_penalty": 1.1, "max_new_tokens": 1, "min_new_tokens": 1},
        ),
        (
            {"stop_strings": ["a", "b"], "suppress_tokens": [3, 4]},
            {"stop": ("a", "b"), "bad_token_ids": (3, 4)},
        ),
    ],
)
def test_defaults_are_those_of_transformers(
    settings: dict[str, Any], expected: dict[str, Any]
) -> None:
    holder: Any = Holder(**settings)
    assert holder.generation_defaults == expected
    assert SamplingParams.of(holder) == SamplingParams(**expected)


def test_changes_win_and_are_checked() -> None:
    holder: Any = Holder(do_sample=True, temperature=0.6, top_p=0.9, top_k=0)
    params = SamplingParams.of(holder, temperature=0.0, seed=3)
    assert params == SamplingParams(temperature=0.0, top_p=0.9, seed=3)
    with pytest.raises(InvalidRequest, match="did you mean temperature"):
        SamplingParams.of(holder, temprature=1.0)


def test_what_has_no_counterpart_is_named() -> None:
    defaults = read_generation_defaults(Holder(num_beams=4, repetition_penalty=1.2))
    assert defaults.describe() == (
        "generation_config.json asks for repetition_penalty=1.2; only SamplingParams.of(engine) "
        "applies that; and for num_beams=4, which is ignored"
    )
    assert read_generation_defaults(Holder()).describe() is None


@pytest.mark.parametrize(
    ("generation", "config", "tokenizer", "expected"),
    [
        ([5, 6], 7, 8, (5, 6)),
        (9, 7, 8, (9,)),
        (None, [7, 3], 8, (7, 3)),
        ([], 7, 8, (7,)),
        (None, None, 8, (8,)),
        (None, None, None, ()),
    ],
)
def test_eos_is_that_of_the_first_file_that_names_any(
    generation: Any, config: Any, tokenizer: Any, expected: tuple[int, ...]
) -> None:
    model: Any = tiny_target("llama", num_layers=1)
    model.generation_config.eos_token_id, model.config.eos_token_id = generation, config

    class Tokens:
        eos_token_id = tokenizer
        encode = decode = None

    assert load_target(model, tokenizer=Tokens()).eos_token_ids == expected


def test_an_engine_ends_at_any_eos_and_says_what_it_leaves(caplog: Any) -> None:
    model: Any = tiny_target("llama", num_layers=1)
    prompt = [5, 9, 33]
    tokens = greedy_reference(model, prompt, 8)
    model.generation_config = transformers.GenerationConfig(
        eos_token_id=[0, tokens[5]], do_sample=True, temperature=0.6, top_k=0
    )
    with caplog.at_level(logging.INFO, "compilespec"):
        engine = compilespec.compile(model, backend="eager", max_seq_len=32)
    asked = "generation_config.json asks for temperature=0.6"
    said = [r.message for r in caplog.records if r.name == "compilespec"]
    assert sum(text.startswith(asked) for text in said) == 1
    with engine:
        assert any(line.startswith(asked) for line in engine.plan()["why"])
        (output,) = engine.generate(prompt)
        assert output.token_ids == tokens[: tokens.index(tokens[5]) + 1]
        assert output.finish_reason == "stop"
        (drawn,) = engine.generate(prompt, SamplingParams.of(engine, seed=1))
        (same,) = engine.generate(prompt, SamplingParams(temperature=0.6, seed=1))
        assert drawn.token_ids == same.token_ids
