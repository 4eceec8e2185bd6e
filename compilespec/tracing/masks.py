"""Reads the masks of a transformers model: causal, a window, a chunk, or refused by name.

transformers' mask makers hand a predicate over (batch, head, query index, key index) to the
attention implementation.  It is traced over the indices of the tokens, so that the captured graph
holds the mask that each attention layer is given.  `read_masks` then computes every mask for some
hundred positions and compares it with the forms that the cache can serve.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn

from compilespec.errors import UnsupportedModel
from compilespec.program import Traced, markers, module_path
from compilespec.tracing.naming import source_line
from compilespec.tracing.structure import ancestors

_MASK = 8  # the place of a mask among a marker's arguments
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


@contextlib.contextmanager
def traced_masks(name: str) -> Iterator[None]:
    """Let transformers make its masks with `traced_mask`, for the attention implementation `name`
    and for models that call scaled_dot_product_attention themselves.

    The search for packed sequences, which would read the position ids, is off.
    """
    from transformers import masking_utils

    made = dict.fromkeys((name, "sdpa"), traced_mask)
    interface = masking_utils.AttentionMaskInterface
    with (
        mock.patch.dict(interface._global_mapping, made),
        mock.patch.object(masking_utils, "find_packed_sequence_indices", _not_packed),
    ):
        yield


def _not_packed(position_ids: Tensor) -> None:
    """The answer of transformers' search for packed sequences: one sequence a row."""


def read_masks(traced: Traced, model: nn.Module) -> None:
    """Turn each attention marker's mask into its window or its chunk, in place.

    Raises: UnsupportedModel that names the layer whose mask has another form, or whose window is
    not that of its mask.
    """
    gm = traced.graph_module
    masked = [marker for marker in markers(gm) if len(marker.args) > _MASK]
    forms: dict[Any, tuple[int, int]] = {}
    for marker in masked:
        mask: Any = marker.args[_MASK]
        if mask not in forms:
            forms[mask] = _form_of(gm, mask, marker, model)
        window, chunk = forms[mask]
        told = int(str(marker.args[4]))
        if told and (told, 0) != (window, chunk):
            raise UnsupportedModel(
                f"{_place(marker, model)}: its sliding_window={told} is not what its mask says "
                f"(window {window}, chunk {chunk}); set one of them in the config"
            )
        marker.args = (*marker.args[:4], window, *marker.args[5:7], *((chunk,) if chunk else ()))
    _erase_unused(gm, forms)
    gm.recompile()


def _form_of(
    gm: fx.GraphModule, mask: fx.Node, marker: fx.Node, model: nn.Module
) -> tuple[int, int]:
    """The window and the chunk of a mask, 0 without one."""
    needed = ancestors(mask)
    sizes = {abs(value) for node in needed for value in _integers(node) if value}
    positions = _probed(sizes)
    by_index = [n for n in needed if n.target in _MADE_BY_INDEX]
    if by_index and 2 * max(sizes, default=0) > len(positions):
        raise UnsupportedModel(
            f"{_place(marker, model)}: its mask, which is made by index, cannot be "
            "read; make it by comparisons of torch.arange(T)"
        )
    try:
        seen = _Masks(gm, needed, positions).seen(mask)
    except _DependsOnTokens as error:
        raise UnsupportedModel(
            f"{_place(marker, model)}: expected a mask that positions alone decide; it is made of "
            f"{error}; switch that off in the config, or use another model"
        ) from None
    query, key = positions[:, None], positions[None, :]
    forms = {(0, 0): key >= 0}
    widths = sizes | {
        size + 1 for size in sizes
    }  # models name the last key seen, or the first one not seen
    forms |= {(width, 0): key > query - width for width in widths}
    forms |= {(0, size): key // size == query // size for size in sizes}
    for form, wanted in forms.items():
        if torch.equal(seen, wanted & (key <= query)):
            return form
    sees = "tokens see later ones" if bool((seen & (key > query)).any()) else "another form"
    raise UnsupportedModel(
        f"{_place(marker, model)}: expected causal attention, a window or chunks, which a KV cache "
        f"can serve; by its mask, {sees}; use a model with another mask"
    )


def _probed(sizes: set[int]) -> Tensor:
    """Positions at and next to the multiples of the sizes that a mask mentions; sorted, int64."""
    near = {n * size + d for size in sizes for n in range(4) for d in range(-2, 3)}
    powers = {(1 << n) + d for n in range(20) for d in (-1, 0, 1)}
    return torch.tensor(sorted({p for p in near | powers | set(range(64)) if p >= 0}))


class _DependsOnTokens(Exception):
    """Names the input that a mask depends on."""


class _Masks(fx.Interpreter):
    """Computes masks of one row at the probed positions."""

    def __init__(self, gm: fx.GraphModule, needed: set[fx.Node], positions: Tensor) -> None:
        super().__init__(gm)
        ids = next(n for n in gm.graph.nodes if n.meta.get("role") == "input_ids")
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
            raise _DependsOnTokens("a bias that is added to the scores")
        count = len(self._positions)
        return visible.expand(1, 1, count, count)[0, 0]

    def run_node(self, node: fx.Node) -> Any:
        example = node.meta.get("example_value")
        if isinstance(example, torch.SymInt):
            return int(example.node.expr.subs(self._sizes))
        if node.op == "placeholder":
            role = str(node.meta.get("role", node.name))
            raise _DependsOnTokens("what the tokens hold" if role == "input_ids" else role)
        counts = node.target is torch.arange and len(node.args) == 1 and "start" not in node.kwargs
        if counts and isinstance(example, Tensor) and example.shape[0] == self._length:
            return self._positions.to(example.dtype)
        return super().run_node(node)

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


def _erase_unused(gm: fx.GraphModule, masks: dict[Any, tuple[int, int]]) -> None:
    """Erase the masks and the nodes that made them."""
    needed = {node for mask in masks for node in ancestors(mask)}
    for node in reversed(list(gm.graph.nodes)):
        if node in needed and node.op != "placeholder" and not node.users:
            gm.graph.erase_node(node)


def _place(marker: fx.Node, model: nn.Module) -> str:
    where = module_path(marker) or "the model"
    return f"{type(model).__name__}: {where}; {source_line(marker)}"
