"""OpenVINO GenAI, which reads a GGUF file.  Needs the package openvino-genai."""

from __future__ import annotations

from typing import Any

from pipe import Generate, serve  # type: ignore[import-not-found, unused-ignore]


def start(given: dict[str, Any]) -> Generate:
    import numpy as np
    import openvino
    from openvino_genai import GenerationConfig, LLMPipeline, SchedulerConfig

    num_drafts = given.get("num_draft_tokens")
    looks_up = {"prompt_lookup": True} if num_drafts else {}
    scheduler = SchedulerConfig()
    scheduler.cache_size, scheduler.enable_prefix_caching = 2, False  # GiB
    scheduler.max_num_batched_tokens = given["length"]
    engine = LLMPipeline(
        given["model"], "CPU", INFERENCE_NUM_THREADS=given["threads"], scheduler_config=scheduler,
        **looks_up,
    )  # fmt: skip

    def generate(prompts: list[list[int]], max_new_tokens: int) -> list[list[int]]:
        config = GenerationConfig()
        config.do_sample, config.ignore_eos = False, True
        config.max_new_tokens = max_new_tokens
        if num_drafts:
            config.num_assistant_tokens, config.max_ngram_size = num_drafts, 3
        rows = [openvino.Tensor(np.array([ids], dtype=np.int64)) for ids in prompts]
        return [list(map(int, engine.generate(row, config).tokens[0])) for row in rows]

    return generate


if __name__ == "__main__":
    serve(start)
