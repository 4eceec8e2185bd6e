"""Other weights for a program that runs: checked as a whole, then copied in place.

Graphs remember addresses, so nothing is replaced: a parameter's new value is copied into the memory
that the module and the program share; then all that was made of it is made again by the functions
that made it at the start: quantized copies (`quantize_weights`), `SpecProgram.derived`, and merged
or packed inputs (`bind_again`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from compilespec.errors import CheckpointError, InvalidOption, NotSupported
from compilespec.errors.suggest import did_you_mean
from compilespec.methods.base import Drafter
from compilespec.program import InputSpec, SpecProgram
from compilespec.quantization import Quantize, quantize_weights
from compilespec.runtime.weights import bind_again
from compilespec.tracing.checkpoint_files import listed
from compilespec.tracing.quantized_weights import is_quantized, plain_tensors, take_apart
from compilespec.tracing.state_names import StateName, place_of, state_tensors

Given = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]] | nn.Module
UpdatePolicy = Literal["finish", "continue"]
POLICIES = ("finish", "continue")
DRAFTER = "the drafter's "  # begins a name of its state dict in messages


@dataclass(frozen=True, kw_only=True)
class Write:
    """A tensor that the program holds, and its new value."""

    name: str
    held: Tensor
    value: Tensor


@dataclass(frozen=True, kw_only=True)
class UpdatableModule:
    """A module of the program, and its state dict as it was given, before it was quantized."""

    module: nn.Module
    names: Mapping[str, StateName]
    quantize: Quantize | None = None
    prefix: str = ""  # begins its names in messages
    tensors: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        module: nn.Module,
        names: Mapping[str, StateName],
        quantize: Quantize | None,
        prefix: str = "",
    ) -> UpdatableModule:
        tensors = dict(state_tensors(module))
        return cls(module=module, names=names, quantize=quantize, prefix=prefix, tensors=tensors)

    def check(self, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The values by the first of the names that each tensor has.

        Raises: CheckpointError, NotSupported, which name what does not fit.
        """
        unknown = [name for name in given if name not in self.names]
        if unknown:
            hint = did_you_mean(unknown[0], list(self.names))
            raise CheckpointError(
                f"update_weights: {self.prefix}{listed(unknown)}: no such tensor in the state dict "
                f"of {type(self.module).__name__}{hint}"
            )
        values: dict[str, Tensor] = {}
        for name, value in given.items():
            self._check_one(name, value)
            known = values.setdefault(self.names[name].same_as, value)
            if known is not value and not _are_equal(known, value):
                raise CheckpointError(
                    f"update_weights: {self.prefix}{name} and {self.names[name].same_as} are one "
                    "tensor of the model and were given two values: give one of them"
                )
        return values

    def _check_one(self, name: str, value: Tensor) -> None:
        known, held = self.names[name], self.tensors[name]
        what = f"update_weights: {self.prefix}{name}"
        if known.why_fixed:
            raise NotSupported(f"{what} cannot be changed: {known.why_fixed}; leave it out")
        if is_quantized(value) or value.is_meta:
            kind = "a quantized tensor" if is_quantized(value) else "a tensor without values"
            raise CheckpointError(f"{what}: expected plain numbers, got {kind}")
        if tuple(value.shape) != known.shape:
            raise CheckpointError(
                f"{what}: expected shape {list(known.shape)}, got {list(value.shape)}"
            )
        if value.dtype != known.dtype:
            raise CheckpointError(
                f"{what}: expected {known.dtype}, got {value.dtype}; give tensor.to({known.dtype})"
            )
        if not value.is_floating_point() and not _are_equal(held, value):
            raise NotSupported(
                f"{what} cannot be changed: the program was compiled for these integers; compile "
                "again"
            )

    def writes(self, values: Mapping[str, Tensor]) -> Iterator[Write]:
        """The copies to make for values by their first names."""
        quantized: dict[str, Tensor] = {}
        seen: set[tuple[int, ...]] = set()
        for name, known in self.names.items():
            held, value = self.tensors[name], values.get(known.same_as)
            if value is None or (held.numel() and place_of(held) in seen):
                continue
            seen.add(place_of(held))
            if is_quantized(held):
                quantized[name] = value
            else:
                yield Write(name=self.prefix + name, held=held, value=value)
        yield from self._quantized_writes(quantized)

    def _quantized_writes(self, values: Mapping[str, Tensor]) -> Iterator[Write]:
        """The parts of the weights' new quantized forms.  Raises: NotSupported where a form is
        another than at the start.
        """
        if not values:
            return
        assert self.quantize is not None, "others are quantized in the checkpoint, which is fixed"
        device = next(self.tensors[name].device for name in values)
        plain = {n.removesuffix(".weight"): v.detach().to(device) for n, v in values.items()}
        made = quantize_weights(plain, self.quantize)
        for name in values:
            held, new = self.tensors[name], made[name.removesuffix(".weight")]
            if not is_quantized(new) or take_apart(new)[0] != take_apart(held)[0]:
                raise NotSupported(
                    f"update_weights: {self.prefix}{name} takes another form when it is quantized; "
                    "compile again"
                )
            for part, value in zip(plain_tensors(held), plain_tensors(new), strict=True):
                yield Write(name=self.prefix + name, held=part, value=value)


