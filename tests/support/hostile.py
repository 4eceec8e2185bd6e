"""Requests that ask for much work before their first token, and what a bystander sees of them.

`python -m tests.support.hostile` prints how much longer a bystander takes beside each.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers

import compilespec
from compilespec import SamplingParams
from compilespec.demo import demo_directory
from compilespec.errors import SpecError
from compilespec.runtime.engine import Engine
from compilespec.runtime.engine_thread import EngineThread
from compilespec.runtime.guides import Choice, JsonSchema, Regex

VOCAB, NUM_TOKENS = 150_000, 40
Request = Callable[[], tuple[Any, SamplingParams]]  # makes prompt and parameters anew


def hostile_engine() -> Engine:
    """As many logits as a large vocabulary has, and little else to compute."""
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=1024,
        eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(demo_directory())
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    model = transformers.LlamaForCausalLM(config).eval()
    return compilespec.compile(model, tokenizer=tokenizer, backend="eager", max_batch_size=8)


def _guided(guide: Callable[[], Any]) -> Request:
    return lambda: ("x", SamplingParams(guide=guide(), max_new_tokens=8))


def _deep(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def _members(count: int) -> dict[str, Any]:
    words = {f"p{i}": {"type": "string", "pattern": "^[a-z]{1,50}$"} for i in range(count)}
    return {"type": "object", "properties": words}


HOSTILE: dict[str, Request] = {
    "250,000 stop strings": lambda: (
        "x", SamplingParams(stop=[f"~{i:06d}qqq" for i in range(250_000)]),
    ),
    "64 long stop strings": lambda: (
        "x", SamplingParams(stop=["a" * 128 + "b" * (64 + i) for i in range(64)]),
    ),
    "150,000 biases": lambda: (
        "x", SamplingParams(logit_bias=dict.fromkeys(range(150000), 0.5), max_new_tokens=4),
    ),
    "150,000 allowed ids": lambda: (
        "x", SamplingParams(allowed_token_ids=range(VOCAB), max_new_tokens=4),
    ),
    "4 MB of text": lambda: ("lorem ipsum dolor " * 230_000, SamplingParams()),
    "4 MB of letters": lambda: ("xyzzy" * 800_000, SamplingParams()),
    "4 MB of spaces": lambda: (" " * 4_000_000, SamplingParams()),
    "a long text that may fit": lambda: (" " * 8192 + "lorem ipsum " * 1500, SamplingParams()),
    "4 MB of a conversation": lambda: (
        {"messages": [{"role": "user", "content": "lorem ipsum dolor " * 230_000}]},
        SamplingParams(),
    ),
    "a million ids": lambda: ([7] * 1_000_000, SamplingParams()),
    "repeats of repeats": _guided(lambda: Regex("(a{1000}){1000}")),
    "repeats of repeats behind a letter": _guided(lambda: Regex("b(a{1000}){1000}")),
    "a long literal": _guided(lambda: Regex("x{100000}")),
    "many optional letters": _guided(lambda: Regex("a?" * 3000 + "a" * 3000)),
    "a bad expression": _guided(lambda: Regex("(" + "x" * 10_000)),
    "a pattern in a schema": _guided(
        lambda: JsonSchema({"type": "string", "pattern": "^(a{1000}){1000}$"})
    ),
    "patterns that must all hold": _guided(
        lambda: JsonSchema(
            {"allOf": [{"pattern": f"^[a-z]{{{n},{7 * n}}}$"} for n in range(1, 40)]}
        )
    ),
    "a deep schema": _guided(lambda: JsonSchema(_deep(400))),
    "a wide schema": _guided(lambda: JsonSchema(_members(500))),
    "many alternatives": _guided(lambda: JsonSchema({"anyOf": [_members(9) for _ in range(90)]})),
    "a schema of 200,000 options": _guided(
        lambda: JsonSchema({"enum": [f"v{i}" for i in range(200_000)]})
    ),
    "20,000 choices": _guided(lambda: Choice([f"w{i * 7919 % 100_003}x" for i in range(20_000)])),
}  # fmt: skip


def bystander_s(server: EngineThread) -> float:
    """How long a plain request takes."""
    began = time.perf_counter()
    params = SamplingParams(max_new_tokens=NUM_TOKENS, ignore_eos=True)
    assert server.submit([5, 6], params).result(120).error is None
    return time.perf_counter() - began


def beside(server: EngineThread, request: Request) -> tuple[float, str]:
    """How long a bystander takes while a request comes twice, and what became of that one."""
    made, told = request_or_error(request), []

    def come() -> None:
        try:
            if isinstance(made, SpecError):
                raise made
            output = server.submit(*made).result(120)
            told.append(str(output.error or output.finish_reason))
        except SpecError as error:
            told.append(str(error))

    threads = [threading.Thread(target=come) for _ in range(2)]
    for thread in threads:
        thread.start()
    taken = bystander_s(server)
    for thread in threads:
        thread.join()
    return taken, told[0]


def request_or_error(request: Request) -> Any:
    """Prompt and parameters, or why they were refused."""
    try:
        return request()
    except SpecError as error:
        return error


if __name__ == "__main__":
    with hostile_engine().serve() as server:
        server.submit("x", SamplingParams(guide="a")).result()  # reads the tokenizer
        quiet = min(bystander_s(server) for _ in range(5))
        print(f"quiet: {quiet:.3f} s for {NUM_TOKENS} tokens")
        for name, request in HOSTILE.items():
            taken, told = beside(server, request)
            print(f"{taken / quiet:6.2f}x  {name}: {told[:150]}", flush=True)
