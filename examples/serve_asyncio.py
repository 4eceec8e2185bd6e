"""An engine on its own thread; clients in an event loop, one of which gives up early.

python examples/serve_asyncio.py [MODEL [SPEC [BACKEND]]]
SPEC: none or ngram for a model without a trained drafter
"""

import asyncio
import sys

import compilespec
from compilespec import SamplingParams


async def client(server, name: str, prompt: str, *, patience: int) -> None:
    ticket = server.submit(prompt, SamplingParams(max_new_tokens=40))
    count = 0
    async for delta in ticket:  # the engine never waits for a reader
        count += len(delta.token_ids)
        if count > patience:
            ticket.abort()
    output = await ticket.wait()
    print(f"{name}: {output.finish_reason} after {len(output.token_ids)} tokens")


async def serve(engine: compilespec.Engine) -> None:
    with engine.serve() as server:  # from here on the thread owns the engine
        await asyncio.gather(
            client(server, "patient", "def main():", patience=1000),
            client(server, "hasty", "import os\n", patience=5),
        )


def main(model: str = "demo", spec: str = "eagle3", backend: str = "inductor") -> None:
    with compilespec.compile(model, spec=spec, max_seq_len=256, backend=backend) as engine:
        asyncio.run(serve(engine))


if __name__ == "__main__":
    main(*sys.argv[1:])
