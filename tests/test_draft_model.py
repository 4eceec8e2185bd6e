"""spec="draft_model": an independent model drafts; tokens, caches, the oracle of transformers."""

from __future__ import annotations

import copy
import itertools
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import compilespec
from compilespec.errors import DraftMismatch, InvalidOption
from tests.direct_methods import MAX_SEQ_LEN, SIZES, check_traffic
from tests.models import ask_all, tiny_target

DATA = Path(__file__).parent / "data" / "draft_model"
OPTIONS = {
    "backend": "eager", "max_batch_size": 5, "max_seq_len": MAX_SEQ_LEN,
    "max_prefill_tokens": 16, "buckets": [1, 2, 5],
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "count"), [("llama", 1), ("qwen3_moe", 3), ("gemma3", 5), ("llama", 5)]
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
    ("family", "other", "count"), [("llama", "gpt2", 3), ("qwen3_moe", "llama", 5)]
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
    with pytest.raises(InvalidOption, match="unknown option window"):
        compilespec.compile(model, spec="draft_model", draft=small, window=3, **OPTIONS)


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


def check_oracle(engine, meta, io):
    """From the first length past each prompt on; the first drafts by how many are accepted."""
    for index, trace in enumerate(meta["traces"]):
        tokens = io[f"out.greedy{index}"].tolist()
        steps = [step for step in trace if step["cur_len"] > len(io[f"in.prompt{index}"])]
        known = steps[0]["cur_len"] - 1
        request = engine.submit(
            tokens[:known],
            compilespec.SamplingParams(max_new_tokens=len(tokens) - known, ignore_eos=True),
        )
        for step, following in itertools.pairwise(steps):
            engine.step()  # the first is the prefill and a step
            assert request.emitted_per_step[-1] == step["accepted"] + 1
            assert known + len(request.output_token_ids) == following["cur_len"]
            drafts = engine._executor.buffers["tokens_RS"][request.row, 1:].tolist()
            assert drafts[: len(following["candidates"])] == following["candidates"]
        while engine.has_work:
            engine.step()
        assert request.output_token_ids == tokens[known:]
