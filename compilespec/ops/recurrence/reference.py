"""The definition of `recurrence` and `cached_recurrence`, in plain torch, one token at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from compilespec.ops._tensors import wide_dtype


def recurrence_reference(
    query_BTNK: Tensor,
    key_BTNK: Tensor,
    value_BTHV: Tensor,
    decay: Tensor,
    beta_BTH: Tensor | None,
    kind: str,
) -> Tensor:
    """Run each sequence through a recurrent state that begins with zeros.

    A head's state is a matrix [K, V].  Token t changes it and then reads it:

        state = exp(decay_t) * state
        update = value_t                                     without beta
        update = beta_t * (value_t - key_t @ state)          with beta: the delta rule
        state = state + outer(key_t, update);  output_t = query_t @ state

    Args:
        query_BTNK, key_BTNK: [B, T, N, K], normalised and scaled as the model wants them; each
            serves H / N consecutive heads of `value`.
        value_BTHV: [B, T, H, V].
        decay: the logarithm of what is kept: [B, T, H], or [B, T, H, K] if each key has its own.
        beta_BTH: [B, T, H], or None.
        kind: what the model calls it ("gated_delta", "kimi_delta", "mamba2", "mamba"); it changes
            nothing.
    Returns:
        [B, T, H, V], contiguous, dtype of value.  The state is float32, for float64 values float64.
    Source: Yang et al. 2024, Gated Delta Networks; Dao and Gu 2024, Mamba-2.
    """
    batch, num_tokens, heads, value_dim = value_BTHV.shape
    out_BTHV = value_BTHV.new_zeros((batch, num_tokens, heads, value_dim))
    wide = wide_dtype(value_BTHV.dtype)
    for request in range(batch):
        state_HKV = value_BTHV.new_zeros((heads, key_BTNK.shape[3], value_dim), dtype=wide)
        for token in range(num_tokens):
            at = (request, token)
            state_HKV = advance(
                state_HKV, key_BTNK[at], value_BTHV[at], decay[at],
                None if beta_BTH is None else beta_BTH[at],
            )  # fmt: skip
            out_BTHV[at] = read(state_HKV, query_BTNK[at])
    return out_BTHV


def advance(
    state_HKV: Tensor, key_NK: Tensor, value_HV: Tensor, decay: Tensor, beta_H: Tensor | None
) -> Tensor:
    """The state after one more token."""
    wide, heads = state_HKV.dtype, state_HKV.shape[0]
    key_HK = key_NK.to(wide).repeat_interleave(heads // key_NK.shape[0], 0)
    kept = decay.to(wide).exp()
    state_HKV = state_HKV * (kept[:, None, None] if kept.dim() == 1 else kept[:, :, None])
    update_HV = value_HV.to(wide)
    if beta_H is not None:
        known_HV = (state_HKV * key_HK[:, :, None]).sum(1)
        update_HV = (update_HV - known_HV) * beta_H.to(wide)[:, None]
    return state_HKV + key_HK[:, :, None] * update_HV[:, None, :]


def read(state_HKV: Tensor, query_NK: Tensor) -> Tensor:
    """The value of a query in the state: [H, V]."""
    heads = state_HKV.shape[0]
    query_HK = query_NK.to(state_HKV.dtype).repeat_interleave(heads // query_NK.shape[0], 0)
    return (state_HKV * query_HK[:, :, None]).sum(1)


def cached_recurrence_reference(
    query_BSNK: Tensor,
    key_BSNK: Tensor,
    value_BSHV: Tensor,
    decay: Tensor,
    beta_BSH: Tensor | None,
    state_RHKV: Tensor,
    recent_RPE: Tensor,
    row_BS: Tensor,
    position_BS: Tensor,
    absorbed_BS: Tensor,
    commits_BS: Tensor,
    kind: str,
) -> Tensor:
    """`recurrence` from the states of the requests, which survive rejected drafts.

    A state row holds the state after the first `absorbed` tokens of its request.  What later tokens
    gave is kept beside it, position p in column p % P: those tokens may still be rejected.  A call
    first takes the kept tokens from `absorbed` up to its own first one (these were accepted: else
    the call would begin earlier), then its own tokens in order.  The state after the last token
    that commits is written back; tokens that do not commit are kept.  So a step reads and writes
    each state once, however many drafts it verifies.

    Args:
        query_BSNK, key_BSNK, value_BSHV, decay, beta_BSH, kind: as in `recurrence_reference`.
        state_RHKV: [rows, H, K, V], float32 (float64 for float64 values), contiguous, written in
            place.
        recent_RPE: [rows, P, E], dtype of the state, contiguous, written in place; E holds a
            token's key, value, decay and beta, each flattened.
        row_BS: int32, the token's state row; -1 is a padded token: it writes nothing and its output
            is zero.  A request's tokens stand together, in the order of their positions.
        position_BS: int32; a request whose first token has position 0 begins with a state of zeros.
        absorbed_BS: int32, the number of tokens in the request's state, read at its first token; at
            most P before it.
        commits_BS: bool; those of a request that commit come first.
    Returns:
        [B, S, H, V], contiguous, dtype of value.  A token's bits depend on the tokens before it
        alone, not on the batch or on how calls divide the tokens.
    """
    value_THV = value_BSHV.flatten(0, 1)
    out_THV = torch.zeros_like(value_THV, memory_format=torch.contiguous_format)
    query_TNK, key_TNK, decay_T = (x.flatten(0, 1) for x in (query_BSNK, key_BSNK, decay))
    beta_TH = None if beta_BSH is None else beta_BSH.flatten(0, 1)
    position_T, absorbed_T, commits_T = (
        x.flatten().tolist() for x in (position_BS, absorbed_BS, commits_BS)
    )
    shapes = [key_TNK.shape[1:], value_THV.shape[1:], decay_T.shape[1:]]
    shapes += [] if beta_TH is None else [beta_TH.shape[1:]]
    for row, tokens in segments(row_BS):
        first = position_T[tokens[0]]
        state_HKV = torch.zeros_like(state_RHKV[row]) if first == 0 else state_RHKV[row].clone()
        num_kept = recent_RPE.shape[1]
        for position in range(max(absorbed_T[tokens[0]], first - num_kept, 0), first):
            parts = _unpack(recent_RPE[row, position % num_kept], shapes)
            state_HKV = advance(state_HKV, *parts, *([None] if beta_TH is None else []))
        for token in tokens:
            parts = [key_TNK[token], value_THV[token], decay_T[token]]
            parts += [] if beta_TH is None else [beta_TH[token]]
            state_HKV = advance(state_HKV, *parts, *([None] if beta_TH is None else []))
            out_THV[token] = read(state_HKV, query_TNK[token])
            if commits_T[token]:
                state_RHKV[row] = state_HKV
            else:
                kept = torch.cat([part.flatten().to(recent_RPE.dtype) for part in parts])
                recent_RPE[row, position_T[token] % num_kept] = kept
    return out_THV.view(value_BSHV.shape)


def segments(row_BS: Tensor) -> Iterator[tuple[int, list[int]]]:
    """(state row, its tokens as indices into the flattened call) for each run of equal neighbours;
    padding is left out, and a row that comes again is given again.
    """
    rows = row_BS.flatten().tolist()
    start = 0
    for end in range(1, len(rows) + 1):
        if end == len(rows) or rows[end] != rows[start]:
            if rows[start] >= 0:
                yield rows[start], list(range(start, end))
            start = end


def _unpack(kept_E: Tensor, shapes: list[torch.Size]) -> list[Tensor]:
    sizes = [shape.numel() for shape in shapes]
    return [part.view(shape) for part, shape in zip(kept_E.split(sizes), shapes, strict=True)]
