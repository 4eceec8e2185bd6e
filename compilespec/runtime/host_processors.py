"""A request's logits processor on the host: called in the middle of its steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from compilespec.errors import ProcessorFailed
from compilespec.ops import host_process


class HostProcessor:
    """Hands a request's function the tokens so far and their logits, a row of the window at a time.

    An error in it is kept in `error` and ends the request after the step; the tokens of that step
    are dropped.

    Args:
        function: takes the tokens so far and their logits [V], and returns logits [V].
        owner: whose function it is, for messages.
        tokens: returns the request's tokens so far, prompt included.
    """

    def __init__(
        self, function: Callable[..., Any], *, owner: str, tokens: Callable[[], Sequence[int]]
    ) -> None:
        self._function, self._owner, self._tokens = function, owner, tokens
        self.error: ProcessorFailed | None = None
        self.handle = host_process.register(self)

    def close(self) -> None:
        host_process.release(self.handle)

    def __call__(self, drafts: list[list[int]], logits_SV: Tensor) -> Tensor:
        """The window's logits [S, V], changed, each row after its drafts; unchanged after a
        failure.
        """
        prefix = self._tokens()
        rows = []
        try:
            for own, logits_V in zip(drafts, logits_SV, strict=True):
                rows.append(self._row([*prefix, *own], logits_V.clone()))
        except ProcessorFailed as error:
            self.error = error
            return logits_SV
        return torch.stack(rows)

    def _row(self, tokens: list[int], logits_V: Tensor) -> Tensor:
        name = getattr(self._function, "__name__", type(self._function).__name__)
        where = f"the logits processor {name} ({self._owner})"
        shape, dtype = logits_V.shape, logits_V.dtype
        try:
            changed: Any = self._function(tokens, logits_V)
        except Exception as error:
            message = (str(error).splitlines() or [""])[0]
            raise ProcessorFailed(f"{where} raised {type(error).__name__}: {message}") from error
        if not isinstance(changed, Tensor) or changed.shape != shape:
            got = list(changed.shape) if isinstance(changed, Tensor) else type(changed).__name__
            raise ProcessorFailed(f"{where} must return logits {list(shape)}; it returned {got}")
        return changed.to(device="cpu", dtype=dtype)
