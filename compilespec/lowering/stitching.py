"""The plan that puts the pieces of a step together, and the callable made from it.  `pieces.py`
cuts a graph into pieces and writes the plan; a plan is stored, and read without the graph.

`pieces.py` cuts a graph into pieces and writes the plan; a plan is stored, and read without the
graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class PieceStep:
    """A call of a piece; its values are numbered, the phase's inputs first."""

    piece: str
    """Key of the piece's structure."""
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class OpStep:
    """A call of an operator between two pieces."""

    target: str
    """Name of the operator, such as "compilespec.paged_attention.default"."""
    args: tuple[tuple[str, Any], ...]
    """("value", number) or ("constant", number or None)."""
    output: int

    @property
    def inputs(self) -> tuple[int, ...]:
        return tuple(value for kind, value in self.args if kind == "value")

    @property
    def operator(self) -> Callable[..., torch.Tensor]:
        found: Any = torch.ops
        for name in self.target.split("."):
            found = getattr(found, name)
        return found

    def bind(self, values: Mapping[int, Any]) -> list[Any]:
        return [values[value] if kind == "value" else value for kind, value in self.args]


Step = PieceStep | OpStep


@dataclass(frozen=True, kw_only=True)
class StitchPlan:
    """The sequence of pieces and operators that makes up a phase."""

    num_inputs: int
    steps: tuple[Step, ...]
    outputs: tuple[int, ...]

    @functools.cached_property
    def piece_steps(self) -> tuple[PieceStep, ...]:
        return tuple(step for step in self.steps if isinstance(step, PieceStep))

    @functools.cached_property
    def dies_after(self) -> tuple[tuple[int, ...], ...]:
        """By step, the values that are not read after it; inputs and outputs stay."""
        last: dict[int, int] = {}
        for index, step in enumerate(self.steps):
            made = (step.output,) if isinstance(step, OpStep) else step.outputs
            last.update(dict.fromkeys((*step.inputs, *made), index))
        dying: list[list[int]] = [[] for _ in self.steps]
        for value, index in last.items():
            if value >= self.num_inputs and value not in self.outputs:
                dying[index].append(value)
        return tuple(map(tuple, dying))

    def dies_next(self, index: int) -> bool:
        """True where only the piece right after the operator at `index` reads its result."""
        step, following = self.steps[index], index + 1
        return (
            isinstance(step, OpStep)
            and following < len(self.steps)
            and isinstance(self.steps[following], PieceStep)
            and step.output in self.dies_after[following]
        )

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of the distinct pieces."""
        return tuple(dict.fromkeys(step.piece for step in self.piece_steps))

    def to_json(self) -> dict[str, Any]:
        steps: list[dict[str, Any]] = []
        for step in self.steps:
            if isinstance(step, OpStep):
                steps.append({"target": step.target, "args": step.args, "output": step.output})
            else:
                steps.append({"piece": step.piece, "inputs": step.inputs, "outputs": step.outputs})
        return {"num_inputs": self.num_inputs, "steps": steps, "outputs": self.outputs}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> StitchPlan:
        steps: list[Step] = []
        for step in record["steps"]:
            if "target" in step:
                args = tuple((kind, value) for kind, value in step["args"])
                steps.append(OpStep(target=step["target"], args=args, output=step["output"]))
            else:
                steps.append(
                    PieceStep(
                        piece=step["piece"],
                        inputs=tuple(step["inputs"]),
                        outputs=tuple(step["outputs"]),
                    )
                )
        return cls(
            num_inputs=record["num_inputs"], steps=tuple(steps), outputs=tuple(record["outputs"])
        )


class Stitched:
    """The callable of a phase in pieces; values are freed after their last use.

    Args: run: a call that does the same without Python; None without one.
    """

    def __init__(
        self,
        plan: StitchPlan,
        pieces: Mapping[str, Callable[..., Any]],
        run: Callable[..., tuple[Any, ...]] | None = None,
    ) -> None:
        self.plan, self.pieces = plan, dict(pieces)
        self._run = run or _in_a_line(plan, self.pieces)

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        return self._run(*inputs)


def _in_a_line(
    plan: StitchPlan, pieces: Mapping[str, Callable[..., Any]]
) -> Callable[..., tuple[Any, ...]]:
    """The plan as a Python function without loops or look-ups: a deep step makes a hundred calls
    for every token.
    """
    scope: dict[str, Any] = {}
    names = {key: _add(scope, "piece", pieces[key]) for key in plan.keys}
    lines = [f"def run({_values(range(plan.num_inputs))}):"]
    for step, dead in zip(plan.steps, plan.dies_after, strict=True):
        if isinstance(step, OpStep):
            args = ", ".join(
                f"v{value}" if kind == "value" else _add(scope, "constant", value)
                for kind, value in step.args
            )
            lines.append(f"    v{step.output} = {_add(scope, 'op', step.operator)}({args})")
        else:
            call = f"{names[step.piece]}({_values(step.inputs)})"
            lines.append(f"    [{_values(step.outputs)}] = {call}")
        if dead:
            lines.append(f"    del {_values(dead)}")
    lines.append(f"    return ({_values(plan.outputs)})")
    exec("\n".join(lines), scope)
    run: Callable[..., tuple[Any, ...]] = scope["run"]
    return run


def _add(scope: dict[str, Any], kind: str, value: Any) -> str:
    """Give a value a new name in `scope`."""
    name = f"{kind}_{len(scope)}"
    scope[name] = value
    return name


def _values(numbers: Iterable[int]) -> str:
    return "".join(f"v{number}, " for number in numbers)
