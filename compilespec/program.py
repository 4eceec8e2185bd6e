"""The records that stages hand on: frozen dataclasses that can print themselves.

    trace -> Traced -> rewrite -> SpecProgram -> lower -> Lowered -> run

A suffix gives a tensor's dimensions: `tokens_RS` is [R, S].  Its letters:

    1  a dimension of size 1; other digits are sizes, too
    A  positions of a text that a drafter is trained at
    B  requests of a call
    C  nodes of a tree that were considered; channels of a convolution; columns of a kernel's tile
    D  hidden size
    E  hidden sizes of several layers, concatenated
    F  nodes of one depth of a tree; floats of a row of sampling parameters
    G  segments of the keys in a kernel; requests that generate, in `reference_ops`
    H  head dim; heads of a recurrence
    I  rows of a tree with children; integers of a row of sampling parameters
    J  keys of one call or row
    K  drafts; inputs of a product
    L  positions up to the maximum length
    M  cache blocks of a row, masked rows of a drafter, texts of a look-up; rows of a kernel's tile
    N  heads, nodes of a tree, outputs of a product: things in a list
    O  outputs of a head's product, where N are heads
    P  rows of a path through a tree; positions that a ring keeps
    Q  queries of one state row
    R  state rows, one spare included, in names of buffers; requests of a prefill call elsewhere
    S  rows of a verify step: K + 1, or the nodes of a tree and its root
    T  tokens of a call, packed
    V  vocabulary; value dim of a recurrence
    W  rows of a drafter's window or block; words of a bit mask; what is kept of a row
    d  the depth of a level

-1 is padding everywhere: a padded request (`row_B`) reads and writes the spare state row, and a
slot of -1 is not written.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, fx

from compilespec._torch_compat import OpOverloadPacket

Phase = Literal["prefill", "decode"]
PHASES: tuple[Phase, ...] = ("prefill", "decode")
StepKind = Literal["full", "greedy", "replay"]
PAD = -1  # fills emitted tokens after the bonus token; never an id
NO_ADAPTER = -1  # the adapter place of a request without an adapter
PIECE = ".shard"  # ends the name of a rank's part of a weight
ROPE_OFFSETS = "rope_offsets"  # argument of a traced call: rotary positions minus token positions
LONG_ROPE = "is_long"  # argument: true for tokens of a request with the long rotary table
ROPE_ROWS = 3  # rotary positions a token in models with several: time, height, width
NUM_KEPT = (
    64  # drafter inputs that a row keeps in steps of K = 0; one that overran it is not drafted
)


@dataclass(frozen=True, kw_only=True)
class TracedInput:
    """One placeholder of a captured graph: a weight (by its path), a size symbol, or a call
    argument.
    """

    name: str
    kind: Literal["weight", "symbol", "argument"]


class Branch(NamedTuple):
    """A condition on the number of tokens of a call that holds in a captured graph."""

    condition: str
    """Such as "T <= 24"."""
    place: str
    """The source line that asks."""
    shorter: int
    """The largest number of tokens below the captured one for which it does not hold; 0: none."""
    longer: int
    """The number of tokens from which on it never holds; 0: none."""


@dataclass(frozen=True, kw_only=True)
class Traced:
    """One whole graph of an unmodified forward, as Dynamo gives it (torch IR)."""

    name: str  # "target", "draft.first", ...: the prefix of its weights' names
    graph_module: fx.GraphModule
    inputs: tuple[TracedInput, ...]  # in placeholder order
    weights: Mapping[str, Tensor]  # by full name, "target.model.embed_tokens.weight"
    trace_ms: float
    branches: tuple[Branch, ...] = ()  # of the call's Python code, by the number of tokens
    reused: bool = False  # true: an earlier capture of a like model was reused
    why_traced: str = ""  # otherwise the reason why none was
    expanded: Traced | None = None  # the same call before its attention was put over latents

    @property
    def num_attention_layers(self) -> int:
        return len(markers(self.graph_module))

    @property
    def num_recurrent_markers(self) -> int:
        """The number of recurrences and causal convolutions; a recurrent layer often has one of
        each.
        """
        return len(markers(self.graph_module, "recurrence", "causal_conv"))

    @property
    def has_kept_masks(self) -> bool:
        """True where attention has masks that the model computes, from what the cache holds."""
        return bool(markers(self.graph_module, "cached", "all_positions"))

    @property
    def has_rope_offsets(self) -> bool:
        """True where tokens have rotary positions beside their own."""
        return ROPE_OFFSETS in self.arguments

    @property
    def has_long_rope(self) -> bool:
        """True where a request's length decides which rotary table its tokens have."""
        return LONG_ROPE in self.arguments

    @property
    def arguments(self) -> tuple[str, ...]:
        """The names of the tensors that a call gives."""
        return tuple(entry.name for entry in self.inputs if entry.kind == "argument")

    def bind(self, **arguments: Tensor) -> list[Any]:
        """The values of a call of the graph, in placeholder order; a size symbol is a dimension of
        one of the arguments.  Offsets that are not given are 0, and requests not long.
        """
        if self.has_rope_offsets and ROPE_OFFSETS not in arguments:
            own = arguments["position_ids"]
            arguments[ROPE_OFFSETS] = own.new_zeros((ROPE_ROWS, *own.shape))
        if self.has_long_rope and LONG_ROPE not in arguments:
            own = arguments["position_ids"]
            arguments[LONG_ROPE] = own.new_zeros(own.shape, dtype=torch.bool)
        placeholders = self.graph_module.graph.find_nodes(op="placeholder")
        pairs = list(zip(placeholders, self.inputs, strict=True))
        sizes = {
            str(symbol): size
            for node, entry in pairs
            if entry.kind == "argument"
            for symbol, size in zip(
                node.meta["example_value"].shape, arguments[entry.name].shape, strict=True
            )
        }
        return [
            sizes[str(node.meta["example_value"])]
            if entry.kind == "symbol"
            else arguments.get(entry.name, self.weights.get(entry.name))
            for node, entry in pairs
        ]

    def __str__(self) -> str:
        nodes = len(self.graph_module.graph.nodes)
        return (
            f"Traced({self.name}: {nodes} nodes, {self.num_attention_layers} attention layers, "
            f"{len(self.weights)} weights, {self.trace_ms:.0f} ms)"
        )

    __repr__ = __str__


