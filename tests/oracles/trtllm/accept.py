"""Acceptance: strict, forced, relaxed, and the placeholder outputs of a rank without logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from compilespec.errors import InvalidOption

TAIL = 1  # what TensorRT-LLM's relaxed kernel leaves after the bonus token


def accept_strict(
    logits: Tensor, draft_tokens_GK: Tensor, num_contexts: int
) -> tuple[Tensor, Tensor]:
    """Target tokens and how many of them are accepted, bonus included.

    Args:
        logits: [num_contexts + G*(K+1), V], or [V] for a single row.
        draft_tokens_GK: integer; may be flat, [G*K].
    Returns: accepted_tokens [B, K+1] int32 (contexts: column 0, then zeros; generations: all target
    tokens, also those past the bonus) and num_accepted [B] int32, 1..K+1.
    Source: requirements I11, M9; the first of equal logits wins.
    """
    target = (logits.unsqueeze(0) if logits.dim() == 1 else logits).argmax(-1).to(torch.int32)
    num_rows = len(target) - num_contexts
    num_generations = num_rows - draft_tokens_GK.numel()
    num_drafts = draft_tokens_GK.numel() // num_generations if num_generations else 0
    if draft_tokens_GK.dim() == 2:
        num_generations, num_drafts = draft_tokens_GK.shape
    if num_rows != num_generations * (num_drafts + 1):
        raise ValueError(
            f"expected {num_contexts} + {num_generations} * {num_drafts + 1} rows of logits, got "
            f"{len(target)}"
        )
    accepted_BS = target.new_zeros(num_contexts + num_generations, num_drafts + 1)
    accepted_BS[:num_contexts, 0] = target[:num_contexts]
    accepted_BS[num_contexts:] = target[num_contexts:].view(num_generations, num_drafts + 1)
    num_accepted_B = torch.ones(len(accepted_BS), dtype=torch.int32, device=target.device)
    match_GK = (
        draft_tokens_GK.view(num_generations, num_drafts)
        == (accepted_BS[num_contexts:, :num_drafts])
    )
    num_accepted_B[num_contexts:] += match_GK.int().cumprod(-1).sum(1).to(torch.int32)
    return accepted_BS, num_accepted_B


def force_num_accepted(
    num_accepted_B: Tensor, num_contexts: int, force: int, num_draft_tokens: int
) -> Tensor:
    """Generations accept min(force + 1, K + 1), contexts stay at 1; 0 changes nothing.

    Raises: InvalidOption for a negative number, which TensorRT-LLM lets through (H-1).
    Source: requirement I1.  LOSSY: for benchmarks.
    """
    if force < 0:
        raise InvalidOption(f"force must be 0 (off) or a positive number of drafts; got {force}")
    forced_B = num_accepted_B.clone()
    if force:
        forced_B[num_contexts:] = min(force + 1, num_draft_tokens + 1)
    return forced_B


def accept_relaxed(
    logits: Tensor,
    draft_tokens_GK: Tensor,
    delta_B: Tensor,
    context_chunks: Sequence[Sequence[int]],
    *,
    topk: int,
    relaxed_delta: float,
    begin: int,
    end: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Drafts near the target's best token are accepted while a request thinks.

    Args:
        logits: [num_contexts + G*(K+1), V]; delta_B: float32 margins, contexts first.
        context_chunks: the prompt tokens of each context in this call.
    Returns: emitted [B, K+1] int32 (accepted drafts, the argmax of the first row refused, then 1),
    num_accepted [B] int32, and the margins for the next step.
    Source: requirement M10 with TensorRT-LLM's behaviour in H-12 (every chunk sets the margin
    anew, END in a prompt is ignored) and H-13 (a tie is accepted at margin 0); the margin is a
    difference of probabilities (H-11).  `passes.splice.acceptance.relaxed` says where compilespec
    differs.  LOSSY.
    """
    num_contexts, (num_generations, num_drafts) = len(context_chunks), draft_tokens_GK.shape
    num_rows = num_drafts + 1
    shape = (num_contexts + num_generations, num_rows)
    emitted_BS = torch.full(shape, TAIL, dtype=torch.int32, device=logits.device)
    num_accepted_B = torch.ones(shape[0], dtype=torch.int32, device=logits.device)
    emitted_BS[:num_contexts, 0] = logits[:num_contexts].argmax(-1).to(torch.int32)
    margin_B = delta_B.clone()
    for context, tokens in enumerate(context_chunks):
        margin_B[context] = relaxed_delta if begin in tokens else 0.0
    judge_GSV = logits[num_contexts:].view(num_generations, num_rows, logits.shape[-1])
    probability_GSV = judge_GSV.softmax(-1)
    best_GSJ, id_GSJ = probability_GSV.sort(stable=True, dim=-1, descending=True)
    best_GSJ, id_GSJ = best_GSJ[..., :topk], id_GSJ[..., :topk]
    near_GSJ = best_GSJ >= best_GSJ[..., :1] - delta_B[num_contexts:].view(-1, 1, 1)
    near_GSJ[..., 0] = True
    is_kept_GK = ((id_GSJ == _judged_drafts(draft_tokens_GK, num_rows)) & near_GSJ).any(-1)
    kept_G = is_kept_GK[:, :num_drafts].int().cumprod(1).sum(1)
    for generation, kept in enumerate(kept_G.tolist()):
        row = num_contexts + generation
        emitted_BS[row, :kept] = draft_tokens_GK[generation, :kept].to(torch.int32)
        emitted_BS[row, kept] = judge_GSV[generation, kept].argmax()
        num_accepted_B[row] = kept + 1
    for row, count in enumerate(num_accepted_B.tolist()):
        for token in emitted_BS[row, :count].tolist():
            if token in (begin, end):
                margin_B[row] = relaxed_delta if token == begin else 0.0
    return emitted_BS, num_accepted_B, margin_B


def _judged_drafts(draft_tokens_GK: Tensor, num_rows: int) -> Tensor:
    """[G, S, 1]: the draft that each row judges; -1 for the last row, which judges none."""
    padding = (0, num_rows - draft_tokens_GK.shape[1])
    return torch.nn.functional.pad(draft_tokens_GK.long(), padding, value=-1).unsqueeze(-1)


def skip_forward(logits: Tensor, batch_size: int, num_draft_tokens: int) -> dict[str, Tensor]:
    """The outputs of a pipeline rank other than the last: shapes and dtypes without contents.

    Source: requirement I10.
    """

    def filled(value: int, *shape: int) -> Tensor:
        return torch.full(shape, value, dtype=torch.int32, device=logits.device)

    return {
        "logits": logits,
        "new_tokens": filled(0, batch_size, num_draft_tokens + 1),
        "new_tokens_lens": filled(1, batch_size),
        "next_draft_tokens": filled(0, batch_size, num_draft_tokens),
        "next_new_tokens": filled(0, batch_size, num_draft_tokens + 1),
    }
