"""A thousand requests of all kinds from 64 clients, and a SIGTERM in the middle."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx2

from tests.support.fake_executor import toy_decode
from tests.support.live_server import EOS, VOCAB

NUM_REQUESTS, NUM_CLIENTS, MAX_WAITING = 1000, 64, 40
BUSY = {429, 503}
KEY = {"Authorization": "Bearer key"}


class Storm:
    """What clients do, and what came of it."""

    def __init__(self, url: str) -> None:
        self.url, self.seen = url, Counter[str]()
        self.wrong: list[str] = []
        self.is_ending = False
        self.client = httpx2.AsyncClient(
            base_url=url, headers=KEY, timeout=120, trust_env=False,
            limits=httpx2.Limits(max_connections=NUM_CLIENTS + 8),
        )  # fmt: skip

    async def one(self, draw: random.Random) -> None:
        """A request of any kind; what it may not come to is noted."""
        kinds: list[Callable[[random.Random], Awaitable[str]]] = [
            self.whole, self.whole, self.stream, self.stream, self.chat, self.leaver,
            self.slow_reader, self.bad, self.oversized, self.stranger,
        ]  # fmt: skip
        kind = draw.choice(kinds)
        try:
            came = await kind(draw)
        except httpx2.TransportError as error:
            came = "refused" if self.is_ending else f"lost: {error!r}"
        self.seen[f"{kind.__name__}: {came}"] += 1
        if came not in ("right", "busy", "refused"):
            self.wrong.append(f"{kind.__name__}: {came}")

    async def whole(self, draw: random.Random) -> str:
        prompt, count, body = _asked(draw)
        answer = await self.client.post("/v1/completions", json=body)
        if answer.status_code in BUSY:
            return _busy(answer)
        choices = answer.json()["choices"]
        return _judged(prompt, count, [choice["token_ids"] for choice in choices])

    async def stream(self, draw: random.Random, pause_s: float = 0.0) -> str:
        prompt, count, body = _asked(draw)
        outputs: dict[int, list[int]] = {index: [] for index in range(body["n"])}
        async with self.client.stream(
            "POST", "/v1/completions", json={**body, "stream": True}
        ) as answer:
            if answer.status_code in BUSY:
                await answer.aread()
                return _busy(answer)
            ended = False
            async for line in answer.aiter_lines():
                ended = ended or line == "data: [DONE]"
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    if "error" in event:
                        return f"error {event['error']['code']}"
                    for choice in event["choices"]:
                        outputs[choice["index"]] += choice["token_ids"]
                await asyncio.sleep(pause_s)
        return _judged(prompt, count, list(outputs.values())) if ended else "cut"

    async def slow_reader(self, draw: random.Random) -> str:
        return await self.stream(draw, draw.uniform(0, 0.05))

    async def chat(self, draw: random.Random) -> str:
        text = "".join(draw.choices("abc xyz", k=draw.randint(1, 40)))
        count = draw.randint(1, 30)
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": count,
                "return_token_ids": True, "priority": draw.randint(-1, 1)}  # fmt: skip
        answer = await self.client.post("/v1/chat/completions", json=body)
        if answer.status_code in BUSY:
            return _busy(answer)
        prompt = list(f"u:{text}a:".encode())
        return _judged(prompt, count, [answer.json()["choices"][0]["token_ids"]])

    async def leaver(self, draw: random.Random) -> str:
        """Gives up after a moment in any case."""
        *_, body = _asked(draw)
        body |= {"max_tokens": 150, "ignore_eos": True, "stream": draw.random() < 0.5}
        try:
            async with asyncio.timeout(draw.uniform(0, 0.3)):
                await self.client.post("/v1/completions", json=body)
        except TimeoutError:
            pass
        return "right"

    async def bad(self, draw: random.Random) -> str:
        body = draw.choice(
            [b"{", b"[]", b'{"prompt": 7}', b'{"prompt": "x", "n": "many"}', b"\xff"]
        )
        headers = {"Content-Type": "application/json"}
        answer = await self.client.post("/v1/completions", content=body, headers=headers)
        return _refused(answer, 400)

    async def oversized(self, draw: random.Random) -> str:
        prompt = "x" * draw.choice([400, 30_000])
        answer = await self.client.post("/v1/completions", json={"prompt": prompt})
        return _refused(answer, 413 if len(prompt) > 20_000 else 400)

    async def stranger(self, draw: random.Random) -> str:
        """Without the key."""
        answer = await self.client.post(
            "/v1/completions", json={"prompt": "x"}, headers={"Authorization": "Bearer guess"}
        )
        return _refused(answer, 401)


def _asked(draw: random.Random) -> tuple[list[int], int, dict[str, Any]]:
    prompt = [draw.randrange(256) for _ in range(draw.randint(1, 60))]
    count, samples = draw.randint(1, 40), draw.choice([1, 1, 1, 2, 3])
    body = {"prompt": prompt, "max_tokens": count, "n": samples, "return_token_ids": True,
            "temperature": 0}  # fmt: skip
    return prompt, count, body


def _judged(prompt: list[int], count: int, outputs: list[list[int]]) -> str:
    wanted = toy_decode(prompt, count, VOCAB)
    wanted = wanted[: wanted.index(EOS) + 1] if EOS in wanted else wanted
    return "right" if all(output == wanted for output in outputs) else "other tokens"


def _busy(answer: httpx2.Response) -> str:
    return "busy" if int(answer.headers["Retry-After"]) > 0 else "no Retry-After"


def _refused(answer: httpx2.Response, status: int) -> str:
    """What is refused by itself is refused whether the server is busy or not."""
    told = answer.json()["error"]
    if answer.status_code not in (status, *BUSY) or not told["message"]:
        return f"{answer.status_code} {told}"
    return "right"


def _memory_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096 / 2**20


PROBE = """
import http.client, sys, time
connection = http.client.HTTPConnection(sys.argv[1].removeprefix("http://"), timeout=60)
while True:
    started = time.perf_counter()
    connection.request("GET", "/health")
    if connection.getresponse().read() != b'{"status":"ready"}':
        break
    print((time.perf_counter() - started) * 1e3, flush=True)
    time.sleep(0.01)  # often enough that one connection is no twentieth of all
