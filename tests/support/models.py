"""Tiny random targets of many families, drafters with known behaviour, and traffic for them."""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from compilespec import SamplingParams
from compilespec.methods.base import Drafter
from compilespec.methods.recycled import RecycledDrafter
from compilespec.program import Traced
from compilespec.runtime.engine import Engine
from compilespec.runtime.request import Request
from compilespec.tracing.target_info import TargetInfo
from tests.support.hybrids import ROUTED, hybrid_configs
from tests.support.toy_tokenizer import byte_level_tokenizer

VOCAB = 97  # not a power of two, not a multiple of any vector width
COMMON: dict[str, Any] = {
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
_ROUTED = {
    **_MOE, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2, "topk_group": 1,
    "first_k_dense_replace": 1,
}  # fmt: skip
_LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 14, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6,
    "v_head_dim": 11,
}  # fmt: skip


def _config(kind: str, **changes: Any) -> Any:
    return getattr(transformers, kind)(**{**COMMON, **changes})


FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: _config("LlamaConfig", head_dim=12),
    "qwen2": lambda: _config("Qwen2Config"),
    "qwen3": lambda: _config("Qwen3Config", head_dim=16),
    "mistral": lambda: _config("MistralConfig", sliding_window=9),
    "gemma2": lambda: _config(
        "Gemma2Config",
        head_dim=16,
        sliding_window=8,
        query_pre_attn_scalar=16,
        final_logit_softcapping=5.0,
    ),
    "gemma3": lambda: _config("Gemma3TextConfig", head_dim=16, sliding_window=8),
    "phi3": lambda: _config("Phi3Config", sliding_window=None),
    "olmo2": lambda: _config("Olmo2Config"),
    "gpt_neox": lambda: _config("GPTNeoXConfig"),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCAB,
        n_embd=48,
        n_layer=7,
        n_head=4,
        n_positions=128,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "qwen3_moe": lambda: _config("Qwen3MoeConfig", head_dim=16, num_experts=4, **_MOE),
    "mixtral": lambda: _config("MixtralConfig", num_local_experts=4, num_experts_per_tok=2),
    "gpt_oss": lambda: _config(
        "GptOssConfig", head_dim=16, sliding_window=8, num_local_experts=4, num_experts_per_tok=2
    ),
    # latent attention: a dense layer, then layers of experts
    "deepseek_v3": lambda: _config("DeepseekV3Config", q_lora_rank=24, **_LATENT, **_ROUTED),
    "glm4_moe_lite": lambda: _config(
        "Glm4MoeLiteConfig", q_lora_rank=24, **_LATENT, **_ROUTED, mlp_layer_types=None
    ),
}

HYBRIDS = hybrid_configs(COMMON)
MOE = (  # transformers offers several products for the experts
    "qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "glm4_moe_lite", *ROUTED,
)  # fmt: skip
LATENT = ("deepseek_v3", "glm4_moe_lite")  # keys and values are one product of a latent
TIED = ("gemma2", "gemma3", "gpt2")  # one matrix is embedding and head


def tiny_target(
    family: str,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    experts: str = "batched_mm",
    num_layers: int | None = None,
) -> nn.Module:
    """A random target with larger weights than the default, so that its tokens are not trivial.

    Hybrids have four layers, for any `num_layers`.
    """
    torch.manual_seed(seed)
    if family == "plain":
        model: nn.Module = PlainModel(num_layers=num_layers or 7)
    else:
        config = {**FAMILIES, **HYBRIDS}[family]()
        if num_layers is not None and family in FAMILIES:
            if getattr(config, "layer_types", None):
                config.layer_types = config.layer_types[:num_layers]
            config.num_hidden_layers = num_layers
        model = transformers.AutoModelForCausalLM.from_config(
            config,
            attn_implementation="eager",
            **({"experts_implementation": experts} if family in MOE else {}),
        )
    return enliven(model, family).to(dtype).eval()


def tiny_hybrid(
    family: str, dtype: torch.dtype = torch.float64, seed: int = 0, num_layers: int = 2
) -> nn.Module:
    """A hybrid of fewer layers than `tiny_target`'s: one with a state, one with attention, ..."""
    torch.manual_seed(seed)
    config = HYBRIDS[family]()
    config.num_hidden_layers = num_layers
    config.layer_types = config.layer_types[:num_layers]
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return enliven(model, family).to(dtype).eval()


