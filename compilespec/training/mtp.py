"""Training of MTP modules, on those that the engine runs: a chain of them, or one recycled.

Draft step j runs module j, or the one there is, on the output of the step before.  Each module of a
chain has its own cache, and attends over its own rows.  The attention of a recycled module
sees what its one cache would hold: the first step's keys of the same and earlier rows, and the
later steps' keys of this row.

Source: DeepSeek-V3 report, section 2.2; the recycled one with the training-time test of Li et al.
2025 (EAGLE-3).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from compilespec.errors import InvalidOption
from compilespec.methods.mtp.drafter import MtpDrafter
from compilespec.methods.mtp.module import MtpStep
from compilespec.methods.mtp.random_modules import random_modules
from compilespec.tracing.target_info import TargetInfo
from compilespec.training.batches import Batch, Lesson
from compilespec.training.eagle3 import INITIAL_STD, attend_with_own, judge, layer_sizes
from compilespec.training.method import StepLosses, TrainingMethod
from compilespec.training.options import TrainOptions

ATTENTION = "compilespec_training"  # in transformers' attention registry


class MtpTraining(TrainingMethod):
    """A module for each draft step, of one llama layer of the target's shape, with the target's
    embedding and head.
    """

    spec = "mtp"
    recycled = False

    def create(self, info: TargetInfo, counts: Tensor, options: TrainOptions) -> nn.Module:
        """Raises: InvalidOption if K is more than the modules that are trained."""
        num_modules = 1 if self.recycled else options.depth
        if not self.recycled and options.num_draft_tokens > num_modules:
            raise InvalidOption(
                f"{self.spec} drafts one token a module: num_draft_tokens must be at most depth, "
                f"which is {num_modules}; got {options.num_draft_tokens}"
            )
        sizes = layer_sizes(info, options)
        drafter = random_modules(info, num_modules, recycled=self.recycled, **sizes).float()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(options.seed)
            for step in steps_of(drafter):
                step.embed_tokens.share(info.embedding.detach().float())
                step.lm_head.share(info.lm_head.detach().float())
                initialise(step)
        register_attention()
        drafter.config.block._attn_implementation = ATTENTION
        return drafter.requires_grad_(True).to(info.device)

    def aux_layers(self, drafter: nn.Module) -> tuple[int, ...]:
        return cast(MtpDrafter, drafter).aux_layers

    def draft_ids(self, drafter: nn.Module) -> Tensor | None:
        return None

    def losses(self, drafter: nn.Module, lesson: Lesson, depth: int) -> StepLosses:
        steps = steps_of(drafter)
        outputs = unroll(steps, lesson.aux, lesson.batch, depth)
        return judge(lesson, outputs, nn.Identity(), steps[0].lm_head.weight)

    def save(self, drafter: nn.Module, directory: Path, dtype: torch.dtype, layout: str) -> None:
        """Save by DeepSeek's names, which every reader of MTP modules knows; `layout` has no
        other.
        """
        config, steps = cast(MtpDrafter, drafter).config.block, steps_of(drafter)
        raw = config.to_dict() | {
            "architectures": ["LlamaForCausalLMMTP"],
            "num_nextn_predict_layers": len(steps),
            "dtype": str(dtype).removeprefix("torch."),
        }
        tensors = {
            f"model.layers.{config.num_hidden_layers + number}.{_published(name)}": tensor.detach()
            .to("cpu", dtype)
            .contiguous()
            .clone()
            for number, step in enumerate(steps)
            for name, tensor in step.named_parameters()
            if tensor.requires_grad
        }
        text = json.dumps(raw, indent=2, sort_keys=True, default=str)
        (directory / "config.json").write_text(f"{text}\n", encoding="utf-8")
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


class MtpEagleTraining(MtpTraining):
    """One module that drafts every token."""

    spec = "mtp_eagle"
    recycled = True


def steps_of(drafter: nn.Module) -> list[MtpStep]:
    """The modules."""
    return [cast(MtpStep, step) for step in cast(MtpDrafter, drafter).steps]


def _published(name: str) -> str:
    return f"shared_head.{name}" if name == "norm.weight" else name.removeprefix("block.")


def initialise(step: MtpStep) -> None:
    """Set norms to ones, matrices to small values, and the projection to pass the hidden state
    on.
    """
    for name, parameter in step.named_parameters():
        if parameter.ndim == 1:
            nn.init.ones_(parameter)
        else:
            inner = name.endswith(("o_proj.weight", "down_proj.weight"))
            nn.init.normal_(parameter, std=INITIAL_STD / 2**0.5 if inner else INITIAL_STD)
    width = step.config.hidden_size
    with torch.no_grad():
        step.eh_proj.weight[:, -width:] += torch.eye(width)


def unroll(
    steps: Sequence[MtpStep], hidden_BTD: Tensor, batch: Batch, depth: int
) -> Iterator[Tensor]:
    """The head's input [B, A, D] of every draft step of every origin; a single module is
    recycled.
    """
    every_T = torch.arange(batch.ids.shape[1], device=batch.ids.device).expand(batch.ids.shape)
    at_BA = batch.origins.clamp_max(batch.ids.shape[1] - 1)
    index = at_BA[..., None].expand(-1, -1, hidden_BTD.shape[2])
    with unrolled_attention() if len(steps) == 1 else nullcontext():
        for number in range(depth):
            head_input_BTD, hidden_BTD = steps[min(number, len(steps) - 1)](
                batch.ids_at(every_T + 1 + number), every_T + number, hidden_BTD
            )
            yield head_input_BTD.gather(1, index)


# --- attention ---

_seen: list[tuple[Tensor, Tensor]] | None = None  # keys and values of the steps so far


@contextmanager
def unrolled_attention() -> Iterator[None]:
    """Makes each call of the attention, inside, the next draft step of the same rows."""
    global _seen
    _seen = []
    try:
        yield
    finally:
        _seen = None


def register_attention() -> None:
    """Register the attention in transformers."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, _attend)


def _attend(
    module: nn.Module,
    query_BNTH: Tensor,
    key_BNTH: Tensor,
    value_BNTH: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention contract: [B, N, T, H] in, ([B, T, N, H], weights) out."""
    scale = query_BNTH.shape[-1] ** -0.5 if scaling is None else scaling
    before = [] if _seen is None else list(_seen)
    if _seen is not None:
        _seen.append((key_BNTH, value_BNTH))
    length = query_BNTH.shape[2]
    past = torch.ones(length, length, dtype=torch.bool, device=query_BNTH.device).tril()
    keys, values = zip(*before, (key_BNTH, value_BNTH), strict=True)
    out = attend_with_own(query_BNTH, keys, values, past.expand(len(query_BNTH), -1, -1), scale)
    return out.transpose(1, 2), None
