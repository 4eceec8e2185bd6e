"""Every pass made wrong in one place: verification must see it, bisection must name it.

`python -m pytest tests/inspect/test_faults.py -m "" -s` prints the table of faults and what caught
each; a default run plants one fault a pass.  A fault that the stage contracts refuse outright is
planted again with the contracts off, so that every row is judged by all three.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from compilespec import DraftTree
from compilespec.errors import PassError
from compilespec.inspect.bisect import BisectReport, bisect
from compilespec.inspect.stages import context_of, pass_stages, with_graphs
from compilespec.inspect.verify import make_cases, verify
from compilespec.inspect.verify_report import VerifyReport
from compilespec.methods.eagle3 import random_head
from compilespec.methods.registry import get_method
from compilespec.passes import order, runner
from compilespec.passes.context import PassContext
from compilespec.passes.graph.nodes import (
    find_role,
    get_outputs,
    output_node,
    set_outputs,
    snapshot,
)
from compilespec.passes.order import ATEN_PASSES, SPLICE_PASSES, rewrite_phase
from compilespec.passes.splice.acceptance.options import resolve_acceptance
from compilespec.passes.splice.add_adapters import adapted
from compilespec.passes.splice.add_deep_rows import with_features
from compilespec.passes.splice.builder import Splice
from compilespec.passes.splice.logits_processor import LogitsProcessor
from compilespec.passes.splice.read_embeds import merged
from compilespec.passes.splice.trim_draft_head import KEPT_IDS
from compilespec.program import (
    LONG_ROPE,
    AdapterShape,
    ByStep,
    Phase,
    ProgramConfig,
    RequestFeatures,
    SpecProgram,
    TreeShape,
    markers,
)
from compilespec.tracing.load import load_target
from compilespec.tracing.target import trace_target
from compilespec.tracing.target_info import describe_target
from tests.families import check as families
from tests.support import images
from tests.support.documents import PAGES
from tests.support.hand_graphs import emit, reading
from tests.support.models import VOCAB, long_rope_target, tiny_target

Edit = Callable[[fx.GraphModule, PassContext], Any]
ATEN = torch.ops.aten
PAGED = torch.ops.compilespec.paged_attention.default
PACKED = torch.ops.compilespec.packed_linear.default
SPARSE = "deepseek_v32"  # an indexer chooses the keys of each layer
SLOT, ROW, POSITION = 5, 6, 7  # arguments of paged attention
CONFIG = ProgramConfig(
    num_draft_tokens=3, max_batch_size=5, max_seq_len=26, max_prefill_tokens=64,
    block_size=4, num_blocks=35, vocab_size=VOCAB, dtype=torch.float64, device=torch.device("cpu"),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One pass, wrong in one place."""

    pass_name: str
    what: str
    phase: Phase
    edit: Edit  # runs right after the pass
    step: str = ""  # of `NEEDS`, where the pass's own is another step

    def __str__(self) -> str:
        return f"{self.pass_name}-{self.what.replace(' ', '-')}"


@dataclass(frozen=True, kw_only=True)
class Row:
    """What caught a fault."""

    fault: Fault
    contract: str  # "" where the contracts have nothing against it
    verify: VerifyReport
    bisect: BisectReport

    def cells(self) -> tuple[str, ...]:
        (check,), node, bisected = self.verify.failed, self.bisect.node, self.bisect
        sizes = ", ".join(map(str, bisected.wrong_batch_sizes))
        return (
            self.fault.pass_name, self.fault.what, self.fault.phase,
            "refused" if self.contract else "-",
            check.mismatches[0].value,
            f"{bisected.pass_name}: {node.name if node else '?'}, batch sizes {sizes}",
        )  # fmt: skip


# --- the step that is made wrong ---


@functools.cache
def parts(family: str) -> Any:
    if family == SPARSE:
        model = families.build(family, num_layers=2)
    elif family in images.FAMILIES:
        model = images.tiny_images_target(family)
    elif family == LONG_ROPE:
        model = long_rope_target("llama")
    else:
        model = tiny_target(family, torch.float64, num_layers=2)
    target = trace_target(model, offsets=True, longest=CONFIG.max_seq_len, by_request=True)
    info = describe_target(target, load_target(model))
    drafter = random_head(info, aux_layers=(0, 1, 2), num_draft_tokens=3).eval()
    return target, drafter.capture(CONFIG, info)


def halved(logits_BSV: Tensor) -> Tensor:
    return logits_BSV / 2


