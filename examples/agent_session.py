"""Time to first token of an agent's turns: cached in memory, on disk after a restart, or never.

python examples/agent_session.py [MODEL [SPEC [BACKEND [PREFIX [TURNS]]]]]
PREFIX: tokens of what every turn begins with: instructions, files
"""

import sys
import tempfile

import compilespec
from compilespec import Engine, SamplingParams


def main(model: str = "demo", spec: str = "eagle3", backend: str = "inductor", *sizes: str) -> None:
    prefix, turns = map(int, sizes or (100, 5))
    own = {"spec": spec, "backend": backend, "max_seq_len": prefix + 16 * turns + 8}
    with tempfile.TemporaryDirectory() as folder:
        for name in ("in memory", "from disk", "without"):
            kept = {"prefix_dir": folder, "enable_prefix_caching": True}
            kept = {"enable_prefix_caching": False} if name == "without" else kept
            with compilespec.compile(model, max_batch_size=1, **own, **kept) as engine:
                times = session(engine, [7 + i * i % 89 for i in range(prefix)], turns)
                print(f"{name}, ms to the first token of each turn: {times}")


def session(engine: Engine, tokens: list[int], turns: int) -> list[int]:
    times, params = [], SamplingParams(max_new_tokens=8, ignore_eos=True)
    for turn in range(turns):
        (output,) = engine.generate([[*tokens, *range(11 + turn, 19 + turn)]], params)
        tokens = [*tokens, *range(11 + turn, 19 + turn), *output.token_ids]
        times.append(round(output.timings.time_to_first_token_ms))
    return times


if __name__ == "__main__":
    main(*sys.argv[1:])
