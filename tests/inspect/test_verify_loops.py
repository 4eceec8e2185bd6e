"""Every kind of draft loop against its reference, which drives the drafter from outside (T30)."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn

import compilespec
from tests.methods.test_mtp_windowed import Step, Windowed, WindowedDrafter, script_of
from tests.support.models import tiny_target

SIZES = {"num_draft_tokens": 3, "max_batch_size": 5, "max_seq_len": 43, "max_prefill_tokens": 64}


class Heads(nn.Module):
    """Drafts from a hidden state and the last token: everything a direct drafter may read."""

    def __init__(self, target: nn.Module) -> None:
        super().__init__()
        self.head = target.get_output_embeddings()

    def forward(self, history_BL: Tensor, length_B: Tensor, hidden_BE: Tensor) -> Tensor:
        last_B1 = history_BL.gather(1, (length_B - 1).long().unsqueeze(1))
        best_B1 = self.head(hidden_BE).argmax(-1, keepdim=True).to(last_B1.dtype)
        return (best_B1 + last_B1).remainder(97).expand(-1, 3)


def traced(kind: str) -> Any:
    model = tiny_target("llama", num_layers=2)
    if kind == "kv_groups":
        steps = [Step(i, model, script_of([]), window) for i, window in enumerate((0, 6, 11))]
        drafter = WindowedDrafter(steps, "module_rows", (8, 4, 16))
        return compilespec.trace(model, spec=Windowed(drafter), **SIZES)
    if kind in ("module_rows", "target_rows"):
        drafter = WindowedDrafter([Step(i, model, script_of([])) for i in range(3)], kind)  # type: ignore[arg-type]
        return compilespec.trace(model, spec=Windowed(drafter), **SIZES)
    if kind == "ngram":
        return compilespec.trace(model, spec="ngram", **SIZES)
    if kind == "draft_model":
        draft = tiny_target("qwen2", num_layers=1, seed=1)
        return compilespec.trace(model, spec="draft_model", draft=draft, **SIZES)
    return compilespec.trace(model, spec="user", draft=Heads(model), aux_layers=(2,), **SIZES)


SLOW = ("module_rows", "target_rows", "ngram")
KINDS = ["kv_groups", "draft_model", "user"]
KINDS += [pytest.param(kind, marks=pytest.mark.slow) for kind in SLOW]


@pytest.mark.parametrize("kind", KINDS)
def test_the_loop_computes_what_its_reference_does(kind: str) -> None:
    report = compilespec.verify(traced(kind), passes=["splice_draft_loop", "commit_state"])
    assert report.ok, str(report)
    phases = {(check.phase, check.pass_name) for check in report.checks}
    assert ("decode", "splice_draft_loop") in phases
    assert ("prefill", "splice_draft_loop") in phases
