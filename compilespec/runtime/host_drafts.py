"""Drafts that a function on the host proposes between two steps."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from numbers import Integral
from typing import Any

from compilespec.errors import DraftFailed
from compilespec.program import HostProposal
from compilespec.runtime.executor import Executor, Geometry
from compilespec.runtime.request import Request


def write_drafts(
    executor: Executor, propose: HostProposal, requests: Sequence[Request]
) -> dict[Request, DraftFailed]:
    """Ask for every request's drafts and write them for the decode call that comes next.

    Returns: the requests that cannot go on, and why.
    """
    drafts: dict[int, list[int]] = {}  # by row
    failed: dict[Request, DraftFailed] = {}
    for request in requests:
        try:
            drafts[request.row] = propose_drafts(propose, request, executor.geometry)
        except DraftFailed as error:
            failed[request] = error
    if drafts:
        executor.set_drafts(list(drafts), list(drafts.values()))
    return failed


def propose_drafts(propose: HostProposal, request: Request, geometry: Geometry) -> list[int]:
    """Up to K draft ids for the request's next step; cut before an id outside the vocabulary.

    Args:
        propose: called with the request's token ids, prompt included, the newest last (a list of
        its own); returns a sequence of ids, None for none.
    Raises: DraftFailed, which names the function and the request, for any error in it.
    """
    name = getattr(propose, "__name__", type(propose).__name__)
    where = f"the drafting function {name} (request {request.id})"
    try:
        proposed: Any = propose([*request.prompt_token_ids, *request.output_token_ids])
    except Exception as error:
        message = (str(error).splitlines() or [""])[0]
        raise DraftFailed(f"{where} raised {type(error).__name__}: {message}") from error
    ids = _as_ids(proposed)
    if ids is None:
        raise DraftFailed(
            f"{where} must return a sequence of token ids; it returned {type(proposed).__name__}"
        )
    most = geometry.config.num_draft_tokens
    if len(ids) > most:
        raise DraftFailed(
            f"{where} returned {len(ids)} drafts, the engine takes {most}; "
            f"compile with num_draft_tokens={len(ids)} or return fewer"
        )
    return list(itertools.takewhile(lambda token: 0 <= token < geometry.config.vocab_size, ids))


def _as_ids(proposed: Any) -> list[int] | None:
    if proposed is None:
        return []
    if hasattr(proposed, "tolist"):  # a tensor or an array, without importing its library
        proposed = proposed.tolist()
    if not isinstance(proposed, Sequence) or not all(
        isinstance(token, Integral) and not isinstance(token, bool) for token in proposed
    ):
        return None
    return [int(token) for token in proposed]
