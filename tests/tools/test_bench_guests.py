"""Engines in separate processes, by scripts that stand in for theirs."""

import shutil
import sys
from pathlib import Path

import pytest
from torch import nn

from tools.bench import guests
from tools.bench.guests import GuestWay
from tools.bench.way import Setup, Unavailable

ECHO = """
from pipe import serve

def start(given):
    print("engines print what they like")
    assert given["model"] == "folder" and given["batch"] == 3 and given["num_draft_tokens"] == 4
    return lambda prompts, count: [(ids * count)[-count:] for ids in prompts]

serve(start)
"""
READER = """
from pathlib import Path
from pipe import serve

def start(given):
    assert given["batch"] == 1
    wanted = "('Q8_0', PosixPath('folder/tokenizer.json'))"
    assert Path(given["model"]).read_text() == wanted
    return lambda prompts, count: [[len(ids), given["num_draft_tokens"]] for ids in prompts]

serve(start)
"""
SETUP = Setup(
    model_dir=Path("folder"), model=nn.Module(), max_new_tokens=2, max_batch_size=3,
    num_threads=1, max_seq_len=64,
)  # fmt: skip


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """The scripts' folder; an engine's package may be any module."""
    shutil.copy(guests.HERE / "pipe.py", tmp_path)
    monkeypatch.setattr(guests, "HERE", tmp_path)
    return tmp_path


def test_prompts_go_to_the_engine_and_tokens_come_back(folder):
    (folder / "run_json.py").write_text(ECHO)
    way = GuestWay(SETUP, "echo", "json", sys.executable, num_draft_tokens=4)
    assert way.generate([[1, 2, 3], [4]]) == [[2, 3], [4, 4]]
    assert way.generate([[5, 6]]) == [[5, 6]]
    way.close()


def test_an_engine_that_is_not_there_or_dies_is_said_to(folder):
    with pytest.raises(Unavailable, match="no package no_such_engine; --guest-python"):
        GuestWay(SETUP, "none", "no_such_engine", sys.executable)
    (folder / "run_json.py").write_text("import sys; sys.stdin.readline(); sys.exit(3)")
    with pytest.raises(Unavailable, match="dies ended with status 3"):
        GuestWay(SETUP, "dies", "json", sys.executable)


def test_a_gguf_file_is_written_for_openvino_and_goes_with_it(folder, monkeypatch, tmp_path):
    (tmp_path / "openvino_genai.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(guests, "find_spec", lambda _: True)
    monkeypatch.setattr(guests, "write_gguf", lambda model, path, *what: path.write_text(str(what)))
    (folder / "run_openvino_genai.py").write_text(READER)
    way = guests.OpenVinoWay(SETUP, "OpenVINO", sys.executable, "Q8_0", num_draft_tokens=4)
    assert way.generate([[1, 2, 3]]) == [[3, 4]]
    assert way.max_batch_size == 1
    folder_of_file = Path(way._folder.name)
    assert folder_of_file.exists()
    way.close()
    assert not folder_of_file.exists()
