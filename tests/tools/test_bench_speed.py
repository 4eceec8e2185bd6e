"""The benchmark end to end on a tiny random llama, with a stand-in for compilespec."""

from __future__ import annotations

import json
import sys
import time
import types

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from tools.bench import gates, report
from tools.bench.__main__ import main, parse
from tools.bench.way import Setup
from tools.bench.ways import TransformersWay, build_ways


@pytest.fixture(scope="module")
def tiny_dir(tmp_path_factory):
    torch.manual_seed(0)
    config = LlamaConfig(
        num_hidden_layers=2,
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=61,
        max_position_embeddings=256,
        eos_token_id=7,
    )
    folder = tmp_path_factory.mktemp("tiny")
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def one_thread():
    """Models this small only lose by waiting for a second core."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class StubEngine:
    """Answers as compilespec's engine does, by a plain greedy loop; `wrong` changes one token."""

    def __init__(self, folder, wrong):
        self.model = AutoModelForCausalLM.from_pretrained(folder).eval()
        self.wrong = wrong
        self.num_recompiles = 0

    @torch.no_grad()
    def generate(self, prompts, params):
        outputs = []
        for prompt in prompts:
            ids, cache, fed = list(prompt), None, list(prompt)
            for _ in range(params.max_new_tokens):
                out = self.model(torch.tensor([fed]), past_key_values=cache, use_cache=True)
                cache, fed = out.past_key_values, [int(out.logits[0, -1].argmax())]
                ids += fed
            tokens = ids[len(prompt) :]
            if self.wrong:
                tokens[3] = (tokens[3] + 1) % 61
            outputs.append(types.SimpleNamespace(token_ids=tokens, emitted_per_step=[2, 1]))
        return outputs

    def stats(self):
        return types.SimpleNamespace(num_recompiles=self.num_recompiles)

    def close(self):
        pass


@pytest.fixture
def stub(monkeypatch, tmp_path):
    """A module `compilespec` with what the benchmark calls; results go to tmp_path."""
    module = types.ModuleType("compilespec")
    module.calls = []
    module.wrong = False

    def compile(model, spec, **keywords):
        module.calls.append((spec, keywords))
        return StubEngine(model, module.wrong and spec == "eagle3")

    module.compile = compile
    module.SamplingParams = types.SimpleNamespace
    monkeypatch.setitem(sys.modules, "compilespec", module)
    monkeypatch.setattr(report.write_json, "__defaults__", (tmp_path,))
    return module


def arguments(folder, *more):
    return [
        *("--model", str(folder), "--max-new-tokens", "6", "--num-prompts", "2", "--rounds", "1"),
        *("--threads", "1"),
        *("--batch", "1", "2", "--only", "compilespec", "--name", "test", *more),
    ]


def test_speeds_are_written_with_what_they_need_beside_them(stub, tiny_dir, tmp_path):
    main(arguments(tiny_dir))  # the status depends on speeds, which a stand-in does not have
    result = json.loads((tmp_path / "test.json").read_text())
    assert result["commit"]
    assert result["versions"]["torch"] == torch.__version__
    assert result["num_threads"] == 1
    assert result["outputs"] == []
    drafts = (1, 3, 5)
    ways = [gates.EAGER, gates.PLAIN, *(f"{gates.EAGLE3} K={k}" for k in drafts)]
    for batch in ("1", "2"):
        assert list(result["speeds"][batch]) == ways
        for summary in result["speeds"][batch].values():
            assert set(summary["tokens_per_s"]) == {"p20", "p50", "p80"}
    assert result["speeds"]["1"][f"{gates.EAGLE3} K=3"]["acceptance_length"] == 1.5
    assert [spec for spec, _ in stub.calls] == ["none", "eagle3", "eagle3", "eagle3"]
    assert [k.get("num_draft_tokens") for _, k in stub.calls] == [None, *drafts]
    assert all(k["max_batch_size"] == 2 for _, k in stub.calls)


