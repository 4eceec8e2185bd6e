"""`compilespec why`: its text, its JSON, its picture, and what it reads."""

from __future__ import annotations

import json

import pytest

from compilespec.cli import main
from compilespec.cli.why import draw
from compilespec.runtime.outputs import GenerationOutput
from compilespec.runtime.sampling_params import SamplingParams

DEMO = (
    "why", "demo", "--spec", "eagle3", "--backend", "eager", "--dtype", "float32",
    "--num-draft-tokens", "2", "--max-seq-len", "96", "--max-batch-size", "2",
)  # fmt: skip


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    file = tmp_path_factory.mktemp("why") / "prompts.jsonl"
    texts = ("def add(a, b):\n", "import os\n\n")
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return file


def test_json_and_picture(prompts, tmp_path, capsys):
    picture = tmp_path / "why.svg"
    words = [*DEMO, "--data", str(prompts), "--max-new-tokens", "24", "--plot", str(picture)]
    assert main([*words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["num_texts"] == 2
    assert sum(one["num_lost"] for one in told["causes"]) == told["num_lost"] > 0
    assert {"name", "num_lost", "share", "title", "evidence", "cure"} <= {*told["causes"][0]}
    drawn = picture.read_text()
    assert drawn.startswith("<svg")
    assert all(one["name"] in drawn for one in told["causes"])


def test_faults_have_another_colour():
    one = {"name": "norm", "num_lost": 3, "share": 1.0, "is_fault": True}
    known = {"method": "eagle3", "num_draft_tokens": 3, "num_lost": 3, "acceptance_length": 1.5}
    marked, plain = (
        draw({**known, "causes": [{**one, "is_fault": fault}]}) for fault in (True, False)
    )
    assert "#cf222e" in marked
    assert "#cf222e" not in plain


def test_what_it_cannot_read_is_named(tmp_path, capsys):
    file = tmp_path / "data.jsonl"
    file.write_text('{"question": "why?"}\n')
    assert main([*DEMO, "--data", str(file)]) == 2
    assert "got the keys question" in capsys.readouterr().err
    file.write_text('{"prompt": "a"}\n{"prompt_token_ids": [1], "token_ids": [2], '
                    '"emitted_per_step": [1]}\n')  # fmt: skip
    assert main([*DEMO, "--data", str(file)]) == 2
    assert "expected prompts, or answers" in capsys.readouterr().err


def test_recorded_answers_are_outputs(tmp_path, monkeypatch):
    """Lines as `generate --json` prints them go to the engine as they are."""
    from compilespec.cli import why

    seen = []

    class Engine:
        def __enter__(self):
            return self

        def __exit__(self, *_):
            return None

        def explain(self, asked, params):
            seen.extend([asked, params])
            return "told"

    monkeypatch.setattr(why, "compile_engine", lambda args, spec: Engine())
    file = tmp_path / "data.jsonl"
    line = {"prompt_token_ids": [1, 2], "token_ids": [3, 4], "emitted_per_step": [1], "seed": 5}
    file.write_text(json.dumps(line) + "\n")
    assert main([*DEMO, "--data", str(file), "--temperature", "0.5"]) == 0
    (output,), params = seen
    assert isinstance(output, GenerationOutput)
    assert (output.prompt_token_ids, output.token_ids) == ([1, 2], [3, 4])
    assert params == SamplingParams(max_new_tokens=128, temperature=0.5)
