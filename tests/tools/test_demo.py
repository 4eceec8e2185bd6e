"""The shipped demo pair through the public API: real drafts, real acceptance, the same tokens."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import compilespec
from compilespec import Engine, SamplingParams

PROMPTS = [
    "def read_lines(path):\n    with open(path) as file:\n",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "import os\n\n\ndef main(argv):\n    parser = ",
]
PARAMS = SamplingParams(max_new_tokens=48, ignore_eos=True)


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, Engine]]:
    """Plain and speculative engines over the interpreted graphs, in the checkpoint's own bf16."""
    plain = compilespec.compile("demo", backend="eager", max_batch_size=4, max_seq_len=256)
    eagle = compilespec.compile(
        "demo",
        spec="eagle3",
        num_draft_tokens=3,
        backend="eager",
        max_batch_size=4,
        max_seq_len=256,
    )
    mtp = compilespec.compile(
        "demo", spec="mtp", backend="eager", max_batch_size=4, max_seq_len=256
    )
    with plain, eagle, mtp:
        yield {"none": plain, "eagle3": eagle, "mtp": mtp}


@pytest.mark.parametrize("method", ["eagle3", "mtp"])
def test_speculation_changes_no_token_in_bf16(engines: dict[str, Engine], method: str) -> None:
    """Products and attention have the same bits for 1 row and for K+1: no margin is needed."""
    plain, drafted = (engines[name].generate(PROMPTS, PARAMS) for name in ("none", method))
    assert [output.token_ids for output in drafted] == [output.token_ids for output in plain]
    assert [output.text for output in drafted] == [output.text for output in plain]


@pytest.mark.parametrize("method", ["eagle3", "mtp"])
def test_drafts_are_accepted(engines: dict[str, Engine], method: str) -> None:
    outputs = engines[method].generate(PROMPTS, PARAMS)
    steps = [count for output in outputs for count in output.emitted_per_step]
    assert sum(steps) / len(steps) > 1.7  # the model card measured 3 on held-out prompts
    rates = engines[method].stats().acceptance_rate_by_position
    assert list(rates) == sorted(rates, reverse=True)


def test_stream_gives_the_whole_text(engines: dict[str, Engine]) -> None:
    whole = engines["eagle3"].generate(PROMPTS[0], PARAMS)[0]
    deltas = list(engines["eagle3"].stream(PROMPTS[0], PARAMS))
    assert "".join(delta.text for delta in deltas) == whole.text
    assert [token for delta in deltas for token in delta.token_ids] == whole.token_ids
