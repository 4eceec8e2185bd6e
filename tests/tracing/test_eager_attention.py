"""Attention that a module writes out, with masks of its own making."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import compilespec
from compilespec import DraftTree, SamplingParams
from compilespec.errors import NotSupported, TraceError, UnsupportedModel
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


def check_tokens(model: nn.Module) -> None:
    """Two prompts in one batch, in pieces of 16 tokens, with drafts."""
    prompts = [[3 + (n * n * 7 + i * i * 5) % (VOCAB - 5) for i in range(n)] for n in (13, 29)]
    expected = [recomputed(model, prompt, 10) for prompt in prompts]
    with compilespec.compile(
        model, spec="ngram", num_draft_tokens=2, backend="eager", max_seq_len=LONGEST,
        max_batch_size=2, max_prefill_tokens=16,
    ) as engine:  # fmt: skip
        params = SamplingParams(max_new_tokens=10, ignore_eos=True)
        assert [output.token_ids for output in engine.generate(prompts, params)] == expected


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
    check_tokens(model)


def test_a_mask_that_is_kept_goes_with_no_tree_yet() -> None:
    model = written(every_other)
    with pytest.raises(NotSupported, match=r"mask that the model computes.*draft_tree="):
        compilespec.trace(
            model, spec="draft_model", draft=model, max_seq_len=LONGEST,
            draft_tree=DraftTree(choices=[(0,), (0, 0)]),
        )  # fmt: skip


# --- scores that are more than scaled and masked ---


def causal(scores: Tensor) -> Tensor:
    length = scores.shape[-1]
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    return scores.masked_fill(~mask, float("-inf"))


def by_length(model: Written, scores: Tensor) -> Tensor:
    """Its factor would be that of the trial's length."""
    return causal(scores * torch.log(torch.tensor(1.0) * scores.shape[-1] + 1))


def cut_far(model: Written, scores: Tensor) -> Tensor:
    """Small scores do not show it."""
    return causal(scores.clamp(-50, 5))


def positive(model: Written, scores: Tensor) -> Tensor:
    return causal(torch.relu(scores))


def with_those_before(model: Written, scores: Tensor) -> Tensor:
    """RealFormer: a layer adds the scores of the one before."""
    if model.kept:
        return causal(scores + model.kept.pop())
    scores = scores * 2
    model.kept.append(scores)
    return causal(scores)


@pytest.mark.parametrize(
    ("hide", "message"),
    [(by_length, "scores have several factors"), (cut_far, "scores are more than scaled"),
     (positive, "scores are more than scaled"), (with_those_before, "the scores are read by")],
)  # fmt: skip
def test_other_scores_are_refused(hide: Masked, message: str) -> None:
    model = written(hide)
    model.kept = []
    with pytest.raises(TraceError, match=f"no attention that can be cached.*{message}") as caught:
        trace_target(model)
    assert "\n" not in str(caught.value)


# --- counts that meet queries, keys or other values than embeddings ---


class Counted(PlainModel):
    """Its positions are what `place(model, ids, hidden)` makes of an arange."""

    def __init__(self, place: Callable[[PlainModel, Tensor, Tensor], Tensor]) -> None:
        super().__init__(num_layers=0)
        self.place = place

    def forward(self, ids: Tensor) -> Tensor:
        batch, length = ids.shape
        hidden = self.place(self, ids, self.tokens(ids))
        query = self.place(self, ids, hidden.view(batch, length, 4, 12).transpose(1, 2))
        mixed = nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)
        return self.head(self.norm(hidden + mixed.transpose(1, 2).reshape(hidden.shape)))


def rotated(model: PlainModel, ids: Tensor, x: Tensor) -> Tensor:
    rate = 100.0 ** -torch.linspace(0, 1, x.shape[-1] // 2)
    angle = torch.outer(torch.arange(ids.shape[1]).double(), rate)
    first, second = x.chunk(2, -1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def hotter(model: PlainModel, ids: Tensor, x: Tensor) -> Tensor:
    return x * torch.log(torch.arange(ids.shape[1]) + 2.0)[:, None]


@pytest.mark.parametrize("place", [rotated, hotter])
def test_counts_of_a_layer_are_positions(place: Callable[..., Tensor]) -> None:
    torch.manual_seed(0)
    model = Counted(place).double().eval()
    check_tokens(model)


def from_the_end(model: PlainModel, ids: Tensor, x: Tensor) -> Tensor:
    return x * (ids.shape[1] - 1 - torch.arange(ids.shape[1]))[:, None]


def backwards(model: PlainModel, ids: Tensor, x: Tensor) -> Tensor:
    return x * torch.arange(ids.shape[1]).flip(0)[:, None]


@pytest.mark.parametrize("place", [from_the_end, backwards])
def test_counts_from_the_end_are_refused(place: Callable[..., Tensor]) -> None:
    with pytest.raises(UnsupportedModel, match="it depends on how many tokens a call has"):
        trace_target(Counted(place).double().eval())
