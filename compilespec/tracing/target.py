"""Stage "trace": one whole FX graph of an unmodified forward.

Two ways in, one operator out.  Hugging Face models reach attention through transformers' attention
interface; plain modules call `scaled_dot_product_attention(is_causal=True)`.  Both leave as the
stateless
marker `compilespec::attention`, with scale, window, soft cap and sinks as the model gave them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import itertools
import re
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

import compilespec.ops  # noqa: F401  (registers the operators)
from compilespec import _torch_compat
from compilespec.errors import NoPositionInput, TraceError, UnsupportedModel, UnsupportedState
from compilespec.program import Traced, TracedInput, module_path
from compilespec.tracing.quantized_weights import stand_ins
from compilespec.tracing.quiet import quiet_import

ATTENTION = "compilespec"  # our name in transformers' attention registry
EXAMPLE_SHAPE = (7, 13)  # sizes that few models have as static ones: 2.11 merges equal sizes
_POSITION_NAMES = ("position_ids", "positions", "input_pos")
_OTHER_INPUTS = ("pixel_", "image_", "video_", "input_features", "input_values", "audio_")
_unique = itertools.count()


def trace_target(model: nn.Module, *, name: str = "target") -> Traced:
    """Capture a causal LM once, at [B, T] with both sizes symbolic: every phase's call shape is an
    instance of it.

    Returns: a graph with arguments `input_ids` and `position_ids` (int32) and one output, the
    logits.
    Raises: TraceError (graph break; names module, line and cause), NoPositionInput,
    UnsupportedModel (not causal, an encoder-decoder, images beside text), UnsupportedState.
    """
    device = next(model.parameters()).device
    ids = torch.zeros(EXAMPLE_SHAPE, dtype=torch.int32, device=device)
    positions = (
        torch.arange(EXAMPLE_SHAPE[1], dtype=torch.int32, device=device)
        .expand(EXAMPLE_SHAPE)
        .contiguous()
    )
    arguments = {"input_ids": (ids, (0, 1)), "position_ids": (positions, (0, 1))}
    with _attention_interface(model) as is_transformers:
        call, takes_positions = _target_call(model, is_transformers)
        traced = trace_call(model, call, arguments, name=name)
    _mark_plain_attention(traced.graph_module, model)
    if not takes_positions:
        traced = _rewrite_arange(traced, model)
    if traced.num_attention_layers == 0:
        raise TraceError(
            f"{type(model).__name__} has no attention that can be cached: expected calls through "
            f"transformers' "
            "attention interface or scaled_dot_product_attention(is_causal=True), found none"
        )
    return traced


def trace_call(
    module: nn.Module,
    call: Callable[..., Any],
    arguments: Mapping[str, tuple[Tensor, Sequence[int]]],
    *,
    name: str,
    owner: str | None = None,
) -> Traced:
    """Capture `call(**arguments)` as one graph; weights are named by their path in `module`.

    Args:
        arguments: per name an example tensor and its dynamic dimensions.
        owner: prefix of the weights' names where several calls share a module; default `name`.
    Raises: TraceError.
    """
    with stand_ins(module) as quantized:
        traced = _capture(module, call, arguments, name=name, owner=owner or name)
    weights = {
        path: quantized.get(_torch_compat.storage_place(weight), weight)
        for path, weight in traced.weights.items()
    }
    return dataclasses.replace(traced, weights=weights)


def _capture(
    module: nn.Module,
    call: Callable[..., Any],
    arguments: Mapping[str, tuple[Tensor, Sequence[int]]],
    *,
    name: str,
    owner: str,
) -> Traced:
    started = time.perf_counter()
    captured: dict[str, Any] = {}

    def keep(gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        captured["gm"], captured["inputs"] = gm, inputs

        def stop(*_: Any) -> Any:
            raise _Captured

        return stop

    for tensor, dims in arguments.values():
        for dim in dims:
            _torch_compat.mark_dynamic(tensor, dim)
    names = list(arguments)
    examples = [tensor for tensor, _ in arguments.values()]
    function = _with_own_code(call)
    was_training = module.training
    module.eval()
    try:
        with torch.no_grad(), _torch_compat.capture_config():
            torch.compile(function, backend=keep, fullgraph=True)(*examples)
    except _Captured:
        pass
    except _torch_compat.dynamo_errors() as error:
        raise _trace_error(error, module, name) from error
    finally:
        module.train(was_training)
    if "gm" not in captured:
        raise TraceError(
            f"{name}: tracing {type(module).__name__} gave no graph: its output does not depend "
            f"on tensors"
        )
    gm: fx.GraphModule = captured["gm"]
    inputs, weights = _name_inputs(
        gm, captured["inputs"], module, dict(zip(names, examples, strict=True)), owner
    )
    _clean_module_paths(gm)
    return Traced(
        name=name,
        graph_module=gm,
        inputs=tuple(inputs),
        weights=weights,
        trace_ms=(time.perf_counter() - started) * 1e3,
    )


class _Captured(Exception):
    """Ends the traced call: the graph is all we want."""


def _with_own_code(call: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of `call` with a code object of its own: Dynamo caches, and counts recompiles, by
    code.
    """
    code = call.__code__.replace(co_name=f"{call.__name__}_{next(_unique)}")
    copy = types.FunctionType(
        code, call.__globals__, call.__name__, call.__defaults__, call.__closure__
    )
    copy.__kwdefaults__ = call.__kwdefaults__
    return copy


