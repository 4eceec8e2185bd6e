"""Loads the target: a module, or a model by path, by its name on the hub, or "demo"."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from compilespec.errors import (
    CheckpointError,
    InvalidOption,
    ModelNotFound,
    UnsupportedModel,
)
from compilespec.tracing.adapter_files import Adapter
from compilespec.tracing.checkpoint_files import (
    TRAINING_ONLY,
    check_shards,
    drop_mtp,
    integer_tensors,
    listed,
    read_config,
    reason,
    refuse_pointer,
)
from compilespec.tracing.generation_defaults import GenerationDefaults, read_generation_defaults
from compilespec.tracing.gguf_copies import GgufCopy, read_tokenizer
from compilespec.tracing.gguf_file import check_readable, load_gguf, read_once
from compilespec.tracing.gguf_stored import StoredModel, read_stored
from compilespec.tracing.media import SOUND, Medium, medium_of
from compilespec.tracing.placement import read_device, read_dtype
from compilespec.tracing.places import EXPECTED, ModelPlace, find_model
from compilespec.tracing.positions import first_position
from compilespec.tracing.processors import is_processor, load_processor
from compilespec.tracing.quiet import no_progress_bars, quiet_import
from compilespec.tracing.readable import readable
from compilespec.tracing.state_names import StateName, state_names

MAX_SHOWN = 60  # characters of a value in a message
NOTHING = "nothing"  # a file: no blocks can stay in the GGUF file
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


@dataclass(frozen=True, kw_only=True)
class Target:
    """A loaded target and the facts of its checkpoint."""

    model: nn.Module
    directory: Path | None  # its folder, where drafters and counts are looked for too
    tokenizer: Any
    eos_token_ids: tuple[int, ...]
    max_seq_len: int | None  # positions that the model can take; None if unknown
    generation_defaults: GenerationDefaults = field(default_factory=GenerationDefaults)
    given_name: str | None = None  # the name by which it was found, as `ModelPlace` has it
    gguf: Path | None = None  # the file that it was converted from
    notes: tuple[str, ...] = ()  # changes that were made to it, for `Engine.plan()`
    processor: Any = None  # of text and images, where the model takes both
    adapters: Mapping[str, Adapter] | None = None  # by the names that requests use
    state: Mapping[str, StateName] = field(default_factory=dict)  # its state dict, as it was given

    @property
    def name(self) -> str:
        """The name by which it was found, if any, and its class's name."""
        kind = type(self.model).__name__
        return kind if self.given_name is None else f"{self.given_name} ({kind})"

    @functools.cached_property
    def medium(self) -> Medium | None:
        """The medium whose rows its prompts may hold; None for text alone."""
        return medium_of(self.model)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype

    def describe(self) -> str:
        parameter = next(self.model.parameters())
        count = sum(p.numel() for p in self.model.parameters())
        return (
            f"target {type(self.model).__name__}, {count / 1e6:.2f}M parameters, "
            f"{parameter.dtype}, {parameter.device}"
        )


