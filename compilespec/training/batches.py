"""The samples of a step, and the teacher's results for them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compilespec.training.data import Sample
from compilespec.training.teacher import Said, States, Teacher

GROUP = 64  # samples sorted by length together, before batches are cut


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Sequences side by side, padded at the end with id 0.

    Row t of a drafter pairs what the target computed at position t with the token at t+1: draft
    step j of origin t proposes the token at t+2+j.
    """

    ids: Tensor  # int64 [B, T]
    lengths: Tensor  # int64 [B]
    origins: Tensor  # int64 [B, A], the rows from which drafts are learned; at most length - 3

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    def to(self, device: torch.device) -> Batch:
        return Batch(
            ids=self.ids.to(device),
            lengths=self.lengths.to(device),
            origins=self.origins.to(device),
        )

    def ids_at(self, position_BA: Tensor) -> Tensor:
        """The tokens at some positions; 0 behind the end."""
        inside = position_BA < self.ids.shape[1]
        return self.ids.gather(1, position_BA.clamp_max(self.ids.shape[1] - 1)) * inside

    def weights(self, step: int) -> Tensor:
        """[B, A], 1.0 where draft step `step` has a token to be judged by."""
        return (self.origins + 2 + step < self.lengths[:, None]).float()


@dataclass(frozen=True, kw_only=True)
class Lesson:
    """A batch with the teacher's results for it."""

    batch: Batch
    aux: Tensor
    """The target's aux hidden states [B, T, E], side by side."""
    probs: Tensor
    """[B, P, Vd], its probabilities of the ids that can be drafted: row p is about the token at
    position first origin + 2 + p."""
    best: Tensor
    """int64 [B, P], the target's own choice there."""

    def judge(self, step: int) -> tuple[Tensor, Tensor]:
        """Probabilities [B, A, Vd] and choices [B, A] that judge draft step `step`."""
        count = self.batch.origins.shape[1]
        return self.probs[:, step : step + count], self.best[:, step : step + count]


def make_batch(samples: Sequence[Sample], *, learn_prompts: bool = False) -> Batch:
    """Sequences of three tokens or more, as one batch, with an origin for every token that is
    learned: those of the answers, or all.
    """
    lengths = torch.tensor([len(one) for one in samples])
    starts = torch.tensor([1 if learn_prompts else one.start for one in samples])
    ids_BT = torch.zeros(len(samples), int(lengths.max()), dtype=torch.int64)
    for row, one in zip(ids_BT, samples, strict=True):
        row[: len(one)] = torch.tensor(one.token_ids)
    num_origins = int((lengths - starts - 1).max())
    origin_BA = starts[:, None] - 1 + torch.arange(num_origins)
    return Batch(ids=ids_BT, lengths=lengths, origins=origin_BA)


def make_lesson(
    teacher: Teacher,
    batch: Batch,
    draft_ids: Tensor | None,
    depth: int,
    states: States | None = None,
) -> Lesson:
    """The teacher's results for a batch, for `depth` draft steps.

    Args:
        states: what `teacher.states` gives for it, where that is known.
    """
    aux_BTE, hidden_BTD, said = states or teacher.states(batch.ids)
    width = hidden_BTD.shape[2]
    num_judged = batch.origins.shape[1] + depth - 1
    at_BP = batch.origins[:, :1] + 1 + torch.arange(num_judged, device=batch.ids.device)
    at_BP = at_BP.clamp_max(batch.ids.shape[1] - 1)
    rows_BPD = hidden_BTD.gather(1, at_BP[..., None].expand(-1, -1, width))
    if said is not None:
        said = Said(*(one.gather(1, at_BP).flatten() for one in said))
    probs, best = teacher.probabilities(rows_BPD.flatten(0, 1), draft_ids, said)
    return Lesson(
        batch=batch,
        aux=aux_BTE.float(),
        probs=probs.unflatten(0, at_BP.shape),
        best=best.unflatten(0, at_BP.shape),
    )


@dataclass(kw_only=True)
class Place:
    """The place of a run in the data."""

    epoch: int = 0
    batch: int = 0  # the next batch of this epoch
    num_samples: int = 0  # samples of this epoch: those present when it began
    digest: str = ""  # of these samples


def epoch_batches(
    samples: Sequence[Sample], *, seed: int, epoch: int, batch_tokens: int
) -> Iterator[list[Sample]]:
    """The samples in batches of at most `batch_tokens` tokens, padding included (a longer sample
    stands alone); a function of the arguments alone.
    """
    rng = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order = torch.randperm(len(samples), generator=rng).tolist()
    batches: list[list[Sample]] = []
    for first in range(0, len(order), GROUP):
        group = sorted((samples[i] for i in order[first : first + GROUP]), key=len)
        current: list[Sample] = []
        for one in group:
            if current and len(one) * (len(current) + 1) > batch_tokens:
                batches.append(current)
                current = []
            current.append(one)
        batches.append(current)
    for i in torch.randperm(len(batches), generator=rng).tolist():
        yield batches[i]


def digest_samples(samples: Sequence[Sample]) -> str:
    """A hash of the tokens."""
    found = hashlib.sha256()
    for one in samples:
        found.update(f"{one.start}:{one.token_ids}".encode())
    return found.hexdigest()[:32]
