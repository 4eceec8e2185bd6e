"""Suggestions for a mistaken name: a similar name, or the counterpart of another project's name."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from compilespec.errors import InvalidOption

# Names in vLLM, SGLang, TensorRT-LLM, transformers and OpenAI's protocol: by the place where they
# are given, compilespec's name, with a remark if the meaning differs.
ELSEWHERE: Mapping[str, Mapping[str, str]] = {
    "compile": {
        "num_speculative_tokens": "num_draft_tokens",
        "num_assistant_tokens": "num_draft_tokens",
        "prompt_lookup_num_tokens": "num_draft_tokens",
        "speculative_num_steps": "num_draft_tokens",
        "speculative_num_draft_tokens": "num_draft_tokens (which does not count the root)",
        "max_draft_len": "num_draft_tokens",
        "draft_len": "num_draft_tokens",
        "num_nextn_predict_layers": "num_draft_tokens",
        "gamma": "num_draft_tokens",
        "k": "num_draft_tokens",
        "speculative_model": "draft",
        "speculative_model_dir": "draft",
        "speculative_draft_model_path": "draft",
        "draft_model": "draft",
        "draft_model_path": "draft",
        "assistant_model": "draft",
        "drafter": "draft",
        "method": "spec",
        "speculative_algorithm": "spec",
        "speculative_config": "spec (with draft= and num_draft_tokens=)",
        "model_path": "model",
        "trust_remote_code": "model (as a module: code in a checkpoint is never run)",
        "max_model_len": "max_seq_len",
        "context_length": "max_seq_len",
        "max_length": "max_seq_len",
        "max_position_embeddings": "max_seq_len",
        "batch_size": "max_batch_size",
        "max_num_seqs": "max_batch_size",
        "max_running_requests": "max_batch_size",
        "max_num_tokens": "max_step_tokens",
        "max_num_batched_tokens": "max_step_tokens",
        "chunked_prefill_size": "max_prefill_tokens",
        "max_total_tokens": "kv_cache_tokens",
        "gpu_memory_utilization": "kv_cache_tokens (a number of tokens)",
        "mem_fraction_static": "kv_cache_tokens (a number of tokens)",
        "free_gpu_memory_fraction": "kv_cache_tokens (a number of tokens)",
        "enable_block_reuse": "enable_prefix_caching",
        "disable_radix_cache": "enable_prefix_caching (the other way round)",
        "disable_overlap_schedule": "overlap (the other way round)",
        "disable_overlap_scheduler": "overlap (the other way round)",
        "async_scheduling": "overlap",
        "torch_dtype": "dtype",
        "device_map": "device",
        "tp": "tensor_parallel_size",
        "tp_size": "tensor_parallel_size",
        "lora_modules": "adapters",
        "lora_paths": "adapters",
        "enable_lora": "adapters ({}: room for those that are loaded later)",
        "max_loras": "max_adapters",
        "max_lora_rank": "max_adapter_rank",
        "enable_prompt_embeds": "prompt_embeds",
        "quantization": "quantize",
        "quantization_config": "quantize",
        "revision": "model ('org/name@revision')",
        "enforce_eager": "cudagraphs ('none': no CUDA graphs) or backend ('eager': uncompiled)",
        "cuda_graph_config": "cudagraphs",
        "use_cuda_graph": "cudagraphs",
        "disable_cuda_graph": "cudagraphs (the other way round)",
        "cudagraph_capture_sizes": "buckets",
        "cuda_graph_bs": "buckets",
        "logits_processors": "logits_processor",
        "max_matching_ngram_size": "max_ngram",
        "prompt_lookup_max": "max_ngram",
        "prompt_lookup_min": "min_ngram",
    },
    "SamplingParams": {
        "max_tokens": "max_new_tokens",
        "max_completion_tokens": "max_new_tokens",
        "max_output_tokens": "max_new_tokens",
        "max_length": "max_new_tokens (which does not count the prompt)",
        "n_tokens": "max_new_tokens",
        "num_tokens": "max_new_tokens",
        "min_tokens": "min_new_tokens",
        "min_length": "min_new_tokens (which does not count the prompt)",
        "do_sample": "temperature (0 is greedy, above 0 draws)",
        "temp": "temperature",
        "top_n": "top_k",
        "top_logprobs": "logprobs",
        "num_logprobs": "logprobs",
        "num_return_sequences": "n",
        "best_of": "n",
        "num_beams": "n (samples: there is no beam search)",
        "use_beam_search": "n (samples: there is no beam search)",
        "stop_strings": "stop",
        "stop_words": "stop",
        "stop_sequences": "stop",
        "eos_token_id": "stop_token_ids",
        "end_id": "stop_token_ids",
        "random_seed": "seed",
        "bad_words": "bad_token_ids",
        "bad_words_ids": "bad_token_ids",
        "suppress_tokens": "bad_token_ids",
        "logits_processors": "logits_processor",
        "guided_json": "guide",
        "guided_regex": "guide",
        "guided_choice": "guide",
        "guided_decoding": "guide",
        "structured_outputs": "guide",
        "response_format": "guide",
        "json_schema": "guide",
        "regex": "guide",
        "num_speculative_tokens": "num_draft_tokens",
    },
    "generate": {
        "prompt": "prompts",
        "inputs": "prompts",
        "input_ids": "prompts (a tokenizer's output is taken as it is)",
        "attention_mask": "prompts (a tokenizer's output is taken as it is)",
        "prompt_token_ids": "prompts",
        "messages": 'prompts ({"messages": messages}, or call engine.chat)',
        "sampling_params": "params",
        "generation_config": "params",
    },
    "spec": {
        "vanilla": "none",
        "plain": "none",
        "off": "none",
        "nextn": "mtp_eagle",
        "deepseek_mtp": "mtp_eagle",
        "assistant": "draft_model",
        "standalone": "draft_model",
        "prompt_lookup": "ngram",
    },
    "dtype": {
        "bf16": "bfloat16",
        "fp16": "float16",
        "half": "float16",
        "fp32": "float32",
        "float": "float32",
        "fp64": "float64",
        "double": "float64",
    },
    "device": {"gpu": "cuda", "nvidia": "cuda"},
    "quantize": {
        "int8wo": "int8_weight_only",
        "int8dq": "int8_dynamic",
        "w8a8": "int8_dynamic",
        "int4wo": "int4_weight_only",
        "w4a16": "int4_weight_only",
        "float8wo": "float8_weight_only",
        "float8dq": "float8_dynamic",
        "fp8": "float8_dynamic",
    },
}

VERSION = "0123456789"
SIMILAR = 0.65  # of difflib's ratio: a slip of the keyboard, not another name of equal length


def meant(name: object, known: Iterable[str], *where: str) -> str:
    """The name in `known` that a mistaken name probably means, with a remark if any; else "".

    Args:
        where: parts of `ELSEWHERE` to search before similar spellings are considered.
    """
    if not isinstance(name, str):
        return ""
    spelled = {one.casefold(): one for one in known}
    wanted = name.strip().casefold().replace("-", "_")
    for part in where:
        ours = ELSEWHERE[part].get(wanted, "")
        if ours and re.match(r"\w+", ours).group() in spelled:  # type: ignore[union-attr]
            return ours
    near = difflib.get_close_matches(wanted, spelled, n=1, cutoff=SIMILAR)
    versions = [n for n in spelled if near and n.rstrip(VERSION) == wanted.rstrip(VERSION)]
    if wanted[-1:] in VERSION and near and near[0] in versions:  # another version of several
        return " or ".join(sorted(spelled[name] for name in versions))
    return spelled[near[0]] if near else ""


def did_you_mean(name: object, known: Iterable[str], *where: str) -> str:
    """The end of an error message, "; did you mean ...?", or "" if no name is similar."""
    ours = meant(name, known, *where)
    return f"; did you mean {ours}?" if ours else ""


def not_there(path: Path) -> str:
    """The message for a path that does not exist, with a similar name in the same folder."""
    if not path.parent.is_dir():
        return f"{path} does not exist, nor does {path.parent}"
    names = sorted(one.name for one in path.parent.iterdir())
    near = difflib.get_close_matches(path.name, names, n=3)
    return f"{path} does not exist" + (f"; did you mean {' or '.join(near)}?" if near else "")


def not_one_of(
    what: str, got: object, known: Iterable[str], *where: str, also: str = ""
) -> InvalidOption:
    """The error for a value that is not one of the choices.

    Args:
        also: other legal values, added after the names.
    """
    known = tuple(known)
    return InvalidOption(
        f"{what} must be one of {', '.join(known)}{also}; got {got!r}"
        f"{did_you_mean(got, known, *where)}"
    )
