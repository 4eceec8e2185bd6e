"""Makes Triton's interpreter fast enough for tests: import before running kernels.

The interpreter patches `triton.language` at every launch, and once more, over what is patched, at
every call of one `@triton.jit` function by another; calls get slower each time.  Once is enough.
Triton 3.6's cannot loop to a bound that it computed where numpy is 2.4 or later: [n] is no scalar.
"""

from __future__ import annotations

from typing import Any

from triton import language as tl
from triton.runtime import interpreter


def _call(self: interpreter.InterpretedFunction, *args: Any, **kwargs: Any) -> Any:
    seen = [value for value in self.fn.__globals__.values() if value is tl or value is tl.core]
    if any(module.full.__name__ != "<lambda>" for module in seen):
        interpreter._patch_lang(self.fn)
    return self.rewrite()(*args, **kwargs)


def _patch_tensor(tensor: Any, scope: Any, patch: Any = interpreter._patch_lang_tensor) -> None:
    patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))


interpreter.InterpretedFunction.__call__ = _call  # type: ignore[method-assign]
interpreter._patch_lang_tensor = _patch_tensor
