"""A digest of everything that a capture depends on: objects by their contents, functions by their
code.

Nothing is left out silently: objects without a digest raise `CannotKey`, and the capture is not
reused.
"""

from __future__ import annotations

import collections
import contextvars
import enum
import functools
import hashlib
import logging
import sys
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from compilespec._torch_compat import OpOverload, OpOverloadPacket
from compilespec.tracing.classes import (
    code_digest,
    full_name,
    is_library,
    is_python_class,
    slots_of,
)

_PLAIN = (
    type(None), bool, int, float, complex, str, bytes, type(Ellipsis), type(NotImplemented), range,
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size,
)  # fmt: skip
_NAMESPACES = ("aten", "prims", "prim", "compilespec")
IMPORTED = "import "  # precedes the name of a module that a function imports itself
_SLOTS = (  # builtin types, for which the name is enough
    types.WrapperDescriptorType, types.MethodWrapperType, types.MethodDescriptorType,
    types.ClassMethodDescriptorType, types.GetSetDescriptorType, types.MemberDescriptorType,
)  # fmt: skip
_TYPE_HINTS = (types.GenericAlias, types.UnionType, typing.TypeVar)
_BUILTIN_BASES = (object, dict, list, tuple, set, frozenset, int, float, str, Exception)
_UNREAD = frozenset(  # attributes of a class that no graph depends on
    {
        "__doc__", "__annotations__", "__dict__", "__weakref__", "__module__", "__firstlineno__",
        "__abstractmethods__", "_abc_impl", "__parameters__", "__orig_bases__", "__slots__",
        "__static_attributes__", "__dataclass_params__", "__match_args__", "__signature__",
    }
)  # fmt: skip
_MARK_OF_DYNAMO = ("_dynamo_static_input_type", "unguarded")  # left on weights that it has seen
_OF_THE_PROCESS = ("_torchdynamo_wrapper_id", "_original_object_hash")  # addresses and hashes
_TAGGED = ("__init__", "__setstate__")  # of nn.Module: Dynamo replaces them when it is first used
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class CannotKey(Exception):
    """An object that has no digest; the message says where."""