# --- transformers' attention interface ---


def _marker_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function contract: [B, N, T, H] in, ([B, T, N, H], weights) out.

    Where `is_causal` does not say, the module does, as in transformers' own sdpa function.  What is
    not causal, or has a mask of the model's own, is left for `_mark_plain_attention` to refuse.
    """
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if not is_causal or attention_mask is not None:
        mixed = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attention_mask, enable_gqa=True
        )
        return mixed.transpose(1, 2), None
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    output = torch.ops.compilespec.attention(
        query, key, value, float(scale), int(sliding_window or 0), float(softcap or 0.0), s_aux
    )
    return output, None


def register_attention() -> None:
    """Make the marker known to transformers, under the name `ATTENTION`, with no mask."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(ATTENTION, _marker_attention)
    AttentionMaskInterface.register(ATTENTION, lambda *args, **kwargs: None)


@contextlib.contextmanager
def _attention_interface(model: nn.Module) -> Iterator[bool]:
    """Route a transformers model's attention to the marker while it is traced; yields whether it
    is one.
    """
    try:
        with quiet_import():
            from transformers import PreTrainedModel
    except ImportError:
        yield False
        return
    if not isinstance(model, PreTrainedModel):
        yield False
        return
    _refuse_other_inputs(model)
    _refuse_recurrent_state(model)
    register_attention()
    configs = {id(m.config): m.config for m in model.modules() if isinstance(m, PreTrainedModel)}
    before = {key: config._attn_implementation for key, config in configs.items()}
    model.set_attn_implementation(ATTENTION)
    try:
        yield True
    finally:
        for key, config in configs.items():
            config._attn_implementation = before[key]


def _refuse_other_inputs(model: Any) -> None:
    """A prompt is one sequence of tokens: no second one, no images, no sound."""
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise UnsupportedModel(
            f"{name} is an encoder-decoder; expected a causal language model, which has a decoder "
            "alone, such as AutoModelForCausalLM loads"
        )
    taken = [p for p in inspect.signature(model.forward).parameters if p.startswith(_OTHER_INPUTS)]
    if taken:
        raise UnsupportedModel(
            f"{name} takes {taken[0]} beside token ids, which a prompt cannot hold; give its "
            "language model: lm = AutoModelForCausalLM.from_config(model.config.get_text_config());"
            " lm.model = model.get_decoder(); lm.lm_head = model.get_output_embeddings()"
        )


