"""`compilespec generate` and `methods` over a fake engine: output, exit codes, prompts."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import pytest

import compilespec
from compilespec import SamplingParams
from compilespec.cli import generate as generate_command
from compilespec.cli import main
from compilespec.errors import DraftNotFound
from compilespec.runtime.engine import Engine
from tests.support.fake_executor import FakeExecutor, engine_over, geometry


class AsciiTokenizer:
    """One token per character."""

    def encode(self, text: str) -> list[int]:
        return [ord(char) for char in text]

    def decode(self, token_ids: Sequence[int], **options: Any) -> str:
        return "".join(chr(token) for token in token_ids)


def next_letter(tokens: Sequence[int]) -> int:
    """A target that says the alphabet."""
    return tokens[-1] + 1 if tokens[-1] < ord("z") else ord("a")


class FakeCompile:
    """Stands in for `compilespec.compile`; keeps what it was called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.fail: Callable[[str], None] = lambda phase: None
        self.checkpoint: dict[str, Any] = {}  # what it says of EOS and generation

    def __call__(self, model: str, spec: str, **options: Any) -> Engine:
        self.calls.append((model, spec, options))
        if model == "no-draft":
            raise DraftNotFound("no drafter:\nsearched here")
        sizes = geometry(num_draft_tokens=0 if spec == "none" else 3)
        executor = FakeExecutor(sizes, next_token=next_letter, fail=self.fail)
        return engine_over(
            executor, tokenizer=AsciiTokenizer(), plan={"method": spec}, **self.checkpoint
        )


@pytest.fixture
def fake_compile(monkeypatch) -> FakeCompile:
    fake = FakeCompile()
    monkeypatch.setattr(compilespec, "compile", fake, raising=False)
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    return fake


def generate(*arguments: str) -> int:
    return main(["generate", "--max-new-tokens", "5", *arguments])


def test_one_prompt_prints_its_text(fake_compile, capsys):
    assert generate("--prompt", "xa") == 0
    out, err = capsys.readouterr()
    assert out == "bcdef\n"
    assert "5 tokens in" in err
    assert "acceptance length" in err
    assert fake_compile.calls == [("demo", "eagle3", {})]


def test_several_prompts_are_printed_in_order(fake_compile, capsys):
    assert generate("--prompt", "a", "--prompt", "k", "--prompt", "p") == 0
    out, _ = capsys.readouterr()
    texts = ((1, "bcdef"), (2, "lmnop"), (3, "qrstu"))
    assert out == "".join(f"--- prompt {i} of 3\n{text}\n" for i, text in texts)


def test_options_reach_compile(fake_compile):
    options = "--model dir --spec eagle3 --draft head --num-draft-tokens 2 --backend eager"
    more = "--dtype float32 --max-seq-len 64 --prompt a"
    assert generate(*options.split(), *more.split()) == 0
    ((model, spec, given),) = fake_compile.calls
    assert (model, spec) == ("dir", "eagle3")
    assert given == {
        "draft": "head",
        "num_draft_tokens": 2,
        "backend": "eager",
        "dtype": "float32",
        "max_seq_len": 64,
    }


@pytest.mark.parametrize(
    "words",
    ["dir --spec ngram", "--spec ngram dir", "--spec ngram --model dir", "-p k dir --spec ngram"],
)
def test_the_model_may_be_a_word_in_any_place(words, fake_compile):
    assert generate("-p", "a", *words.split()) == 0
    ((model, spec, _),) = fake_compile.calls
    assert (model, spec) == ("dir", "ngram")


def test_stop_and_system_reach_the_request(monkeypatch, fake_compile, capsys):
    assert generate("-p", "a", "--stop", "d", "--stop", "z") == 0
    assert capsys.readouterr().out == "bc\n"
    args = types.SimpleNamespace(chat=True, system="Be brief")
    assert generate_command._asked(args, ["hi"]) == [
        {
            "messages": [
                {"role": "system", "content": "Be brief"}, {"role": "user", "content": "hi"},
            ]
        }
    ]  # fmt: skip


