"""Drafting by a module or function of the user's, traced into the step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from compilespec.errors import InvalidOption
from compilespec.methods.base import Capabilities, TargetInfo
from compilespec.methods.direct import DirectDrafter, input_names


class UserDrafter(DirectDrafter):
    """A function, or a module's forward, under the contract of `DirectDrafter.draft`."""

    def __init__(self, function: Callable[..., Tensor], aux_layers: Sequence[int] = ()) -> None:
        super().__init__()
        self.function = function
        self.aux_layers = tuple(aux_layers)
        self.num_draft_tokens = int(getattr(function, "num_draft_tokens", 0))

    @property
    def drafting(self) -> Callable[..., Tensor]:
        return self.function.forward if isinstance(self.function, nn.Module) else self.function

    def describe(self) -> str:
        name = getattr(self.function, "__name__", type(self.function).__name__)
        return f"user drafter {name}, reads {', '.join(input_names(self.drafting))}"


class UserMethod:
    """The output is the target's own, whatever the function proposes."""

    capabilities = Capabilities(
        name="user", kind="direct", needs_draft_weights=True, aliases=("USER_PROVIDED",)
    )

    def load(self, draft: Any, target: TargetInfo, options: Mapping[str, Any]) -> UserDrafter:
        """Adopt a module or function.  Option: `aux_layers`, which hidden states `hidden_BE` holds.

        Raises: InvalidOption.
        """
        unknown = sorted(options.keys() - {"aux_layers"})
        if unknown:
            raise InvalidOption(
                f"unknown option {', '.join(unknown)}; method 'user' knows aux_layers"
            )
        if not callable(draft):
            raise InvalidOption(
                f"spec='user' needs draft= a module or a function; got {type(draft).__name__}"
            )
        drafter = UserDrafter(draft, options.get("aux_layers", ()))
        input_names(drafter.drafting)
        return drafter


METHOD = UserMethod()
