"""Prompts as embeddings: tokens are those of transformers' `generate(inputs_embeds=)`.

float64 on the interpreted graphs, tokens equal.
"""

from __future__ import annotations

import functools

import pytest
import torch
import transformers
from torch import Tensor

import compilespec
from compilespec import EmbedsPrompt, SamplingParams
from compilespec.errors import InvalidRequest, NotSupported
from tests.support.adapters import merged_by_hand, write_adapter
from tests.support.drafters import METHODS, always_right, traced_info
from tests.support.fake_executor import FakeExecutor, engine_over
from tests.support.models import tiny_target

COUNT = 20
PARAMS = SamplingParams(max_new_tokens=COUNT, ignore_eos=True)


@functools.cache
def model(family: str = "llama") -> torch.nn.Module:
    return tiny_target(family, num_layers=2)


def rows(count: int, seed: int = 0, family: str = "llama") -> Tensor:
    """Embeddings that no token has."""
    weight = model(family).get_input_embeddings().weight.detach()
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(count, weight.shape[1], generator=generator, dtype=weight.dtype)
    return noise * weight.std()


def own_tokens(
    embeds_TD: Tensor | None = None, ids: list[int] | None = None, target=None, count: int = COUNT
) -> list[int]:
    target = target or model()
    if embeds_TD is not None:
        given = {"inputs_embeds": embeds_TD.unsqueeze(0)}
        start = 0
    else:
        given, start = {"input_ids": torch.tensor([ids])}, len(ids)
    mask = torch.ones(1, len(embeds_TD) if embeds_TD is not None else start, dtype=torch.long)
    out = target.generate(
        **given, attention_mask=mask, max_new_tokens=count, do_sample=False, eos_token_id=None,
        pad_token_id=0,
    )  # fmt: skip
    return out[0, start:].tolist()


def compiled(spec="none", k=None, family="llama", **options):
    if spec in METHODS and "draft" not in options:
        options |= METHODS[spec](model(family), traced_info(model(family)), k)
    options = {"backend": "eager", "max_batch_size": 4, "max_seq_len": 64, **options}
    return compilespec.compile(
        model(family), spec, num_draft_tokens=k, prompt_embeds=True, **options
    )


@pytest.mark.parametrize(
    ("spec", "k"),
    [
        ("ngram", 3),
        pytest.param("none", None, marks=pytest.mark.slow),
        pytest.param("eagle3", 1, marks=pytest.mark.slow),
        pytest.param("eagle3", 3, marks=pytest.mark.slow),
        pytest.param("eagle3", 5, marks=pytest.mark.slow),
        pytest.param("mtp", 3, marks=pytest.mark.slow),
        pytest.param("draft_model", 3, marks=pytest.mark.slow),
    ],
)
def test_batches_that_mix_embeddings_and_tokens(spec, k):
    """Chunks cut the prompts; too few blocks for all: the last are computed anew, from the rows
    that were kept.
    """
    ids = [8, 9, 7, 9, 3, 2, 38, 46]
    first, second = rows(19, 1), rows(7, 2)
    prompts = [EmbedsPrompt(first), ids, EmbedsPrompt(second, [5] * 7), EmbedsPrompt(rows(1, 3))]
    with compiled(spec, k, max_prefill_tokens=11, kv_cache_tokens=96) as engine:
        outputs = engine.generate(prompts, PARAMS)
        second.fill_(0)  # the caller's to use again
        wanted = [own_tokens(first), own_tokens(ids=ids), own_tokens(rows(7, 2)),
                  own_tokens(rows(1, 3))]  # fmt: skip
        assert [output.token_ids for output in outputs] == wanted
        is_preempted = any(output.num_preemptions for output in outputs)
        assert is_preempted or spec != "ngram"  # others may end before blocks run out
        assert outputs[0].prompt_token_ids == [0] * 19
        assert outputs[2].prompt_token_ids == [5] * 7
        prefixes_are_found_by_content(engine)
        bad_prompts_are_refused(engine)
        assert engine.stats().num_recompiles == 0


@pytest.mark.parametrize("k", [1, 3, 5])
def test_a_head_that_is_always_right_beside_embeddings(k):
    """It reads the ids that stand for them."""
    ids = [[*range(20, 39)], [8, 9, 7, 9, 3, 2, 38, 46], [5] * 7]
    prompts = [EmbedsPrompt(rows(19, 1), ids[0]), ids[1], EmbedsPrompt(rows(7, 2), ids[2])]
    wanted = [own_tokens(rows(19, 1)), own_tokens(ids=ids[1]), own_tokens(rows(7, 2))]
    dial = always_right(model(), k, ids, wanted)
    with compiled("eagle3", k, draft=dial, max_prefill_tokens=11) as engine:
        outputs = engine.generate(prompts, PARAMS)
    for output, before, tokens in zip(outputs, ids, wanted, strict=True):
        assert output.token_ids == tokens
        assert list(output.emitted_per_step) == dial.expected_steps(len(before), COUNT, k)


