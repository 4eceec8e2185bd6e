"""Masks, positions and keywords that a model brings are read, or refused by name.

The reference computes the whole sequence anew for each token, by the module itself and without a
cache; the engine's prompts are longer than every window and chunk, and are prefilled in pieces.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import compilespec
from compilespec import DraftTree, SamplingParams
from compilespec.errors import NotSupported, TraceError, UnsupportedModel
from compilespec.program import markers
from compilespec.tracing.attention import _refuse_other_inputs as refuse_other_inputs
from compilespec.tracing.load import load_target
from compilespec.tracing.target import trace_target
from compilespec.tracing.target_info import describe_target
from tests.support.models import VOCAB, PlainModel, enliven, recomputed

WINDOW = 8
NUM_TOKENS = 10
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
SEQ2SEQ = {
    "vocab_size": VOCAB, "d_model": 32, "decoder_layers": 2, "decoder_ffn_dim": 48,
    "decoder_attention_heads": 4, "max_position_embeddings": 128, "pad_token_id": 0,
    "is_decoder": True, "is_encoder_decoder": False,
}  # fmt: skip
LLAMA4 = {
    "intermediate_size_mlp": 48, "head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1,
    "attention_chunk_size": WINDOW, "no_rope_layer_interval": 2,
}  # fmt: skip


def model_of(name: str, **changes: Any) -> nn.Module:
    """A random model in float64 of a family by the name of its config class."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**changes)
    experts = {"experts_implementation": "batched_mm"} if "num_experts_per_tok" in changes else {}
    model = transformers.AutoModelForCausalLM.from_config(config, **experts)
    return enliven(model, name).double().eval()


def prompts() -> list[list[int]]:
    return [[3 + (5 + i * i * 7 + i * 11) % (VOCAB - 10) for i in range(n)] for n in (13, 29)]


def check_tokens(model: nn.Module) -> None:
    """Two prompts in one batch, in pieces of 16 tokens, with drafts."""
    expected = [recomputed(model, prompt, NUM_TOKENS) for prompt in prompts()]
    with compilespec.compile(
        model, spec="ngram", num_draft_tokens=2, backend="eager", max_seq_len=64,
        max_batch_size=2, max_prefill_tokens=16,
    ) as engine:  # fmt: skip
        params = SamplingParams(max_new_tokens=NUM_TOKENS, ignore_eos=True)
        assert [output.token_ids for output in engine.generate(prompts(), params)] == expected


