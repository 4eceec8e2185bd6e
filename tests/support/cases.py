"""Which K of a family the default run takes."""

from __future__ import annotations

# One K in the default run; `tests/methods/test_matrix.py` has cases of the other families.
ONCE = {
    "llama": 8, "qwen3": 3, "qwen3_moe": 3, "gemma3": 1, "gpt_oss": 1, "nemotron_h": 1,
    "deepseek_v3": 3, "glm4_moe_lite": 5,
}  # fmt: skip
