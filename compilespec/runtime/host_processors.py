"""A request's logits processor on the host: called in the middle of its steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from compilespec.errors import ProcessorFailed
from compilespec.ops import host_process

if TYPE_CHECKING:
    from compilespec.runtime.request import Request


class HostProcessor:
    """Hands a request's function the tokens so far and their logits, a row of the window at a time.

    What goes wrong in it is kept in `error`, and ends the request once the step is over; the
    tokens of that step are dropped.
    """

    def __init__(self, request: Request) -> None:
        self._request = request
        self.error: ProcessorFailed | None = None
        self.handle = host_process.register(self)

    def close(self) -> None:
        host_process.release(self.handle)

    def __call__(self, drafts: list[int], logits_SV: Tensor) -> Tensor:
        """The window's logits [S, V], changed; as they are after a failure."""
        prefix = [*self._request.prompt_token_ids, *self._request.output_token_ids]
        rows = []
        try:
            for index, logits_V in enumerate(logits_SV):
                rows.append(self._row([*prefix, *drafts[:index]], logits_V.clone()))
        except ProcessorFailed as error:
            self.error = error
            return logits_SV
        return torch.stack(rows)

    def _row(self, tokens: list[int], logits_V: Tensor) -> Tensor:
        function = self._request.params.logits_processor
        assert function is not None
        name = getattr(function, "__name__", type(function).__name__)
        where = f"the logits processor {name} (request {self._request.id})"
        shape, dtype = logits_V.shape, logits_V.dtype
        try:
            changed: Any = function(tokens, logits_V)
        except Exception as error:
            message = (str(error).splitlines() or [""])[0]
            raise ProcessorFailed(f"{where} raised {type(error).__name__}: {message}") from error
        if not isinstance(changed, Tensor) or changed.shape != shape:
            got = list(changed.shape) if isinstance(changed, Tensor) else type(changed).__name__
            raise ProcessorFailed(f"{where} must return logits {list(shape)}; it returned {got}")
        return changed.to(device="cpu", dtype=dtype)
