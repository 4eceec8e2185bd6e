"""Tiny random targets of many families, and drafters with known behaviour."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from compilespec.methods.base import Drafter

VOCAB = 97  # not a power of two, not a multiple of any vector width
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}


def _config(kind: str, **changes: Any) -> Any:
    return getattr(transformers, kind)(**{**_COMMON, **changes})


FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: _config("LlamaConfig", head_dim=12),
    "qwen2": lambda: _config("Qwen2Config"),
    "qwen3": lambda: _config("Qwen3Config", head_dim=16),
    "mistral": lambda: _config("MistralConfig", sliding_window=9),
    "gemma2": lambda: _config(
        "Gemma2Config", head_dim=16, sliding_window=8, query_pre_attn_scalar=16, final_logit_softcapping=5.0
    ),
    "gemma3": lambda: _config("Gemma3TextConfig", head_dim=16, sliding_window=8),
    "phi3": lambda: _config("Phi3Config", sliding_window=None),
    "olmo2": lambda: _config("Olmo2Config"),
    "gpt_neox": lambda: _config("GPTNeoXConfig"),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=48, n_layer=7, n_head=4, n_positions=128, bos_token_id=1, eos_token_id=2
    ),
    "qwen3_moe": lambda: _config("Qwen3MoeConfig", head_dim=16, num_experts=4, **_MOE),
    "mixtral": lambda: _config("MixtralConfig", num_local_experts=4, num_experts_per_tok=2),
    "gpt_oss": lambda: _config(
        "GptOssConfig", head_dim=16, sliding_window=8, num_local_experts=4, num_experts_per_tok=2
    ),
}


def tiny_target(
    family: str, dtype: torch.dtype = torch.float64, seed: int = 0, experts: str = "batched_mm"
) -> nn.Module:
    """A random target whose greedy continuations are not trivial (weights larger than the default init)."""
    torch.manual_seed(seed)
    if family == "plain":
        model: nn.Module = PlainModel()
    else:
        model = transformers.AutoModelForCausalLM.from_config(
            FAMILIES[family](), attn_implementation="eager", experts_implementation=experts
        )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.copy_(torch.randn_like(parameter) * 1.4 / parameter.shape[-1] ** 0.5)
    return model.to(dtype).eval()


class PlainModel(nn.Module):
    """A decoder nobody registered anywhere: learned positions, scaled_dot_product_attention(is_causal=True)."""

    def __init__(self, width: int = 48, num_layers: int = 7, num_heads: int = 4, max_positions: int = 128) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, width)
        self.places = nn.Embedding(max_positions, width)
        self.blocks = nn.ModuleList(PlainBlock(width, num_heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCAB, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        hidden = self.tokens(ids) + self.places(places)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


class PlainBlock(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, width = hidden.shape
        parts = self.qkv(self.norm1(hidden)).view(batch, length, 3, self.num_heads, width // self.num_heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return hidden + self.down(nn.functional.gelu(self.up(self.norm2(hidden))))


def greedy_reference(model: nn.Module, prompt: list[int], num_tokens: int) -> list[int]:
    """The model's own greedy continuation: transformers' generate, or an eager loop without a cache."""
    with torch.no_grad():
        if hasattr(model, "generate"):
            ids = torch.tensor([prompt])
            output = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False,
                eos_token_id=None, pad_token_id=0,
            )  # fmt: skip
            return output[0, len(prompt) :].tolist()
        tokens = list(prompt)
        for _ in range(num_tokens):
            tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
        return tokens[len(prompt) :]


class ScriptedDrafter(Drafter):
    """Drafts from a script: the token that followed (position, token) in known sequences, plus `error`.

    With error 0 and the target's own continuations as the script every draft matches; with error 1 none does.
    """

    def __init__(self, sequences: list[list[int]], *, max_seq_len: int, aux_layers: tuple[int, ...], error: int) -> None:
        super().__init__()
        self.num_draft_tokens, self.aux_layers, self.error = 3, aux_layers, error
        script = torch.zeros(max_seq_len + 2, VOCAB, dtype=torch.int64)
        for tokens in sequences:
            for position in range(len(tokens) - 2):
                script[position, tokens[position + 1]] = tokens[position + 2]
        self.register_buffer("script", script)

    def combine(self, aux: Tensor) -> Tensor:
        return aux[..., :2]

    def forward(self, input_ids: Tensor, position_ids: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        pair = torch.stack([position_ids, input_ids], -1).to(hidden.dtype)
        return pair + hidden * 0, hidden

    def propose(self, head_input: Tensor) -> Tensor:
        position, token = head_input[:, 0].long(), head_input[:, 1].long()
        return ((self.script[position, token] + self.error) % VOCAB).to(torch.int32)
