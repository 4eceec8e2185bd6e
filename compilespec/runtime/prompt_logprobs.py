"""Log-probabilities of prompt tokens, computed from the head's inputs in prefill.

The step's own head runs only on the rows that give tokens; for prompts that ask, it runs once more,
beside the step, on all their rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from compilespec.ops.sample import layout, note_logprobs
from compilespec.runtime.executor import PrefillChunk
from compilespec.runtime.sampling_rows import TokenLogprobs, read_logprobs

ROWS_AT_ONCE = 256  # rows at a time, which bounds the memory of a long prompt's logits


class PromptLogprobs:
    """Computes them for the chunks that ask, and keeps them until they are taken.

    Args:
        head: of the target, hidden states [N, D] to logits [N, V].
    """

    def __init__(self, head: Callable[[Tensor], Tensor]) -> None:
        self._head = head
        self._noted: dict[int, dict[int, TokenLogprobs]] = {}  # by row, by position

    def note(self, chunks: Sequence[PrefillChunk], hidden_TD: Tensor) -> None:
        """Args: hidden_TD: the head's inputs at the packed rows; padded ones at the end."""
        start = 0
        for chunk in chunks:
            begin, start = start, start + len(chunk.tokens)
            if chunk.num_logprobs is None:
                continue
            next_tokens = () if chunk.next_token is None else (chunk.next_token,)
            following = [*chunk.tokens[1:], *next_tokens]
            made = _of_rows(self._head, hidden_TD[begin:], following, chunk.num_logprobs)
            self._noted[chunk.row] = dict(enumerate(made, start=chunk.start + 1))

    def take(self, row: int) -> dict[int, TokenLogprobs]:
        """The noted log-probabilities of the row's chunk, by position; forgets them."""
        return self._noted.pop(row, {})


def _of_rows(
    head: Callable[[Tensor], Tensor], hidden_TD: Tensor, following: Sequence[int], count: int
) -> list[TokenLogprobs]:
    """Log-probabilities of the tokens that follow each row, and of the `count` best at each place.

    Args:
        hidden_TD: the head's inputs at a prompt's rows; following: the token after each row.
    """
    made: list[TokenLogprobs] = []
    for begin in range(0, len(following), ROWS_AT_ONCE):
        tokens = list(following[begin : begin + ROWS_AT_ONCE])
        logits_NV = head(hidden_TD[begin : begin + len(tokens)])
        made += _of_logits(logits_NV, tokens, min(count, logits_NV.shape[1]))
    return made


def _of_logits(logits_NV: Tensor, tokens: Sequence[int], count: int) -> list[TokenLogprobs]:
    """By the operator that notes those of a step, so that both have the same bits."""
    size, new = len(tokens), logits_NV.new_empty
    words_NI = new((size, layout.NUM_INTS), dtype=torch.int32).zero_()
    words_NI[:, layout.LOGPROBS] = count + 1
    noted = new((size, 1, count + 1), dtype=torch.float32)
    ids = new((size, 1, count), dtype=torch.int32)
    chosen_N1 = torch.tensor(tokens, dtype=torch.int32, device=logits_NV.device).unsqueeze(1)
    rows_N = torch.arange(size, device=logits_NV.device)
    note_logprobs(logits_NV.unsqueeze(1), chosen_N1, rows_N, words_NI, noted, ids)
    buffers = {"logprob_RSN": noted, "logprob_id_RSN": ids}
    return [read_logprobs(buffers, row, [token], count)[0] for row, token in enumerate(tokens)]