# What a pass needs to run at all.
NEEDS: dict[str, dict[str, Any]] = {
    "process_logits": {"logits_processor": LogitsProcessor(halved)},
    "output_head_input": {"features": RequestFeatures(prompt_logprobs=True)},
    "trim_draft_head": {"draft_ids": torch.arange(0, VOCAB, 3)},
    "absorb_latents": {"family": "deepseek_v3"},
    "insert_cached_keys": {
        "family": SPARSE,
        "prefills_one": True,
        "vocab_size": families.VOCAB,
    },
    "read_embeds": {"features": RequestFeatures(prompt_embeds=True)},
    "read_rope_offsets": {"family": "qwen2_5_vl"},
    "add_deep_rows": {"family": "qwen3_vl", "features": RequestFeatures(prompt_embeds=True)},
    "read_long_rope": {"family": LONG_ROPE},
    "tokens that see later ones": {"sees_ahead": True},
    "add_adapters": {
        "adapters": AdapterShape(
            num_places=3,
            rank=4,
            modules=("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"),
        ),
    },
    "keep_path": {"tree": TreeShape(depth=3, num_nodes=7, top_k=2)},
    "report_evidence": {"most": 5},
    "rejection along a tree": {
        "tree": DraftTree(choices=[(0,), (2,), (0, 0), (0, 1), (1,), (1, 0), (0, 0, 0)]).shape,
        "acceptance": resolve_acceptance("rejection"),
    },
}


def build(
    phase: Phase, *, keep_graphs: bool = True, family: str = "mistral",
    most: int | None = None, **needs: Any,
) -> SpecProgram:  # fmt: skip
    """One phase, spliced; the retrace and what follows run when they are asked for.  Mistral has
    a window.  `most`: the largest of several K.
    """
    target, draft = parts(family)
    sizes = {field.name for field in dataclasses.fields(ProgramConfig)} & needs.keys()
    of_config = {name: needs.pop(name) for name in sizes}
    several = () if most is None else (CONFIG.num_draft_tokens, most)
    config = dataclasses.replace(CONFIG, several=several, **of_config)
    capabilities = get_method("eagle3").capabilities
    capabilities = dataclasses.replace(capabilities, outputs_hidden_states=True)  # every pass runs
    ctx = PassContext(
        phase=phase, config=config, capabilities=capabilities, target=target,
        draft=draft, drafter=reading(aux_layers=(0, 1, 2)), **needs,
    )  # fmt: skip
    graph = rewrite_phase(ctx, keep_graphs=keep_graphs)
    return SpecProgram(
        target=target, capabilities=capabilities, config=config, graphs=ByStep([graph]),
        buffers=tuple(ctx.buffers.values()), weights=ctx.weights,
    )  # fmt: skip


def plant(patch: pytest.MonkeyPatch, fault: Fault) -> None:
    """The pass does its work, then one thing wrong."""
    if fault.pass_name == "to_aten":
        patch.setattr(order, "to_aten", _wrong_retrace(fault.edit, order.to_aten))
        return
    for name, passes in (("SPLICE_PASSES", SPLICE_PASSES), ("ATEN_PASSES", ATEN_PASSES)):
        entries = [
            dataclasses.replace(entry, run=_wrong_pass(fault.edit, entry.run))
            if entry.name == fault.pass_name
            else entry
            for entry in passes
        ]
        patch.setattr(order, name, tuple(entries))


def _wrong_pass(edit: Edit, run: Any) -> Any:
    @functools.wraps(run)
    def wrong(step: Splice) -> int:
        count = run(step)
        edit(step.gm, step.ctx)
        return count

    return wrong


def _wrong_retrace(edit: Edit, run: Any) -> Any:
    def wrong(gm: fx.GraphModule, ctx: PassContext, *, keep_graphs: bool = False) -> Any:
        aten, record = run(gm, ctx, keep_graphs=keep_graphs)
        edit(aten, ctx)
        aten.recompile()
        return aten, dataclasses.replace(record, after=snapshot(aten.graph))

    return wrong


@functools.cache
def catch(fault: Fault) -> Row:
    """Plant a fault, and see who finds it."""
    with pytest.MonkeyPatch.context() as patch:
        plant(patch, fault)
        contract, needs = "", NEEDS.get(fault.step or fault.pass_name, {})
        try:
            graph = build(fault.phase, **needs).graphs[fault.phase]
            if fault.pass_name not in {entry.name for entry in SPLICE_PASSES}:
                graph.step  # noqa: B018
        except PassError as error:
            contract = str(error)
            patch.setattr(runner, "check_contracts", lambda *args, **options: None)
            patch.setattr(runner, "_check_count", lambda *args: None)
        program = build(fault.phase, **needs)
        report = verify(program, batch_sizes=(CONFIG.max_batch_size,), fail_fast=True)
        return Row(fault=fault, contract=contract, verify=report, bisect=bisect(program))


# --- edits ---


