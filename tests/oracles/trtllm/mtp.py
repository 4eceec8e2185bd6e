"""Multi-token prediction: pools, window, draft loop, and the lengths that attention sees."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

# One module: (tokens_T, hidden_TD, positions_T) -> (hidden_TD, logits_TV)
Module = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


class MTPPools:
    """A pool row per request: its last K tokens and hidden states, and its relaxed margin.

    Rows are cleared when they are assigned; in TensorRT-LLM a prompt shorter than K sees the tokens
    of the row's last owner (H-6).  Source: requirement M1.
    """

    def __init__(
        self,
        max_num_requests: int,
        num_modules: int,
        hidden_size: int,
        *,
        dtype: torch.dtype = torch.float32,
        relaxed: bool = False,
    ) -> None:
        self.hidden_RKD = torch.zeros(max_num_requests, num_modules, hidden_size, dtype=dtype)
        self.tokens_RK = torch.zeros(max_num_requests, num_modules, dtype=torch.int32)
        self.delta_R = torch.zeros(max_num_requests) if relaxed else None
        self.slots: dict[int, int] = {}
        self._free = list(range(max_num_requests))

    @property
    def resource_count(self) -> int:
        return len(self.tokens_RK)

    def needed_to_completion(self) -> int:
        """Pool rows that a request needs beyond the one it has: none."""
        return 0

    def add(self, request_id: int) -> int:
        """Assign a cleared row on the request's first chunk."""
        slot = self._free.pop(0)
        self.hidden_RKD[slot], self.tokens_RK[slot] = 0, 0
        if self.delta_R is not None:
            self.delta_R[slot] = 0
        self.slots[request_id] = slot
        return slot

    def free(self, request_id: int) -> None:
        slot = self.slots.pop(request_id)
        if self.delta_R is not None:
            self.delta_R[slot] = 0
        self._free.append(slot)

    def update(self, request_id: int, tokens: Tensor, hidden: Tensor, count: int) -> None:
        """Store the first `count` of a step's rows: the whole prompt, or the accepted tokens."""
        slot = self.slots[request_id]
        self.tokens_RK[slot] = update_pool(self.tokens_RK[slot], tokens, count)
        self.hidden_RKD[slot] = update_pool(self.hidden_RKD[slot], hidden, count)


def update_pool(pool_K: Tensor, new_S: Tensor, count: int) -> Tensor:
    """The last K rows after `count` new ones were added: cat[count : count + K].

    Tokens and hidden states alike; new_S: the step's inputs (prompt, or last token and drafts).
    Source: requirement M5.
    """
    return torch.cat([pool_K, new_S])[count : count + len(pool_K)]


def committed_window(pool_K: Tensor, new_S: Tensor, count: int) -> Tensor:
    """K + 1 rows that end at the last committed one: cat[count - 1 : count + K].

    TensorRT-LLM runs the last K of them, and so leaves a gap in every module's cache after a step
    that accepts all drafts.  Source: H-21.
    """
    return torch.cat([pool_K, new_S])[count - 1 : count + len(pool_K)]


def vanilla_context_inputs(ids_L: Tensor, golden: int) -> Tensor:
    """The prompt moved left by one, then the bonus token; hidden states and positions stay.

    Source: requirement M6.
    """
    return torch.cat([ids_L[1:], ids_L.new_tensor([golden])])


