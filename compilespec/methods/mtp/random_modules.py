"""MTP modules with random weights for any target: for tests and first experiments."""

from __future__ import annotations

from typing import Any

import torch

from compilespec.errors import InvalidOption
from compilespec.errors.suggest import not_one_of
from compilespec.methods.capabilities import Chain
from compilespec.methods.mtp.bodies import BODIES, block_config
from compilespec.methods.mtp.config import Hidden, MtpConfig
from compilespec.methods.mtp.drafter import MtpDrafter
from compilespec.methods.mtp.layout import Layout
from compilespec.methods.mtp.load import build, check_sizes, experts_of
from compilespec.methods.mtp.module import build_steps
from compilespec.methods.parts.random import random_tensor
from compilespec.ops.device import traits_of
from compilespec.tracing.target_info import TargetInfo


def random_modules(
    target: TargetInfo,
    num_modules: int = 3,
    *,
    seed: int = 0,
    body: str = "llama",
    layout: Layout = "deepseek",
    hidden: Hidden = "post_norm",
    hidden_first: bool = False,
    pos0_mask: bool = False,
    own_head: bool = False,
    recycled: bool = False,
    chain: Chain = "module_rows",
    **fields: Any,
) -> MtpDrafter:
    """Build random modules that fit `target`, in its dtype, on its device.

    Hardly any of their drafts are accepted, but they are complete: norm weights differ from 1,
    biases from 0.

    Args:
        target: sizes; its embedding is shared, and its head unless `own_head`.
        seed: seed of the weights, which differ between modules.
        body: model type of the decoder layer.
        recycled: module 0 drafts every token.
        fields: fields of the body's transformers config, such as `sliding_window` of "mistral".
    Raises:
        InvalidOption: an unknown body, or no module.
        DraftMismatch: fields that contradict the target.
    """
    if body not in BODIES:
        raise not_one_of("random_modules: body", body, BODIES)
    if num_modules < 1:
        raise InvalidOption(f"random_modules: num_modules must be 1 or more, got {num_modules}")
    raw = {**_sizes(target), "num_nextn_predict_layers": num_modules, **fields}
    config = MtpConfig(
        layout=layout, body=body, block=block_config(body, raw, num_modules),
        num_modules=num_modules, hidden=hidden, hidden_first=hidden_first, pos0_mask=pos0_mask,
        num_draft_tokens=num_modules,
    )  # fmt: skip
    check_sizes(config, target)
    names = build_steps(config, 1 if recycled else num_modules, experts_of(target)).state_dict()
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        f"steps.{name}": like
        if traits_of(target.device).is_meta
        else random_tensor(name, like.shape, generator)
        for name, like in sorted(names.items())
        if not name.endswith("embed_tokens.weight")
        and (own_head or not name.endswith("lm_head.weight"))
    }
    return build(config, tensors, target, recycled=recycled, chain=chain, source="random modules")


def _sizes(target: TargetInfo) -> dict[str, Any]:
    width = target.hidden_size
    head_dim = next((n for n in (128, 64, 32, 16, 8) if width % n == 0 and width // n >= 4), width)
    num_heads = max(1, width // head_dim)
    return {
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": target.num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads // 2 if num_heads % 2 == 0 else num_heads,
        "head_dim": head_dim,
        "vocab_size": target.vocab_size,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": target.max_seq_len or 4096,
    }
