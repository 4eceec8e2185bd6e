"""A drafter for every method, for a target of any family; most are random and rarely right."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from compilespec.methods import dflash, dspark, eagle, eagle3, medusa, mtp, peagle, shared_kv
from compilespec.methods.self_draft import SelfDraft
from compilespec.tracing.load import Target
from compilespec.tracing.target import trace_target
from compilespec.tracing.target_info import TargetInfo, describe_target
from tests.support.models import DialDrafter, target_info


def repeating(k: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Drafts that are sometimes right: a small random model repeats itself."""

    def repeat_last(history_BL: Tensor, length_B: Tensor) -> Tensor:
        last_B1 = history_BL.gather(1, (length_B - 1).long().unsqueeze(1))
        return last_B1.expand(-1, k)

    return repeat_last


def noisy(model: nn.Module) -> nn.Module:
    """The model with noise on its weights: many of its drafts are right, not all."""
    other = copy.deepcopy(model)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    return other


# method -> (model, info, K) -> keywords of compile()
METHODS: dict[str, Callable[[nn.Module, Any, int], dict[str, Any]]] = {
    "eagle3": lambda model, info, k: {
        "draft": eagle3.random_head(info, aux_layers=(0, 1, 2), draft_vocab_size=61)
    },
    "eagle": lambda model, info, k: {"draft": eagle.random_head(info)},
    "mtp": lambda model, info, k: {"draft": mtp.random_modules(info, min(k, 3))},
    "mtp_eagle": lambda model, info, k: {"draft": mtp.random_modules(info, 1, recycled=True)},
    "mtp_multi": lambda model, info, k: {
        "draft": mtp.random_modules(info, k, own_head=True, chain="target_rows"),
        "kv_block_sizes": tuple(8 + 4 * (step % 2) for step in range(k)),
    },
    "shared_kv": lambda model, info, k: {"draft": shared_kv.random_drafter(info)},
    "draft_model": lambda model, info, k: {"draft": noisy(model)},
    "self": lambda model, info, k: {"draft": SelfDraft(weights=None, window=(0, 5))},
    "peagle": lambda model, info, k: {
        "draft": peagle.random_head(info, aux_layers=(0, 1, 2), draft_vocab_size=61, num_layers=2)
    },
    "dflash": lambda model, info, k: {
        "draft": dflash.random_drafter(
            info,
            aux_layers=(0, 2),
            block_size=k + 1,
            draft_vocab_size=61,
            windows=(0, 7),
            sight="causal",
        )
    },
    "dspark": lambda model, info, k: {
        "draft": dspark.random_drafter(info, aux_layers=(0, 2), block_size=k, markov_type="rnn")
    },
    "medusa": lambda model, info, k: {"draft": medusa.random_heads(info, k)},
    "suffix": lambda model, info, k: {"num_past_texts": 3},
    "ngram": lambda model, info, k: {"max_ngram": 2},
    "user": lambda model, info, k: {"draft": repeating(k)},
}


def traced_info(model: nn.Module) -> TargetInfo:
    """What a drafter may know of a target, its caches included."""
    holder = Target(model=model, directory=None, tokenizer=None, eos_token_ids=(), max_seq_len=128)
    return describe_target(trace_target(model), holder)


def always_right(
    model: nn.Module, k: int, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
) -> DialDrafter:
    """An EAGLE-3 head whose drafts are the answers, as long as its cache holds what it should."""
    head = eagle3.random_head(target_info(model, 64), aux_layers=(0, 1, 2), num_draft_tokens=k)
    dial = DialDrafter(head.eval(), max_seq_len=64, dtype=torch.float64)
    whole = [[*before, *after] for before, after in zip(prompts, answers, strict=True)]
    dial.know(whole, starts=map(len, prompts))
    dial.draft_from_script(lambda position: False)
    return dial