"""


async def _storm(url: str, process: subprocess.Popen[str]) -> tuple[Storm, list[float]]:
    storm, memory = Storm(url), list[float]()
    places = iter(range(NUM_REQUESTS))

    async def client() -> None:
        for number in places:
            if number % 100 == 0:
                memory.append(_memory_mib(process.pid))
            if number == NUM_REQUESTS * 8 // 10:
                storm.is_ending = True
                process.send_signal(signal.SIGTERM)
            await storm.one(random.Random(number))

    async with storm.client:
        await asyncio.gather(*(client() for _ in range(NUM_CLIENTS)))
    return storm, memory


def test_none_is_lost_or_wrong_and_nothing_is_left_behind(capsys: Any) -> None:
    is_idle = os.getloadavg()[0] < len(os.sched_getaffinity(0))  # else others' work is timed, too
    command = [sys.executable, "-m", "tests.support.toy_server", str(MAX_WAITING)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            found = re.search(r"http://\S+", process.stdout.readline())
            assert found is not None
            asking = [sys.executable, "-c", PROBE, found[0]]  # from a process that does only this
            with subprocess.Popen(asking, stdout=subprocess.PIPE, text=True) as probe:
                storm, memory = asyncio.run(_storm(found[0], process))
                assert process.wait(60) == 0
                times_ms = [float(line) for line in probe.communicate(timeout=60)[0].split()]
        finally:
            process.kill()
    with capsys.disabled():
        longest = max(times_ms)
        print(f"\n{dict(storm.seen)}\nhealth: median {statistics.median(times_ms):.0f} ms, "
              f"longest {longest:.0f} ms; MiB: {memory[1]:.0f} to {memory[-3]:.0f}")  # fmt: skip
    assert storm.wrong == []
    assert sum(storm.seen.values()) == NUM_REQUESTS
    assert sum(count for kind, count in storm.seen.items() if kind.endswith("right")) > 500
    usual = statistics.quantiles(times_ms, n=20)[-1]  # the longest is of 64 first connections
    assert usual < (100 if is_idle else 2000)
    assert memory[-3] - memory[2] < 32
