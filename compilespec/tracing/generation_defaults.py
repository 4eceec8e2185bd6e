"""The decoding defaults of a checkpoint's generation_config.json, as fields of `SamplingParams`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

_WHERE_DRAWN = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": 0.0}  # if not given
_NO_FILTER = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
_ALWAYS: dict[str, tuple[str, Any]] = {
    "repetition_penalty": ("repetition_penalty", 1.0),  # its name here; its neutral value
    "max_new_tokens": ("max_new_tokens", None),
    "min_new_tokens": ("min_new_tokens", 0),
    "stop_strings": ("stop", []),
    "suppress_tokens": ("bad_token_ids", []),
}
_WITHOUT_COUNTERPART: dict[str, Any] = {  # and their neutral values
    "num_beams": 1, "typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "top_h": None,
    "penalty_alpha": None, "no_repeat_ngram_size": 0, "bad_words_ids": [], "sequence_bias": None,
    "begin_suppress_tokens": [], "forced_bos_token_id": None, "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None, "guidance_scale": 1.0, "max_length": 20,
    "min_length": 0,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class GenerationDefaults:
    """The checkpoint's defaults; requests use them only through `SamplingParams.of`."""

    params: dict[str, Any] = field(default_factory=dict)
    """Fields of `SamplingParams` whose value differs from its own default, and that value."""

    ignored: tuple[str, ...] = ()
    """Settings that `SamplingParams` cannot express, as `name=value`."""

    def describe(self) -> str | None:
        """One line; None if the checkpoint sets nothing."""
        parts = []
        if self.params:
            asked = ", ".join(f"{name}={value!r}" for name, value in self.params.items())
            parts.append(f"{asked}; only SamplingParams.of(engine) applies that")
        if self.ignored:
            parts.append(f"{', '.join(self.ignored)}, which is ignored")
        return f"generation_config.json asks for {'; and for '.join(parts)}" if parts else None


def read_generation_defaults(model: Any) -> GenerationDefaults:
    """Read the `generation_config` of a transformers model; other models have no defaults."""
    config = getattr(model, "generation_config", None)
    if config is None:
        return GenerationDefaults()
    params: dict[str, Any] = {}
    if getattr(config, "do_sample", None):
        for name, default in _WHERE_DRAWN.items():
            value = getattr(config, name, None)
            value = default if value is None else value
            if value != _NO_FILTER.get(name):
                params[name] = value
    for theirs, (ours, neutral) in _ALWAYS.items():
        value = getattr(config, theirs, None)
        if value not in (None, neutral):
            params[ours] = tuple(value) if isinstance(value, list) else value
    ignored = [
        f"{name}={value!r}"
        for name, neutral in _WITHOUT_COUNTERPART.items()
        if (value := getattr(config, name, None)) not in (None, neutral)
    ]
    return GenerationDefaults(params=params, ignored=tuple(ignored))