def long_rope_target(family: str = "phi3", short_limit: int = 24) -> nn.Module:
    """Its rotary embedding has a table for sequences of up to `short_limit` tokens, and another."""
    torch.manual_seed(0)
    config = FAMILIES[family]()
    half = config.hidden_size // config.num_attention_heads // 2
    config.num_hidden_layers, config.original_max_position_embeddings = 2, short_limit
    config.rope_parameters = {
        "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * half,
        "long_factor": [4.0 + i for i in range(half)],
        "original_max_position_embeddings": short_limit,
    }  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return enliven(model, family).double().eval()


def even_target(num_layers: int = 1, seed: int = 0) -> nn.Module:
    """A random llama in float32, of widths that two ranks' groups of 32 divide."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=num_layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128, head_dim=16,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return enliven(model, "llama").eval()


def enliven(model: nn.Module, family: str) -> nn.Module:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2 and not name.endswith("A_log"):  # rates, not products
                parameter.copy_(torch.randn_like(parameter) * 1.4 / parameter.shape[-1] ** 0.5)
        if family in TIED:  # else the last token's own row of the head wins, over and over
            model.get_input_embeddings().weight.mul_(0.3)
    return model


class PlainModel(nn.Module):
    """A decoder nobody registered; learned positions, scaled_dot_product_attention."""

    def __init__(
        self, width: int = 48, num_layers: int = 7, num_heads: int = 4, max_positions: int = 128
    ) -> None:
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
        parts = self.qkv(self.norm1(hidden)).view(
            batch, length, 3, self.num_heads, width // self.num_heads
        )
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return hidden + self.down(nn.functional.gelu(self.up(self.norm2(hidden))))


def greedy_reference(model: nn.Module, prompt: list[int], num_tokens: int) -> list[int]:
    """The model's own greedy tokens: transformers' generate, or an eager loop without a cache."""
    with torch.no_grad():
        if hasattr(model, "generate"):
            ids = torch.tensor([prompt])
            output = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=num_tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
            return output[0, len(prompt) :].tolist()
        tokens = list(prompt)
        for _ in range(num_tokens):
            tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
        return tokens[len(prompt) :]


def recomputed(model: nn.Module, prompt: list[int], num_tokens: int) -> list[int]:
    """The module's own greedy tokens: the whole sequence anew for each, without a cache."""
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(num_tokens):
            output = model(torch.tensor([tokens]))
            logits = output if isinstance(output, Tensor) else output.logits
            tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(prompt) :]


class ScriptedDrafter(RecycledDrafter):
    """Drafts what followed (position, token) in known sequences, plus `error`; has no cache.

    With error 0 and the target's own continuations as the script every draft matches, unless two
    sequences have the same token at the same position; with error 1 none does.
    """

    def __init__(
        self,
        sequences: list[list[int]],
        *,
        max_seq_len: int,
        aux_layers: tuple[int, ...],
        error: int,
    ) -> None:
        super().__init__()
        self.num_draft_tokens, self.aux_layers, self.error = 3, aux_layers, error
        script = torch.zeros(max_seq_len + 2, VOCAB, dtype=torch.int64)
        for tokens in sequences:
            for position in range(len(tokens) - 2):
                script[position, tokens[position + 1]] = tokens[position + 2]
        self.register_buffer("script", script)

    def combine(self, aux: Tensor) -> Tensor:
        return aux[..., :2]

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, hidden: Tensor
    ) -> tuple[Tensor, Tensor]:
        pair = torch.stack([position_ids, input_ids], -1).to(hidden.dtype)
        return pair + hidden * 0, hidden

    def propose(self, head_input: Tensor) -> Tensor:
        position, token = head_input[:, 0].long(), head_input[:, 1].long()
        return ((self.script[position, token] + self.error) % VOCAB).to(torch.int32)


def target_info(model: nn.Module, max_seq_len: int) -> TargetInfo:
    """What `describe_target` reads off a trace, read off the module: no trace to pay for."""
    if hasattr(model, "get_input_embeddings"):
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        num_layers = model.config.get_text_config().num_hidden_layers
    else:
        embedding, head, num_layers = model.tokens, model.head, len(model.blocks)
    return TargetInfo(
        hidden_size=head.weight.shape[1], vocab_size=head.weight.shape[0], num_layers=num_layers,
        dtype=head.weight.dtype, device=head.weight.device, embedding=embedding.weight.detach(),
        lm_head=head.weight.detach(), max_seq_len=max_seq_len,
    )  # fmt: skip


