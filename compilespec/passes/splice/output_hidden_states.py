"""Outputs the tapped hidden states, for a reader on the host."""

from __future__ import annotations

import torch

from compilespec.passes.splice.builder import Splice


def output_hidden_states(step: Splice) -> int:
    """Add an output, the taps concatenated in order: `hidden_BSE` of the step's tokens, in prefill
    `hidden_1TE` of the packed ones.  Numerics: exact.  Torch IR.
    """
    step.roles.hidden = torch.cat(step.taps(), -1)
    name = "hidden_BSE" if step.is_decode else "hidden_1TE"
    step.set_outputs({**step.outputs(), name: step.roles.hidden})
    return 1