def prefixes_are_found_by_content(engine):
    known = rows(20, 4)
    for embeds, num_cached in ((known, 0), (known, 16), (rows(20, 5), 0)):
        (output,) = engine.generate([EmbedsPrompt(embeds)], PARAMS)
        assert output.token_ids == own_tokens(embeds)
        assert output.num_cached_tokens == num_cached
    last = torch.cat([known[:19], rows(1, 6)])  # the same first block, and what drafts of it read
    (output,) = engine.generate([EmbedsPrompt(last)], PARAMS)
    assert (output.token_ids, output.num_cached_tokens) == (own_tokens(last), 16)
    half = rows(20, 8).half()
    for embeds in (half, half.view(torch.bfloat16)):  # the same bytes are other numbers
        (output,) = engine.generate([EmbedsPrompt(embeds)], PARAMS)
        assert (output.token_ids, output.num_cached_tokens) == (own_tokens(embeds.double()), 0)


def bad_prompts_are_refused(engine):
    spoilt = rows(3)
    spoilt[1, 2] = torch.nan
    for prompt, says in (
        (EmbedsPrompt(rows(3)[:, :40]), r"expected floats \[T, 48\].* got torch.float64 \[3, 40\]"),
        (EmbedsPrompt(rows(3)[0]), r"expected floats \[T, 48\]"),
        (EmbedsPrompt(rows(0)), r"at least one position"),
        (EmbedsPrompt(torch.ones(3, 48, dtype=torch.int64)), r"expected floats"),
        (EmbedsPrompt([[1.0]]), r"expected floats"),
        (EmbedsPrompt(spoilt), "holds NaN or infinity"),
        (EmbedsPrompt(rows(3), [1, 2]), "an id for each of the 3 rows of embeds_TD, got 2"),
        (EmbedsPrompt(rows(3), [1, 2, 97]), "prompt token 2 is 97: expected ids from 0 to 96"),
        (EmbedsPrompt(rows(64)), "the prompt has 64 tokens: expected at most 63"),
    ):
        with pytest.raises(InvalidRequest, match=says) as caught:
            engine.generate(prompt)
        assert "\n" not in str(caught.value)
    refused, served = engine.generate([EmbedsPrompt(spoilt), EmbedsPrompt(rows(5))], PARAMS)
    assert refused.finish_reason == "error"
    assert served.token_ids == own_tokens(rows(5))


@pytest.mark.parametrize("family", ["gemma3", "gpt2"])
def test_rows_stand_for_the_output_of_the_embeddings_module(family):
    """Which scales, in Gemma; GPT-2 adds positions to it."""
    embeds = rows(9, 1, family) * (7 if family == "gemma3" else 1)
    with compiled(family=family) as engine:
        (output,) = engine.generate([EmbedsPrompt(embeds)], PARAMS)
        assert output.token_ids == own_tokens(embeds, target=model(family))


def test_with_an_adapter(tmp_path):
    directory = write_adapter(tmp_path, model(), ("q_proj", "up_proj"))
    with compiled(adapters={"one": directory}) as engine:
        params = SamplingParams(max_new_tokens=COUNT, ignore_eos=True, adapter="one")
        (output,) = engine.generate([EmbedsPrompt(rows(9))], params)
        wanted = own_tokens(rows(9), target=merged_by_hand(model(), directory))
        assert output.token_ids == wanted


def test_the_pass_is_what_its_reference_says():
    program = compilespec.trace(
        model("gemma3"), prompt_embeds=True, max_seq_len=64, max_batch_size=4
    )
    report = compilespec.verify(
        program, passes=("read_embeds",), phases=["prefill"], batch_sizes=[3]
    )
    assert report.ok, "\n".join(" ".join(row) for row in report.rows())


class Twice(transformers.LlamaForCausalLM):
    """Its ids enter a second embedding."""

    def forward(self, input_ids, **keywords):
        output = super().forward(input_ids, **keywords)
        output.logits = output.logits + self.other(input_ids)
        return output


def test_ids_that_enter_more_than_an_embedding_are_refused():
    twice = tiny_target("llama", num_layers=1)
    twice.__class__, twice.other = Twice, torch.nn.Embedding(97, 97, dtype=torch.float64)
    with pytest.raises(NotSupported, match=r"prompt_embeds=True: the model's token ids enter .*, "):
        compilespec.trace(twice, prompt_embeds=True, max_seq_len=64)


def test_an_engine_without_them_names_the_keyword():
    with engine_over(FakeExecutor()) as engine:
        with pytest.raises(InvalidRequest, match="compiled with prompt_embeds=True"):
            engine.generate(EmbedsPrompt(torch.ones(3, 48)))
