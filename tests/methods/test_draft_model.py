"""spec="draft_model": an independent model drafts; tokens, caches, the oracle of transformers."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import compilespec
from compilespec.errors import DraftMismatch, InvalidOption
from compilespec.methods.draft_model import share_tokens
from tests.support.direct_methods import MAX_SEQ_LEN, SIZES, check_traffic
from tests.support.models import VOCAB, Ask, ask_all, greedy_reference, tiny_target
from tests.support.oracles import check_oracle

DATA = Path(__file__).parents[1] / "data" / "draft_model"
OPTIONS = {
    "backend": "eager", "max_batch_size": 5, "max_seq_len": MAX_SEQ_LEN,
    "max_prefill_tokens": 16, "buckets": [1, 2, 5],
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "count"),
    [
        ("llama", 1),
        ("qwen3_moe", 3),
        pytest.param("gemma3", 5, marks=pytest.mark.slow),
        pytest.param("llama", 5, marks=pytest.mark.slow),
    ],
)
def test_a_model_that_drafts_for_itself_is_right_every_time(family, count):
    """Only if each slot of the drafter's cache holds what the target's own would."""
    model = tiny_target(family, num_layers=2)
    asks = ask_all(model, SIZES)
    with compilespec.compile(
        model, spec="draft_model", draft=copy.deepcopy(model), num_draft_tokens=count, **OPTIONS
    ) as engine:
        for request in check_traffic(engine, asks):
            *whole, last = request.emitted_per_step or [1]
            assert whole == [count + 1] * len(whole)
            assert 1 <= last <= count + 1


@pytest.mark.parametrize(
    ("family", "other", "count"),
    [("llama", "gpt2", 3), pytest.param("qwen3_moe", "llama", 5, marks=pytest.mark.slow)],
)
def test_a_model_of_another_family(family, other, count):
    """It often errs: the drafts are those that the drafter itself would continue with."""
    model, drafter = tiny_target(family, num_layers=2), tiny_target(other, seed=1, num_layers=1)
    asks = ask_all(model, SIZES)
    with compilespec.compile(
        model, spec="DRAFT_TARGET", draft=drafter, num_draft_tokens=count, **OPTIONS
    ) as engine:
        check_traffic(engine, asks)


def test_what_does_not_fit_is_refused():
    model = tiny_target("llama", num_layers=2)
    small = tiny_target("llama", num_layers=1)
    small.resize_token_embeddings(90)
    with pytest.raises(DraftMismatch, match="knows 90 ids, the target 97"):
        compilespec.compile(model, spec="draft_model", draft=small, **OPTIONS)
    short = tiny_target("llama", num_layers=1)
    short.config.max_position_embeddings = 40
    with pytest.raises(DraftMismatch, match="max_seq_len=40"):
        compilespec.compile(model, spec="draft_model", draft=short, **OPTIONS)


def test_padding_ids_are_never_proposed():
    model = tiny_target("llama", num_layers=2)
    drafter = copy.deepcopy(model)
    drafter.resize_token_embeddings(128)
    with torch.no_grad():  # the padding would win wherever the sum of the hidden state is positive
        drafter.lm_head.weight[97:] = 10.0
    asks = ask_all(model, SIZES[:4])
    with compilespec.compile(
        model, spec="draft_model", draft=drafter, num_draft_tokens=3, **OPTIONS
    ) as engine:
        for request in check_traffic(engine, asks):
            assert set(request.emitted_per_step[:-1]) <= {4}


def test_same_drafts_as_transformers_assisted_generation():
    """At every length past the prompt; theirs drafts at the prompt's own length, too."""
    meta = json.loads((DATA / "meta.json").read_text())
    io = load_file(DATA / "io.safetensors")
    with compilespec.compile(
        DATA / "target", spec="draft_model", draft=DATA / "draft", num_draft_tokens=meta["K"],
        backend="eager", max_batch_size=2, max_seq_len=64,
    ) as engine:  # fmt: skip
        check_oracle(engine, meta, io)


# --- another vocabulary ---

LINES = (
    "the cat sat on the mat with a hat", "that hat is the hat of the other cat",
    "a merchant met another on the path to the market", "then the rain ran through the thatch",
    "numbers, words and weather: who knows what follows?", "a quick brown fox jumps over lazy dogs",
)  # fmt: skip


