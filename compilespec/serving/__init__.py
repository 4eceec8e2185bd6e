"""An engine behind HTTP, in OpenAI's protocol (extra `serve`): `create_app(engine)` and `run`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from compilespec.errors import MissingDependency

__all__ = ["ServerOptions", "create_app", "run"]

if TYPE_CHECKING:
    from compilespec.serving.app import create_app
    from compilespec.serving.options import ServerOptions
    from compilespec.serving.process import run

_LAZY = {
    "ServerOptions": "compilespec.serving.options",
    "create_app": "compilespec.serving.app",
    "run": "compilespec.serving.process",
}


def __getattr__(name: str) -> Any:
    """Import FastAPI only for names that need it."""
    from importlib import import_module

    if name not in _LAZY:
        raise AttributeError(f"module 'compilespec.serving' has no attribute {name!r}")
    try:
        return getattr(import_module(_LAZY[name]), name)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("compilespec"):
            raise
        raise MissingDependency(
            f"serving needs {error.name}, which is not installed: pip install 'compilespec[serve]'"
        ) from error