def test_sampling_options(fake_compile, capsys):
    """They reach the request, whose seed comes back; samples are numbered."""
    sampling = "--top-k 5 --top-p 0.9 --min-p 0.1 --seed 12 --n 2"  # the fake target is greedy
    assert generate(*sampling.split(), "--acceptance", "rejection", "--prompt", "a", "--json") == 0
    outputs = json.loads(capsys.readouterr().out)["outputs"]
    assert [output["seed"] for output in outputs] == [12, 12]
    assert fake_compile.calls[-1][2] == {"acceptance": "rejection", "progress": False}
    assert generate(*sampling.split(), "--prompt", "a", "--prompt", "k") == 0
    printed = capsys.readouterr().out
    assert "--- prompt 2 of 2, sample 1 of 2\nlmnop\n" in printed
    assert printed.count("bcdef") == 2


def test_options_are_the_parameters_of_a_request(monkeypatch):
    seen = []
    monkeypatch.setattr(
        generate_command, "_generate",
        lambda args, prompts: seen.append(generate_command.sampling_params(args)) or 0,
    )  # fmt: skip
    options = "--temperature 0.7 --top-k 5 --top-p 0.9 --min-p 0.1 --seed 12 --n 2 --ignore-eos"
    assert generate(*options.split(), "--prompt", "a") == 0
    assert seen == [
        SamplingParams(max_new_tokens=5, temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, seed=12,
                       n=2, ignore_eos=True)
    ]  # fmt: skip


def test_sampling_that_the_checkpoint_asks_for_is_said_not_to_be_done(fake_compile, capsys):
    fake_compile.checkpoint = {"generation_defaults": {"temperature": 0.6, "top_k": 20}}
    assert generate("--prompt", "a") == 0
    asks = "decoding greedily; generation_config.json asks for sampling: --temperature 0.6 --top-k"
    assert asks in capsys.readouterr().err
    assert generate("--prompt", "a", "--temperature", "0") == 0
    assert "greedily" not in capsys.readouterr().err


def test_an_output_of_eos_alone_is_explained(fake_compile, capsys):
    fake_compile.checkpoint = {"eos_token_ids": (ord("b"), ord("m"))}
    assert generate("--prompt", "a", "--prompt", "k") == 0
    err = capsys.readouterr().err
    assert f"prompt 1: the model ended at once: its first token was EOS (b {ord('b')})" in err
    assert "prompt 2:" not in err
    assert generate("--prompt", "a", "--ignore-eos") == 0
    assert "ended at once" not in capsys.readouterr().err


def test_a_directory_defaults_to_plain_decoding(fake_compile):
    assert generate("--model", "dir", "--prompt", "a") == 0
    assert fake_compile.calls == [("dir", "none", {})]


def test_prompt_file_and_stdin(fake_compile, capsys, tmp_path, monkeypatch):
    file = tmp_path / "prompt.txt"
    file.write_text("ab\n")
    assert generate("--prompt-file", str(file)) == 0
    assert capsys.readouterr().out == "cdefg\n"
    for arguments in (("--prompt-file", "-"), ("--model", "org/dir")):
        monkeypatch.setattr(sys, "stdin", io.StringIO("c\n"))
        assert generate(*arguments) == 0
        assert capsys.readouterr().out == "defgh\n"


def test_demo_has_prompts_of_its_own(fake_compile, capsys):
    assert generate() == 0
    out, _ = capsys.readouterr()
    assert out.count("--- prompt") == 3


