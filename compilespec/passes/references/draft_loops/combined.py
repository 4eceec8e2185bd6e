"""A look-up's drafts in the place of a model's, one request at a time."""

from __future__ import annotations

from torch import Tensor

from compilespec.passes.references.base import Values
from compilespec.passes.references.draft_loops.direct import direct
from compilespec.passes.references.draft_loops.drafts import Drafts
from compilespec.program import PAD


def combined(draft: Drafts, values: Values, modelled_BK: Tensor) -> Tensor:
    """Those of the look-up where it found something, and is surer, or the model drafted nothing.

    `draft.matched` becomes 0 where the model's stay.
    """
    confidences = draft.confidences(len(modelled_BK))
    found_BK = direct(draft, values)
    assert draft.matched is not None, "a look-up says how long its match is"
    drafts_BK = modelled_BK.clone()
    for request, length in enumerate(draft.matched):
        confidence = confidences[request]
        chance = (2 * confidence - 1) / 16 if confidence else 12 / 16
        is_surer = length / (length + 1) > chance or int(modelled_BK[request, 0]) == PAD
        if is_surer and int(found_BK[request, 0]) != PAD:
            drafts_BK[request] = found_BK[request]
        else:
            draft.matched[request] = 0
    return drafts_BK