class Fingerprint:
    """A digest of everything that is added, in order.

    Objects that hold others are numbered in order, so that identity counts too.
    """

    def __init__(self) -> None:
        self.codes: dict[int, dict[str, Any]] = {}  # globals of the code objects seen, by their ids
        self._classes: set[str] = set()  # that were met
        self._digest = hashlib.sha256()
        self._numbers: dict[int, int] = {}
        self._kept: list[Any] = []  # an id is an object's own only while the object lives
        self._path: list[str] = []

    def copy(self) -> Fingerprint:
        """A copy that goes on from here by itself."""
        other = Fingerprint()
        other.codes, other._digest = dict(self.codes), self._digest.copy()
        other._classes = set(self._classes)
        other._numbers, other._kept = dict(self._numbers), [*self._kept]
        return other

    def hexdigest(self) -> str:
        return self._digest.hexdigest()

    def add(self, value: Any, name: str = "") -> None:
        """Raises: CannotKey."""
        self._path.append(name)
        self._add(value)
        self._path.pop()

    def add_globals(self, space: Mapping[str, Any], names: Iterable[str]) -> None:
        """Add the values of `names`, which code uses, among the globals `space`, and in the modules
        among these.  Raises: CannotKey.
        """
        wanted, spaces, known = sorted(set(names)), [space], {id(space)}
        for one in spaces:  # which grows
            module = str(one.get("__name__"))
            self._say("globals", module)
            for name in wanted:
                imported = name.startswith(IMPORTED)
                value = sys.modules.get(name[len(IMPORTED) :]) if imported else one.get(name)
                if isinstance(value, types.ModuleType):
                    self._say(name, value.__name__)
                    if id(vars(value)) not in known:
                        known.add(id(vars(value)))
                        spaces.append(vars(value))
                elif name in one and isinstance(value, type) and is_library(module):
                    self._say(name, full_name(value))
                elif name in one:
                    self._say(name)
                    self.add(value, f"{module}.{name}")

    def _say(self, *words: str) -> None:
        self._digest.update("\0".join((*words, "\1")).encode())

    def _is_known(self, value: Any) -> bool:
        number = self._numbers.get(id(value))
        if number is not None:
            self._say("again", str(number))
            return True
        self._numbers[id(value)] = len(self._numbers)
        self._kept.append(value)
        return False

    def _add(self, value: Any) -> None:
        kind = type(value)
        if kind in _PLAIN:
            self._say(kind.__name__, repr(value))
        elif kind in (tuple, list, collections.deque):
            if kind is tuple or not self._is_known(value):
                self._say(kind.__name__, str(len(value)), str(getattr(value, "maxlen", "")))
                for index, one in enumerate(value):
                    self.add(one, str(index))
        elif isinstance(value, enum.Enum):
            self._say(full_name(kind), value.name)
            self._add(value.value)
        elif kind in (set, frozenset):
            self._say(kind.__name__, *sorted(self._apart(one) for one in value))
        elif not self._is_known(value):
            self._add_object(value)

    def _apart(self, value: Any) -> str:
        """The digest of a value by itself, for sets, which have no order."""
        inner = Fingerprint()
        inner._path, inner.codes = self._path, self.codes
        inner._add(value)
        return inner.hexdigest()

    def _add_object(self, value: Any) -> None:
        if isinstance(value, Tensor):
            self._add_tensor(value)
        elif isinstance(value, type):
            self._add_class(value)
        elif isinstance(value, types.FunctionType):
            self._add_function(value)
        elif isinstance(value, types.MethodType):
            self._say("method")
            self._add(value.__func__)
            self._add(value.__self__)
        elif type(value) is functools.partial:
            self._say("partial")
            self._add((value.func, value.args, value.keywords))
        elif isinstance(value, dict | types.MappingProxyType):
            self._add_mapping(value)
        elif not self._add_named(value):
            self._add_instance(value)

    def _add_named(self, value: Any) -> bool:
        """Add an object whose name says everything, or a wrapper; False for other objects."""
        if isinstance(value, types.ModuleType):
            self._say("module", value.__name__)
        elif isinstance(value, types.BuiltinFunctionType):
            self._say("builtin", value.__qualname__)
            self._add(value.__self__)
        elif isinstance(value, OpOverload | OpOverloadPacket):
            if str(value).partition(".")[0] not in _NAMESPACES:
                raise self._cannot(value)  # its fake may be anybody's
            self._say("operator", str(value))
        elif isinstance(value, _SLOTS):
            self._say("slot", value.__qualname__)
        elif isinstance(value, _TYPE_HINTS) or type(value).__module__ == "typing":
            self._say("hint", repr(value))
        elif isinstance(value, logging.Logger):
            self._say("logger", value.name)
        elif isinstance(value, staticmethod | classmethod):
            self._add(value.__func__)
        elif isinstance(value, property):
            self._add((value.fget, value.fset, value.fdel))
        elif isinstance(value, contextvars.ContextVar):
            self._add(value.get(None))
        elif isinstance(value, functools._lru_cache_wrapper):
            self._add(value.__wrapped__)
        else:
            return False
        return True

    def _add_mapping(self, value: Mapping[Any, Any]) -> None:
        """Add the items of a mapping; registries know classes by name, and unseen items are not
        asked.
        """
        self._add(type(value))
        items = dict.items(value) if isinstance(value, dict) else value.items()
        for key, one in list(items):
            if isinstance(key, str) and key.startswith("<class ") and key not in self._classes:
                continue
            self._say("item")
            self._add(key)
            self.add(one, str(key))
        self._add(getattr(value, "default_factory", None))
        self._add_held(value)

    def _add_tensor(self, tensor: Tensor) -> None:
        """Add the form of a tensor and its attributes, never its values: a trace of fakes reads
        none.
        """
        if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer):
            raise self._cannot(tensor)
        form = (tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.layout)
        flags = (tensor.requires_grad, tensor.is_inference(), tensor.is_conj(), tensor.is_neg())
        self._say(type(tensor).__name__, repr(form), repr(flags))
        marks = {k: v for k, v in vars(tensor).items() if (k, v) != _MARK_OF_DYNAMO}
        self._add_attributes(marks)

    def _add_class(self, cls: type) -> None:
        self._say("class", full_name(cls))
        self._classes.add(str(cls))
        if type(cls) is not type:
            self._add(type(cls))
        for base in cls.__mro__[1:]:
            self._add(base)
        library = is_library(cls.__module__)
        for name, value in list(vars(cls).items()):
            plain = value.__func__ if isinstance(value, staticmethod | classmethod) else value
            if name in _UNREAD or (library and not isinstance(plain, types.FunctionType)):
                continue
            if cls is nn.Module and name in _TAGGED:
                continue
            self._say(name)
            where = f"{cls.__qualname__}.{name}"
            if isinstance(plain, types.FunctionType | property):
                self._try(value, where)
            else:
                self.add(value, where)

    def _try(self, value: Any, name: str) -> None:
        """Add a method, or nothing of it: if it has no digest, its code counts as unseen."""
        digest, known, codes = self._digest.copy(), len(self._kept), len(self.codes)
        depth = len(self._path)
        try:
            self.add(value, name)
        except CannotKey:
            self._digest = digest
            for number in list(self.codes)[codes:]:
                del self.codes[number]
            for one in self._kept[known:]:
                del self._numbers[id(one)]
            del self._kept[known:], self._path[depth:]
            self._say("unknown")

    def _add_function(self, function: types.FunctionType) -> None:
        self._say("function", function.__module__ or "", function.__qualname__)
        self._add_code(function.__code__, function.__globals__)
        if is_library(function.__module__ or ""):
            return
        self._add((function.__defaults__, function.__kwdefaults__))
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        for name, cell in cells.items():
            self._say(name)
            try:
                content = cell.cell_contents
            except ValueError:  # not assigned yet
                continue
            self.add(content, f"{function.__qualname__}.{name}")
        self._add_attributes(vars(function))

    def _add_code(self, code: types.CodeType, space: dict[str, Any]) -> None:
        digest, inside = code_digest(code)
        for number in inside:
            self.codes.setdefault(number, space)
        self._say("code", digest)

    def _add_instance(self, value: Any) -> None:
        """Add an object of a class written in Python: its attributes are its whole state."""
        cls = type(value)
        if not all(is_python_class(base) or base in _BUILTIN_BASES for base in cls.__mro__):
            raise self._cannot(value)
        self._add(cls)
        if isinstance(value, nn.Module) and any(getattr(value, name, None) for name in _HOOKS):
            raise CannotKey(f"{self._where()} has hooks")
        if isinstance(value, int | float | str):
            self._say(repr(value))
        elif isinstance(value, tuple | list | set | frozenset):
            self._add(sorted(value, key=repr) if isinstance(value, set | frozenset) else [*value])
        self._add_held(value)

    def _add_held(self, value: Any) -> None:
        """Add the attributes of an object, and its slots."""
        names = [name for base in type(value).__mro__ for name in slots_of(base)]
        held = {name: getattr(value, name) for name in names if hasattr(value, name)}
        self._add_attributes({**held, **getattr(value, "__dict__", {})})

    def _add_attributes(self, attributes: Mapping[str, Any]) -> None:
        self._say(str(len(attributes)))
        for name, one in list(attributes.items()):
            if name in _OF_THE_PROCESS:
                continue
            self._say(name)
            self.add(one, name)

    def _where(self) -> str:
        return ".".join(filter(None, self._path)) or "the call"

    def _cannot(self, value: Any) -> CannotKey:
        return CannotKey(f"{self._where()} is a {full_name(type(value))}")