def load_target(
    model: nn.Module | str | Path,
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    tokenizer: Any = None,
    keeps_blocks: bool = False,
    tell: Callable[[str], object] = lambda detail: None,
) -> Target:
    """Load or adopt the target; a module is moved or cast only if a keyword says so.

    Args:
        keeps_blocks: leave the products and the embedding of a GGUF file in its blocks, where that
            is possible (`GgufTensor`); else they are dequantised.
        tell: called with the part that is read, if reading takes long.
    Raises: ModelNotFound (a damaged file too), CheckpointError (tensors missing, unexpected,
    misshapen, in another shard than the index says, or integers where the model has floats),
    MissingDependency, InvalidOption.
    """
    wanted, device = read_dtype(dtype), read_device(device)
    if not isinstance(model, nn.Module | str | Path):
        cure = "; give a tokenizer as tokenizer=" if hasattr(model, "decode") else ""
        got = repr(model)
        if len(got) > MAX_SHOWN or "\n" in got:
            got = f"a {type(model).__name__}"
        raise InvalidOption(f"model must be an nn.Module, {EXPECTED}; got {got}{cure}")
    processor = tokenizer if is_processor(tokenizer) else None
    tokenizer = tokenizer if processor is None else processor.tokenizer
    if tokenizer is not None and not hasattr(tokenizer, "decode"):
        raise InvalidOption(
            "tokenizer must be a transformers tokenizer or have its encode() and decode(); got "
            f"{tokenizer!r}"
        )
    place: ModelPlace | None = None
    if not isinstance(model, nn.Module):
        place = find_model(model)
        model, own = _load_place(place, wanted, keeps_blocks, tell)
        tokenizer = tokenizer if tokenizer is not None else own
    medium = medium_of(model)
    if processor is None and place is not None and medium is not None:
        processor = load_processor(place.directory, medium)
    if wanted is not None or device is not None:
        model = model.to(dtype=wanted, device=device)
    if place is not None:
        _set_experts(model)
    if next(model.parameters(), None) is None:
        raise InvalidOption(
            f"{type(model).__name__} has no parameters; expected a causal language model"
        )
    if (
        place is None
        and type(model).__module__.startswith("torch.nn.")
        and not any(isinstance(part, nn.Embedding) for part in model.modules())
    ):
        raise InvalidOption(
            f"model is a {type(model).__name__}, which takes no token ids: expected a causal "
            "language model, with an embedding and a head"
        )
    model.eval()
    return Target(
        model=model,
        directory=place.directory if place else None,
        tokenizer=tokenizer,
        eos_token_ids=_eos_ids(model, tokenizer),
        max_seq_len=_num_positions(model),
        generation_defaults=read_generation_defaults(model),
        given_name=place.name if place else None,
        gguf=place.path if place and place.gguf_file else None,
        processor=processor,
        state=state_names(model),
    )


def _load_place(
    place: ModelPlace,
    dtype: torch.dtype | None,
    keeps_blocks: bool,
    tell: Callable[[str], object],
) -> tuple[nn.Module, Any]:
    """The model and its tokenizer, None where it has none."""
    if place.gguf_file is not None:
        refuse_pointer(place.path)
        check_readable(place.path)
        stored = _load_stored(place, dtype, tell) if keeps_blocks else None
        return _load_gguf(place, dtype, tell) if stored is None else stored
    return _load_directory(place.directory, dtype), _load_tokenizer(place)


def _load_gguf(
    place: ModelPlace, dtype: torch.dtype | None, tell: Callable[[str], object]
) -> tuple[nn.Module, Any]:
    """The model converted to the cache, now or by an earlier start, so that both give the same
    model; without a cache, the file's.
    """
    copy = GgufCopy.of(place.path, dtype)
    folder = copy.find()
    if folder is None:
        model: Any
        model, tokenizer = _convert(place, dtype, tell)
        tell("keeping what was converted")
        size = sum(one.nbytes for one in model.state_dict().values())
        folder = copy.keep(size, model.save_pretrained, tokenizer.save_pretrained)
        if folder is None:
            return model, tokenizer
        del model, tokenizer
    tell("weights, from the cache")
    model = _load_directory(folder, None)
    _name(model, place.directory)
    tell("tokenizer, from the cache")
    return model, read_tokenizer(folder)


