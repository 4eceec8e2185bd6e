"""Checks that a captured graph is a causal language model that a KV cache can serve.

The check reads the graph, not the model's class: every token has logits, and only attention carries
information from one token to another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from compilespec.errors import UnsupportedModel
from compilespec.ops.device import traits_of
from compilespec.program import MASK_PLACE, Traced, marker_kind, markers, module_path
from compilespec.tracing.naming import source_line
from compilespec.tracing.quantized_weights import is_quantized
from compilespec.tracing.structure import EMBEDDING, LINEAR, token_ids


def check_logits(traced: Traced, model: nn.Module) -> None:
    """Check that each token of [B, T] has logits over the vocabulary.

    Raises: UnsupportedModel (a classifier, a model without its head).
    """
    results: Any = traced.graph_module.graph.output_node().args[0]
    ids = token_ids(traced.graph_module.graph)
    got = [str(size) for size in results[0].meta["example_value"].shape]
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    vocab_size = getattr(text, "vocab_size", None)
    batch, length = (str(size) for size in ids.meta["example_value"].shape)
    if len(got) == 3 and got[:2] == [batch, length] and got[2] == str(vocab_size or got[2]):
        return
    shape = ", ".join({batch: "B", length: "T"}.get(size, size) for size in got)
    raise UnsupportedModel(
        f"{type(model).__name__}: expected logits [B, T, {vocab_size or 'V'}], one for each id of "
        f"the vocabulary after each token, got [{shape}]; give a model with its language head, "
        f"such as AutoModelForCausalLM loads"
    )


def check_positions(traced: Traced, model: nn.Module) -> None:
    """Check that tokens are mixed in attention alone.

    The graph runs once on three tokens, each of which attends to itself only; the embeddings of the
    outer two are NaN, and the logits of the middle one must not be.  Products are not computed (see
    `_Tainted`), so that the check takes milliseconds for models of any size.  On the meta device,
    which has no values, nothing is checked.

    Raises: UnsupportedModel that names the first operation that mixes tokens.
    """
    if traits_of(next(model.parameters()).device).is_meta:
        return
    if not _Tainted(traced, taint=True).reaches_the_middle():
        return
    if _Tainted(traced, taint=False).reaches_the_middle():
        return  # the model itself makes NaN: the check cannot tell
    tainted = _Tainted(traced, taint=True, find_first=True)
    tainted.reaches_the_middle()
    node = tainted.first_mixed
    where = f"{module_path(node) or 'the model'}, {source_line(node)}" if node else "unknown place"
    raise UnsupportedModel(
        f"{type(model).__name__}: expected tokens to be mixed in causal attention and known "
        f"recurrent layers alone, for which there are caches; they are mixed in {where}; use a "
        "model without other convolution, pooling or recurrence over its tokens"
    )


def check_alone(traced: Traced, model: nn.Module) -> None:
    """Check that a token depends on its id and its position, not on its place in the call.

    The graph runs on three tokens that attend to themselves only, and on the middle one alone, at
    the same position: its logits must be the same.  (A model that counts the tokens of a call would
    give a decode step's token the place 0.)  Products are not computed, as in `check_positions`.

    Raises: UnsupportedModel.
    """
    if traits_of(next(model.parameters()).device).is_meta:
        return
    ids = torch.tensor([[1, 2, 3]])
    positions = torch.tensor([[0, 1, 2]])
    among = _Alone(traced).logits(ids, positions)[:, 1]
    alone = _Alone(traced).logits(ids[:, 1:2], positions[:, 1:2])[:, 0]
    bound = max(1e-3, 8 * torch.finfo(among.dtype).eps) * among.abs().amax()
    parted = (among - alone).abs().amax()
    if not bool(parted > bound):  # NaN: the check cannot tell
        return
    raise UnsupportedModel(
        f"{type(model).__name__}: expected a token's logits to follow from its id, its position "
        f"and what it attends to; without its neighbours they differ by {float(parted):.1e}, so "
        "its place in the call has a part in them; use position_ids for every position"
    )


class _Alone(fx.Interpreter):
    """Runs a captured graph on tokens that attend to themselves only.

    A product with a weight gives multiples of the row's own sum: reading weights would be the cost
    of a run.
    """

    def __init__(self, traced: Traced) -> None:
        super().__init__(traced.graph_module)
        self._traced, self._of_masks = traced, _of_masks(traced.graph_module)

    @torch.no_grad()
    def logits(self, ids: Tensor, position_ids: Tensor) -> Tensor:
        node = token_ids(self.graph)
        example = node.meta["example_value"]
        values = self._traced.bind(
            input_ids=ids.to(example.device, example.dtype),
            position_ids=position_ids.to(example.device, example.dtype),
        )
        result: Tensor = self.run(*map(_plain, values))[0]
        return result

    def run_node(self, node: fx.Node) -> Any:
        if node in self._of_masks and node.op != "placeholder":
            return None
        if (kind := marker_kind(node)) in _ALONE:
            return _ALONE[kind](*self.fetch_args_kwargs_from_env(node)[0])
        if node.target in LINEAR:
            return self.product(*self.fetch_args_kwargs_from_env(node)[0][:2])
        return super().run_node(node)

    def product(self, rows: Tensor, weight: Tensor) -> Tensor:
        count = rows.shape[-1]
        waves = torch.linspace(1, 2, count, dtype=rows.dtype, device=rows.device).cos()
        spread = torch.linspace(-1, 1, weight.shape[0], dtype=rows.dtype, device=rows.device)
        return (rows * waves).mean(-1, keepdim=True) * spread.sin()


def _of_masks(gm: fx.GraphModule) -> set[fx.Node]:
    """The nodes that only masks are made of: a token that attends to itself alone needs none."""
    found: set[fx.Node] = set()
    cached = _made_without_masks(markers(gm, "cached"))
    for node in reversed(gm.graph.nodes):
        if node in cached:  # which must be a token's own
            continue
        readers = [user for user in node.users if user not in found]
        if node.users and all(
            marker_kind(user) == "attention" and node not in user.args[:MASK_PLACE]
            for user in readers
        ):
            found.add(node)
    return found


def _made_without_masks(nodes: list[fx.Node]) -> set[fx.Node]:
    """The sources of the nodes, where attention needs no mask."""
    found: set[fx.Node] = set()
    todo = list(nodes)
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            is_attention = marker_kind(node) == "attention"
            sources = node.args[:MASK_PLACE] if is_attention else node.all_input_nodes
            todo += [source for source in sources if isinstance(source, fx.Node)]
    return found


class _Tainted(_Alone):
    """Runs a captured graph to see where NaN spreads.  A product gives ones, or NaN for a row that
    holds NaN.
    """

    def __init__(self, traced: Traced, *, taint: bool, find_first: bool = False) -> None:
        super().__init__(traced)
        self._taint, self._find_first = taint, find_first
        self.first_mixed: fx.Node | None = None  # the first node whose output is all NaN
        self._is_cached_mixed = False

    def reaches_the_middle(self) -> bool:
        """True where the logits of the second of three tokens hold NaN, or what is cached of it."""
        logits = self.logits(torch.zeros(1, 3), torch.arange(3)[None])
        return bool(logits[:, 1].isnan().any()) or self._is_cached_mixed

    def run_node(self, node: fx.Node) -> Any:
        result = super().run_node(node)
        if marker_kind(node) == "cached":
            self._is_cached_mixed |= _has_nan(result.select(int(str(node.args[1])), 1))
        if self._taint and node.target in EMBEDDING and result is not None:
            result = result.clone()
            result[..., ::2, :] = torch.nan
        if self._find_first and self.first_mixed is None and _has_nan(result, everywhere=True):
            sources = [self.env[source] for source in node.all_input_nodes]
            if any(_has_nan(s) and not _has_nan(s, everywhere=True) for s in sources):
                self.first_mixed = node
        return result

    def product(self, rows: Tensor, weight: Tensor) -> Tensor:
        ones = rows.mul(0).sum(-1, keepdim=True) + 1
        return ones.expand(*rows.shape[:-1], weight.shape[0]).contiguous()


def _attend_to_itself(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
    """[B, T, N, H] from [B, N, T, H]: each token's value, plus its rotated query and key, so that a
    wrong position in these shows; NaN if one of the three has NaN.
    """
    groups = query.shape[1] // value.shape[1]
    ends = sum(x[..., :1] + x[..., -1:] for x in (query, key.repeat_interleave(groups, 1)))
    nan = query.mul(0).sum(-1, keepdim=True)
    nan = nan + key.mul(0).sum(-1, keepdim=True).repeat_interleave(groups, 1)
    return (value.repeat_interleave(groups, 1) + ends + nan).transpose(1, 2).contiguous()


def _recur_alone(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, *_: Any) -> Tensor:
    """[B, T, N, K], [B, T, H, V]: each token's value, NaN if its query, key or decay has NaN."""
    nan = torch.stack([x.mul(0).flatten(2).sum(-1) for x in (query, key, decay)]).sum(0)
    return (value + nan[..., None, None]).contiguous()


_ALONE: Mapping[str, Callable[..., Tensor]] = {
    "attention": _attend_to_itself,
    "recurrence": _recur_alone,
    "causal_conv": lambda x, *_: x.contiguous(),
    "all_positions": lambda position_ids: torch.arange(int(position_ids.max()) + 1),
}


def _has_nan(value: object, *, everywhere: bool = False) -> bool:
    if not isinstance(value, Tensor) or not value.is_floating_point() or not value.numel():
        return False
    nan = value.isnan()
    return bool(nan.all() if everywhere else nan.any())


def _plain(value: Any) -> Any:
    """A quantized weight's shape and dtype, without memory: its values are not needed."""
    if not is_quantized(value):
        return value
    return torch.ones((), dtype=value.dtype, device=value.device).expand(value.shape)
