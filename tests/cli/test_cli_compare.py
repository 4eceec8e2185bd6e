"""The comparison: tokens, partings and margins judged on a real tiny model; the table over it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import compilespec
import compilespec.tracing.load
from compilespec.cli import compare as comparing
from compilespec.cli import main, report
from compilespec.runtime.engine import Engine
from tests.support.documents import PAGES
from tests.support.fake_executor import FakeExecutor, engine_over, geometry

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
    return engine_over(FakeExecutor(sizes, next_token=next_token, hit_rate=0.9), **options)


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
        compilespec.tracing.load,
        "load_target",
        lambda name, **options: SimpleNamespace(model=model),
    )
    monkeypatch.setenv("COLUMNS", "150")
    flags = ["--json"] if as_json else []
    arguments = ["--prompt", "abc", "--max-new-tokens", "6", "--ignore-eos", "--compare"]
    assert main(["generate", *arguments, *flags]) == 0
    out, _ = capsys.readouterr()
    if as_json:
        rows = json.loads(out)["comparison"]["rows"]
        assert [row["identical"] for row in rows] == [False, True, True]
        assert [row.get("identical_to_plain") for row in rows] == [False, None, None]
        assert rows[0]["partings"][0]["token"] == rows[0]["plain_partings"][0]["token"] == 2
    else:
        words = " ".join(out.split())
        first, second = out.splitlines()[:2]
        assert first.startswith("compilespec eagle3 against compilespec plain: 0 of 1 identical")
        assert second == "compilespec plain against transformers generate: 1 of 1 identical."
        assert "Prompt 1 parts at token 2: compilespec eagle3 wrote '?'" in words
        assert "more than float32 rounding explains (0.0001): one of them is wrong" in words
        assert "A near tie" not in words
        assert "1.00x" in out


def comparison_of(
    as_plain: tuple[comparing.Parting, ...], as_reference: tuple[comparing.Parting, ...]
) -> comparing.Comparison:
    """eagle3, plain and transformers, the first two alike but for `as_plain`."""

    def row(name: str, **partings: Any) -> comparing.SpeedRow:
        return comparing.SpeedRow(
            name=name, num_tokens=24, elapsed_ms=1.0, tokens_per_second=24e3, ratio=1.0,
            acceptance_length=None, **partings,
        )  # fmt: skip

    rows = (
        row("compilespec eagle3", partings=as_reference + as_plain, plain_partings=as_plain),
        row("compilespec plain", partings=as_reference),
        row("transformers generate", partings=()),
    )
    return comparing.Comparison(
        rows=rows,
        reference="transformers generate",
        plain="compilespec plain",
        num_prompts=2,
        num_rounds=3,
    )


def printed(comparison: comparing.Comparison, capsys: Any, **options: Any) -> list[str]:
    report.print_comparison(comparison, {"dtype": "bfloat16"}, **options)
    return capsys.readouterr().out.splitlines()


def test_a_near_tie_is_explained_once_and_speculation_comes_first(capsys):
    tie = comparing.Parting(prompt=1, token=7, got=5, expected=6, margin=0.0041)
    tokenizer = SimpleNamespace(decode=lambda ids: {5: " self", 6: "\n"}[ids[0]])
    first, second, *rest = printed(comparison_of((), (tie,)), capsys, tokenizer=tokenizer)
    assert first == (
        "compilespec eagle3 against compilespec plain: "
        "all 2 prompts identical, 24 tokens compared in this run: "
        "speculation changed no token."
    )
    assert second.startswith(
        "compilespec plain against transformers generate: "
        "1 of 2 prompts identical; the others part at near ties"
    )
    words = " ".join(" ".join(rest).split())
    assert words.count("Prompt 2 parts") == 1
    assert (
        "Prompt 2 parts at token 7: compilespec eagle3 and compilespec plain wrote ' self', "
        "transformers generate wrote '\\n'. "
        "There the model's two best tokens have scores (logits) 0.0041 apart, a near tie" in words
    )
    assert words.count("A near tie is no error") == 1
    assert "identical" in next(line for line in rest if "eagle3" in line)


def test_no_heading_is_cut_on_80_columns(capsys, monkeypatch):
    monkeypatch.setattr("rich.console.Console.is_terminal", property(lambda self: True))
    monkeypatch.setenv("COLUMNS", "80")
    text = re.sub(r"\x1b\[\d*m", "", "\n".join(printed(comparison_of((), ()), capsys)))
    assert "acceptance" in text
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80


def test_nothing_parts_and_nothing_is_explained(capsys):
    words = " ".join(printed(comparison_of((), ()), capsys))
    assert "compilespec plain against transformers generate: all 2 prompts identical." in words
    assert "near tie" not in words


def test_speculation_that_parts_says_so_first(capsys):
    wrong = comparing.Parting(prompt=0, token=1, got=5, expected=None, margin=0.9)
    first, *rest = printed(comparison_of((wrong,), ()), capsys)
    assert "1 of 2 prompts identical" in first
    assert "WRONG TOKENS" in first
    assert "changed no token" not in first
    assert "id 5, compilespec plain wrote nothing more" in " ".join(" ".join(rest).split())
    assert "one of them is wrong" in " ".join(rest)


def test_readme_shows_what_the_comparison_prints(capsys):
    """The transcript of `make demo`, made again from the numbers in it."""
    shown = PAGES["README.md"].partition(", and ends so (")[2].split("```")[1]

    def row(name: str, **partings: Any) -> comparing.SpeedRow:
        line = next(line for line in shown.splitlines() if line.startswith(f"│ {name}"))
        speed, ratio, length = (cell.strip(" x") for cell in line.split("│")[2:5])
        return comparing.SpeedRow(
            name=name, num_tokens=384, elapsed_ms=1.0, tokens_per_second=float(speed),
            ratio=float(ratio), acceptance_length=float(length) if length else None, **partings,
        )  # fmt: skip

    parted = (comparing.Parting(prompt=1, token=5, got=1, expected=2, margin=0.0498),)
    rows = (
        row("compilespec eagle3", partings=parted, plain_partings=()),
        row("compilespec plain", partings=parted),
        row("transformers generate", partings=()),
    )
    comparison = comparing.Comparison(
        rows=rows, reference=rows[2].name, plain=rows[1].name, num_prompts=3, num_rounds=3
    )
    plan = {"dtype": "bfloat16", "device": "cpu", "backend": "inductor"}
    report.print_comparison(comparison, plan)
    out = " ".join(capsys.readouterr().out.split())
    assert out.startswith(" ".join(shown.split()))
