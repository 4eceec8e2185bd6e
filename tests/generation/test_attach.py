"""`model.generate` with an engine attached gives transformers' own tokens and records."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import compilespec
from compilespec import SamplingParams
from compilespec.errors import InvalidOption, NotSupported
from tests.support.models import VOCAB, tiny_target
from tests.support.toy_tokenizer import byte_level_tokenizer

OPTIONS: dict[str, Any] = {"spec": "ngram", "num_draft_tokens": 3, "backend": "eager"}
PROMPTS = torch.tensor(
    [[0, 0, 0, 5, 9, 5], [7, 8, 9, 7, 8, 9], [0, 0, 3, 3, 3, 3], [11, 12, 11, 12, 11, 13]]
)
MASK = torch.tensor([[0, 0, 0, 1, 1, 1], [1] * 6, [0, 0, 1, 1, 1, 1], [1] * 6])


class BanMultiplesOfThree(transformers.LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        scores[:, ::3] = -torch.inf
        return scores


class EndsAtEvenSum(transformers.StoppingCriteria):
    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return (input_ids.sum(-1) % 2 == 0) & (input_ids.shape[1] > 9)


class AllHaveSaid(transformers.StoppingCriteria):
    """Keeps what the rows of a batch said, and ends all of them together, as lm-eval's does."""

    def __init__(self, num_rows: int, ids: range) -> None:
        self.said, self.ids, self.lengths = [False] * num_rows, ids, list[int]()

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> bool:
        self.lengths.append(input_ids.shape[1])
        for row, last in enumerate(input_ids[:, -1].tolist()):
            self.said[row] = self.said[row] or last in self.ids
        return all(self.said)


class Kept(transformers.generation.streamers.BaseStreamer):
    def __init__(self) -> None:
        self.values: list[Any] = []

    def put(self, value: Tensor) -> None:
        self.values.append(value.tolist())

    def end(self) -> None:
        self.values.append("end")


def only_near(row: int, ids: Tensor) -> list[int]:
    return [(int(ids[-1]) * 7 + row + step) % VOCAB for step in range(9)]


# One token is left to draw where a filter is narrow enough: drawing has one result then.
CALLS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "max_length": {"max_length": 20, "max_new_tokens": None},
    "eos": {"eos_token_id": list(range(3, 40, 7))},
    "no eos": {"eos_token_id": None},
    "min_new_tokens": {"min_new_tokens": 5, "eos_token_id": list(range(0, 90, 2))},
    "min_length": {"min_length": 9, "eos_token_id": list(range(0, 90, 2))},
    "repetition_penalty": {"repetition_penalty": 1.7},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "bad_words_ids": {"bad_words_ids": [[4], [9, 5], [8, 9, 7]]},
    "suppress_tokens": {"suppress_tokens": list(range(60))},
    "begin_suppress_tokens": {"begin_suppress_tokens": list(range(60))},
    "sequence_bias": {"sequence_bias": [[[5], 30.0], [[5, 9], -50.0]]},
    "forced_bos_token_id": {"forced_bos_token_id": 17},
    "forced_eos_token_id": {"forced_eos_token_id": 2},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (4, 3.0)},
    "remove_invalid_values": {"remove_invalid_values": True},
    "prefix_allowed_tokens_fn": {"prefix_allowed_tokens_fn": only_near},
    "a processor": {"logits_processor": transformers.LogitsProcessorList([BanMultiplesOfThree()])},
    "top_k": {"do_sample": True, "top_k": 1},
    "top_p": {"do_sample": True, "top_p": 1e-6, "temperature": 0.7},
    "min_p": {"do_sample": True, "min_p": 1.0, "top_k": 0},
    "typical_p": {"do_sample": True, "typical_p": 1e-6, "top_k": 0},
    "epsilon_cutoff": {"do_sample": True, "epsilon_cutoff": 0.999, "top_k": 0},
    "eta_cutoff": {"do_sample": True, "eta_cutoff": 0.9, "temperature": 0.01},
    "renormalize_logits": {"do_sample": True, "top_k": 1, "renormalize_logits": True},
    "num_return_sequences": {"do_sample": True, "top_k": 1, "num_return_sequences": 2},
    "repetition_penalty and n-grams": {"repetition_penalty": 1.7, "no_repeat_ngram_size": 2},
    "a criterion": {"stopping_criteria": transformers.StoppingCriteriaList([EndsAtEvenSum()])},
    "a criterion and no eos": {
        "stopping_criteria": transformers.StoppingCriteriaList([EndsAtEvenSum()]),
        "eos_token_id": None,
    },
}