def test_no_prompt_is_an_error(fake_compile, capsys):
    assert generate("--model", "org/dir") == 2
    assert "no prompt" in capsys.readouterr().err
    assert not fake_compile.calls


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "no-draft", "--prompt", "a"], "no drafter: searched here"),
        (["--prompt-file", "/nowhere/at/all"], "No such file"),
        (["--prompt", "a", "--threads", "0"], "--threads"),
        (["--prompt", "a", "--top-p", "0"], "--top-p: expected"),
        (["--prompt", "a", "--compare", "--temperature", "1"], "--compare decodes greedily"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(fake_compile, capsys, arguments, message):
    assert generate(*arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    lines = [line for line in err.splitlines() if "error" in line]
    assert len(lines) == 1
    assert lines[0].startswith("compilespec: error: ")
    assert message in lines[0]


def test_a_bad_prompt_spares_the_others(fake_compile, capsys):
    assert generate("--prompt", "a" * 200, "--prompt", "a") == 2
    out, err = capsys.readouterr()
    assert "bcdef" in out
    assert "error: prompt 1: the prompt has 200 tokens" in err


def test_json_is_one_object(fake_compile, capsys):
    assert generate("--json", "--prompt", "a", "--prompt", "\u1234") == 2
    out, err = capsys.readouterr()
    data = json.loads(out)
    good, bad = data["outputs"]
    assert good["text"] == "bcdef"
    assert good["token_ids"] == [ord(char) for char in "bcdef"]
    assert good["finish_reason"] == "length"
    assert sum(good["emitted_per_step"]) == 4
    assert bad["finish_reason"] == "error"
    assert "vocabulary" in bad["error"]
    assert data["stats"]["num_emitted"] == 4
    assert data["plan"]["method"] == "eagle3"
    assert "prompt 2" in err


@pytest.mark.parametrize("as_json", [False, True])
def test_interrupt_keeps_what_there_is(fake_compile, capsys, as_json):
    calls = iter(range(100))

    def fail(phase: str) -> None:
        if phase == "decode" and next(calls) == 2:
            raise KeyboardInterrupt

    fake_compile.fail = fail
    flags = ["--json"] if as_json else []
    assert generate("--max-new-tokens", "60", "--prompt", "a", *flags) == 130
    out, err = capsys.readouterr()
    if as_json:
        (output,) = json.loads(out)["outputs"]
        assert output["finish_reason"] == "aborted"
        text = output["text"]
    else:
        text = out.strip()
        assert "interrupted" in err
    assert text
    assert "bcdefghijklmnopqrstuvwxyz".startswith(text)


def test_interrupt_while_compiling(monkeypatch, capsys):
    def interrupted(*args: Any, **options: Any) -> Engine:
        raise KeyboardInterrupt

    monkeypatch.setattr(compilespec, "compile", interrupted, raising=False)
    assert generate("--prompt", "a") == 130
    assert "interrupted" in capsys.readouterr().err


def test_methods_lists_them_all(capsys):
    assert main(["methods"]) == 0
    out, _ = capsys.readouterr()
    assert re.search(r"^eagle3 +a trained drafter ", out, re.MULTILINE)
    assert re.search(r"^ngram +nothing +repeats this text", out, re.MULTILINE)
    assert out.index("\nsuffix ") < out.index("\neagle3 "), "first what needs no training"
    assert main(["methods", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {"none", "eagle3"} <= {row["name"] for row in rows}
    assert all(row["brings"] for row in rows)


def test_help_is_quick_because_torch_is_not_imported():
    code = (
        "import sys; from compilespec.cli import main\n"
        "try: main(['--help'])\n"
        "finally: print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "generate" in done.stdout
    assert done.stdout.strip().endswith("False")


def test_chat_puts_every_prompt_into_the_template(fake_compile, capsys, monkeypatch):
    def apply_chat_template(self, messages: Any, **options: Any) -> list[int]:
        assert options == {"add_generation_prompt": True, "return_dict": False}
        (message,) = messages
        return self.encode(f"{message['role']}:{message['content']}")

    monkeypatch.setattr(AsciiTokenizer, "chat_template", "there is one", raising=False)
    monkeypatch.setattr(AsciiTokenizer, "apply_chat_template", apply_chat_template, raising=False)
    assert generate("--chat", "--prompt", "hi", "--json") == 0
    result = json.loads(capsys.readouterr().out)["outputs"][0]
    assert result["prompt"] == "hi"
    assert result["prompt_token_ids"] == AsciiTokenizer().encode("user:hi")
    assert result["text"] == "jklmn"


def test_chat_without_a_template_is_bad_input(fake_compile, capsys):
    assert generate("--chat", "--prompt", "hi") == 2
    assert "has no chat template" in capsys.readouterr().err