def byte_level(vocab_size: int, lines=LINES):
    """A byte-level BPE tokenizer; its alphabet is what the lines hold."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=special, show_progress=False
    )
    tokenizer.train_from_iterator(lines, trainer)
    return wrapped(tokenizer)


def wrapped(tokenizer):
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>"
    )


def reordered(tokenizer, num_extra: int):
    """The same tokens under other ids, spaces signed as SentencePiece does, and others between."""
    tokens = [token.replace("\u0120", "\u2581", 1) for token in tokenizer.get_vocab()]
    tokens += [f"<extra{index}>" for index in range(num_extra)]
    order = torch.randperm(len(tokens), generator=torch.Generator().manual_seed(4)).tolist()
    vocab = {token: index for index, token in zip(order, tokens, strict=True)}
    return wrapped(Tokenizer(models.WordLevel(vocab, unk_token="<extra0>")))


def with_vocabulary(model, vocab_map):
    """A copy of `model` whose ids are the draft's: what nobody shares would always win."""
    model = copy.deepcopy(model)
    known = vocab_map.d2t_abs
    for module in (model.model.embed_tokens, model.lm_head):
        old = module.weight.detach()
        new = 20 * torch.randn(len(known), old.shape[1], dtype=old.dtype)
        new[known >= 0] = old[known[known >= 0]]
        module.weight = torch.nn.Parameter(new)
    model.config.vocab_size = len(known)
    return model


def asks_within(model, num_tokens: int):
    """Requests of prompts below `num_tokens`."""
    asks = []
    for seed, (num_prompt, num_output) in enumerate(SIZES):
        generator = torch.Generator().manual_seed(seed)
        prompt = torch.randint(num_tokens, (num_prompt,), generator=generator).tolist()
        tokens = greedy_reference(model, prompt, num_output)
        asks.append(Ask(prompt=tuple(prompt), tokens=tuple(tokens)))
    return asks


@pytest.mark.parametrize(
    ("family", "count"), [("llama", 3), pytest.param("qwen3_moe", 1, marks=pytest.mark.slow)]
)
def test_the_same_model_under_other_ids_is_right_every_time(family, count):
    """Only if ids are translated wherever they cross: prompts, target tokens, its own, drafts."""
    model = tiny_target(family, num_layers=2)
    tokenizer = byte_level(VOCAB)
    assert len(tokenizer) == VOCAB
    other = reordered(tokenizer, num_extra=21)
    pairs = share_tokens(tokenizer, other, vocab_size=VOCAB, draft_vocab_size=VOCAB + 21)
    drafter = with_vocabulary(model, pairs)
    with compilespec.compile(
        model, spec="draft_model", draft=drafter, num_draft_tokens=count, tokenizer=tokenizer,
        draft_tokenizer=other, **OPTIONS,
    ) as engine:  # fmt: skip
        for request in check_traffic(engine, asks_within(model, VOCAB)):
            assert set(request.emitted_per_step[:-1]) <= {count + 1}
        assert any("97 of its 118 tokens shared" in why for why in engine.plan()["why"])


def test_a_smaller_vocabulary_proposes_shared_tokens_only():
    """Two byte-level BPE tokenizers; most target tokens are unknown to the draft model."""
    model, drafter = tiny_target("llama", num_layers=2), tiny_target("gpt2", seed=1, num_layers=1)
    tokenizer, other = byte_level(80), byte_level(50, ["ZEBRAS ZIP, ZIGZAG", *LINES[1:3]])
    assert (len(tokenizer), len(other)) == (80, 50)
    drafter.resize_token_embeddings(53)  # padded
    asks = asks_within(model, 80)
    with compilespec.compile(
        model, spec="draft_model", draft=drafter, num_draft_tokens=3, tokenizer=tokenizer,
        draft_tokenizer=other, **OPTIONS,
    ) as engine:  # fmt: skip
        check_traffic(engine, asks)
        shared = set(tokenizer.get_vocab()) & set(other.get_vocab())
        assert any(f"{len(shared)} of its 53 tokens" in why for why in engine.plan()["why"])
        allowed = {tokenizer.get_vocab()[token] for token in shared}
        assert len(allowed) < 50
        request = engine.submit(
            list(asks[1].prompt), compilespec.SamplingParams(max_new_tokens=30, ignore_eos=True)
        )
        while engine.has_work:
            engine.step()
            if not request.finished:
                drafts = engine._executor.buffers["tokens_RS"][request.row, 1:]
                assert set(drafts.tolist()) <= allowed