def other_rows_keys(gm: fx.GraphModule, ctx: PassContext) -> None:
    for node in gm.graph.find_nodes(
        op="call_function", target=torch.ops.compilespec.write_cache.default
    ):
        slot = emit(gm, lambda slot_BS: slot_BS.roll(1, 1), node.args[4], before=node)
        node.args = (*node.args[:4], slot)


def other_rows_hidden(gm: fx.GraphModule, ctx: PassContext) -> None:
    taken = find_role(gm, "aux.0")
    del taken.meta["role"]
    other = emit(gm, lambda x_BPD: x_BPD.roll(1, 1), taken, before=output_node(gm))
    other.meta["role"] = "aux.0"


def paged(gm: fx.GraphModule, owner: str) -> list[fx.Node]:
    """Paged attention over the caches of `owner`, in order."""
    calls = gm.graph.find_nodes(op="call_function", target=PAGED)
    return [node for node in calls if node.args[3].meta["role"].startswith(f"cache.{owner}.")]


def change(node: fx.Node, index: int, value: Any) -> None:
    node.update_arg(index, value)


def changed(gm: fx.GraphModule, node: fx.Node, index: int, function: Callable[[Any], Any]) -> None:
    """Argument `index` of `node` becomes a function of what it was."""
    change(node, index, emit(gm, function, node.args[index], before=node))


def swap(first: fx.Node, second: fx.Node, *indices: int) -> None:
    for index in indices:
        one, other = first.args[index], second.args[index]
        change(first, index, other)
        change(second, index, one)


def scale_changed(gm: fx.GraphModule, ctx: PassContext) -> None:
    change(markers(gm)[1], 3, markers(gm)[1].args[3] * 2)


def later_layer_tapped(gm: fx.GraphModule, ctx: PassContext) -> None:
    first, second = find_role(gm, "aux.0"), find_role(gm, "aux.1")
    first.meta["role"], second.meta["role"] = "aux.1", "aux.0"


def normed_stream_tapped(gm: fx.GraphModule, ctx: PassContext) -> None:
    """What the layer's norm makes of the stream, in place of the stream."""
    tap = find_role(gm, "aux.1")
    normed = emit(gm, lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True)), tap,
                  before=tap.next)  # fmt: skip
    normed.meta |= {"role": tap.meta.pop("role"), "example": tap.meta["example"]}


def role_changed(role: str, function: Callable[[Any], Any]) -> Edit:
    """Everybody who reads the role reads a function of it instead."""

    def edit(gm: fx.GraphModule, ctx: PassContext) -> None:
        node = find_role(gm, role)
        wrong = emit(gm, function, node, before=node.next)
        made = set(wrong.all_input_nodes) | {wrong}
        node.replace_all_uses_with(wrong, lambda user: user not in made and not _feeds(user, wrong))
        wrong.meta["role"] = node.meta.pop("role")
        if "example" in node.meta:
            wrong.meta["example"] = node.meta["example"]

    return edit


def _feeds(node: fx.Node, other: fx.Node) -> bool:
    frontier = [other]
    while frontier:
        for source in frontier.pop().all_input_nodes:
            if source is node:
                return True
            if source.op != "placeholder":
                frontier.append(source)
    return False


def owner_ignored(gm: fx.GraphModule, ctx: PassContext) -> None:
    """Every chunk's end gets the first prompt's token."""
    wrong = emit(gm, lambda following, target: torch.where(
        following < 0, target[0, 0], following).clamp(min=0).unsqueeze(0),
        find_role(gm, "next_T"), find_role(gm, "target"), before=find_role(gm, "draft_ids").next,
    )  # fmt: skip
    old = find_role(gm, "draft_ids")
    wrong.meta["role"] = old.meta.pop("role")


def other_rows_given(gm: fx.GraphModule, ctx: PassContext) -> None:
    (node,) = gm.graph.find_nodes(op="call_function", target=merged)
    changed(gm, node, 1, lambda given: given.roll(1, 0))


def features_of_other_tokens(gm: fx.GraphModule, ctx: PassContext) -> None:
    node = gm.graph.find_nodes(op="call_function", target=with_features)[1]
    changed(gm, node, 2, lambda given: given.roll(1, 0))


def axes_turned(gm: fx.GraphModule, ctx: PassContext) -> None:
    """Width stands for time, and time for width."""
    node = next(n for n in gm.graph.nodes if n.target is torch.stack and len(n.args[0]) == 3)
    change(node, 0, tuple(reversed(node.args[0])))


def offsets_of_the_next_row(gm: fx.GraphModule, ctx: PassContext) -> None:
    (node,) = find_role(gm, "rope_delta_R").users
    changed(gm, node, 1, lambda index: index.roll(1, 0))


def lengths_of_the_next_row(gm: fx.GraphModule, ctx: PassContext) -> None:
    (node,) = find_role(gm, "long_rope_R").users
    changed(gm, node, 1, lambda index: index.roll(1, 0))


