"""The authors' EAGLE-1 config.json, read into one `EagleConfig`.

A llama config with one layer.  What the tensors can tell (biases, its own embedding) is taken
from them; `bias` and `qkv_bias`, where config.json has them, must agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from compilespec.methods.capabilities import FINAL_NORM
from compilespec.methods.decoder_body import body_config, body_sizes
from compilespec.methods.eagle.layout import check_layout, read_body
from compilespec.methods.eagle3.config import Eagle3Config


@dataclass(frozen=True, kw_only=True)
class EagleConfig(Eagle3Config):
    """One EAGLE-1 head.  Every field means the same as for EAGLE-3; the one aux layer is the
    target's last hidden state after the final norm, and the head is always the target's.
    """

    def describe(self) -> str:
        """The resolved spec on one line."""
        rope = dict(self.rope)
        return (
            f"eagle {self.body} x{self.num_layers}, hidden {self.hidden_size}, heads "
            f"{self.num_heads}/{self.num_kv_heads}x{self.head_dim}, vocab {self.vocab_size}, fc "
            f"{'with' if self.fc_bias else 'without'} bias, rope {rope['rope_type']} theta "
            f"{rope['rope_theta']:g}, embedding {'own' if self.own_embedding else 'target'}, "
            f"lm_head target, K {self.num_draft_tokens}"
        )


def read_eagle_config(
    raw: Mapping[str, Any], shapes: Mapping[str, torch.Size], source: str
) -> EagleConfig:
    """Read config.json and the tensors' names and shapes.

    Args:
        raw: config.json as it is; `{"model_type": "eagle", "model": {...}}` is unwrapped.
        shapes: tensor names and their shapes.
    Raises:
        CheckpointError: not an EAGLE-1 checkpoint, or the config is incomplete.
        NotSupported: a body or variant that is not built; the message names it.
    """
    check_layout(raw, shapes, source)
    wrapped = raw.get("model")
    fields = wrapped if isinstance(wrapped, Mapping) else raw
    body = read_body(fields)
    layer = body_config(body, fields)
    has_bias = "layers.0.self_attn.q_proj.bias" in shapes
    return EagleConfig(
        layout="safeailab",
        target_hidden_size=layer.hidden_size,
        draft_vocab_size=layer.vocab_size,
        **body_sizes(body, layer),
        qkv_bias=bool(fields.get("qkv_bias", fields.get("attention_bias", has_bias)) or has_bias),
        out_bias="layers.0.self_attn.o_proj.bias" in shapes,
        mlp_bias="layers.0.mlp.gate_proj.bias" in shapes,
        fc_bias=bool(fields.get("bias", "fc.bias" in shapes)),
        own_embedding="embed_tokens.weight" in shapes,
        own_lm_head=False,
        aux_layers=(FINAL_NORM,),
        aux_source="what enters the target's head",
    )