MIXERS = ("attention", "recurrence", "causal_conv")  # markers where tokens are mixed
MARKERS = (*MIXERS, "cached", "all_positions", "deep_rows")
MASK_PLACE = 8  # of a mask among the arguments of an attention marker


def marker_kind(node: fx.Node) -> str:
    """The node's kind in `MARKERS`, the stateless operators that tracing emits for what a step
    computes with caches; "" for other nodes.
    """
    packet = getattr(node.target, "overloadpacket", node.target)
    if node.op == "call_function" and isinstance(packet, OpOverloadPacket):
        namespace, _, name = packet._qualified_op_name.partition("::")
        if namespace == "compilespec" and name in MARKERS:
            return name
    return ""


def module_path(node: fx.Node) -> str:
    """The path of the module whose forward made the node, "" at the top."""
    return str((node.meta.get("custom") or {}).get("module", ""))


def markers(gm: fx.GraphModule, *kinds: str) -> list[fx.Node]:
    """The attention markers of a graph, or those of the given kinds, in execution order."""
    wanted = kinds or ("attention",)
    return [node for node in gm.graph.nodes if marker_kind(node) in wanted]


@dataclass(frozen=True, kw_only=True)
class TreeShape:
    """The size of a step's tree of drafts, and the form of a static one.  The root, the last
    emitted token, is not counted among the nodes.
    """

    depth: int  # drafts on the longest path
    num_nodes: int
    top_k: int = 0  # of a dynamic tree: nodes that are continued at each depth, and by how many
    choices: tuple[tuple[int, ...], ...] = ()  # of a static one: each node's ranks, by depth


