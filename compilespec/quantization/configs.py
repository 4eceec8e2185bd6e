"""Reads `quantize=`: a torchao config or its short name, and the modules it applies to."""

from __future__ import annotations

import fnmatch
import importlib
import importlib.metadata
import importlib.util
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from compilespec.errors import InvalidOption, MissingDependency, NotSupported
from compilespec.errors.suggest import not_one_of
from compilespec.ops.device import traits_of
from compilespec.tracing.quiet import quiet_import

OLDEST_TORCHAO = (0, 15)
INSTALL = "pip install 'compilespec[quant]'"
HEAD = "lm_head"
FILE = "file"  # the weights of a GGUF file as they are stored


@dataclass(frozen=True)
class Quantize:
    """The choice of `quantize=`: a config, and the products that it applies to."""

    config: Any
    """A short name (`NAMES`) or a torchao config object."""

    only: str | Sequence[str] = ()
    """Module paths or patterns with `*`; empty for every product.  A path covers its submodules."""

    skip: str | Sequence[str] = ()
    """Module paths or patterns that are not quantized."""

    def wants(self, path: str) -> bool:
        """True where the module at `path` is to be quantized."""
        return (not self.only or _covers(self.only, path)) and not _covers(self.skip, path)

    @property
    def name(self) -> str:
        return self.config if isinstance(self.config, str) else type(self.config).__name__

    def config_on(self, device: torch.device, path: str = "") -> Any:
        """The torchao config of a module; the meaning of a short name depends on the device, and
        a head gets the bits of `_OF_HEADS` unless `only` asks for it by itself.
        """
        if not isinstance(self.config, str):
            return self.config
        name = self.config
        if path.rsplit(".", 1)[-1] == HEAD and not self.only:
            name = _OF_HEADS.get(name, name)
        return NAMES[name](device)


def read_quantize(value: Any, keyword: str = "quantize") -> Quantize | None:
    """Check the value of `keyword`.

    Returns: None for None, else a `Quantize` whose config is one of `NAMES` or an object.
    Raises: MissingDependency (torchao missing or too old, with the command that installs it),
    InvalidOption (an unknown name, or not a config).
    """
    if value is None:
        return None
    asked = value if isinstance(value, Quantize) else Quantize(value)
    config = asked.config
    if isinstance(config, str):
        name = _ALIASES.get(config.replace("-", "_"), config.replace("-", "_"))
        if name not in NAMES:
            raise not_one_of(keyword, config, (*NAMES, *_ALIASES), "quantize", also=_OR_CONFIG)
        asked = Quantize(name, asked.only, asked.skip)
    if config != FILE:
        require_torchao(f"{keyword}={asked.name!r}")
    if not isinstance(config, str):
        from torchao.core.config import AOBaseConfig

        if not isinstance(config, AOBaseConfig):
            raise not_one_of(keyword, config, NAMES, also=_OR_CONFIG)
    return asked


def require_torchao(what: str) -> None:
    """Import torchao.  Raises: MissingDependency when it is missing or too old."""
    oldest = ".".join(map(str, OLDEST_TORCHAO))
    if importlib.util.find_spec("torchao") is None:
        raise MissingDependency(
            f"{what} needs torchao>={oldest}, which is not installed: {INSTALL}"
        )
    found = importlib.metadata.version("torchao")
    numbers = re.match(r"(\d+)\.(\d+)", found)
    if numbers and tuple(map(int, numbers.groups())) < OLDEST_TORCHAO:
        raise MissingDependency(f"{what} needs torchao>={oldest}, found {found}: {INSTALL}")
    with quiet_import():
        importlib.import_module("torchao.quantization")


def _int8_weight_only(device: torch.device) -> Any:
    from torchao.quantization import Int8WeightOnlyConfig

    return Int8WeightOnlyConfig(version=2)


def _int8_dynamic(device: torch.device) -> Any:
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig

    return Int8DynamicActivationInt8WeightConfig(version=2)


def _int4_weight_only(device: torch.device) -> Any:
    from compilespec.quantization.int4 import Int4Config

    return Int4Config(traits_of(device).int4_group)


def _int4_dynamic(device: torch.device) -> Any:
    from compilespec.ops.grouped_linear import BLOCK
    from compilespec.quantization.int4 import Int4Config

    if not traits_of(device).packs_weights:
        raise NotSupported(
            f"quantize='int4_dynamic' has a kernel for the CPU alone; on {traits_of(device).kind} "
            "give 'int4_weight_only'"
        )
    return Int4Config(BLOCK, quantizes_rows=True)


def _int8_nested(device: torch.device) -> Any:
    from compilespec.quantization.nested import NestedConfig

    if not traits_of(device).packs_weights:
        raise NotSupported(
            f"quantize='int8_nested' has a kernel for the CPU alone; on {traits_of(device).kind} "
            "give 'int8_weight_only'"
        )
    return NestedConfig()


def _file(device: torch.device) -> Any:
    raise InvalidOption(
        f"quantize={FILE!r} keeps the blocks of a GGUF file as a target's weights; this is no such "
        "target: give the path of a .gguf file as the model, or another name"
    )


def _float8_weight_only(device: torch.device) -> Any:
    from torchao.quantization import Float8WeightOnlyConfig

    return Float8WeightOnlyConfig()


def _float8_dynamic(device: torch.device) -> Any:
    from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, PerRow

    return Float8DynamicActivationFloat8WeightConfig(granularity=PerRow())


NAMES: dict[str, Callable[[torch.device], Any]] = {
    "int8_weight_only": _int8_weight_only,
    "int8_dynamic": _int8_dynamic,
    "int8_nested": _int8_nested,
    "int4_weight_only": _int4_weight_only,
    "int4_dynamic": _int4_dynamic,
    FILE: _file,
    "float8_weight_only": _float8_weight_only,
    "float8_dynamic": _float8_dynamic,
}
# A head of 4 bits costs more of a model's quality than all its layers: docs/tuning.md has figures.
_OF_HEADS = {"int4_weight_only": "int8_weight_only", "int4_dynamic": "int8_dynamic"}
_ALIASES = {
    "int8": "int8_weight_only",
    "int4": "int4_weight_only",
    "float8": "float8_weight_only",
}
_OR_CONFIG = ", or a torchao config"


def runs_on(device: torch.device) -> list[str]:
    """Short names of the configs that run on the device, for messages."""
    traits = traits_of(device)
    no = [] if traits.packs_weights else ["int4_dynamic", "int8_nested", FILE]
    if not traits.is_cuda or torch.cuda.get_device_capability(device) < (8, 9):
        no.append("float8_dynamic")
    return [name for name in NAMES if name not in no]


def _covers(patterns: str | Sequence[str], path: str) -> bool:
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        if fnmatch.fnmatchcase(path, pattern) or fnmatch.fnmatchcase(path, f"{pattern}.*"):
            return True
    return False
