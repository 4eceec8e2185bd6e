"""Requests that take much work before their first token hold up nobody else; needs llguidance."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from compilespec import SamplingParams
from compilespec.errors import InvalidRequest
from compilespec.runtime.engine_thread import EngineThread
from tests.support.hostile import HOSTILE, beside, bystander_s, hostile_engine

ALWAYS = ("64 long stop strings", "150,000 biases", "4 MB of letters", "4 MB of a conversation",
          "repeats of repeats", "a bad expression", "a wide schema")  # fmt: skip
SERVED = ("64 long stop strings", "150,000 biases", "150,000 allowed ids", "a wide schema",
          "many alternatives")  # fmt: skip
NOISE_S = 0.5  # of a busy machine; before, these took from 0.9 to 41 s


@pytest.fixture(scope="module")
def server() -> Iterator[EngineThread]:
    pytest.importorskip("llguidance", reason="needs llguidance: pip install 'compilespec[guide]'")
    with hostile_engine().serve() as server:
        server.submit("x", SamplingParams(guide="a")).result()  # reads the tokenizer
        bystander_s(server)
        yield server


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in ALWAYS else pytest.mark.slow) for n in HOSTILE],
)
def test_a_bystander_is_not_held_up(server, name):
    """It takes at most twice as long, and what is refused is refused in one short line."""
    quiet = [bystander_s(server)]
    taken, told = beside(server, HOSTILE[name])
    quiet.append(bystander_s(server))
    assert taken < 2 * max(quiet) + NOISE_S, told
    assert (told in ("stop", "length")) == (name in SERVED), told
    assert len(told) < 400
    assert "\n" not in told


def test_bounds_of_stop_strings_are_named():
    assert SamplingParams(stop=["a" * 256] * 64).stop
    for stop, says in (
        (["a"] * 65, "at most 64 strings, got 65"),
        ("a" * 257, r"at most 256, got .*\(259 characters\)"),
        (["a", ""], "at least one character"),
    ):
        with pytest.raises(InvalidRequest, match=says):
            SamplingParams(stop=stop)
