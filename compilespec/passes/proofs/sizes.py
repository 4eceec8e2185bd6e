"""The named sizes of a program as sympy symbols, and integer ranges in terms of them."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy

from compilespec import _torch_compat
from compilespec.program import ProgramConfig

Expr = Any  # a sympy expression with integer values


def _size(name: str) -> Expr:
    return sympy.Symbol(name, integer=True, positive=True)


B, T, R = _size("B"), _size("T"), _size("R")  # vary between calls
V, L = _size("V"), _size("max_seq_len")
BLOCK_SIZE, NUM_BLOCKS, MAX_BATCH = _size("block_size"), _size("num_blocks"), _size("max_batch")
K = sympy.Symbol("K", integer=True, nonnegative=True)
NUM_TABLE_BLOCKS = sympy.ceiling(L / BLOCK_SIZE)  # M, blocks of a row
_SMALLEST_NAMED = 3  # 0, 1 and 2 are too common to be read as sizes


@dataclass(frozen=True)
class Range:
    """All integers from `low` to `high`, both included; empty if low > high."""

    low: Expr
    high: Expr

    def __str__(self) -> str:
        return f"[{self.low}, {self.high}]"


def integers(low: Any, high: Any) -> Range:
    return Range(sympy.sympify(low), sympy.sympify(high))


class Sizes:
    """Values of the fixed sizes, and limits of those that vary between calls.

    A number in a graph is read as the size with that value if there is only one.  That never
    changes a value, so every comparison is right for this program.  With `for_all_sizes`,
    comparisons ignore the values: a certain answer then holds for any sizes, provided the numbers
    were read correctly (which is so if all sizes are distinct and uncommon).
    """

    def __init__(
        self, config: ProgramConfig, vocab_size: int | None, *, for_all_sizes: bool = False
    ) -> None:
        self.for_all_sizes = for_all_sizes
        self.values: dict[Expr, int] = {
            K: config.num_draft_tokens,
            L: config.max_seq_len,
            BLOCK_SIZE: config.block_size,
            NUM_BLOCKS: config.num_blocks,
            MAX_BATCH: config.max_batch_size,
        }
        if vocab_size is not None:
            self.values[V] = vocab_size
        self.limits = {B: config.max_batch_size, R: config.max_batch_size}
        self.limits[T] = config.max_prefill_tokens
        named: dict[int, list[Expr]] = {}
        for expr in (*self.values, K + 1, MAX_BATCH + 1, NUM_TABLE_BLOCKS):
            named.setdefault(self.value(expr), []).append(expr)
        self._names = {
            value: exprs[0]
            for value, exprs in named.items()
            if len(exprs) == 1 and value >= _SMALLEST_NAMED
        }

    def name(self, value: int) -> Expr:
        """The size with this value, or the number itself."""
        return self._names.get(value, sympy.Integer(value))

    def value(self, expr: Expr) -> Any:
        """The expression with the fixed sizes filled in: an int, or an expression in B, T, R."""
        filled = sympy.sympify(expr).subs(self.values)
        return int(filled) if filled.is_number else filled

    def of(self, size: Any, symbols: Mapping[str, Expr]) -> Expr:
        """A dimension of a traced tensor; `symbols` says which of B, T, R a tracing symbol is."""
        if isinstance(size, int):
            return self.name(size)
        expr = _torch_compat.size_expression(size)
        known = {s: symbols[str(s)] for s in expr.free_symbols if str(s) in symbols}
        return expr.xreplace(known)

    # --- comparisons ---

    def le(self, left: Expr, right: Expr) -> bool:
        """True where left <= right is certain."""
        if left.is_Integer and right.is_Integer:
            return bool(left <= right)
        if left in (-sympy.oo, right) or right == sympy.oo:
            return True
        if sympy.oo in (left, -right):
            return False
        return self._le(left, right)

    @functools.cache  # noqa: B019  (an analysis of one graph keeps its sizes as long as itself)
    def _le(self, left: Expr, right: Expr) -> bool:
        gap = sympy.expand(right - left)
        if is_nonnegative(gap):
            return True
        return not self.for_all_sizes and bool(self.lowest(gap) >= 0)

    @functools.cache  # noqa: B019
    def lowest(self, expr: Expr) -> Any:
        """A lower bound of `expr`: each term at the limit of B, T, R that minimises it."""
        expr = sympy.expand(sympy.sympify(expr).subs(self.values))
        total: Any = sympy.Integer(0)
        for term in sympy.Add.make_args(expr):
            factor, rest = term.as_coeff_Mul()
            if not rest.is_polynomial(*self.limits) or rest.free_symbols - set(self.limits):
                return -sympy.oo
            ends: Mapping[Expr, int] = dict.fromkeys(self.limits, 1)
            total += factor * rest.subs(ends if factor > 0 else self.limits)
        return total

    def highest(self, expr: Expr) -> Any:
        """An upper bound of `expr`."""
        return -self.lowest(-expr)

    def smallest(self, exprs: Iterable[Expr]) -> Expr:
        """One of the expressions, or a number, that is at most each of them."""
        candidates = list(dict.fromkeys(exprs))
        for one in candidates:
            if all(self.le(one, other) for other in candidates):
                return one
        if self.for_all_sizes:
            return -sympy.oo
        return min(self.lowest(one) for one in candidates)

    def largest(self, exprs: Iterable[Expr]) -> Expr:
        """One of the expressions, or a number, that is at least each of them."""
        return -self.smallest([-one for one in exprs])

    # --- ranges ---

    def is_empty(self, value: Range) -> bool:
        return self.le(value.high + 1, value.low)

    def within(self, value: Range, needed: Range) -> bool:
        """True where every integer of `value` is certainly in `needed`."""
        return self.is_empty(value) or (
            self.le(needed.low, value.low) and self.le(value.high, needed.high)
        )

    def within_numbers(self, value: Range, needed: Range) -> bool:
        """The same for this program's sizes, ignoring `for_all_sizes`; `needed` is numeric."""
        inside = self.lowest(value.low) >= needed.low and self.highest(value.high) <= needed.high
        return bool(inside) or self.is_empty(value)

    def join(self, ranges: Sequence[Range | None]) -> Range | None:
        """The smallest range that holds all of them; None if one is unknown."""
        known = [value for value in ranges if value is not None]
        if len(known) < len(ranges) or not known:
            return None
        low = self.smallest([value.low for value in known])
        return Range(low, self.largest([value.high for value in known]))

    def meet(self, left: Range, right: Range) -> Range:
        """A range that holds the integers in both; of incomparable ends it takes `right`'s."""
        low = left.low if self.le(right.low, left.low) else right.low
        high = left.high if self.le(left.high, right.high) else right.high
        return Range(low, high)


@functools.cache
def is_nonnegative(expr: Expr) -> bool:
    """True where an expression is >= 0 for all sizes (K >= 0, all others >= 1)."""
    symbols = sorted(expr.free_symbols, key=str)
    least = {s: sympy.Dummy(str(s), integer=True, nonnegative=True) for s in symbols}
    blocks = sympy.Dummy("blocks", integer=True, nonnegative=True)
    shifted = expr.xreplace({NUM_TABLE_BLOCKS: blocks + 1})
    shifted = shifted.xreplace({s: least[s] + (0 if s == K else 1) for s in symbols})
    terms = sympy.Add.make_args(sympy.expand(shifted))
    return all(bool(term.is_nonnegative) for term in terms)
