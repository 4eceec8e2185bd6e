"""The EAGLE-3 head (SafeAILab layout) and its training-time test.

Row t pairs the target's features of position t with the embedding of token x[t+1] and predicts
x[t+2]; draft step j of origin t takes x[t+1+j] at position t + j and the previous step's hidden.
"""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import workers
from .acceptance import Scores, acceptance_length
from .corpus import sample_windows
from .loop import Run, train
from .model import (
    Layer,
    LeanLlama,
    Shape,
    matrix,
    repeat_heads,
    rms_norm,
    rope_table,
    split_qkv,
    swiglu,
)
from .optim import MuonAdamW

DRAFT_VOCAB = 1536
HEAD_SHAPE = Shape(num_hidden_layers=1, intermediate_size=768)
UNROLL = 3
STEP_WEIGHTS = (1.0, 0.8, 0.64)
BATCH, LENGTH = 16, 256


class Eagle3Head(nn.Module):
    """One decoder layer over [embedding ; projected features], with a reduced vocabulary."""

    draft_ids: Tensor

    def __init__(self, shape: Shape, draft_ids: Tensor) -> None:
        super().__init__()
        D = shape.hidden_size
        self.shape = shape
        self.register_buffer("draft_ids", draft_ids)
        self.fc = matrix(D, 3 * D)
        self.hidden_norm = nn.Parameter(torch.ones(D))
        self.layer = Layer(shape, 2 * D, 0.02 / 2**0.5)
        self.norm = nn.Parameter(torch.ones(D))
        self.lm_head = matrix(draft_ids.numel(), D)
        self.run_step: Any = partial(draft_step, shape)
        self.run_loss: Any = partial(soft_cross_entropy, shape.rms_norm_eps)

    def start_from(self, target: LeanLlama) -> None:
        """Begin at the target's own head on its last captured layer."""
        with torch.no_grad():
            self.lm_head.copy_(target.embed[self.draft_ids])
            self.norm.copy_(target.norm)
            self.fc[:, -self.shape.hidden_size :] += torch.eye(self.shape.hidden_size)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the step (once for each number of own keys) and the loss."""
        self.run_step = torch.compile(self.run_step, dynamic=False, fullgraph=True)
        self.run_loss = torch.compile(self.run_loss, dynamic=False, fullgraph=True)

    def unroll(self, aux_BTA: Tensor, embed: Tensor, ids_BL: Tensor, depth: int) -> list[Tensor]:
        """Run `depth` draft steps of every origin at once, teacher-forced along ids.

        Args:
            aux_BTA: concatenated features of origins 0..T-1.
            ids_BL: the sequence, L at least T + depth.
        Returns:
            The pre-norm hidden [B, T, D] of each step; step j of row t predicts x[t + 2 + j].
        """
        T = aux_BTA.shape[1]
        hidden, outputs = F.linear(aux_BTA, self.fc), []
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for j in range(depth):
            cos, sin = rope_table(self.shape, torch.arange(j, T + j))
            e = F.embedding(ids_BL[:, 1 + j : 1 + j + T], embed)
            hidden, k, v = self.run_step(
                hidden, e, cos, sin, keys, values, self.hidden_norm, *self.layer.tensors()
            )
            keys, values = [*keys, k], [*values, v]
            outputs.append(hidden)
        return outputs

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits over the draft vocabulary."""
        return F.linear(rms_norm(hidden, self.norm, self.shape.rms_norm_eps), self.lm_head)


