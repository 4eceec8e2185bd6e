"""Hand-written ATen graphs for tests of passes and of what looks into graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from compilespec.methods.base import Drafter
from compilespec.methods.registry import get_method
from compilespec.passes.context import PassContext
from compilespec.passes.splice.builder import Writer, node_of
from compilespec.program import BufferSpec, InputSpec, ProgramConfig
from tests.support.models import VOCAB

HAND_CONFIG = ProgramConfig(
    num_draft_tokens=2, max_batch_size=3, max_seq_len=22, max_prefill_tokens=32,
    block_size=4, num_blocks=18, vocab_size=VOCAB, dtype=torch.float32, device=torch.device("cpu"),
)  # fmt: skip


def reading(**layers: Any) -> Drafter:
    """A drafter that reads these `aux_layers` and `kv_layers` of the target."""
    drafter = Drafter()
    for name, value in layers.items():
        setattr(drafter, name, value)
    return drafter


def graph_of(
    function: Callable[..., Any], **specs: tuple[str, Tensor]
) -> tuple[fx.GraphModule, PassContext]:
    """A hand-written ATen graph: `function` traced over inputs given as name=(kind, tensor)."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = [mode.from_tensor(tensor.clone()) for _, tensor in specs.values()]  # one each
    with mode:
        gm = make_fx(function, tracing_mode="real", _allow_non_fake_inputs=True)(*fakes)
    ctx = PassContext(
        phase="decode", config=HAND_CONFIG, capabilities=get_method("none").capabilities,
        target=None, draft={},  # type: ignore[arg-type]
    )  # fmt: skip
    for node, (name, (kind, tensor)), fake in zip(
        gm.graph.find_nodes(op="placeholder"), specs.items(), fakes, strict=True
    ):
        node.meta["role"], node.meta["val"] = name, fake
        ctx.inputs[name] = InputSpec(
            name=name, kind=kind, sources=(name,) if kind == "weight" else ()
        )  # type: ignore[arg-type]
        if kind == "weight":
            ctx.weights[name] = tensor
        elif kind in ("state", "cache"):
            ctx.buffers[name] = BufferSpec(
                name=name, kind=kind, shape=tuple(tensor.shape), dtype=tensor.dtype
            )  # type: ignore[arg-type]
    return gm, ctx


def emit(
    gm: fx.GraphModule,
    function: Callable[..., Any],
    *nodes: fx.Node,
    before: fx.Node,
    **options: Any,
) -> Any:
    """The node, or nodes, of tensor code over these nodes, written before another one."""
    code = Writer(gm)
    with code.before(before):
        result = function(*code.values(nodes), **options)
    return tuple(map(node_of, result)) if isinstance(result, tuple) else node_of(result)


def call(gm: fx.GraphModule, *inputs: Tensor) -> Any:
    """Run on copies of the inputs."""
    gm.recompile()
    with torch.no_grad():
        return gm(*[tensor.clone() for tensor in inputs])


def code(gm: fx.GraphModule) -> str:
    gm.recompile()
    return gm.code
