"""Reading drafter checkpoints: the files (`tracing.checkpoint_files`), and strict loading.

A wrongly loaded drafter only lowers acceptance; the output stays right.  So loading is strict: a
tensor that is missing, unexpected, misshapen or of another kind is an error that lists it.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from compilespec.errors import CheckpointError
from compilespec.tracing.checkpoint_files import (
    drop_training_only,
    listed,
    read_config,
    read_tensors,
    tensor_names,
)

__all__ = ["drop_training_only", "load_strict", "read_config", "read_tensors", "tensor_names"]


def load_strict(module: nn.Module, tensors: Mapping[str, Tensor], *, source: str) -> None:
    """Assign every one of `tensors` to a parameter or persistent buffer of `module`.

    Args:
        module: may live on the meta device; its tensors are replaced.  Of their dtype only the kind
            counts: floating point or not.
        tensors: name -> tensor, named as in `module.state_dict()`.
        source: where the tensors were read, for the message.
    Raises:
        CheckpointError: tensors missing, unexpected, misshapen or of the wrong kind; one line that
            lists them.
    """
    expected = module.state_dict()
    both = sorted(expected.keys() & tensors.keys())
    misshapen = [
        f"{name} (expected {list(expected[name].shape)}, got {list(tensors[name].shape)})"
        for name in both
        if expected[name].shape != tensors[name].shape
    ]
    mistyped = [
        f"{name} (expected {_kind(expected[name])}, got {tensors[name].dtype})"
        for name in both
        if _kind(expected[name]) != _kind(tensors[name])
    ]
    problems = [
        f"{kind}: {listed(names)}"
        for kind, names in (
            ("missing", sorted(expected.keys() - tensors.keys())),
            ("unexpected", sorted(tensors.keys() - expected.keys())),
            ("wrong shape", misshapen),
            ("wrong dtype", mistyped),
        )
        if names
    ]
    if problems:
        raise CheckpointError(
            f"{source}: {'; '.join(problems)}. Compare config.json with the tensors in the "
            "checkpoint"
        )
    module.load_state_dict(dict(tensors), strict=True, assign=True)


def _kind(tensor: Tensor) -> str:
    return "floats" if tensor.is_floating_point() else "integers"
