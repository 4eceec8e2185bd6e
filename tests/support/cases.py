"""Which families and K the default run takes."""

from __future__ import annotations

FULL = ("llama",)  # every K, but for what slow_tests.txt takes away


# One K in the default run; `tests/methods/test_matrix.py` has cases of the other families.
ONCE = {
    "qwen3": 3, "qwen3_moe": 3, "gemma3": 1, "gpt_oss": 1, "nemotron_h": 1, "deepseek_v3": 3,
    "glm4_moe_lite": 5,
}  # fmt: skip
