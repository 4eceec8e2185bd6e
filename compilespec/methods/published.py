"""Drafters that others have published on the hub, by the target that they were trained for.

Source: the tables of their authors' README files and model cards.  Loading one checks its sizes
against the target, as for any drafter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class PublishedDraft:
    """A drafter of the hub."""

    target: str  # org/name
    method: str
    draft: str  # org/name
    layout: str  # of its checkpoint (docs/methods.md)


def _rows(method: str, layout: str, drafts: dict[str, str]) -> Iterator[PublishedDraft]:
    for target, draft in drafts.items():
        yield PublishedDraft(target=target, method=method, draft=draft, layout=layout)


# Of several for one target and method the first is taken.
PUBLISHED: tuple[PublishedDraft, ...] = (
    *_rows("eagle3", "EAGLE authors", {
        "meta-llama/Llama-3.1-8B-Instruct": "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B",
        "meta-llama/Llama-3.3-70B-Instruct": "yuhuili/EAGLE3-LLaMA3.3-Instruct-70B",
        "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": "yuhuili/EAGLE3-DeepSeek-R1-Distill-LLaMA-8B",
        "lmsys/vicuna-13b-v1.3": "yuhuili/EAGLE3-Vicuna1.3-13B",
        "Qwen/Qwen3-1.7B": "AngelSlim/Qwen3-1.7B_eagle3",
        "Qwen/Qwen3-8B": "AngelSlim/Qwen3-8B_eagle3",
        "Qwen/Qwen3-14B": "AngelSlim/Qwen3-14B_eagle3",
    }),
    *_rows("eagle3", "speculators", {
        "Qwen/Qwen3-8B": "RedHatAI/Qwen3-8B-speculator.eagle3",
        "Qwen/Qwen3-32B": "RedHatAI/Qwen3-32B-speculator.eagle3",
        "meta-llama/Llama-3.1-8B-Instruct": "RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3",
        "meta-llama/Llama-3.3-70B-Instruct": "RedHatAI/Llama-3.3-70B-Instruct-speculator.eagle3",
    }),
    *_rows("peagle", "EAGLE authors", {
        "openai/gpt-oss-20b": "amazon/GPT-OSS-20B-P-EAGLE",
        "openai/gpt-oss-120b": "amazon/gpt-oss-120b-p-eagle",
    }),
    *_rows("dflash", "authors", {
        "Qwen/Qwen3-4B": "z-lab/Qwen3-4B-DFlash-b16",
        "Qwen/Qwen3-8B": "z-lab/Qwen3-8B-DFlash-b16",
        "Qwen/Qwen3-Coder-30B-A3B-Instruct": "z-lab/Qwen3-Coder-30B-A3B-DFlash",
        "openai/gpt-oss-20b": "z-lab/gpt-oss-20b-DFlash",
    }),
    *_rows("medusa", "authors", {
        f"lmsys/vicuna-{size}-v1.3": f"FasterDecoding/medusa-vicuna-{size}-v1.3"
        for size in ("7b", "13b", "33b")
    }),
    *_rows("eagle", "EAGLE authors", {
        "meta-llama/Meta-Llama-3-8B-Instruct": "yuhuili/EAGLE-LLaMA3-Instruct-8B",
        "meta-llama/Meta-Llama-3-70B-Instruct": "yuhuili/EAGLE-LLaMA3-Instruct-70B",
    }),
)  # fmt: skip


def published_draft(target_name: str | None, method: str) -> str | None:
    """The hub's name of a drafter for a target; None where none is known.

    Args:
        target_name: "org/name", with or without a revision, or the name of a directory, which is
            compared with the names alone.  Case does not count.
    """
    name = (target_name or "").partition("@")[0].casefold()
    for row in PUBLISHED:
        known = row.target.casefold()
        if row.method == method and name in (known, known.partition("/")[2]):
            return row.draft
    return None
