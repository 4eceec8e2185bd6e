"""The engine driven by one thread: submit and step, generate, streams that are left."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from compilespec.errors import InvalidRequest
from compilespec.runtime.engine import Engine
from compilespec.runtime.engine_thread import EngineThread
from compilespec.runtime.outputs import Delta, GenerationOutput
from compilespec.runtime.request import Request
from tests.fuzz.orders import Order

SPARE = "spare"  # an adapter that no request names


@dataclass(kw_only=True)
class Seen:
    """What a reader got."""

    order: Order
    outputs: list[GenerationOutput] | None = None  # None: it left, and saw none
    deltas: list[Delta] | None = None  # None: it asked for the result alone


@dataclass(kw_only=True, eq=False)
class _Live:
    """A request, or a stream, that is not over."""

    order: Order
    request: Request | None = None
    stream: Generator[Delta, None, None] | None = None
    age: int = 0
    deltas: list[Delta] = field(default_factory=list)


def drive(
    engine: Engine, orders: Sequence[Order], draw: random.Random, adapters: Mapping[str, Path]
) -> list[Seen]:
    """Orders come at random moments, and adapters again; returns when all are over."""
    queue, live, seen = list(reversed(orders)), list[_Live](), list[Seen]()
    rate = draw.choice((0.1, 0.4, 0.9))
    while queue or live:
        while queue and draw.random() < rate:
            _start(engine, queue, draw, live, seen)
        if engine.has_work:
            engine.step()
        if adapters and draw.random() < 0.1:
            load_again(engine, adapters, draw)
        for one in list(live):
            ended = _read_stream(one, draw) if one.stream else _read_request(engine, one, draw)
            if ended is not None:
                live.remove(one)
                seen.append(ended)
    return seen


def load_again(
    engine: Engine | EngineThread, adapters: Mapping[str, Path], draw: random.Random
) -> None:
    """Load an adapter in its own place, or one that nobody asks for, or drop that one."""
    name = draw.choice((*adapters, SPARE, SPARE))
    files = adapters.get(name) or draw.choice([*adapters.values()])
    with contextlib.suppress(InvalidRequest):  # every place is taken, or there is none to drop
        if name == SPARE and draw.random() < 0.5:
            engine.drop_adapter(name)
        else:
            engine.load_adapter(name, files)


def _start(
    engine: Engine, queue: list[Order], draw: random.Random, live: list[_Live], seen: list[Seen]
) -> None:
    order = queue.pop()
    if order.way == "stream":
        live.append(_Live(order=order, stream=engine.stream([order.prompt], order.params)))
    elif order.way == "generate":
        batch = [order]
        while queue and queue[-1].way == "generate" and draw.random() < 0.7:
            batch.append(queue.pop())
        outputs = engine.generate([o.prompt for o in batch], [o.params for o in batch])
        for one in batch:
            count = one.params.n
            seen.append(Seen(order=one, outputs=outputs[:count]))
            outputs = outputs[count:]
    else:
        request = engine.submit(order.prompt, order.params, priority=order.priority)
        live.append(_Live(order=order, request=request))


def _read_request(engine: Engine, one: _Live, draw: random.Random) -> Seen | None:
    assert one.request is not None
    order, request = one.order, one.request
    one.age += 1
    if order.leaves and one.age >= order.leave_after:
        engine.abort(request)
    if order.way == "quiet":
        return Seen(order=order, outputs=[request.output()]) if request.finished else None
    if not request.finished and draw.random() < 0.3:
        return None  # this reader is late
    delta = engine.take_delta(request)
    if delta is not None:
        one.deltas.append(delta)
    if not request.finished:
        return None
    return Seen(order=order, outputs=[request.output()], deltas=one.deltas)


def _read_stream(one: _Live, draw: random.Random) -> Seen | None:
    """Some steps of the stream, which drive all the others as well."""
    assert one.stream is not None
    for _ in range(draw.choice((0, 1, 1, 3))):
        if one.order.leaves and len(one.deltas) >= one.order.leave_after:
            one.stream.close()
            return Seen(order=one.order, deltas=one.deltas)
        delta = next(one.stream, None)
        if delta is None:
            outputs: list[Any] = sorted(
                ((d.index, d.output) for d in one.deltas if d.output is not None),
                key=lambda pair: pair[0],
            )
            return Seen(order=one.order, outputs=[o for _, o in outputs], deltas=one.deltas)
        one.deltas.append(delta)
    return None
