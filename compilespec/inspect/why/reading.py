"""Reads a whole text without caches: the words of target and drafter at every token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from compilespec.methods.capabilities import FINAL_NORM
from compilespec.methods.draft_model.drafter import ModelDrafter
from compilespec.methods.recycled import RecycledDrafter
from compilespec.program import SpecProgram, Traced
from compilespec.tracing.structure import find_head, residual_streams, token_ids

MAX_TOKENS = 2048  # of a text; what follows is not read


class TargetSaid(NamedTuple):
    """The target's results for a text of T tokens: entry t is about the token after t."""

    best_T: Tensor
    """int64, the likeliest id."""
    logits_TV: Tensor
    streams: Mapping[int, Tensor]
    """hs[k], [1, T, D], by k; those of FINAL_NORM enter the head."""


class Guesses(NamedTuple):
    """The drafter's guesses at the tokens of a text from `first` on, G of them."""

    first: int
    draft_G: Tensor
    """int64, the target's ids."""
    row_G: Tensor
    """int64, the row of the drafter's head that says so."""
    right_G: Tensor
    """bool."""
    known_G: Tensor
    """bool: the drafter can propose the text's token."""
    cost_G: Tensor
    """float32, minus the log-probability that it gives to tokens, on average by the target's own
    probabilities of those that it can propose.
    """
    entropy_G: Tensor
    """float32, the cost that it expects itself."""

    def is_right(self, index: int) -> bool:
        return self.first <= index < self.first + len(self.right_G) and bool(
            self.right_G[index - self.first]
        )


class TargetReader:
    """The target's graph, run over whole texts."""

    def __init__(self, traced: Traced) -> None:
        self._traced = traced
        graph = traced.graph_module.graph
        output: Any = graph.output_node().args[0]
        head = find_head(output[0])
        self._logits: fx.Node = output[0]
        self._kept: dict[fx.Node, int] = {}
        self.num_layers = 0
        if head is None:
            return
        width = head.hidden.meta["example_value"].shape[-1]
        streams = residual_streams(graph, token_ids(graph), int(width))
        self.num_layers = max(streams, default=0)
        self._kept = {nodes[0]: k for k, nodes in streams.items() if len(nodes) == 1}
        self._kept[head.hidden] = FINAL_NORM

    @torch.no_grad()
    def read(self, tokens: Sequence[int], start: int) -> TargetSaid:
        """The results for a text; logits of the tokens before `start - 1` are left out."""
        device = next(iter(self._traced.weights.values())).device
        ids = torch.tensor([tokens], dtype=torch.int32, device=device)
        positions = torch.arange(len(tokens), dtype=torch.int32, device=device).unsqueeze(0)
        run = _Keeping(self._traced.graph_module, {*self._kept, self._logits})
        run.run(*self._traced.bind(input_ids=ids, position_ids=positions))
        logits = run.kept[self._logits][0, start - 1 :]
        streams = {k: run.kept[node] for node, k in self._kept.items() if node in run.kept}
        return TargetSaid(logits.argmax(-1), logits, streams)


class _Keeping(fx.Interpreter):
    """Runs a graph and keeps the values of some nodes."""

    def __init__(self, gm: fx.GraphModule, nodes: set[fx.Node]) -> None:
        super().__init__(gm)
        self._nodes = nodes
        self.kept: dict[fx.Node, Tensor] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n in self._nodes:
            self.kept[n] = value
        return value


@dataclass(frozen=True, kw_only=True)
class DraftReader:
    """A drafter, run over whole texts: its first draft after every token, and its second."""

    drafter: Any

    @torch.no_grad()
    def guess(
        self,
        tokens: Sequence[int],
        start: int,
        said: TargetSaid,
        *,
        aux_layers: Sequence[int] | None = None,
        draft_ids: Tensor | None = None,
        depth: int = 1,
    ) -> Guesses:
        """Its guesses at the tokens of the answer.

        Args:
            aux_layers: other taps than the drafter has; draft_ids: the same of its head's rows.
            depth: 2: the second draft of each step, the first one being the text's token.
        """
        if isinstance(self.drafter, ModelDrafter):
            first, logits, own = _of_model(self.drafter, tokens)
        else:
            first, logits, own = _of_head(self.drafter, tokens, said, aux_layers, depth)
        skipped = max(0, start + 1 - first)
        own = own if draft_ids is None else draft_ids
        first, logits = first + skipped, logits[skipped:-1]
        return _compare(tokens[first:], first, logits, said.logits_TV[first - start : -1], own)


def draft_reader(program: SpecProgram) -> DraftReader | None:
    """The reader of the program's drafter; None for those that cannot be run over a text, or whose
    drafts may come from a look-up.
    """
    drafter: Any = program.drafter
    if program.capabilities.looks_up:
        return None
    is_head = isinstance(drafter, RecycledDrafter) and hasattr(drafter, "logits")
    is_model = isinstance(drafter, ModelDrafter) and drafter.vocab_map is None
    return DraftReader(drafter=drafter) if is_head or is_model else None


def _of_model(drafter: ModelDrafter, tokens: Sequence[int]) -> tuple[int, Tensor, None]:
    device = next(drafter.model.parameters()).device
    logits = drafter.model(torch.tensor([tokens], device=device)).logits[0]
    return 1, logits, None


def _of_head(
    drafter: Any,
    tokens: Sequence[int],
    said: TargetSaid,
    aux_layers: Sequence[int] | None,
    depth: int,
) -> tuple[int, Tensor, Tensor | None]:
    """Row t takes hidden state t and token t+1, and guesses token t+2."""
    layers = drafter.aux_layers if aux_layers is None else aux_layers
    aux = torch.cat([said.streams[layer] for layer in layers], -1)
    ids = torch.tensor([tokens], dtype=torch.int32, device=aux.device)
    positions = torch.arange(len(tokens), dtype=torch.int32, device=aux.device).unsqueeze(0)
    hidden = drafter.combine(aux)[:, :-1]
    head, recycled = drafter(ids[:, 1:], positions[:, :-1], hidden)
    for step in range(1, depth):
        hidden = recycled[:, :-1]
        head, recycled = drafter(ids[:, 1 + step :], positions[:, step:-1], hidden)
    return 1 + depth, drafter.logits(head[0]), getattr(drafter, "draft_ids", None)


def _compare(
    truth: Sequence[int], first: int, logits_GV: Tensor, target_GV: Tensor, draft_ids: Tensor | None
) -> Guesses:
    """The guesses at the tokens `truth`, from a row of each model's logits for each."""
    logs = torch.log_softmax(logits_GV.float(), -1)
    truth_G = torch.tensor(truth, device=logs.device)
    row = logs.argmax(-1)
    if draft_ids is None:
        size = min(logs.shape[1], target_GV.shape[1])
        draft, known, shared = row, truth_G < size, target_GV[:, :size]
    else:
        draft, shared = draft_ids[row], target_GV[:, draft_ids]
        known = torch.isin(truth_G, draft_ids)
    cost = -(torch.softmax(shared.float(), -1) * logs[:, : shared.shape[1]]).sum(-1)
    entropy = -(logs.exp() * logs.clamp(min=-1e4)).sum(-1)
    return Guesses(first, draft, row, draft == truth_G, known, cost, entropy)
