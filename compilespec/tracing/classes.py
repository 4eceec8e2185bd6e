"""Facts of classes and code: their library, the way they were made, and a digest of their code."""

from __future__ import annotations

import hashlib
import sys
import types
from typing import Any

_LIBRARIES = frozenset({*sys.stdlib_module_names, "torch", "numpy", "sympy", "typing_extensions"})
_HEAP_TYPE, _IMMUTABLE_TYPE = 1 << 9, 1 << 8  # `Py_TPFLAGS_HEAPTYPE`, `..._IMMUTABLETYPE`

_codes: dict[int, tuple[types.CodeType, str, frozenset[int]]] = {}  # by id; kept, so that it stays


def full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def is_library(module: str) -> bool:
    """True for modules of Python, torch or numpy: their versions stand for their code."""
    return module.partition(".")[0] in _LIBRARIES


def is_python_class(cls: type) -> bool:
    """True where a class was made by a class statement or the like, not in C: its objects then hold
    only attributes, and what its bases hold.
    """
    own = vars(cls)
    if not cls.__flags__ & _HEAP_TYPE or cls.__flags__ & _IMMUTABLE_TYPE:
        return False
    has_mark = any(name in own for name in ("__dict__", "__slots__")) or any(
        isinstance(value, types.FunctionType) for value in own.values()
    )
    return has_mark or any(map(is_python_class, cls.__bases__))


def slots_of(cls: type) -> tuple[str, ...]:
    slots = vars(cls).get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


def code_digest(code: types.CodeType) -> tuple[str, frozenset[int]]:
    """A digest of a code object, and the ids of itself and of those inside it."""
    known = _codes.get(id(code))
    if known is None:
        _codes[id(code)] = known = (code, _digest(code), _nested(code))
    return known[1:]


def _nested(code: types.CodeType) -> frozenset[int]:
    """The ids of a code object and of those inside it."""
    inner = [_nested(one) for one in code.co_consts if isinstance(one, types.CodeType)]
    return frozenset({id(code)}).union(*inner)


def _digest(code: types.CodeType) -> str:
    """Instructions, constants, names and places: traces name source lines."""
    parts = [
        code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars,
        code.co_flags, code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount,
        code.co_filename, code.co_qualname, code.co_firstlineno, code.co_linetable,
        code.co_exceptiontable, *(_constant(one) for one in code.co_consts),
    ]  # fmt: skip
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _constant(value: Any) -> str:
    if isinstance(value, types.CodeType):
        return _digest(value)
    if isinstance(value, frozenset):
        return f"frozenset {sorted(_constant(one) for one in value)}"
    if isinstance(value, tuple):
        return f"tuple {[_constant(one) for one in value]}"
    return f"{type(value).__name__} {value!r}"