def test_wrong_tokens_fail_the_run_before_any_speed(stub, tiny_dir, tmp_path, capsys):
    stub.wrong = True
    assert main(arguments(tiny_dir)) == 1
    printed = capsys.readouterr().out
    assert "no speed is printed" in printed
    assert "tokens per second" not in printed
    assert not (tmp_path / "test.json").exists()


def test_a_recompilation_fails_the_run(stub, tiny_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(StubEngine, "stats", lambda self: types.SimpleNamespace(num_recompiles=2))
    assert main(arguments(tiny_dir)) == 1
    assert "recompiled 2 times" in json.loads((tmp_path / "test.json").read_text())["problems"][0]


def test_a_way_that_is_not_installed_is_skipped_with_its_reason(stub, tiny_dir, monkeypatch):
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    monkeypatch.setitem(sys.modules, "gguf", None)
    ways, skipped = build_ways(setup(tiny_dir), (3,), only="llama")
    assert [way.name for way in ways] == [gates.EAGER]
    assert "not installed" in skipped[gates.LLAMA_CPP]


def setup(folder, max_new_tokens=12):
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    return Setup(
        model_dir=folder,
        model=model,
        max_new_tokens=max_new_tokens,
        max_batch_size=2,
        num_threads=2,
    )


PROMPTS = [[5, 6, 7, 8, 9, 5, 6, 7], [3, 1, 4]]


def test_transformers_ways_agree_and_run_past_eos(tiny_dir):
    shared = setup(tiny_dir)
    eager = TransformersWay(shared, gates.EAGER, 2)
    reference = [eager.generate([prompt])[0] for prompt in PROMPTS]
    assert all(len(tokens) == 12 for tokens in reference)
    assert eager.generate(PROMPTS) == reference
    lookup = TransformersWay(shared, gates.LOOKUP, 1, prompt_lookup_num_tokens=3)
    assert [lookup.generate([prompt])[0] for prompt in PROMPTS] == reference


def test_static_cache_really_compiles_decoding(tiny_dir, monkeypatch):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda fn, **keywords: compiled.append(keywords) or fn)
    monkeypatch.setitem(sys.modules, "compilespec", None)
    shared = setup(tiny_dir)
    ways, _ = build_ways(shared, (), only=gates.STATIC)
    eager, static = ways
    assert static.generate(PROMPTS) == eager.generate(PROMPTS)
    assert len(compiled) == 1
    assert compiled[0]["dynamic"] is False


def test_options_name_the_result_after_the_kind():
    assert parse([]).name == "speed"
    assert parse(["--first-token"]).name == "first-token"
    assert parse(["--load", "--name", "quiet"]).name == "quiet"


def test_dtype_of_the_demo_is_not_negotiable(capsys):
    with pytest.raises(SystemExit) as exit_:
        parse(["--dtype", "float32"])
    assert exit_.value.code == 2
    assert "own dtype" in capsys.readouterr().err


def test_a_child_that_fails_is_reported_with_its_last_words(tmp_path):
    from tools.bench.first_token import spawn

    start = time.time()
    with pytest.raises(RuntimeError, match="gave no result"):
        spawn("tools.bench.no_such_module", {}, tmp_path)
    assert time.time() - start < 60


def test_first_tokens_are_told_beside_what_transformers_takes_to_load(monkeypatch):
    from tools.bench import first_token

    seconds = {None: [6.0, 5.0, 7.0], "none": [90.0, 8.0, 7.5, 9.0]}  # by spec, as they come
    written = {}

    def spawn(module, job, cache_dir):
        taken = seconds[job["spec"]].pop(0)
        if job["spec"] is None:
            return {"loaded_s": taken, "peak_mib": 400.0}
        return {"first_token_s": taken, "import_s": 1.0, "compile_s": 2.0, "peak_mib": 800.0}

    monkeypatch.setattr(first_token, "spawn", spawn)
    monkeypatch.setattr(report, "write_json", lambda name, content: written.update(content))
    assert main(["--first-token", "--only", "none"]) == 0
    entry = written["specs"]["none"]
    assert entry["warm_first_token_s"] == 8.0
    assert entry["transformers_loaded_s"] == 6.0
    assert not any(seconds.values())
