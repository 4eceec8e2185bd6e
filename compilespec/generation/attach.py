"""`attach` and `generate_with`: the decoding loop of transformers, run by an engine."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from threading import RLock
from typing import Any

import torch
from torch import Tensor, nn

from compilespec.errors import InvalidOption, NotSupported
from compilespec.generation.call import Call, check_mode
from compilespec.generation.loop import generate_rows
from compilespec.generation.module_state import (
    check_computes_as_compiled,
    form_of,
    weights_of,
)
from compilespec.generation.peft_models import HeldAdapters, inner_model
from compilespec.generation.records import with_records
from compilespec.generation.translate import translate
from compilespec.pipeline.entry import compile
from compilespec.runtime.engine import Engine

logger = logging.getLogger("compilespec")
_PLACE = "_compilespec_engines"  # the attribute of a module that holds its engines
_ADAPTER = "PEFT"  # the engine's name of the adapter that is in use
_MOST_SEED = 2**63 - 1


def attach(
    model: Any, spec: Any = "none", *, fallback: bool = False, draft: Any = None, **keywords: Any
) -> Any:
    """Let `model.generate(...)` use an engine, with its arguments, outputs and seeds as they are.

    Greedy tokens are those of transformers, except where two tokens are nearly as probable and the
    order of a sum decides.  Sampled ones follow the same distribution; their seeds come from
    torch's generator, so `torch.manual_seed` repeats them.  Logits processors are called with one
    row at a time, and for drafts too: what they return must depend on their arguments alone.
    Stopping criteria are called with all rows after every token, as in transformers.  A second
    engine, with `host_processors=True`, is compiled when a call first has a processor that the step
    does not have itself.  Weights that changed in place since the last call are taken over
    (`Engine.update_weights`); writes through `.data` are not seen.

    Of a model of PEFT each call uses the LoRA adapter that is active then; adapters that are
    trained, chosen or disabled in between compile nothing.

    Args:
        model: a causal language model of transformers, or a PeftModel with one.
        spec, draft, keywords: as for `compile`.
        fallback: hand calls that the engine cannot serve (beams, assisted generation, images) to
            transformers, with a warning, instead of refusing them.
    Returns: the model.
    Raises: as `compile`; InvalidOption where the model has no `generate`.
    """
    inner = _checked(model)
    detach(inner)
    engines = Engines(spec, draft, keywords, fallback=fallback)
    engines.start(inner)
    inner.__dict__[_PLACE] = engines
    inner.__class__ = _attached_class(type(inner))
    return model


def detach(model: Any) -> Any:
    """Give a model the `generate` of transformers back, and close its engines."""
    inner = inner_model(model)
    engines = inner.__dict__.pop(_PLACE, None)
    if engines is not None:
        engines.close()
    base = getattr(type(inner), "_compilespec_base", None)
    if base is not None:
        inner.__class__ = base
    return model


def engine_of(model: Any) -> Engine:
    """The engine of an attached model, for its plan and statistics.  Raises: InvalidOption."""
    engines = inner_model(model).__dict__.get(_PLACE)
    if engines is None:
        raise InvalidOption("engine_of: this model has no engine; call attach(model) first")
    return next(iter(engines.started.values()))


def generate_with(
    model: Any, spec: Any = "none", *, draft: Any = None, **keywords: Any
) -> Callable[..., Any]:
    """The decoding loop for `model.generate(..., custom_generate=fn)`.

    The engine is compiled at once, and found again when the same model is given with the same
    arguments.  transformers hands its `tokenizer=` to no function of this kind, so `stop_strings`
    need `attach`.

    Args and raises: as for `attach`.
    """
    model = _checked(model)
    known = model.__dict__.get(_PLACE)
    engines = Engines(spec, draft, keywords, fallback=False)
    if known is not None and known.recipe == engines.recipe:
        engines = known
    else:
        detach(model)
        engines.start(model)
        model.__dict__[_PLACE] = engines

    def custom_generate(  # transformers reads these names
        model: Any, input_ids: Tensor, logits_processor: Any, stopping_criteria: Any,
        generation_config: Any, synced_gpus: bool = False, streamer: Any = None,
        **model_kwargs: Any,
    ) -> Any:  # fmt: skip
        if model.__dict__.get(_PLACE) is not engines:
            raise InvalidOption(
                "custom_generate: this function belongs to another model, or to an engine that was "
                "replaced; call generate_with(model) again"
            )
        ours = sys._getframe(1).f_locals  # transformers 5.x leaves these out of the call
        if ours.get("assistant_model") is not None:
            raise NotSupported("generate: assistant_model is not used here; give draft= instead")
        return engines.generate(
            model, input_ids, logits_processor=logits_processor,
            stopping_criteria=stopping_criteria, generation_config=generation_config,
            synced_gpus=synced_gpus, streamer=streamer or ours.get("streamer"), **model_kwargs,
        )  # fmt: skip

    return custom_generate


@dataclass
class Engines:
    """The engines of a model, compiled when they are first needed."""

    spec: Any
    draft: Any
    keywords: Mapping[str, Any]
    fallback: bool = False
    started: dict[bool, Engine] = field(default_factory=dict, compare=False)
    _seen: dict[bool, Any] = field(default_factory=dict, compare=False)
    _adapters: dict[int, Any] = field(default_factory=dict, compare=False)  # loaded, by engine
    _form: Any = field(default=None, compare=False)
    _lock: Any = field(default_factory=RLock, compare=False)

    @property
    def recipe(self) -> tuple[Any, ...]:
        return (self.spec, self.draft, dict(self.keywords))

    def __deepcopy__(self, memo: object) -> Engines:
        return Engines(self.spec, self.draft, self.keywords, fallback=self.fallback)

    def __reduce__(self) -> tuple[Any, ...]:
        return (Engines, (self.spec, self.draft, self.keywords, self.fallback))

    def start(self, model: Any) -> None:
        self.engine(model, HeldAdapters.of(model), with_host_processors=False)

    def close(self) -> None:
        for engine in self.started.values():
            engine.close()
        self.started.clear()
        self._adapters.clear()

    def engine(self, model: Any, held: HeldAdapters, *, with_host_processors: bool) -> Engine:
        """The engine for a call, with the model's weights and adapter of now."""
        check_computes_as_compiled(model)
        form = (form_of(held.bare), held.ranks)
        if self.started and form != self._form:
            logger.info("the model has another form or other adapters: compiling it again")
            self.close()
        self._form = form
        kind = with_host_processors or bool(self.keywords.get("host_processors"))
        if kind not in self.started:
            keywords = {**self.keywords, **({"host_processors": True} if kind else {})}
            with _as_its_own_class(held.bare):
                self.started[kind] = compile(
                    held.bare, self.spec, draft=self.draft, **_with_room(keywords, held)
                )
        elif weights_of(held.bare) != self._seen[kind]:
            self.started[kind].update_weights(held.bare)
        self._seen[kind] = weights_of(held.bare)  # starts and updates write, too
        return self.started[kind]

    def _load(self, engine: Engine, held: HeldAdapters) -> str | None:
        """The name of the active adapter in the engine, which has it as it is now."""
        name = held.active(keeps_hooks=self.fallback)
        if name is None:
            return None
        version = held.version(name)
        if self._adapters.get(id(engine)) != version:
            engine.adapters.put(_ADAPTER, engine.adapters.read(held.read(name)))
            self._adapters[id(engine)] = version
        return _ADAPTER

    def generate(self, model: Any, input_ids: Tensor, **call: Any) -> Any:
        """The decoding loop of transformers: its arguments and results.  Raises: SpecError."""
        with self._lock, torch.no_grad():
            asked = Call.of(model, input_ids, **call)
            plan = translate(asked)
            held = HeldAdapters.of(model)
            engine = self.engine(model, held, with_host_processors=plan.needs_host)
            adapter = self._load(engine, held)
            seeds = torch.randint(_MOST_SEED, (len(asked.prompts),)).tolist()
            params = plan.params(engine.eos_token_ids, seeds)
            params = [dataclasses.replace(one, adapter=adapter) for one in params]
            tokens = generate_rows(engine, asked, params)
            return with_records(model, asked, tokens)


