"""The pass `read_embeds`: what it must leave alone."""

from __future__ import annotations

import dataclasses

from compilespec.program import RequestFeatures
from tests.support.hand_graphs import HAND_CONFIG
from tests.support.untouched import check_left_alone, step


def test_decode_reads_its_own_tokens() -> None:
    config = dataclasses.replace(HAND_CONFIG, features=RequestFeatures(prompt_embeds=True))
    check_left_alone("read_embeds", step("decode", "read_state", config=config))