def later_tokens_hidden(gm: fx.GraphModule, ctx: PassContext) -> None:
    change(paged(gm, "target")[1], POSITION, find_role(gm, "position"))


def adapters_changed(index: int, function: Callable[[Any], Any]) -> Edit:
    def edit(gm: fx.GraphModule, ctx: PassContext) -> None:
        for node in gm.graph.find_nodes(op="call_function", target=adapted):
            changed(gm, node, index, function)

    return edit


def layers_share_a_cache(gm: fx.GraphModule, ctx: PassContext) -> None:
    change(paged(gm, "target")[1], 3, paged(gm, "target")[0].args[3])


def caches_swapped(gm: fx.GraphModule, ctx: PassContext) -> None:
    swap(*paged(gm, "target")[:2], 3, 4)


def mask_keys_changed(index: int, function: Callable[[Any], Any]) -> Edit:
    def edit(gm: fx.GraphModule, ctx: PassContext) -> None:
        op = torch.ops.compilespec.cached_keys.default
        changed(gm, gm.graph.find_nodes(op="call_function", target=op)[0], index, function)

    return edit


def argument_changed(owner: str, call: int, index: int, function: Callable[[Any], Any]) -> Edit:
    return lambda gm, ctx: changed(gm, paged(gm, owner)[call], index, function)


def window_dropped(gm: fx.GraphModule, ctx: PassContext) -> None:
    change(paged(gm, "target")[1], 10, 0)


def residual_of_the_next_row(gm: fx.GraphModule, ctx: PassContext) -> None:
    taken = [n for n in gm.graph.nodes if n.target == "gather" and n.args[1] == 1][-1]
    changed(gm, taken, 2, lambda index: (index + 1).clamp(max=CONFIG.num_draft_tokens))


def any_match_counts(gm: fx.GraphModule, ctx: PassContext) -> None:
    """A draft counts although one before it was refused."""
    first_refused = next(n for n in gm.graph.nodes if n.target == "amin")
    first_refused.target = "amax"


def follows_the_root(gm: fx.GraphModule, ctx: PassContext) -> None:
    """After any acceptance, the next token is judged and drawn as after the root."""
    op = torch.ops.compilespec.filtered_probs.default
    (probs,) = gm.graph.find_nodes(op="call_function", target=op)
    for column in list(probs.users):
        change(column, 1, (slice(None), 0))


def rejected_emitted(gm: fx.GraphModule, ctx: PassContext) -> None:
    outputs = get_outputs(gm)
    set_outputs(gm, outputs | {"emitted_BS": find_role(gm, "target")})


def unfinished_emitted(gm: fx.GraphModule, ctx: PassContext) -> None:
    rejected_emitted(gm, ctx)


def one_draft_more(gm: fx.GraphModule, ctx: PassContext) -> None:
    outputs = get_outputs(gm)
    wrong = emit(gm, lambda x: x + 256, outputs["outcome_B"], before=output_node(gm))
    set_outputs(gm, outputs | {"outcome_B": wrong})


def role_rolled(role: str) -> Edit:
    """The node that plays a role, and its output if it is one, are rolled by one."""

    def edit(gm: fx.GraphModule, ctx: PassContext) -> None:
        node = find_role(gm, role)
        wrong = emit(gm, lambda x: x.roll(1, -1), node, before=output_node(gm))
        wrong.meta["role"] = node.meta.pop("role")
        outputs = get_outputs(gm)
        set_outputs(gm, {name: wrong if one is node else one for name, one in outputs.items()})

    return edit


def taps_reversed(gm: fx.GraphModule, ctx: PassContext) -> None:
    node = find_role(gm, "aux")
    change(node, 0, tuple(reversed(node.args[0])))


def unshifted(gm: fx.GraphModule, ctx: PassContext) -> None:
    """The drafter reads the tokens at the hidden states' own positions."""
    find_role(gm, "draft_ids").replace_input_with(find_role(gm, "target"), find_role(gm, "ids"))


def stale_pass(index: int) -> Edit:
    """A single pass takes this argument of the pass before it."""

    def edit(gm: fx.GraphModule, ctx: PassContext) -> None:
        calls = paged(gm, "draft")
        change(calls[2], index, calls[1].args[index])

    return edit


def gathers(gm: fx.GraphModule) -> list[fx.Node]:
    """The gathers of the drafter's committed rows."""
    first, second = paged(gm, "draft")[:2]
    between = list(gm.graph.nodes)
    between = between[between.index(first) : between.index(second)]
    return [node for node in between if node.target in ("gather", "index_select")]