RIGHT: dict[str, Callable[[], nn.Module]] = {
    "llama4, chunks": lambda: model_of(
        "Llama4Text", **SIZES, **LLAMA4, attn_temperature_tuning=False
    ),
    "llama4, a temperature by its own count": lambda: model_of(
        "Llama4Text", **SIZES, **{**LLAMA4, "attention_chunk_size": 8192},
        attn_temperature_tuning=True, floor_scale=4, attn_scale=0.5,
    ),
    "phimoe, a window that the mask alone tells": lambda: model_of(
        "Phimoe", **SIZES, num_local_experts=4, num_experts_per_tok=2, sliding_window=5,
        router_jitter_noise=0.0, input_jitter_noise=0.0,
    ),
    "bart": lambda: model_of("Bart", **SEQ2SEQ),
    "mbart": lambda: model_of("MBart", **SEQ2SEQ),
    "afmoe, whose output is viewed": lambda: model_of(
        "Afmoe", **SIZES, **EXPERTS, num_experts=4, head_dim=8, sliding_window=WINDOW
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_a_model_that_was_wrong_is_right(name: str) -> None:
    check_tokens(RIGHT[name]())


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "dynamic NTK": (
        lambda: model_of("Llama", **SIZES, rope_parameters={
            "rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
        r"rope_type 'dynamic' \(dynamic NTK\) changes its frequencies",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_served_is_refused_by_its_name(name: str) -> None:
    make, message = REFUSED[name]
    with pytest.raises(TraceError, match=message) as caught:
        trace_target(make())
    assert "\n" not in str(caught.value)


def test_chunks_go_with_no_tree_yet() -> None:
    model = RIGHT["llama4, chunks"]()
    with pytest.raises(NotSupported, match=r"chunks of 8 tokens.*draft_tree="):
        compilespec.trace(
            model, spec="draft_model", draft=model, max_seq_len=64,
            draft_tree=DraftTree(choices=[(0,), (0, 0)]),
        )  # fmt: skip


def test_chunks_by_reference() -> None:
    program = compilespec.trace(RIGHT["llama4, chunks"](), max_seq_len=32, max_batch_size=2)
    report = compilespec.verify(program)
    assert report.ok, str(report)


# --- plain modules with their own masks, counts and errors ---


class Masked(PlainModel):
    """Takes positions; its attention has the mask that `mask(T)` gives."""

    def __init__(self, mask: Callable[[int], Tensor]) -> None:
        super().__init__(num_layers=1)
        self.mask = mask

    def forward(self, ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        length = ids.shape[1]
        positions = torch.arange(length)[None] if position_ids is None else position_ids
        hidden = self.tokens(ids) + self.places(positions)
        query = hidden.view(*ids.shape, 4, -1).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(query, query, query, self.mask(length))
        hidden = hidden + mixed.transpose(1, 2).reshape(hidden.shape)
        return self.head(self.norm(hidden))


def window(length: int) -> Tensor:
    place = torch.arange(length)
    age = place[:, None] - place
    return (age >= 0) & (age < WINDOW)


def inclusive(length: int) -> Tensor:
    """The same, with the oldest key named."""
    place = torch.arange(length)
    age = place[:, None] - place
    return (age >= 0) & (age <= WINDOW - 1)


def additive(length: int) -> Tensor:
    return torch.zeros(length, length, dtype=torch.float64).masked_fill(
        ~torch.ones(length, length, dtype=torch.bool).tril(), float("-inf")
    )


def prefix(length: int) -> Tensor:
    """The first four tokens see each other."""
    place = torch.arange(length)
    return (place <= place[:, None]) | (place < 4)


def biased(length: int) -> Tensor:
    place = torch.arange(length)
    return torch.where(place <= place[:, None], (place - place[:, None]) * 0.1, float("-inf"))


def far_diagonal(length: int) -> Tensor:
    """A window that no short text shows."""
    return torch.ones(length, length, dtype=torch.bool).tril().triu(-4000)


def plain(mask: Callable[[int], Tensor]) -> nn.Module:
    torch.manual_seed(0)
    return Masked(mask).double().eval()


@pytest.mark.parametrize("mask", [window, inclusive, additive])
def test_a_mask_of_ones_own_is_read(mask: Callable[[int], Tensor]) -> None:
    model = plain(mask)
    (marker,) = markers(trace_target(model).graph_module)
    assert marker.args[4] == (0 if mask is additive else WINDOW)
    check_tokens(model)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (prefix, "it has another form, and tokens see later ones"),
        (biased, "it is a bias that is added to the scores"),
        (far_diagonal, "it is made by index"),
        (lambda length: window(length) & (torch.arange(length) % 2 == 0), "another form"),
    ],
)
def test_masks_of_other_forms_are_refused(mask: Callable[[int], Tensor], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        trace_target(plain(mask))


def without_first(length: int) -> Tensor:
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    mask[1:, 0] = False
    return mask


def nearer(length: int) -> Tensor:
    """What is written is read as the first operand, not as a result."""
    mask = torch.zeros(length, length, dtype=torch.float64)
    mask.masked_fill_(~torch.ones(length, length, dtype=torch.bool).tril(), float("-inf"))
    mask[:, 2].sub_(1.0)
    return mask


@pytest.mark.parametrize("mask", [without_first, nearer])
def test_masks_that_are_written_in_part_are_refused(mask: Callable[[int], Tensor]) -> None:
    with pytest.raises(UnsupportedModel, match="written in place"):
        trace_target(plain(mask))


class Counting(PlainModel):
    """Scales by how many tokens a call has, though it takes positions."""

    def forward(self, ids: Tensor, position_ids: Tensor) -> Tensor:
        hidden = (self.tokens(ids) + self.places(position_ids)) * ids.shape[1]
        return self.head(self.blocks[0](hidden))


def test_a_token_alone_is_what_it_is_among_others() -> None:
    model = Counting(num_layers=1).double().eval()
    with pytest.raises(UnsupportedModel, match="its place in the call has a part in them"):
        describe_target(trace_target(model), load_target(model))


def test_a_config_that_is_wrong_says_so_itself() -> None:
    model = model_of("Mistral", **SIZES, sliding_window=WINDOW)
    model.config.sliding_window = None
    model.config._attn_implementation = "sdpa"
    model.model.forward = None  # type: ignore[assignment]
    del model.model.forward

    def refuse(*_: Any, **__: Any) -> Tensor:
        raise ValueError("heads must divide the width")

    model.model.layers[1].mlp.forward = refuse  # type: ignore[method-assign]
    with pytest.raises(
        TraceError, match="raises ValueError: heads must divide the width; expected"
    ):
        trace_target(model)


def test_an_index_that_does_not_exist_is_told_in_one_line() -> None:
    class Bad(Masked):
        def forward(self, ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
            return super().forward(ids[:, :, 0], position_ids)

    with pytest.raises(TraceError, match="too many indices for tensor of dimension 2") as caught:
        trace_target(Bad(lambda length: torch.ones(length, length).tril() > 0))
    assert "\n" not in str(caught.value)


def test_a_model_without_token_ids_is_refused_by_what_it_reads() -> None:
    model = PlainModel(num_layers=1)
    model.main_input_name = "flattened_patches"
    model.config = transformers.LlamaConfig()
    model.forward = lambda flattened_patches=None: None
    with pytest.raises(UnsupportedModel, match="reads flattened_patches and no token ids"):
        refuse_other_inputs(model)
