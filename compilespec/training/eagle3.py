"""Training of an EAGLE-3 head: its training-time test, on the module that the engine runs.

Draft step j of origin t takes the token at t+1+j at position t+j, and the hidden state that step
j-1 gave.  Its attention sees what a drafter's cache would hold: the first step's keys of this and
earlier origins, and the later steps' keys of this origin.

Source: Li et al. 2025 (EAGLE-3).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from compilespec.errors import DraftMismatch, InvalidOption
from compilespec.methods.eagle3.aux_layers import resolve_aux_layers
from compilespec.methods.eagle3.config import Eagle3Config
from compilespec.methods.eagle3.drafter import Eagle3Drafter, FusedLayer
from compilespec.methods.eagle3.save import save_head
from compilespec.methods.parts.layers import Attention, rotate
from compilespec.tracing.target_info import TargetInfo
from compilespec.training.batches import Batch, Lesson
from compilespec.training.method import StepLosses, TrainingMethod
from compilespec.training.options import TrainOptions
from compilespec.training.target_loss import step_cost

WHOLE_VOCABULARY, REDUCED_VOCABULARY = 16_384, 8_192
INITIAL_STD = 0.02


class Eagle3Training(TrainingMethod):
    """A head of one decoder layer, with a reduced vocabulary where the target's is large."""

    spec = "eagle3"

    def __init__(self) -> None:
        self._step: Any = draft_step

    def create(self, info: TargetInfo, counts: Tensor, options: TrainOptions) -> nn.Module:
        config = head_config(info, options)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(options.seed)
            drafter = Eagle3Drafter(config).float()
            initialise(drafter)
        if drafter.d2t is not None:
            kept = frequent_ids(counts, config.draft_vocab_size)
            drafter.d2t.copy_(kept - torch.arange(len(kept)))
        start_from_target(drafter, info)
        return drafter.to(info.device)

    def aux_layers(self, drafter: nn.Module) -> tuple[int, ...]:
        return cast(Eagle3Drafter, drafter).aux_layers

    def draft_ids(self, drafter: nn.Module) -> Tensor | None:
        return cast(Eagle3Drafter, drafter).draft_ids

    def losses(self, drafter: nn.Module, lesson: Lesson, depth: int) -> StepLosses:
        head = cast(Eagle3Drafter, drafter)
        outputs = self._unroll(head, lesson.aux, lesson.batch, depth)
        return judge(lesson, outputs, head.norm, head.lm_head.weight, head.draft_ids)

    def save(self, drafter: nn.Module, directory: Path, dtype: torch.dtype, layout: str) -> None:
        stored = copy.deepcopy(drafter).to(dtype)
        save_head(cast(Eagle3Drafter, stored), directory, layout)  # type: ignore[arg-type]

    def compile_steps(self) -> None:
        self._step = torch.compile(draft_step, dynamic=True, fullgraph=True)

    def _unroll(
        self, head: Eagle3Drafter, aux_BTE: Tensor, batch: Batch, depth: int
    ) -> list[Tensor]:
        """The hidden state [B, A, D] of every draft step of every origin."""
        layer = cast(FusedLayer, head.layers[0])
        hidden_BTD = head.combine(aux_BTE)
        every_T = torch.arange(batch.ids.shape[1], device=batch.ids.device).expand(batch.ids.shape)
        key, value = project(head, layer, batch.ids_at(every_T + 1), hidden_BTD, every_T)
        first = batch.origins[..., None]
        visible = every_T[:, None] <= first  # [B, A, T]
        index = first.clamp_max(batch.ids.shape[1] - 1).expand(-1, -1, hidden_BTD.shape[2])
        hidden, outputs = hidden_BTD.gather(1, index), []
        own: list[tuple[Tensor, Tensor]] = []
        for step in range(depth):
            at_BA = batch.origins + step
            cos, sin = head.rope(at_BA, hidden.dtype)
            embed = F.embedding(batch.ids_at(at_BA + 1), head.embed_tokens.weight)
            hidden, key_value = self._step(
                layer, embed, hidden, cos, sin, key, value, visible, own, step > 0
            )
            own = [*own, key_value] if step else own
            outputs.append(hidden)
            if head.config.norm_output:
                hidden = head.norm(hidden)
        return outputs


