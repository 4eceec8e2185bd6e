"""Makes Triton's interpreter fast enough for tests: import before running kernels.

The interpreter patches `triton.language` at every launch, and once more, over what is patched, at
every call of one `@triton.jit` function by another; calls get slower each time.  Once is enough.
It multiplies the bits of bfloat16 as if they were numbers: products take the numbers instead.
Triton 3.6's cannot loop to a bound that it computed where numpy is 2.4 or later: [n] is no scalar.
"""

from __future__ import annotations

from typing import Any

import numpy as np
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


def _dot(
    self: Any, left: Any, right: Any, acc: Any, *given: Any,
    multiply: Any = interpreter.InterpreterBuilder.create_dot,
) -> Any:  # fmt: skip
    return multiply(self, _widened(left), _widened(right), acc, *given)


def _widened(handle: interpreter.TensorHandle) -> interpreter.TensorHandle:
    """bfloat16 is kept as uint16, the upper half of a float32."""
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    bits = handle.data.astype(np.uint32) << 16
    return interpreter.TensorHandle(bits.view(np.float32), tl.float32)


interpreter.InterpreterBuilder.create_dot = _dot  # type: ignore[method-assign]
interpreter.InterpretedFunction.__call__ = _call  # type: ignore[method-assign]
interpreter._patch_lang_tensor = _patch_tensor
