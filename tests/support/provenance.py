"""Real steps of a drafter whose hidden states and cache entries say what they were made of."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compilespec.lowering import lower
from compilespec.methods.eagle3 import random_head
from compilespec.methods.recycled import RecycledDrafter
from compilespec.methods.registry import get_method
from compilespec.pipeline import options
from compilespec.pipeline.build import build_program
from compilespec.program import Lowered
from compilespec.tracing.load import load_target
from compilespec.tracing.target import trace_target
from compilespec.tracing.target_info import describe_target
from tests.support.models import VOCAB, PlainModel, tiny_target

BLOCK_SIZE = 4
MAX_SEQ_LEN = 27  # not a multiple of the block
MAX_ROWS = 4
NUM_LAYERS = 2
NUM_DRAFT_TOKENS = 3


class ProvenanceDrafter(RecycledDrafter):
    """Hidden states are (position, token there, depth); draft tokens follow a fixed rule.

    A row's cached key is (hidden position, token there, depth, paired token).  The first two
    channels of the target's embedding are the position and the token.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_draft_tokens, self.aux_layers = NUM_DRAFT_TOKENS, (0,)
        self.register_buffer("follower", torch.zeros(VOCAB, dtype=torch.int32))

    def combine(self, aux: Tensor) -> Tensor:
        return torch.cat([aux[..., :2], torch.zeros_like(aux[..., :1])], -1)

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, hidden: Tensor
    ) -> tuple[Tensor, Tensor]:
        token = input_ids.to(hidden.dtype)[..., None]
        key = torch.cat([hidden, token], -1)[:, None]
        mixed = torch.ops.compilespec.attention(key, key, key, 0.01, 0, 0.0, None)
        head_input = torch.cat([hidden[..., :1], token], -1) + mixed[:, :, 0, :2] * 0
        return head_input, torch.cat([hidden[..., :1] + 1, token, hidden[..., 2:] + 1], -1)

    def propose(self, head_input: Tensor) -> Tensor:
        position, token = head_input[:, 0].long(), head_input[:, 1].long()
        return (self.follower[token] + (position % 4 == 3)) % VOCAB


def provenance_target() -> PlainModel:
    """Channels 0 and 1 of the embedding are position and token; the rest is random, and so is the
    continuation."""
    torch.manual_seed(0)
    model = PlainModel(num_layers=NUM_LAYERS).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.copy_(torch.randn_like(parameter) * 1.4 / parameter.shape[-1] ** 0.5)
        model.tokens.weight.mul_(40)
        model.tokens.weight[:, 0], model.places.weight[:, 1] = 0, 0
        model.tokens.weight[:, 1] = torch.arange(VOCAB)
        model.places.weight[:, 0] = torch.arange(len(model.places.weight))
    return model


def follower(model: PlainModel) -> Tensor:
    """What the target says after each token alone: a drafter's guess that is often right."""
    with torch.no_grad():
        return model(torch.arange(VOCAB)[:, None])[:, -1].argmax(-1).to(torch.int32)


def build(drafter_kind: str) -> Lowered:
    if drafter_kind == "provenance":
        model = provenance_target()
        drafter = ProvenanceDrafter().double()
        drafter.follower.copy_(follower(model))
    else:
        model = tiny_target("llama")
        del model.model.layers[NUM_LAYERS:]
        info = describe_target(trace_target(model), load_target(model))
        drafter = random_head(info, aux_layers=(0, 1, 2), draft_vocab_size=61)
    sizes = options.CompileOptions(
        backend="eager", max_batch_size=MAX_ROWS, max_seq_len=MAX_SEQ_LEN, max_prefill_tokens=64,
        num_draft_tokens=NUM_DRAFT_TOKENS,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(options, "BLOCK_SIZE", BLOCK_SIZE)
        program = build_program(load_target(model), get_method("eagle3"), drafter, sizes, {})
    assert program.config.block_size == BLOCK_SIZE
    return lower(program, backend="eager")
