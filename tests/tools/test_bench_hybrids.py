"""The bench of hybrids: its twins, what runs, whose steps are timed, and when it fails."""

from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from tools.bench.hybrids import (
    CONFIGS,
    METHODS,
    NUM_WARM,
    PLAIN,
    Samples,
    chosen,
    is_slow,
    judge,
    parse,
    print_rows,
    random_model,
    take_turns,
)


@pytest.mark.parametrize("family", CONFIGS)
def test_a_twin_has_attention_alone(family: str) -> None:
    for is_twin, expected in ((False, 1), (True, 4)):
        model = random_model(family, (4, 128, 97), 64, is_twin)
        names = [name for name, _ in model.named_modules()]
        assert sum(name.endswith("self_attn") for name in names) == expected


def test_what_runs() -> None:
    by_default, every = parse([]), parse(["--all"])
    assert chosen("families", "tiny", by_default) == ("qwen3_5",)
    assert chosen("methods", "large", by_default) == ("ngram",)
    assert chosen("families", "tiny", every) == tuple(CONFIGS)
    assert chosen("methods", "large", every) == METHODS
    assert chosen("context", "large", parse(["--context", "7", "--all"])) == [7]


def samples(plain: float, step: float, twin_plain: float, twin_step: float) -> Samples:
    """Three steps of each way, in ms of the processor; the clock, which is not judged, says 99."""
    return {
        (False, PLAIN): [(99.0, plain)] * 3,
        (False, "ngram"): [(99.0, step)] * 3,
        (True, PLAIN): [(99.0, twin_plain)] * 3,
        (True, "ngram"): [(99.0, twin_step)] * 3,
    }


@pytest.mark.parametrize(
    ("times", "slow"),
    [
        ((10, 15, 10, 14), []),
        ((13.5, 15, 10, 14), [PLAIN]),  # plain decoding is slower than the twin's
        ((10, 19, 10, 14), ["ngram"]),  # the step of K drafts is
        ((7, 14, 10, 15), ["ngram"]),  # drafts cost more, although no step does
    ],
)
def test_a_hybrid_is_slow_by_its_steps_or_by_what_drafts_cost(
    times: tuple[float, float, float, float], slow: list[str]
) -> None:
    assert [row["way"] for row in judge(samples(*times)) if is_slow(row)] == slow


class FakeEngine:
    """A step takes one prompt, or else decodes a token of every request."""

    geometry = SimpleNamespace(max_seq_len=32)

    def __init__(self) -> None:
        self.requests: list[SimpleNamespace] = []

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    def submit(self, prompt: list[int], params: object) -> SimpleNamespace:
        self.requests.append(SimpleNamespace(output_token_ids=[]))
        return self.requests[-1]

    def step(self) -> None:
        waiting = [request for request in self.requests if not request.output_token_ids]
        for request in waiting[:1] or self.requests:
            request.output_token_ids.append(0)

    def abort(self, request: SimpleNamespace) -> None:
        assert len(request.output_token_ids) == 1 + 5 + NUM_WARM, "as many steps as rounds"
        self.requests.remove(request)


def test_every_way_of_both_models_steps_once_a_round() -> None:
    model = SimpleNamespace(get_output_embeddings=lambda: torch.nn.Linear(4, 97))
    both = [
        SimpleNamespace(
            is_twin=is_twin, model=model, engines={PLAIN: FakeEngine(), "ngram": FakeEngine()}
        )
        for is_twin in (False, True)
    ]
    times = take_turns(both, batch=2, context=7, rounds=5)  # type: ignore[arg-type]
    assert {key: len(steps) for key, steps in times.items()} == {
        (is_twin, way): 5 for is_twin in (False, True) for way in (PLAIN, "ngram")
    }
    console = Console(record=True, width=120)
    rows = [{"batch": 2, "context": 7, **row} for row in judge(samples(10, 19, 10, 14))]
    print_rows(console, "title", rows)
    assert console.export_text().count("slow") == 1
