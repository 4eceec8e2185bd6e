"""A tiny GGUF file, as llama.cpp's converter writes them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import transformers

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


def tiny_llama() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=260, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
        tie_word_embeddings=False, bos_token_id=256, eos_token_id=257, rms_norm_eps=1e-5,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


GGUF_NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm", "model.embed_tokens": "token_embd",
    "model.norm": "output_norm", "lm_head": "output", "model.layers": "blk",
}  # fmt: skip


def write_gguf(model: Any, path: Path, types: Mapping[str, str] | None = None) -> None:
    """Write a Llama as llama.cpp's converter does, with a tokenizer of single bytes.

    Args:
        types: of matrices, by a part of their names in the file; others are float32.
    """
    gguf: Any = pytest.importorskip("gguf")
    from tests.support.toy_tokenizer import byte_spelling

    config, writer = model.config, gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*byte_spelling(), "<bos>", "<eos>", "xy", "<|endoftext|>"])
    writer.add_token_types([1] * 256 + [3, 3, 1, 3])
    writer.add_token_merges(["x y"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)
    writer.add_chat_template(TEMPLATE)
    for name, tensor in model.state_dict().items():
        data = tensor.float().numpy()
        for part, heads in (("q_proj", 4), ("k_proj", 2)):
            if part in name:  # llama.cpp rotates neighbouring pairs
                halves = data.reshape(heads, 2, -1, data.shape[1])
                data = halves.swapaxes(1, 2).reshape(data.shape)
        for theirs, ours in GGUF_NAMES.items():
            name = name.replace(theirs, ours)
        kind = None
        asked = [kind for part, kind in (types or {}).items() if part in name and data.ndim == 2]
        if asked:
            kind = gguf.GGMLQuantizationType[asked[0]]
            data = gguf.quantize(data, kind)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
