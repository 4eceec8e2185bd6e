"""The comparison: tokens, partings and margins judged on a real tiny model; the table over it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import compilespec
import compilespec.loading
from compilespec.cli import compare as comparing
from compilespec.cli import main
from compilespec.runtime.engine import Engine
from tests.fake_executor import FakeExecutor, geometry

VOCAB = 259
PROMPTS = [[5, 6, 7], [100, 3], [17] * 9]


@pytest.fixture(scope="module")
def model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCAB,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config).eval()
    model.generation_config.repetition_penalty = 1.7  # settings of a checkpoint must not leak in
    return model


def make_engine(model: Any, *, wrong_from: int = 10**9, **options: Any) -> Engine:
    """An engine whose target is the model, but which errs from a total length on."""

    def next_token(tokens: Sequence[int]) -> int:
        with torch.no_grad():
            logits = model(torch.tensor([list(tokens)])).logits[0, -1]
        return (int(logits.argmax()) + (len(tokens) >= wrong_from)) % VOCAB

    sizes = geometry(num_draft_tokens=2)
    return Engine(FakeExecutor(sizes, next_token=next_token, hit_rate=0.9), **options)


def ways_of(model: Any, engine: Engine, *, eos: tuple[int, ...] = ()) -> list[comparing.Way]:
    count = 12
    return [
        comparing.engine_way("fake", engine, max_new_tokens=count, ignore_eos=not eos),
        comparing.transformers_way(model, max_new_tokens=count, max_seq_len=96, eos_token_ids=eos),
    ]


def test_identical_tokens_and_speeds(model):
    told: list[str] = []
    result = comparing.compare(
        ways_of(model, make_engine(model)),
        PROMPTS,
        margin=lambda prefix: pytest.fail("nothing parts"),
        num_rounds=2,
        progress=told.append,
    )
    fake, reference = result.rows
    assert fake.identical
    assert reference.identical
    assert fake.num_tokens == reference.num_tokens == 36
    assert reference.ratio == 1.0
    assert fake.ratio == pytest.approx(fake.tokens_per_second / reference.tokens_per_second)
    assert 1.0 <= fake.acceptance_length <= 3.0
    assert reference.acceptance_length is None
    assert any("round 2 of 2" in text for text in told)
    assert json.loads(json.dumps(result.as_dict()))["rows"][0]["identical"] is True
    assert model.generation_config.repetition_penalty == 1.7


def test_eos_ends_both(model):
    first = ways_of(model, make_engine(model))[1].decode(PROMPTS[0]).token_ids
    eos = (first[3],)
    for way in ways_of(model, make_engine(model, eos_token_ids=eos), eos=eos):
        assert way.decode(PROMPTS[0]).token_ids == first[: first.index(first[3]) + 1]


def test_maximum_length_holds_for_both(model):
    prompt = list(range(90))
    outcomes = [way.decode(prompt).token_ids for way in ways_of(model, make_engine(model))]
    assert outcomes[0] == outcomes[1]
    assert len(outcomes[0]) == 6


def test_partings_name_token_and_margin(model):
    result = comparing.compare(
        ways_of(model, make_engine(model, wrong_from=10)),
        PROMPTS,
        margin=lambda prefix: comparing.logit_margin(model, prefix),
        num_rounds=1,
    )
    partings = result.rows[0].partings
    assert [(p.prompt, p.token) for p in partings] == [(0, 7), (1, 8), (2, 1)]
    with torch.no_grad():
        expected = ways_of(model, make_engine(model))[1].decode(PROMPTS[0]).token_ids
        logits = model(torch.tensor([[*PROMPTS[0], *expected[:7]]])).logits[0, -1]
    best = logits.topk(2).values
    assert partings[0].margin == pytest.approx(float(best[0] - best[1]))
    assert partings[0].expected == int(logits.argmax())
    assert partings[0].got == (partings[0].expected + 1) % VOCAB


def test_an_output_that_ends_early_parts_where_it_ends():
    got = [comparing.Decoded(token_ids=(1, 2))]
    expected = [comparing.Decoded(token_ids=(1, 2, 3))]
    (parting,) = comparing.find_partings(got, expected, [[9]], margin=lambda prefix: len(prefix))
    assert (parting.token, parting.got, parting.expected, parting.margin) == (2, None, 3, 3)


@pytest.mark.parametrize("as_json", [False, True])
def test_command_prints_the_table(model, monkeypatch, capsys, as_json):
    tokenizer = SimpleNamespace(
        encode=lambda text: [ord(char) for char in text],
        decode=lambda token_ids, **options: "?" * len(token_ids),
    )

    def fake_compile(name: str, spec: str, **options: Any) -> Engine:
        wrong_from = 10**9 if spec == "none" else 5
        plan = {"method": spec, "dtype": "float32"}
        return make_engine(model, wrong_from=wrong_from, tokenizer=tokenizer, plan=plan)

    monkeypatch.setattr(compilespec, "compile", fake_compile, raising=False)
    monkeypatch.setattr(
        compilespec.loading, "load_target", lambda name, dtype: SimpleNamespace(model=model)
    )
    monkeypatch.setenv("COLUMNS", "150")
    flags = ["--json"] if as_json else []
    arguments = ["--prompt", "abc", "--max-new-tokens", "6", "--ignore-eos", "--compare"]
    assert main(["generate", *arguments, *flags]) == 0
    out, _ = capsys.readouterr()
    if as_json:
        rows = json.loads(out)["comparison"]["rows"]
        assert [row["identical"] for row in rows] == [False, True, True]
        assert rows[0]["partings"][0]["token"] == 2
    else:
        assert "prompt 1 parts at token 2 (margin" in out
        assert "compilespec plain" in out
        assert "identical" in out
        assert "1.00x" in out
