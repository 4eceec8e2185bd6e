"""The ways in which a drafter that is the target itself is made cheaper."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from compilespec.errors import InvalidOption, NotSupported
from compilespec.errors.suggest import not_one_of

WEIGHTS = ("int4", "upper")  # of the drafter's products


@dataclass(frozen=True, kw_only=True)
class SelfDraft:
    """`draft=` of spec="self": how the target becomes its own drafter.

    Raises: InvalidOption, NotSupported.
    """

    weights: str | None = "int4"
    """The weights of its products: "int4" are copies in 4 bits, "upper" are the upper halves of a
    target's with quantize="int8_nested", None are the target's own.
    """

    layers: Sequence[int] | float | None = None
    """The layers that it keeps, or the share of them, above 0 and up to 1; None: all."""

    window: tuple[int, int] | None = None
    """First tokens and newest tokens that its attention sees, itself among them; None: all."""

    experts: int | None = None
    """Experts that it asks for each token; None: as many as the target."""

    vocab: int | None = None
    """The ids that it may propose, the most frequent ones, as `draft_vocab_size=`; None: all."""

    def __post_init__(self) -> None:
        if self.weights is not None and self.weights not in WEIGHTS:
            raise not_one_of("SelfDraft(weights=)", self.weights, WEIGHTS, also=", or None")
        _check_layers(self.layers)
        _check_window(self.window)
        if self.experts is not None:
            raise NotSupported("SelfDraft(experts=) is not built yet: leave it out")
        if self.vocab is not None and (not _is_integer(self.vocab) or self.vocab < 1):
            raise InvalidOption(
                f"SelfDraft(vocab=) must be a number of ids, at least 1; got {self.vocab!r}"
            )

    def kept_layers(self, num_layers: int) -> tuple[int, ...]:
        """The layers that it keeps, of a target's `num_layers`.  A share leaves out layers between
        the first and the last, evenly.

        Raises: InvalidOption for a layer that is not there.
        """
        if self.layers is None:
            return tuple(range(num_layers))
        if isinstance(self.layers, float):
            return _spread(num_layers, max(1, round(self.layers * num_layers)))
        kept = sorted(set(self.layers))
        if kept[-1] >= num_layers:
            raise InvalidOption(
                f"SelfDraft(layers=): the target has layers 0 to {num_layers - 1}, there is no "
                f"layer {kept[-1]}; name some of those, or give the share that stays, such as 0.8"
            )
        return tuple(kept)


def read_recipe(draft: Any) -> SelfDraft:
    """The recipe that `draft=` is or names.  Raises: InvalidOption."""
    if isinstance(draft, SelfDraft):
        return draft
    if isinstance(draft, str):
        return SelfDraft(weights=draft)
    raise InvalidOption(
        "spec='self' drafts with the target itself: give draft=compilespec.SelfDraft(...), or "
        f"leave it out; got {type(draft).__name__}"
    )


def _check_layers(layers: Any) -> None:
    if layers is None:
        return
    if isinstance(layers, float):
        if not 0 < layers <= 1:
            raise InvalidOption(
                "SelfDraft(layers=) is the share of layers that stays, above 0 and up to 1; got "
                f"{layers}"
            )
        return
    is_list = isinstance(layers, Sequence) and not isinstance(layers, str)
    if not is_list or not all(_is_integer(one) and one >= 0 for one in layers):
        raise InvalidOption(
            f"SelfDraft(layers=) takes the layers that stay, or their share; got {layers!r}"
        )
    if not layers:
        raise InvalidOption(
            "SelfDraft(layers=[]) leaves no layer to draft with: name those that stay, or their "
            "share, such as 0.8"
        )


def _check_window(window: Any) -> None:
    if window is None:
        return
    is_pair = isinstance(window, Sequence) and len(window) == 2 and all(map(_is_integer, window))
    if not is_pair or window[0] < 0 or window[1] < 1:
        raise InvalidOption(
            "SelfDraft(window=) takes (first tokens, newest tokens), 0 or more and 1 or more, "
            f"such as (0, 512); got {window!r}"
        )
    if window[0]:
        raise NotSupported(
            f"SelfDraft(window={tuple(window)!r}): a window beside first tokens is not built yet: "
            f"give (0, {window[1]})"
        )


def _spread(num_layers: int, num_kept: int) -> tuple[int, ...]:
    """`num_kept` of the layers, the first and the last among them, evenly apart."""
    if num_kept == 1:
        return (0,)
    step = (num_layers - 1) / (num_kept - 1)
    return tuple(sorted({round(index * step) for index in range(num_kept)}))


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
