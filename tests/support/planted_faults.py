"""A tiny step with faults planted in it: prints, as a line of JSON, what is said of it.

Run in a separate process: `python -m tests.support.planted_faults all`, or `each`: a line for the
step without a fault, and one for each fault alone.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
from torch import fx

from compilespec.ops.paged_attention import kernel as paged_attention
from compilespec.program import SpecProgram
from tools.without_gpu.dry_run import dry_run
from tools.without_gpu.facts import facts, faults
from tools.without_gpu.gpus import GPUS
from tools.without_gpu.machine_code import compile_step
from tools.without_gpu.steps import CUDA, infer, meta_target, on_cuda, program_on_cuda

GPU = GPUS["sm_80"]
_TINY = {
    "num_hidden_layers": 1, "hidden_size": 256, "intermediate_size": 512, "vocab_size": 1000,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "max_position_embeddings": 512,
}  # fmt: skip
_aten = torch.ops.aten
_HOST = torch.device("cpu")


def clone_of_the_cache(graph: fx.Graph) -> None:
    """Attention reads a copy: what functionalization leaves where it cannot write in place."""
    (attention,) = _calls(graph, torch.ops.compilespec.paged_attention.default)
    with graph.inserting_before(attention):
        clone = graph.call_function(_aten.clone.default, (attention.args[3],))
    attention.update_arg(3, clone)


def copy_of_a_weight(graph: fx.Graph) -> None:
    """A product takes its weight in another layout."""
    product = _calls(graph, _aten.mm.default)[0]
    with graph.inserting_before(product):
        dense = graph.call_function(
            _aten.clone.default, (product.args[1],), {"memory_format": torch.contiguous_format}
        )
    product.update_arg(1, dense)


def item(graph: fx.Graph) -> None:
    """A number that the host reads."""
    output, first = _first_result(graph)
    with graph.inserting_before(output):
        one = graph.call_function(_aten.select.int, (first, 0, 0))
        while_flat = graph.call_function(_aten.view.default, (one, [-1]))
        last = graph.call_function(_aten.select.int, (while_flat, 0, -1))
        number = graph.call_function(_aten._local_scalar_dense.default, (last,))
        total = graph.call_function(_aten.add.Tensor, (first, number))
    _replace_first_result(output, total)


def pageable_copy(graph: fx.Graph) -> None:
    """A result that goes to host memory, which is not pinned, and comes back."""
    output, first = _first_result(graph)
    with graph.inserting_before(output):
        host = graph.call_function(_aten._to_copy.default, (first,), {"device": _HOST})
        back = graph.call_function(_aten._to_copy.default, (host,), {"device": CUDA})
    _replace_first_result(output, back)


def large_tile(*given: Any) -> paged_attention.Tile:
    """Tiles of attention that do not fit into shared memory."""
    return paged_attention.Tile(num_tokens=16, rows=32, keys=512, num_warps=4)


def _calls(graph: fx.Graph, target: Any) -> list[fx.Node]:
    return list(graph.find_nodes(op="call_function", target=target))


def _first_result(graph: fx.Graph) -> tuple[fx.Node, Any]:
    output = graph.output_node()
    results: Any = output.args[0]
    return output, results[0]


def _replace_first_result(output: fx.Node, new: fx.Node) -> None:
    results: Any = output.args[0]
    output.update_arg(0, (new, *results[1:]))


FAULTS: dict[str, Callable[[fx.Graph], None] | None] = {
    "a clone of the cache": clone_of_the_cache,
    "a weight in another layout": copy_of_a_weight,
    "an item": item,
    "copies of pageable memory": pageable_copy,
    "too much shared memory": None,  # it is planted in the kernel
}


def said_of(program: SpecProgram, planted: Sequence[str]) -> list[str]:
    graph = program.graphs[min(key for key in program.graphs if key.kind == "greedy")]
    step = on_cuda(graph.graph_module, graph.fakes, graph.inputs)
    for name in planted:
        if (plant := FAULTS[name]) is not None:
            plant(step.graph_module.graph)
    infer(step.graph_module.graph, step.fakes)
    step.graph_module.recompile()
    compiled = compile_step(step, GPU)
    tile = large_tile if "too much shared memory" in planted else paged_attention.choose_tile
    with mock.patch.object(paged_attention, "choose_tile", tile):
        found = facts(compiled, dry_run(compiled, GPU), program.buffers)
    return faults(found, GPU)


def main() -> None:
    target = meta_target("llama", _TINY, torch.bfloat16)
    program = program_on_cuda(target, "none", max_batch_size=4, max_seq_len=256)
    sets = [[*FAULTS]] if sys.argv[1] == "all" else [[], *([name] for name in FAULTS)]
    for planted in sets:
        print(json.dumps({"planted": planted, "said": said_of(program, planted)}), flush=True)


if __name__ == "__main__":
    main()
