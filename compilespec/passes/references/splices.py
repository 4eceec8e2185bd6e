"""References of the splicing passes, in the order of the pipeline."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, fx

from compilespec.errors import PassError
from compilespec.methods.capabilities import FINAL_NORM
from compilespec.passes.context import PassContext
from compilespec.passes.references.base import AttentionCall, Before, Case, Values
from compilespec.passes.references.dense_attention import dense_attention
from compilespec.passes.references.kept_masks import MASK_CACHES
from compilespec.passes.references.placement import place_call
from compilespec.passes.references.recurrent_state import recurrent_layers, target_progress
from compilespec.passes.references.trees import path_attention, topology, unwritten
from compilespec.program import markers
from compilespec.tracing.structure import (
    is_float,
    layer_of,
    layer_prefix,
    num_decoder_layers,
    shape_of,
)


def tap_hidden_states(before: Before, ctx: PassContext, case: Case) -> Values:
    """hs[k] is what the first node of layer k reads; hs[n] what the first node after them reads."""
    values = before(case.inputs)
    taps = {
        f"aux.{index}": values.nodes[_entering(before.graph, layer)]
        for index, layer in enumerate(ctx.drafter.aux_layers)
    }
    return dataclasses.replace(values, roles={**values.roles, **taps})


def _entering(graph: fx.Graph, layer: int) -> str:
    """Name of the hidden state that enters `layer`, seen from its readers."""
    if layer == FINAL_NORM:
        products = [n for n in graph.nodes if "linear" in str(n.target) and len(n.args) > 1]
        return str(products[-1].args[0])
    prefix, num_layers = layer_prefix(graph) or "", num_decoder_layers(graph)
    layers = {node: layer_of(node, prefix) for node in graph.nodes}
    last_in_layers = [node for node in graph.nodes if layers[node] == num_layers - 1][-1:]
    past_end = False
    for node in graph.nodes:
        past_end = past_end or node in last_in_layers
        inside = layers[node] == layer if layer < num_layers else past_end and layers[node] is None
        if not inside:
            continue
        for source in node.all_input_nodes:
            from_outside = layers[source] != layers[node]
            if from_outside and is_float(source) and len(shape_of(source) or ()) == 3:
                return source.name
    raise PassError(f"no node of layer {layer} reads a hidden state made before it")


def read_state(before: Before, ctx: PassContext, case: Case) -> Values:
    """The graph before, run on the ids and positions that plain Python reads from the state."""
    placed = place_call(ctx.config, case)
    own = {"input_ids": placed.ids, "position_ids": placed.tokens.position}
    values = before({**case.inputs, **own})
    roles = {"ids": placed.ids, **placed.roles()}
    if placed.paths:
        roles |= topology(placed, ctx.config.num_draft_tokens)
    return dataclasses.replace(values, roles={**values.roles, **roles})


def narrow_logits(before: Before, ctx: PassContext, case: Case) -> Values:
    """The logits of each request's last row."""
    values = before(case.inputs)
    wide_1TV = values.outputs["logits"]
    rows = [wide_1TV[0, last] for last in case.inputs["last_R"].tolist()]
    logits = torch.stack(rows).unsqueeze(0)
    return dataclasses.replace(
        values, outputs={"logits": logits}, roles={**values.roles, "logits": logits}
    )


def insert_paged_attention(before: Before, ctx: PassContext, case: Case) -> Values:
    """Stateless attention over the dense history of each row."""
    placed = place_call(ctx.config, case)
    tokens = placed.tokens
    caches = {
        name: tensor.clone()
        for name, tensor in case.inputs.items()
        if name.startswith("cache.") and not name.startswith(MASK_CACHES)
    }
    ahead_T, in_windows = case.inputs.get("ahead_T"), ctx.config.features.ahead_in_windows
    attend = dense_attention(
        caches, "target", tokens, case.inputs["block_table_RM"], ahead_T, in_windows=in_windows
    )
    ahead = tokens
    if ahead_T is not None:
        ahead = dataclasses.replace(tokens, position=tokens.position + ahead_T)
    if placed.paths:
        attend = path_attention(caches, "target", ctx.config, case.inputs, placed)
        tokens = ahead = unwritten(tokens)
    values = before(case.inputs, {"attention": attend})
    windows = [int(str(marker.args[4])) for marker in markers(ctx.target.graph_module)]
    calls = [
        AttentionCall(
            cache=f"cache.target.{layer}.key", tokens=ahead if window or not in_windows else tokens
        )
        for layer, window in enumerate(windows)
    ]
    return dataclasses.replace(values, buffers={**values.buffers, **caches}, calls=calls)


