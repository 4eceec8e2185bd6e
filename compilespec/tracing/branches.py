"""Finds where a model's Python code takes another way for another number of tokens.

Dynamo follows one call of 13 tokens; an `if` on its length is decided there.  A graph
serves calls of every length, so each such condition is looked at here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from compilespec import _torch_compat
from compilespec.errors import UnsupportedModel
from compilespec.program import Branch, Traced
from compilespec.tracing.quantized_weights import is_quantized
from compilespec.tracing.structure import token_ids

_LENGTHS = sorted({*range(2, 65), *((1 << n) + d for n in range(6, 21) for d in (-1, 0, 1))})


def branches_of(
    guards: Sequence[tuple[Any, str]], shapes: Sequence[Sequence[Any]], dims: Sequence[int]
) -> tuple[Branch, ...]:
    """The conditions that do not hold for every number of tokens.

    Args:
        guards: conditions on sizes, as sympy expressions, and the lines that asked.
        shapes: of the arguments of the captured call; the other symbols keep that call's values.
        dims: dynamic dimensions of the first argument, of which the last one counts tokens.
    """
    if not (guards and shapes and dims):
        return ()
    length = shapes[0][dims[-1]]
    known = {
        _torch_compat.size_expression(size): _torch_compat.example_of(size)
        for shape in shapes
        for size in shape
        if isinstance(size, torch.SymInt)
    }
    symbol = _torch_compat.size_expression(length)
    captured = known.pop(symbol)
    return tuple(_branches(guards, symbol, captured, known))


def _branches(
    guards: Sequence[tuple[Any, str]], symbol: Any, captured: int, known: dict[Any, int]
) -> Iterator[Branch]:
    for condition, place in guards:
        expression = condition.subs(known)
        if expression.free_symbols != {symbol}:
            continue

        def holds(count: int, expression: Any = expression) -> bool:
            return bool(expression.subs(symbol, count))

        failing = {count for count in _LENGTHS if not holds(count)}
        last = max({captured, *_LENGTHS} - failing)
        longer = _first_failing(holds, last, _LENGTHS[-1]) if last < _LENGTHS[-1] else 0
        shorter = max((count for count in failing if count < captured), default=0)
        if longer or shorter:
            text = str(expression).replace(str(symbol), "T")
            line = place.rpartition("#")[2].split(" in ")[0].rpartition("/")[2].strip()
            yield Branch(text, line, shorter, longer)


def _first_failing(holds: Any, good: int, bad: int) -> int:
    """The smallest number above `good` for which a condition that `bad` fails does not hold."""
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if holds(middle) else (good, middle)
    return bad


def check_branches(
    traced: Traced, model: nn.Module, call: Callable[..., Tensor], longest: int
) -> None:
    """Check that a graph serves calls of every length up to `longest`.

    Past its `longer`, a condition would send the model another way than the graph.  Below the
    captured length the model itself is asked: its first rows must not depend on how many follow.

    Args:
        call: (input_ids, position_ids) -> logits of the unmodified model.
    Raises: UnsupportedModel.
    """
    name = type(model).__name__
    ids = token_ids(traced.graph_module.graph).meta["example_value"]
    captured = _torch_compat.example_of(ids.shape[1])
    for branch in traced.branches:
        if branch.longer and branch.longer <= longest:
            raise UnsupportedModel(
                f"{name} takes another way from {branch.longer} tokens on (it asks for "
                f"{branch.condition} in {branch.place}), which a graph of fewer tokens lacks; give "
                f"max_seq_len={branch.longer - 1} or less, or change that limit in the config"
            )
    if any(weight.is_meta or is_quantized(weight) for weight in traced.weights.values()):
        return  # no values to compare
    for branch in traced.branches:
        if branch.shorter and (parted := _parted(model, call, branch.shorter, captured)):
            raise UnsupportedModel(
                f"{name}: expected a token's logits to follow from it and earlier ones; they "
                f"differ by {parted:.1e} between calls of {branch.shorter} and of {captured} "
                f"tokens (it asks for {branch.condition} in {branch.place}); rewrite that line "
                "without a condition on the number of tokens"
            )


@torch.no_grad()
def _parted(model: nn.Module, call: Callable[..., Tensor], count: int, captured: int) -> float:
    """How far the logits of `count` tokens are from those of the same tokens with others behind;
    0.0 for rounding.
    """
    was_training, device = model.training, next(model.parameters()).device
    positions = torch.arange(captured, dtype=torch.int32, device=device)[None]
    ids = positions % 5 + 1
    model.eval()
    try:
        whole, few = (
            call(input_ids=ids[:, :size], position_ids=positions[:, :size])[:, :count]
            for size in (captured, count)
        )
    except (RuntimeError, IndexError, TypeError, ValueError):
        return 0.0  # the model itself does not run on as few tokens
    finally:
        model.train(was_training)
    parted = float((whole - few).abs().amax())
    return parted if parted > 1e-2 * float(whole.abs().amax()) else 0.0