def _load_stored(
    place: ModelPlace, dtype: torch.dtype | None, tell: Callable[[str], object]
) -> tuple[nn.Module, Any] | None:
    """The model whose blocks stay in the file; None where it has none that can."""
    copy = GgufCopy.of(place.path, dtype, keeps_blocks=True)
    folder, stored = copy.find(), None
    tokenizer: Any = None
    if folder is None:
        with quiet_import(), no_progress_bars(), read_once(tell):
            stored = read_stored(place.path, dtype, tell)
            if stored is not None:
                tell("tokenizer")
                tokenizer = _load_tokenizer(place)
        if stored is None:
            copy.keep(0, lambda made: (made / NOTHING).touch())
        else:
            folder = copy.keep(stored.num_bytes, stored.write, tokenizer.save_pretrained)
    if folder is not None and not (folder / NOTHING).exists():
        # now or by an earlier start, so that both give the same model
        stored, tokenizer = StoredModel.read(folder), read_tokenizer(folder)
    if stored is None:
        return None
    tell("weights, from the file")
    with quiet_import(), no_progress_bars():
        model, report = stored.make(place.path)
    _check_whole(place.path, model, report, integers=[])
    _name(model, place.directory)
    return model, tokenizer


def _convert(
    place: ModelPlace, dtype: torch.dtype | None, tell: Callable[[str], object]
) -> tuple[nn.Module, Any]:
    with quiet_import(), no_progress_bars(), read_once(tell):
        model, report = load_gguf(place.path, dtype, tell)
        _check_whole(place.path, model, report, integers=[])
        tell("tokenizer")
        return model, _load_tokenizer(place)


def _load_directory(directory: Path, dtype: torch.dtype | None) -> nn.Module:
    with quiet_import():
        import transformers.modeling_utils  # noqa: F401  (what every model is made of)
        from transformers import AutoConfig
    try:
        with readable(directory) as folder, no_progress_bars():
            config = AutoConfig.from_pretrained(folder, local_files_only=True)
            loader = auto_class(directory, config)
            check_shards(directory)
            model, report = loader.from_pretrained(
                folder,
                dtype=dtype or "auto",
                local_files_only=True,
                ignore_mismatched_sizes=True,  # reported below, by name
                output_loading_info=True,
            )
    except (UnsupportedModel, CheckpointError):
        raise
    except Exception as error:  # damaged files raise any error in transformers
        raise ModelNotFound(
            f"{directory} cannot be loaded as a causal language model: {reason(error)}"
        ) from error
    _check_whole(directory, model, report, integers=_integers(directory, model))
    _name(model, directory)
    loaded: nn.Module = model
    return loaded


def _name(model: Any, directory: Path) -> None:
    model.name_or_path = model.config._name_or_path = str(directory)


def _set_experts(model: Any) -> None:
    """Take experts one by one in float64, which transformers' default, the grouped product,
    lacks.
    """
    if model.dtype == torch.float64 and model._can_set_experts_implementation():
        model.set_experts_implementation("batched_mm")


def auto_class(directory: Path, config: Any) -> Any:
    """The class that loads this config: for text alone where transformers has one, else with more.

    Raises: UnsupportedModel, before weights are read.
    """
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        MODEL_FOR_MULTIMODAL_LM_MAPPING,
        MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoModelForMultimodalLM,
        AutoModelForSeq2SeqLM,
    )

    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForCausalLM
    if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and not config.is_encoder_decoder:
        return AutoModelForImageTextToText
    for mapping, auto in (
        (MODEL_FOR_MULTIMODAL_LM_MAPPING, AutoModelForMultimodalLM),
        (MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, AutoModelForSeq2SeqLM),
    ):
        hears = hasattr(mapping.get(type(config), None), SOUND.features)
        if hears and not config.is_encoder_decoder:
            return auto
    cure = (
        "give a decoder-only model"
        if config.is_encoder_decoder or config.get_text_config() is config
        else "its sound or videos cannot be given: load it and give its language model"
    )
    raise UnsupportedModel(
        f"{directory} holds a {config.model_type!r} model; expected a causal language model, "
        f"one that AutoModelForCausalLM or AutoModelForImageTextToText loads; {cure}"
    )


def _num_positions(model: nn.Module) -> int | None:
    """The positions that a request can have, by the config; None if it does not say."""
    count: int | None = getattr(text_config(model), "max_position_embeddings", None)
    return None if count is None or count <= 0 else count - first_position(model)


