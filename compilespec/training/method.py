"""The interface between training and a drafting method, for your own methods too."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from compilespec.errors import DraftMismatch
from compilespec.methods.registry import get_method
from compilespec.tracing.target_info import TargetInfo
from compilespec.training.batches import Lesson
from compilespec.training.options import TrainOptions


@dataclass(frozen=True, kw_only=True)
class StepLosses:
    """The losses of a lesson's draft steps, and their accuracy."""

    losses: Tensor
    """float32, the mean cross entropy of each draft step that learns by itself: [depth], or [1]."""
    right: Tensor
    """float32 [depth], the share of places where all draft steps up to this one chose the target's
    token.
    """


class TrainingMethod(ABC):
    """Makes, teaches and saves the drafter of one method."""

    spec: str
    """The method by which `compile()` runs the saved drafter."""

    @abstractmethod
    def create(self, info: TargetInfo, counts: Tensor, options: TrainOptions) -> nn.Module:
        """A new drafter, float32, its trained parameters requiring gradients.

        Args:
            counts: int64 [V], the occurrences of each token in the data.
        Raises: DraftMismatch, InvalidOption.
        """

    @torch.no_grad()
    def start_from(self, drafter: nn.Module, directory: str, info: TargetInfo) -> None:
        """Give a new drafter the weights of a checkpoint, by the names that both have.

        Raises: CheckpointError, DraftMismatch if names or sizes differ.
        """
        loaded = get_method(self.spec).load(directory, info, {})
        assert loaded is not None, "a method that is trained has weights"
        found = loaded.state_dict()
        for name, tensor in own_tensors(drafter).items():
            other = found.get(name)
            if other is None or other.shape != tensor.shape:
                got = "none" if other is None else f"one of {list(other.shape)}"
                raise DraftMismatch(
                    f"{directory}: expected a {name} of {list(tensor.shape)}, got {got}; give the "
                    "sizes that it was trained with (draft_vocab_size, intermediate_size)"
                )
            tensor.copy_(other)

    @abstractmethod
    def aux_layers(self, drafter: nn.Module) -> tuple[int, ...]:
        """The hs indices that a lesson's `aux` holds side by side."""

    @abstractmethod
    def draft_ids(self, drafter: nn.Module) -> Tensor | None:
        """int64, the ascending ids that can be drafted; None: all."""

    @abstractmethod
    def losses(self, drafter: nn.Module, lesson: Lesson, depth: int) -> StepLosses:
        """Teach one lesson."""

    @abstractmethod
    def save(self, drafter: nn.Module, directory: Path, dtype: torch.dtype, layout: str) -> None:
        """Write a checkpoint that `compile(draft=directory)` loads."""

    def slow_parameters(self, drafter: nn.Module) -> Iterable[str]:
        """Names of matrices that AdamW trains instead of Muon: embeddings and heads."""
        return ("lm_head", "embed")

    def compile_steps(self) -> None:
        """Let torch.compile make forward and backward; does nothing for methods without such a
        part.
        """
        return None


def own_tensors(drafter: nn.Module) -> dict[str, Tensor]:
    """The drafter's trained or chosen tensors, without the target's."""
    trained = {n for n, p in drafter.named_parameters() if p.requires_grad}
    return {
        name: tensor.detach()
        for name, tensor in drafter.state_dict().items()
        if name in trained or not tensor.is_floating_point()
    }
