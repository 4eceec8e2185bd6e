"""Runs one stage of a phase's graph, operator by operator, on named inputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from compilespec.errors import SpecError
from compilespec.inspect.history import history_mixers, keeps_masks
from compilespec.passes.context import PassContext
from compilespec.passes.references import Case, Values
from compilespec.passes.references.base import AttentionCall, Follow, Mixers, Tokens
from compilespec.program import InputSpec, marker_kind
from compilespec.runtime.weights import materialise


@dataclass
class Decisions:
    """The argmaxes of a run: the index that won each row, and its margin.

    Rounding may flip a near tie, and everything after it.  A run that is given another's decisions
    follows them; `parted` lists where its own scores disagree by more than `bound`.
    """

    winners: list[Tensor] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)  # smallest, as a part of the largest score
    followed: Iterator[Tensor] | None = None
    bound: float = 0.0
    num_ties: int = 0
    parted: list[str] = field(default_factory=list)  # node names

    def take(self, node: str, scores: Tensor, winner: Tensor) -> Tensor:
        """Record a decision; returns the one to go on with."""
        rows, scale = scores.detach().flatten(0, -2).double(), float(scores.abs().max()) or 1.0
        if self.followed is None:
            best = rows.topk(min(2, rows.shape[-1])).values
            self.margins.append(float((best[:, 0] - best[:, -1]).min()) / scale)
            self.winners.append(winner)
            return winner
        wanted = next(self.followed, None)
        if wanted is None or wanted.numel() != winner.numel():
            self.parted.append(node)
            return winner
        wanted = wanted.reshape(winner.shape)
        own, other = (rows.gather(1, w.reshape(-1, 1)) for w in (winner, wanted))
        self.num_ties += int((winner != wanted).sum())
        if not float((own - other).max()) <= self.bound * scale:  # NaN parts, too
            self.parted.append(node)
        return wanted


_CACHED = (
    torch.ops.compilespec.paged_attention.default,
    torch.ops.compilespec.masked_attention.default,
)
_ARGMAX = ("argmax", torch.argmax, torch.ops.aten.argmax.default)


class Stage:
    """One stage of a phase: a graph, the module that holds its constants, and its weights."""

    def __init__(
        self,
        graph: fx.Graph,
        owner: fx.GraphModule,
        ctx: PassContext,
        inputs: Mapping[str, InputSpec],
        bound: dict[str, Tensor],
    ) -> None:
        self.graph, self._owner, self._ctx = graph, owner, ctx
        self._inputs, self._bound = inputs, bound
        self.device = ctx.config.device

    def __call__(
        self,
        inputs: Mapping[str, Tensor],
        mixers: Mixers | None = None,
        decisions: Decisions | None = None,
        *,
        follow: Follow | None = None,
    ) -> Values:
        """Run on copies of `inputs`, by name; `mixers` are called in place of markers, `follow`
        after every operation.  Masks over all keys of a request find these in the caches.
        """
        known = {**self._history(inputs), **(mixers or {})}
        run = _StageRun(self.graph, self._owner, known, decisions or Decisions(), follow)
        feeds, buffers = [], {}
        for node in self.graph.find_nodes(op="placeholder"):
            name = node.meta["role"]
            spec = self._inputs.get(name)
            if spec is not None and spec.kind == "weight":
                feeds.append(self.weight(spec))
                continue
            if name not in inputs:
                raise SpecError(
                    f"the graph has an input {name!r} that the verifier cannot make up; known: "
                    f"{', '.join(sorted(inputs))}"
                )
            feeds.append(inputs[name].clone())
            if spec is not None and spec.kind in ("state", "cache"):
                buffers[name] = feeds[-1]
        with torch.no_grad():
            results = run.run(*feeds)
        output = next(iter(reversed(self.graph.nodes)))
        names: Sequence[str] = output.meta["names"]
        return Values(
            outputs=dict(zip(names, results, strict=True)),
            roles=run.roles,
            calls=run.calls,
            buffers=buffers,
            nodes=run.nodes,
        )

    def _history(self, inputs: Mapping[str, Tensor]) -> Mixers:
        """Mixers for masks over all keys of a request; none of a call without requests."""
        if "block_table_RM" not in inputs or not keeps_masks(self.graph):
            return {}
        case = Case(name="", key=self._ctx.key, batch_size=0, inputs=inputs)
        return history_mixers(self._ctx, case)

    def weight(self, spec: InputSpec) -> Tensor:
        """A weight in the layout that the graph asks for."""
        key = f"{spec.packed} {' '.join(spec.sources)}"
        if key not in self._bound:
            self._bound[key] = materialise(spec, self._ctx.weights)
        return self._bound[key]


class _StageRun(fx.Interpreter):
    def __init__(
        self,
        graph: fx.Graph,
        owner: fx.GraphModule,
        mixers: Mixers,
        decisions: Decisions,
        follow: Follow | None,
    ) -> None:
        super().__init__(owner, garbage_collect_values=False, graph=graph)
        self._follow = follow
        self._mixers, self._decisions, self._num_markers = mixers, decisions, Counter[str]()
        self.roles: dict[str, Tensor] = {}
        self.calls: list[AttentionCall] = []
        self.nodes: dict[str, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        result: Any
        kind = marker_kind(n)
        if kind in self._mixers:
            args, _ = self.fetch_args_kwargs_from_env(n)
            result = self._mixers[kind](self._num_markers[kind], args)
            self._num_markers[kind] += 1
        else:
            result = super().run_node(n)
        if n.op in ("call_function", "call_method"):
            if self._follow is not None:
                result = self._follow(n, self.fetch_args_kwargs_from_env(n)[0], result)
            if n.target in _ARGMAX:
                (scores, *dims), options = self.fetch_args_kwargs_from_env(n)
                if (dims[0] if dims else options.get("dim")) in (-1, scores.dim() - 1):
                    result = self._decide(n, scores, result)
            if n.target is torch.ops.compilespec.row_argmax.default:
                (scores,), _ = self.fetch_args_kwargs_from_env(n)
                result = self._decide(n, scores, result)
            if n.target is torch.ops.compilespec.argmax_shard.default:
                (logits, *sizes), _ = self.fetch_args_kwargs_from_env(n)
                scores = torch.ops.compilespec.all_gather(logits, logits.dim() - 1, *sizes)
                result = (self._decide(n, scores, result[0]), result[1])
            if n.target is torch.ops.compilespec.argmax_linear.default:
                args, _ = self.fetch_args_kwargs_from_env(n)
                scores = torch.nn.functional.linear(*args)
                result = (self._decide(n, scores, result[0]), result[1])
            if n.target in _CACHED:
                self._note_call(n)
            if "role" in n.meta:
                self.roles[n.meta["role"]] = result
            self.nodes[n.name] = result
        return result

    def _note_call(self, n: fx.Node) -> None:
        args, _ = self.fetch_args_kwargs_from_env(n)
        slot, row, position = args[5:8]
        tokens = Tokens(slot=slot, row=row, position=position)
        cache: Any = n.args[3]
        self.calls.append(
            AttentionCall(cache=cache.meta["role"], tokens=tokens, key=args[1], node=n.name)
        )

    def _decide(self, n: fx.Node, scores: Tensor, winner: Tensor) -> Tensor:
        taken = self._decisions.take(n.name, scores, winner.reshape(scores.shape[:-1]))
        return taken.reshape(winner.shape)
