"""The table of published drafters, and that it is asked last."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from compilespec.cli import main
from compilespec.errors import DraftNotFound
from compilespec.methods import find
from compilespec.methods.find import find_draft
from compilespec.methods.published import PUBLISHED, published_draft
from compilespec.methods.registry import get_method
from compilespec.tracing.hub import is_hub_name
from compilespec.tracing.load import Target
from compilespec.tracing.places import ModelPlace
from tools.list_drafters import PAGE, page

EAGLE3 = get_method("eagle3").capabilities
LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
DRAFT = "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"


NOT_BUILT = {"dflash2"}


def test_every_row_can_be_used():
    assert len(PUBLISHED) >= 22
    for row in PUBLISHED:
        assert is_hub_name(row.target)
        assert is_hub_name(row.draft)
        assert row.layout
        assert row.source.startswith("https://")
        if row.method not in NOT_BUILT:
            assert get_method(row.method).capabilities.needs_draft_weights
    assert len({(row.target, row.draft) for row in PUBLISHED}) == len(PUBLISHED)


@pytest.mark.parametrize(
    "name", [LLAMA, f"{LLAMA}@main", "Llama-3.1-8B-Instruct", "llama-3.1-8b-instruct"]
)
def test_a_target_is_known_by_its_name(name):
    assert published_draft(name, "eagle3") == DRAFT


@pytest.mark.parametrize("name", [None, "", "demo", "other/Llama-3.1-8B-Instruct", "Llama-3.1-8B"])
def test_other_names_are_not_guessed(name):
    assert published_draft(name, "eagle3") is None


def test_a_method_without_one_has_none():
    assert published_draft(LLAMA, "mtp") is None


def target(directory: Path, name: str) -> Target:
    import torch

    return Target(
        model=torch.nn.Linear(1, 1), directory=directory, tokenizer=None, eos_token_ids=(),
        max_seq_len=None, given_name=name,
    )  # fmt: skip


def test_the_table_is_asked_after_the_targets_folder(tmp_path, monkeypatch):
    asked = []

    def find_model(name: str) -> ModelPlace:
        asked.append(name)
        return ModelPlace(name=name, directory=tmp_path / "cache")

    monkeypatch.setattr(find, "find_model", find_model)
    llama = target(tmp_path, LLAMA)
    assert find_draft(None, llama, EAGLE3) == tmp_path / "cache"
    assert asked == [DRAFT]
    (tmp_path / "eagle3").mkdir()
    (tmp_path / "eagle3" / "config.json").write_text("{}")
    assert find_draft(None, llama, EAGLE3) == tmp_path / "eagle3"
    assert asked == [DRAFT]


def test_what_is_nowhere_names_what_was_searched(tmp_path):
    with pytest.raises(DraftNotFound, match=r"searched .*eagle3 and the published drafters"):
        find_draft(None, target(tmp_path, "tiny"), EAGLE3)
    with pytest.raises(DraftNotFound, match=f"hf download {DRAFT}; a checkpoint of method"):
        find_draft(None, target(tmp_path, LLAMA), EAGLE3)


def test_the_command_prints_it(capsys):
    assert main(["methods", "--drafts", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert rows == [dataclasses.asdict(row) for row in PUBLISHED]
    assert main(["methods", "--drafts"]) == 0
    out = capsys.readouterr().out
    assert out.split()[:4] == ["target", "draft", "method", "layout"]
    assert len(out.splitlines()) == 1 + len(PUBLISHED)
    assert main(["methods", "--drafts", "--modes"]) == 2


def test_the_page_is_written_from_the_table():
    """`python -m tools.list_drafters` writes it."""
    assert PAGE.read_text(encoding="utf-8") == page()


def test_the_drafters_of_a_model(capsys):
    assert main(["drafters", "Qwen/Qwen3-8B", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["draft"] for row in rows[:2]] == [
        "AngelSlim/Qwen3-8B_eagle3", "RedHatAI/Qwen3-8B-speculator.eagle3",
    ]  # fmt: skip
    by_draft = {row["draft"]: row for row in rows}
    assert by_draft["amd/PARD-Qwen3-0.6B"]["layout"] == "PARD"
    assert "built yet" in by_draft["RedHatAI/Qwen3-8B-speculator.dflash2"]["note"]
    assert rows[-1]["draft"] == "(none needed)"


def test_the_drafters_beside_a_model(capsys):
    assert main(["drafters", "demo"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["method", "draft", "layout", "license", "acceptance", "note"]
    found = {line.split()[0] for line in lines if "beside the model" in line}
    assert found == {"eagle3", "mtp", "mtp_eagle", "mtp_multi", "draft_model"}
    assert any(line.startswith("suffix ") and "(none needed)" in line for line in lines)
    assert main(["drafters"]) == 2
