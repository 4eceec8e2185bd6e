"""A logits processor that is traced into the step: its inputs, its capture and its check."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from compilespec.errors import InvalidOption
from compilespec.ops.device import traits_of
from compilespec.program import Phase, ProgramConfig, Traced
from compilespec.tracing.capture import EXAMPLE_SHAPE, trace_call

# What a logits processor may read, by parameter name.
PROCESSOR_INPUTS = ("logits_BSV", "position_BS", "ids_BS", "context_BL", "prompt_len_B")


class LogitsProcessor(nn.Module):
    """A function or module that changes the target's logits, for all requests of an engine.

    The names of its parameters say which of these it reads:

    logits_BSV    the target's logits, in the program's dtype; S is K + 1, in prefill 1
    position_BS   int32, the number of tokens before the one that a row chooses
    ids_BS        int32, the last of them
    context_BL    int32 [B, max_seq_len], all of them by position: row (b, s) follows
                  context_BL[b, :position_BS[b, s]], earlier drafts included; the rest is stale
    prompt_len_B  int32, how many of them are the prompt

    It returns floating logits [B, S, V].  A row's result must not depend on the other rows (that is
    checked), and it must keep no state: traffic decides which rows are batched together, and a row
    may be computed again.  It is traced for any B: tensor code without branches on values.

    Raises: InvalidOption for parameters that it cannot be given.
    """

    def __init__(self, processor: Callable[..., Tensor]) -> None:
        super().__init__()
        self.processor = processor
        self.title = getattr(processor, "__name__", type(processor).__name__)
        body = processor.forward if isinstance(processor, nn.Module) else processor
        self.inputs = tuple(inspect.signature(body).parameters)
        unknown = [name for name in self.inputs if name not in PROCESSOR_INPUTS]
        if unknown or "logits_BSV" not in self.inputs:
            raise InvalidOption(
                f"logits_processor={self.title}: its parameters must be logits_BSV and any of "
                f"{', '.join(PROCESSOR_INPUTS[1:])}; got {', '.join(self.inputs) or 'none'}"
            )

    def forward(self, **inputs: Tensor) -> Tensor:
        changed: Tensor = self.processor(**{name: inputs[name] for name in self.inputs})
        return changed

    def capture(self, phase: Phase, config: ProgramConfig) -> Traced:
        """The processor at the shapes of one phase, B symbolic.

        Raises: InvalidOption (the result has another shape or dtype, or rows are mixed),
        TraceError.
        """
        steps = config.num_verify_tokens if phase == "decode" else 1
        self._check(config, steps)
        examples = self._examples(EXAMPLE_SHAPE[0], steps, config)
        arguments = {name: (examples[name], (0,)) for name in self.inputs}

        def call(*tensors: Tensor) -> tuple[Tensor, ...]:
            changed = self.processor(**dict(zip(self.inputs, tensors, strict=True)))
            return (changed.view_as(changed),)  # the output must not be an argument

        return trace_call(self, call, arguments, name="processor", owner="processor")

    def _examples(self, batch: int, steps: int, config: ProgramConfig) -> dict[str, Tensor]:
        """Inputs of a call in which every row is in the middle of its own sequence."""
        seeded = torch.Generator().manual_seed(0)

        def ids(*shape: int) -> Tensor:
            return torch.randint(config.vocab_size, shape, generator=seeded, dtype=torch.int32)

        context_BL = ids(batch, config.max_seq_len)
        first_B1 = ids(batch, 1) % max(1, config.max_seq_len - steps)
        last_BS = first_B1 + torch.arange(steps, dtype=torch.int32)
        logits_BSV = torch.randn(batch, steps, config.vocab_size, generator=seeded)
        made = {
            "logits_BSV": logits_BSV.to(config.dtype),
            "position_BS": last_BS + 1,
            "ids_BS": context_BL.gather(1, last_BS.long()),
            "context_BL": context_BL,
            "prompt_len_B": last_BS[:, 0] // 2 + 1,
        }
        return {name: tensor.to(config.device) for name, tensor in made.items()}

    @torch.no_grad()
    def _check(self, config: ProgramConfig, steps: int) -> None:
        """Check that a row's result does not depend on other rows or on tokens after its own."""
        if traits_of(config.device).is_meta:
            return
        whole = self._examples(3, steps, config)
        together = self._call(whole)
        for b, s in ((0, steps - 1), (2, 0)):
            alone = {name: tensor[b : b + 1].clone() for name, tensor in whole.items()}
            for name in ("logits_BSV", "ids_BS", "position_BS"):
                alone[name] = alone[name][:, s : s + 1].repeat_interleave(steps, 1)
            end = int(alone["position_BS"][0, 0])
            alone["context_BL"][:, end:] = (alone["context_BL"][:, end:] + 1) % config.vocab_size
            result, wanted = self._call(alone)[0, s], together[b, s]
            if not torch.allclose(result, wanted, rtol=1e-3, atol=1e-3, equal_nan=True):
                raise InvalidOption(
                    f"logits_processor={self.title} mixes rows: the result of row ({b}, {s}) "
                    "depends on other rows or on tokens after its own; it must read only its own "
                    "logits and context_BL[b, :position_BS[b, s]]"
                )

    def _call(self, inputs: Mapping[str, Tensor]) -> Tensor:
        shape = inputs["logits_BSV"].shape
        result: Any = self(**{name: tensor.clone() for name, tensor in inputs.items()})
        if isinstance(result, Tensor) and result.shape == shape and result.is_floating_point():
            return result
        got = (
            f"{result.dtype} {list(result.shape)}"
            if isinstance(result, Tensor)
            else type(result).__name__
        )
        raise InvalidOption(
            f"logits_processor={self.title} must return floating logits {list(shape)}; got {got}"
        )