class DialDrafter(RecycledDrafter):
    """A head whose proposals can be replaced, by a dial turned between requests, with a script's.

    The scripted part drafts the next token of a known sequence if, and only if, its own KV cache
    holds exactly that sequence: its attention sums one random code for every (position, token) it
    has been fed, and the sum is looked up among those of the known prefixes.  So a lost, stale,
    doubled or foreign cache entry of the drafter costs acceptance, which the tests predict step by
    step.  One compiled program serves all settings.
    """

    def __init__(
        self, head: Drafter, *, max_seq_len: int, dtype: torch.dtype, num_entries: int = 1024
    ) -> None:
        super().__init__()
        self.head, self.max_seq_len = head, max_seq_len
        self.num_draft_tokens, self.aux_layers = head.num_draft_tokens, head.aux_layers
        seeded = torch.Generator().manual_seed(5)
        codes = torch.randn(max_seq_len, VOCAB, 8, generator=seeded, dtype=torch.float64)
        self.register_buffer("codes", codes.to(dtype))
        self.register_buffer("sums", torch.full((num_entries, 8), 1e6, dtype=dtype))
        self.register_buffer("following", torch.zeros(num_entries, dtype=torch.int64))
        self.register_buffer("offset", torch.zeros(max_seq_len + 2, dtype=torch.int64))
        self.register_buffer("foreign", torch.zeros(max_seq_len + 2, dtype=torch.int64))
        self.register_buffer("scripted", torch.zeros(1, dtype=torch.bool))

    def know(
        self, sequences: Iterable[Sequence[int]], *, starts: Iterable[int] | None = None
    ) -> None:
        """Learn sequences (prompt and continuation) by heart, in place of those known before.

        Args:
            starts: where each one's continuation starts: what prompts say need not be told apart.
        """
        sums, following, told = [], [], list(sequences)
        for place in range(len(self.foreign)):
            there = {tokens[place] for tokens in told if place < len(tokens)}
            self.foreign[place] = next(one for one in itertools.count() if one not in there)
        for tokens, start in zip(told, starts or itertools.repeat(1)):  # noqa: B905 endless
            fed = torch.as_tensor(tokens)[1:]
            prefix = self.codes[torch.arange(len(fed)), fed].to(torch.float64).cumsum(0)
            sums.append(prefix[start - 1 : -1])
            following.append(fed[start:])
        known, token = torch.cat(sums), torch.cat(following)
        near = torch.cdist(known, known) < 0.2  # twice what `propose` takes for the same
        assert bool((~near | (token[:, None] == token)).all()), "two sequences cannot be told apart"
        self.sums.fill_(1e6)[: len(known)] = known.to(self.sums.dtype)
        self.following[: len(token)] = token

    def draft_at_random(self) -> None:
        """The head's own proposals."""
        self.scripted.fill_(False)

    def draft_from_script(self, is_wrong: Callable[[int], bool]) -> None:
        """Scripted proposals, right but for the tokens at the positions that `is_wrong` names."""
        self.scripted.fill_(True)
        self.offset.copy_(torch.tensor([int(is_wrong(p)) for p in range(len(self.offset))]))

    def expected_steps(self, num_prompt: int, num_output: int, num_draft_tokens: int) -> list[int]:
        """`emitted_per_step` of a request whose sequence is known, under the present script."""
        steps, left, position = [], num_output - 1, num_prompt
        while left > 0:
            drafts = itertools.islice(self.offset[position + 1 :].tolist(), num_draft_tokens)
            count = 1 + len(list(itertools.takewhile(lambda wrong: not wrong, drafts)))
            steps.append(min(count, left))
            position, left = position + count, left - count
        return steps

    def combine(self, aux: Tensor) -> Tensor:
        return self.head.combine(aux)

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, hidden: Tensor
    ) -> tuple[Tensor, Tensor]:
        head_input, recycled = self.head(input_ids, position_ids, hidden)
        code_BSW = self.codes[position_ids.long(), input_ids.long()]
        value_B1SW = code_BSW.unsqueeze(1)
        alike = torch.zeros_like(
            value_B1SW
        )  # all keys score the same: attention is the codes' mean
        mean_BS1W = torch.ops.compilespec.attention(alike, alike, value_B1SW, 1.0, 0, 0.0, None)
        position_BS1 = position_ids.unsqueeze(-1).to(code_BSW.dtype)
        sum_BSW = mean_BS1W.squeeze(2) * (position_BS1 + 1)
        return torch.cat([head_input, sum_BSW, position_BS1], -1), recycled

    def propose(self, head_input: Tensor) -> Tensor:
        random_token = self.head.propose(head_input[:, :-9])
        sum_BW, position = head_input[:, -9:-1], head_input[:, -1].long()
        distance_BE = (sum_BW.unsqueeze(1) - self.sums).square().sum(-1)
        nearest = distance_BE.argmin(-1)
        is_known = distance_BE.gather(1, nearest.unsqueeze(1)).squeeze(1) < 1e-2
        place = (position + 2).clamp(max=self.max_seq_len)
        known = (self.following[nearest] + self.offset[place]) % VOCAB
        token = torch.where(is_known, known, self.foreign[place])  # the latter is right nowhere
        return torch.where(self.scripted, token.to(torch.int32), random_token)


