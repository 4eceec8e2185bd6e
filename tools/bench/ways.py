"""The contestants: one class per way of generating greedily from the same checkpoint.

EOS is ignored by all, so that all do the same amount of work.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch

from tools.bench import gates
from tools.bench.llama_cpp import LlamaCppWay
from tools.bench.way import Setup, Unavailable, Way

LOOKUP_TOKENS = (3, 10)
"""Prompt lookup runs with 3 (transformers' documentation) and 10 (its author); the best counts."""


class TransformersWay:
    """`model.generate`, with the keywords of a variant."""

    def __init__(self, setup: Setup, name: str, max_batch_size: int, **keywords: Any) -> None:
        from transformers import GenerationConfig

        self.name = name
        self.max_batch_size = max_batch_size
        # A shallow copy shares the weights but not the state that generate() leaves on the model.
        self.model: Any = copy.copy(setup.model)
        self.model.generation_config = GenerationConfig(pad_token_id=0, eos_token_id=None)
        self.keywords = {"do_sample": False, **keywords}
        self.max_new_tokens = setup.max_new_tokens

    def generate(
        self, prompts: list[list[int]], max_new_tokens: int | None = None
    ) -> list[list[int]]:
        width = max(map(len, prompts))
        pads = [width - len(prompt) for prompt in prompts]
        ids_BT = torch.tensor([[0] * pad + ids for pad, ids in zip(pads, prompts, strict=True)])
        mask_BT = torch.tensor([[0] * pad + [1] * (width - pad) for pad in pads])
        device = self.model.device
        out_BT = self.model.generate(
            ids_BT.to(device), attention_mask=mask_BT.to(device),
            max_new_tokens=max_new_tokens or self.max_new_tokens, **self.keywords,
        )  # fmt: skip
        new_tokens: list[list[int]] = out_BT[:, width:].tolist()
        return new_tokens

    def stats(self) -> dict[str, object]:
        return {}

    def close(self) -> None:
        self.model = None


class CompilespecWay:
    """compilespec through its public API, on the same directory."""

    def __init__(
        self,
        setup: Setup,
        name: str,
        spec: str,
        num_draft_tokens: int | None,
        quantize: str | None = None,
        draft_quantize: str | None = None,
        draft_tree: Any = None,
    ) -> None:
        import compilespec

        self.name = name
        self.max_batch_size = setup.max_batch_size
        keywords: dict[str, Any] = {
            "max_batch_size": setup.max_batch_size,
            "backend": setup.backend,
            "enable_prefix_caching": False,  # the others compute every prompt again, too
        }
        optional = {
            "max_seq_len": setup.max_seq_len, "dtype": setup.dtype, "quantize": quantize,
            "draft_quantize": draft_quantize, "draft_tree": draft_tree,
        }  # fmt: skip
        keywords |= {name: value for name, value in optional.items() if value is not None}
        if num_draft_tokens is not None:
            keywords["num_draft_tokens"] = num_draft_tokens
        if setup.draft is not None and spec not in ("none", "ngram", "suffix"):
            keywords["draft"] = str(setup.draft)
        self.engine: Any = compilespec.compile(str(setup.model_dir), spec=spec, **keywords)
        self.params = compilespec.SamplingParams(
            max_new_tokens=setup.max_new_tokens, ignore_eos=True
        )
        self.emitted: list[int] = []

    def generate(
        self, prompts: list[list[int]], max_new_tokens: int | None = None
    ) -> list[list[int]]:
        params = self.params
        if max_new_tokens is not None:
            params = dataclasses.replace(params, max_new_tokens=max_new_tokens)
        outputs = self.engine.generate(prompts, params)
        for output in outputs:
            self.emitted += output.emitted_per_step
        return [list(output.token_ids) for output in outputs]

    def stats(self) -> dict[str, object]:
        stats = self.engine.stats()
        return {
            "acceptance_length": sum(self.emitted) / max(1, len(self.emitted)),
            "num_recompiles": stats.num_recompiles,
        }

    def close(self) -> None:
        self.engine.close()


def build_ways(
    setup: Setup, draft_tokens: tuple[int, ...], only: str | None = None
) -> tuple[list[Way], dict[str, str]]:
    """Every way that can run, the baseline (transformers eager) first, and why the others cannot.

    Args:
        only: keep ways whose name contains this; the baseline is always kept.
    """
    batch = setup.max_batch_size
    makers: dict[str, Any] = {
        gates.EAGER: lambda name: TransformersWay(setup, name, batch),
        gates.STATIC: lambda name: TransformersWay(
            setup,
            name,
            batch,
            cache_implementation="static",
            compile_config=_compile_config(setup.model),
        ),
    }
    for k in LOOKUP_TOKENS:
        makers[f"{gates.LOOKUP} K={k}"] = lambda name, k=k: TransformersWay(
            setup, name, 1, prompt_lookup_num_tokens=k
        )
    makers[gates.PLAIN] = lambda name: CompilespecWay(setup, name, "none", None)
    for k in draft_tokens:
        makers[f"{gates.EAGLE3} K={k}"] = lambda name, k=k: CompilespecWay(setup, name, "eagle3", k)
    makers[gates.LLAMA_CPP] = lambda name: LlamaCppWay(setup, name)

    ways: list[Way] = []
    skipped: dict[str, str] = {}
    for name, make in makers.items():
        if only and only not in name and name != gates.EAGER:
            continue
        try:
            ways.append(make(name))
        except Unavailable as reason:
            skipped[name] = str(reason)
    return ways, skipped


def _compile_config(model: Any) -> Any:
    """transformers compiles decoding by itself on a GPU only; this asks for it on the CPU too."""
    from transformers import CompileConfig

    on_cpu = model.device.type == "cpu"
    config = CompileConfig(mode="default" if on_cpu else "reduce-overhead", dynamic=False)
    config._compile_all_devices = True
    return config
