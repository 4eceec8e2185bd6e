"""The layouts of an EAGLE-3 checkpoint: where config.json keeps what, and names of tensors.

The EAGLE authors' is flat; SpecForge's and NVIDIA's is the same with a nested `eagle_config`;
speculators' has the decoder layer under `transformer_layer_config`.  The format is recognised by
content, never by file name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from compilespec.errors import CheckpointError, NotSupported
from compilespec.methods.decoder_body import BODIES, named_body, positive

Layout = Literal["safeailab", "speculators"]
DEFAULT_NUM_DRAFT_TOKENS = 3
UNSPECIFIC_TYPES = (None, "eagle3", "eagle", "llama_eagle3", "eagle3_llama")  # name no body

LEGACY_NAMES = {
    "aux_norm_low.": "fc_norm.0.",
    "aux_norm_mid.": "fc_norm.1.",
    "aux_norm_high.": "fc_norm.2.",
}


@dataclass(frozen=True, kw_only=True)
class HeadFormat:
    """What a config.json says about a head, read from where its format keeps it."""

    layout: Layout
    """Naming of its tensors."""
    body_fields: Mapping[str, Any]
    """The config of the decoder layer."""
    flag_places: tuple[Mapping[str, Any], ...]
    """The mappings that may hold the head's own flags; the first that has a flag wins."""
    architectures: tuple[str, ...]
    """Names of the classes that wrote it."""
    num_draft_tokens: int
    """K that the checkpoint suggests."""

    @property
    def body(self) -> str:
        """The model type of the decoder layer, or else the body in the architecture's name.

        Raises: NotSupported.
        """
        model_type = self.body_fields.get("model_type")
        if model_type in BODIES:
            return str(model_type)
        if self.body_fields.get("kv_lora_rank"):
            raise NotSupported(
                f"EAGLE-3 with an MLA body ({model_type}) is not built; bodies: {', '.join(BODIES)}"
            )
        named = named_body(self.architectures)
        if model_type in UNSPECIFIC_TYPES and (named or not self.architectures):
            return named or "llama"
        raise NotSupported(
            f"EAGLE-3 body {model_type!r} (architectures {list(self.architectures)}) is not "
            f"built; bodies: {', '.join(BODIES)}"
        )

    def flag(self, key: str) -> Any:
        """The value of a flag; None if no mapping has it."""
        return next((place[key] for place in self.flag_places if place.get(key) is not None), None)

    def is_on(self, *keys: str) -> bool:
        """True where one of the flags is true."""
        return any(bool(self.flag(key)) for key in keys)


def read_format(raw: Mapping[str, Any], kind: str = "eagle3") -> HeadFormat:
    """Read a config.json of any format, of a head of speculators' `kind`.

    Raises: CheckpointError, NotSupported.
    """
    is_speculators = "speculators_model_type" in raw
    return HeadFormat(
        layout="speculators" if is_speculators else "safeailab",
        body_fields=_speculators_body(raw, kind) if is_speculators else raw,
        flag_places=(raw, raw.get("eagle_config") or {}),
        architectures=_architectures(raw),
        num_draft_tokens=_num_draft_tokens(raw),
    )


def _speculators_body(raw: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    given = raw["speculators_model_type"]
    if given != kind:
        raise NotSupported(
            f"speculators_model_type {given!r}: {kind} loads {kind!r} only; give spec={given!r} if "
            "that is a method"
        )
    body_fields = raw.get("transformer_layer_config")
    if not isinstance(body_fields, Mapping):
        raise CheckpointError("config.json: speculators format without transformer_layer_config")
    return body_fields


def _architectures(raw: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(str(name) for name in raw.get("architectures") or ())


def _num_draft_tokens(raw: Mapping[str, Any]) -> int:
    proposals = (raw.get("speculators_config") or {}).get("proposal_methods") or [{}]
    return positive(
        proposals[0].get("speculative_tokens") or DEFAULT_NUM_DRAFT_TOKENS, "speculative_tokens"
    )


def canonical_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename the tensors of every layout to the drafter module's names.

    `midlayer.` becomes `layers.0.`, `midlayer.{i}.` becomes `layers.{i}.`, `aux_norm_low.` and so
    on `fc_norm.{i}.`.
    """
    renamed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        new = re.sub(r"^midlayer\.(\d+)\.", r"layers.\1.", name)
        new = re.sub(r"^midlayer\.", "layers.0.", new)
        for old_prefix, new_prefix in LEGACY_NAMES.items():
            new = new_prefix + new.removeprefix(old_prefix) if new.startswith(old_prefix) else new
        if new in renamed:
            raise CheckpointError(
                f"tensor {new} appears twice, once as {name}; the checkpoint mixes two layouts"
            )
        renamed[new] = tensor
    return renamed
