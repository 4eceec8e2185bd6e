"""Query-only drafters at a constant position, on the target's KV cache (Gemma-4's assistants)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from compilespec.methods.base import Drafter
from compilespec.methods.capabilities import Capabilities
from compilespec.methods.shared_kv.config import AssistantConfig
from compilespec.methods.shared_kv.drafter import AssistantDrafter, SharedKVDrafter
from compilespec.methods.shared_kv.load import load_drafter, random_drafter
from compilespec.tracing.target_info import TargetInfo

__all__ = ["METHOD", "AssistantConfig", "AssistantDrafter", "SharedKVDrafter", "random_drafter"]


class SharedKVMethod:
    """Neither cache nor prefill: every draft is one query at the last written position."""

    capabilities = Capabilities(
        name="shared_kv",
        brings="Gemma 4's assistant, which reads the model's own cache",
        kind="shared_kv",
        needs_draft_weights=True,
        reads_hidden_states=True,
        options=("query_position",),
    )

    def load(
        self, draft: str | Path | nn.Module | None, target: TargetInfo, options: Mapping[str, Any]
    ) -> Drafter:
        """Build the drafter from a `gemma4_assistant` checkpoint directory, or adopt a module.

        Option: `query_position`, the position of a checkpoint's rotary angles: "bonus" (the newest
        token's, as in transformers; windows reach one key further) or "last_written" (the newest
        key's, as in vLLM and SGLang).

        Raises:
            CheckpointError, DraftMismatch, InvalidOption, NotSupported.
        """
        assert draft is not None, "the caller looks for a draft first"
        return load_drafter(draft, target, options)


METHOD = SharedKVMethod()
