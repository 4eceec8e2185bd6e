"""Names in a capture: inputs by weight path, nodes by module path and source line."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, fx, nn

from compilespec.program import TracedInput

_OWN_FOLDER = Path(__file__).parent


def name_inputs(
    gm: fx.GraphModule,
    examples: Sequence[Any],
    module: nn.Module,
    arguments: Mapping[str, Tensor],
    name: str,
) -> tuple[list[TracedInput], dict[str, Tensor]]:
    """Match placeholders with parameters, buffers and arguments by example input identity."""
    paths: dict[int, str] = {}
    for path, tensor in itertools.chain(
        module.named_parameters(remove_duplicate=True), module.named_buffers(remove_duplicate=True)
    ):
        paths.setdefault(id(tensor), path)
    argument_ids = {id(tensor): key for key, tensor in arguments.items()}
    inputs: list[TracedInput] = []
    weights: dict[str, Tensor] = {}
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    for index, (node, example) in enumerate(zip(placeholders, examples, strict=True)):
        if not isinstance(example, Tensor):
            entry = TracedInput(name=node.name, kind="symbol")
        elif id(example) in argument_ids:
            entry = TracedInput(name=argument_ids[id(example)], kind="argument")
        else:
            path = paths.get(id(example), f"captured_{index}")
            entry = TracedInput(name=f"{name}.{path}", kind="weight")
            weights[entry.name] = example.detach()
        node.meta["role"] = "symbol" if entry.kind == "symbol" else entry.name
        inputs.append(entry)
    return inputs, weights


_WRAPPER = re.compile(
    r"^[GL]\[['\"]\w+['\"]\](?:\.__closure__\[\d+\]\.cell_contents)*\.?|^L\['self'\]\.?"
)


def clean_module_paths(gm: fx.GraphModule) -> None:
    """Strip Dynamo's frame prefix from module paths: `model.layers.3.self_attn` remains."""
    for node in gm.graph.nodes:
        stack = node.meta.get("nn_module_stack")
        path, kind = "", ""
        if stack:
            raw, kind_ = list(stack.values())[-1]
            path = (
                re.sub(r"\['?(\w+)'?\]", r".\1", _WRAPPER.sub("", raw))
                .replace("_modules.", "")
                .strip(".")
            )
            kind = getattr(kind_, "__name__", str(kind_)).rsplit(".", 1)[-1]
        node.meta["custom"] = {
            **(node.meta.get("custom") or {}),
            "module": path,
            "class": kind,
            "pass": "trace",
        }


def source_line(node: fx.Node) -> str:
    """The innermost line of the model's source that made the node, as `file.py:12: code`.  Skips
    this package: transformers calls its attention function.
    """
    trace = [
        line.strip() for line in (node.meta.get("stack_trace") or "").splitlines() if line.strip()
    ]
    for index in range(len(trace) - 1, -1, -1):
        match = re.match(r'File "(.+)", line (\d+)', trace[index])
        if match and Path(match[1]).parent != _OWN_FOLDER:
            code = trace[index + 1] if index + 1 < len(trace) else ""
            return f"{match[1].rsplit('/', 1)[-1]}:{match[2]}: {code}"
    return "source line unknown"
