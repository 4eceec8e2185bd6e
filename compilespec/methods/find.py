"""Where a drafter is looked for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from compilespec.errors import DraftNotFound, InvalidOption
from compilespec.methods.capabilities import Capabilities
from compilespec.tracing.load import Target


def find_draft(
    draft: str | Path | nn.Module | Callable[..., Any] | None,
    target: Target,
    capabilities: Capabilities,
) -> Path | nn.Module | Callable[..., Any]:
    """The drafter: as given (`check_draft` has passed it), else `TARGET_DIRECTORY/<method>/`, else
    inside the target's own checkpoint if the method allows that.

    Raises: DraftNotFound naming every place that was searched.
    """
    method = capabilities.name
    if draft is not None:
        return Path(draft) if isinstance(draft, str | Path) else draft
    if target.directory is None:
        raise DraftNotFound(
            f"spec={method!r} needs a drafter and the target is a module, so there is no "
            f"directory to search; give draft="
        )
    places = [target.directory / name for name in (method, *capabilities.folders)]
    for place in places:
        if (place / "config.json").is_file():
            return place
    if capabilities.inside_target:
        return target.directory
    raise DraftNotFound(
        f"no drafter for spec={method!r}: searched {', '.join(map(str, places))}; give "
        f"draft=DIRECTORY or a module"
    )


def check_draft(draft: Any, capabilities: Capabilities) -> None:
    """Refuse a drafter that cannot be one, before the target is loaded.

    Raises: InvalidOption, DraftNotFound.
    """
    method = capabilities.name
    if draft is None or capabilities.chooses:
        return
    if not capabilities.needs_draft_weights:
        raise InvalidOption(
            f"spec={method!r} takes no draft; leave out draft= or choose another method"
        )
    if isinstance(draft, str | Path):
        if not (Path(draft) / "config.json").is_file():
            raise DraftNotFound(
                f"draft {draft} holds no config.json; expected a checkpoint directory of method "
                f"{method!r}"
            )
    elif not callable(draft):
        raise InvalidOption(f"draft must be a directory, a module or a function; got {draft!r}")
