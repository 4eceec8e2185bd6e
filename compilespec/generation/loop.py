"""Runs the rows of a call, and asks its stopping criteria after every token."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from compilespec.generation.call import Call
from compilespec.runtime.engine import Engine
from compilespec.runtime.request import Request
from compilespec.runtime.sampling_params import SamplingParams


def generate_rows(engine: Engine, call: Call, params: Sequence[SamplingParams]) -> list[list[int]]:
    """The new tokens of each row, without padding.

    Raises: SpecError, any error of a criterion; the other rows are aborted then.
    """
    requests: list[Request] = []
    streamer = _Lockstep(call)
    judge = _Judge(call)
    rows = [_Progress(call, index) for index in range(len(call.prompts))]
    try:
        for prompt, its_params in zip(call.prompts, params, strict=True):
            requests.append(engine.submit(prompt, its_params))
        while not _is_done(call, rows):
            engine.step()
            for row, request in zip(rows, requests, strict=True):
                _read(engine, row, request)
            judge.ask(rows)
            for row, request in zip(rows, requests, strict=True):
                if row.is_complete and not request.finished:
                    engine.abort(request)
            streamer.put(rows, judge.num_asked)
    finally:
        for request in requests:
            if not request.finished:
                engine.abort(request)
    if not call.stops_alone:
        length = max(row.stop or 0 for row in rows)
        for row in rows:
            del row.tokens[length:]
    streamer.put(rows, call.max_new_tokens)
    streamer.end()
    return [row.tokens for row in rows]


class _Progress:
    """A row of the call: its tokens, and the length at which it ended: by the engine, if no
    criterion comes before.
    """

    def __init__(self, call: Call, index: int) -> None:
        self.call, self.index = call, index
        self.tokens: list[int] = []
        self.stop: int | None = None
        self.ended = False  # the engine gives it no more tokens

    @property
    def is_complete(self) -> bool:
        return self.stop is not None and (self.ended or self.call.stops_alone)

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens up to the first after which a criterion holds."""
        for token in tokens:
            self.tokens.append(token)
            if self.stop is not None:
                continue
            ids = self.call.row(self.index, self.tokens)
            if any(bool(criterion(ids, None).all()) for criterion in self.call.criteria):
                self.stop = len(self.tokens)
                if self.call.stops_alone:
                    return


class _Judge:
    """Asks criteria that see all rows, of the first token of each, of the second, and so on.

    Rows that are ahead wait for their judgement, and go on meanwhile.
    """

    def __init__(self, call: Call) -> None:
        self._call = call
        self.num_asked = 0  # tokens of each row

    def ask(self, rows: Sequence[_Progress]) -> None:
        """Ask of every token that all rows have."""
        while any(map(self._is_open, rows)) and all(map(self._has_next, rows)):
            self.num_asked += 1
            is_done = self._answers(rows) if self._call.criteria_of_all else [False] * len(rows)
            for row, is_its_end in zip(rows, is_done, strict=True):
                ends_here = row.ended and len(row.tokens) <= self.num_asked
                if (is_its_end or ends_here) and self._is_open(row):
                    row.stop = min(self.num_asked, len(row.tokens))
                    if self._call.stops_alone:
                        del row.tokens[self.num_asked :]

    def _is_open(self, row: _Progress) -> bool:
        return row.stop is None or row.stop > self.num_asked

    def _has_next(self, row: _Progress) -> bool:
        return row.is_complete or row.ended or len(row.tokens) > self.num_asked

    def _answers(self, rows: Sequence[_Progress]) -> list[bool]:
        call, steps = self._call, range(self.num_asked)
        new = [[token_at(row.tokens, step, call.pad) for step in steps] for row in rows]
        ids = torch.cat([call.input_ids, torch.tensor(new).to(call.input_ids)], dim=1)
        done = torch.zeros(len(rows), dtype=torch.bool, device=ids.device)
        for criterion in call.criteria_of_all:
            done = done | criterion(ids, None)
        return list(done.tolist())


def _read(engine: Engine, row: _Progress, request: Request) -> None:
    if row.is_complete:
        return
    delta = engine.take_delta(request, row.index)
    if delta is None:
        return
    row.extend(delta.token_ids)
    if delta.output is not None:
        if delta.output.error is not None:
            raise delta.output.error
        row.ended = True


def _is_done(call: Call, rows: Sequence[_Progress]) -> bool:
    if call.stops_alone:
        return all(row.is_complete for row in rows)
    if any(row.stop is None for row in rows):
        return False
    length = max(row.stop or 0 for row in rows)
    return all(row.ended or len(row.tokens) >= length for row in rows)


class _Lockstep:
    """Hands a streamer one token of each row at a time, as transformers' loop does."""

    def __init__(self, call: Call) -> None:
        self._streamer, self._pad, self._num_put = call.streamer, call.pad, 0

    def put(self, rows: Sequence[_Progress], num_sure: int) -> None:
        """Hand over what all rows have, of the first `num_sure` tokens if a row is not complete."""
        if self._streamer is None:
            return
        longest = max(len(row.tokens) for row in rows)
        lengths = [
            longest
            if row.is_complete and (row.stop or 0) <= num_sure
            else min(len(row.tokens), num_sure)
            for row in rows
        ]
        for step in range(self._num_put, min(lengths)):
            self._streamer.put(
                torch.tensor([token_at(row.tokens, step, self._pad) for row in rows])
            )
            self._num_put += 1

    def end(self) -> None:
        if self._streamer is not None:
            self._streamer.end()


def token_at(tokens: Sequence[int], step: int, pad: int) -> int:
    """The token of a step; padding where the row had ended."""
    return tokens[step] if step < len(tokens) else pad
