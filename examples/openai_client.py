"""The openai client against `compilespec serve`, which may still be starting.

python examples/openai_client.py [URL [MODEL]]
"""

import os
import sys
import time

import openai


def wait_for(client: openai.OpenAI, seconds: float = 600) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            return bool(client.models.list())
        except openai.APIConnectionError:
            time.sleep(0.5)
    raise SystemExit("no server answers")


def main(url: str = "http://127.0.0.1:8000", model: str = "demo") -> None:
    key = os.environ.get("COMPILESPEC_API_KEY", "none")
    with openai.OpenAI(base_url=f"{url}/v1", api_key=key) as client:
        wait_for(client)
        stream = client.completions.create(
            model=model, prompt="class Stack:", max_tokens=48, temperature=0, stream=True,
            stream_options={"include_usage": True},
        )  # fmt: skip
        for chunk in stream:
            for choice in chunk.choices:
                print(choice.text, end="", flush=True)
        print(f"\n\n{chunk.usage.to_json(indent=None)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
