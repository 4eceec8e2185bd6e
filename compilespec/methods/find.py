"""Where a drafter is looked for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from compilespec.errors import DraftNotFound, InvalidOption, ModelNotFound
from compilespec.methods.capabilities import Capabilities
from compilespec.methods.published import published_draft
from compilespec.methods.self_draft.recipe import read_recipe
from compilespec.tracing.checkpoint_files import drop_mtp, tensor_names
from compilespec.tracing.load import Target
from compilespec.tracing.places import find_model


def find_draft(
    draft: str | Path | nn.Module | Callable[..., Any] | None,
    target: Target,
    capabilities: Capabilities,
) -> Path | nn.Module | Callable[..., Any]:
    """The drafter: as given (`read_draft` has passed it), else `TARGET_DIRECTORY/<method>/`, else
    inside the target's own checkpoint if the method allows that, else in the table of published
    drafters by the target's name.

    Raises: DraftNotFound naming every place that was searched, or what to download.
    """
    method = capabilities.drafter
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
    if capabilities.inside_target and (target.directory / "config.json").is_file():
        return target.directory
    none = f"no drafter for spec={method!r}: searched {', '.join(map(str, places))} and the "
    none += "published drafters (compilespec drafters MODEL)"
    if published := published_draft(target.given_name, method):
        try:
            return _draft_place(published, capabilities)
        except DraftNotFound as error:
            raise DraftNotFound(f"{none}, where {error}") from error
    raise DraftNotFound(f"{none}; give draft= a directory, a name of the hub or a module")


def read_draft(draft: Any, capabilities: Capabilities) -> Any:
    """The drafter as given, or the path that its name leads to; refuse one that cannot be one,
    before the target is loaded.

    Raises: InvalidOption, DraftNotFound.
    """
    method = capabilities.name
    if draft is None or capabilities.chooses:
        return draft
    if capabilities.takes_recipe:
        return read_recipe(draft)
    if not capabilities.needs_draft_weights:
        raise InvalidOption(
            f"spec={method!r} takes no draft; leave out draft= or choose another method"
        )
    if isinstance(draft, str | Path):
        return _draft_place(draft, capabilities)
    if not callable(draft):
        raise InvalidOption(
            f"draft must be a directory, a name of the hub, a module or a function; got {draft!r}"
        )
    return draft


def check_inside(model: Any, draft: Any, capabilities: Capabilities) -> None:
    """Refuse a target whose checkpoint should hold the drafter and does not, before it is loaded.

    Raises: DraftNotFound, ModelNotFound, CheckpointError.
    """
    if draft is not None or not capabilities.inside_target or not isinstance(model, str | Path):
        return
    place, method = find_model(model), capabilities.drafter
    folders = [place.directory / name for name in (method, *capabilities.folders)]
    if place.gguf_file is not None or any((one / "config.json").is_file() for one in folders):
        return
    names = tensor_names(place.directory)
    if len(drop_mtp(names)) == len(names):
        raise DraftNotFound(
            f"{place.path} holds no MTP modules, which spec={method!r} drafts with: expected "
            "tensors such as model.layers.N.eh_proj.weight or mtp.fc.weight; give draft= a "
            "checkpoint that has them, or take spec='suffix', which needs no drafter"
        )


def _draft_place(draft: str | Path, capabilities: Capabilities) -> Path:
    """The directory of a drafter, or a GGUF file where the method's drafter is a model."""
    try:
        place = find_model(draft)
    except ModelNotFound as error:
        raise DraftNotFound(
            f"draft {error}; a checkpoint of method {capabilities.drafter!r} is needed"
        ) from error
    if place.gguf_file is not None and not capabilities.drafts_with_model:
        raise DraftNotFound(
            f"draft {place.path} is a GGUF file; expected a checkpoint directory of method "
            f"{capabilities.drafter!r}, with config.json"
        )
    return place.path
