"""llama.cpp on the same weights, where `llama-cpp-python` and `gguf` happen to be installed.

Neither is a dependency.  The checkpoint is written to a temporary GGUF file, matrices in the
model's own dtype; without a vocabulary, which llama.cpp does not need (ids go in, ids come out).
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tools.bench.ways import Setup, Unavailable

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


class Sequences:
    """Rows that llama.cpp decodes together, again and again from the same prompts; bfloat16.

    Args:
        batch: rows at most; length: tokens of one at most.
    """

    name = "llama.cpp"
    _CHUNK = 512  # tokens of a prompt that are read at once

    def __init__(self, model: Any, *, batch: int, length: int, num_threads: int) -> None:
        self._api = llama_cpp = library()
        with tempfile.TemporaryDirectory(prefix="compilespec-bench-") as folder:
            path = Path(folder) / "model.gguf"
            write_gguf(model, path)
            self._keep = llama_cpp.Llama(str(path), n_ctx=64, verbose=False)
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_seq_max = batch * length, batch
        params.n_batch = params.n_ubatch = self._CHUNK
        params.n_threads = params.n_threads_batch = num_threads
        self._context: Any = llama_cpp.llama_init_from_model(self._keep.model, params)
        self._memory: Any = llama_cpp.llama_get_memory(self._context)
        self._batch = llama_cpp.llama_batch_init(max(self._CHUNK, batch), 0, 1)
        self._vocab_size = int(model.config.vocab_size)
        self._prompts: Sequence[list[int]] = ()

    def read(self, prompts: Sequence[list[int]]) -> None:
        """Read all but the last token of each."""
        self._prompts = prompts
        self._api.llama_memory_clear(self._memory, True)
        for row, prompt in enumerate(prompts):
            places = [(row, place, prompt[place]) for place in range(len(prompt) - 1)]
            for first in range(0, len(places), self._CHUNK):
                self._run(places[first : first + self._CHUNK], wants_logits=False)

    def decode(self, num_steps: int) -> tuple[float, list[list[int]]]:
        """Milliseconds a step, and the tokens of each row, one more than steps."""
        for row, prompt in enumerate(self._prompts):
            self._api.llama_memory_seq_rm(self._memory, row, len(prompt) - 1, -1)
        last = [prompt[-1] for prompt in self._prompts]
        rows: list[list[int]] = [[] for _ in last]
        started = 0.0
        for step in range(num_steps + 1):
            if step == 1:  # the first ends the prompt
                started = time.perf_counter()
            places = [
                (row, len(self._prompts[row]) - 1 + step, token) for row, token in enumerate(last)
            ]
            last = self._run(places, wants_logits=True)
            for given, token in zip(rows, last, strict=True):
                given.append(token)
        return (time.perf_counter() - started) / num_steps * 1e3, rows

    def _run(self, places: Sequence[tuple[int, int, int]], *, wants_logits: bool) -> list[int]:
        """The most probable token after each (row, position, token), where that is wanted."""
        import numpy as np

        self._batch.n_tokens = len(places)
        for i, (row, position, token) in enumerate(places):
            self._batch.token[i], self._batch.pos[i] = token, position
            self._batch.n_seq_id[i], self._batch.seq_id[i][0] = 1, row
            self._batch.logits[i] = wants_logits
        if self._api.llama_decode(self._context, self._batch):
            raise RuntimeError("llama_decode failed")
        if not wants_logits:
            return []
        found = (
            np.ctypeslib.as_array(
                self._api.llama_get_logits_ith(self._context, i), (self._vocab_size,)
            )
            for i in range(len(places))
        )
        return [int(logits_V.argmax()) for logits_V in found]

    def close(self) -> None:
        self._api.llama_batch_free(self._batch)
        self._api.llama_free(self._context)
        self._keep.close()


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
