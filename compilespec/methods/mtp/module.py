"""One multi-token-prediction module: [embedding ; hidden] -> decoder layer -> norm -> head."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from compilespec.methods.mtp.bodies import BODIES, body_class, make_block
from compilespec.methods.mtp.config import MtpConfig
from compilespec.methods.parts.weights import Weight
from compilespec.tracing.attention import ATTENTION, MASKED, register_attention
from compilespec.tracing.masks import traced_mask

Rope = tuple[Tensor, Tensor]


class MtpStep(nn.Module):
    """One MTP module, which is one draft step.

    Row t takes the hidden state of position t (the target's, or the previous module's) and the
    embedding of the token that follows the one module before saw, x[t+1] for module 0.  Its state
    dict: enorm, hnorm, eh_proj, block.*, norm, embed_tokens, lm_head; the last two are the target's
    own unless the checkpoint has others.

    Source: DeepSeek-V3 report, section 2.2; the variants as in vLLM, SGLang and transformers.
    """

    def __init__(self, config: MtpConfig, index: int, rotary: nn.Module | None) -> None:
        super().__init__()
        register_attention()
        self.config, width = config, config.hidden_size
        norm = body_class(config.body, "RMSNorm")
        eps = getattr(config.block, BODIES[config.body].eps)
        self.enorm, self.hnorm = norm(width, eps=eps), norm(width, eps=eps)
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        self.block = make_block(config.body, config.block, index)
        self.norm = norm(width, eps=eps)
        self.rotary = rotary
        kinds = getattr(config.block, "layer_types", None)
        rope = config.block.rope_parameters if rotary is not None else {}
        by_kind = any(isinstance(value, dict) for value in rope.values())
        self.rope_kind = {"layer_type": kinds[index]} if kinds and by_kind else {}
        self.embed_tokens = Weight(config.vocab_size, width)
        self.lm_head = Weight(config.vocab_size, width)

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, hidden: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Run the module over rows [B, S].

        Args:
            input_ids: int32 or int64 target ids; negative ids (padding) count as 0.
            position_ids: position of the hidden state, t for row t.
            hidden: hidden_BSD of the target or of the previous module.
        Returns:
            head_input_BSD for `propose`, and recycled_BSD for the next module or row.
        """
        embed_BSD = functional.embedding(input_ids.clamp_min(0), self.embed_tokens.weight)
        if self.config.pos0_mask:
            embed_BSD = embed_BSD.masked_fill((position_ids == 0).unsqueeze(-1), 0.0)
        parts = [self.enorm(embed_BSD), self.hnorm(hidden)]
        if self.config.hidden_first:
            parts.reverse()
        fused_BSD = self.eh_proj(torch.cat(parts, dim=-1))
        rope = {}
        if self.rotary is not None:
            rotated = self.rotary(fused_BSD, position_ids, **self.rope_kind)
            rope = {"position_embeddings": rotated}
        output_BSD = self.block(
            fused_BSD,
            position_ids=position_ids,
            **rope,
            attention_mask=_causal(fused_BSD) if self.config.chooses_keys else None,
        )
        if isinstance(output_BSD, tuple):  # and the keys that it chose
            output_BSD = output_BSD[0]
        head_input_BSD = self.norm(output_BSD)
        return head_input_BSD, head_input_BSD if self.config.hidden == "post_norm" else output_BSD

    def logits(self, head_input: Tensor) -> Tensor:
        """Logits over the target's vocabulary, in the module's dtype."""
        return functional.linear(head_input, self.lm_head.weight)

    def propose(self, head_input: Tensor) -> Tensor:
        """Greedy draft tokens of rows [..., D]: int32 target ids."""
        return self.logits(head_input).argmax(dim=-1).to(torch.int32)


def _causal(rows_BSD: Tensor) -> Tensor:
    """The causal mask, bool [B, 1, S, S], which a block's indexer narrows."""
    batch, length, _ = rows_BSD.shape
    return traced_mask(batch, length, length, _is_before, rows_BSD.device)


def _is_before(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return key <= query


def build_steps(config: MtpConfig, num_steps: int, experts: str) -> nn.ModuleList:
    """`num_steps` modules on the meta device, their rotary frequencies real and on the CPU.

    Args:
        experts: transformers' implementation of the experts' products.
    """
    config.block._attn_implementation = MASKED if config.chooses_keys else ATTENTION
    config.block._experts_implementation = experts
    rotary = None
    if BODIES[config.body].has_rope:
        with torch.device("cpu"):
            rotary = body_class(config.body, "RotaryEmbedding")(config.block)
    with torch.device("meta"):
        return nn.ModuleList(MtpStep(config, index, rotary) for index in range(num_steps))
