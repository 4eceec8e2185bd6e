"""Plain decoding that saves the target's hidden states and tokens, to train speculators on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from compilespec.errors import DraftMismatch, InvalidOption
from compilespec.methods.base import Drafter
from compilespec.methods.capabilities import FINAL_NORM, Capabilities
from compilespec.methods.save_hidden_states.recorder import Layout, Recorder
from compilespec.methods.save_hidden_states.saved_states import SavedStates, prompt_digest
from compilespec.tracing.target_info import TargetInfo

__all__ = ["METHOD", "Layout", "Recorder", "SavedStates", "prompt_digest"]

DEFAULT_SHARD_TOKENS = 65536


class StateSaver(Drafter):
    """Drafts nothing; names the hidden states that every call outputs, and their recorder."""

    def __init__(self, aux_layers: tuple[int, ...], recorder: Recorder) -> None:
        super().__init__()
        self.num_draft_tokens, self.aux_layers, self.recorder = 0, aux_layers, recorder
        self._description = recorder.describe()

    def describe(self) -> str:
        return self._description


class SaveHiddenStatesMethod:
    """One token per step; every finished request becomes a record of `output_dir`."""

    capabilities = Capabilities(
        name="save_hidden_states",
        brings="no drafts; writes what drafters are trained on",
        kind="none",
        outputs_hidden_states=True,
        aliases=("SAVE_HIDDEN_STATES",),
        options=("output_dir", "aux_layers", "last_hidden", "shard_tokens"),
    )

    def load(
        self, draft: str | Path | nn.Module | None, target: TargetInfo, options: Mapping[str, Any]
    ) -> StateSaver:
        """Options: `output_dir` (required; one that exists is continued), `aux_layers` (hs indices
        of `hidden_states`; the EAGLE-3 default 2, n//2, n-3), `last_hidden` ("pre_norm": the last
        layer's output, which speculators' trainers norm themselves; "post_norm": what enters the
        head), `shard_tokens` (a file is written once the finished requests hold that many tokens).

        Raises: InvalidOption, DraftMismatch (too few layers for the default), CheckpointError (the
        directory holds something else).
        """
        directory = options.get("output_dir")
        if not isinstance(directory, str | Path):
            raise InvalidOption(
                f"spec='save_hidden_states' needs output_dir= a directory; got {directory!r}"
            )
        shard_tokens = options.get("shard_tokens", DEFAULT_SHARD_TOKENS)
        if isinstance(shard_tokens, bool) or not isinstance(shard_tokens, int) or shard_tokens < 1:
            raise InvalidOption(f"shard_tokens must be a positive integer; got {shard_tokens!r}")
        last_hidden = options.get("last_hidden", "pre_norm")
        if last_hidden not in ("pre_norm", "post_norm"):
            raise InvalidOption(
                f"last_hidden must be 'pre_norm' or 'post_norm'; got {last_hidden!r}"
            )
        last = target.num_layers if last_hidden == "pre_norm" else FINAL_NORM
        aux_layers = _aux_layers(options.get("aux_layers"), last, target.num_layers)
        layout = Layout(
            aux_layers=aux_layers,
            last_hidden=last_hidden,
            hidden_size=target.hidden_size,
            dtype=target.dtype,
        )
        recorder = Recorder(Path(directory), layout, shard_tokens=shard_tokens)
        return StateSaver((*aux_layers, last), recorder)


def _aux_layers(wanted: Sequence[int] | None, last: int, num_layers: int) -> tuple[int, ...]:
    """hs indices of `hidden_states`: distinct, and without the last hidden state's."""
    n = num_layers
    if wanted is None:
        if not 2 < n // 2 < n - 3:
            raise DraftMismatch(
                f"the default aux layers (2, n//2, n-3) need 7 target layers or more, the target "
                f"has {n}; give aux_layers=(hs indices)"
            )
        return (2, n // 2, n - 3)
    layers = tuple(wanted)
    if not layers or any(isinstance(k, bool) or not isinstance(k, int) for k in layers):
        raise InvalidOption(f"aux_layers must be hs indices, such as (2, 4, 5); got {wanted!r}")
    if min(layers) < 0 or max(layers) > n or len({*layers, last}) != len(layers) + 1:
        raise InvalidOption(
            f"aux_layers must be distinct hs indices from 0 to {n}, other than the last hidden "
            f"state's; got {list(layers)}"
        )
    return layers


METHOD = SaveHiddenStatesMethod()
