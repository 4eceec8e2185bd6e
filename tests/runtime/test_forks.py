"""Engines in a forked child: every call says what to do, none waits for ever, and the parent's
engine goes on.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

import compilespec
from compilespec import SamplingParams
from compilespec.errors import NotSupported
from tests.support.models import tiny_target

PARAMS = SamplingParams(max_new_tokens=4, ignore_eos=True)
PROMPT = [5, 6, 7]


def exit_code_of_child(calls: dict[str, Callable[[], Any]], ends: Callable[[], Any]) -> int:
    """0 where each call is refused in the child, `ends` is not, and nothing hangs."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        signal.alarm(20)
        for call in calls.values():
            try:
                call()
                os._exit(1)
            except NotSupported as error:
                if "compile in the child" not in str(error) or "spawn" not in str(error):
                    os._exit(2)
        ends()
        os._exit(0)
    finally:  # no second pytest, even after an error
        os._exit(3)


@pytest.fixture(scope="module")
def model():
    return tiny_target("llama", num_layers=1)


def test_an_engine_in_a_forked_child(model):
    with compilespec.compile(model, backend="eager", max_seq_len=64) as engine:
        (before,) = engine.generate([PROMPT], PARAMS)
        calls = {
            "generate": lambda: engine.generate([PROMPT], PARAMS),
            "stream": lambda: next(engine.stream([PROMPT], PARAMS)),
            "submit": lambda: engine.submit(PROMPT, PARAMS),
            "step": engine.step,
            "serve": engine.serve,
        }
        assert exit_code_of_child(calls, engine.close) == 0
        (after,) = engine.generate([PROMPT], PARAMS)
        assert after.token_ids == before.token_ids


def test_a_served_engine_in_a_forked_child(model):
    with compilespec.compile(model, backend="eager", max_seq_len=64).serve() as server:
        ticket = server.submit(PROMPT, SamplingParams(max_new_tokens=60, ignore_eos=True))
        calls = {
            "submit": lambda: server.submit(PROMPT, PARAMS),
            "generate": lambda: server.generate([PROMPT], PARAMS),
            "result": ticket.result,
            "for": lambda: next(iter(ticket)),
            "await": lambda: asyncio.run(ticket.wait()),
            "abort": ticket.abort,
            "drain": server.drain,
        }
        assert exit_code_of_child(calls, server.close) == 0
        assert len(ticket.result(60).token_ids) == 60
