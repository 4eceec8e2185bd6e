"""Print a completion while it is made, and end it early where a line begins with "class".

python examples/stream.py [MODEL [SPEC [BACKEND]]]
SPEC: none or ngram for a model without a trained drafter
"""

import sys

import compilespec
from compilespec import SamplingParams


def main(model: str = "demo", spec: str = "eagle3", backend: str = "inductor") -> None:
    params = SamplingParams(max_new_tokens=96, stop=("\nclass ",))
    with compilespec.compile(model, spec=spec, max_seq_len=256, backend=backend) as engine:
        for delta in engine.stream("def read_lines(path):", params):
            print(delta.text, end="", flush=True)  # up to K + 1 tokens at once
            if delta.output is not None:  # the last one
                timings = delta.output.timings
                print(f"\n-> {delta.finish_reason}, {timings.time_to_first_token_ms:.0f} ms")


if __name__ == "__main__":
    main(*sys.argv[1:])
