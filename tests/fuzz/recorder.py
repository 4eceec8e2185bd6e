"""What the engine was given and what it launched, noted at the scheduler's doors."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Any, Literal

from compilespec.runtime.engine import Engine
from compilespec.runtime.request import Request


@dataclass(frozen=True)
class Event:
    """A call of the program that names a request."""

    kind: Literal["step", "replay"]
    count: int  # a step's K, or the backlog
    num_preemptions: int  # of the request, so far
    num_prefilled: int  # tokens it had when it was admitted last

    def __repr__(self) -> str:
        return f"{self.kind} {self.count}" + f" (preempted {self.num_preemptions})" * bool(
            self.num_preemptions
        )


class Recorder:
    """All requests of an engine from here to `close`, and by request its steps and replays."""

    def __init__(self, engine: Engine) -> None:
        self.requests: list[Request] = []
        self.events: dict[Request, list[Event]] = defaultdict(list)
        self.num_decodes_by_k: Counter[int] = Counter()
        self.before = engine.stats()
        self._scheduler: Any = engine._scheduler
        self._executor: Any = engine._executor
        self._most = engine.geometry.config.num_draft_tokens
        self._add, self._scheduler.add = self._scheduler.add, self._on_add
        self._decode, self._executor.launch_decode = self._executor.launch_decode, self._on_decode
        self._catch_up, self._executor.catch_up = self._executor.catch_up, self._on_catch_up

    def close(self) -> None:
        del self._scheduler.add, self._executor.launch_decode, self._executor.catch_up

    def _on_add(self, request: Request) -> None:
        self.requests.append(request)
        self._add(request)

    def _on_decode(self, rows: list[int], num_draft_tokens: int | None = None) -> Any:
        count = self._most if num_draft_tokens is None else num_draft_tokens
        self.num_decodes_by_k[count] += 1
        self._note("step", rows, [count] * len(rows))
        return self._decode(rows, num_draft_tokens)

    def _on_catch_up(self, rows: list[int], backlogs: list[int]) -> None:
        self._note("replay", rows, backlogs)
        self._catch_up(rows, backlogs)

    def _note(self, kind: Literal["step", "replay"], rows: list[int], counts: list[int]) -> None:
        owners = {request.row: request for request in self._scheduler.line.running}
        for row, count in zip(rows, counts, strict=True):
            request = owners[row]
            length = len(request.prefill_token_ids)
            self.events[request].append(Event(kind, count, request.num_preemptions, length))
