"""Multi-module MTP: a module and a head for each step, over several KV groups (Step-3.5)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from compilespec.errors import InvalidOption
from compilespec.methods.base import Drafter
from compilespec.methods.capabilities import Capabilities
from compilespec.methods.mtp.load import load_drafter
from compilespec.tracing.target_info import TargetInfo


class MtpMultiMethod:
    """Like `mtp`, with KV groups (S1, S2, S4, S5): each step has its own block size, and a ring of
    cache blocks if its layer has a window.
    """

    capabilities = Capabilities(
        name="mtp_multi",
        brings="mtp with a cache of its own size for each module",
        kind="windowed",
        needs_draft_weights=True,
        reads_hidden_states=True,
        own_kv_cache=True,
        inside_target=True,
        folders=("mtp",),
        options=("pos0_mask", "chain", "kv_block_sizes"),
    )

    def load(
        self, draft: str | Path | nn.Module | None, target: TargetInfo, options: Mapping[str, Any]
    ) -> Drafter:
        """Load or adopt as `mtp` does.  Option: `kv_block_sizes`, tokens per cache block of each
        draft step (default: the program's blocks, one group).

        Raises: CheckpointError, DraftMismatch, InvalidOption, NotSupported.
        """
        assert draft is not None, "the caller looks for a draft first"
        rest = dict(options)
        sizes = tuple(rest.pop("kv_block_sizes", ()))
        if not all(isinstance(size, int) and size > 0 for size in sizes):
            raise InvalidOption(
                f"kv_block_sizes: expected a positive integer for each draft step, got {sizes}"
            )
        drafter = load_drafter(draft, target, rest, recycled=False)
        if sizes:
            drafter.kv_block_sizes = sizes
        return drafter


METHOD = MtpMultiMethod()
