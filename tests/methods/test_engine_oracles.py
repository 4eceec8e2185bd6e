"""Whole generations through the public API against traces of other implementations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

import compilespec
from compilespec import SamplingParams
from tests.support.models import greedy_reference

ORACLES = Path(__file__).parents[1] / "data" / "oracles"
TARGET = ORACLES / "c_target"
CASE = ORACLES / "c_eagle3_d2t_chain"
NUM_DRAFT_TOKENS = 4
PROMPTS = (0, 1, 2)


def compile_case(backend: str = "eager", **options: Any) -> compilespec.Engine:
    return compilespec.compile(
        str(TARGET),
        spec="eagle3",
        draft=str(CASE / "draft"),
        num_draft_tokens=NUM_DRAFT_TOKENS,
        backend=backend,
        max_batch_size=3,
        **options,
    )


class Case:
    """The authors' generations: prompts, delivered tokens, emitted tokens per iteration."""

    def __init__(self) -> None:
        io = load_file(CASE / "io.safetensors")
        traces = json.loads((CASE / "meta.json").read_text())["traces"]
        self.prompts = [io[f"in.prompt{i}"].tolist() for i in PROMPTS]
        self.steps = [[step for step in trace if "accept_length" in step] for trace in traces]
        self.emitted = [[step["accept_length"] + 1 for step in steps] for steps in self.steps]
        # Their text ends before the last iteration's bonus token, which the trace names.
        self.tokens = [
            [*io[f"out.eagle{i}"].tolist()[len(prompt) :], steps[-1]["next_token"]]
            for i, prompt, steps in zip(PROMPTS, self.prompts, self.steps, strict=True)
        ]

    def params(self, index: int) -> SamplingParams:
        return SamplingParams(max_new_tokens=len(self.tokens[index]), ignore_eos=True)

    def check(self, index: int, output: compilespec.GenerationOutput) -> None:
        """Iteration by iteration: root, accepted drafts, bonus token."""
        assert output.finish_reason == "length"
        assert output.token_ids == self.tokens[index]
        assert output.emitted_per_step == self.emitted[index]
        done = 1  # tokens delivered before the iteration; the first is prefill's
        for step, count in zip(self.steps[index], output.emitted_per_step, strict=True):
            assert step["prefix_len"] + 1 == len(self.prompts[index]) + done
            assert output.token_ids[done - 1] == step["root"]
            accepted = step["tree_tokens"][1:count]
            assert output.token_ids[done : done + count] == [*accepted, step["next_token"]]
            done += count


@pytest.fixture(scope="module")
def case() -> Case:
    case = Case()
    for tokens, emitted in zip(case.tokens, case.emitted, strict=True):
        assert len(tokens) == 1 + sum(emitted)
    assert {1, 2, 3, 4} <= {count for emitted in case.emitted for count in emitted}
    return case


# Chunks of 5 tokens: every unfinished one is followed by its true next prompt token.
@pytest.fixture(
    scope="module",
    params=[{}, {"dtype": torch.float64, "max_prefill_tokens": 5}],
    ids=["as_it_is", "float64_in_chunks"],
)
def engine(request):
    with compile_case(**request.param) as engine:
        assert engine.plan()["dtype"] == ("float64" if request.param else "float32")
        assert engine.plan()["num_draft_tokens"] == NUM_DRAFT_TOKENS
        yield engine


@pytest.mark.parametrize("index", PROMPTS, ids="prompt{}".format)
def test_generation_equals_the_authors_iteration_by_iteration(engine, case, index):
    (output,) = engine.generate(case.prompts[index], case.params(index))
    case.check(index, output)


def test_a_batch_equals_the_authors(engine, case):
    outputs = engine.generate(case.prompts, [case.params(index) for index in PROMPTS])
    for index, output in enumerate(outputs):
        case.check(index, output)


def test_inductor_equals_the_authors(case):
    with compile_case(backend="inductor") as engine:
        outputs = engine.generate(case.prompts, [case.params(index) for index in PROMPTS])
        assert engine.stats().num_recompiles == 0
    for index, output in enumerate(outputs):
        case.check(index, output)


def test_a_speculators_head_decodes_for_a_target_of_its_sizes():
    """a_eagle3_llama comes without its target: for any target the output is plain decoding."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=8,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=96,
        bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(torch.float64).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.copy_(torch.randn_like(parameter) * 1.4 / parameter.shape[-1] ** 0.5)
    prompts = [[3, 1, 4, 1, 5], [9], list(range(10, 40))]
    params = SamplingParams(max_new_tokens=20, ignore_eos=True)
    draft = str(ORACLES / "a_eagle3_llama")
    with compilespec.compile(model, spec="eagle3", draft=draft, backend="eager") as engine:
        assert engine.plan()["num_draft_tokens"] == 4  # the checkpoint's own
        outputs = engine.generate(prompts, params)
    assert [o.token_ids for o in outputs] == [greedy_reference(model, p, 20) for p in prompts]