def judge(
    lesson: Lesson,
    outputs: Iterable[Tensor],
    norm: nn.Module,
    head: Tensor,
    draft_ids: Tensor | None = None,
) -> StepLosses:
    """The losses of the hidden states [B, A, D] of the draft steps, one step after the other."""
    batch, losses, rights = lesson.batch, [], []
    right_BA = torch.ones(batch.origins.shape, device=batch.origins.device)
    for step, hidden in enumerate(outputs):
        probs, best = lesson.judge(step)
        weight_BA = batch.weights(step)
        total, chosen_BA = step_cost(hidden, norm, head, probs, weight_BA)
        count = weight_BA.sum().clamp_min(1)
        target_ids = chosen_BA if draft_ids is None else draft_ids[chosen_BA]
        right_BA = right_BA * (target_ids == best) * weight_BA
        losses.append(total / count)
        rights.append(right_BA.sum() / count)
    return StepLosses(losses=torch.stack(losses), right=torch.stack(rights))


def project(
    head: Eagle3Drafter, layer: FusedLayer, ids_BT: Tensor, hidden_BTD: Tensor, position_BT: Tensor
) -> tuple[Tensor, Tensor]:
    """The first step's keys and values [B, T, Nkv, H] of all rows."""
    embed = F.embedding(ids_BT, head.embed_tokens.weight)
    cos, sin = head.rope(position_BT, hidden_BTD.dtype)
    return keys_values(layer.self_attn, fused_input(layer, embed, hidden_BTD), cos, sin)


def fused_input(layer: FusedLayer, embed: Tensor, hidden: Tensor) -> Tensor:
    return torch.cat((layer.input_layernorm(embed), layer.hidden_norm(hidden)), -1)