def test_the_pairs_of_two_vocabularies():
    def words(*tokens):
        vocab = {token: index for index, token in enumerate(tokens) if token}
        return wrapped(Tokenizer(models.WordLevel(vocab, unk_token="<unk>")))

    target = words("</s>", "\u0120a", "b", "", "c", "\u0120b", "<s>")
    draft = words("<s>", "x", "\u2581a", "b", "\u0120a", "</s>", "c")
    pairs = share_tokens(target, draft, vocab_size=8, draft_vocab_size=6)
    assert pairs.d2t_abs.tolist() == [6, -1, 1, 2, 1, 0]  # "c" lies past the draft's head
    assert pairs.t2d.tolist() == [5, 2, 3, -1, -1, -1, 0, -1]
    assert pairs.unknown_id == 5  # it has no unknown token: the end of text
    assert (pairs.num_shared, pairs.num_known) == (5, 4)
    with pytest.raises(DraftMismatch, match="share no token"):
        share_tokens(words("p"), words("q"), vocab_size=1, draft_vocab_size=1)


def test_one_tokenizer_and_heads_of_different_padding():
    """The target's head has more rows than the draft model's; the tokenizer fewer than both."""
    model, tokenizer = tiny_target("llama", num_layers=2), byte_level(80)
    with torch.no_grad():  # padding is never the best
        model.lm_head.weight[80:] = 0
    drafter = copy.deepcopy(model)
    drafter.resize_token_embeddings(90)
    with compilespec.compile(
        model, spec="draft_model", draft=drafter, num_draft_tokens=2, tokenizer=tokenizer,
        draft_tokenizer=tokenizer, **OPTIONS,
    ) as engine:  # fmt: skip
        for request in check_traffic(engine, asks_within(model, 80)[:4]):
            assert set(request.emitted_per_step[:-1]) <= {3}
        assert not any("shared" in why for why in engine.plan()["why"])


def test_a_missing_tokenizer_is_named():
    model, drafter = tiny_target("llama", num_layers=1), tiny_target("llama", num_layers=1)
    known = byte_level(60)

    def refused(words, error=DraftMismatch, **options):
        with pytest.raises(error, match=words):
            compilespec.compile(model, spec="draft_model", draft=drafter, **OPTIONS, **options)

    refused("the target has none: give tokenizer=", vocab_map="shared_tokens")
    refused("the draft model has none: give draft_tokenizer=", vocab_map="shared_tokens",
            tokenizer=known)  # fmt: skip
    refused("vocab_map must be one of", InvalidOption, vocab_map="offsets")
    drafter.resize_token_embeddings(90)
    refused("give tokenizer= and draft_tokenizer=", tokenizer=known)
    many = byte_level(91)
    refused("knows 90 ids, the target 91", tokenizer=many, draft_tokenizer=many)  # nothing to map


def test_directories_bring_their_tokenizers(tmp_path):
    model = tiny_target("llama", num_layers=1)
    tokenizer = byte_level(VOCAB)
    other = reordered(tokenizer, num_extra=3)
    pairs = share_tokens(tokenizer, other, vocab_size=VOCAB, draft_vocab_size=VOCAB + 3)
    drafter = with_vocabulary(model, pairs)
    for name, one, its in (("target", model, tokenizer), ("draft", drafter, other)):
        one.save_pretrained(tmp_path / name)
        its.save_pretrained(tmp_path / name)
    with compilespec.compile(
        tmp_path / "target", spec="draft_model", draft=tmp_path / "draft", num_draft_tokens=2,
        dtype=torch.float64, **OPTIONS,
    ) as engine:  # fmt: skip
        (output,) = engine.generate("the cat", compilespec.SamplingParams(max_new_tokens=8))
        prompt = tokenizer.encode("the cat")
        assert output.token_ids == greedy_reference(model, prompt, 8)[: len(output.token_ids)]
        assert output.emitted_per_step[0] == 3


def test_every_pass_is_what_its_reference_says_with_two_vocabularies():
    model, drafter = tiny_target("llama", num_layers=1), tiny_target("llama", seed=1, num_layers=1)
    drafter.resize_token_embeddings(50)
    program = compilespec.trace(
        model, "draft_model", draft=drafter, num_draft_tokens=2, tokenizer=byte_level(80),
        draft_tokenizer=byte_level(50, ["ZEBRAS ZIP, ZIGZAG", *LINES[1:3]]), max_batch_size=3,
        max_seq_len=48, max_prefill_tokens=64,
    )  # fmt: skip
    report = compilespec.verify(program)
    assert report.ok, str(report)