def vanilla_generation_inputs(
    tokens_K: Tensor, hidden_KD: Tensor, accepted_S: Tensor, positions_S: Tensor, count: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(tokens, hidden, positions, valid) of a generation's K rows, after the pool was updated.

    Positions are those of the hidden states: the step's last K, less 1 + K - n.  Rows before the
    request's first token have position 0 and are not valid; TensorRT-LLM gives them negative
    positions (H-9).  Source: requirement M6.
    """
    num_rows = len(tokens_K)
    tokens = torch.cat([tokens_K[1:], accepted_S[count - 1 : count].to(tokens_K.dtype)])
    positions_K = positions_S[-num_rows:] - (1 + num_rows - count)
    return tokens, hidden_KD, positions_K.clamp(min=0), positions_K >= 0


def vanilla_draft_loop(
    modules: Sequence[Module],
    tokens_T: Tensor,
    hidden_TD: Tensor,
    positions_T: Tensor,
    lens: Sequence[int],
) -> Tensor:
    """Drafts [B, K] int32 of packed requests, one module per draft.

    Each module's last row gives a draft.  Then tokens and hidden states move left by one, the draft
    and the module's own output at that row are appended, and positions stay.  Source: requirement
    M7.
    """
    last_B = torch.tensor(lens).cumsum(0) - 1
    drafts = []
    for module in modules:
        hidden_out_TD, logits_TV = module(tokens_T, hidden_TD, positions_T)
        drafts.append(logits_TV[last_B].float().argmax(-1).to(torch.int32))
        tokens_T, hidden_TD = tokens_T.roll(-1, 0), hidden_TD.roll(-1, 0)
        tokens_T[last_B] = drafts[-1].to(tokens_T.dtype)
        hidden_TD[last_B] = hidden_out_TD[last_B]
    return torch.stack(drafts, 1)


# --- what attention sees ---


def vanilla_lens(
    seq_lens_B: Tensor,
    kv_lens_B: Tensor,
    num_accepted_B: Tensor,
    num_contexts: int,
    num_drafts: int,
) -> tuple[Tensor, Tensor]:
    """(seq_lens, kv_lens) of vanilla MTP's modules; contexts keep the target's.

    Generations run K rows, and the cache ends at the last committed one.  Source: requirement M8.
    """
    seq_lens_B, kv_lens_B = seq_lens_B.clone(), kv_lens_B.clone()
    seq_lens_B[num_contexts:] -= 1
    kv_lens_B[num_contexts:] -= num_drafts + 1 - num_accepted_B[num_contexts:]
    return seq_lens_B, kv_lens_B


def eagle_step0_gather(
    context_lens: Sequence[int], num_accepted_B: Tensor, num_drafts: int
) -> Tensor:
    """The rows of MTP-Eagle's first pass that draft: each context's last, each generation's n-1.

    Source: requirement M11.
    """
    num_contexts = len(context_lens)
    last_C = torch.tensor(context_lens, dtype=torch.int64).cumsum(0) - 1
    begin_G = torch.arange(len(num_accepted_B) - num_contexts) * (num_drafts + 1)
    rows_G = sum(context_lens) + begin_G + num_accepted_B[num_contexts:].long() - 1
    return torch.cat([last_C, rows_G])


def eagle_later_lens(
    kv_lens_B: Tensor, num_accepted_B: Tensor, num_contexts: int, num_drafts: int, step: int
) -> Tensor:
    """kv_lens of MTP-Eagle's single-token pass `step` (1, 2, ...), all requests then generations.

    The target's, less the K - n rejected rows, or plus 1 after a prompt; 1 more each later step.
    Source: requirement M11.
    """
    kv_lens_B = kv_lens_B + (step - 1)
    kv_lens_B[num_contexts:] -= num_drafts - num_accepted_B[num_contexts:]
    kv_lens_B[:num_contexts] += 1
    return kv_lens_B


def eagle_draft_lens(
    seq_lens_B: Tensor, last_positions_B: Tensor, num_rejected_B: Tensor, *, max_model_len: int
) -> tuple[Tensor, Tensor]:
    """(seq_lens int32, positions) of EAGLE's first single-token pass.

    The rejected rows are dropped and the first draft is appended; at the limit, neither grows.
    Source: requirements A9, E3 (a length is its last position + 1).
    """
    length_B = (seq_lens_B - num_rejected_B + 1).clamp(max=max_model_len).to(torch.int32)
    return length_B, (last_positions_B + 1).clamp(max=max_model_len - 1)
