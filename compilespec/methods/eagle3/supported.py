"""Which EAGLE-3 heads are supported: one check of a head, in any format."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from compilespec.errors import CheckpointError, NotSupported
from compilespec.methods.decoder_body import BODIES
from compilespec.methods.eagle3.layout import HeadFormat

_BUILT = f"bodies: {', '.join(BODIES)}"
# A part of a tensor's name, and the variant that it identifies.
VARIANTS_BY_TENSOR = {
    "kv_a_proj": f"EAGLE-3 with an MLA body (kv_a_proj tensors) is not built; {_BUILT}",
    "q_a_proj": f"EAGLE-3 with an MLA body (q_a_proj tensors) is not built; {_BUILT}",
    ".experts.": f"EAGLE-3 with a mixture-of-experts body is not built; {_BUILT}",
    "mask_hidden": "a P-EAGLE head (mask_hidden: parallel drafting); give spec='peagle'",
    "eh_proj": "EAGLE-3 heads with eh_proj before the attention are not built",
}
# A flag of config.json, the value that selects a variant, and the variant.
VARIANTS_BY_FLAG = (
    ("eh_proj_before_attn", True, "EAGLE-3 heads with eh_proj before the attention are not built"),
    (
        "use_aux_hidden_state",
        False,
        "EAGLE-3 on the last hidden state alone (use_aux_hidden_state=false) is not built",
    ),
    (
        "next_layer_regular",
        False,
        "EAGLE-3 layers that all take [embedding, hidden] (next_layer_regular=false) are not built",
    ),
)


def check_supported(head: HeadFormat, shapes: Mapping[str, torch.Size]) -> None:
    """Refuse a checkpoint that is not an EAGLE-3 head, or a variant that is not built.

    Args:
        shapes: canonical tensor names and their shapes.
    Raises: NotSupported (names the variant), CheckpointError.
    """
    for part, message in VARIANTS_BY_TENSOR.items():
        if any(part in name for name in shapes):
            raise NotSupported(message)
    for flag, value, message in VARIANTS_BY_FLAG:
        given = head.flag(flag)
        if given is not None and bool(given) is value:
            raise NotSupported(message)
    for name in shapes:
        if name.endswith("hidden_norm.weight") and not name.startswith("layers.0."):
            raise NotSupported(
                f"{name}: multi-layer heads that call the later layers' input norm hidden_norm "
                "are not built; expected input_layernorm there"
            )
    if "layers.0.hidden_norm.weight" not in shapes or "fc.weight" not in shapes:
        raise CheckpointError(
            "not an EAGLE-3 checkpoint: expected fc.weight and midlayer.hidden_norm.weight (or "
            f"layers.0.hidden_norm.weight), got {', '.join(sorted(shapes)[:4]) or 'no tensors'}, "
            "..."
        )
    if len(shapes["fc.weight"]) != 2:
        raise CheckpointError(f"fc.weight: expected 2 dimensions, got {list(shapes['fc.weight'])}")
