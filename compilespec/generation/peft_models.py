"""The LoRA adapters that PEFT put into a model, as those of an engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compilespec.errors import NotSupported
from compilespec.generation.module_state import version_of
from compilespec.tracing.adapter_files import Adapter, LowRank, check_kind
from compilespec.tracing.copies import shallow_copy


def inner_model(model: Any) -> Any:
    """The transformers model inside a PeftModel; another model itself.

    Raises: NotSupported for adapters that are no plain LoRA.
    """
    if not (hasattr(model, "peft_config") and hasattr(model, "get_base_model")):
        return model
    _check_kinds(model.peft_config)
    return model.get_base_model()


@dataclass(frozen=True, kw_only=True)
class HeldAdapters:
    """The adapters in a model: its layers that have some, by path.

    Args:
        bare: the model without them, with the same tensors; itself where there are none.
    """

    bare: nn.Module
    layers: Mapping[str, Any]

    @classmethod
    def of(cls, model: Any) -> HeldAdapters:
        """Raises: NotSupported for other adapters than plain LoRA of linear modules, and for one
        that is merged into the weights.
        """
        configs = getattr(model, "peft_config", None) or {}
        _check_kinds(configs)
        layers = dict(_lora_layers(model)) if configs else {}
        if any(layer.merged for layer in layers.values()):
            raise NotSupported(
                "attach: an adapter is merged into the weights; call unmerge_adapter() and attach "
                "the model again, or merge_and_unload() and attach the result"
            )
        bare = shallow_copy(model) if layers else model
        for path, layer in layers.items():
            bare.set_submodule(path, layer.base_layer)
        if layers:
            _leave_own_forward(bare)
        return cls(bare=bare, layers=layers)

    @property
    def ranks(self) -> dict[str, int]:
        """By path, the highest rank of any adapter."""
        return {
            path: max(matrix.weight.shape[0] for matrix in layer.lora_A.values())
            for path, layer in self.layers.items()
            if layer.lora_A
        }

    def room(self) -> Adapter | None:
        """An adapter that changes nothing, as large as any of them; None where there are none."""
        modules = {}
        for path, rank in self.ranks.items():
            first = next(iter(self.layers[path].lora_A))
            down, up = self._pair(path, first)
            modules[path] = LowRank(
                down=torch.zeros(rank, down.shape[1]), up=torch.zeros(up.shape[0], rank)
            )
        return Adapter(source="the PEFT model", modules=modules) if modules else None

    def active(self, *, keeps_hooks: bool) -> str | None:
        """The name of the adapter that is in use.

        Args:
            keeps_hooks: PEFT's own loop goes on after an error.  PEFT leaves its hooks behind else.
        Raises: NotSupported where that is not one adapter beside the model's own weights.
        """
        layers = list(self.layers.values())
        if any(layer._forward_pre_hooks for layer in layers):
            for layer in layers if not keeps_hooks else ():
                layer._forward_pre_hooks.clear()
            raise NotSupported(
                "generate: adapter_names= is not read; call set_adapter(name), and generate once "
                "for each"
            )
        names = {None if one.disable_adapters else tuple(one.active_adapters) for one in layers}
        if names <= {None, ()}:
            return None
        if len(names) > 1 or len(found := names.pop() or ()) > 1:
            raise NotSupported(
                "generate: several adapters are active; combine them by add_weighted_adapter(), "
                "or choose one by set_adapter()"
            )
        return found[0] if any(found[0] in one.lora_A for one in layers) else None

    def version(self, name: str) -> tuple[Any, ...]:
        """A value that changes when the adapter does."""
        return name, tuple(
            (
                path,
                layer.scaling[name],
                [version_of(matrix) for matrix in self._pair(path, name)],
            )
            for path, layer in self.layers.items()
            if name in layer.lora_A
        )

    def read(self, name: str) -> Adapter:
        """The adapter as it is now."""
        modules = {}
        for path, layer in self.layers.items():
            if name in layer.lora_A:
                down, up = (matrix.detach() for matrix in self._pair(path, name))
                modules[path] = LowRank(down=down, up=up.double() * layer.scaling[name])
        return Adapter(source=f"PEFT's adapter {name!r}", modules=modules)

    def _pair(self, path: str, name: str) -> tuple[Tensor, Tensor]:
        layer = self.layers[path]
        return layer.lora_A[name].weight, layer.lora_B[name].weight


def _leave_own_forward(bare: nn.Module) -> None:
    """Give a copy the forward of its class: one of its own would call the model's layers.

    Raises: NotSupported for another one than TRL's, which is that of the class without labels.
    """
    own: Any = bare.__dict__.pop("forward", None)
    code = getattr(own, "__code__", None)
    if own is not None and (code is None or code.co_name != "_fused_forward"):
        raise NotSupported(
            "attach: the model has a forward of its own beside its class's, which calls PEFT's "
            "layers; delete it (del model.forward), or merge_and_unload() and attach the result"
        )


def _check_kinds(configs: Mapping[str, Any]) -> None:
    for name, config in configs.items():
        given = config.to_dict()
        given["peft_type"] = getattr(given["peft_type"], "value", given["peft_type"])
        given["init_lora_weights"] = True  # the weights in memory are those that it began with
        check_kind(Path(f"PEFT's adapter {name!r}"), given)


def _lora_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    from peft.tuners.lora.layer import Linear
    from peft.tuners.tuners_utils import BaseTunerLayer

    for path, module in model.named_modules(remove_duplicate=False):
        if not isinstance(module, BaseTunerLayer):
            continue
        if type(module) is not Linear or isinstance(module.base_layer, BaseTunerLayer):
            raise NotSupported(
                f"{path}: {type(module).__name__} of PEFT is not read; adapt linear modules alone, "
                "or merge it by merge_and_unload() and attach the result"
            )
        yield path, module
