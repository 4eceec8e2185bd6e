"""Complete two prompts at once, the second with sampling.

python examples/generate.py [MODEL [SPEC [BACKEND]]]
SPEC: none or ngram for a model without a trained drafter
"""

import sys

import compilespec
from compilespec import SamplingParams


def main(model: str = "demo", spec: str = "eagle3", backend: str = "inductor") -> None:
    greedy = SamplingParams(max_new_tokens=48)
    sampled = SamplingParams(max_new_tokens=48, temperature=0.8, top_p=0.95, seed=1)
    with compilespec.compile(model, spec=spec, max_seq_len=256, backend=backend) as engine:
        for output in engine.generate(["def main():", "import os\n"], [greedy, sampled]):
            print(output.text)
            print(
                f"-> {output.finish_reason}, {len(output.token_ids)} tokens, "
                f"{output.acceptance_length:.2f} a verify step"
            )
        print(f"acceptance by draft: {engine.stats().acceptance_rate_by_position}")


if __name__ == "__main__":
    main(*sys.argv[1:])
