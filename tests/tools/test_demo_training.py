"""The demo's training is what its log says: tokenizer bitwise, first losses within 2%."""

import copy
import json
from pathlib import Path

import pytest
import torch

from tools.demo import corpus, eagle, export, model, target
from tools.demo.acceptance import Scores, acceptance_length, ngram_scores
from tools.eval_demo import literal_step, load_eagle3, load_llama

LOG = json.loads((Path(__file__).parents[1] / "data" / "demo_losses.json").read_text())
TINY = model.Shape(num_hidden_layers=6, hidden_size=32, head_dim=8, intermediate_size=48)


@pytest.fixture(scope="module")
def tiny():
    torch.manual_seed(0)
    llama = model.LeanLlama(TINY).requires_grad_(False)
    llama.embed.mul_(10)
    shape = model.Shape(num_hidden_layers=1, hidden_size=32, head_dim=8, intermediate_size=48)
    head = eagle.Eagle3Head(shape, torch.arange(7, 2000, 3)).requires_grad_(False)
    for weight in head.layer.parameters():
        weight.add_(0.2 * torch.randn_like(weight))
    return llama, head


@pytest.mark.slow
def test_tokenizer_is_reproduced_bitwise():
    texts = corpus.load_corpus(with_packages=False)
    hashes = {k: v for k, v in texts.hashes().items() if k != "packages"}
    if hashes != {k: LOG["hashes"][k] for k in hashes}:
        pytest.skip("another standard library than the one the demo was trained on")
    assert corpus.tokenizer_hash(corpus.train_tokenizer(texts.stdlib)) == LOG["hashes"]["tokenizer"]


@pytest.mark.slow
def test_first_losses_are_reproduced(tmp_path):
    _, splits, hashes = corpus.encoded_splits(tmp_path)
    if hashes != LOG["hashes"]:
        pytest.skip("another standard library or other packages than the demo was trained on")
    records = target.train_target(
        splits, folder=tmp_path, steps=LOG["steps"], decay_steps=LOG["decay_steps"],
        lr=LOG["lr"], seed=LOG["seed"], stop_at=len(LOG["losses"]),
    )  # fmt: skip
    losses = [record["loss"] for record in records]
    assert tens(losses) == pytest.approx(tens(LOG["losses"]), rel=0.02)


def tens(losses):
    """Means of ten steps: on another kind of CPU a single step in 200 was 2.5% off."""
    assert len(losses) % 10 == 0
    return [sum(losses[i : i + 10]) / 10 for i in range(0, len(losses), 10)]


def test_cached_generation_is_the_argmax_of_the_whole_forward(tiny):
    llama, _ = tiny
    ids = model.generate(llama, torch.randint(2048, (3, 9)), 12, temperature=0.0, seed=0)
    whole = llama.logits(llama.hidden_states(ids)[-1]).argmax(-1)
    assert torch.equal(whole[:, 8:-1], ids[:, 9:])


def test_unrolled_steps_equal_a_growing_cache(tiny):
    llama, head = tiny
    ids = torch.randint(2048, (2, 24))
    aux, _ = eagle.features(llama, ids)
    unrolled = head.unroll(aux[:, :20], llama.embed, ids, 3)
    for origin in (0, 1, 19):
        hidden = torch.nn.functional.linear(aux[:, : origin + 1], head.fc)
        for depth in range(3):
            rows = hidden.shape[1]
            cos, sin = model.rope_table(head.shape, torch.arange(rows))
            e = torch.nn.functional.embedding(ids[:, 1 : 1 + rows], llama.embed)
            new, _, _ = eagle.draft_step(
                head.shape, hidden, e, cos, sin, [], [], head.hidden_norm, *head.layer.tensors()
            )
            torch.testing.assert_close(new[:, -1], unrolled[depth][:, origin])
            hidden = torch.cat([hidden, new[:, -1:]], 1)


def test_target_loads_in_transformers_and_here(tiny, tmp_path):
    transformers = pytest.importorskip("transformers")
    llama, head = tiny
    tokenizer = corpus.train_tokenizer(["def main():\n    return 0\n"] * 3)
    export.export_llama(llama, tokenizer, tmp_path)
    export.export_eagle3(head, TINY.vocab_size, tmp_path / "eagle3")
    rounded = copy.deepcopy(llama)
    for weight in rounded.parameters():
        weight.copy_(weight.bfloat16().float())
    ids = torch.randint(2048, (2, 15))
    expected = rounded.logits(rounded.hidden_states(ids)[-1])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    torch.testing.assert_close(theirs(ids).logits, expected, rtol=1e-4, atol=1e-4)
    ours = load_llama(tmp_path)
    torch.testing.assert_close(ours.logits(ours.hidden_states(ids)[-1]), expected)
    assert torch.equal(load_eagle3(tmp_path / "eagle3").draft_ids, head.draft_ids)
    text = "def main():\n    return 0\n"
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert loaded(text).input_ids == tokenizer.encode(text).ids
    assert loaded.decode(loaded(text).input_ids) == text


def test_literal_greedy_step_emits_the_greedy_text(tiny):
    llama, head = tiny
    prompt = torch.randint(2048, (1, 6))
    text = model.generate(llama, prompt, 20, temperature=0.0, seed=0)[0].tolist()
    ids = text[:7]
    while len(ids) < 20:
        ids += literal_step(llama, head, ids, 3, 0.0, torch.Generator())
    assert ids == text[: len(ids)]


def test_acceptance_length_walks_over_accepted_drafts():
    top = torch.tensor([[[1, 1, 0], [1, 1, 1], [0, 1, 1], [1, 0, 1], [1, 1, 1]]]).bool()
    scores = Scores(top=top, ratio=top.float())
    # Origins 0 (two drafts and the bonus) and 3 (one and the correction).
    assert acceptance_length(scores, 1, 3, greedy=True) == (3 + 2) / 2
    assert acceptance_length(scores, 1, 1, greedy=True) == (2 + 1 + 2) / 3
    assert acceptance_length(scores, 1, 3, greedy=False) == (3 + 2) / 2


def test_ngram_drafts_follow_the_most_recent_match():
    ids = torch.tensor([[5, 6, 7, 5, 6, 8, 5, 6, 8, 5, 6, 9]])
    top = ngram_scores(ids, 2).top[0].tolist()
    # Row t knows x[0..t+1].  After 5 6 7 5 6 comes 8, not 7; after 5 6 8 5 6 comes 8 5.
    assert top[3] == [False, True]
    assert top[6] == [True, True]
    assert top[0] == [False, False]
