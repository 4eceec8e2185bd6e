"""Steps of a small model, as each pass finds them: shared by the tests of passes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

from compilespec.methods.registry import get_method
from compilespec.ops.packed_linear import pack_weight
from compilespec.passes.graph.retrace import start_step
from compilespec.passes.order import SPLICE_PASSES, Pass, PassContext, run_passes
from compilespec.program import PassRecord, Phase, ProgramConfig
from tests.support.hand_graphs import emit, graph_of, reading
from tests.support.models import VOCAB

ATEN = torch.ops.aten
NUM_LAYERS, NUM_DRAFT_TOKENS = 2, 2
CONFIG = ProgramConfig(
    num_draft_tokens=NUM_DRAFT_TOKENS, max_batch_size=3, max_seq_len=22, max_prefill_tokens=32,
    block_size=4, num_blocks=18, vocab_size=VOCAB, dtype=torch.float32, device=torch.device("cpu"),
)  # fmt: skip
PAD = -1


def context(parts: Any, phase: Phase, **changes: Any) -> PassContext:
    target, draft = parts
    fields: dict[str, Any] = {
        "phase": phase, "config": CONFIG, "capabilities": get_method("eagle3").capabilities,
        "target": target, "draft": draft, "drafter": reading(aux_layers=(0, 1, 2)),
    }  # fmt: skip
    return PassContext(**{**fields, **changes})


def upto(name: str) -> tuple[Pass, ...]:
    """The splicing passes before `name`."""
    names = [entry.name for entry in SPLICE_PASSES]
    return SPLICE_PASSES[: names.index(name)]


def started(
    parts: Any, phase: Phase, before: str, **changes: Any
) -> tuple[fx.GraphModule, PassContext]:
    """A step graph as the pass `before` finds it."""
    ctx = context(parts, phase, **changes)
    gm = start_step(ctx)
    run_passes(gm, ctx, upto(before), level="torch")
    return gm, ctx


@dataclasses.dataclass
class Rewritten:
    """One phase through all passes, with every stage of it kept as a callable."""

    ctx: PassContext
    spliced: fx.GraphModule  # torch IR, all splices done
    aten: fx.GraphModule  # right after the retrace
    records: dict[str, PassRecord]
    final: fx.GraphModule

    def before(self, name: str) -> fx.GraphModule:
        return fx.GraphModule(self.final, self.records[name].before)

    def after(self, name: str) -> fx.GraphModule:
        return fx.GraphModule(self.final, self.records[name].after)


def random_inputs(ctx: PassContext, seed: int) -> dict[str, Tensor]:
    """A state in the middle of a run; a batch with a padded row (decode), two chunks (prefill)."""
    generator = torch.Generator().manual_seed(seed)

    def ints(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.int32)

    inputs = {}
    for name, spec in ctx.buffers.items():
        if spec.kind == "cache":
            inputs[name] = torch.randn(spec.shape, generator=generator, dtype=spec.dtype)
        else:
            inputs[name] = torch.full(spec.shape, spec.fill, dtype=spec.dtype)
    blocks = torch.randperm(CONFIG.num_blocks, generator=generator).to(torch.int32)
    table = torch.full((CONFIG.max_batch_size + 1, CONFIG.blocks_per_row), -1, dtype=torch.int32)
    table[:3] = blocks.view(3, -1)
    inputs["block_table_RM"] = table
    inputs["tokens_RS"] = ints(0, VOCAB, CONFIG.max_batch_size + 1, CONFIG.num_verify_tokens)
    inputs["seq_len_R"] = ints(1, CONFIG.max_seq_len, CONFIG.max_batch_size + 1)
    batch: dict[str, list[int]] = {
        "row_B": [2, 0, -1, 1],
        "ids_T": ints(0, VOCAB, 7).tolist(),
        "next_T": [*ints(0, VOCAB, 3).tolist(), -1, *ints(0, VOCAB, 3).tolist()],
        "position_T": [0, 1, 2, 3, 5, 6, 7],
        "row_T": [2, 2, 2, 2, 0, 0, 0],
        "owner_T": [0, 0, 0, 0, 1, 1, 1],
        "last_R": [3, 6],
        "commit_row_R": [2, -1],
    }
    return inputs | {name: torch.tensor(v, dtype=torch.int32) for name, v in batch.items()}


def run(gm: fx.GraphModule, ctx: PassContext, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Call a graph by the roles of its inputs, on copies; its outputs and every buffer after it."""
    gm.recompile()
    inputs = {name: tensor.clone() for name, tensor in inputs.items()}
    roles = [node.meta["role"] for node in gm.graph.nodes if node.op == "placeholder"]
    with torch.no_grad():
        outputs = gm(*[inputs[r] if r in inputs else _weight(ctx, r) for r in roles])
    named = dict(zip(("emitted", "num_emitted"), outputs, strict=True))
    return named | {name: inputs[name] for name in ctx.buffers}


def _weight(ctx: PassContext, name: str) -> Tensor:
    plain = name.removeprefix("packed.")
    value = torch.cat([ctx.weights[part] for part in plain.split("+")])
    return pack_weight(value) if plain != name else value


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor], *, bound: float = 0.0) -> None:
    """Equal outputs and buffers; floats within `bound` of each buffer's largest value."""
    assert got.keys() == want.keys()
    for name, value in want.items():
        limit = bound * float(value.abs().max()) if value.is_floating_point() else 0.0
        torch.testing.assert_close(
            got[name], value, rtol=0, atol=limit, msg=lambda m, n=name: f"{n}: {m}"
        )


def targets(gm: fx.GraphModule) -> list[Any]:
    return [node.target for node in gm.graph.nodes if node.op == "call_function"]


def emitted_graph(function: Callable[..., Any], names: list[str], **options: Any) -> fx.GraphModule:
    """`function` as passes emit it: over proxies, into a graph of its own."""
    gm = fx.GraphModule(nn.Module(), fx.Graph())
    inputs = [gm.graph.placeholder(name) for name in names]
    end = gm.graph.output(())
    result = emit(gm, function, *inputs, before=end, **options)
    end.args = (result,)
    gm.recompile()
    return gm


def logits_of(gm: fx.GraphModule, ctx: PassContext, inputs: dict[str, Tensor]) -> Tensor:
    gm.graph.lint()
    gm.recompile()
    roles = [node.meta["role"] for node in gm.graph.nodes if node.op == "placeholder"]
    with torch.no_grad():
        (logits,) = gm(*[inputs[r] if r in inputs else ctx.weights[r] for r in roles])
    return logits


def two_linears(**changes: Any):
    weights = {"a": torch.randn(5, 4), "b": torch.randn(3, 4)}
    x = torch.randn(6, 4)
    gm, ctx = graph_of(
        lambda x, a, b: (nn.functional.linear(x, a), nn.functional.linear(x, b)),
        x=("batch", x), a=("weight", weights["a"]), b=("weight", weights["b"]),
    )  # fmt: skip
    for name, value in changes.items():
        setattr(ctx, name, value)
    return gm, ctx, x, weights
