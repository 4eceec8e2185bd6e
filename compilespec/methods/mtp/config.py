"""Every published layout of MTP modules, normalised into one `MtpConfig`.

The layout is recognised by content: `speculators_model_type`, then the names of the tensors.  What
neither config.json nor the tensors say (order of the projection's inputs, which hidden state is
read and recycled) belongs to the layout, and the block is the target's own decoder layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from compilespec.errors import CheckpointError
from compilespec.methods.mtp.bodies import block_config, check_body
from compilespec.methods.mtp.layout import Layout, layout_of, module_names

Hidden = Literal["post_norm", "pre_norm"]

# Keys of config.json that count the modules.
_COUNTS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")

_EMBEDDING = "embed_tokens.weight"
_DENSE = "block.mlp.gate_proj.weight"  # experts have their own router and matrices


@dataclass(frozen=True, kw_only=True)
class MtpConfig:
    """The MTP modules of one checkpoint, in any layout."""

    layout: Layout
    """Naming of the tensors, which also implies the module's variant."""
    body: str
    """Model type of the decoder layer: one of `bodies.BODIES`."""
    block: Any = field(repr=False)
    """transformers config of the decoder layers, its per-layer lists those of the modules."""
    num_modules: int
    """Modules in the checkpoint."""
    hidden_first: bool = False
    """The projection takes [hidden ; embedding] instead of [embedding ; hidden]."""
    hidden: Hidden = "post_norm"
    """Hidden states that are read from the target and recycled: after or before the last norm."""
    pos0_mask: bool = False
    """The embedding is zero in the row of position 0."""
    num_draft_tokens: int
    """K that the checkpoint suggests."""

    @property
    def hidden_size(self) -> int:
        """Width of the modules, which is the target's."""
        return int(self.block.hidden_size)

    @property
    def chooses_keys(self) -> bool:
        """True where the block has an indexer, which chooses the keys that a token sees."""
        return hasattr(self.block, "index_topk")

    @property
    def vocab_size(self) -> int:
        """Rows of embedding and head."""
        return int(self.block.vocab_size)

    def describe(self) -> str:
        """The resolved spec on one line."""
        order = "[hidden ; embedding]" if self.hidden_first else "[embedding ; hidden]"
        mask = ", position 0 masked" if self.pos0_mask else ""
        return (
            f"mtp {self.layout} x{self.num_modules}, block {self.body}, hidden {self.hidden_size}, "
            f"vocab {self.vocab_size}, {order}, {self.hidden} hidden states{mask}, K "
            f"{self.num_draft_tokens}"
        )


def normalise(raw: Mapping[str, Any], names: Iterable[str], *, pos0_mask: bool) -> MtpConfig:
    """Read config.json and the tensors' names into one `MtpConfig`.

    Raises:
        CheckpointError: no modules, or not as many as the config says.
        NotSupported: a body or rope type that is not built; the message names it.
    """
    modules = module_names(raw, names)
    if not modules:
        raise CheckpointError(
            "the checkpoint holds no MTP modules; expected tensors such as "
            "model.layers.N.eh_proj.weight, model.mtp_layers.0.* or mtp.fc.weight"
        )
    layout = layout_of(raw, modules)
    new_names = set(modules.values())
    found = 1 + max(int(new.split(".")[1]) for new in new_names)
    inner = raw.get("transformer_layer_config" if layout == "speculators" else "text_config", raw)
    said = next((inner[key] for key in _COUNTS if inner.get(key)), None)
    if said is not None and int(said) != found and layout != "speculators":
        raise CheckpointError(
            f"config.json says {said} MTP modules, the tensors are those of {found}; copy the "
            "checkpoint again"
        )
    body = str(inner.get("model_type"))
    check_body(body)
    if inner.get("mtp_use_dedicated_embeddings") and f"steps.0.{_EMBEDDING}" not in new_names:
        raise CheckpointError(
            "config.json says mtp_use_dedicated_embeddings, expected mtp.embed_tokens.weight among "
            "the tensors; copy the checkpoint again"
        )
    dense = [index for index in range(found) if f"steps.{index}.{_DENSE}" in new_names]
    return MtpConfig(
        layout=layout,
        body=body,
        block=block_config(body, inner, found, dense=dense),
        num_modules=found,
        hidden_first=layout == "mimo",
        hidden="pre_norm" if layout in ("step", "ernie") else "post_norm",
        pos0_mask=pos0_mask,
        num_draft_tokens=_suggested(raw) or found,
    )


def _suggested(raw: Mapping[str, Any]) -> int:
    """K of a speculators config, 0 elsewhere."""
    methods = (raw.get("speculators_config") or {}).get("proposal_methods") or []
    return int(methods[0].get("speculative_tokens") or 0) if methods else 0