class WeightUpdates:
    """Changes the weights of a program that runs.

    Args:
        specs, bound: the weight inputs of its graphs, and their tensors.
    """

    def __init__(
        self,
        program: SpecProgram,
        specs: Mapping[str, InputSpec],
        bound: Mapping[str, Tensor],
        target: UpdatableModule,
        draft_quantize: Quantize | None = None,
    ) -> None:
        self._program, self._specs, self._bound = program, specs, bound
        self._target, self._drafter = target, program.drafter
        self._draft: UpdatableModule | None = None
        if isinstance(self._drafter, Drafter):
            names = self._drafter.given_state
            self._draft = UpdatableModule.of(self._drafter, names, draft_quantize, DRAFTER)

    def check(self, weights: Given | None, draft: Given | None) -> list[Write]:
        """All that is to be copied; nothing is changed yet.

        Raises: CheckpointError (a name, a shape or a dtype that the model does not have),
            NotSupported (what cannot be changed), InvalidOption (neither a state dict, nor an
            iterator, nor a module).
        """
        writes: list[Write] = []
        if weights is not None:
            values = self._target.check(_read_given(weights, "weights"))
            writes += self._target.writes(values)
            writes += self._draft_copies(values)
        if draft is not None:
            writes += self._draft_writes(_read_given(draft, "draft"))
        return self._needed(writes)

    def apply(self, writes: Iterable[Write]) -> None:
        """Copy in place, and make anew what was made of what changes."""
        changed = set()
        with torch.no_grad():
            for write in writes:
                write.held.copy_(write.value)
                changed.add(place_of(write.held))
            for name, derived in self._program.derived.items():
                parts = plain_tensors(self._source(derived.source))
                if not changed.isdisjoint(map(place_of, parts)):
                    changed |= self._write_derived(name, derived.make(self._source(derived.source)))
            weights = self._program.weights
            for name, spec in self._specs.items():
                if not changed.isdisjoint(place_of(weights[source]) for source in spec.sources):
                    bind_again(spec, weights, self._bound[name])

    def _source(self, name: str) -> Tensor:
        weights = self._program.weights
        return weights[name] if name in weights else self._program.target.weights[name]

    def _write_derived(self, name: str, value: Tensor) -> set[tuple[int, ...]]:
        weights, places = self._program.weights, set()
        parts = {name: value}
        if is_quantized(value):
            parts = {f"{name}.{part}": one for part, one in take_apart(value)[1].items()}
        for part, one in parts.items():
            if part in weights:  # else no graph reads it
                weights[part].copy_(one)
                places.add(place_of(weights[part]))
        return places

    def _draft_copies(self, values: Mapping[str, Tensor]) -> Iterator[Write]:
        """The drafter's own quantized copies of what it shares with the target."""
        if self._draft is None:
            return
        target = self._target.names
        copied = {
            known.same_as: values[target[known.of_target].same_as]
            for name, known in self._draft.names.items()
            if known.of_target
            and is_quantized(self._draft.tensors[name])
            and not is_quantized(self._target.tensors[known.of_target])
            and target[known.of_target].same_as in values
        }
        yield from self._draft.writes(copied)

    def _draft_writes(self, given: dict[str, Tensor]) -> Iterator[Write]:
        """Raises: InvalidOption where there is no drafter with weights."""
        draft = self._draft
        if draft is None or not draft.names:
            raise InvalidOption(
                "update_weights: draft= needs a drafter that has weights, and "
                f"spec={self._program.method!r} has none: leave it out"
            )
        assert isinstance(self._drafter, Drafter), "it has a state"
        load_like = self._drafter.load_like
        if load_like is not None and not draft.names.keys() >= given.keys():
            loaded = dict(state_tensors(load_like(given)))
            given = {n: t for n, t in loaded.items() if not self._is_shared(n, t)}
        elif given and next(iter(given)) not in draft.names:  # a module inside the drafter
            first = next(iter(given))
            prefix = next(
                (n.removesuffix(first) for n in draft.names if n.endswith(f".{first}")), ""
            )
            given = {prefix + name: tensor for name, tensor in given.items()}
        yield from draft.writes(draft.check(given))

    def _is_shared(self, name: str, tensor: Tensor) -> bool:
        """True for what a drafter that was loaded anew shares with the target."""
        assert self._draft is not None
        known = self._draft.names.get(name)
        if known is None or not known.of_target:
            return False
        return place_of(tensor) == place_of(self._target.tensors[known.of_target])

    def _needed(self, writes: Iterable[Write]) -> list[Write]:
        """The writes that the program reads.

        Raises: NotSupported for another one that would change a value.
        """
        sources = {source for spec in self._specs.values() for source in spec.sources}
        read = {place_of(self._program.weights[source]) for source in sources}
        for derived in self._program.derived.values():
            read.update(map(place_of, plain_tensors(self._source(derived.source))))
        needed, writes = [], list(writes)
        memory = {_memory(write.held) for write in writes}
        for write in writes:
            if place_of(write.held) in read:
                needed.append(_apart(write, memory))
            elif not _are_equal(write.held, write.value):
                raise NotSupported(
                    f"update_weights: {write.name} cannot be changed: the program does not read "
                    "it, or took its value when it was compiled; leave it out, or compile again"
                )
        return needed


