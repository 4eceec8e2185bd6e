"""Quantizes the products of a module in a copy that shares everything else."""

from __future__ import annotations

import dataclasses
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from compilespec.errors import InvalidOption, NotSupported
from compilespec.methods.base import Drafter
from compilespec.ops.device import traits_of
from compilespec.ops.gguf_blocks import TYPES
from compilespec.quantization.configs import FILE, HEAD, Quantize, runs_on
from compilespec.tracing.copies import shallow_copy
from compilespec.tracing.gguf_tensors import GgufTensor
from compilespec.tracing.images import tower_paths
from compilespec.tracing.load import Target
from compilespec.tracing.quantized_weights import is_quantized

Model = TypeVar("Model", bound=nn.Module)


def quantize_module(
    model: Model,
    quantize: Quantize,
    keyword: str = "quantize",
    *,
    apart: Collection[str] = (),
) -> Model:
    """Copy `model` and quantize the products that `quantize` selects (`only`, `skip`).

    Products are `nn.Linear` modules and heads that drafters hold as a bare matrix.  Products that
    are quantized already, or whose path is in `apart`, stay as they are.  The copy shares with
    `model` everything that is not quantized; `model` does not change.

    Raises: InvalidOption (no module matches; torchao refuses the dtype), NotSupported (the device
    cannot run the config; the message names those that it can).
    """
    from torchao.quantization import quantize_

    quantized = with_plain_weights(model, quantize.wants)
    paths = [
        path
        for path, module in quantized.named_modules()
        if _is_product(path, module)
        and quantize.wants(path)
        and path not in apart
        and not is_quantized(_weight_of(quantized, path))
    ]
    if not paths:
        known = [path for path, module in model.named_modules() if _is_product(path, module)]
        raise InvalidOption(
            f"{keyword}={quantize.name!r} matches no module: only={quantize.only!r}, "
            f"skip={quantize.skip!r}; products of the model: {_listed(known) or 'none'}"
        )
    weight = _weight_of(quantized, paths[0])
    configs = list(_by_config(paths, quantize, weight.device))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for config, chosen in configs:
                quantize_(quantized, config, filter_fn=lambda _, path: path in chosen)  # noqa: B023
    except _REFUSALS as error:
        raise _refusal(quantize, keyword, weight, error) from error
    if not any(is_quantized(_weight_of(quantized, path)) for path in paths):
        raise InvalidOption(
            f"{keyword}={quantize.name!r} quantized none of {_listed(paths)}: their sizes do not "
            "suit it; try int8_weight_only"
        )
    return quantized


def quantize_weights(
    weights: Mapping[str, torch.Tensor], quantize: Quantize, keyword: str = "quantize"
) -> dict[str, torch.Tensor]:
    """The weights of products, by the paths of their modules, as `quantize_module` would quantize
    those modules.
    """
    root = nn.Module()
    for path, weight in weights.items():
        place = root
        *parents, last = path.split(".")
        for name in parents:
            if name not in place._modules:
                place.add_module(name, nn.Module())
            place = place.get_submodule(name)
        product = nn.Linear(1, 1, bias=False, device="meta")
        product.weight = nn.Parameter(weight, requires_grad=False)
        place.add_module(last, product)
    quantized = quantize_module(root, quantize, keyword)
    return {path: _weight_of(quantized, path).detach() for path in weights}


def _by_config(
    paths: Iterable[str], quantize: Quantize, device: torch.device
) -> Iterable[tuple[Any, set[str]]]:
    found: list[tuple[Any, set[str]]] = []
    for path in paths:
        config = quantize.config_on(device, path)
        same = next((chosen for known, chosen in found if known == config), None)
        if same is None:
            found.append((config, {path}))
        else:
            same.add(path)
    return found


