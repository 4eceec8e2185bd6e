"""Masks of the ids that guided requests may choose, computed on the host between two calls.

The masks of a window's S rows follow from the guide and the drafts, so the host must know the
drafts: such a request costs a wait for them, and its next step cannot be launched ahead.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from compilespec.errors import GuideFailed, SpecError
from compilespec.passes.splice.evidence import NUM_CONFIDENCES, Evidence
from compilespec.runtime.executor import Executor
from compilespec.runtime.guides import Vocabulary
from compilespec.runtime.guides.follower import GuideFollower
from compilespec.runtime.request import Request
from compilespec.runtime.sampling_params import SamplingParams


def make_follower(
    params: SamplingParams,
    vocabulary: Vocabulary,
    *,
    end_ids: frozenset[int],
    stop_ids: frozenset[int],
) -> GuideFollower | None:
    """The follower of a new request; None where it has no guide.

    Raises: InvalidRequest, MissingDependency.
    """
    if params.guide is None:
        return None
    banned = set(params.bad_token_ids or ())
    if params.allowed_token_ids is not None:
        banned |= set(range(vocabulary.size)) - set(params.allowed_token_ids)
    return GuideFollower(
        params.guide.matcher(vocabulary),
        vocabulary.num_words,
        end_ids=end_ids,
        starts_after=params.guide_after_token_id,
        banned=banned,
        held_ids=stop_ids,
        min_new_tokens=params.min_new_tokens,
    )


def write_masks(
    executor: Executor, requests: Sequence[Request], *, drafted: bool
) -> dict[Request, GuideFailed]:
    """Write the masks of the guided ones among the requests for the call that comes next.

    Args:
        drafted: true for a decode step, where every row follows a draft.
    Returns: the requests that cannot go on, and why.
    """
    guided = [request for request in requests if request.guide is not None]
    if not guided:
        return {}
    rows = [request.row for request in guided]
    drafts = executor.read_drafts(rows) if drafted else [[]] * len(rows)
    parents = executor.read_parents(rows) if drafted else [None] * len(rows)
    config = executor.geometry.config
    steers = drafted and config.num_draft_tokens > 0 and config.features.forced_drafts
    failed: dict[Request, GuideFailed] = {}
    masks: dict[int, Tensor] = {}  # by row
    steered: dict[int, list[int]] = {}
    for request, tokens, follows in zip(guided, drafts, parents, strict=True):
        assert request.guide is not None
        try:
            if steers:
                steered[request.row], masks[request.row] = _steer(executor, request, tokens)
            else:
                masks[request.row] = request.guide.masks(tokens, follows)
        except GuideFailed as error:
            failed[request] = error
    if steered:
        executor.set_drafts(list(steered), list(steered.values()))
    if masks:
        executor.set_masks(list(masks), pad_sequence(list(masks.values()), batch_first=True))
    return failed


def _steer(executor: Executor, request: Request, drafts: Sequence[int]) -> tuple[list[int], Tensor]:
    """The request's drafts where its guide has a say, and the masks along them; what the host knows
    of the drafts follows.  Raises: GuideFailed.
    """
    assert request.guide is not None
    most, own = executor.geometry.config.num_draft_tokens, request.params.num_draft_tokens
    chosen, masks = request.guide.steer(drafts, most if own is None else min(most, own))
    if chosen != drafts[: len(chosen)]:  # some are forced: as sure as a long match
        request.evidence = Evidence(len(chosen), NUM_CONFIDENCES - 1)
    elif request.evidence is not None:
        request.evidence = request.evidence._replace(num_drafts=len(chosen))
    return chosen, masks


def admitted(request: Request, tokens: Sequence[int]) -> tuple[Sequence[int], SpecError | None]:
    """The tokens of a step that the request's guide and processor accept, and the error of the next
    one.
    """
    if request.processor is not None and request.processor.error is not None:
        return (), request.processor.error
    if request.guide is None:
        return tokens, None
    count, error = request.guide.follow(tokens)
    return tokens[:count], error