def _apart(write: Write, memory: Collection[int]) -> Write:
    """The write; with a copy of a value that lies in memory that is written, but is not itself."""
    value, held = write.value, write.held
    is_itself = place_of(value) == place_of(held) and value.stride() == held.stride()
    if is_itself or _memory(value) not in memory:
        return write
    return dataclasses.replace(write, value=value.clone())


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _read_given(given: Any, keyword: str) -> dict[str, Tensor]:
    """The tensors by name.  Raises: InvalidOption, CheckpointError for a name that comes twice."""
    if isinstance(given, nn.Module):
        given = given.state_dict()
    pairs = given.items() if isinstance(given, Mapping) else given
    wanted = f"update_weights: {keyword}= must be a state dict, an iterator of (name, tensor)"
    found: dict[str, Tensor] = {}
    if isinstance(pairs, str | bytes) or not isinstance(pairs, Iterable):
        raise InvalidOption(f"{wanted} or a module; got {type(given).__name__}")
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not isinstance(pair[0], str):
            raise InvalidOption(f"{wanted} or a module; it gave a {type(pair).__name__}")
        name, tensor = pair
        if not isinstance(tensor, Tensor):
            raise InvalidOption(f"{wanted} or a module; {name} is a {type(tensor).__name__}")
        if name in found:
            raise CheckpointError(f"update_weights: {name} was given twice")
        found[name] = tensor.detach()
    return found


def _are_equal(held: Tensor, value: Tensor) -> bool:
    return torch.equal(held, value.to(held.device))