def _refuse_recurrent_state(model: Any) -> None:
    """Layers that are not attention keep a state that cannot be rewound after a rejected draft."""
    layer_types = getattr(model.config.get_text_config(), "layer_types", None) or ()
    recurrent = sorted(
        {str(t) for t in layer_types if "attention" not in str(t) or "linear" in str(t)}
    )
    if recurrent:
        raise UnsupportedState(
            f"{type(model).__name__} has layers of type {', '.join(recurrent)}, whose recurrent "
            f"state cannot be "
            "rewound after a rejected draft; use a model whose layers are all attention"
        )


# --- calling the model ---


def _target_call(model: nn.Module, is_transformers: bool) -> tuple[Callable[..., Tensor], bool]:
    """A function (input_ids, position_ids) -> logits over the unmodified model; whether positions
    are passed.
    """
    if is_transformers:

        def call_transformers(input_ids: Tensor, position_ids: Tensor) -> Tensor:
            return _logits_of(
                model(
                    input_ids=input_ids,
                    position_ids=position_ids,
                    use_cache=False,
                    return_dict=True,
                )
            )

        return call_transformers, True
    parameters = list(inspect.signature(model.forward).parameters)
    position_name = next((n for n in _POSITION_NAMES if n in parameters), None)

    def call_plain(input_ids: Tensor, position_ids: Tensor) -> Tensor:
        if position_name is None:
            return _logits_of(model(input_ids))
        return _logits_of(model(input_ids, **{position_name: position_ids}))

    return call_plain, position_name is not None


