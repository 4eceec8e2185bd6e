"""Replicas of an engine on Ray Serve, behind the server's routes (extra `ray`): `build`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from compilespec.errors import MissingDependency

__all__ = ["build"]

if TYPE_CHECKING:
    from compilespec.serving.ray.deploy import build


def __getattr__(name: str) -> Any:
    """Import Ray only for names that need it."""
    from importlib import import_module

    if name not in __all__:
        raise AttributeError(f"module 'compilespec.serving.ray' has no attribute {name!r}")
    try:
        return getattr(import_module("compilespec.serving.ray.deploy"), name)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("compilespec"):
            raise
        raise MissingDependency(
            f"replicas need {error.name}, which is not installed: pip install 'compilespec[ray]'"
        ) from error