def wrong_row_gathered(gm: fx.GraphModule, ctx: PassContext) -> None:
    """One row too late: the first rejected one, or the next request's first."""
    node = gathers(gm)[0]
    last = -1 if ctx.phase == "prefill" else CONFIG.num_draft_tokens
    if ctx.phase == "prefill":
        changed(gm, node, 2, lambda index: (index + last).clamp(min=0))
    else:
        changed(gm, node, 2, lambda index: (index + 1).clamp(max=last))


def stale_hidden_gathered(gm: fx.GraphModule, ctx: PassContext) -> None:
    """The recycled hidden state of the wrong row, the head's row being right."""
    changed(gm, gathers(gm)[1], 2, lambda index: (index - 1).clamp(min=0))


def drafts_reversed(gm: fx.GraphModule, ctx: PassContext) -> None:
    node = find_role(gm, "drafts")
    change(node, 0, tuple(reversed(node.args[0])))


def kept_ids_read(gm: fx.GraphModule) -> list[fx.Node]:
    """Where the index of a draft's row becomes an id."""
    (table,) = (node for node in gm.graph.nodes if node.meta.get("role") == KEPT_IDS)
    return [node for node in table.users if node.target is operator.getitem]


def row_drafted(gm: fx.GraphModule, ctx: PassContext) -> None:
    """The second draft is the index of its row, not the id."""
    node = kept_ids_read(gm)[1]
    node.replace_all_uses_with(node.args[1])


def rows_draw(gm: fx.GraphModule, ctx: PassContext) -> None:
    """The noise of a sampled draft is that of its row, not of the id."""
    draw = torch.ops.compilespec.draw.default
    change(gm.graph.find_nodes(op="call_function", target=draw)[0], 2, None)


def other_rows_kept(gm: fx.GraphModule, ctx: PassContext) -> None:
    (weight,) = (n for n in gm.graph.nodes if str(n.meta.get("role")).endswith(".kept"))
    for product in list(weight.users):
        changed(gm, product, 1, lambda rows: rows.roll(1, 0))


def commits(gm: fx.GraphModule) -> tuple[fx.Node, fx.Node]:
    """The writes of tokens and of lengths."""
    first, second = (node for node in gm.graph.nodes if node.target == "index_put_")
    return first, second


def length_too_long(gm: fx.GraphModule, ctx: PassContext) -> None:
    changed(gm, commits(gm)[1], 2, lambda length: length + 1)


def limit_forgotten(gm: fx.GraphModule, ctx: PassContext) -> None:
    node = commits(gm)[1]
    clamp = node.args[2]
    assert clamp.target == "clamp"
    change(node, 2, clamp.args[0])


def tokens_rolled(gm: fx.GraphModule, ctx: PassContext) -> None:
    changed(gm, commits(gm)[0], 2, lambda tokens: tokens.roll(1, 1))


def unfinished_committed(gm: fx.GraphModule, ctx: PassContext) -> None:
    """A chunk in the middle of a prompt commits as if it ended it."""
    rows = emit(gm, lambda row, last: row.squeeze(0)[last.long()].clamp(min=0).long(),
                find_role(gm, "row"), find_role(gm, "last_R"), before=commits(gm)[0])  # fmt: skip
    for node in commits(gm):
        change(node, 1, (rows,))


def write_dropped(gm: fx.GraphModule, ctx: PassContext) -> None:
    node = next(n for n in reversed(gm.graph.nodes) if "index_put_" in str(n.target))
    gm.graph.erase_node(node)


def addition_subtracted(gm: fx.GraphModule, ctx: PassContext) -> None:
    """An addition of two activations became a subtraction."""
    floats = [
        node
        for node in gm.graph.find_nodes(op="call_function", target=ATEN.add.Tensor)
        if node.meta["val"].is_floating_point() and len(node.all_input_nodes) == 2
    ]
    floats[1].target = ATEN.sub.Tensor


def other_scalar_merged(gm: fx.GraphModule, ctx: PassContext) -> None:
    """Two sums with different numbers are taken for the same."""
    sums: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.find_nodes(op="call_function", target=ATEN.add.Tensor):
        if isinstance(node.args[1], int):
            first = sums.setdefault(node.args[0], node)
            if first is not node:
                node.replace_all_uses_with(first)
                return


def rows_swapped(gm: fx.GraphModule, ctx: PassContext) -> None:
    """The merged weight's parts in the other order."""
    spec = next(s for s in ctx.inputs.values() if len(s.sources) == 2)
    wrong = dataclasses.replace(spec, sources=tuple(reversed(spec.sources)))
    ctx.inputs[spec.name] = wrong


def worst_token_taken(gm: fx.GraphModule, ctx: PassContext) -> None:
    """The head's best token became its worst."""
    gm.graph.find_nodes(op="call_function", target=ATEN.argmax.default)[
        0
    ].target = ATEN.argmin.default


