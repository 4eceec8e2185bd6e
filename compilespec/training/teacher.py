"""The target as a teacher: its hidden states and its logits, of any model that traces."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from compilespec.errors import DraftMismatch
from compilespec.methods.capabilities import FINAL_NORM
from compilespec.passes.splice.output_head_input import HeadFunction
from compilespec.program import Traced, markers
from compilespec.tracing.load import Target
from compilespec.tracing.structure import descendants, find_head, residual_streams, token_ids
from compilespec.tracing.target import trace_target
from compilespec.tracing.target_info import TargetInfo, describe_target
from compilespec.tracing.weight_marks import fingerprint


class Said(NamedTuple):
    """The target's results after some rows, without single probabilities."""

    normalizer: Tensor
    """float32, the log of the sum of the exponentials of its logits."""
    best: Tensor
    """int64, the most probable id."""


class States(NamedTuple):
    """The parts of a lesson: `aux` [B, T, A*D] side by side, `hidden` [B, T, D], the head's input,
    and the target's results there ([B, T] each), if known.
    """

    aux: Tensor
    hidden: Tensor
    said: Said | None = None


class Teacher:
    """The target's graph, cut before the head, with the hidden states that a drafter reads.

    Raises: TraceError; NotSupported if its logits are not a product with a head.
    """

    def __init__(self, target: Target) -> None:
        self._traced = trace_target(target.model)
        self.info: TargetInfo = describe_target(self._traced, target)
        self._head = HeadFunction(self._traced)
        self.fingerprint = fingerprint(self._traced.weights)
        self._narrow: tuple[Tensor, HeadFunction] | None = None
        self._run: Any = None

    def tap(self, aux_layers: tuple[int, ...], *, compiled: bool = False) -> None:
        """Choose the hidden states that `states` returns; call it once.  Raises: DraftMismatch for
        a hidden state that the target lacks.

        Raises: DraftMismatch where the target has no such hidden state.
        """
        _cut_before_head(self._traced, aux_layers, self.info.hidden_size)
        run = self._traced.graph_module
        self._run = torch.compile(run, dynamic=True) if compiled else run

    @torch.no_grad()
    def states(self, ids_BT: Tensor) -> States:
        """The hidden states that were tapped, and the head's input."""
        positions_BT = torch.arange(ids_BT.shape[1], dtype=torch.int32, device=ids_BT.device)
        positions_BT = positions_BT.expand(ids_BT.shape).contiguous()
        bound = self._traced.bind(input_ids=ids_BT.to(torch.int32), position_ids=positions_BT)
        *aux, hidden_BTD = self._run(*bound)
        aux_BTE = torch.cat(aux, -1) if aux else hidden_BTD[..., :0]
        return States(aux_BTE, hidden_BTD)

    @torch.no_grad()
    def says(self, hidden_ND: Tensor) -> Said:
        """The target's results after rows of the head's input, [N] each."""
        logits = (self._head(rows).float() for rows in self._own(hidden_ND).split(256))
        parts = [(rows.logsumexp(-1), rows.argmax(-1)) for rows in logits]
        return Said(*(torch.cat(columns) for columns in zip(*parts, strict=True)))

    @torch.no_grad()
    def probabilities(
        self, hidden_ND: Tensor, ids: Tensor | None, said: Said | None = None
    ) -> tuple[Tensor, Tensor]:
        """The distribution after rows of the head's input: float32 probabilities [N, Vd] of the ids
        that can be drafted (all: None), not renormalised, and the most probable id [N].

        Args:
            said: the result of `says` for the rows; then the ids that can be drafted are enough.
        """
        hidden_ND = self._own(hidden_ND)
        if ids is not None and said is not None:
            logits = self._head_of(ids)(hidden_ND).float()
            return logits.sub_(said.normalizer[:, None]).exp_(), said.best
        parts, best = [], []
        for rows in hidden_ND.split(256):
            probs = torch.softmax(self._head(rows).float(), -1)
            best.append(probs.argmax(-1))
            parts.append(probs if ids is None else probs[:, ids])
        return torch.cat(parts), torch.cat(best)

    def _own(self, hidden_ND: Tensor) -> Tensor:
        """Hidden states that were kept in another dtype, cast to the model's."""
        return hidden_ND.to(self.info.lm_head.dtype)

    def _head_of(self, ids: Tensor) -> HeadFunction:
        if self._narrow is None or not self._narrow[0].equal(ids):
            self._narrow = ids.clone(), self._head.of(ids)
        return self._narrow[1]


def _cut_before_head(traced: Traced, aux_layers: tuple[int, ...], width: int) -> None:
    """Let the graph return hs[k] of every aux layer, and the head's input."""
    gm = traced.graph_module
    output = gm.graph.output_node()
    head = find_head(output.args[0][0])  # type: ignore[index, arg-type]
    assert head is not None, "describe_target found it"
    ids = token_ids(gm.graph)
    streams = residual_streams(gm.graph, ids, width)
    taps = []
    for layer in aux_layers:
        found = [head.hidden] if layer == FINAL_NORM else streams.get(layer, [])
        if len(found) != 1:
            raise DraftMismatch(
                f"hs[{layer}] of the target: expected one residual stream, found {len(found)}; it "
                f"has hs{sorted(streams)}"
            )
        taps += found
    output.args = ((*taps, head.hidden),)
    behind = descendants(head.node) | {head.node}
    for node in reversed(list(gm.graph.nodes)):
        if node in behind and node.op not in ("output", "placeholder") and not node.users:
            gm.graph.erase_node(node)
    for marker in markers(gm):
        _use_library_attention(marker)
    gm.recompile()


def _use_library_attention(marker: fx.Node) -> None:
    """Use torch's own attention, which is much faster, where it computes the same."""
    _, _, _, _, *options = marker.args
    if options == [0, 0.0, None]:
        marker.target = _attend


def _attend(
    query_BNTH: Tensor, key_BNTH: Tensor, value_BNTH: Tensor, scale: float, *_: Any
) -> Tensor:
    grouped = query_BNTH.shape[1] != key_BNTH.shape[1]
    out_BNTH = F.scaled_dot_product_attention(
        query_BNTH, key_BNTH, value_BNTH, is_causal=True, scale=scale, enable_gqa=grouped
    )
    return out_BNTH.transpose(1, 2).contiguous()
