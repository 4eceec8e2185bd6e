"""A small program of every kind of draft loop."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

import compilespec
from tests.support.models import tiny_target
from tests.support.windowed import Step, Windowed, WindowedDrafter, script_of

KINDS = (
    "kv_groups",
    "draft_model",
    "self",
    "user",
    "module_rows",
    "target_rows",
    "ngram",
    "suffix",
)
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


def traced(kind: str, **options: Any) -> Any:
    """A small program whose draft loop is of this kind."""
    options = {**SIZES, **options}
    model = tiny_target("llama", num_layers=2)
    if kind == "kv_groups":
        steps = [Step(i, model, script_of([]), window) for i, window in enumerate((0, 6, 11))]
        drafter = WindowedDrafter(steps, "module_rows", (8, 4, 16))
        return compilespec.trace(model, spec=Windowed(drafter), **options)
    if kind in ("module_rows", "target_rows"):
        drafter = WindowedDrafter([Step(i, model, script_of([])) for i in range(3)], kind)  # type: ignore[arg-type]
        return compilespec.trace(model, spec=Windowed(drafter), **options)
    if kind in ("ngram", "suffix"):
        return compilespec.trace(model, spec=kind, **options)
    if kind == "self":
        draft = compilespec.SelfDraft(weights=None, layers=[1])
        return compilespec.trace(model, spec="self", draft=draft, **options)
    if kind == "draft_model":
        draft = tiny_target("qwen2", num_layers=1, seed=1)
        return compilespec.trace(model, spec="draft_model", draft=draft, **options)
    return compilespec.trace(model, spec="user", draft=Heads(model), aux_layers=(2,), **options)