def left_unpacked(gm: fx.GraphModule, ctx: PassContext) -> None:
    """A packed product is given the plain weight's rows, in panels."""
    spec = next(s for s in ctx.inputs.values() if s.packed)
    ctx.inputs[spec.name] = dataclasses.replace(spec, packed=False)


def products_swapped(gm: fx.GraphModule, ctx: PassContext) -> None:
    """Two products of the same shape take each other's weight."""
    nodes = gm.graph.find_nodes(op="call_function", target=PACKED)
    first = nodes[0]
    same = [n for n in nodes if n is not first and n.args[1] is not first.args[1]
            and n.args[1].meta["val"].shape == first.args[1].meta["val"].shape]  # fmt: skip
    swap(first, same[0], 1)


def _multiplied(gm: fx.GraphModule) -> list[fx.Node]:
    op = torch.ops.compilespec.head_linear.default
    return list(gm.graph.find_nodes(op="call_function", target=op))


def halves_swapped(gm: fx.GraphModule, ctx: PassContext) -> None:
    """Keys take their columns of the product where values have theirs."""
    columns = _multiplied(gm)[0].args[1]
    first = columns.args[1][1]
    width = columns.args[0].args[2]
    change(columns, 1, (slice(None), slice(width - first.stop, width)))


def rope_first(gm: fx.GraphModule, ctx: PassContext) -> None:
    """The cache's order in the keys, another one in the queries."""
    query = markers(gm)[0].args[0].args[0]
    change(query, 0, list(reversed(query.args[0])))


def padding_clamped(gm: fx.GraphModule, ctx: PassContext) -> None:
    """A slot of -1, which writes nothing, is bounded to 0, which belongs to somebody."""
    node = paged(gm, "target")[0]
    slot = node.args[SLOT]
    with gm.graph.inserting_before(node):
        wrong = gm.graph.call_function(ATEN.clamp.default, (slot, 0))
    wrong.meta["val"] = slot.meta["val"]
    change(node, SLOT, wrong)


