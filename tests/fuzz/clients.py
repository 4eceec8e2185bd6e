"""The engine on its thread: clients in threads, and in an event loop beside them."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from compilespec.runtime.engine_thread import EngineThread
from compilespec.runtime.ticket import Ticket
from tests.fuzz.direct import Seen, load_again
from tests.fuzz.orders import Order

WAIT_SECONDS = 120  # far more than any of it takes
NUM_THREADS = 3
IN_A_LOOP = ("wait", "async")


class ClientsHang(AssertionError):
    """Readers that wait for what never comes."""


def drive(
    server: EngineThread,
    orders: Sequence[Order],
    draw: random.Random,
    adapters: Mapping[str, Path],
) -> list[Seen]:
    """All orders, some in threads and some in an event loop, while adapters are loaded again;
    returns when all are over.
    """
    seen, errors = list[Seen](), list[BaseException]()
    looped = [order for order in orders if order.way in IN_A_LOOP]
    others = [order for order in orders if order.way not in IN_A_LOOP]

    def guarded(serve: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            try:
                serve()
            except BaseException as error:
                errors.append(error)

        return run

    jobs = [lambda: asyncio.run(_in_loop(server, looped, seen))]
    for number in range(NUM_THREADS):
        share, pause = others[number::NUM_THREADS], random.Random(draw.getrandbits(32))
        jobs.append(lambda share=share, pause=pause: _in_thread(server, share, pause, seen))
    if adapters:
        turns = random.Random(draw.getrandbits(32))
        jobs.append(lambda: _load_often(server, adapters, turns))
    threads = [threading.Thread(target=guarded(job), daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + WAIT_SECONDS
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if errors:
        raise errors[0]
    if any(thread.is_alive() for thread in threads):
        left = {order.params.seed for order in orders} - {one.order.params.seed for one in seen}
        raise ClientsHang(
            f"after {WAIT_SECONDS} s no end of: "
            + "; ".join(str(order) for order in orders if order.params.seed in left)
        )
    return seen


def _load_often(server: EngineThread, adapters: Mapping[str, Path], draw: random.Random) -> None:
    for _ in range(20):
        load_again(server, adapters, draw)
        time.sleep(draw.choice((0.0, 0.01, 0.05)))


def _in_thread(
    server: EngineThread, orders: Sequence[Order], draw: random.Random, seen: list[Seen]
) -> None:
    """Submits some at once, then reads them one after the other."""
    queue = list(orders)
    while queue:
        batch = [queue.pop() for _ in range(min(len(queue), draw.randint(1, 4)))]
        tickets = [
            None
            if order.way == "generate"
            else server.submit(order.prompt, order.params, priority=order.priority)
            for order in batch
        ]
        for order, ticket in zip(batch, tickets, strict=True):
            seen.append(_read(server, order, ticket))


def _read(server: EngineThread, order: Order, ticket: Ticket | None) -> Seen:
    if ticket is None:
        return Seen(order=order, outputs=server.generate([order.prompt], order.params))
    if order.way == "result":
        return Seen(order=order, outputs=[ticket.result(WAIT_SECONDS)])
    deltas: list[Any] = []
    for delta in ticket:
        deltas.append(delta)
        if len(deltas) == order.leave_after:
            if order.leaves == "abandon":
                break
            if order.leaves == "abort":
                ticket.abort()
    return Seen(order=order, outputs=[ticket.result(WAIT_SECONDS)], deltas=deltas)


async def _in_loop(server: EngineThread, orders: Sequence[Order], seen: list[Seen]) -> None:
    async def read(order: Order) -> None:
        ticket = server.submit(order.prompt, order.params, priority=order.priority)
        if order.way == "wait":
            seen.append(Seen(order=order, outputs=[await ticket.wait()]))
            return
        deltas: list[Any] = []
        async with contextlib.aclosing(aiter(ticket)) as stream:  # type: ignore[type-var]
            async for delta in stream:
                deltas.append(delta)
                if len(deltas) == order.leave_after:
                    if order.leaves == "abandon":
                        break
                    if order.leaves == "abort":
                        ticket.abort()
        seen.append(Seen(order=order, outputs=[await ticket.wait()], deltas=deltas))

    await asyncio.gather(*(read(order) for order in orders))
