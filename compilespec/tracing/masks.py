"""Reads the masks of a model: causal, a window, a chunk, any other that the cache can serve.

transformers' mask makers hand a predicate over (batch, head, query index, key index) to the
attention implementation.  It is traced over the indices of the tokens, so that the captured graph
holds the mask that each attention layer is given.  `read_masks` then computes every mask for some
hundred positions and compares it with the forms that attention has.  A mask of another form stays
in the graph, where `pair_masks` separates its keys from its queries.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, fx, nn

from compilespec.errors import UnsupportedModel
from compilespec.program import MASK_PLACE, Traced, markers, module_path
from compilespec.tracing.naming import source_line
from compilespec.tracing.pair_masks import (
    VIEWS,
    CannotSplit,
    MaskSplitter,
    end_writes,
    made_of_pairs,
)
from compilespec.tracing.positions import is_of_positions, is_write, num_token_dims
from compilespec.tracing.quantized_weights import is_quantized
from compilespec.tracing.structure import ancestors, token_ids, walk_back

EAGER = "eager"  # of models that write attention out themselves: masks are added to scores
_INPUTS = {"input_ids": "what the tokens hold", "position_ids": "the positions"}
_MOST_OF_TABLE = 2048  # rows of a table that are looked at
_FILLS = (torch.full, torch.zeros, torch.ones)
_MADE_BY_INDEX = (
    torch.ones, torch.zeros, torch.full, torch.tril, torch.triu, torch.cumsum,
    "tril", "triu", "cumsum",
)  # fmt: skip


def traced_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Tensor],
    device: torch.device | str = "cpu",
    **_: Any,
) -> Tensor:
    """Follow transformers' mask contract: bool [B, 1, T, T], causal masks too.

    The indices are the tokens' positions: the graph is captured without a cache, a padding mask or
    packed sequences.
    """
    query = torch.arange(q_length, device=device).view(1, 1, -1, 1)
    key = torch.arange(kv_length, device=device).view(1, 1, 1, -1)
    batch = torch.arange(batch_size, device=device).view(-1, 1, 1, 1)
    mask = mask_function(batch, torch.zeros_like(batch), query, key)
    return mask.expand(batch_size, 1, q_length, kv_length)


def added_mask(*args: Any, dtype: torch.dtype = torch.float32, **kwargs: Any) -> Tensor:
    """The same to add to scores: 0, or the dtype's lowest number where a key is not seen."""
    lowest = torch.full((), torch.finfo(dtype).min, dtype=dtype)
    return torch.where(traced_mask(*args, **kwargs), torch.zeros((), dtype=dtype), lowest)


@contextlib.contextmanager
def traced_masks(name: str) -> Iterator[None]:
    """Let transformers make its masks with `traced_mask`, for the attention implementation `name`
    and for models that call scaled_dot_product_attention themselves.

    The search for packed sequences, which would read the position ids, is off.
    """
    from transformers import masking_utils

    made: dict[str, Any] = dict.fromkeys((name, "sdpa"), traced_mask)
    if name == EAGER:
        made[name] = added_mask
    interface = masking_utils.AttentionMaskInterface
    with (
        mock.patch.dict(interface._global_mapping, made),
        mock.patch.object(masking_utils, "find_packed_sequence_indices", _not_packed),
    ):
        yield


def _not_packed(position_ids: Tensor) -> None:
    """The answer of transformers' search for packed sequences: one sequence a row."""


