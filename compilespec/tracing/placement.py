"""Reads `dtype=` and `device=`: the type of a model's numbers, and where it runs."""

from __future__ import annotations

import torch

from compilespec.errors import InvalidOption
from compilespec.errors.suggest import did_you_mean, not_one_of
from compilespec.ops.device import traits_of

DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64")}
DEVICES = ("cpu", "cuda")


def read_dtype(given: object) -> torch.dtype | None:
    """Read a dtype or its name, with or without "torch."; None for None and "auto".

    Raises: InvalidOption.
    """
    is_named = isinstance(given, torch.dtype | str)
    name = str(given).removeprefix("torch.") if is_named else given
    if name is None or name == "auto":
        return None
    if isinstance(name, str) and name in DTYPES:
        return DTYPES[name]
    raise not_one_of("dtype", name, DTYPES, "dtype", also=", or None for the checkpoint's own")


def read_device(given: object) -> torch.device | None:
    """Read a device or its name; None for None.

    Raises: InvalidOption (no such device, or torch cannot use it here).
    """
    if given is None:
        return None
    try:
        device = torch.device(given)  # type: ignore[call-overload]
    except (RuntimeError, TypeError):
        raise _unknown(given) from None
    traits = traits_of(device)
    if traits.is_cpu or traits.is_meta:  # meta: traces without memory
        return device
    if not traits.is_cuda:
        raise _unknown(given)
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (device.index or 0) >= found:
        raise InvalidOption(
            f"device={str(device)!r} cannot be used: torch {torch.__version__} finds {found} CUDA "
            "devices; leave out device=, or install a driver and a torch built for CUDA"
        )
    return device


def _unknown(given: object) -> InvalidOption:
    return InvalidOption(
        f"device must be 'cpu', 'cuda' or 'cuda:N'; got {str(given)!r}"
        f"{did_you_mean(str(given), DEVICES, 'device')}"
    )
