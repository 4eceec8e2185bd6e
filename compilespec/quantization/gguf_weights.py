"""A model whose products have the weights of a GGUF file as they are stored."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from compilespec.errors import NotSupported
from compilespec.ops.device import traits_of
from compilespec.quantization.configs import FILE, HEAD
from compilespec.quantization.gguf_blocks import READERS, Grouped, read_blocks
from compilespec.quantization.grouped import INT4, StoredIntTensor, suits
from compilespec.tracing.copies import shallow_copy

Model = TypeVar("Model", bound=nn.Module)
_COMPARED = 64  # rows of a weight that are compared with the converted model's


def with_stored_weights(model: Model, path: Path, products: Sequence[str]) -> Model:
    """A copy of the converted model of a file whose products hold the file's own blocks; those of
    types that are not quantized, or that have no reader, stay as they were converted.

    Raises: NotSupported (a device or dtype without the product; rows in an unknown order).
    """
    import gguf

    weight = next(model.parameters())
    floats = (torch.float32, torch.bfloat16, torch.float16)
    if not traits_of(weight.device).packs_weights or weight.dtype not in floats:
        raise NotSupported(
            f"quantize={FILE!r} runs on the CPU in float32, bfloat16 or float16, got "
            f"{weight.dtype} on {weight.device}; leave quantize= out for the dequantized weights"
        )
    reader = gguf.GGUFReader(path)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    names = _names(reader, model)
    copy = shallow_copy(model)
    for product in products:
        name = names.get_name(f"{product}.weight", try_suffixes=(".weight",))
        if name not in tensors and product.rsplit(".", 1)[-1] == HEAD:
            name = "token_embd.weight"  # a head that is tied
        stored = tensors.get(name)
        if stored is None or stored.tensor_type.name not in READERS:
            continue
        module = copy.get_submodule(product)
        found = read_blocks(stored.tensor_type.name, stored.data)
        if not suits(found.values, found.group):
            continue
        own = _in_order(found, module.weight, model.config, f"{path.name}: {name}")
        module.weight = nn.Parameter(_tensor(own, module.weight.dtype), requires_grad=False)
    return copy


def _names(reader: Any, model: Any) -> Any:
    """gguf's table of names for the file's architecture."""
    import gguf

    asked = reader.fields["general.architecture"].contents()
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    layers = model.config.get_text_config().num_hidden_layers
    return gguf.get_tensor_name_map(kinds[asked], layers)


def _in_order(found: Grouped, converted: Tensor, config: Any, name: str) -> Grouped:
    """The rows in the model's order: some conversions move those of a head."""
    count = len(converted)
    sample = torch.arange(0, count, max(1, count // _COMPARED))
    want = converted.detach()[sample].float()
    for order in _orders(count, config.get_text_config()):
        got = found.rows(sample if order is None else order[sample]).wide()
        if torch.allclose(got, want, rtol=2**-7, atol=1e-6):
            return found if order is None else found.rows(order)
    raise NotSupported(
        f"quantize={FILE!r}: the rows of {name} stand in an order that is not known; leave "
        "quantize= out for the dequantized weights"
    )


def _orders(count: int, config: Any) -> Iterator[Tensor | None]:
    """As they are; llama's, whose files hold the two halves of a rotary head by turns."""
    yield None
    for heads in {config.num_attention_heads, config.num_key_value_heads}:
        if count % (2 * heads) == 0:
            yield torch.arange(count).view(heads, -1, 2).transpose(1, 2).flatten()


def _tensor(weight: Grouped, dtype: torch.dtype) -> Tensor:
    return StoredIntTensor(
        qdata=weight.values,
        scale=weight.scale,
        zero_point=weight.zero,
        target_dtype=INT4 if weight.bits == 4 else torch.int8,
        block_size=(1, weight.group),
        dtype=dtype,
        activation_quantization=None,
    )
