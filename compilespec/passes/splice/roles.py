"""The roles of a step: the values that passes hand each other, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor, fx

from compilespec.passes.graph.nodes import find_role, give_role


class StepRoles:
    """The values of a step that passes find by name, as proxies of the tensors described here.

    Reading a role that no node plays raises PassError.  Assigning gives the role to another node.
    Shapes are those of decoding; of a prefill call they are in brackets.  After `keep_path` a tree
    is its accepted path, and S is P = K + 1.
    """

    input_ids: Tensor
    """int [B, T]: the target's ids as traced, until `read_state` replaces them."""

    position_ids: Tensor
    """int [B, T]: the target's positions as traced, until `read_state` replaces them."""

    # --- state rows and batch inputs ---

    tokens_RS: Tensor
    """int32: the last emitted token of each state row, then its drafts."""

    seq_len_R: Tensor
    """int32: the committed tokens of each state row."""

    block_table_RM: Tensor
    """int32: the cache blocks of each state row, in order; -1 after them."""

    ids_T: Tensor
    """int32: the tokens of a prefill call, packed."""

    position_T: Tensor
    """int32: their positions."""

    row_T: Tensor
    """int32: their state rows, -1 of padding."""

    owner_T: Tensor
    """int32: which request of the call each token belongs to."""

    last_R: Tensor
    """int32: where in a prefill call the last token of each request is."""

    # --- made by `read_state`, or by `read_kept` in a replay ---

    ids: Tensor
    """int32 [B, S] ([1, T]): the last emitted token and the drafts, 0 where there is none."""

    position: Tensor
    """int32 [B, S] ([1, T]): the position of each token; 0 at or past the maximum length."""

    row: Tensor
    """int32 [B, S] ([1, T]): the state row of each token, -1 where nothing may be written."""

    slot: Tensor
    """int32 [B, S] ([1, T]): the flat cache index of each token, -1 where nothing is written."""

    row_index: Tensor
    """int64 [B]: the state row of each request, the spare one where it is padded or unfinished."""

    live: Tensor
    """bool [B]: whether the request's state row may be written."""

    start: Tensor
    """int32 [B]: committed tokens before the step (in prefill: the position after the last one)."""

    depth: Tensor
    """int32 [B, S]: the depth of each row of a tree, 0 at its root."""

    path: Tensor
    """int32 [B, S, P]: the rows from the root to each row of a tree, -1 after them."""

    absorbed: Tensor
    """int32 [B, S] ([1, T]): how many tokens the recurrent states of a token's request hold."""

    commits: Tensor
    """bool [B, S] ([1, T]): whether the token cannot be rejected any more."""

    # --- the target ---

    logits: Tensor
    """[B, S, V] ([1, T, V]; after `narrow_logits` [1, R, V]): what acceptance reads."""

    raw_logits: Tensor
    """[B, S, V] ([1, R, V]): `logits` before processors changed them, for log-probabilities."""

    head_input: Tensor
    """[1, T, D]: what the target's head takes of a prompt, for log-probabilities of prompts."""

    hidden: Tensor
    """[B, S, A*D] ([1, T, A*D]): the taps, as an output for the host."""

    # --- acceptance ---

    target: Tensor
    """int32 [B, S] ([R, 1]): the tokens of the step; those after the bonus are harmless ids."""

    emitted: Tensor
    """int32 [B, S] ([R, 1]): the same, PAD after the bonus."""

    num_emitted: Tensor
    """int32 [B]: accepted drafts and the bonus."""

    taken: Tensor
    """int32 [B, P]: the rows of a tree's accepted path, 0 after them."""

    # --- drafting ---

    draft_ids: Tensor
    """int32 [B, S] ([1, T]): the token after each row, which the drafter reads."""

    aux: Tensor
    """[B, S, A*D] ([1, T, A*D]): the taps of the same rows, concatenated."""

    drafts: Tensor
    """int32 [B, K]: the drafts of the next step, target ids, PAD where there is none."""

    parents: Tensor
    """int32 [B, N + 1]: the parent of each row of the next step's tree; the root is its own."""

    confidence: Tensor
    """int32 [B]: how sure the drafts are, see `evidence`."""

    evidence: Tensor
    """int32 [B]: the number of drafts, and their confidence."""

    def __init__(self, gm: fx.GraphModule, value_of: Callable[[fx.Node], Tensor]) -> None:
        self.__dict__.update(_gm=gm, _value_of=value_of)

    if not TYPE_CHECKING:  # a type checker knows the attributes above alone

        def __getattr__(self, name: str) -> Tensor:
            _check(name)
            return self._value_of(find_role(self._gm, name))

        def __setattr__(self, name: str, value: Tensor) -> None:
            _check(name)
            give_role(self._gm, name, value.node)


def _check(name: str) -> None:
    if name not in StepRoles.__annotations__:
        raise AttributeError(f"a step has no role {name!r}: declare it in StepRoles")