def insert_recurrent_state(before: Before, ctx: PassContext, case: Case) -> Values:
    """Each request's tokens, one after the other, from the state that its row holds."""
    tokens, progress = place_call(ctx.config, case).tokens, target_progress(ctx, case)
    buffers = {
        name: tensor.clone()
        for name, tensor in case.inputs.items()
        if name.startswith(("recurrence.target.", "causal_conv.target."))
    }
    values = before(case.inputs, recurrent_layers(buffers, "target", tokens, progress))
    buffers["absorbed_R"] = case.inputs["absorbed_R"].clone()
    for row, count in progress.committed.items():
        buffers["absorbed_R"][row] = count
    return dataclasses.replace(values, buffers={**values.buffers, **buffers})


def output_hidden_states(before: Before, ctx: PassContext, case: Case) -> Values:
    """All taps, concatenated in order."""
    values = before(case.inputs)
    hidden = _beside(values, ctx)
    name = "hidden_BSE" if case.phase == "decode" else "hidden_1TE"
    return dataclasses.replace(
        values,
        outputs={**values.outputs, name: hidden},
        roles={**values.roles, "hidden": hidden},
    )


def output_head_input(before: Before, ctx: PassContext, case: Case) -> Values:
    """The head's input of all rows, before the gather."""
    values = before(case.inputs)
    gathered = next(node for node in before.graph.nodes if node.target == "index_select")
    hidden = values.nodes[str(gathered.args[0])]
    return dataclasses.replace(values, outputs={**values.outputs, "head_input_1TD": hidden})


def _beside(values: Values, ctx: PassContext) -> Tensor:
    taps = [values.roles[f"aux.{index}"] for index in range(len(ctx.drafter.aux_layers))]
    aux = taps[0].new_empty((*taps[0].shape[:-1], sum(tap.shape[-1] for tap in taps)))
    end = 0
    for tap in taps:
        begin, end = end, end + tap.shape[-1]
        aux[..., begin:end] = tap
    return aux


def shift_hidden_states(before: Before, ctx: PassContext, case: Case) -> Values:
    """Each hidden state's next token: the target's choice, the prompt's, or the sampled one."""
    values = before(case.inputs)
    target = values.roles["target"].tolist()
    if case.phase == "decode":
        ids = target
    else:
        owner = case.inputs["owner_T"].tolist()
        following = case.inputs["next_T"].tolist()
        ids = [[target[o][0] if t < 0 else t for t, o in zip(following, owner, strict=True)]]
    aux = _beside(values, ctx)
    ids_tensor = torch.tensor(ids, dtype=torch.int32, device=aux.device)
    return dataclasses.replace(values, roles={**values.roles, "draft_ids": ids_tensor, "aux": aux})


def commit_state(before: Before, ctx: PassContext, case: Case) -> Values:
    """Bonus token, drafts and new length of every live row; other rows are unchanged."""
    values = before(case.inputs)
    placed = place_call(ctx.config, case)
    tokens_RS, seq_len_R = (case.inputs[name].clone() for name in ("tokens_RS", "seq_len_R"))
    target, drafts = values.roles["target"].tolist(), values.roles.get("drafts")
    counts = values.roles["num_emitted"].tolist()
    for index, row in enumerate(placed.row_index.tolist()):
        if not placed.live[index]:
            continue
        length = int(placed.start[index])
        bonus = target[index][0]
        if case.phase == "decode":
            bonus = target[index][counts[index] - 1]
            length = min(length + counts[index], ctx.config.max_seq_len)
        tokens = [bonus, *(drafts[index].tolist() if drafts is not None else ())]
        tokens_RS[row] = torch.tensor(tokens, dtype=tokens_RS.dtype)
        seq_len_R[row] = length
    written = {"tokens_RS": tokens_RS, "seq_len_R": seq_len_R}
    if "parents" in values.roles:
        written["parents_RS"] = case.inputs["parents_RS"].clone()
        for index, row in enumerate(placed.row_index.tolist()):
            if placed.live[index]:
                written["parents_RS"][row] = values.roles["parents"][index]
    return dataclasses.replace(values, buffers={**values.buffers, **written})


__all__ = [
    "commit_state",
    "insert_paged_attention",
    "insert_recurrent_state",
    "narrow_logits",
    "output_head_input",
    "output_hidden_states",
    "read_state",
    "shift_hidden_states",
    "tap_hidden_states",
]
