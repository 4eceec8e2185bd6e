"""A call's tokens on their way from the device to the host."""

from __future__ import annotations

import torch
from torch import Tensor

from compilespec.cudagraphs.staging import pinned_like
from compilespec.passes.splice.evidence import Evidence, read_outcome
from compilespec.program import PAD


class Launched:
    """The tokens of a call on their way to the host; the call's own outputs may be overwritten."""

    def __init__(
        self,
        emitted_BS: Tensor,
        num_emitted_B: Tensor,
        num_rows: int,
        *,
        has_evidence: bool = False,
    ) -> None:
        """Args: has_evidence: the numbers are those of `outcome_B`, see `evidence.read_outcome`."""
        results = (emitted_BS[:num_rows], num_emitted_B[:num_rows])
        self._has_evidence = has_evidence
        self.evidence: list[Evidence] = []  # the evidence of each row, once it was read
        self._ready: torch.cuda.Event | None = None
        if emitted_BS.is_cuda:
            self._pinned = [pinned_like(result) for result in results]
            for pinned, result in zip(self._pinned, results, strict=True):
                pinned.copy_(result, non_blocking=True)
            self._ready = torch.cuda.Event()
            self._ready.record(torch.cuda.current_stream(emitted_BS.device))
        else:  # there already
            self._emitted, self._counts = results[0].tolist(), results[1].tolist()

    def read(self) -> list[list[int]]:
        """Each row's tokens, once they are there.  PAD is no token: it fills the place of an
        unfinished prompt, and every place of a row whose logits held NaN.
        """
        if self._ready is not None:
            self._ready.synchronize()
            self._emitted, self._counts = (pinned.tolist() for pinned in self._pinned)
        if self._has_evidence:
            outcomes = [read_outcome(outcome) for outcome in self._counts]
            self._counts = [count for count, _ in outcomes]
            self.evidence = [evidence for _, evidence in outcomes]
        return [
            [token for token in tokens[:count] if token != PAD]
            for tokens, count in zip(self._emitted, self._counts, strict=True)
        ]
