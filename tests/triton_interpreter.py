"""Makes Triton's interpreter fast enough for tests: import before running kernels.

The interpreter patches `triton.language` at every launch, and once more, over what is patched, at
every call of one `@triton.jit` function by another; calls get slower each time.  Once is enough.
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


interpreter.InterpretedFunction.__call__ = _call  # type: ignore[method-assign]
