"""One captured bucket, and what it checks before it is replayed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compilespec.cudagraphs.report import GraphKey
from compilespec.errors import StaleGraphInput


@dataclass(frozen=True)
class Signature:
    """The facts of an input that a graph depends on."""

    address: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> Signature:
        return cls(
            tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device
        )

    def difference(self, other: Signature) -> str:
        """The difference to another input in words; empty if there is none."""
        pairs = [
            ("device", self.device, other.device),
            ("dtype", self.dtype, other.dtype),
            ("shape", list(self.shape), list(other.shape)),
            ("strides", self.stride, other.stride),
            ("address", hex(self.address), hex(other.address)),
        ]
        return "; ".join(
            f"expected {word} {mine}, got {its}" for word, mine, its in pairs if mine != its
        )


class Recording:
    """Replays one bucket.

    The outputs stand at fixed addresses that all buckets of the phase share: they are valid until
    the phase's next call.
    """

    def __init__(
        self,
        *,
        key: GraphKey,
        steps: Sequence[Callable[[], None]],
        num_graphs: int,
        outputs: Sequence[Tensor],
        names: Sequence[str],
        inputs: Sequence[Tensor],
    ) -> None:
        self.key = key
        self.num_graphs = num_graphs
        self.outputs = outputs
        self.num_replays = 0
        self._steps = tuple(steps)
        self._names, self._inputs = tuple(names), tuple(inputs)
        self._signatures = tuple(map(Signature.of, inputs))

    def replay(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Run the bucket again over the tensors it was captured with.

        Raises: StaleGraphInput when one of `inputs` has another address, shape, dtype or device.
        """
        for index, (tensor, known, old) in enumerate(
            zip(inputs, self._inputs, self._signatures, strict=True)
        ):
            is_known = tensor is known and tensor.data_ptr() == old.address
            if not is_known and Signature.of(tensor) != old:
                self._refuse(self._names[index], tensor, old)
        with torch.no_grad():  # operators between pieces read the model's own parameters
            for step in self._steps:
                step()
        self.num_replays += 1
        return self.outputs

    def _refuse(self, name: str, tensor: Tensor, old: Signature) -> None:
        raise StaleGraphInput(
            f"{self.key}: input {name} is not the one that was captured "
            f"({old.difference(Signature.of(tensor))}); write new values into the captured tensor "
            f"with copy_(), or compile again"
        )