def draft_step(
    shape: Shape, g: Tensor, e: Tensor, cos: Tensor, sin: Tensor, keys: list[Tensor],
    values: list[Tensor], hidden_norm: Tensor, input_norm: Tensor, qkv: Tensor, o: Tensor,
    post_norm: Tensor, gate_up: Tensor, down: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the new hidden, and this step's keys and values (repeated for the query heads).

    Queries of a later step see the first step's keys of their own and earlier origins, and of the
    steps in between only their own origin's: what a drafter's cache holds when it drafts.
    """
    B, T, _ = g.shape
    eps = shape.rms_norm_eps
    x = torch.cat([rms_norm(e, input_norm, eps), rms_norm(g, hidden_norm, eps)], -1)
    q, k, v = split_qkv(shape, F.linear(x, qkv), cos, sin)
    rep = shape.num_attention_heads // shape.num_key_value_heads
    k, v = repeat_heads(k, rep), repeat_heads(v, rep)
    if not keys:
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    else:
        q = q * shape.head_dim**-0.5
        future = torch.ones(T, T, dtype=torch.bool).triu(1)
        scores = (q @ keys[0].mT).masked_fill(future, float("-inf"))
        own_k, own_v = [*keys[1:], k], [*values[1:], v]
        own = [(q * each).sum(-1, keepdim=True) for each in own_k]
        weights = torch.softmax(torch.cat([scores, *own], -1), -1)
        a = weights[..., :T] @ values[0]
        for i, each in enumerate(own_v):
            a = a + weights[..., T + i : T + i + 1] * each
    h = g + F.linear(a.transpose(1, 2).reshape(B, T, -1), o)
    h = h + swiglu(rms_norm(h, post_norm, eps), gate_up, down)
    return h, k, v


def soft_cross_entropy(
    eps: float, hidden: Tensor, norm: Tensor, lm_head: Tensor, probs_BTV: Tensor
) -> Tensor:
    """Return the cross entropy against target probabilities of the draft vocabulary.

    The probabilities are not renormalised: a position counts by the mass that can be drafted.
    """
    logq = F.log_softmax(F.linear(rms_norm(hidden, norm, eps), lm_head), -1)
    return -(probs_BTV * logq).sum(-1).mean()


def frequent_ids(streams: list[Tensor], vocab_size: int, count: int = DRAFT_VOCAB) -> Tensor:
    """Return the `count` most frequent ids over the streams, ascending."""
    total = sum(torch.bincount(s.long().flatten(), minlength=vocab_size) for s in streams)
    assert isinstance(total, Tensor)
    order = torch.argsort(total, descending=True, stable=True)
    return order[:count].sort().values


def aux_layers(num_layers: int) -> tuple[int, int, int]:
    """Return the default hs indices that EAGLE-3 reads."""
    return 2, num_layers // 2, num_layers - 3


@torch.no_grad()
def features(target: LeanLlama, ids_BL: Tensor) -> tuple[Tensor, Tensor]:
    """Return the aux features [B, L, 3D] and the target's logits [B, L, V]."""
    hs = target.hidden_states(ids_BL)
    layers = aux_layers(target.shape.num_hidden_layers)
    return torch.cat([hs[i] for i in layers], -1), target.logits(hs[-1])


@torch.no_grad()
def score(head: Eagle3Head, target: LeanLlama, ids_BL: Tensor, depth: int) -> Scores:
    """Score `depth` draft steps from every origin along sequences the target generated."""
    T = ids_BL.shape[1] - 1 - depth
    aux, logits = features(target, ids_BL)
    top, ratio = [], []
    for j, hidden in enumerate(head.unroll(aux[:, :T], target.embed, ids_BL, depth)):
        draft = head.logits(hidden)
        full = torch.zeros(*draft.shape[:2], target.shape.vocab_size)
        full[..., head.draft_ids] = torch.softmax(draft, -1)
        truth = ids_BL[:, 2 + j : 2 + j + T, None]
        probs = torch.softmax(logits[:, 1 + j : 1 + j + T], -1)
        top.append(full.argmax(-1) == truth[..., 0])
        ratio.append((full.gather(-1, truth) / probs.gather(-1, truth)).squeeze(-1))
    return Scores(top=torch.stack(top, -1), ratio=torch.stack(ratio, -1))


def train_eagle3(
    target: LeanLlama, splits: dict[str, Tensor], generated: dict[str, Tensor], *, folder: Path,
    steps: int, decay_steps: int, lr: float, seed: int, stop_at: int | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Train (or resume) the head.

    Args:
        generated: sequences of LENGTH + UNROLL tokens that the target wrote: `greedy` and
            `sampled` for training (may be absent), `eval_greedy` and `eval_sampled` from held-out
            prompts.  Half of each batch is generated text when there is any.
    """
    torch.manual_seed(seed + 1)
    plain_target = copy.copy(target)  # evaluation has other sizes: do not compile for them
    target.compile()
    head = Eagle3Head(HEAD_SHAPE, frequent_ids([splits["stdlib"]], target.shape.vocab_size))
    head.start_from(target)
    plain_head = copy.copy(head)
    head.compile()
    optimizer = MuonAdamW(
        head.named_parameters(), HEAD_SHAPE, adam_names=("lm_head",), adam_scale=0.5
    )

    def loss_at(step: int, _: bool) -> tuple[Tensor, dict[str, float]]:
        ids = workers.mine(mixed_windows(splits, generated, seed=seed + 1, step=step))
        aux, logits = features(target, ids)
        probs = torch.softmax(logits, -1)[..., head.draft_ids]
        total = torch.zeros(())
        extra = {}
        hiddens = head.unroll(aux[:, :LENGTH], target.embed, ids, UNROLL)
        for j, hidden in enumerate(hiddens):
            part = head.run_loss(
                hidden, head.norm, head.lm_head, probs[:, 1 + j : 1 + j + LENGTH].contiguous()
            )
            total = total + STEP_WEIGHTS[j] / sum(STEP_WEIGHTS) * part
            extra[f"loss_{j}"] = float(part.detach())
        return total, extra

    def evaluate() -> dict[str, float]:
        result = {}
        for name, greedy in (("greedy", True), ("sampled", False)):
            scores = score(plain_head, plain_target, generated[f"eval_{name}"], UNROLL)
            result[f"length_{name}"] = acceptance_length(scores, PROMPT, UNROLL, greedy=greedy)
        return result

    run = Run(
        part="eagle3", folder=folder, steps=steps, decay_steps=decay_steps, lr=lr,
        tokens_per_step=BATCH * LENGTH, eval_every=100, stop_at=stop_at,
    )  # fmt: skip
    return train(run, head, optimizer, loss_at, evaluate)


PROMPT = 64


def mixed_windows(
    splits: dict[str, Tensor], generated: dict[str, Tensor], *, seed: int, step: int
) -> Tensor:
    """Return ids [BATCH, LENGTH + UNROLL]: half corpus, a quarter each greedy and sampled text."""
    kinds = [k for k in ("greedy", "sampled") if k in generated]
    rows = BATCH // 2 if kinds else BATCH
    parts = [
        sample_windows(
            splits, batch=rows, length=LENGTH + UNROLL, stdlib_share=0.8, seed=seed, step=step
        )
    ]
    for kind in kinds:
        texts, count = generated[kind], (BATCH - rows) // len(kinds)
        picks = [(step * count + i) % texts.shape[0] for i in range(count)]
        parts.append(texts[picks].long())
    return torch.cat(parts)


def load_trained_head(folder: Path) -> Eagle3Head:
    """Return the head of the newest training checkpoint."""
    state = torch.load(folder / "eagle3.pt")["model"]
    head = Eagle3Head(HEAD_SHAPE, state["draft_ids"])
    head.load_state_dict(state)
    return head.requires_grad_(False)
