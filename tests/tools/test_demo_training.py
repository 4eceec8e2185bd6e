"""The demo's training: the tokenizer bitwise, each part at a tiny size."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
import transformers

from compilespec.runtime.outputs import GenerationOutput
from tests.support.training import write_lines
from tools import eval_demo, train_demo
from tools.demo import card, corpus, drafters, target

LOG = json.loads((Path(__file__).parents[1] / "data" / "demo_losses.json").read_text())
SIZES = {**target.SIZES, "num_hidden_layers": 2, "hidden_size": 32, "head_dim": 8,
         "intermediate_size": 48}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer():
    return corpus.train_tokenizer(["def main():\n    return 0\n"] * 3)


@pytest.fixture(scope="module")
def splits():
    rng = torch.Generator().manual_seed(0)
    return {name: torch.randint(2048, (1100,), generator=rng, dtype=torch.int32)
            for name in ("stdlib", "packages", "held_out")}  # fmt: skip


@pytest.fixture
def run(tmp_path):
    return target.Run(
        folder=tmp_path, steps=2, decay_steps=1, learning_rate=3e-3, sizes=SIZES
    )  # fmt: skip


def test_tokenizer_is_reproduced_bitwise():
    texts = corpus.load_corpus(with_packages=False)
    hashes = {k: v for k, v in texts.hashes().items() if k != "packages"}
    if hashes != {k: LOG["hashes"][k] for k in hashes}:
        pytest.skip("another standard library than the one the demo was trained on")
    assert corpus.tokenizer_hash(corpus.train_tokenizer(texts.stdlib)) == LOG["hashes"]["tokenizer"]


def test_target_trains_resumes_and_loads_in_transformers(run, splits, tokenizer, tmp_path):
    target.train_target(dataclasses.replace(run, steps=1), splits, tokenizer)
    model = target.train_target(run, splits, tokenizer)
    log = [json.loads(line) for line in (tmp_path / "target.jsonl").open()]
    assert [record["step"] for record in log] == [0, 1]
    target.export_target(model, tokenizer, tmp_path / "out")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert theirs.dtype == torch.bfloat16
    torch.testing.assert_close(theirs.state_dict(), model.state_dict(), rtol=0, atol=0)
    text = "def main():\n    return 0\n"
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert loaded(text).input_ids == tokenizer.encode(text).ids
    assert loaded.decode(loaded(text).input_ids) == text


def test_a_drafter_is_trained_on_the_corpus_and_on_what_the_target_writes(
    run, splits, tokenizer, tmp_path, monkeypatch
):
    monkeypatch.setattr(drafters, "LENGTH", 40)
    monkeypatch.setattr(drafters, "PROMPT", 24)
    llama = target.make_target(run, tokenizer)
    llama.get_input_embeddings().weight.data.mul_(10)
    target.export_target(llama, tokenizer, tmp_path / "checkpoint")
    text = drafters.write_text(
        tmp_path / "checkpoint", splits, tmp_path / "text", count=6, backend="eager"
    )
    written = [json.loads(line) for line in (text / "generated.jsonl").open()]
    assert len(written) == len((text / "corpus.jsonl").read_text().splitlines()) == 6
    assert {record["temperature"] for record in written} == {0.0, 1.0}
    result = drafters.train_drafter(
        "eagle3", tmp_path / "checkpoint", text, tmp_path / "eagle3", steps=2, compiled=False,
        batch_tokens=512, held_out_one_in=3, eval_prompts=2, eval_new_tokens=4, backend="eager",
    )  # fmt: skip
    assert result.num_steps == 2
    assert result.acceptance >= 1
    train_demo.export(tmp_path, tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out" / "eagle3").iterdir()) == [
        "config.json", "model.safetensors",
    ]  # fmt: skip
    found = eval_demo.evaluate(
        tmp_path / "out", splits, tokenizer, num_prompts=2, num_new=6, methods=[("eagle3", 2)],
        backend="eager",
    )  # fmt: skip
    assert list(found["acceptance_length"]) == ["eagle3, greedy, K=2", "eagle3, temperature 1, K=2"]
    windows = splits["held_out"][: 4 * 256 + 1].unfold(0, 257, 256).long()
    expected = float(target.loss_of(llama.float(), windows))
    assert found["held_out_loss"][256] == pytest.approx(expected, rel=1e-2)
    losses = [{"step": i, "loss": 3.0, "held_out_loss": 3.5, "tokens": 9, "seconds": 60}
              for i in range(3)]  # fmt: skip
    write_lines(tmp_path / "target.jsonl", losses)
    text = card.model_card(found, {"stdlib": "abc"}, tmp_path, "", tmp_path / "out")
    assert "- `eagle3`: 2 steps" in text
    assert "| eagle3 | 0 (greedy) | 2 |" in text


def test_every_released_drafter_has_options():
    for part in drafters.OPTIONS:
        assert drafters.options_of(part).max_length == drafters.LENGTH


def test_accepted_by_position_counts_steps():
    output = GenerationOutput(
        prompt_token_ids=[1], token_ids=[2] * 7, text=None, seed=None, finish_reason="length",
        emitted_per_step=[3, 1, 2],
    )  # fmt: skip
    assert eval_demo.accepted_by_position([output], 3) == [0.667, 0.333, 0.0]