# --- traffic ---------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One request and the tokens it must give."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]


def ask_all(model: nn.Module, sizes: Iterable[tuple[int, int]]) -> list[Ask]:
    """Requests of (prompt length, output length), with the model's own greedy tokens.

    No two have the same second token: a drafter, which never sees the first, can tell them apart.
    """
    draw = random.Random(0)
    asks: list[Ask] = []
    for num_prompt, num_output in sizes:
        seconds = {(*ask.prompt, *ask.tokens)[1] for ask in asks}
        while True:
            prompt = [draw.randrange(3, VOCAB) for _ in range(num_prompt)]  # no special ids
            if (prompt + greedy_reference(model, prompt, 1))[1] not in seconds:
                break
        tokens = greedy_reference(model, prompt, num_output)
        asks.append(Ask(prompt=tuple(prompt), tokens=tuple(tokens)))
    return asks


def run_traffic(engine: Engine, asks: Iterable[Ask], batches: Sequence[int]) -> list[Request]:
    """Put the requests through the engine; returns them finished, in order.

    One step runs with batches[0] unfinished requests, the next with batches[1], ...; then the last
    number is kept up while there are requests, which therefore join and leave in mid-flight.
    """
    queue, limits, limit = deque(asks), iter(batches), 0
    requests: list[Request] = []
    while queue or engine.has_work:
        limit = next(limits, limit)
        num_live = sum(not request.finished for request in requests)
        for _ in range(min(limit - num_live, len(queue))):
            ask = queue.popleft()
            params = SamplingParams(max_new_tokens=len(ask.tokens), ignore_eos=True)
            requests.append(engine.submit(list(ask.prompt), params))
        engine.step()
    return requests


def assert_nothing_held(engine: Engine) -> None:
    """Every state row and cache block is free."""
    scheduler = engine._scheduler
    assert not scheduler.has_work
    assert sorted(scheduler.holdings.free_rows) == list(
        range(engine.geometry.config.max_batch_size)
    )
    assert scheduler.holdings.pool.num_free == engine.geometry.config.num_blocks


def check_preempted(engine: Engine, asks: Sequence[Ask]) -> None:
    """Traffic that the cache is too small for gives the models' own tokens."""
    requests = run_traffic(engine, asks, (1, 3, 2, 3))
    assert [r.output_token_ids for r in requests] == [list(ask.tokens) for ask in asks]
    assert_nothing_held(engine)
    assert engine.stats().num_preemptions > 0


def save_byte_model(path: Path, *, num_layers: int, max_positions: int) -> Any:
    """Save a random Llama of bytes with its tokenizer; returns the model."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=257, hidden_size=32, intermediate_size=48, num_hidden_layers=num_layers,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=max_positions,
        eos_token_id=256,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(path)
    tokens = [*(bytes([byte]) for byte in range(256)), "<end>"]
    byte_level_tokenizer(tokens, eos="<end>").save_pretrained(path)
    return model


def poison(engine: Engine) -> None:
    """NaN in every cache cell and recurrent state, so that reading what was not written shows."""
    engine.reset_prefix_cache()
    poison_pool(engine)


def poison_pool(engine: Engine) -> None:
    """The same, of an engine that has computed nothing yet."""
    for name, buffer in engine._executor.buffers.items():
        if name.startswith(("cache.", "recurrence.", "causal_conv.")):
            buffer.fill_(float("nan"))
    for _, kept in engine._executor._copies.pairs:
        kept.fill_(float("nan"))


def call_traced(traced: Traced, **arguments: Tensor) -> tuple[Tensor, ...]:
    """Run a captured call as it is; a size symbol is a dimension of one of its arguments."""
    with torch.no_grad():
        results: tuple[Tensor, ...] = traced.graph_module(*traced.bind(**arguments))
    return results