def read_masks(traced: Traced, model: nn.Module) -> None:
    """Turn each attention marker's mask into its window or its chunk, or keep it, computed from
    what a cache holds; in place.

    Raises: UnsupportedModel that names the layer whose mask cannot be served, or whose window is
    not that of its mask.
    """
    gm = traced.graph_module
    for marker in markers(gm):
        _check_keys(gm, marker, model)
    masked = [marker for marker in markers(gm) if len(marker.args) > MASK_PLACE]
    forms: dict[Any, _Form] = {}
    if masked:
        _end_writes(gm, masked, model)
    splitter = MaskSplitter(traced)
    made_masks = {node for marker in masked for node in _ancestors_of_mask(marker)}
    for marker in masked:
        mask: Any = marker.args[MASK_PLACE]
        if mask not in forms:
            forms[mask] = _form_of(traced, mask, marker, model, splitter)
        window, chunk, is_kept = forms[mask]
        told = int(str(marker.args[4]))
        if told and not is_kept and (told, 0) != (window, chunk):
            raise UnsupportedModel(
                f"{_place(marker, model)}: its sliding_window={told} is not what its mask says "
                f"(window {window}, chunk {chunk}); set one of them in the config"
            )
        form = (0, mask) if is_kept else (chunk,) if chunk else ()
        marker.args = (*marker.args[:4], window, *marker.args[5:7], *form)
    _erase_unused(gm, made_masks)
    gm.recompile()


def _end_writes(gm: fx.GraphModule, masked: list[fx.Node], model: nn.Module) -> None:
    """Let nothing that a mask is made of be written in place.

    Raises: UnsupportedModel.
    """
    ids = token_ids(gm.graph)
    made = made_of_pairs(gm, str(ids.meta["example_value"].shape[1]))
    for marker in masked:
        needed = _made_at_once(marker, made)
        try:
            end_writes(gm, made & {*needed, *(user for node in needed for user in node.users)})
            needed = _made_at_once(marker, made)
            for node in gm.graph.nodes:
                if is_write(node) and (node in needed or _written(node) in needed):
                    raise CannotSplit(f"a part of it is written in place ({node.name})")
        except CannotSplit as error:
            raise UnsupportedModel(
                f"{_place(marker, model)}: expected a mask that is computed at once; {error}; "
                "use torch.where or masked_fill there"
            ) from None


def _made_at_once(marker: fx.Node, made: set[fx.Node]) -> set[fx.Node]:
    """The pairs of tokens and the positions that a mask is made of, without values of one token."""
    mask: Any = marker.args[MASK_PLACE]
    return walk_back(mask, lambda n: n in made or is_write(n) or is_of_positions(n))


def _written(node: fx.Node) -> fx.Node:
    """The tensor whose memory an operation in place writes."""
    base: Any = node.args[0]
    while base.target in VIEWS and isinstance(base.args[0], fx.Node):
        base = base.args[0]
    found: fx.Node = base
    return found


def _check_keys(gm: fx.GraphModule, marker: fx.Node, model: nn.Module) -> None:
    """Raises: UnsupportedModel where keys are not those of the tokens, one each."""
    ids = token_ids(gm.graph)
    length = ids.meta["example_value"].shape[1]
    key: Any = marker.args[1]
    count = key.meta["example_value"].shape[2]
    if str(count) != str(length):
        raise UnsupportedModel(
            f"{_place(marker, model)}: expected one key for each token, which a KV cache holds, "
            f"got {str(count).replace(str(length), 'T')} keys of T tokens; use a model "
            "whose keys are not compressed"
        )


class _Form(NamedTuple):
    window: int = 0
    chunk: int = 0
    is_kept: bool = False  # the mask has another form, and stays in the graph


def _ancestors_of_mask(marker: fx.Node) -> set[fx.Node]:
    mask: Any = marker.args[MASK_PLACE]
    return ancestors(mask)


def _form_of(
    traced: Traced,
    mask: fx.Node,
    marker: fx.Node,
    model: nn.Module,
    splitter: MaskSplitter,
) -> _Form:
    """The form of a mask.  Raises: UnsupportedModel."""
    try:
        return _by_positions(traced, mask)
    except _SeesLater:
        raise UnsupportedModel(
            f"{_place(marker, model)}: expected a mask that is causal, or hides more than that; it "
            "has another form, and tokens see later ones; use a model with another mask"
        ) from None
    except _OtherForm as error:
        reason = str(error)
    try:
        splitter.split(mask)
    except CannotSplit as error:
        raise UnsupportedModel(
            f"{_place(marker, model)}: expected a mask that is causal, a window or chunks, or one "
            f"that follows from what a KV cache holds; {reason}, and {error}; use a model with "
            "another mask, or switch it off in the config"
        ) from None
    return _Form(is_kept=True)


