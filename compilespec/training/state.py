"""A run on disk: everything that another process needs to continue it, in one file."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from compilespec.errors import CheckpointError, InvalidOption
from compilespec.training.batches import Place
from compilespec.training.files import replace
from compilespec.training.method import own_tensors
from compilespec.training.optim import MuonAdamW
from compilespec.training.options import TrainOptions
from compilespec.training.schedule import Schedule

FILE_NAME = "state.pt"
FORMAT = "compilespec training 1"


@dataclass(kw_only=True)
class RunState:
    """The place of a run; the weights and the optimiser's state are beside it in the file."""

    step: int = 0
    place: Place = field(default_factory=Place)
    schedule: Schedule = field(default_factory=Schedule)
    seconds: float = 0.0  # of training alone
    num_tokens: int = 0
    best: float = 0.0  # acceptance length of the saved head
    num_worse: int = 0  # measurements since


def save_state(
    path: Path, run: RunState, options: TrainOptions, drafter: nn.Module, optimizer: MuonAdamW
) -> None:
    """Replace the state.  Raises: CheckpointError; the earlier one is then kept."""
    content = {
        "format": FORMAT,
        "run": dataclasses.asdict(run),
        "options": options.same_run(),
        "drafter": own_tensors(drafter),
        "optimizer": optimizer.state_dict(),
        "random": torch.get_rng_state(),
    }

    def write(part: Path) -> None:
        try:
            torch.save(content, part)
        except RuntimeError as error:  # torch's own writer says so when the disk is full
            raise OSError(str(error).splitlines()[0]) from error

    replace(path, write)


def load_state(path: Path) -> dict[str, Any]:
    """Load the state that `save_state` wrote.  Raises: CheckpointError."""
    try:
        content: dict[str, Any] = torch.load(path, weights_only=True)
        known = content["format"] == FORMAT
    except Exception as error:  # damaged files raise any error in torch
        raise CheckpointError(
            f"{path} cannot be read ({type(error).__name__}); expected the state of a run: start "
            "anew in another folder"
        ) from error
    if not known:
        raise CheckpointError(f"{path}: expected {FORMAT!r}, got {content['format']!r}")
    return content


def restore(
    content: dict[str, Any], options: TrainOptions, drafter: nn.Module, optimizer: MuonAdamW
) -> RunState:
    """Bring drafter, optimiser and random numbers to where the run stopped.

    Raises: InvalidOption for another run's state, CheckpointError for another drafter's tensors.
    """
    for name, value in options.same_run().items():
        if (was := content["options"].get(name, value)) != value:
            raise InvalidOption(
                f"{name}={value!r}, and the run to resume began with {was!r}: give that, or "
                "another output folder"
            )
    mine = own_tensors(drafter)
    if {n: t.shape for n, t in mine.items()} != {n: t.shape for n, t in content["drafter"].items()}:
        raise CheckpointError(
            "the run to resume trained a drafter of other sizes: give its model and its data, or "
            "another output folder"
        )
    with torch.no_grad():
        for name, tensor in mine.items():
            tensor.copy_(content["drafter"][name])
    optimizer.load_state_dict(content["optimizer"])
    torch.set_rng_state(content["random"])
    run = dict(content["run"])
    return RunState(
        **{**run, "place": Place(**run["place"]), "schedule": Schedule(**run["schedule"])}
    )
