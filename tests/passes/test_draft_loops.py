"""What follows from K for the rest of the engine: one record a kind of draft loop."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args

import pytest
import torch

import compilespec
from compilespec.errors import DraftMismatch, InvalidOption
from compilespec.methods.base import Drafter
from compilespec.methods.capabilities import DraftKind
from compilespec.methods.direct import DirectDrafter
from compilespec.passes.splice.draft_loops import LOOPS
from compilespec.program import ProgramConfig
from tests.support.models import tiny_target

# By kind, at K = 3: slots past seq_len, tokens run again, tokens that an entry depends on.
AT_THREE = {
    "none": (7, 0, 0),
    "recycled": (7, 0, 1),
    "parallel": (4, 0, 1),
    "block": (4, 0, 0),
    "windowed": (7, 2, 3),
    "unshifted": (7, 0, 0),
    "masked": (5, 0, 0),
    "heads": (4, 0, 0),
    "direct": (7, 0, 0),
    "callback": (7, 0, 0),
    "shared_kv": (7, 0, 0),
    "in_place": (7, 0, 0),
}


def sizes(**changes: Any) -> ProgramConfig:
    own = {
        "num_draft_tokens": 3, "max_batch_size": 2, "max_seq_len": 32, "max_prefill_tokens": 16,
        "block_size": 8, "num_blocks": 8, "vocab_size": 7, "dtype": torch.float32,
        "device": torch.device("cpu"),
    }  # fmt: skip
    return ProgramConfig(**{**own, **changes})


def test_every_kind_says_what_it_needs() -> None:
    assert {*LOOPS} == {*AT_THREE} == {*get_args(DraftKind)}
    for kind, loop in LOOPS.items():
        assert dataclasses.astuple(loop.reach(3)) == AT_THREE[kind], kind


@pytest.mark.parametrize(
    ("kind", "smaller", "says"),
    [
        ("none", (2,), "drafts nothing: leave out num_draft_tokens=$"),
        ("windowed", (2,), "caches would have holes: give num_draft_tokens= one number$"),
    ],
)
def test_several_k_are_refused_where_a_cache_would_have_holes(
    kind: DraftKind, smaller: tuple[int, ...], says: str
) -> None:
    LOOPS[kind].check("x", sizes(), ())
    with pytest.raises(InvalidOption, match=f"spec='x' .*{says}"):
        LOOPS[kind].check("x", sizes(), smaller)


def test_a_chunk_holds_more_than_the_tokens_that_are_run_again() -> None:
    LOOPS["windowed"].check("x", sizes(max_prefill_tokens=3), ())
    with pytest.raises(InvalidOption, match=r"max_prefill_tokens must be above 2: .*; got 2$"):
        LOOPS["windowed"].check("x", sizes(max_prefill_tokens=2), ())
    LOOPS["recycled"].check("x", sizes(max_prefill_tokens=1), (0, 1))


class Echo(DirectDrafter):
    num_draft_tokens, aux_layers = 2, (0,)

    def draft(self, history_BL: torch.Tensor) -> torch.Tensor:
        return history_BL[:, -2:]


class Bare(Drafter):
    num_draft_tokens, aux_layers = 2, (0,)


@pytest.mark.parametrize("spec", ["eagle3", "mtp"])
@pytest.mark.parametrize(("drafter", "got"), [(Echo(), "draft"), (Bare(), "none")])
def test_a_drafter_of_another_kind_is_refused(spec: str, drafter: Drafter, got: str) -> None:
    says = rf"^{type(drafter).__name__}: expected a drafter for spec='{spec}', .*; got {got}: "
    with pytest.raises(DraftMismatch, match=says):
        compilespec.trace(tiny_target("llama"), spec=spec, draft=drafter, max_seq_len=64)
