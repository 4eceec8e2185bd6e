"""Drafting by a module or function of the user's, traced into the step or called between steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from compilespec.errors import InvalidOption
from compilespec.methods.base import Drafter
from compilespec.methods.capabilities import Capabilities
from compilespec.methods.direct import DirectDrafter, input_names
from compilespec.program import HostProposal
from compilespec.tracing.target_info import TargetInfo


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


class HostDrafter(Drafter):
    """A function that runs on the host: token ids in, up to K draft ids out."""

    capabilities = Capabilities(
        name="user", kind="callback", needs_draft_weights=True, aliases=("USER_PROVIDED",)
    )

    def __init__(self, function: HostProposal) -> None:
        super().__init__()
        object.__setattr__(self, "propose_on_host", function)  # a module would become a submodule
        self.num_draft_tokens = int(getattr(function, "num_draft_tokens", 0))

    def describe(self) -> str:
        name = getattr(self.propose_on_host, "__name__", type(self.propose_on_host).__name__)
        return f"user drafter {name}, called on the host between steps"


class UserMethod:
    """The output is the target's own for any proposals."""

    capabilities = Capabilities(
        name="user",
        brings="drafts of a function or module of yours",
        kind="direct",
        needs_draft_weights=True,
        aliases=("USER_PROVIDED",),
        options=("aux_layers", "traced"),
    )

    def load(
        self, draft: Any, target: TargetInfo, options: Mapping[str, Any]
    ) -> UserDrafter | HostDrafter:
        """Adopt a module or function.

        Options: `aux_layers`, the hidden states that `hidden_BE` holds; `traced=False` for a
        function that cannot be traced.  Such a function is called on the host before every verify
        step with each request's token ids (a list, prompt included), and returns up to K draft ids.
        If it raises, that request ends with `DraftFailed`.

        Raises: InvalidOption.
        """
        if not callable(draft):
            raise InvalidOption(
                f"spec='user' needs draft= a module or a function; got {type(draft).__name__}"
            )
        traced = options.get("traced", True)
        if not isinstance(traced, bool):
            raise InvalidOption(f"traced must be True or False; got {traced!r}")
        if not traced:
            if "aux_layers" in options:
                raise InvalidOption(
                    "a drafting function on the host reads token ids only; leave out aux_layers, "
                    "or trace it"
                )
            return HostDrafter(draft)
        drafter = UserDrafter(draft, options.get("aux_layers", ()))
        input_names(drafter.drafting)
        return drafter


METHOD = UserMethod()
