"""A server on a free port of this machine, on its own thread; engines that it serves."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import httpx2

from compilespec.program import AdapterShape
from compilespec.runtime.engine import Engine
from compilespec.serving import create_app
from compilespec.serving.options import Binding, ServerOptions
from compilespec.serving.process import Server, listen, make_server
from tests.support.fake_executor import FakeExecutor, engine_over, geometry
from tests.support.toy_tokenizer import byte_level_tokenizer

VOCAB = 259
EOS = 256
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.arguments.x }}{% endfor %}\n"
    "{% endfor %}{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def toy_tokenizer(special: Sequence[str] = ()) -> Any:
    """A token a byte, EOS, the bytes of half a character, and special tokens; with a chat
    template.
    """
    tokens = [*(bytes([byte]) for byte in range(256)), "<eos>", " ä".encode(), "€".encode()[:2]]
    tokens += special
    tokenizer = byte_level_tokenizer(tokens, eos="<eos>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def toy_engine(
    says: str | Sequence[int] | None = None,
    *,
    special: Sequence[str] = (),
    hit_rate: float = 0.6,
    adapters: AdapterShape | None = None,
    images: Any = None,
    **options: Any,
) -> Engine:
    """An engine over the toy program.

    Args:
        says: the text or the tokens that follow every prompt that ends with `a:`, then EOS; None:
            the hash.
        special: further tokens of the vocabulary.
    """
    sizes = geometry(
        vocab_size=VOCAB + len(special),
        max_seq_len=256,
        num_blocks=160,
        max_prefill_tokens=256,
        adapters=adapters,
    )
    if says is not None:
        options["next_token"] = _saying(says.encode() if isinstance(says, str) else says)
    executor = FakeExecutor(sizes, hit_rate=hit_rate, **options)
    return engine_over(
        executor,
        tokenizer=toy_tokenizer(special),
        eos_token_ids=(EOS,),
        generation_defaults={"temperature": 0.0},  # the toy draws nothing
        images=images,
    )


def _saying(text: Sequence[int]) -> Any:
    said = [*text, EOS]

    def following(context: Any) -> int:
        place = len(context) - bytes(min(token, 255) for token in context).rfind(b"a:") - 2
        return said[place] if place < len(said) else EOS

    return following


class Live:
    """A server that runs: where it is, and its parts."""

    def __init__(self, server: Server, port: int, app: Any) -> None:
        self.server, self.app, self.service = server, app, app.state.service
        self.url = f"http://127.0.0.1:{port}"

    def client(self, **options: Any) -> httpx2.Client:
        return httpx2.Client(base_url=self.url, timeout=30, trust_env=False, **options)

    def openai(self, key: str = "none", **options: Any) -> Any:
        import openai

        client = httpx2.Client(timeout=30, trust_env=False)
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=key, max_retries=0, http_client=client, **options
        )

    def stop(self) -> None:
        """As a signal does."""
        self.server.handle_exit(15, None)


@contextlib.contextmanager
def live(
    engine: Engine, options: ServerOptions | None = None, *, drain_timeout_s: float = 20
) -> Iterator[Live]:
    app = create_app(engine, options or ServerOptions(model_names=("toy",)))
    binding = Binding(port=0, drain_timeout_s=drain_timeout_s)
    listener = listen(binding)
    server = make_server(app, binding)
    thread = threading.Thread(
        target=lambda: asyncio.run(server.serve(sockets=[listener])), daemon=True
    )
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.005)
        yield Live(server, listener.getsockname()[1], app)
    finally:
        server.handle_exit(15, None)
        server.handle_exit(15, None)
        thread.join(30)
        app.state.service.close()
        assert not thread.is_alive()