def _logits_of(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output
    logits = getattr(output, "logits", None)
    return logits if logits is not None else output[0]


# --- plain modules ---


def _mark_plain_attention(gm: fx.GraphModule, model: nn.Module) -> None:
    """scaled_dot_product_attention(is_causal=True) -> the marker.  Raises: UnsupportedModel."""
    functional = torch.nn.functional.scaled_dot_product_attention
    for node in list(gm.graph.nodes):
        if node.op != "call_function" or node.target is not functional:
            continue
        bound = _bind_sdpa(*node.args, **node.kwargs)
        if not bound["is_causal"] or bound["attn_mask"] is not None:
            mask = "none" if bound["attn_mask"] is None else "one of its own"
            raise UnsupportedModel(
                f"{type(model).__name__}: expected causal attention without a mask of its own, "
                f"which is all that a KV cache can serve, got is_causal={bound['is_causal']}, "
                f"mask {mask}, in {module_path(node) or 'the model'}; {source_line(node)}; use a "
                f"model whose tokens see no later ones"
            )
        head_dim = bound["query"].meta["example_value"].shape[-1]
        scale = float(bound["scale"]) if bound["scale"] is not None else float(head_dim) ** -0.5
        with gm.graph.inserting_before(node):
            marker = gm.graph.call_function(
                torch.ops.compilespec.attention,
                (bound["query"], bound["key"], bound["value"], scale, 0, 0.0, None),
            )
            output = gm.graph.call_method("transpose", (marker, 1, 2))
        for new in (marker, output):
            new.meta = dict(node.meta)
        marker.meta["example_value"] = node.meta["example_value"].transpose(1, 2)
        node.replace_all_uses_with(output)
        gm.graph.erase_node(node)
    gm.recompile()


def _bind_sdpa(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> dict[str, Any]:
    return dict(locals())


def _rewrite_arange(traced: Traced, model: nn.Module) -> Traced:
    """Aranges over the token dimension are the positions of a module that takes none: feed ours
    instead.
    """
    gm = traced.graph_module
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    ids = next(node for node in placeholders if node.meta["role"] == "input_ids")
    aranges = [
        node
        for node in gm.graph.nodes
        if node.op == "call_function" and node.target is torch.arange
    ]
    over_tokens = [
        node
        for node in aranges
        if node.meta["example_value"].shape[0] == ids.meta["example_value"].shape[1]
    ]
    if not over_tokens:
        raise NoPositionInput(
            f"{type(model).__name__}.forward takes no position_ids and computes no torch.arange "
            f"over its tokens, so "
            "its positions cannot be set; add a position_ids argument"
        )
    with gm.graph.inserting_after(placeholders[-1]):
        positions = gm.graph.placeholder("position_ids")
    positions.meta = {
        "role": "position_ids",
        "example_value": ids.meta["example_value"],
        "custom": {"pass": "trace"},
    }
    for node in over_tokens:
        # [B, T] stands where [T] stood: what the model broadcasts over a leading batch stays the
        # same.
        with gm.graph.inserting_before(node):
            value = gm.graph.call_method("to", (positions, node.meta["example_value"].dtype))
        value.meta = {k: v for k, v in node.meta.items() if k != "example_value"}
        node.replace_all_uses_with(value)
        gm.graph.erase_node(node)
    gm.recompile()
    inputs = (*traced.inputs, TracedInput(name="position_ids", kind="argument"))
    return dataclasses.replace(traced, inputs=inputs)


# --- naming ---


def _name_inputs(
    gm: fx.GraphModule,
    examples: Sequence[Any],
    module: nn.Module,
    arguments: Mapping[str, Tensor],
    name: str,
) -> tuple[list[TracedInput], dict[str, Tensor]]:
    """Match placeholders with parameters, buffers and arguments by the identity of the example
    inputs.
    """
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


_WRAPPER = re.compile(r"^[GL]\[['\"]\w+['\"]\]\.?|^L\['self'\]\.?")


def _clean_module_paths(gm: fx.GraphModule) -> None:
    """Module paths as the user knows them: `model.layers.3.self_attn`, without Dynamo's frame
    prefix.
    """
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
    """The innermost line of the model's source that made the node, as `file.py:12: code`; ours, the
    attention that transformers calls, is none of it.
    """
    trace = [
        line.strip() for line in (node.meta.get("stack_trace") or "").splitlines() if line.strip()
    ]
    for index in range(len(trace) - 1, -1, -1):
        match = re.match(r'File "(.+)", line (\d+)', trace[index])
        if match and match[1] != __file__:
            code = trace[index + 1] if index + 1 < len(trace) else ""
            return f"{match[1].rsplit('/', 1)[-1]}:{match[2]}: {code}"
    return "source line unknown"


# --- errors ---


def _trace_error(error: BaseException, module: nn.Module, name: str) -> TraceError:
    """One line: which module, which source line, what Dynamo could not do, what to try."""
    cause, frames = _torch_compat.dynamo_cause(error)
    where, line = type(module).__name__, ""
    for filename, lineno, _function in frames:
        found = _module_at(module, filename, lineno)
        if found is not None:
            where, line = found, f"{filename.rsplit('/', 1)[-1]}:{lineno}"
    if not line and frames:
        line = f"{frames[-1][0].rsplit('/', 1)[-1]}:{frames[-1][1]}"
    return TraceError(
        f"{name} cannot be traced as one graph: module {where}, {line or 'line unknown'}: "
        f"{cause.rstrip('.')}; "
        "rewrite that line in tensor operations (no .item(), no data-dependent branch, no print)"
    )


def _module_at(root: nn.Module, filename: str, lineno: int) -> str | None:
    """The deepest module whose forward covers this source line."""
    best: str | None = None
    for path, module in root.named_modules():
        code = getattr(type(module).forward, "__code__", None)
        if code is None or code.co_filename != filename:
            continue
        lines = [line for _, _, line in code.co_lines() if line is not None]
        if lines and min(lines) <= lineno <= max(lines):
            best = f"{path or type(root).__name__} ({type(module).__name__})"
            break
    return best
