"""Two replicas on Ray Serve: one engine's tokens, and what is lost when one of them is killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

import compilespec
from compilespec import SamplingParams
from compilespec.errors import InvalidOption
from tests.support.models import tiny_target

ray = pytest.importorskip("ray")
serve = pytest.importorskip("ray.serve")

ENGINE = {"backend": "eager", "max_seq_len": 128, "max_batch_size": 4, "num_draft_tokens": 3}
PROMPTS = [[5, 6, 7], list(range(20, 53)), [90, 3, 90, 3, 90], [11] * 40]
LONG = 80


class Cluster:
    """Where the application answers, and what one engine says."""

    def __init__(self, url: str, app: Callable[..., Any], said: list[list[int]]) -> None:
        self.url, self.app, self.said = url, app, said

    def client(self) -> httpx2.AsyncClient:
        return httpx2.AsyncClient(base_url=self.url, timeout=120, trust_env=False)

    def wait_for(self, names: int, without: str = "") -> set[str]:
        """The replicas that answer, once there are this many."""
        until, seen = time.monotonic() + 180, set[str]()
        with httpx2.Client(base_url=self.url, timeout=60, trust_env=False) as client:
            while len(seen) < names:
                assert time.monotonic() < until, seen
                with contextlib.suppress(httpx2.TransportError):
                    told = client.get("/health")
                    if told.status_code == 200 and told.headers["x-replica"] != without:
                        seen.add(told.headers["x-replica"])
                time.sleep(0.05)
        return seen


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    from compilespec.serving.ray import build

    folder = tmp_path_factory.mktemp("model")
    tiny_target("llama", num_layers=2).save_pretrained(folder)
    params = SamplingParams(max_new_tokens=LONG, ignore_eos=True)
    with compilespec.compile(str(folder), "ngram", **ENGINE) as engine:
        said = [output.token_ids for output in engine.generate(PROMPTS, params)]

    def app(num_replicas: int = 2) -> Any:
        asked = {"model": str(folder), "spec": "ngram", "compile": ENGINE}
        server = {"model_names": ["tiny"]}
        return build({**asked, "num_replicas": num_replicas, "server": server})

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 * 2**20,
             log_to_driver=False)  # fmt: skip
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(app(), name="compilespec", route_prefix="/")
        yield Cluster(f"http://127.0.0.1:{port}", app, said)
    finally:
        serve.shutdown()
        ray.shutdown()


def body(prompt: list[int], count: int = LONG) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True}  # fmt: skip


async def streamed(client: httpx2.AsyncClient, prompt: list[int]) -> tuple[str, list[int], Any]:
    """Who answered a stream, its tokens, and the error that it ended with."""
    ids, error, last = list[int](), None, ""
    asked = {**body(prompt), "stream": True}
    async with client.stream("POST", "/v1/completions", json=asked) as answer:
        if answer.status_code != 200:
            await answer.aread()
            return answer.headers.get("x-replica", ""), [], answer.json()["error"]
        async for line in answer.aiter_lines():
            last = line or last
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                error = event.get("error", error)
                for choice in event.get("choices", ()):
                    ids += choice["token_ids"]
    assert last == "data: [DONE]"
    return answer.headers["x-replica"], ids, error


async def all_streamed(
    cluster: Cluster, each: int, meanwhile: Callable[[], Any]
) -> list[tuple[int, str, list[int], Any]]:
    """Streams of every prompt, and a call once they are under way."""
    async with cluster.client() as client:
        places = [at for at in range(len(PROMPTS)) for _ in range(each)]
        jobs = [asyncio.ensure_future(streamed(client, PROMPTS[at])) for at in places]
        await asyncio.sleep(0.7)
        await asyncio.to_thread(meanwhile)
        return [(at, *await job) for at, job in zip(places, jobs, strict=True)]


def test_two_replicas_give_one_engines_tokens(cluster: Cluster) -> None:
    names = cluster.wait_for(2)

    async def ask() -> None:
        async with cluster.client() as client:
            whole = [client.post("/v1/completions", json=body(PROMPTS[i % 4])) for i in range(8)]
            answers = await asyncio.gather(*whole, *(streamed(client, one) for one in PROMPTS))
            for at, answer in enumerate(answers[:8]):
                assert answer.json()["choices"][0]["token_ids"] == cluster.said[at % 4]
            for at, (_, ids, error) in enumerate(answers[8:]):
                assert (ids, error) == (cluster.said[at], None)
            who = {answer.headers["x-replica"] for answer in answers[:8]}
            assert who == names
            bad = await client.post("/v1/completions", json={"prompt": [1], "n": "many"})
            assert bad.status_code == 400
            assert bad.json()["error"]["param"] == "n"
            assert (await client.get("/v1/models")).json()["data"][0]["id"] == "tiny"

    asyncio.run(ask())


def test_who_knows_a_prompt_is_asked_again(cluster: Cluster) -> None:
    cluster.wait_for(2)

    async def ask() -> None:
        async with cluster.client() as client:
            for first in range(60, 66):
                prompt = [first] * 64
                who = set()
                for step in range(3):
                    told = await client.post("/v1/completions", json=body([*prompt, step], 2))
                    who.add(told.headers["x-replica"])
                assert len(who) == 1
                assert told.json()["usage"]["prompt_tokens_details"]["cached_tokens"] >= 48

    asyncio.run(ask())


def test_a_client_that_leaves_ends_its_request(cluster: Cluster) -> None:
    async def leave() -> None:
        async with cluster.client() as client:
            asked = {**body([1, 2], 100), "stream": True}
            for _ in range(4):
                async with client.stream("POST", "/v1/completions", json=asked) as answer:
                    async for _ in answer.aiter_lines():
                        break

    asyncio.run(leave())
    until = time.monotonic() + 20
    with httpx2.Client(base_url=cluster.url, timeout=60, trust_env=False) as client:
        open_by_name = dict.fromkeys(cluster.wait_for(2), 1)
        while any(open_by_name.values()):
            assert time.monotonic() < until
            told = client.get("/stats")
            open_by_name[told.headers["x-replica"]] = told.json()["num_open"]


def replica_processes() -> list[int]:
    found = []
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if b"ServeReplica:compilespec:Replica" in place.read_bytes():
                found.append(int(place.parent.name))
    return found


def test_a_killed_replica_costs_its_own_requests_and_is_replaced(cluster: Cluster) -> None:
    names = cluster.wait_for(2)
    process = replica_processes()[0]
    ended = asyncio.run(all_streamed(cluster, 2, lambda: os.kill(process, signal.SIGKILL)))
    lost = {who for _, who, _, error in ended if error is not None}
    assert len(lost) == 1 < len({who for _, who, *_ in ended})
    for at, who, ids, error in ended:
        if who in lost:
            assert error["code"] == "replica_lost"
            assert "send it again" in error["message"]
            assert ids == cluster.said[at][: len(ids)]
        else:
            assert (ids, error) == (cluster.said[at], None)
    assert len(cluster.wait_for(2, without=lost.pop()) - names) == 1


def test_a_replica_that_is_taken_away_ends_what_it_has(cluster: Cluster) -> None:
    cluster.wait_for(2)

    def scale_down() -> None:
        serve.run(cluster.app(1), name="compilespec", route_prefix="/")

    ended = asyncio.run(all_streamed(cluster, 2, scale_down))
    assert len({who for _, who, *_ in ended}) == 2
    assert [(ids, error) for _, _, ids, error in ended] == [
        (cluster.said[at], None) for at, *_ in ended
    ]
    until = time.monotonic() + 60
    while len(replica_processes()) > 1:
        assert time.monotonic() < until
        time.sleep(0.2)


def test_the_config_file_is_one() -> None:
    import yaml
    from ray.serve.schema import ServeDeploySchema

    from compilespec.serving.ray import build

    text = (Path(__file__).resolve().parents[2] / "examples" / "ray_serve.yaml").read_text()
    found = ServeDeploySchema.model_validate(yaml.safe_load(text))
    assert isinstance(build(found.applications[0].args), serve.Application)


def test_options_are_checked_and_handed_on() -> None:
    from compilespec.serving.ray import build
    from compilespec.serving.ray.deploy import Arguments, _engine_options, _server_options

    with pytest.raises(InvalidOption, match="specs"):
        build({"specs": "none"})
    with pytest.raises(InvalidOption, match="max_waitng"):
        build({"server": {"max_waitng": 3}})
    asked = Arguments(compile={"max_batch_size": 5}, autoscaling={"max_replicas": 3})
    told = _engine_options(asked, _server_options(asked))
    assert told["autoscaling_config"] == {"target_ongoing_requests": 5, "max_replicas": 3}
    assert told["max_ongoing_requests"] == 5 + 256
