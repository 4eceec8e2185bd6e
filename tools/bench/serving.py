"""What HTTP costs: the same requests to an engine's thread and to the server over it, by turns.

Both are one process, which this one asks: for its own run of the requests, or over HTTP, as 8
clients that stream or wait for whole answers.  The clients count on the same cores, so that they do
as little as they can.  Beside the time of the clock there is the processor time of the process that
has the engine: where a machine has other work, that is the figure to look at.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from tools.bench import report
from tools.bench.measure import quantiles
from tools.bench.prompts import load_prompts

ROOT = Path(__file__).resolve().parents[2]
REPEATS = 3  # of every prompt in a run
MAX_LOSS = 0.2  # of throughput, where clients share the engine's cores
WAYS = ("engine", "whole", "streams")


def run(options: argparse.Namespace, console: Console) -> int:
    """Returns 1 where streams lose more than `MAX_LOSS`, else 0."""
    clients = max(options.batch)
    result: dict[str, Any] = {"benchmark": "serving", **report.environment(), "specs": {}}
    for spec in ("none", "eagle3"):
        if options.only and options.only not in spec:
            continue
        job = {
            "model": options.model, "spec": spec, "clients": clients, "threads": options.threads,
            "backend": options.backend, "num_prompts": options.num_prompts,
            "max_new_tokens": options.max_new_tokens,
        }  # fmt: skip
        console.print(f"{spec}: compiling")
        result["specs"][spec] = {"job": job, **_summary(_measure(job, options.rounds))}
    _print(console, result)
    console.print(f"written to {report.write_json(options.name, result)}")
    losses = [one["ways"]["streams"]["loss"] for one in result["specs"].values()]
    return int(max(losses) > MAX_LOSS)


def _measure(job: dict[str, Any], rounds: int) -> dict[str, list[dict[str, float]]]:
    """Runs of every way."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tools.bench.serving", json.dumps(job)]
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env, cwd=ROOT
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        ask, answers = child.stdin, child.stdout

        def told(word: str) -> Any:
            print(word, file=ask, flush=True)
            return json.loads(answers.readline())

        port = told("port")
        for number in range(rounds + 1):
            for way in WAYS:
                before = told("cpu")
                if way == "engine":
                    one = told("run")
                else:
                    one = asyncio.run(_over_http(port, job, is_stream=way == "streams"))
                one["cpu_s"] = told("cpu") - before
                if number:  # the first round warms up
                    found[way].append(one)
        ask.close()
    if len({one["num_tokens"] for runs in found.values() for one in runs}) != 1:
        raise SystemExit("the ways gave other numbers of tokens; nothing was measured")
    return found


async def _over_http(port: int, job: dict[str, Any], *, is_stream: bool) -> dict[str, float]:
    """All requests, as many at once as there are clients."""
    bodies = iter([_body(job, prompt, is_stream=is_stream) for prompt in _prompts(job)])
    counts = list[int]()

    async def client() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**24)
        for body in bodies:
            head = (
                "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                f"Content-Length: {len(body)}\r\n\r\n"
            )
            writer.write(head.encode() + body)
            counts.append(await _num_tokens(reader))
        writer.close()

    start = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(job["clients"])))
    return {"seconds": time.perf_counter() - start, "num_tokens": sum(counts)}


async def _num_tokens(reader: asyncio.StreamReader) -> int:
    """Read an answer; of a stream, only its last event is looked at."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    if not head.startswith(b"http/1.1 200"):
        raise SystemExit(f"the server refused a request: {head.decode()}")
    if b"content-length: " in head:
        size = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
        text = await reader.readexactly(size)
    else:
        text = await reader.readuntil(b"\r\n0\r\n\r\n")
    return int(text.rpartition(b'"completion_tokens":')[2].partition(b",")[0])


def _body(job: dict[str, Any], prompt: str, *, is_stream: bool) -> bytes:
    asked: dict[str, Any] = {
        "prompt": prompt, "max_tokens": job["max_new_tokens"], "temperature": 0,
        "ignore_eos": True, "stream": is_stream,
    }  # fmt: skip
    if is_stream:
        asked["stream_options"] = {"include_usage": True}
    return json.dumps(asked).encode()


def _prompts(job: dict[str, Any]) -> list[str]:
    return list(load_prompts(job["num_prompts"]).values()) * REPEATS


def _summary(found: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Speeds; the loss is the median over rounds, against the engine's run of the same round."""
    engine = found["engine"]
    ways = {}
    for way, runs in found.items():
        pairs = list(zip(engine, runs, strict=True))
        ways[way] = {
            "tokens_per_s": quantiles([one["num_tokens"] / one["seconds"] for one in runs]),
            "cpu_us_per_token": quantiles([one["cpu_s"] / one["num_tokens"] * 1e6 for one in runs]),
            "loss": statistics.median(1 - a["seconds"] / b["seconds"] for a, b in pairs),
            "more_cpu": statistics.median(b["cpu_s"] / a["cpu_s"] - 1 for a, b in pairs),
        }
    return {"ways": ways, "runs": found}


def _print(console: Console, result: dict[str, Any]) -> None:
    columns = ("spec", "way", "tokens/s", "lost", "CPU us a token", "more")
    rows = [
        (spec, way, f"{one['tokens_per_s']['p50']:.0f}", f"{one['loss']:.1%}",
         f"{one['cpu_us_per_token']['p50']:.0f}", f"{one['more_cpu']:.1%}")
        for spec, entry in result["specs"].items()
        for way, one in entry["ways"].items()
    ]  # fmt: skip
    report.print_table(console, "requests to the engine's thread and over HTTP", columns, rows)


def child(job: dict[str, Any]) -> None:
    """The measured process: serves, and does what lines of its input say until they end."""
    import torch

    import compilespec
    from compilespec.serving import ServerOptions, create_app
    from compilespec.serving.options import Binding
    from compilespec.serving.process import listen, make_server, prefer_short_pauses

    torch.set_num_threads(job["threads"])
    engine = compilespec.compile(
        job["model"], job["spec"], max_batch_size=job["clients"], backend=job["backend"],
        enable_prefix_caching=False,
    )  # fmt: skip
    app = create_app(engine, ServerOptions(max_waiting=None))
    binding = Binding(port=0, drain_timeout_s=1)
    listener = listen(binding)
    server = make_server(app, binding)
    prefer_short_pauses()
    calls: dict[str, Callable[[], Any]] = {
        "port": lambda: listener.getsockname()[1],
        "cpu": _cpu_s,
        "run": lambda: _generate(app.state.service.thread, job),
    }

    def obey() -> None:
        for line in sys.stdin:
            print(json.dumps(calls[line.strip()]()), flush=True)
        server.handle_exit(15, None)

    threading.Thread(target=obey, daemon=True).start()
    asyncio.run(server.serve(sockets=[listener]))


def _generate(thread: Any, job: dict[str, Any]) -> dict[str, float]:
    from compilespec import SamplingParams

    params = SamplingParams(max_new_tokens=job["max_new_tokens"], ignore_eos=True)
    start = time.perf_counter()
    outputs = thread.generate(_prompts(job), params)
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "num_tokens": sum(len(one.token_ids) for one in outputs)}


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    child(json.loads(sys.argv[1]))
