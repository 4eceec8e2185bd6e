"""llama.cpp on the same weights, where `llama-cpp-python` and `gguf` happen to be installed.

Neither is a dependency.  The checkpoint is written to a temporary GGUF file, matrices in the
model's own dtype; without a vocabulary, which llama.cpp does not need (ids go in, ids come out).
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tools.bench.way import Setup, Unavailable

LAYER_TENSORS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}

WITHOUT_AMX = (
    "-DGGML_NATIVE=OFF -DGGML_AVX512=ON -DGGML_AVX512_VBMI=ON -DGGML_AVX512_VNNI=ON "
    "-DGGML_AVX512_BF16=ON"
)


def library() -> Any:
    """The module `llama_cpp`.  Raises: Unavailable without it, or without gguf."""
    try:
        import gguf  # noqa: F401
        import llama_cpp
    except ImportError as error:
        raise Unavailable(f"{error.name} is not installed") from error
    return llama_cpp


class LlamaCppWay:
    """Greedy decoding by llama.cpp, batch 1: one `eval` per token, argmax outside.

    Args:
        kind: of the matrices, such as "Q8_0" or "Q4_1" of GGUF; None: the model's own dtype.
    """

    max_batch_size = 1

    def __init__(self, setup: Setup, name: str, kind: str | None = None) -> None:
        llama_cpp = library()
        if kind is not None and b"AMX_INT8 = 1" in llama_cpp.llama_print_system_info():
            raise Unavailable(
                "llama.cpp built with AMX dies of an illegal instruction in quantized products "
                "(ggml-org/llama.cpp#26954); build llama-cpp-python without it: "
                f'CMAKE_ARGS="{WITHOUT_AMX}" pip install --no-cache-dir --force-reinstall '
                "llama-cpp-python"
            )
        self.name = name
        self.max_new_tokens = setup.max_new_tokens
        self.folder = tempfile.TemporaryDirectory(prefix="compilespec-bench-")
        path = Path(self.folder.name) / "model.gguf"
        write_gguf(setup.model, path, kind)
        config: Any = setup.model.config
        self.llama: Any = llama_cpp.Llama(
            model_path=str(path),
            n_ctx=min(config.max_position_embeddings, 2048),
            n_threads=setup.num_threads,
            n_threads_batch=setup.num_threads,
            verbose=False,
        )
        self.vocab_size = int(config.vocab_size)
        self.get_logits = llama_cpp.llama_get_logits

    def generate(
        self, prompts: list[list[int]], max_new_tokens: int | None = None
    ) -> list[list[int]]:
        length = max_new_tokens or self.max_new_tokens
        return [self._generate_one(prompt, length) for prompt in prompts]

    def _generate_one(self, prompt: list[int], max_new_tokens: int) -> list[int]:
        import numpy as np

        self.llama.reset()
        pending, tokens = prompt, list[int]()
        for _ in range(max_new_tokens):
            self.llama.eval(pending)
            logits_V = np.ctypeslib.as_array(self.get_logits(self.llama.ctx), (self.vocab_size,))
            pending = [int(logits_V.argmax())]
            tokens += pending
        return tokens

    def stats(self) -> dict[str, object]:
        return {}

    def close(self) -> None:
        self.llama.close()
        self.folder.cleanup()


def write_gguf(
    model: Any, path: Path, kind: str | None = None, tokenizer: Path | None = None
) -> None:
    """Write a Llama-architecture model as GGUF, its matrices in one of GGUF's kinds.

    Args: tokenizer: a tokenizer.json of the GPT-2 kind, for readers that want a vocabulary.
    Raises:
        Unavailable: another architecture, or a feature (biases, rope scaling) not written here.
    """
    import gguf

    config = model.config
    if config.model_type != "llama":
        raise Unavailable(f"the converter writes llama models, not {config.model_type}")
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") != "default":
        raise Unavailable(f"the converter does not write rope type {rope['rope_type']!r}")
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads

    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(float(rope.get("rope_theta", 10000.0)))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if tokenizer is None:
        writer.add_tokenizer_model("no_vocab")
    else:
        _add_vocabulary(writer, config, json.loads(tokenizer.read_text(encoding="utf-8")))
    if kind is not None:
        writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{kind}"])
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)

    state: dict[str, Tensor] = model.state_dict()
    heads = {"self_attn.q_proj": config.num_attention_heads}
    heads["self_attn.k_proj"] = config.num_key_value_heads
    _add(writer, "token_embd.weight", state["model.embed_tokens.weight"], kind)
    for layer in range(config.num_hidden_layers):
        for source, name in LAYER_TENSORS.items():
            if f"model.layers.{layer}.{source}.bias" in state:
                raise Unavailable("the converter does not write biases")
            weight = state[f"model.layers.{layer}.{source}.weight"]
            if source in heads:
                weight = _interleave_rope(weight, heads[source])
            _add(writer, f"blk.{layer}.{name}.weight", weight, kind)
    _add(writer, "output_norm.weight", state["model.norm.weight"])
    if not config.tie_word_embeddings:
        _add(writer, "output.weight", state["lm_head.weight"], kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_vocabulary(writer: Any, config: Any, tokenizer: dict[str, Any]) -> None:
    import gguf

    added = {one["id"]: one["content"] for one in tokenizer["added_tokens"]}
    names = {number: name for name, number in tokenizer["model"]["vocab"].items()} | added
    ids = range(config.vocab_size)
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    merges = tokenizer["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([names.get(number, f"<unused {number}>") for number in ids])
    writer.add_token_types([control if number in added else normal for number in ids])
    writer.add_token_merges([one if isinstance(one, str) else " ".join(one) for one in merges])
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)


def _interleave_rope(weight_ND: Tensor, num_heads: int) -> Tensor:
    """Rows from "first half, second half" of each head to the pairs that llama.cpp rotates."""
    rows, columns = weight_ND.shape
    halves = weight_ND.reshape(num_heads, 2, rows // num_heads // 2, columns)
    return halves.transpose(1, 2).reshape(rows, columns)


def _add(writer: Any, name: str, weight: Tensor, kind: str | None = None) -> None:
    import gguf

    weight = weight.detach().cpu()
    if weight.ndim == 1:  # llama.cpp wants norms in float32
        writer.add_tensor(name, weight.float().numpy())
    elif kind is not None:
        number = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(name, gguf.quantize(weight.float().numpy(), number), raw_dtype=number)
    elif weight.dtype == torch.bfloat16:
        writer.add_tensor(
            name,
            weight.contiguous().view(torch.uint8).numpy(),
            raw_dtype=gguf.GGMLQuantizationType.BF16,
        )
    else:
        writer.add_tensor(name, weight.contiguous().numpy())