def text_config(model: nn.Module) -> Any:
    """The config of the model, or of the language model in it; None where it has none."""
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _check_whole(
    path: Path, model: nn.Module, report: Mapping[str, Any], *, integers: Sequence[str]
) -> None:
    """Refuse a checkpoint that does not match its model.  transformers initialises missing tensors
    at random, ignores unexpected ones and casts the rest, with a log message at most.
    """
    misshapen = [
        f"{name} of shape {tuple(wanted)} (it is {tuple(got)} there)"
        for name, got, wanted in sorted(report["mismatched_keys"])
    ]
    bad = {
        "lacks": [*sorted(report["missing_keys"]), *misshapen],
        "has no place in the model for": sorted(_beside_drafters(model, report["unexpected_keys"])),
        "holds integers where the model has floats in": integers,
    }
    problems = [f"{what} {listed(names)}" for what, names in bad.items() if names]
    if problems:
        raise CheckpointError(
            f"{path} {', '.join(problems)}; config.json and the weights must belong together: copy "
            "the checkpoint again"
        )


def _beside_drafters(model: nn.Module, names: Iterable[str]) -> list[str]:
    """Leave out tensors that transformers ignores on purpose or no forward pass reads, and
    drafters.
    """
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    return [
        name
        for name in drop_mtp(names)
        if not TRAINING_ONLY.search(name)
        and not any(re.search(pattern, name) for pattern in ignored)
    ]


def _integers(directory: Path, model: nn.Module) -> list[str]:
    """Tensors of an unquantized checkpoint that hold integers but are floats in the model."""
    raw = read_config(directory)
    if "quantization_config" in raw or "quantization_config" in (raw.get("text_config") or {}):
        return []
    found = integer_tensors(directory)
    own = tuple(n for n, tensor in model.state_dict().items() if not tensor.is_floating_point())
    return [
        f"{name} ({found[name]})"
        for name in sorted(_beside_drafters(model, found))
        if not any(one == name or one.endswith(f".{name}") for one in own)
    ]


def find_tokenizer(model: str | Path) -> Any:
    """Read the tokenizer of a model without loading the model; None where it has none.

    That of a GGUF file comes from its converted copy, where there is one: the file itself takes a
    minute to read.

    Raises: ModelNotFound, CheckpointError.
    """
    place = find_model(model)
    if place.gguf_file is None:
        return _load_tokenizer(place)
    refuse_pointer(place.path)
    check_readable(place.path)
    folder = GgufCopy.of(place.path, None).find()
    if folder is not None:
        return read_tokenizer(folder)
    with quiet_import(), read_once(lambda _: None):
        return _load_tokenizer(place)


def _load_tokenizer(place: ModelPlace) -> Any:
    from transformers import AutoTokenizer

    names = [place.gguf_file] if place.gguf_file else TOKENIZER_FILES
    if not any((place.directory / name).is_file() for name in names):
        return None
    inside = {"gguf_file": place.gguf_file} if place.gguf_file else {}
    files = contextlib.nullcontext(place.directory) if inside else readable(place.directory)
    try:
        with files as folder:
            return AutoTokenizer.from_pretrained(folder, local_files_only=True, **inside)
    except CheckpointError:
        raise
    except Exception as error:  # the tokenizers library has no own error class
        raise ModelNotFound(
            f"{place.path}: the tokenizer cannot be loaded: {reason(error)}"
        ) from error


def _eos_ids(model: nn.Module, tokenizer: Any) -> tuple[int, ...]:
    """The EOS ids of the first source that has any, in the order of transformers' `generate`:
    generation_config.json, config.json, then the tokenizer.
    """
    configs = (getattr(model, "config", None), text_config(model))
    sources = (getattr(model, "generation_config", None), *configs, tokenizer)
    for source in sources:
        value = getattr(source, "eos_token_id", None)
        ids = value if isinstance(value, (list, tuple)) else [value]
        if found := tuple(int(one) for one in ids if one is not None):
            return found
    return ()
