"""Selections of keys that a model makes in loops over its tokens, written as tensor operations.

Where a module chooses keys query by query, with sizes that follow from values, no graph can hold
it.  While a model is traced, a function of the same result takes the place of such a module's
forward; `tests/families` compares both.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor


@contextlib.contextmanager
def traced_selections(model: Any) -> Iterator[None]:
    """Put the functions of `_SELECTORS` in the place of the forwards that they stand for."""
    classes = {type(module) for module in model.modules()}
    with contextlib.ExitStack() as stack:
        for one in classes:
            if one.__name__ in _SELECTORS:
                stack.enter_context(mock.patch.object(one, "forward", _SELECTORS[one.__name__]))
        yield


def _select_compressed_blocks(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor,
    past_key_values: None = None,
) -> Tensor:
    """`Qwen4ExpTextQSAIndexer`: the best blocks of `compress_ratio` keys, and the keys of the block
    that is not complete yet; bool [B, 1, T, T], true where a key is chosen.

    A query has as many blocks as its visible keys fill; a block's key is the mean of its tokens'.
    """
    batch, length, _ = hidden_states.shape
    size, width = self.compress_ratio, self.index_head_dim
    rotate = sys.modules[type(self).__module__].apply_rotary_pos_emb
    cos, sin = (part[:, -length:] for part in position_embeddings)
    queries, keys = torch.split(
        self.index_qk_proj(hidden_states),
        [self.index_n_heads * width, self.index_kv_heads * width],
        dim=-1,
    )
    queries = self.q_layernorm(queries.reshape(batch, length, -1, width))
    queries = rotate(queries, cos=cos, sin=sin, unsqueeze_dim=2)
    keys = self.k_layernorm(_blocks(keys.float(), size).mean(2).to(keys.dtype))
    firsts = (_blocks(part, size)[:, :, 0] for part in (cos, sin))
    cos_of_block, sin_of_block = firsts
    keys = rotate(keys.unsqueeze(2), cos=cos_of_block, sin=sin_of_block, unsqueeze_dim=2)
    scores = queries.float() @ keys.squeeze(2).float().transpose(-1, -2).unsqueeze(1)
    scores = torch.relu(scores).sum(2) / math.sqrt(width)
    visible = attention_mask if attention_mask.dtype == torch.bool else attention_mask == 0
    num_blocks = visible[:, 0].sum(-1, keepdim=True) // size
    is_whole = torch.arange(scores.shape[-1], device=scores.device) < num_blocks
    scores = scores.masked_fill(~is_whole, float("-inf"))
    best = scores.topk(min(self.block_topk, scores.shape[-1]), dim=-1).indices
    chosen = torch.zeros_like(is_whole.expand_as(scores)).scatter(-1, best, True) & is_whole
    by_key = chosen.repeat_interleave(size, dim=-1)[..., : visible.shape[-1]]
    is_behind = torch.arange(visible.shape[-1], device=scores.device) >= num_blocks * size
    return (by_key | is_behind).unsqueeze(1)


def _blocks(x: Tensor, size: int) -> Tensor:
    """[B, T, H] as [B, blocks, size, H]; zeros behind the last token."""
    count = -(-x.shape[1] // size)
    padded = F.pad(x, (0, 0, 0, count * size - x.shape[1]))
    return padded.view(x.shape[0], count, size, x.shape[2])


_SELECTORS: Mapping[str, Callable[..., Tensor]] = {
    "Qwen4ExpTextQSAIndexer": _select_compressed_blocks,
}