def _attached_class(base: type) -> type:
    """The model's class with our loop in the place of its own ones."""

    def loop(name: str) -> Callable[..., Any]:
        def run(self: Any, input_ids: Tensor, **call: Any) -> Any:
            engines = self.__dict__.get(_PLACE)
            own = getattr(super(attached, self), name)
            if engines is None:  # a model that was loaded or copied from an attached one
                return own(input_ids, **call)
            try:
                check_mode(name)
                return engines.generate(self, input_ids, **call)
            except NotSupported as error:
                if not engines.fallback:
                    raise
                logger.warning("handed to transformers: %s", error)
                return own(input_ids, **call)

        run.__name__ = name
        return run

    loops = ("_sample", "_beam_search", "_assisted_decoding")
    members: dict[str, Any] = {name: loop(name) for name in loops if hasattr(base, name)}
    members |= {"_compilespec_base": base, "__module__": base.__module__, "__doc__": base.__doc__}
    attached = type(base.__name__, (base,), members)
    return attached


@contextlib.contextmanager
def _as_its_own_class(model: Any) -> Iterator[None]:
    """A start reads the model's class, which is not ours."""
    kept = type(model)
    model.__class__ = getattr(kept, "_compilespec_base", kept)
    try:
        yield
    finally:
        model.__class__ = kept


def _checked(model: Any) -> Any:
    """The transformers model in what was given.  Raises: InvalidOption, NotSupported."""
    inside = getattr(model, "module", None) or getattr(model, "_orig_mod", None)
    if isinstance(inside, nn.Module) and callable(getattr(inside, "generate", None)):
        raise InvalidOption(
            f"attach: {type(model).__name__} wraps the model; give what it wraps, as by "
            "accelerator.unwrap_model(model)"
        )
    if not isinstance(model, nn.Module) or not callable(getattr(model, "generate", None)):
        raise InvalidOption(
            f"attach: expected a causal language model of transformers, got {type(model).__name__}"
        )
    return inner_model(model)


def _with_room(keywords: dict[str, Any], held: HeldAdapters) -> dict[str, Any]:
    """The keywords of `compile`, with room for one of the model's adapters.

    Raises: InvalidOption where the keywords have adapters, too.
    """
    room = held.room()
    if room is None:
        return keywords
    if "adapters" in keywords:
        raise InvalidOption("attach: the model has PEFT's adapters; leave adapters= out")
    return {**keywords, "adapters": {_ADAPTER: room}}
