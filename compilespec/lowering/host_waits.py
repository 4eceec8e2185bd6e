"""Finds steps in which the host waits for the device: no CUDA graph can hold them."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from compilespec._torch_compat import OpOverload
from compilespec.ops.device import traits_of

# Operators that read the device's numbers on the host, without a tag that says so.
_WAITING = {
    "compilespec::host_process": "requests' logits processors run on the host",
    "transformers::grouped_mm_fallback": "the experts' products read the sizes of their groups",
}
_GROUPED_MAJORS = (9, 10)  # torch has a kernel of grouped products for these compute capabilities
_MOVES = ("aten::_to_copy", "aten::copy_")
_TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


def why_host_waits(gm: fx.GraphModule, device: torch.device) -> str:
    """The first operator of an ATen graph that waits for the device, and why; "" where none does.

    Args:
        device: where the graph runs; the products of experts wait on all GPUs but sm_9x and sm_10x.
    """
    for node in gm.graph.nodes:
        if isinstance(node.target, OpOverload) and (why := _why(node, device)):
            return f"{node.target}: {why}"
    return ""


def _why(node: fx.Node, device: torch.device) -> str:
    target: Any = node.target
    name = target.name().removesuffix(".default")
    if name in _WAITING:
        return _WAITING[name]
    if name == "aten::_grouped_mm" and traits_of(device).is_cuda:
        dtype, (major, _) = node.meta["val"].dtype, torch.cuda.get_device_capability(device)
        is_fast = major in _GROUPED_MAJORS and dtype == torch.bfloat16
        return "" if is_fast else f"{dtype} on sm_{major}x reads the sizes of the groups"
    if name in _MOVES:
        return "a copy between host and device" if len(_device_types(node, 0)) > 1 else ""
    if len(_device_types(node, 1)) > 1:
        return "tensors of the host beside the device's"
    if name in ("aten::index.Tensor", "aten::index_put", "aten::index_put_"):
        return "a mask as an index" if any(map(_is_mask, node.all_input_nodes[1:])) else ""
    if any(tag in target.tags for tag in _TAGS):
        return "what it gives depends on numbers"
    return ""


def _is_mask(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype == torch.bool


def _device_types(node: fx.Node, least_dim: int) -> set[str]:
    """The kinds of devices of its tensors; a kernel takes those of no dimension as numbers."""
    values = [one.meta.get("val") for one in (node, *node.all_input_nodes)]
    tensors = (value for value in values if isinstance(value, torch.Tensor))
    return {traits_of(tensor).kind for tensor in tensors if tensor.dim() >= least_dim}