def usual(**call: Any) -> dict[str, Any]:
    given = {"max_new_tokens": 13, "do_sample": False, "eos_token_id": 2, "pad_token_id": 0}
    return {**given, **call}


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Any, Any]]:
    """A model as it is, and one with the same weights and an engine."""
    plain: Any = tiny_target("llama", torch.float32, num_layers=2)
    attached: Any = compilespec.attach(copy.deepcopy(plain), **OPTIONS)
    yield plain, attached
    compilespec.detach(attached)


@pytest.mark.parametrize("name", CALLS)
def test_tokens_are_those_of_transformers(pair: tuple[Any, Any], name: str) -> None:
    plain, attached = pair
    call = usual(**CALLS[name])
    for ids, mask in ((PROMPTS, MASK), (PROMPTS[1:2], None)):
        expected = plain.generate(ids, attention_mask=mask, **call)
        torch.testing.assert_close(
            attached.generate(ids, attention_mask=mask, **call), expected, rtol=0, atol=0
        )


def test_the_calls_do_something(pair: tuple[Any, Any]) -> None:
    """An option that changed nothing would be compared in vain."""
    plain, _ = pair
    greedy = plain.generate(PROMPTS, attention_mask=MASK, **usual()).tolist()
    same = {
        name
        for name, call in CALLS.items()
        if plain.generate(PROMPTS, attention_mask=MASK, **usual(**call)).tolist() == greedy
    }
    as_greedy = {"top_k", "top_p", "min_p", "epsilon_cutoff", "eta_cutoff", "renormalize_logits"}
    assert same <= {"greedy", "no eos", "remove_invalid_values", "forced_bos_token_id", *as_greedy}


@pytest.mark.parametrize("padded", [False, True])
def test_records_are_those_of_transformers(pair: tuple[Any, Any], padded: bool) -> None:
    plain, attached = pair
    call = usual(
        return_dict_in_generate=True, output_scores=True, output_logits=True,
        output_hidden_states=True, no_repeat_ngram_size=2, eos_token_id=list(range(3, 90, 11)),
    )  # fmt: skip
    mask = MASK if padded else torch.ones_like(MASK)
    expected = plain.generate(PROMPTS, attention_mask=mask, **call)
    got = attached.generate(PROMPTS, attention_mask=mask, **call)
    assert torch.equal(got.sequences, expected.sequences)
    assert type(got) is type(expected)
    at_rows = [mask.bool(), *[torch.ones(len(PROMPTS), 1).bool()] * 20]
    for kind in ("scores", "logits"):
        torch.testing.assert_close(got[kind], expected[kind], rtol=1e-4, atol=1e-4)
    assert len(got.hidden_states) == len(expected.hidden_states)
    for step, (mine, its) in enumerate(zip(got.hidden_states, expected.hidden_states, strict=True)):
        for one, other in zip(mine, its, strict=True):  # rows of padding hold anything
            torch.testing.assert_close(
                one[at_rows[step]], other[at_rows[step]], rtol=1e-4, atol=1e-4
            )


def test_sampled_rows_are_the_engines_own_by_seed(pair: tuple[Any, Any]) -> None:
    _, attached = pair
    ids, mask = PROMPTS.repeat(2, 1), MASK.repeat(2, 1)
    call = usual(do_sample=True, temperature=1.3, top_k=20, top_p=0.9)
    torch.manual_seed(7)
    got = attached.generate(ids, attention_mask=mask, **call)
    torch.manual_seed(7)
    assert torch.equal(attached.generate(ids, attention_mask=mask, **call), got)
    assert not torch.equal(attached.generate(ids, attention_mask=mask, **call), got)
    torch.manual_seed(7)
    seeds = torch.randint(2**63 - 1, (8,)).tolist()
    engine = compilespec.engine_of(attached)
    for row, keep, seed, tokens in zip(ids, mask.bool(), seeds, got[:, 6:].tolist(), strict=True):
        params = SamplingParams(temperature=1.3, top_k=20, top_p=0.9, seed=seed, max_new_tokens=13)
        (output,) = engine.generate(row[keep].tolist(), params)
        assert tokens[: len(output.token_ids)] == output.token_ids
        assert not any(tokens[len(output.token_ids) :])