FAULTS = (
    Fault(pass_name="check_markers", what="changes a scale", phase="decode", edit=scale_changed),
    Fault(pass_name="absorb_latents", what="halves swapped", phase="decode", edit=halves_swapped),
    Fault(pass_name="absorb_latents", what="rope first", phase="prefill", edit=rope_first),
    Fault(pass_name="tap_hidden_states", what="wrong tap layer", phase="decode",
          edit=later_layer_tapped),
    Fault(pass_name="tap_hidden_states", what="tap after the norm", phase="prefill",
          edit=normed_stream_tapped),
    Fault(pass_name="read_state", what="stale position", phase="decode",
          edit=role_changed("position", lambda x: (x - 1).clamp(min=0))),
    Fault(pass_name="read_state", what="slot off by one", phase="decode",
          edit=role_changed("slot", lambda x: x + 1)),
    Fault(pass_name="read_state", what="padded rows are row 0", phase="decode",
          edit=role_changed("row", lambda x: x.clamp(min=0))),
    Fault(pass_name="read_state", what="start one early", phase="prefill",
          edit=role_changed("start", lambda x: x - 1)),
    Fault(pass_name="read_rope_offsets", what="axes turned", phase="prefill", edit=axes_turned),
    Fault(pass_name="read_rope_offsets", what="offsets of the next row", phase="decode",
          edit=offsets_of_the_next_row),
    Fault(pass_name="read_long_rope", what="tables of the next row", phase="decode",
          edit=lengths_of_the_next_row),
    Fault(pass_name="read_embeds", what="rows of other tokens", phase="prefill",
          edit=other_rows_given),
    Fault(pass_name="add_deep_rows", what="features of other tokens", phase="prefill",
          edit=features_of_other_tokens),
    Fault(pass_name="add_adapters", what="adapter of the next request", phase="decode",
          edit=adapters_changed(2, lambda keeps: keeps.roll(1, 0))),
    Fault(pass_name="add_adapters", what="columns of the next slot", phase="prefill",
          edit=adapters_changed(4, lambda up: up.roll(4, 1))),
    Fault(pass_name="narrow_logits", what="wrong last_R", phase="prefill",
          edit=lambda gm, ctx: changed(
              gm, next(n for n in gm.graph.nodes if n.target == "index_select"), 2,
              lambda last: (last - 1).clamp(min=0))),
    Fault(pass_name="insert_cached_keys", what="keys of another row", phase="decode",
          edit=mask_keys_changed(3, lambda row: row.roll(1, 0))),
    Fault(pass_name="insert_cached_keys", what="stale keys", phase="decode",
          edit=mask_keys_changed(2, lambda slot: torch.where(slot > 0, -1, slot))),
    Fault(pass_name="insert_paged_attention", what="dropped KV write", phase="decode",
          edit=argument_changed("target", 1, SLOT, lambda slot: torch.where(slot > 0, -1, slot))),
    Fault(pass_name="insert_paged_attention", what="later tokens hidden", phase="prefill",
          edit=later_tokens_hidden, step="tokens that see later ones"),
    Fault(pass_name="insert_paged_attention", what="stale position", phase="decode",
          edit=argument_changed("target", 0, POSITION, lambda x: (x - 1).clamp(min=0))),
    Fault(pass_name="insert_paged_attention", what="window dropped", phase="prefill",
          edit=window_dropped),
    Fault(pass_name="insert_paged_attention", what="caches swapped", phase="decode",
          edit=caches_swapped),
    Fault(pass_name="insert_paged_attention", what="layers share a cache", phase="decode",
          edit=layers_share_a_cache),
    Fault(pass_name="splice_acceptance", what="counts past a refused draft", phase="decode",
          edit=any_match_counts),
    Fault(pass_name="splice_acceptance", what="emits refused drafts", phase="decode",
          edit=rejected_emitted),
    Fault(pass_name="splice_acceptance", what="distributions of the root", phase="decode",
          edit=follows_the_root, step="rejection along a tree"),
    Fault(pass_name="splice_acceptance", what="emits for unfinished prompts", phase="prefill",
          edit=unfinished_emitted),
    Fault(pass_name="output_hidden_states", what="states rolled", phase="decode",
          edit=role_rolled("hidden")),
    Fault(pass_name="process_logits", what="logits rolled", phase="decode",
          edit=role_rolled("logits")),
    Fault(pass_name="process_logits", what="logits rolled", phase="prefill",
          edit=role_rolled("logits")),
    Fault(pass_name="output_head_input", what="input rolled", phase="prefill",
          edit=role_rolled("head_input")),
    Fault(pass_name="shift_hidden_states", what="no shift", phase="decode", edit=unshifted),
    Fault(pass_name="shift_hidden_states", what="taps reversed", phase="decode",
          edit=taps_reversed),
    Fault(pass_name="shift_hidden_states", what="owner ignored", phase="prefill",
          edit=owner_ignored),
    Fault(pass_name="splice_draft_loop", what="wrong gather row", phase="decode",
          edit=wrong_row_gathered),
    Fault(pass_name="splice_draft_loop", what="wrong last_R", phase="prefill",
          edit=wrong_row_gathered),
    Fault(pass_name="splice_draft_loop", what="stale hidden state", phase="decode",
          edit=stale_hidden_gathered),
    Fault(pass_name="splice_draft_loop", what="stale position", phase="decode",
          edit=stale_pass(POSITION)),
    Fault(pass_name="splice_draft_loop", what="stale slot", phase="prefill",
          edit=stale_pass(SLOT)),
    Fault(pass_name="splice_draft_loop", what="dropped KV write", phase="decode",
          edit=argument_changed("draft", 1, SLOT, lambda slot: torch.where(slot > 0, -1, slot))),
    Fault(pass_name="splice_draft_loop", what="drafts reversed", phase="decode",
          edit=drafts_reversed),
    Fault(pass_name="report_evidence", what="counts one draft more", phase="decode",
          edit=one_draft_more),
    Fault(pass_name="trim_draft_head", what="drafts a row", phase="decode", edit=row_drafted),
    Fault(pass_name="trim_draft_head", what="draws with noise of rows", phase="decode",
          edit=rows_draw),
    Fault(pass_name="trim_draft_head", what="keeps other rows", phase="prefill",
          edit=other_rows_kept),
    Fault(pass_name="keep_path", what="keys of other rows", phase="decode", edit=other_rows_keys),
    Fault(pass_name="keep_path", what="hidden states of other rows", phase="decode",
          edit=other_rows_hidden),
    Fault(pass_name="commit_state", what="commits n+1", phase="decode", edit=length_too_long),
    Fault(pass_name="commit_state", what="limit forgotten", phase="decode",
          edit=limit_forgotten),
    Fault(pass_name="commit_state", what="tokens rolled", phase="decode", edit=tokens_rolled),
    Fault(pass_name="commit_state", what="unfinished prompts commit", phase="prefill",
          edit=unfinished_committed),
    Fault(pass_name="commit_state", what="write dropped", phase="decode", edit=write_dropped),
    Fault(pass_name="narrow_rows", what="residual of the next row", phase="decode",
          edit=residual_of_the_next_row),
    Fault(pass_name="lower_quantized", what="counts past a refused draft", phase="decode",
          edit=any_match_counts),
    Fault(pass_name="to_aten", what="adds where it subtracts", phase="decode",
          edit=addition_subtracted),
    Fault(pass_name="cleanup", what="merges different scalars", phase="decode",
          edit=other_scalar_merged),
    Fault(pass_name="cleanup", what="drops a write", phase="decode", edit=write_dropped),
    Fault(pass_name="merge_projections", what="swapped projection rows", phase="decode",
          edit=rows_swapped),
    Fault(pass_name="fuse_head_argmax", what="worst token", phase="decode",
          edit=worst_token_taken),
    Fault(pass_name="read_long_rows", what="worst token", phase="decode", edit=worst_token_taken),
    Fault(pass_name="prepack_linears", what="unpacked weight order", phase="decode",
          edit=left_unpacked),
    Fault(pass_name="prepack_linears", what="weights swapped", phase="decode",
          edit=products_swapped),
    Fault(pass_name="bound_positions", what="bounds -1 to 0", phase="decode",
          edit=padding_clamped),
    Fault(pass_name="check_mutations", what="drops a write", phase="decode", edit=write_dropped),
)  # fmt: skip


