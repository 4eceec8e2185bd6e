"""The bench of hybrids: its twins, what runs, and when it fails."""

import pytest

from tools.bench.hybrids import (
    CONFIGS,
    METHODS,
    PLAIN,
    Samples,
    chosen,
    is_slow,
    judge,
    parse,
    random_model,
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