@dataclass(frozen=True, kw_only=True)
class AdapterShape:
    """The room for LoRA adapters beside the target's products."""

    num_places: int  # adapters that can be there at once
    rank: int  # all are padded to it
    modules: tuple[str, ...]  # paths of the products that they may change


@dataclass(frozen=True, kw_only=True)
class RequestFeatures:
    """The things that requests may ask for beyond tokens: a step is built for it."""

    host_processors: bool = False  # logits processors on the host, which the step waits for
    prompt_logprobs: bool = False  # prefill outputs the head's input
    prompt_embeds: bool = False  # rows of a prompt may be embeddings
    sees_ahead: bool = False  # tokens of a prompt may see later ones: the rows of an image
    ahead_in_windows: bool = False  # they do so in layers with a window alone
    forced_drafts: bool = False  # the host may replace drafts where a guide knows the next token


@dataclass(frozen=True, kw_only=True)
class ProgramConfig:
    """The sizes of a program.  All of them are fixed when it is built; every shape follows from
    them.
    """

    num_draft_tokens: int  # K of a graph; 0 is plain decoding; of a tree its depth
    several: tuple[int, ...] = ()  # every K of a program with several, rising; (): it has one
    vocab_size: int  # of the target
    max_batch_size: int  # state rows
    max_seq_len: int  # tokens per request, prompt included
    max_prefill_tokens: int  # packed tokens of one prefill call
    block_size: int  # tokens per cache block
    num_blocks: int  # blocks of every cache
    dtype: torch.dtype
    device: torch.device
    tree: TreeShape | None = None  # of the drafts; None: they are a chain
    adapters: AdapterShape | None = None  # of the target; None: requests have none
    short_rope_limit: int | None = None  # longer requests have the long rotary table; None: all one
    prefills_one: bool = False  # true: the tokens of a prefill call are of one request
    features: RequestFeatures = RequestFeatures()

    @property
    def num_verify_tokens(self) -> int:
        """S: K + 1, or the nodes of a tree and its root."""
        return 1 + (self.tree.num_nodes if self.tree else self.num_draft_tokens)

    @property
    def num_step_tokens(self) -> int:
        """The largest number of tokens that a step emits: K + 1."""
        return self.num_draft_tokens + 1

    @property
    def num_row_tokens(self) -> int:
        """The length of a token row: S of the largest K."""
        return max(self.num_verify_tokens, 1 + self.draft_counts[-1])

    @property
    def draft_counts(self) -> tuple[int, ...]:
        """Every K that a step of the program may have, rising."""
        return self.several or (self.num_draft_tokens,)

    @property
    def num_rows(self) -> int:
        """R of state buffers: a row for each request, and the spare one."""
        return self.max_batch_size + 1

    @property
    def spare_row(self) -> int:
        """The last state row, which padded requests read and write."""
        return self.max_batch_size

    @property
    def blocks_per_row(self) -> int:
        return -(-self.max_seq_len // self.block_size)


@dataclass(frozen=True, order=True)
class StepKey:
    """The key of a graph in a program: its phase, its K, and its kind.

    "full" serves every batch.  "greedy" serves those whose requests want the argmax and nothing
    else.  "replay" is the catch-up step: it runs the drafter alone, over inputs that steps of K = 0
    kept.
    """

    phase: Phase
    num_draft_tokens: int
    kind: StepKind = "full"

    def __str__(self) -> str:
        if self.phase == "prefill" or self.kind == "replay":  # a program has one of each
            return self.phase if self.kind == "full" else self.kind
        name = f"{self.phase}, K={self.num_draft_tokens}"
        return name if self.kind == "full" else f"{name}, {self.kind}"


class _Keyed(Protocol):
    @property
    def key(self) -> StepKey: ...


KeyedT = TypeVar("KeyedT", bound=_Keyed)


class ByStep(Mapping[StepKey, KeyedT]):
    """A program's graphs, or what a stage made of each, by `StepKey`.

    "prefill" and "decode" find the full graph of the largest K as well.
    """

    def __init__(self, entries: Iterable[KeyedT]) -> None:
        self._entries = {entry.key: entry for entry in entries}

    def __getitem__(self, key: StepKey | Phase) -> KeyedT:
        return self._entries[self._largest(key) if isinstance(key, str) else key]

    def __iter__(self) -> Iterator[StepKey]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def draft_counts(self) -> tuple[int, ...]:
        """K of each full decode step, ascending."""
        keys = (key for key in self if key.phase == "decode" and key.kind == "full")
        return tuple(sorted(key.num_draft_tokens for key in keys))

    @property
    def replay(self) -> KeyedT | None:
        """The catch-up graph, which brings drafters up to date after steps of K = 0; None without
        one.
        """
        return next((entry for key, entry in self.items() if key.kind == "replay"), None)

    def name(self, key: StepKey) -> str:
        """A word for the key: "prefill", "decode" of the largest K, "decode.<K>",
        "decode.<K>.greedy", "replay".
        """
        if key.kind == "replay":
            return key.kind
        if key.kind == "full" and key == self._largest(key.phase):
            return key.phase
        name = f"{key.phase}.{key.num_draft_tokens}"
        return name if key.kind == "full" else f"{name}.{key.kind}"

    def _largest(self, phase: str) -> StepKey:
        """Raises: KeyError."""
        keys = [key for key in self if key.phase == phase and key.kind == "full"]
        if not keys:
            raise KeyError(phase)
        return max(keys)


@dataclass(frozen=True, kw_only=True)
class BufferSpec:
    """A persistent buffer: state rows or one half of a layer's KV cache."""

    name: str
    kind: Literal["state", "cache"]
    shape: tuple[int, ...]
    dtype: torch.dtype
    fill: int = 0
    by_host: bool = False  # the host writes it between steps; no step does
    order: tuple[int, ...] = ()  # dims from the slowest in memory to the fastest; (): as in shape

    @property
    def num_bytes(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count * self.dtype.itemsize

    @property
    def strides(self) -> tuple[int, ...]:
        """Elements from one index to the next, in each dim."""
        strides, step = [1] * len(self.shape), 1
        for dim in reversed(self.order or range(len(self.shape))):
            strides[dim] = step
            step *= self.shape[dim]
        return tuple(strides)

    def empty(self, device: torch.device) -> torch.Tensor:
        """A tensor of its shape, dtype and strides, not filled."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)


def is_recurrent(buffer: BufferSpec) -> bool:
    """True for the state rows of recurrences and causal convolutions."""
    return buffer.name.startswith(("recurrence.", "causal_conv."))


@dataclass(frozen=True, kw_only=True)
class InputSpec:
    """The source of one placeholder of a program graph.

    `sources` names the weights that an input is made of: more than one when projections were merged
    (their rows concatenated in this order).  `packed` names a layout of
    `ops.quantized_linear.lay_out`, such as "panels", that of `compilespec::packed_linear`, or
    "Q4_K.scale", a part of the blocks of a GGUF type; "" leaves the weight as it is.
    """

    name: str
    kind: Literal["weight", "state", "cache", "batch"]
    sources: tuple[str, ...] = ()
    packed: str = ""


@dataclass(frozen=True, kw_only=True)
class Derived:
    """The making of a weight from another, at the start and whenever that one changes."""

    source: str  # its name
    make: Callable[[Tensor], Tensor] = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class PassRecord:
    """A record of what one pass did to one graph."""

    name: str
    level: Literal["torch", "aten"]
    matches: int
    nodes_before: int
    nodes_after: int
    elapsed_ms: float
    numerics: str
    before: fx.Graph | None = field(default=None, repr=False)
    after: fx.Graph | None = field(default=None, repr=False)


@dataclass(frozen=True, kw_only=True)
class StepGraph:
    """One phase's whole step on ATen: every input named, every output named."""

    graph_module: fx.GraphModule = field(repr=False)
    inputs: tuple[InputSpec, ...] = field(repr=False)
    outputs: tuple[str, ...]
    fakes: tuple[Any, ...] = field(
        repr=False
    )  # fake inputs, symbols included, in placeholder order
    records: tuple[PassRecord, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PhaseGraph:
    """One step, spliced on torch IR; its ATen form is made when somebody asks for it.

    A start that finds the compiled step on disk never makes it: the artifact's key is the spliced
    graph.
    """

    key: StepKey
    spliced: fx.GraphModule
    splice_records: tuple[PassRecord, ...] = field(repr=False)
    finish: Callable[[], StepGraph] = field(repr=False)  # the retrace and the ATen passes
    context: Any = field(repr=False)  # what its passes read: only `inspect.stages.context_of` asks
    num_layers: int  # of the target

    @functools.cached_property
    def step(self) -> StepGraph:
        return self.finish()

    @property
    def phase(self) -> Phase:
        return self.key.phase

    @property
    def graph_module(self) -> fx.GraphModule:
        return self.step.graph_module

    @property
    def inputs(self) -> tuple[InputSpec, ...]:
        return self.step.inputs

    @property
    def outputs(self) -> tuple[str, ...]:
        return self.step.outputs

    @property
    def fakes(self) -> tuple[Any, ...]:
        return self.step.fakes

    @property
    def records(self) -> tuple[PassRecord, ...]:
        return (*self.splice_records, *self.step.records)

    def __str__(self) -> str:
        num_nodes, num_passes = len(self.spliced.graph.nodes), len(self.splice_records)
        return f"{self.key}: {num_nodes} nodes spliced by {num_passes} passes"

    __repr__ = __str__


@dataclass(frozen=True, kw_only=True)
class Reach:
    """How far a draft loop reads and writes beyond the tokens of its step."""

    num_reserved_tokens: int = 1  # slots past seq_len that a step may write
    num_repeated_tokens: int = 0  # prompt tokens that a chunk runs again, for the drafter (H-22)
    lookahead: int = 0  # tokens after a position that its entries in the caches depend on


# A request's token ids, prompt included, to up to K draft ids: called between two steps.
HostProposal = Callable[[list[int]], Sequence[int]]


class TapSink(Protocol):
    """Receives the hidden states that a step gives out, on the host."""

    def add(self, row: int, hidden_SE: Tensor) -> None:
        """The next S tokens of the request in a state row, in order."""

    def finish(self, request: Any, reason: str) -> None:
        """End a request; its row is still the same."""

    def forget(self, request: Any) -> None:
        """Forget a request that lost its row; all its tokens will come again in another row."""

    def close(self) -> None:
        """Close the sink."""


class HostCapabilities(Protocol):
    """The capabilities of a method that the host asks for (`methods/capabilities.py` has all)."""

    @property
    def name(self) -> str: ...

    @property
    def looks_up(self) -> bool: ...

    @property
    def combines(self) -> bool: ...

    @property
    def remembers_texts(self) -> bool: ...

    @property
    def drafts_in_step(self) -> bool: ...


def tells_evidence(config: ProgramConfig, capabilities: HostCapabilities) -> bool:
    """True where decode steps say how sure their drafts are, for the host to choose the next K."""
    return bool(config.several) and capabilities.drafts_in_step


class DrafterOnHost(Protocol):
    """The parts of a drafter that the host asks for (`methods/base.py` has all)."""

    @property
    def kv_block_sizes(self) -> tuple[int, ...]: ...

    @property
    def recorder(self) -> TapSink | None: ...

    @property
    def propose_on_host(self) -> HostProposal | None: ...


@dataclass(frozen=True, kw_only=True)
class SpecProgram:
    """The rewritten graphs of a target and its drafter, not lowered yet."""

    model: str = ""  # the target's name
    target: Traced
    capabilities: HostCapabilities
    drafter: DrafterOnHost | None = field(default=None, repr=False)
    config: ProgramConfig
    reach: Reach = Reach()
    graphs: ByStep[PhaseGraph]
    buffers: tuple[BufferSpec, ...]
    weights: Mapping[str, Tensor] = field(repr=False)
    derived: Mapping[str, Derived] = field(default_factory=dict, repr=False)  # weights of others
    lossless: bool = True  # true: tokens equal, or are distributed as, those of plain decoding
    notes: tuple[
        str, ...
    ] = ()  # what was resolved, for `Engine.plan()`: aux layers, draft layout, ...

    @property
    def method(self) -> str:
        """The name of the drafting method."""
        return self.capabilities.name

    @property
    def state_bytes_per_request(self) -> int:
        """Bytes of recurrent state a request, the drafter's included, for any length of the
        request.
        """
        return sum(b.num_bytes // b.shape[0] for b in self.buffers if is_recurrent(b))

    @property
    def recurrent_states(self) -> tuple[BufferSpec, ...]:
        """The state rows that hold all of a request's past once no token of it can be rejected."""
        waiting = "recurrence."  # what uncommitted tokens gave
        return tuple(
            b
            for b in self.buffers
            if is_recurrent(b) and not (b.name.startswith(waiting) and b.name.endswith(".recent"))
        )

    @property
    def cache_bytes_per_token(self) -> int:
        """Bytes of one more token in all caches of the program, the drafter's included.  KV groups
        are left out: each row holds their blocks for good.
        """
        blocks = (self.config.num_blocks, self.config.block_size)
        caches = [b for b in self.buffers if b.kind == "cache" and b.shape[:2] == blocks]
        return sum(cache.num_bytes for cache in caches) // (blocks[0] * blocks[1])

    def __repr__(self) -> str:
        """One line: the model, the method, K, the device and the dtype."""
        config = self.config
        counts = ",".join(map(str, self.graphs.draft_counts))
        dtype = str(config.dtype).removeprefix("torch.")
        return f"SpecProgram({self.model}, {self.method}, K={counts}, {config.device}, {dtype})"

    def __str__(self) -> str:
        cache_bytes = sum(b.num_bytes for b in self.buffers if b.kind == "cache")
        lines = [repr(self)]
        lines += [f"  {graph}" for graph in self.graphs.values()]
        lines.append(f"  {len(self.weights)} weights, {cache_bytes / 2**20:.1f} MiB of KV cache")
        return "\n".join(lines)


@dataclass(frozen=True, kw_only=True)
class LoweredPhase:
    """A callable for one graph and what it cost."""

    key: StepKey
    call: Callable[..., Any] = field(repr=False)
    inputs: tuple[InputSpec, ...] = field(repr=False)
    outputs: tuple[str, ...]
    compile_ms: float
    from_cache: bool
    stitched: Any = field(default=None, repr=False)  # `Stitched`, where it was lowered in pieces
    waits_for_host: str = ""  # the reason why a call cannot be captured; "" if it can

    @property
    def phase(self) -> Phase:
        return self.key.phase


@dataclass(frozen=True, kw_only=True)
class Lowered:
    """A program that runs: one callable a graph, weights in their final layout."""

    program: SpecProgram
    backend: str
    graphs: ByStep[LoweredPhase]
    attention: Mapping[str, str] = field(default_factory=dict)  # by form: which kernel serves it

    def costs(self) -> dict[str, dict[str, Any]]:
        """Seconds of compiling or loading by `ByStep.name`, whether the cache had it, and its
        distinct pieces (None: one unit).
        """
        return {
            self.graphs.name(key): {
                "seconds": phase.compile_ms / 1e3,
                "from_cache": phase.from_cache,
                "pieces": None if phase.stitched is None else len(phase.stitched.pieces),
            }
            for key, phase in self.graphs.items()
        }

    def __str__(self) -> str:
        parts = [
            f"{p.key} {p.compile_ms:.0f} ms{' (cached)' if p.from_cache else ''}"
            for p in self.graphs.values()
        ]
        return f"Lowered({self.backend}: {', '.join(parts)})"

    __repr__ = __str__