def keys_values(
    attention: Attention, fused: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    heads = (*fused.shape[:2], attention.num_kv_heads, attention.head_dim)
    key = attention.k_proj(fused).view(heads)
    key = key if attention.k_norm is None else attention.k_norm(key)
    return rotate(key, cos, sin), attention.v_proj(fused).view(heads)


def draft_step(
    layer: FusedLayer,
    embed: Tensor,
    hidden: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_BTNH: Tensor,
    value_BTNH: Tensor,
    visible_BAT: Tensor,
    own: list[tuple[Tensor, Tensor]],
    adds_own: bool,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """One draft step of the rows [B, A]: the new hidden state, and the step's keys and values.

    Args:
        own: those of the steps in between, [B, A, Nkv, H] each, of the row's own origin.
        adds_own: whether this step's own are not among `key_BTNH` already.
    """
    attention, normed = layer.self_attn, layer.hidden_norm(hidden)
    fused = torch.cat((layer.input_layernorm(embed), normed), -1)
    query = attention.q_proj(fused).unflatten(-1, (attention.num_heads, attention.head_dim))
    query = query if attention.q_norm is None else attention.q_norm(query)
    query = rotate(query, cos, sin)
    mine = keys_values(attention, fused, cos, sin)
    pairs = [(key_BTNH, value_BTNH), *own, *([mine] if adds_own else [])]
    keys, values = ([one.transpose(1, 2) for one in column] for column in zip(*pairs, strict=True))
    out = attend_with_own(query.transpose(1, 2), keys, values, visible_BAT, attention.scale)
    residual = normed if layer.norm_before_residual else hidden
    hidden = residual + attention.o_proj(out.transpose(1, 2).flatten(2))
    return hidden + layer.mlp(layer.post_attention_layernorm(hidden)), mine


def attend_with_own(
    query_BNAH: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    visible_BAT: Tensor,
    scale: float,
) -> Tensor:
    """Attention [B, N, A, H] of later draft steps.

    Args:
        keys, values: first all rows' [B, Nkv, T, H], then the draft steps' [B, Nkv, A, H], of which
            each row sees its own.
        visible_BAT: which of all rows a row sees.
    """
    itself = torch.eye(query_BNAH.shape[2], dtype=torch.bool, device=query_BNAH.device)
    own = itself.expand(len(query_BNAH), -1, -1)
    return F.scaled_dot_product_attention(
        query_BNAH,
        torch.cat(list(keys), 2),
        torch.cat(list(values), 2),
        attn_mask=torch.cat([visible_BAT, *[own] * (len(keys) - 1)], 2)[:, None],
        scale=scale,
        enable_gqa=True,
    )


def head_config(info: TargetInfo, options: TrainOptions) -> Eagle3Config:
    """A head of the target's own shape: one layer, its heads and its rope.

    Raises: InvalidOption, DraftMismatch (fewer than 4 layers).
    """
    rows = options.draft_vocab_size
    if rows is None:
        small = info.vocab_size <= WHOLE_VOCABULARY
        rows = info.vocab_size if small else REDUCED_VOCABULARY
    if rows > info.vocab_size:
        raise InvalidOption(
            f"draft_vocab_size must be at most the target's {info.vocab_size}; got {rows}"
        )
    aux, source = _aux_layers(info.num_layers)
    sizes = layer_sizes(info, options)
    return Eagle3Config(
        layout="safeailab",
        body="llama",
        hidden_size=info.hidden_size,
        target_hidden_size=info.hidden_size,
        intermediate_size=sizes["intermediate_size"],
        num_layers=1,
        num_heads=sizes["num_attention_heads"],
        num_kv_heads=sizes["num_key_value_heads"],
        head_dim=sizes["head_dim"],
        vocab_size=info.vocab_size,
        draft_vocab_size=rows,
        rms_norm_eps=sizes["rms_norm_eps"],
        hidden_act="silu",
        max_position_embeddings=info.max_seq_len or 4096,
        rope=(("rope_theta", sizes["rope_theta"]), ("rope_type", "default")),
        has_d2t=rows < info.vocab_size,
        aux_layers=aux,
        aux_source=source,
        num_draft_tokens=options.num_draft_tokens,
        target_name=getattr(info.config, "_name_or_path", None) or None,
        target_architectures=tuple(getattr(info.config, "architectures", None) or ()),
    )


def layer_sizes(info: TargetInfo, options: TrainOptions) -> dict[str, Any]:
    """A llama layer of the target's own shape, by the names of transformers' config.

    Raises: DraftMismatch if the target has no attention to take it from.
    """
    if not info.kv_layers:
        raise DraftMismatch("the target has no attention layers to take the head's shape from")
    kv = info.kv_layers[0]
    given = info.config.get_text_config() if hasattr(info.config, "get_text_config") else None
    num_heads = getattr(given, "num_attention_heads", None) or kv.num_heads
    return {
        "intermediate_size": options.intermediate_size
        or getattr(given, "intermediate_size", None)
        or 4 * info.hidden_size,
        "num_attention_heads": num_heads,
        "num_key_value_heads": kv.num_heads if num_heads % kv.num_heads == 0 else num_heads,
        "head_dim": kv.key_dim,
        "rms_norm_eps": getattr(given, "rms_norm_eps", None) or 1e-5,
        "rope_theta": _theta(given),
    }


def _aux_layers(num_layers: int) -> tuple[tuple[int, ...], str]:
    """The published default; three spread-out layers for small targets."""
    if num_layers >= 7:
        return resolve_aux_layers({}, num_layers, 3)
    if num_layers < 2:
        raise DraftMismatch(f"EAGLE-3 needs a target of two layers or more; got {num_layers}")
    return tuple(sorted({1, (num_layers + 1) // 2, num_layers})), "training"


def _theta(given: Any) -> float:
    parameters = getattr(given, "rope_parameters", None) or {}
    theta = parameters.get("rope_theta") if isinstance(parameters, dict) else None
    return float(theta or 10_000.0)


def initialise(drafter: Eagle3Drafter) -> None:
    """Draw the matrices from the global random state; what a residual takes in starts smaller."""
    for name, parameter in drafter.named_parameters():
        if parameter.ndim == 2:
            inner = name.endswith(("o_proj.weight", "down_proj.weight"))
            nn.init.normal_(parameter, std=INITIAL_STD / 2**0.5 if inner else INITIAL_STD)


@torch.no_grad()
def start_from_target(drafter: Eagle3Drafter, info: TargetInfo) -> None:
    """Begin at the target's head on its last tapped layer; share its embedding."""
    drafter.embed_tokens.share(info.embedding.detach().cpu().float())
    rows = (
        info.lm_head
        if drafter.draft_ids is None
        else info.lm_head[drafter.draft_ids.to(info.device)]
    )
    drafter.lm_head.weight.copy_(rows)
    width = info.hidden_size
    drafter.fc.weight[:, -width:] += torch.eye(width)


def frequent_ids(counts: Tensor, size: int) -> Tensor:
    """The ids that occur most often, ascending; of equal counts the smaller."""
    return counts.sort(descending=True, stable=True).indices[:size].sort().values
