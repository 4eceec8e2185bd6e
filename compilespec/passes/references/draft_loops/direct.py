"""Direct drafting, one call for all drafts; and drafts that the host writes."""

from __future__ import annotations

import torch
from torch import Tensor

from compilespec.passes.references.base import Values
from compilespec.passes.references.draft_loops.drafts import Drafts
from compilespec.program import PAD


def direct(draft: Drafts, values: Values) -> Tensor:
    """One call on its inputs: the request's tokens so far, their number, a hidden state."""
    roles, inputs, config = values.roles, draft.case.inputs, draft.config
    starts, rows = draft.placed.start.tolist(), draft.placed.row_index.tolist()
    is_decode = draft.case.phase == "decode"
    counts = roles["num_emitted"].tolist() if is_decode else [0] * len(rows)
    lengths = [min(s + n + 1, config.max_seq_len) for s, n in zip(starts, counts, strict=True)]
    reads = {entry.name for entry in draft.ctx.draft["draft"].inputs}
    arguments: dict[str, Tensor] = {}
    if "length_B" in reads:
        arguments["length_B"] = torch.tensor(
            lengths, dtype=torch.int32, device=inputs["block_table_RM"].device
        )
    if "history_BL" in reads:
        history = write_history(draft, values)
        arguments["history_BL"] = torch.stack([history[row] for row in rows])
        for request, length in enumerate(lengths):
            is_live = rows[request] < config.max_batch_size
            arguments["history_BL"][request, length if is_live else 0 :] = PAD
    if "past_ML" in reads:
        arguments["past_ML"] = draft.buffers["past_ML"]
    if "hidden_BE" in reads:
        arguments["hidden_BE"] = newest_hidden(draft, values)
    drafts, *sure = draft.call("draft", **arguments)  # type: ignore[arg-type]
    draft.matched = sure[0].tolist() if sure else None
    return drafts


def newest_hidden(draft: Drafts, values: Values) -> Tensor:
    """The target's hidden states at the last committed row of each request, [B, A*D]."""
    roles = values.roles
    aux = torch.cat([roles[f"aux.{i}"] for i in range(len(draft.ctx.drafter.aux_layers))], -1)
    if draft.case.phase == "decode":
        picked = [(b, n - 1) for b, n in enumerate(roles["num_emitted"].tolist())]
    else:
        picked = [(0, last) for last in draft.case.inputs["last_R"].tolist()]
    return torch.stack([aux[b, row] for b, row in picked])


def write_history(draft: Drafts, values: Values) -> Tensor:
    """The history rows, with the tokens of this step written into them."""
    history, inputs = draft.buffers["history_RL"], draft.case.inputs
    is_decode = draft.case.phase == "decode"
    if not is_decode:
        packed = (inputs[name].tolist() for name in ("ids_T", "position_T", "row_T"))
        for token, position, row in zip(*packed, strict=True):
            history[row, position] = token  # -1, the spare row, is the last one
    starts, rows = draft.placed.start.tolist(), draft.placed.row_index.tolist()
    for row, start, new in zip(rows, starts, values.roles["emitted"].tolist(), strict=True):
        for j, token in enumerate(new):
            position = start + j + int(is_decode)
            if token != PAD and position < draft.config.max_seq_len:
                history[row, position] = token
    return history


def callback(draft: Drafts, values: Values) -> Tensor:
    """No drafts: the host writes them before the next call."""
    shape = (len(draft.state_rows()), draft.config.num_draft_tokens)
    return torch.full(shape, PAD, dtype=torch.int32, device=values.roles["target"].device)
