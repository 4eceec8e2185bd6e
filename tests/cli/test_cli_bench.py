"""`compilespec bench`: a table of methods, after their tokens were checked."""

from __future__ import annotations

import json
import types

import pytest

import compilespec
from compilespec.cli import bench, main
from tests.support.models import tiny_target

PROMPT = ["--prompt", "x", "--max-new-tokens", "9", "--rounds", "1", "--dtype", "float64"]


class Letters:
    """A tokenizer of one id a letter."""

    def encode(self, text, add_special_tokens=True):
        return [3 + ord(letter) % 90 for letter in text]

    def decode(self, ids, **_):
        return "".join(chr(33 + i % 90) for i in ids)


@pytest.fixture
def model_dir(tmp_path, monkeypatch):
    tiny_target("llama", num_layers=2).save_pretrained(tmp_path)
    encode = Letters().encode
    monkeypatch.setattr(
        compilespec.runtime.engine.Engine, "encode", lambda self, text: encode(text)
    )
    return str(tmp_path)


def test_methods_and_k_are_compared_with_plain_decoding(model_dir, capsys):
    """Greedily, and at temperature 1: coupled with the same seed, rejection by speed alone."""
    methods = ["--methods", "ngram", "--num-draft-tokens", "1", "2", "--backend", "eager"]
    rules = ["--sampled", "coupled,rejection", "--json"]
    assert main(["bench", "--model", model_dir, *methods, *rules, *PROMPT]) == 0
    result = json.loads(capsys.readouterr().out)
    rows = {row["name"]: row for row in result["comparison"]["rows"]}
    assert list(rows) == ["ngram K=1", "ngram K=2", "plain"]
    assert all(row["identical"] for row in rows.values())
    assert rows["plain"]["ratio"] == 1
    assert rows["plain"]["acceptance_length"] == 1
    assert result["wrong"] == []
    for sampled in result["sampled"].values():
        assert [row["name"] for row in sampled["rows"]] == list(rows)
        assert all(row["identical"] for row in sampled["rows"])
    assert list(result["sampled"]) == ["coupled", "rejection"]


def test_all_skips_what_has_no_drafter(model_dir, capsys):
    run = ["bench", "--model", model_dir, "--num-draft-tokens", "1", "--backend", "eager"]
    assert main([*run, *PROMPT]) == 0
    printed = capsys.readouterr()
    assert "ngram K=1" in printed.out
    assert "T=1" in printed.out
    assert "not run: eagle3 K=1: no drafter beside the target" in printed.err


def test_wrong_tokens_are_told_and_no_speed_is(capsys):
    row = types.SimpleNamespace(
        name="ngram K=1", identical=False,
        partings=[types.SimpleNamespace(prompt=0, token=3, margin=0.9)],
    )  # fmt: skip
    table = types.SimpleNamespace(rows=[row])
    status = bench._report(types.SimpleNamespace(json=False), table, {"dtype": "bfloat16"}, {}, {})
    printed = capsys.readouterr()
    assert status == 1
    assert printed.out == ""
    assert "prompt 1 parts at token 3" in printed.err


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--num-draft-tokens", "0"], "expected at least 1"),
        (["--sampled", "coupled,magic"], "rules among coupled, rejection, block; got 'magic'"),
        (["--methods", "eagle3,ngram", "--draft", "d"], "one method"),
        (["--methods", "ngram,magic"], "unknown method 'magic'"),
    ],
)
def test_bad_options_are_one_line_and_2(options, named, capsys):
    assert main(["bench", *options, *PROMPT]) == 2
    assert named in capsys.readouterr().err