def quantize_target(target: Target, quantize: Quantize | None) -> Target:
    """The target with a quantized copy of its model, or itself for None."""
    if quantize is None:
        return target
    towers = tower_paths(target.model)  # which stay as they are
    if quantize.config == FILE and target.gguf is not None:
        if not any(isinstance(one, GgufTensor) for one in target.model.parameters()):
            raise NotSupported(
                f"quantize={FILE!r}: {target.gguf.name} holds no blocks that products can keep (of "
                f"{', '.join(TYPES)}, with whole rows); leave quantize= out"
            )
        model = with_plain_weights(target.model, lambda path: not quantize.wants(path))
        return dataclasses.replace(target, model=model)
    model = quantize_module(target.model, quantize, apart=towers)
    return dataclasses.replace(target, model=model)


def with_plain_weights(model: Model, wants: Callable[[str], bool] = lambda path: True) -> Model:
    """A copy of the model whose weights in GGUF blocks are dequantised, in modules that are
    wanted.
    """
    copy = shallow_copy(model)
    for path, module in copy.named_modules():
        for name, weight in module._parameters.items():
            if isinstance(weight, GgufTensor) and wants(path):
                plain = nn.Parameter(weight.dequantize(), requires_grad=False)
                module._parameters[name] = plain
    return copy


def quantize_drafter(drafter: Drafter | None, quantize: Quantize | None) -> Drafter | None:
    """A copy of the drafter with quantized products, or itself for None.

    Raises: InvalidOption if there is no drafter, or it has no products.
    """
    if quantize is None:
        return drafter
    if drafter is None:
        raise InvalidOption(
            f"draft_quantize={quantize.name!r} needs a drafting method; give spec=, or leave it out"
        )
    return quantize_module(drafter, quantize, "draft_quantize")


_REFUSALS = (AssertionError, ImportError, NotImplementedError, RuntimeError, ValueError)


def _refusal(
    quantize: Quantize, keyword: str, weight: torch.Tensor, error: BaseException
) -> InvalidOption | NotSupported:
    """The error to raise in place of torchao's: the dtype, the device, or a weight's sizes are at
    fault.
    """
    from torchao.quantization import quantize_

    reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    device = weight.device
    if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return InvalidOption(
            f"{keyword}={quantize.name!r} cannot quantize {weight.dtype} weights: {reason}; give "
            f"dtype='float32' or 'bfloat16'"
        )
    try:  # tried on a weight whose sizes suit every config
        ordinary = nn.Linear(512, 512, bias=False, device=device, dtype=weight.dtype)
        quantize_(nn.Sequential(ordinary), quantize.config_on(device))
    except _REFUSALS:
        return NotSupported(
            f"{keyword}={quantize.name!r} does not run on {traits_of(device).kind} with "
            f"{weight.dtype} weights: {reason}; what runs here: {', '.join(runs_on(device))}"
        )
    return InvalidOption(
        f"{keyword}={quantize.name!r} does not suit the size of every product: {reason}; leave "
        f"those out with compilespec.Quantize({quantize.name!r}, skip=[...]), or give "
        f"{keyword}='int8_weight_only'"
    )


def describe_quantized(model: nn.Module) -> str | None:
    """A line that names the quantized products and their form; None if there are none."""
    products = [module for path, module in model.named_modules() if _is_product(path, module)]
    weights = [m.weight for m in products if is_quantized(m.weight)]
    kinds = Counter(
        f"GGUF {one.kind}" if isinstance(one, GgufTensor) else type(one).__name__ for one in weights
    )
    if not kinds:
        return None
    counts = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    return f"{counts} of {len(products)} products"


def _weight_of(model: nn.Module, path: str) -> torch.Tensor:
    weight = model.get_submodule(path).weight
    assert isinstance(weight, torch.Tensor)
    return weight


def _is_product(path: str, module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.dim() != 2:
        return False
    is_head = path.rsplit(".", 1)[-1] == HEAD
    return isinstance(module, nn.Linear) or (is_head and not isinstance(module, nn.Embedding))


def _listed(names: list[str], limit: int = 4) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" * (len(names) > limit))
