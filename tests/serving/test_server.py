"""The server over the toy program: what clients are given and refused, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import runpy
import socket
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
import torch

from compilespec import SamplingParams
from compilespec.errors import InvalidOption, InvalidRequest
from compilespec.runtime.given_rows import GivenRows
from compilespec.runtime.image_prompts import ReadPrompt
from compilespec.serving import ServerOptions
from compilespec.serving.chat import chat_prompt
from compilespec.serving.events import ClientGone, EventStream
from compilespec.serving.logprobs import TextOffsets
from compilespec.serving.protocol import ChatRequest
from tests.support.adapters import TOY_ADAPTERS, save_toy_adapter
from tests.support.fake_executor import toy_decode
from tests.support.gates import Gate
from tests.support.live_server import EOS, VOCAB, Live, live, toy_engine, toy_tokenizer

HELLO = [{"role": "user", "content": "hello"}]
HELLO_IDS = list(b"u:helloa:")
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
GREEDY = {"temperature": 0, "model": "toy"}


def expected(prompt: list[int], count: int) -> list[int]:
    tokens = toy_decode(prompt, count, VOCAB)
    return tokens[: tokens.index(EOS) + 1] if EOS in tokens else tokens


def events(response: httpx2.Response) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def wait_until(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < until, "it does not come true"
        time.sleep(0.01)


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(toy_engine()) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Live) -> Iterator[httpx2.Client]:
    with server.client() as client:
        yield client


def text_of(ids: list[int]) -> str:
    return str(toy_tokenizer().decode(ids, skip_special_tokens=True))


# --- answers ---


def test_completions_by_the_openai_client(server: Live) -> None:
    prompts = [[1, 2, 3], [77] * 20]
    with server.openai() as client:
        ask = client.completions.create
        whole = ask(model="toy", prompt=prompts, max_tokens=21, temperature=0, n=2,
                    extra_body={"return_token_ids": True})  # fmt: skip
        assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
        for choice, prompt in zip(whole.choices, [p for p in prompts for _ in "ab"], strict=True):
            assert choice.token_ids == expected(prompt, 21)
            assert choice.text == text_of(choice.token_ids)
            assert choice.finish_reason == "length"
        told = whole.usage
        assert (told.prompt_tokens, told.completion_tokens) == (23, 84)
        details = told.completion_tokens_details
        assert details.accepted_prediction_tokens > 0 < details.rejected_prediction_tokens
        assert told.prompt_tokens_details.cached_tokens == 0
        texts = [""] * 4
        ends: dict[int, str] = {}
        stream = ask(model="toy", prompt=prompts, max_tokens=21, temperature=0, n=2, stream=True,
                     stream_options={"include_usage": True})  # fmt: skip
        for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.text
                if choice.finish_reason:
                    ends[choice.index] = choice.finish_reason
            usage = chunk.usage
        assert texts == [choice.text for choice in whole.choices]
        assert ends == dict.fromkeys(range(4), "length")
        assert (usage.prompt_tokens, usage.completion_tokens) == (23, 84)


def test_chat_by_the_openai_client(server: Live) -> None:
    with server.openai() as client:
        ask = client.chat.completions.create
        whole = ask(model="toy", messages=HELLO, max_completion_tokens=30, temperature=0,
                    logprobs=True, extra_body={"return_token_ids": True})  # fmt: skip
        choice = whole.choices[0]
        assert choice.token_ids == expected(HELLO_IDS, 30)
        assert (choice.message.role, choice.message.content) == (
            "assistant", text_of(choice.token_ids),
        )  # fmt: skip
        assert [one.logprob for one in choice.logprobs.content] == [
            -float(token) for token in choice.token_ids
        ]
        chunks = list(ask(model="toy", messages=HELLO, max_tokens=30, temperature=0, stream=True,
                          logprobs=True))  # fmt: skip
        assert chunks[0].choices[0].delta.role == "assistant"
        told = [chunk.choices[0] for chunk in chunks]
        assert "".join(one.delta.content or "" for one in told) == choice.message.content
        logprobs = [entry.logprob for one in told for entry in one.logprobs.content]
        assert logprobs == [one.logprob for one in choice.logprobs.content]
        assert told[-1].finish_reason == choice.finish_reason


def test_what_is_left_open_is_openais_and_the_models(client: httpx2.Client) -> None:
    completion = client.post("/v1/completions", json={"prompt": [5], "temperature": 0}).json()
    assert completion["usage"]["completion_tokens"] == 16
    chat = client.post("/v1/chat/completions", json={"messages": HELLO, "temperature": 0}).json()
    assert chat["usage"]["completion_tokens"] == len(expected(HELLO_IDS, 256 - len(HELLO_IDS)))


def test_fields_of_ours(client: httpx2.Client) -> None:
    body = {**GREEDY, "prompt": [9, 9], "max_tokens": 20, "ignore_eos": True, "priority": 3,
            "num_draft_tokens": 1, "top_k": -1, "mark_drafts": True, "stream": True}  # fmt: skip
    with client.stream("POST", "/v1/completions", json=body) as response:
        marks = [mark for event in events(response) for mark in event["choices"][0]["drafted"]]
    tokens = toy_decode([9, 9], 20, VOCAB)
    spelled = [bytes([t]) if t < 256 else b"" if t == EOS else None for t in tokens]
    assert [bytes(ids) for ids, _ in marks] == [
        s if s is not None else " ä".encode() if t == 257 else "€".encode()[:2]
        for s, t in zip(spelled, tokens, strict=True)
    ]
    assert marks[0][1] is False
    whole = {**body, "stream": False, "stop_token_ids": [tokens[4]]}
    choice = client.post("/v1/completions", json=whole).json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == tokens[4]
    late = client.post("/v1/completions", json={**whole, "deadline_seconds": 1e-9}).json()
    choice = late["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("", "length")
    assert choice["stop_reason"] == "deadline"


def test_echo_and_no_token_at_all(client: httpx2.Client) -> None:
    body = {**GREEDY, "prompt": "abc", "max_tokens": 0, "echo": True, "logprobs": None}
    told = client.post("/v1/completions", json=body).json()
    assert told["choices"][0]["text"] == "abc"
    assert told["choices"][0]["finish_reason"] == "length"
    assert told["usage"]["completion_tokens"] == 0
    body |= {"max_tokens": 3, "prompt": [97, 98]}
    text = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
    assert text == "ab" + text_of(expected([97, 98], 3))
    with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        assert "".join(event["choices"][0]["text"] for event in events(response)) == text


NOTHING: dict[str, tuple[str, dict[str, Any]]] = {
    "null": (CHAT, dict.fromkeys(
        ("functions", "function_call", "audio", "prediction", "verbosity", "web_search_options",
         "stream", "stream_options", "n", "stop", "priority", "compact_json", "guided_json"),
    )),
    "best_of": (COMPLETIONS, {"best_of": 1}),
    "best_of n": (COMPLETIONS, {"n": 3, "best_of": 3}),
    "defaults": (COMPLETIONS, {"suffix": "", "echo": None, "logit_bias": {}, "n": 1}),
    "chat's defaults": (CHAT, {"functions": [], "function_call": "auto", "verbosity": "medium",
                               "tools": [], "tool_choice": "auto", "modalities": ["text"],
                               "parallel_tool_calls": True, "top_logprobs": 0}),
    "stream": (CHAT, {"stream": True, "stream_options": {
        "include_usage": None, "include_obfuscation": False}}),
}  # fmt: skip


@pytest.mark.parametrize("name", NOTHING)
def test_fields_that_ask_for_nothing(client: httpx2.Client, name: str) -> None:
    path, fields = NOTHING[name]
    prompt = {"messages": HELLO} if path == CHAT else {"prompt": "x"}
    answer = client.post(path, json={**prompt, "max_tokens": 1, **fields})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("prompt", ["é€", [0xF0, 0x9F, 0x98, 0x80, 104, 256, 257, 105]])
def test_offsets_are_those_of_characters_in_the_text(prompt: Any) -> None:
    """Where tokens are parts of characters, and special tokens no text."""
    says = "a😀é\u200dz€"
    with live(toy_engine(says)) as server, server.client() as client:
        body = {"prompt": "a:", "max_tokens": 99, "logprobs": 1, "temperature": 0}
        whole = client.post(COMPLETIONS, json=body).json()["choices"][0]
        assert whole["text"] == says
        offsets = whole["logprobs"]["text_offset"]
        sizes = [len(char.encode()) for char in says]
        expected = [at for at, size in enumerate(sizes) for _ in range(size)]
        assert offsets == [*expected, len(says)]  # the last is EOS
        with client.stream("POST", COMPLETIONS, json={**body, "stream": True}) as response:
            told = [event["choices"][0]["logprobs"] for event in events(response)]
        assert [at for one in told for at in one["text_offset"]] == offsets
        spelled = server.service.spelled
    ids = list(prompt.encode()) if isinstance(prompt, str) else prompt
    text = str(toy_tokenizer().decode(ids))
    places = TextOffsets(spelled, text).of(ids)
    known = {at: text[at:] for at in range(len(text))}
    for at, token in zip(places, ids, strict=True):
        char = known[at].encode()
        assert token >= 256 or bytes([token]) in char[: len(known[at][0].encode())]
    assert places == [0, 0, 1, 1, 1] if isinstance(prompt, str) else [0, 0, 0, 0, 1, 2, 7, 9]


def test_an_output_is_shown_in_brief() -> None:
    with toy_engine("Hi.") as engine:
        (output,) = engine.generate("a:")
    assert repr(output) == "GenerationOutput(text='Hi.', num_tokens=4, finish_reason='stop')"


def test_an_answer_that_was_cut_in_thought_may_be_sent_back(server: Live) -> None:
    for thought in ({"reasoning_content": "hm"}, {"reasoning": "hm"}):
        cut = {"role": "assistant", "content": None, **thought}
        prompt = chat_prompt(ChatRequest(messages=[*HELLO, cut, *HELLO]), None)
        assert prompt["messages"][1]["reasoning_content"] == "hm"
        assert server.service.engine.encode(prompt) == list(b"u:helloa:u:helloa:")
    for wrong in ({"role": "assistant", "content": None}, {"role": "user", "reasoning": None}):
        with pytest.raises(InvalidRequest, match="content of message 0"):
            server.service.engine.encode(chat_prompt(ChatRequest(messages=[wrong]), None))


def test_a_prompt_that_is_too_long_has_the_code_that_clients_know(client: httpx2.Client) -> None:
    chat = {"messages": [{"role": "user", "content": "x" * 300}]}
    for path, body in (
        (CHAT, chat), (CHAT, {**chat, "stream": True}), (COMPLETIONS, {"prompt": "x" * 300}),
        (COMPLETIONS, {"prompt": [[1], [1] * 300], "stream": True}),
    ):  # fmt: skip
        answer = client.post(path, json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_the_tokenizer_is_told_as_evaluations_ask() -> None:
    options = ServerOptions(api_keys=("key",))
    with live(toy_engine(), options) as server, server.client() as client:
        assert client.get("/tokenizer_info").status_code == 401
        client.headers["Authorization"] = "Bearer key"
        told = client.get("/tokenizer_info").json()
        assert (told["eos_token"], told["bos_token"], told["pad_token"]) == ("<eos>", None, None)
        assert told["chat_template"] == server.service.tokenizer.chat_template
        assert told["tokenizer_class"] == type(server.service.tokenizer).__name__
        assert "/" not in str({**told, "chat_template": ""})  # no paths of the server
        asked = {"prompt": "<eos>", "add_special_tokens": False}
        assert client.post("/tokenize", json=asked).json()["tokens"] == [EOS]
        assert server.service.created == client.get("/v1/models").json()["data"][0]["created"]
        assert 0 <= time.time() - server.service.created < 600


def test_pages_of_other_origins_may_ask_where_the_server_says_so(server: Live) -> None:
    page = "https://a.example"
    ask = {"Origin": page, "Access-Control-Request-Method": "POST",
           "Access-Control-Request-Headers": "authorization,content-type"}  # fmt: skip
    with server.client() as client:
        assert "Access-Control-Allow-Origin" not in client.get("/", headers=ask).headers
    for origins in ((page, "http://b.example:3000"), ("*",)):
        options = ServerOptions(api_keys=("key",), allowed_origins=origins)
        with live(toy_engine(), options) as other, other.client() as client:
            told = client.options(CHAT, headers=ask)  # without a key, as browsers ask
            assert told.status_code == 200
            assert told.headers["Access-Control-Allow-Headers"] == "authorization,content-type"
            assert "POST" in told.headers["Access-Control-Allow-Methods"]
            for answer in (
                client.get("/health", headers=ask), client.get("/v1/models", headers=ask),
                client.post(CHAT, headers=ask, content=b"x"), told,
            ):  # fmt: skip
                assert answer.headers["Access-Control-Allow-Origin"] in (page, "*")
            assert answer.status_code == 200
            strange = client.get("/health", headers={"Origin": "https://c.example"})
            assert strange.headers.get("Access-Control-Allow-Origin") == (
                "*" if origins == ("*",) else None
            )


def test_a_stop_string_is_named_and_eos_is_not() -> None:
    with live(toy_engine("one two three")) as server, server.client() as client:

        def ask(**fields: Any) -> Any:
            body = {"messages": HELLO, "temperature": 0, **fields}
            return client.post("/v1/chat/completions", json=body).json()["choices"][0]

        ended = ask()
        assert (ended["message"]["content"], ended["finish_reason"]) == ("one two three", "stop")
        assert ended["stop_reason"] is None
        for stop in (" t", ["zzz", " t"]):
            ended = ask(stop=stop)
            assert (ended["message"]["content"], ended["stop_reason"]) == ("one", " t")


def test_no_part_of_an_answer_waits_for_an_acknowledgement(
    server: Live, client: httpx2.Client
) -> None:
    assert client.get("/health").status_code == 200  # the connection is kept
    connections = list(server.server.server_state.connections)
    assert connections
    for connection in connections:
        accepted = connection.transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_models_tokens_stats_and_metrics(server: Live, client: httpx2.Client) -> None:
    assert [one["id"] for one in client.get("/v1/models").json()["data"]] == ["toy"]
    assert client.get("/v1/models/toy").json()["max_model_len"] == 256
    told = client.post("/tokenize", json={"messages": HELLO}).json()
    assert told == {"tokens": HELLO_IDS, "count": len(HELLO_IDS), "max_model_len": 256}
    assert client.post("/tokenize", json={"prompt": "né"}).json()["tokens"] == list("né".encode())
    back = client.post("/detokenize", json={"tokens": list("né".encode())})
    assert back.json() == {"prompt": "né"}
    stats = client.get("/stats").json()
    assert stats["num_open"] == 0
    assert stats["num_free_blocks"] == stats["num_blocks"]
    text = client.get("/metrics").text
    assert "compilespec_verify_steps_total" in text
    assert 'compilespec_http_requests_total{path="/tokenize",status="200"}' in text
    assert "compilespec_open_requests 0.0" in text


# --- refusals ---


BAD: dict[str, tuple[str, Any, int, str]] = {
    "unknown field": (COMPLETIONS, {"prompt": "x", "temprature": 1}, 400, "mean temperature"),
    "vLLM's field": (CHAT, {"messages": HELLO, "guided_json": {}}, 400, "response_format="),
    "nothing": (COMPLETIONS, {}, 400, "^prompt: "),
    "no object": (COMPLETIONS, [1], 400, "expected one JSON object"),
    "no prompt": (COMPLETIONS, {"prompt": ""}, 400, "prompt is empty"),
    "prompt of the wrong kind": (COMPLETIONS, {"prompt": {"a": 1}}, 400, "^prompt"),
    "one of several": (COMPLETIONS, {"prompt": ["x", ""]}, 400, "prompt is empty"),
    "ids that there are not": (COMPLETIONS, {"prompt": [1, 999]}, 400, "from 0 to 258"),
    "too long": (COMPLETIONS, {"prompt": "x" * 300}, 400, "start the server with --max-seq-len"),
    "temperature": (CHAT, {"messages": HELLO, "temperature": -1}, 400, "^temperature: expected"),
    "no tokens": (COMPLETIONS, {"prompt": "x", "max_tokens": 0}, 400, "0 together with echo"),
    "min_tokens": (COMPLETIONS, {"prompt": "x", "min_tokens": 99}, 400, "at most max_tokens"),
    "model": (COMPLETIONS, {"prompt": "x", "model": "gpt"}, 404, "no model 'gpt'; served: toy"),
    "echo": (COMPLETIONS, {"prompt": "x", "echo": True, "logprobs": 1}, 400, "--prompt-logprobs"),
    "best_of": (COMPLETIONS, {"prompt": "x", "best_of": 3}, 400, "best_of.*did you mean n"),
    "suffix": (COMPLETIONS, {"prompt": "x", "suffix": "b"}, 400, "no infilling"),
    "functions": (CHAT, {"messages": HELLO, "functions": [{}]}, 400, "did you mean tools"),
    "audio": (CHAT, {"messages": HELLO, "audio": {}}, 400, "no field 'audio'; leave it out"),
    "too many": (COMPLETIONS, {"prompt": "x", "n": 999}, 400, "send it in parts"),
    "no messages": (CHAT, {"messages": []}, 400, "messages is empty"),
    "image": (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        400,
        "images or sound and the model takes none",
    ),
    "sound": (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "audio", "audio": [0.5]}]}]},
        400,
        "images or sound and the model takes none",
    ),
    "encoded sound": (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
        400,
        "input_audio and videos are not taken",
    ),
    "format": (CHAT, {"messages": HELLO, "response_format": {"type": "xml"}}, 400, "json_schema"),
    "schema": (
        CHAT,
        {"messages": HELLO, "response_format": {"type": "json_schema", "json_schema": {}}},
        400,
        "schema",
    ),
    "regex": (
        CHAT,
        {"messages": HELLO, "response_format": {"type": "regex", "regex": "("}},
        400,
        "response_format: llguidance refuses",
    ),
    "tool": (CHAT, {"messages": HELLO, "tools": [{"type": "x"}]}, 400, "^tools: expected"),
    "choice without tools": (CHAT, {"messages": HELLO, "tool_choice": "required"}, 400, "no tools"),
    "priority": (COMPLETIONS, {"prompt": "x", "priority": "high"}, 400, "^priority: "),
    "prediction": (CHAT, {"messages": HELLO, "prediction": {"type": "content", "content": "x"}},
                   400, "^prediction: spec=.* looks no texts up; start the server with --spec"),
    "parts of a prediction": (
        CHAT,
        {"messages": HELLO, "prediction": {"type": "content", "content": [{"type": "image"}]}},
        400,
        "^prediction: expected",
    ),
    "prompt of two kinds": (COMPLETIONS, {"prompt": ["x", 1]}, 400, "^prompt: expected a text"),
    "top without logprobs": (CHAT, {"messages": HELLO, "top_logprobs": 2}, 400, "^top_logprobs"),
    "no choice": (
        CHAT,
        {"messages": HELLO, "response_format": {"type": "choice", "choice": []}},
        400,
        "^response_format: expected a sequence",
    ),
    "both": ("/tokenize", {"prompt": "x", "messages": HELLO}, 400, "give one of them"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_bodies_are_refused_with_the_cure(
    server: Live, client: httpx2.Client, name: str
) -> None:
    import re

    path, body, status, message = BAD[name]
    answer = client.post(path, json=body)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert re.search(message, error["message"]), error["message"]
    assert "\n" not in error["message"]
    assert not re.search(r"/work|/home|site-packages|Traceback|\.py\b", answer.text)
    assert server.service.thread.health().num_open == 0


@pytest.mark.parametrize("depth", [300, 980])  # Inductor doubles Python's limit of 1,000
def test_what_is_nested_too_deep_is_said_to_be_that(client: httpx2.Client, depth: int) -> None:
    deep = '{"items": ' * depth + "{}" + "}" * depth
    messages = '{"messages": [{"role": "user", "content": "x"}], '
    for fields in (
        f'"tools": [{{"type": "function", "function": {{"name": "f", "parameters": {deep}}}}}]',
        f'"response_format": {{"type": "json_schema", "json_schema": {{"schema": {deep}}}}}',
    ):
        body = f"{messages}{fields}}}".encode()
        answer = client.post(CHAT, content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code == 400
        assert "nested more than 256 levels deep" in answer.json()["error"]["message"]


def test_what_is_no_json_or_no_route(client: httpx2.Client) -> None:
    json_type = {"Content-Type": "application/json"}
    for content in (b"", b"{", b'{"prompt": NaN}', b"[" * 100_000, b'{"prompt": "\xff"}'):
        answer = client.post("/v1/completions", content=content, headers=json_type)
        assert answer.status_code == 400
        assert "no JSON" in answer.json()["error"]["message"]
    assert client.post("/v1/completions", content=b"{}").status_code == 415
    for answer in (
        client.get("/nope"),
        client.get("/v1/completions"),
        client.post("/health", json={}),
    ):
        assert answer.status_code in (404, 405)
        assert answer.json()["error"]["code"] in ("not_found", "method_not_allowed")


def test_errors_by_the_openai_client(server: Live) -> None:
    with server.openai() as client:
        with pytest.raises(openai.BadRequestError, match="--max-seq-len"):
            client.completions.create(model="toy", prompt="x" * 300)
        with pytest.raises(openai.NotFoundError) as raised:
            client.chat.completions.create(model="gpt", messages=HELLO)
        assert raised.value.code == "model_not_found"


def test_without_the_key_nothing_is_learnt() -> None:
    options = ServerOptions(model_names=("toy",), api_keys=("first", "sécond"))
    with live(toy_engine(), options) as server, server.client() as client:
        told = set()
        for path in ("/v1/models", "/metrics", "/stats", "/nope", "/v1/completions", "/docs"):
            for headers in (
                {},
                {"Authorization": "Bearer wrong"},
                {"Authorization": "Basic first"},
            ):
                answer = client.get(path, headers=headers)
                assert answer.status_code == 401
                assert answer.headers["WWW-Authenticate"] == "Bearer"
                told.add(answer.text)
        assert len(told) == 1
        answer = client.post("/v1/completions", json={"prompt": "x"})
        assert (answer.status_code, answer.text) == (401, told.pop())
        assert client.get("/health").json() == {"status": "ready"}
        assert client.get("/").status_code == 200
        key = {"Authorization": "Bearer sécond".encode()}
        assert client.get("/v1/models", headers=key).status_code == 200
        with server.openai("first") as one:
            assert one.models.list().data[0].id == "toy"
        with server.openai("third") as one, pytest.raises(openai.AuthenticationError):
            one.models.list()


def test_a_client_that_would_rather_speak_http2_is_answered(client: httpx2.Client) -> None:
    # What Java's HTTP client sends with its first request.
    headers = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2-Settings": "AAMA"}
    body = {"prompt": [1, 2], "max_tokens": 3}
    assert client.post("/v1/completions", json=body, headers=headers).status_code == 200


def test_sizes_and_times_have_limits() -> None:
    options = ServerOptions(max_body_bytes=200, read_timeout_s=0.2, request_timeout_s=0.3)
    gate = Gate()
    with live(toy_engine(fail=gate), options) as server, server.client() as client:
        large = {"prompt": "x" * 300}
        assert client.post("/v1/completions", json=large).status_code == 413
        pieces = (json.dumps(large)[i : i + 50].encode() for i in range(0, 320, 50))
        kind = {"Content-Type": "application/json"}
        answer = client.post("/v1/completions", content=pieces, headers=kind)  # of unknown length
        assert answer.status_code == 413
        assert "--max-body-bytes" in answer.json()["error"]["message"]
        unread = client.post("/v1/completions", content=b"x" * 2_000_000, headers=kind)
        assert unread.status_code == 413  # read to its end, so that the answer arrives
        with socket.create_connection(server.url.removeprefix("http://").split(":")) as slow:
            slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: "
                         b"application/json\r\nContent-Length: 100\r\n\r\n{")  # fmt: skip
            assert b" 408 " in slow.recv(1000)
        assert client.get("/health", headers={"x": "y" * 40_000}).status_code == 200
        with socket.create_connection(server.url.removeprefix("http://").split(":")) as endless:
            endless.sendall(b"GET /health HTTP/1.1\r\n")
            with contextlib.suppress(OSError):
                for _ in range(1000):
                    endless.sendall(b"x: " + b"y" * 10_000 + b"\r\n")
                pytest.fail("the server takes a head without an end")
            assert endless.recv(1000).startswith(b"HTTP/1.1 400 ")
        answer = client.post("/v1/completions", json={"prompt": "x"})
        assert answer.status_code == 504
        assert "--request-timeout" in answer.json()["error"]["message"]
        with client.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as r:
            assert events(r)[-1]["error"]["code"] == "timeout"
        gate.allow()
        wait_until(lambda: server.service.thread.health().num_open == 0)


HEAD = b"GET /health HTTP/1.1\r\nHost: x\r\n"


@pytest.mark.parametrize("begun", [b"", HEAD, b"\r\n", HEAD + b"\r\n" + HEAD], ids=str)
def test_a_connection_without_a_whole_head_is_closed(begun: bytes) -> None:
    """Though bytes come all the time, and after a request that was answered, too."""
    options = ServerOptions(read_timeout_s=0.3)
    with live(toy_engine(), options) as server:
        address = server.url.removeprefix("http://").split(":")
        with socket.create_connection(address, timeout=0.05) as client:
            client.sendall(begun)
            came, until = b"", time.monotonic() + 10
            with contextlib.suppress(ConnectionError):
                while time.monotonic() < until:
                    with contextlib.suppress(TimeoutError):
                        if not (new := client.recv(1000)):
                            break
                        came += new
                    if begun:
                        client.sendall(b"x")
            assert time.monotonic() < until
        assert came.count(b"HTTP/1.1 200") == begun.count(b"\r\n\r\n")


@pytest.mark.parametrize("seconds", [0.15, 60], ids=["slow", "stalled"])
def test_a_stream_ends_where_the_client_takes_nothing_not_where_it_is_slow(seconds: float) -> None:
    sent, ended = list[bytes](), list[str]()

    async def objects() -> AsyncGenerator[dict[str, Any], None]:
        try:
            for number in range(6):
                yield {"number": number}
        finally:
            ended.append("objects")

    async def receive() -> Any:
        await asyncio.sleep(60)

    async def send(message: Any) -> None:
        await asyncio.sleep(seconds if len(sent) == 2 or seconds < 1 else 0)
        sent.append(message.get("body", b""))

    options = ServerOptions(write_timeout_s=1)
    stream = EventStream(objects(), options, lambda: ended.append("tickets"))
    is_slow = seconds < 1
    began = time.monotonic()
    with contextlib.nullcontext() if is_slow else pytest.raises(ClientGone):
        asyncio.run(stream({"type": "http"}, receive, send))
    assert time.monotonic() - began < 10
    assert sorted(ended) == ["objects", "tickets"]
    assert len(sent) == (9 if is_slow else 2)  # the start, 6 objects, [DONE] and the end


def test_a_full_queue_is_429_with_a_time_to_try_again() -> None:
    gate = Gate()
    options = ServerOptions(max_waiting=0)
    with live(toy_engine(fail=gate), options) as server, server.client() as client:
        with contextlib.ExitStack() as stack:
            body = {"prompt": [1], "max_tokens": 2, "stream": True}
            for _ in range(4):
                stack.enter_context(client.stream("POST", "/v1/completions", json=body))
            answer = client.post("/v1/completions", json=body)
            assert answer.status_code == 429
            assert int(answer.headers["Retry-After"]) >= 1
            assert answer.json()["error"]["code"] == "queue_full"
            assert client.get("/health").json() == {"status": "ready"}  # busy, and well
            gate.allow()
        wait_until(lambda: server.service.thread.health().num_open == 0)
        assert client.post("/v1/completions", json={**body, "stream": False}).status_code == 200


# --- clients that leave, servers that end ---


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_aborts_its_requests(stream: bool) -> None:
    gate = Gate(8)
    with live(toy_engine(fail=gate)) as server:
        thread = server.service.thread
        body = {"prompt": [1], "max_tokens": 200, "n": 2, "stream": stream, "ignore_eos": True}
        with pytest.raises(httpx2.ReadTimeout):
            (_read_one if stream else _give_up)(server, body)
        # the server has seen it, be it that the engine's thread stands at the gate
        wait_until(lambda: bool(thread._to_abort) or thread.health().num_open == 0)
        gate.allow()
        wait_until(lambda: thread.health().num_open == 0)
        stats = thread.stats()
        assert stats.num_emitted < 300
        assert stats.num_free_blocks == stats.num_blocks


def _give_up(server: Live, body: Any) -> None:
    with server.client() as client:
        client.post("/v1/completions", json=body, timeout=0.5)


def _read_one(server: Live, body: Any) -> None:
    with server.client() as client, client.stream("POST", "/v1/completions", json=body) as answer:
        next(answer.iter_lines())
    raise httpx2.ReadTimeout("left")


def test_a_signal_ends_the_server_when_its_requests_have() -> None:
    gate = Gate(2)
    with live(toy_engine(fail=gate)) as server, server.client() as client:
        answers: list[httpx2.Response] = []

        def ask() -> None:
            body = {"prompt": [3], "max_tokens": 30, "temperature": 0, "return_token_ids": True}
            answers.append(httpx2.post(f"{server.url}/v1/completions", json=body, timeout=30,
                                       trust_env=False))  # fmt: skip

        asking = threading.Thread(target=ask)
        asking.start()
        wait_until(lambda: server.service.thread.health().num_open == 1)
        server.stop()
        wait_until(lambda: client.get("/health").status_code == 503)
        assert client.get("/health").json() == {"status": "draining"}
        refused = client.post("/v1/completions", json={"prompt": "x"})
        assert refused.status_code == 503
        assert int(refused.headers["Retry-After"]) > 0
        gate.allow()
        asking.join(20)
        assert answers[0].json()["choices"][0]["token_ids"] == expected([3], 30)
        wait_until(lambda: server.service.thread.health().state == "closed")
        with pytest.raises(httpx2.TransportError):
            wait_until(lambda: client.get("/health").status_code == 0)
        assert not server.server.has_failed


def test_what_runs_longer_than_a_drain_may_is_told_so() -> None:
    gate = Gate(2)
    with live(toy_engine(fail=gate), drain_timeout_s=0.2) as server, server.client() as client:
        body = {"prompt": [3], "max_tokens": 200, "stream": True, "ignore_eos": True}
        with client.stream("POST", "/v1/completions", json=body) as answer:
            server.stop()
            gate.allow(3)
            assert gate.waits.wait(20)
            wait_until(lambda: server.service.thread._is_closing)
            gate.allow()
            assert events(answer)[-1]["error"]["code"] == "stopping"


def test_an_engine_that_fails_ends_the_server_and_a_step_that_fails_does_not() -> None:
    faults = [RuntimeError("secret path /etc/x")]

    def fail(phase: str) -> None:
        if faults:
            raise faults.pop()

    with live(toy_engine(fail=fail)) as server, server.client() as client:
        answer = client.post("/v1/completions", json={"prompt": "x"})
        assert answer.status_code == 500
        assert "secret" not in answer.text
        assert "X-Request-Id" in answer.json()["error"]["message"]
        assert client.post("/v1/completions", json={"prompt": "x"}).status_code == 200
        faults.append(SystemExit(3))  # type: ignore[arg-type]
        answer = client.post("/v1/completions", json={"prompt": "x"})
        assert answer.status_code == 503
        wait_until(lambda: server.server.has_failed)


def test_requests_have_ids_and_a_line_of_log(client: httpx2.Client, caplog: Any) -> None:
    with caplog.at_level(logging.INFO, logger="compilespec.serving"):
        answer = client.get("/health", headers={"X-Request-Id": "mine-1"})
        assert answer.headers["X-Request-Id"] == "mine-1"
        other = client.get("/health", headers={"X-Request-Id": "a b"}).headers["X-Request-Id"]
        assert other != "a b"
        wait_until(lambda: any(other in record.getMessage() for record in caplog.records))
    assert any("mine-1" in r.getMessage() and "GET /health 200" in r.getMessage()
               for r in caplog.records)  # fmt: skip


def test_the_example_is_answered(server: Live, capsys: Any) -> None:
    path = Path(__file__).resolve().parents[2] / "examples" / "openai_client.py"
    runpy.run_path(str(path))["main"](server.url, "toy")
    assert '"completion_tokens":48' in capsys.readouterr().out


def test_options_are_checked() -> None:
    for wrong in (
        {"model_names": ()}, {"api_keys": ("",)}, {"max_waiting": -1}, {"max_body_bytes": 0},
        {"request_timeout_s": 0}, {"allowed_origins": ("https://x.y/",)}, {"tool_format": "xml"},
        {"reasoning_parser": "r1"},
    ):  # fmt: skip
        with pytest.raises(InvalidOption, match=f"{next(iter(wrong))}: expected"):
            ServerOptions(**wrong)  # type: ignore[arg-type]


def test_the_engine_belongs_to_the_server() -> None:
    engine = toy_engine()
    with live(engine):
        with pytest.raises(Exception, match="belongs to the thread"):
            engine.generate([1], SamplingParams())


def test_a_model_may_be_an_adapter(tmp_path: Path) -> None:
    directory = save_toy_adapter(tmp_path, 33)
    with live(toy_engine(adapters=TOY_ADAPTERS)) as server, server.client() as client:
        server.service.thread.load_adapter("tuned", directory)
        names = [one["id"] for one in client.get("/v1/models").json()["data"]]
        assert names[-1] == "tuned"
        texts = {}
        for name in (names[0], "tuned"):
            body = {"model": name, "prompt": [5, 6, 7], "temperature": 0, "return_token_ids": True}
            answer = client.post("/v1/completions", json=body).json()
            assert answer["model"] == name
            texts[name] = answer["choices"][0]["token_ids"]
        assert texts[names[0]] == expected([5, 6, 7], 16)
        assert texts["tuned"] == expected([33, 5, 6, 7], 16)
        messages = [{"role": "user", "content": "hello"}]
        body = {"model": "tuned", "messages": messages, "max_tokens": 4}
        assert client.post("/v1/chat/completions", json=body).json()["model"] == "tuned"
        server.service.thread.drop_adapter("tuned")
        refused = client.post("/v1/chat/completions", json=body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")


def test_images_of_a_chat_reach_the_engine() -> None:
    """Read once: the tower and the processor do nothing twice."""
    asked, rows = [], GivenRows(places=[1, 2], rows=torch.ones(2, 4))

    class Reader:
        def read(self, prompt: Any) -> ReadPrompt:
            asked.append(prompt)
            return ReadPrompt(ids=tuple(HELLO_IDS), rows=rows)

    engine = toy_engine(images=Reader())
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    with live(engine) as server, server.openai() as client:
        answer = client.chat.completions.create(
            model="toy", messages=[{"role": "user", "content": [part]}], max_tokens=5
        )
    assert answer.usage.prompt_tokens == len(HELLO_IDS)
    assert [one["messages"][0]["content"] for one in asked] == [[part]]
    (chunk,) = engine.executor.prefill_calls[0]
    assert list(chunk.given.places) == [1, 2]