def _by_positions(traced: Traced, mask: fx.Node) -> _Form:
    """The window and the chunk of a mask, 0 without one.  Raises: _OtherForm."""
    gm, needed = traced.graph_module, ancestors(mask)
    tables: dict[str, Tensor] = {}
    for node in needed:
        role = str(node.meta.get("role", "symbol"))
        if node.op != "placeholder" or role == "symbol":
            continue
        table = traced.weights.get(role)
        if table is None or is_quantized(table) or table.dim() < 2 or table.is_meta:
            raise _OtherForm(f"it is made of {_INPUTS.get(role, role)}")
        tables[role] = table
    if tables:
        return _by_tables(gm, needed, mask, tables)
    sizes = {abs(value) for node in needed for value in _integers(node) if value}
    positions = _probed(sizes)
    length = str(token_ids(gm.graph).meta["example_value"].shape[1])
    by_index = [
        node
        for node in gm.graph.nodes
        if node in needed
        and node.target in _MADE_BY_INDEX
        and num_token_dims(node, length)
        and not _is_same_everywhere(node)
    ]
    if by_index and 2 * max(sizes, default=0) > len(positions):
        raise _OtherForm(f"it is made by index ({by_index[0].name})")
    try:
        seen = _Masks(gm, needed, positions).seen(mask)
    except (RuntimeError, IndexError, ValueError, TypeError) as error:
        why = str(error).splitlines()[0]
        raise _OtherForm(f"it cannot be computed for single positions ({why})") from None
    query, key = positions[:, None], positions[None, :]
    forms = {_Form(): key >= 0}
    widths = sizes | {
        size + 1 for size in sizes
    }  # models name the last key seen, or the first one not seen
    forms |= {_Form(window=width): key > query - width for width in widths}
    forms |= {_Form(chunk=size): key // size == query // size for size in sizes}
    for form, wanted in forms.items():
        if torch.equal(seen, wanted & (key <= query)):
            return form
    if bool((seen & (key > query)).any()):
        raise _SeesLater
    raise _OtherForm("it has another form")


def _is_same_everywhere(node: fx.Node) -> bool:
    """True for one value a token, of which entries are taken by position (groups of no image)."""
    return node.target in _FILLS and all(
        user.target is operator.getitem
        and isinstance(user.args[1], tuple)
        and all(isinstance(index, fx.Node) for index in user.args[1])
        for user in node.users
    )


def _by_tables(
    gm: fx.GraphModule, needed: set[fx.Node], mask: fx.Node, tables: Mapping[str, Tensor]
) -> _Form:
    """The same of a mask that is cut from tables, such as a buffer of ones below the diagonal."""
    count = min(_MOST_OF_TABLE, *(size for t in tables.values() for size in t.shape if size > 1))
    positions = torch.arange(count)
    try:
        seen = _Masks(gm, needed, positions, tables).seen(mask)
    except (RuntimeError, IndexError, ValueError, TypeError) as error:
        why = str(error).splitlines()[0]
        raise _OtherForm(f"it cannot be cut from {', '.join(tables)} ({why})") from None
    age = positions[:, None] - positions[None, :]
    width = int(seen.sum(-1).max())
    for form, wanted in ((_Form(), age >= 0), (_Form(window=width), (age >= 0) & (age < width))):
        if torch.equal(seen, wanted):
            return form
    raise _OtherForm(f"what {', '.join(tables)} lets it see has another form")


def _probed(sizes: set[int]) -> Tensor:
    """Positions at and next to the multiples of the sizes that a mask mentions; sorted, int64."""
    near = {n * size + d for size in sizes for n in range(4) for d in range(-2, 3)}
    powers = {(1 << n) + d for n in range(20) for d in (-1, 0, 1)}
    return torch.tensor(sorted({p for p in near | powers | set(range(64)) if p >= 0}))


class _OtherForm(Exception):
    """Why a mask is not causal, a window or a chunk."""


class _SeesLater(Exception):
    """Raised for a mask that shows later tokens, which no cache holds."""


class _Masks(fx.Interpreter):
    """Computes masks of one row at the probed positions."""

    def __init__(
        self,
        gm: fx.GraphModule,
        needed: set[fx.Node],
        positions: Tensor,
        tables: Mapping[str, Tensor] | None = None,
    ) -> None:
        super().__init__(gm)
        self._tables = tables or {}
        ids = token_ids(gm.graph)
        batch, length = ids.meta["example_value"].shape
        self._sizes, self._length = {batch.node.expr: 1, length.node.expr: len(positions)}, length
        self._needed, self._positions = needed, positions

    def seen(self, mask: fx.Node) -> Tensor:
        """Bool [Q, Q]: true where a query sees a key."""
        with torch.no_grad():
            for node in self.module.graph.nodes:  # type: ignore[union-attr]
                if node in self._needed:
                    self.env[node] = self.run_node(node)
        value: Tensor = self.env[mask]
        visible = value if value.dtype == torch.bool else value == 0
        biased = (
            (value > -1e4) & (value != 0) if value.is_floating_point() else visible.new_zeros(1)
        )
        if biased.any():
            raise _OtherForm("it is a bias that is added to the scores")
        count = len(self._positions)
        heads = visible.expand(*visible.shape[:-2], count, count).reshape(-1, count, count)
        if not torch.equal(heads, heads[:1].expand_as(heads)):
            raise _OtherForm("it differs among heads")
        return heads[0]

    def run_node(self, node: fx.Node) -> Any:
        example = node.meta.get("example_value")
        if isinstance(example, torch.SymInt):
            return int(example.node.expr.subs(self._sizes))
        if _is_same_everywhere(node):
            return self._of_all_positions(node)
        if node.op == "placeholder":
            return self._tables[node.meta["role"]].cpu()
        counts = node.target is torch.arange and len(node.args) == 1 and "start" not in node.kwargs
        if counts and isinstance(example, Tensor) and example.shape[0] == self._length:
            return self._positions.to(example.dtype)
        return super().run_node(node)

    def _of_all_positions(self, node: fx.Node) -> Tensor:
        sizes = {**self._sizes, self._length.node.expr: int(self._positions.max()) + 1}

        def size(one: fx.Node) -> Any:
            value = one.meta.get("example_value")
            return int(value.node.expr.subs(sizes)) if isinstance(value, torch.SymInt) else None

        filled: Any = node.target
        table: Tensor = filled(*fx.map_arg(node.args, size), dtype=node.kwargs.get("dtype"))
        return table

    def fetch_args_kwargs_from_env(self, node: fx.Node) -> Any:
        """All arguments on the CPU, so that masks of the meta device have values too."""
        args, kwargs = super().fetch_args_kwargs_from_env(node)
        cpu = torch.device("cpu")
        args = tuple(cpu if isinstance(arg, torch.device) else arg for arg in args)
        return args, kwargs | ({"device": cpu} if "device" in kwargs else {})


def _integers(node: fx.Node) -> Iterator[int]:
    for value in (*node.args, *node.kwargs.values()):
        if isinstance(value, int) and not isinstance(value, bool):
            yield value


def _erase_unused(gm: fx.GraphModule, needed: set[fx.Node]) -> None:
    """Erase those of the nodes that nothing reads any more."""
    for node in reversed(list(gm.graph.nodes)):
        if node in needed and node.op != "placeholder" and not node.users:
            gm.graph.erase_node(node)


def _place(marker: fx.Node, model: nn.Module) -> str:
    where = module_path(marker) or "the model"
    return f"{type(model).__name__}: {where}; {source_line(marker)}"
