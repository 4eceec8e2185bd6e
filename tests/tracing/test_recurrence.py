"""What stands for the functions of transformers while a model is traced; what is refused."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from compilespec.errors import UnsupportedState
from compilespec.tracing.recurrence import marked_recurrence
from tests.support.models import tiny_hybrid


class Layered(nn.Module):
    """A model of nothing but its config."""

    def __init__(self, *layer_types: str) -> None:
        super().__init__()
        text = SimpleNamespace(layer_types=list(layer_types))
        self.config = SimpleNamespace(get_text_config=lambda: text)


def enter(model: Any) -> None:
    with marked_recurrence(model):
        pass


@pytest.mark.parametrize(
    "layer_types",
    [(), ("full_attention", "sliding_attention"), ("full_attention", "mlp", "moe")],
)
def test_layers_without_a_state_are_let_through(layer_types: tuple[str, ...]) -> None:
    enter(Layered(*layer_types))


@pytest.mark.parametrize("kind", ["linear_attention", "conv", "mamba"])
def test_a_state_that_no_marker_stands_for_is_refused(kind: str) -> None:
    with pytest.raises(UnsupportedState, match=rf"Layered has layers of type {kind}, whose.*use a"):
        enter(Layered("full_attention", kind))


def test_functions_are_replaced_while_a_model_is_traced_and_no_longer() -> None:
    model = tiny_hybrid("qwen3_5")
    module = sys.modules[type(model).__module__]
    own = module.torch_chunk_gated_delta_rule, module.causal_conv1d_fn
    with marked_recurrence(model):
        assert module.torch_chunk_gated_delta_rule is not own[0]
        assert module.causal_conv1d_fn is not own[1]
    assert (module.torch_chunk_gated_delta_rule, module.causal_conv1d_fn) == own
    with pytest.raises(ZeroDivisionError), marked_recurrence(model):
        1 / 0  # noqa: B018
    assert (module.torch_chunk_gated_delta_rule, module.causal_conv1d_fn) == own


def test_a_marker_computes_what_the_models_function_does() -> None:
    model = tiny_hybrid("qwen3_5")
    ids = torch.tensor([[5, 9, 3, 77, 41, 5, 8]])
    with torch.no_grad():
        want = model(ids).logits
        with marked_recurrence(model):
            got = model(ids, use_cache=False).logits
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)  # the model's states are float32
