"""Writing the target in the layout that other software reads, in bf16."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from .corpus import END_OF_TEXT, end_of_text
from .model import Layer, LeanLlama, Shape


def export_llama(model: LeanLlama, tokenizer: Tokenizer, folder: Path) -> None:
    """Write config, weights and tokenizer so that transformers loads the folder as it is."""
    tensors: dict[str, Tensor] = {
        "model.embed_tokens.weight": model.embed,
        "model.norm.weight": model.norm,
    }
    for i, layer in enumerate(model.layers):
        assert isinstance(layer, Layer)
        tensors |= layer_tensors(layer, model.shape, f"model.layers.{i}")
    end = end_of_text(tokenizer)
    config = llama_config(model.shape, end) | {
        "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True,
    }  # fmt: skip
    write(folder, tensors, config)
    dump(folder / "generation_config.json", {"bos_token_id": end, "eos_token_id": end})
    export_tokenizer(tokenizer, folder, model.shape.max_position_embeddings)


def layer_tensors(layer: Layer, shape: Shape, prefix: str) -> dict[str, Tensor]:
    """Return a decoder layer's weights under their public names."""
    q, k, v = layer.qkv.split([shape.q_width, shape.kv_width, shape.kv_width])
    gate, up = layer.gate_up.chunk(2)
    names = {
        "input_layernorm": layer.input_norm, "post_attention_layernorm": layer.post_norm,
        "self_attn.q_proj": q, "self_attn.k_proj": k, "self_attn.v_proj": v,
        "self_attn.o_proj": layer.o, "mlp.gate_proj": gate, "mlp.up_proj": up,
        "mlp.down_proj": layer.down,
    }  # fmt: skip
    return {f"{prefix}.{name}.weight": tensor for name, tensor in names.items()}


def llama_config(shape: Shape, end: int) -> dict[str, Any]:
    """Return the sizes in config.json."""
    return {
        "model_type": "llama", "hidden_size": shape.hidden_size, "hidden_act": "silu",
        "num_hidden_layers": shape.num_hidden_layers, "intermediate_size": shape.intermediate_size,
        "num_attention_heads": shape.num_attention_heads, "head_dim": shape.head_dim,
        "num_key_value_heads": shape.num_key_value_heads, "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_position_embeddings,
        "rms_norm_eps": shape.rms_norm_eps, "rope_theta": shape.rope_theta,
        "attention_bias": False, "mlp_bias": False, "initializer_range": 0.02,
        "bos_token_id": end, "eos_token_id": end, "torch_dtype": "bfloat16", "use_cache": True,
    }  # fmt: skip


def export_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Write the two files from which AutoTokenizer builds the tokenizer."""
    tokenizer.save(str(folder / "tokenizer.json"))
    dump(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": END_OF_TEXT,
            "eos_token": END_OF_TEXT, "unk_token": None, "pad_token": END_OF_TEXT,
            "clean_up_tokenization_spaces": False, "model_max_length": max_length,
        },
    )  # fmt: skip


def write(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    """Write floats in bf16 and everything else as it is."""
    folder.mkdir(parents=True, exist_ok=True)
    stored = {
        name: (t.detach().bfloat16() if t.is_floating_point() else t.detach()).contiguous().clone()
        for name, t in tensors.items()
    }
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    dump(folder / "config.json", config)


def dump(path: Path, value: dict[str, Any]) -> None:
    """Write indented JSON with a final newline."""
    path.write_text(json.dumps(value, indent=2) + "\n")