def _is_first(fault: Fault) -> bool:
    return fault is next(other for other in FAULTS if other.pass_name == fault.pass_name)


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, id=str(fault), marks=() if _is_first(fault) else pytest.mark.slow)
        for fault in FAULTS
    ],
)
def test_a_planted_fault_is_caught_and_named(fault: Fault) -> None:
    row = catch(fault)
    if row.contract:
        assert f"pass {fault.pass_name} (" in row.contract
    assert [check.pass_name for check in row.verify.failed] == [fault.pass_name]
    assert row.verify.failed[0].mismatches
    assert row.bisect.pass_name == fault.pass_name
    assert row.bisect.node is not None
    assert row.bisect.wrong_batch_sizes
    assert not row.bisect.ok


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_without_a_fault_masks_of_cached_keys_agree(phase: Phase) -> None:
    report = verify(build(phase, **NEEDS["insert_cached_keys"]), batch_sizes=(2,))
    assert report.ok, str(report)
    judged = {check.pass_name: check.against for check in report.checks}
    assert judged["insert_cached_keys"] == judged["insert_paged_attention"] == "its reference"


def test_every_pass_has_a_fault() -> None:
    known = {entry.name for entry in (*SPLICE_PASSES, *ATEN_PASSES)} | {"to_aten"}
    known -= {"insert_recurrent_state", "shard_weights"}  # their own tests have their faults
    assert {fault.pass_name for fault in FAULTS} == known


def test_the_table_of_faults() -> None:
    """Prints it; costs little after the tests above.  Each row names its pass, a value, a node and
    batch sizes.
    """
    header = ("pass", "fault", "phase", "contract", "verify: first wrong", "bisect names")
    rows = [header, *(catch(fault).cells() for fault in FAULTS)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    print()
    for row in rows:
        print("  ".join(c.ljust(width) for c, width in zip(row, widths, strict=True)).rstrip())
    for fault, row in zip(FAULTS, rows[1:], strict=True):
        assert row[:3] == (fault.pass_name, fault.what, fault.phase)
        assert row[3] in ("refused", "-")
        assert row[4], f"{fault}: verification names no value"
        named, _, rest = row[5].partition(": ")
        node, _, sizes = rest.partition(", batch sizes ")
        assert (named, bool(sizes)) == (fault.pass_name, True)
        assert node != "?", f"{fault}: bisection names no node"
    assert len({row[:3] for row in rows}) == len(rows), "two faults of one name"


def test_the_page_counts_them_and_shows_one() -> None:
    page = PAGES["docs/inspect.md"]
    assert f"plants {len(FAULTS)} faults" in page
    (fault,) = (f for f in FAULTS if str(f) == "splice_draft_loop-wrong-gather-row")
    start = page.index("pass    splice_draft_loop")
    shown = page[start : page.index("```", start)].replace(", ...", "")
    printed = str(catch(fault).bisect)
    assert [line for line in shown.splitlines() if line not in printed] == []


def test_guides_allow_the_drafts_that_match() -> None:
    """Or a fault after acceptance would be seen by luck alone: with some seeds."""
    graph = with_graphs(build("decode").graphs["decode"])
    start = next(pass_stages(graph)).before
    for seed in range(4):
        (case,) = make_cases(context_of(graph), start, batch_sizes=(5,), seed=seed)
        masks, tokens = case.inputs["mask_RSW"].tolist(), case.inputs["tokens_RS"].tolist()
        for index, row in enumerate(case.inputs["row_B"].tolist()):
            for place in range((index + 5) % 4 if row >= 0 else 0):
                word, bit = divmod(tokens[row][place + 1], 32)
                assert masks[row][place][word] >> bit & 1


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_without_a_fault_nothing_is_found(phase: Phase) -> None:
    program = build(phase, keep_graphs=False)  # the graphs are made when they are missing
    report = verify(program)
    assert report.ok, str(report)
    assert {check.pass_name for check in report.checks} >= {e.name for e in ATEN_PASSES}
    assert bisect(program).ok
