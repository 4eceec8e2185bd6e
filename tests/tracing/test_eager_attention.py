"""Attention that a module writes out, with masks of its own making."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import compilespec
from compilespec import DraftTree, SamplingParams
from compilespec.errors import NotSupported
from compilespec.program import markers
from compilespec.tracing.target import trace_target
from tests.support.models import VOCAB, PlainModel, recomputed

WINDOW, LONGEST, HEADS = 8, 64, 4
Masked = Callable[["Written", Tensor], Tensor]


class Written(PlainModel):
    """softmax(query @ key.T) @ value in plain code, as in minGPT; `hide` masks the scores."""

    def __init__(self, hide: Masked, num_layers: int = 2) -> None:
        super().__init__(num_layers=0)
        self.layers = nn.ModuleList(Layer(48) for _ in range(num_layers))
        ones = torch.ones(LONGEST, LONGEST, dtype=torch.bool)
        self.register_buffer("table", ones.tril()[None, None])
        self.hide = hide

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(0, ids.shape[1], device=ids.device)
        hidden = self.tokens(ids) + self.places(places)
        for layer in self.layers:
            hidden = hidden + layer(hidden, lambda scores: self.hide(self, scores))
        return self.head(self.norm(hidden))


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)

    def forward(self, hidden: Tensor, hide: Callable[[Tensor], Tensor]) -> Tensor:
        batch, length, width = hidden.shape
        heads = (batch, length, HEADS, width // HEADS)
        query, key, value = (
            x.view(heads).transpose(1, 2) for x in self.qkv(self.norm(hidden)).split(width, 2)
        )
        scores = hide((query @ key.transpose(-2, -1)) * (width // HEADS) ** -0.5)
        mixed = torch.softmax(scores, dim=-1) @ value
        return mixed.transpose(1, 2).contiguous().view(batch, length, width)


def from_buffer(model: Written, scores: Tensor) -> Tensor:
    length = scores.shape[-1]
    return scores.masked_fill(~model.table[:, :, :length, :length], float("-inf"))


def near(model: Written, scores: Tensor) -> Tensor:
    place = torch.arange(scores.shape[-1])
    age = place[:, None] - place
    return torch.where((age >= 0) & (age < WINDOW), scores, torch.finfo(scores.dtype).min)


def by_distance(model: Written, scores: Tensor) -> Tensor:
    """ALiBi: each head has its slope."""
    place = torch.arange(scores.shape[-1]).view(1, 1, -1, 1)
    key = torch.arange(scores.shape[-1]).view(1, 1, 1, -1)
    slope = (2.0 ** -torch.arange(1, HEADS + 1)).view(1, HEADS, 1, 1)
    return (scores + slope * (key - place)).masked_fill(key > place, float("-inf"))


def every_other(model: Written, scores: Tensor) -> Tensor:
    place = torch.arange(scores.shape[-1]).view(1, 1, -1, 1)
    key = torch.arange(scores.shape[-1]).view(1, 1, 1, -1)
    hidden = (key > place) | ((place - key) % 3 == 1)
    return scores.masked_fill(hidden, float("-inf"))


def written(hide: Masked) -> Written:
    torch.manual_seed(0)
    return Written(hide).double().eval()


@pytest.mark.parametrize(
    ("hide", "window", "is_kept"),
    [(from_buffer, 0, False), (near, WINDOW, False), (by_distance, 0, True),
     (every_other, 0, True)],
)  # fmt: skip
def test_written_attention_is_found_and_gives_the_modules_tokens(
    hide: Masked, window: int, is_kept: bool
) -> None:
    model = written(hide)
    found = markers(trace_target(model).graph_module)
    assert [marker.args[4] for marker in found] == [window, window]
    assert [len(marker.args) > 8 for marker in found] == [is_kept, is_kept]
    prompts = [[3 + (n * n * 7 + i * i * 5) % (VOCAB - 5) for i in range(n)] for n in (13, 29)]
    expected = [recomputed(model, prompt, 10) for prompt in prompts]
    with compilespec.compile(
        model, spec="ngram", num_draft_tokens=2, backend="eager", max_seq_len=LONGEST,
        max_batch_size=2, max_prefill_tokens=16,
    ) as engine:  # fmt: skip
        params = SamplingParams(max_new_tokens=10, ignore_eos=True)
        assert [output.token_ids for output in engine.generate(prompts, params)] == expected


def test_a_mask_that_is_kept_goes_with_no_tree_yet() -> None:
    model = written(every_other)
    with pytest.raises(NotSupported, match=r"mask that the model computes.*draft_tree="):
        compilespec.trace(
            model, spec="draft_model", draft=model, max_seq_len=LONGEST,
            draft_tree=DraftTree(choices=[(0,), (0, 0)]),
        )  # fmt: skip