def test_a_streamer_gets_what_transformers_gives_it(pair: tuple[Any, Any]) -> None:
    plain, attached = pair
    once = compilespec.generate_with(copy.deepcopy(plain), **OPTIONS)
    kept = [Kept() for _ in range(3)]
    call = usual(eos_token_id=list(range(3, 90, 11)))
    plain.generate(PROMPTS, attention_mask=MASK, streamer=kept[0], **call)
    attached.generate(PROMPTS, attention_mask=MASK, streamer=kept[1], **call)
    assert kept[1].values == kept[0].values
    with pytest.raises(InvalidOption, match="another model"):
        plain.generate(PROMPTS, attention_mask=MASK, custom_generate=once, **call)


def test_generate_with_is_a_custom_generate(pair: tuple[Any, Any]) -> None:
    plain, _ = pair
    model: Any = copy.deepcopy(plain)
    loop = compilespec.generate_with(model, **OPTIONS)
    expected = plain.generate(PROMPTS, attention_mask=MASK, **usual())
    assert torch.equal(
        model.generate(PROMPTS, attention_mask=MASK, custom_generate=loop, **usual()), expected
    )
    held = model.__dict__["_compilespec_engines"]
    compilespec.generate_with(model, **OPTIONS)
    assert model.__dict__["_compilespec_engines"] is held  # nothing is compiled again
    with pytest.raises(NotSupported, match="beam search"):
        model.generate(PROMPTS, attention_mask=MASK, custom_generate=loop, **usual(num_beams=2))
    with pytest.raises(NotSupported, match="assistant_model"):
        model.generate(PROMPTS[:1], custom_generate=loop, assistant_model=plain, **usual())
    compilespec.detach(model)


@pytest.mark.parametrize("times", [1, 3])  # 12 rows are more than the engine runs at once
@pytest.mark.parametrize("eos", [None, [4, 11, 18, 25]], ids=["no-eos", "eos"])
def test_a_criterion_sees_all_rows_after_every_token(
    pair: tuple[Any, Any], times: int, eos: Any
) -> None:
    ids, mask = PROMPTS.repeat(times, 1), MASK.repeat(times, 1)
    found = []
    for model in pair:
        criterion, streamer = AllHaveSaid(len(ids), range(60)), Kept()
        call = usual(eos_token_id=eos, max_new_tokens=20, no_repeat_ngram_size=2, streamer=streamer)
        tokens = model.generate(ids, attention_mask=mask, stopping_criteria=[criterion], **call)
        found.append((tokens.tolist(), criterion.lengths, streamer.values))
    assert found[0] == found[1]
    assert found[0][1][-1] < 26, "it ends them before their length"


