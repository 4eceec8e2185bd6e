"""The drafter's inputs: shifts, compaction, positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compilespec.program import PAD


def next_new_tokens(accepted_BS: Tensor, num_accepted_B: Tensor, draft_tokens_BK: Tensor) -> Tensor:
    """[B, K+1] int32: the last accepted token and the drafts that follow it.

    Source: requirement I13.
    """
    last_B1 = accepted_BS.gather(1, (num_accepted_B.long() - 1).unsqueeze(1))
    return torch.cat([last_B1, draft_tokens_BK], 1).to(torch.int32)


def shift_context_inputs(
    ids_T: Tensor,
    lens: Sequence[int],
    accepted_BS: Tensor,
    next_prefill_tokens: Sequence[int | None] | None = None,
) -> Tensor:
    """Packed prompts moved left by one; each ends with the token that follows it.

    Args:
        lens: tokens of each context; accepted_BS: column 0 is the sampled token.
        next_prefill_tokens: the prompt's own next token where the chunk does not end it (H-4;
            TensorRT-LLM writes the sampled one), None if it does.
    Source: requirements I14, E2.
    """
    shifted_T = ids_T.roll(-1)
    end = 0
    for context, count in enumerate(lens):
        end += count
        following = next_prefill_tokens[context] if next_prefill_tokens is not None else None
        shifted_T[end - 1] = accepted_BS[context, 0] if following is None else following
    return shifted_T


@dataclass(frozen=True, kw_only=True)
class PreparedPrefill:
    """The drafter's first pass, padded to the batch that was captured."""

    input_ids: Tensor  # int32 [T]
    positions: Tensor  # [T]
    last_token_indices: Tensor  # int64 [B], 0 in padded rows
    query_start_loc: Tensor  # int32 [B+1], the last value again in padded rows
    seq_lens: Tensor  # int32 [B], 0 in padded rows


def last_token_indices(query_start_loc: Tensor, num_rejected_B: Tensor) -> Tensor:
    """int64 [B]: the last row of each request that is not a rejected draft.  Source: A4."""
    return query_start_loc[1:].long() - 1 - num_rejected_B.long()


def prepare_prefill_inputs(
    ids_T: Tensor,
    positions_T: Tensor,
    query_start_loc: Tensor,
    seq_lens_B: Tensor,
    num_rejected_B: Tensor,
    num_sampled_B: Tensor,
    last_sampled_B: Tensor,
    next_prefill_tokens_B: Tensor,
    *,
    batch_size: int | None = None,
) -> PreparedPrefill:
    """The target's rows moved left by one, each request up to its rejected tail, which stays.

    The token that ends a request is the sampled one, or the prompt's next one where nothing was
    sampled (an unfinished chunk).  Lengths and offsets stay those of the target: the host need not
    know how many were rejected.
    Source: requirements A4, A6.
    """
    num_requests = len(num_rejected_B)
    size = num_requests if batch_size is None else batch_size
    last_B = last_token_indices(query_start_loc, num_rejected_B)
    shifted_T = ids_T.clone()
    for request in range(num_requests):
        begin, last = int(query_start_loc[request]), int(last_B[request])
        shifted_T[begin:last] = ids_T[begin + 1 : last + 1]
        is_sampled = int(num_sampled_B[request]) > 0
        shifted_T[last] = (last_sampled_B if is_sampled else next_prefill_tokens_B)[request]
    padding = (0, size - num_requests)
    pad = torch.nn.functional.pad
    return PreparedPrefill(
        input_ids=shifted_T.to(torch.int32),
        positions=positions_T.clone(),
        last_token_indices=pad(last_B, padding),
        query_start_loc=pad(query_start_loc, padding, value=int(query_start_loc[-1])),
        seq_lens=pad(seq_lens_B, padding),
    )


def compact_inputs(query_start_loc: Tensor, num_rejected_B: Tensor) -> tuple[Tensor, Tensor]:
    """Offsets and row indices of the batch without its rejected tails.

    Returns: query_start_loc int32 [B+1], e.g. [0, a-n1, a+b-n1-n2, ...], and token_indices int64.
    Source: requirement E7.
    """
    begins, ends = query_start_loc[:-1].tolist(), query_start_loc[1:].tolist()
    kept = [
        range(begin, end - rejected)
        for begin, end, rejected in zip(begins, ends, num_rejected_B.tolist(), strict=True)
    ]
    offsets = [0]
    for rows in kept:
        offsets.append(offsets[-1] + len(rows))
    return (
        torch.tensor(offsets, dtype=torch.int32),
        torch.tensor([row for rows in kept for row in rows], dtype=torch.int64),
    )


def advance_positions(
    positions_B: Tensor,
    seq_lens_B: Tensor,
    block_table_BM: Tensor,
    *,
    block_size: int,
    max_model_len: int,
    batch_size: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(positions, seq_lens, slots) of the next draft step; nothing is written past the end.

    A row that would pass `max_model_len` gets position 0, length 1 and slot PAD; its drafts must be
    ignored.  The block index is clamped to the table, padded rows have slot PAD.
    Source: requirements E5, S5, H-16.
    """
    wanted_B = positions_B + 1
    is_past_B = wanted_B >= max_model_len
    position_B = torch.where(is_past_B, 0, wanted_B)
    block_B = (position_B // block_size).clamp(max=block_table_BM.shape[1] - 1).long()
    block_B = block_table_BM.gather(1, block_B.unsqueeze(1)).squeeze(1)
    slot_B = torch.where(is_past_B, PAD, block_B * block_size + position_B % block_size)
    num_padded = (len(positions_B) if batch_size is None else batch_size) - len(positions_B)
    return (
        position_B,
        torch.where(is_past_B, 1, seq_lens_B + 1),
        torch.nn.functional.pad(slot_B, (0, num_padded), value=PAD),
    )
