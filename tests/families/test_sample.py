"""A sample of the families of transformers: equal to the module, with drafts and preemption.

`make families` runs all of them and writes docs/families.md.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.families.check import EQUAL, REFUSED, build, check_family, first_difference, prompts

# Each stands for something that was wrong or refused once.
SAMPLE = {
    "llama4_text": "chunks, and a temperature that follows from the model's own count",
    "phimoe": "a window that the mask alone tells",
    "camembert": "positions that begin at padding_idx + 1",
    "whisper": "positions that are repeated for each request",
    "gptj": "attention that is written out, its mask cut from a buffer",
    "bloom": "attention that is written out, with a bias by distance",
    "deepseek_v32": "top-k keys of a lightning indexer, over latents",
    "glm_moe_dsa": "layers that share the choice of an earlier one",
    "minimax_m3_vl_text": "top-k blocks of keys, by head",
    "qwen4_exp_text": "top-k blocks of compressed keys",
    "gemma4_text": "layers of different head sizes, which share keys",
    "qwen3_next": "gated delta rules, and products that are merged",
}


@pytest.mark.parametrize("family", SAMPLE)
def test_a_family_gives_the_modules_tokens(family: str) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        verdict = check_family(family, rope_types=("default",))
    finally:
        torch.set_num_threads(threads)
    assert verdict.verdict == EQUAL, verdict.reason


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("deepseek_v4", r"expected one key for each token.* got T \+ .* keys of T tokens"),
        ("jetmoe", r"expert_size.tolist\(\): a size there depends on the values of a tensor"),
    ],
)
def test_a_family_is_refused_by_its_reason(family: str, reason: str) -> None:
    import re

    verdict = check_family(family, rope_types=("default",))
    assert verdict.verdict == REFUSED
    assert re.search(reason, verdict.reason), verdict.reason
    assert "\n" not in verdict.reason


def test_the_check_sees_other_tokens_and_other_numbers() -> None:
    class Output:
        token_ids, finish_reason, logprobs = [1, 2], "length", [1, 1]

    class One:
        def __init__(self, logprob: float) -> None:
            self.logprob = logprob

    logits = torch.tensor([0.0, 3.0, 1.0], dtype=torch.float64)
    expected: list[tuple[int, Tensor]] = [(1, logits), (1, logits)]
    right = float(logits.log_softmax(-1)[1])
    Output.logprobs = [One(right), One(right)]
    assert first_difference(expected, Output) == "token 1 is 2, expected 1"
    Output.token_ids, Output.logprobs = [1, 1], [One(right), One(right + 0.01)]
    assert "log-probability" in first_difference(expected, Output)
    Output.logprobs = [One(right), One(right)]
    assert first_difference(expected, Output) == ""


def test_an_option_that_is_ignored_shows() -> None:
    """A mask without the selection of keys gives other tokens or log-probabilities."""
    model = build("deepseek_v32")
    ids = torch.tensor([prompts()[1]])
    with torch.no_grad():
        chosen = model(input_ids=ids, use_cache=False).logits
        for layer in model.model.layers:
            layer.self_attn.indexer.index_topk = ids.shape[1]
        every = model(input_ids=ids, use_cache=False).logits
    assert float((chosen - every)[0, -1].abs().max()) > 0.01
