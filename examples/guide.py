"""Output that follows a JSON schema, and a logits processor that is traced into the step.

python examples/guide.py [MODEL [SPEC [BACKEND]]]
SPEC: none or ngram for a model without a trained drafter
"""

import json
import sys

import compilespec
from compilespec import SamplingParams

SCHEMA = {
    "type": "object",
    "properties": {"size": {"enum": [1, 2, 3]}, "colour": {"enum": ["red", "green"]}},
    "required": ["size", "colour"],
    "additionalProperties": False,
}


def cooler(logits_BSV):
    """Acts on each row of logits by itself, for every request of the engine."""
    return logits_BSV / 0.8


def main(model: str = "demo", spec: str = "eagle3", backend: str = "inductor") -> None:
    params = SamplingParams(max_new_tokens=80, temperature=1.0, seed=3, n=2, guide=SCHEMA)
    with compilespec.compile(
        model, spec=spec, max_seq_len=256, logits_processor=cooler, backend=backend
    ) as engine:
        for output in engine.generate("# settings as JSON\n", params):
            print(json.loads(output.text), output.finish_reason)


if __name__ == "__main__":
    main(*sys.argv[1:])