def test_text_and_stop_strings_through_a_pipeline(pair: tuple[Any, Any]) -> None:
    plain, attached = pair
    letters = [bytes([code]) for code in range(32, 32 + VOCAB - 3)]
    tokenizer = byte_level_tokenizer(["<pad>", "<bos>", "<eos>", *letters], eos="<eos>")
    tokenizer.pad_token = "<pad>"
    texts = []
    for model in (plain, attached):
        pipe = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)
        call = {"max_new_tokens": 12, "do_sample": False}
        texts.append(pipe(["say so", "so say so"], batch_size=2, **call))
        text = texts[-1][0][0]["generated_text"][6:]
        texts[-1].append(pipe("say so", stop_strings=[text[4:6]], tokenizer=tokenizer, **call))
    assert texts[0] == texts[1]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "beams": ({"num_beams": 2}, "beam search"),
    "prompt lookup": ({"prompt_lookup_num_tokens": 2}, "assisted generation"),
    "guidance": ({"guidance_scale": 1.5}, "more than a row"),
    "attentions": (
        {"return_dict_in_generate": True, "output_attentions": True}, "output_attentions",
    ),
    "right padding": ({"attention_mask": MASK.flip(1)}, "pad on the left"),
    "positions": ({"position_ids": torch.arange(6).expand(4, 6) * 2}, "position_ids are other"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_served_is_refused_by_name(pair: tuple[Any, Any], name: str) -> None:
    _, attached = pair
    call, reason = REFUSED[name]
    ids = PROMPTS[:1] if name == "prompt lookup" else PROMPTS
    call = {"attention_mask": MASK[: len(ids)], **call}
    with pytest.raises(NotSupported, match=reason):
        attached.generate(ids, **usual(**call))


def test_transformers_takes_what_is_not_served_where_it_may(
    pair: tuple[Any, Any], caplog: pytest.LogCaptureFixture
) -> None:
    plain, _ = pair
    model = compilespec.attach(copy.deepcopy(plain), **OPTIONS, fallback=True)
    for call in ({"num_beams": 3}, {"guidance_scale": 1.5}):
        expected = plain.generate(PROMPTS, attention_mask=MASK, **usual(**call))
        assert torch.equal(model.generate(PROMPTS, attention_mask=MASK, **usual(**call)), expected)
        assert "handed to transformers" in caplog.text
        caplog.clear()
    compilespec.detach(model)


def test_a_changed_model_is_noticed(pair: tuple[Any, Any]) -> None:
    plain, _ = pair
    plain = copy.deepcopy(plain)
    model: Any = compilespec.attach(copy.deepcopy(plain), **OPTIONS)
    before = model.generate(PROMPTS, attention_mask=MASK, **usual())
    for one in (plain, model):
        with torch.no_grad():
            for parameter in one.parameters():
                parameter.mul_(1.37 if parameter.dim() > 1 else 0.6)
    after = plain.generate(PROMPTS, attention_mask=MASK, **usual())
    assert torch.equal(model.generate(PROMPTS, attention_mask=MASK, **usual()), after)
    assert not torch.equal(after, before)
    engine = compilespec.engine_of(model)
    model.generate(PROMPTS, attention_mask=MASK, **usual())
    assert engine.weights_version == 1  # nothing changed since
    for one in (plain, model):
        one.to(torch.float64)
    assert torch.equal(
        model.generate(PROMPTS[1:2], **usual()), plain.generate(PROMPTS[1:2], **usual())
    )
    assert compilespec.engine_of(model) is not engine
    model.train()
    model.generate(PROMPTS, attention_mask=MASK, **usual())  # it drops nothing
    model.model.layers[0].self_attn.attention_dropout = 0.1
    with pytest.raises(NotSupported, match=r"call model\.eval\(\)"):
        model.generate(PROMPTS, attention_mask=MASK, **usual())
    compilespec.detach(model)


@pytest.mark.parametrize("fused", [True, False])
def test_steps_of_optimizers_are_noticed(pair: tuple[Any, Any], fused: bool) -> None:
    """Fused ones write parameters and leave their versions as they are."""
    plain = copy.deepcopy(pair[0])
    model: Any = compilespec.attach(copy.deepcopy(plain), **OPTIONS)
    for one in (plain, model):
        optimizer = torch.optim.AdamW(one.parameters(), lr=0.1, fused=fused)
        one(PROMPTS).logits.square().mean().backward()
        optimizer.step()
    after = plain.generate(PROMPTS, attention_mask=MASK, **usual())
    assert torch.equal(model.generate(PROMPTS, attention_mask=MASK, **usual()), after)
    assert compilespec.engine_of(model).weights_version == 1
    compilespec.detach(model)


def test_copies_and_detached_models_are_transformers_own(pair: tuple[Any, Any]) -> None:
    plain, attached = pair
    assert type(attached).__name__ == type(plain).__name__
    assert isinstance(attached, type(plain))
    copied: Any = copy.deepcopy(attached)
    expected = plain.generate(PROMPTS, attention_mask=MASK, **usual())
    assert torch.equal(copied.generate(PROMPTS, attention_mask=MASK, **usual()), expected)
    compilespec.detach(copied)
    assert type(copied) is type(plain)
    assert torch.equal(copied.generate(PROMPTS, attention_mask=MASK, **usual()), expected)
    assert pickle.loads(pickle.dumps(attached.__dict__["_compilespec_engines"])).spec == "ngram"


def test_a_module_without_generate_is_refused() -> None:
    with pytest.raises(InvalidOption, match="expected a causal language model of transformers"):
        compilespec.attach(nn.Linear(2, 2))
    with pytest.raises(InvalidOption, match="has no engine"):
        compilespec.engine_of(nn.Linear(2, 2))
