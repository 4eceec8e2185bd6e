"""Copies of modules that share their tensors."""

from __future__ import annotations

import copy
from typing import TypeVar

from torch import nn

Model = TypeVar("Model", bound=nn.Module)


def shallow_copy(module: Model) -> Model:
    """A copy of the module tree that holds the same tensors."""
    made: dict[int, nn.Module] = {}

    def copied(one: nn.Module) -> nn.Module:
        if id(one) not in made:
            new = made[id(one)] = copy.copy(one)
            for store in ("_parameters", "_buffers"):
                new.__dict__[store] = dict(one.__dict__[store])
            new.__dict__["_modules"] = {
                name: child if child is None else copied(child)
                for name, child in one.__dict__["_modules"].items()
            }
        return made[id(one)]

    result = copied(module)
    assert isinstance(result, type(module))
    return result
