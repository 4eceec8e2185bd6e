"""Compares a tiny model of a family with the engine over it."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from typing import Any

import torch
from torch import Tensor, nn

import compilespec
from compilespec import SamplingParams
from compilespec.errors import SpecError
from tests.families.configs import ROTARY, VOCAB, CannotBuild, tiny_config

CAUSAL, WITH_IMAGES = "AutoModelForCausalLM", "AutoModelForImageTextToText"
MOST_PARAMETERS = 30_000_000
LENGTHS = (13, 29, 21)  # two that begin together, and one that joins when the first ends
NUM_NEW = 11
TIE = 1e-4  # a difference of two logits under which either token is right
NOISE = 2e-4  # of log-probabilities, which some families compute in float32

EQUAL, REFUSED, WRONG, CRASHED, NOT_BUILT = "equal", "refused", "wrong", "crashed", "not built"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a family's tokens were, and why."""

    family: str
    verdict: str
    reason: str = ""
    class_name: str = ""
    auto: str = CAUSAL


def check_family(
    family: str, *, rope_types: tuple[str, ...] = ROTARY[:2], auto: str = CAUSAL
) -> Verdict:
    """The worst verdict over the rotary tables; a further one that the family cannot have says
    nothing.

    Args:
        auto: the class of transformers that makes the model.
    """
    found: Verdict | None = None
    for rope_type in rope_types:
        verdict = _check(family, rope_type, auto)
        is_worse = found is not None and _RANK[verdict.verdict] > _RANK[found.verdict]
        if found is None or (is_worse and verdict.verdict != NOT_BUILT):
            found = verdict
        if not _has_rope(family):
            break
    assert found is not None
    return found


_RANK = {EQUAL: 0, NOT_BUILT: 1, REFUSED: 2, CRASHED: 3, WRONG: 4}


def _config_class(family: str) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[family]


def _has_rope(family: str) -> bool:
    return "rope_parameters" in getattr(_config_class(family), "__annotations__", {})


def _check(family: str, rope_type: str, auto: str) -> Verdict:
    def said(verdict: str, reason: str = "") -> Verdict:
        tables = f"{rope_type}: " if rope_type != "default" and verdict != EQUAL else ""
        return Verdict(
            family=family,
            verdict=verdict,
            reason=tables + reason,
            class_name=type(model).__name__,
            auto=auto,
        )

    model: Any = None
    warnings.filterwarnings("ignore")
    try:
        model = build(family, rope_type, auto=auto)
    except CannotBuild as error:
        return said(NOT_BUILT, str(error))
    try:
        try:
            expected = [reference(model, prompt) for prompt in prompts()]
        except RuntimeError:  # some mix dtypes in their own code
            model = model.float()
            expected = [reference(model, prompt) for prompt in prompts()]
    except Exception as error:
        expected, why = None, f"its own forward: {type(error).__name__}: {one_line(error)}"
        if auto == CAUSAL:
            return said(NOT_BUILT, why)
    try:
        got = served(model)
    except SpecError as error:
        if "\n" in str(error):
            return said(CRASHED, f"an error of several lines: {one_line(error)}")
        return said(REFUSED, str(error))
    except Exception as error:
        return said(CRASHED, f"{type(error).__name__}: {one_line(error)}")
    if expected is None:  # text alone is no input of it, and the engine did not say so
        return said(WRONG, why)
    for prompt, reference_, output in zip(prompts(), expected, got, strict=True):
        if difference := first_difference(reference_, output):
            return said(WRONG, f"prompt of {len(prompt)}: {difference}")
    return said(EQUAL)


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


def prompts() -> list[list[int]]:
    return [[4 + (5 + i * i * 7 + i * 11 + n) % (VOCAB - 10) for i in range(n)] for n in LENGTHS]


def build(
    family: str, rope_type: str = "default", seed: int = 0, auto: str = CAUSAL, **fixed: Any
) -> nn.Module:
    """A random tiny model in float64 whose every parameter has a say.

    Args:
        fixed: fields of the config.
    Raises: CannotBuild.
    """
    import transformers

    config_class = _config_class(family)
    if auto == WITH_IMAGES:  # encoder-decoders, too
        fixed = {"is_encoder_decoder": config_class.is_encoder_decoder, **fixed}
    config = tiny_config(config_class, rope_type=rope_type, **fixed)
    make = getattr(transformers, auto).from_config
    options: dict[str, Any] = {"attn_implementation": "eager"}
    try:
        with torch.device("meta"):
            empty = make(config, **options)
    except Exception as error:
        raise CannotBuild(f"{type(error).__name__}: {one_line(error)}") from error
    count = sum(parameter.numel() for parameter in empty.parameters())
    if count > MOST_PARAMETERS:
        raise CannotBuild(f"no rule makes it small: {count:,} parameters")
    torch.manual_seed(seed)
    model = make(config, **options)
    with contextlib.suppress(AttributeError, ValueError):
        model.set_experts_implementation("batched_mm")  # products in float64
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            is_rate = any(part in name for part in ("A_log", "dt_bias", "a_param", "time_decay"))
            if is_rate:
                continue
            if parameter.dim() >= 2:
                parameter.copy_(noise * 1.4 / parameter.shape[-1] ** 0.5)
            else:
                parameter.add_(noise * 0.2)
        for name, buffer in model.named_buffers():
            if "correction_bias" in name:
                buffer.add_(torch.randn_like(buffer) * 0.2)
    if getattr(model.config.get_text_config(), "tie_word_embeddings", False):
        # else the last token's own row of the head wins, over and over
        model.get_input_embeddings().weight.data.mul_(0.5)
    return model.double().eval()


def reference(model: nn.Module, prompt: list[int]) -> list[tuple[int, Tensor]]:
    """The module's own greedy tokens with their logits, each from the whole sequence anew."""
    tokens, found = list(prompt), []
    with torch.no_grad():
        for _ in range(NUM_NEW):
            output = model(input_ids=torch.tensor([tokens]), use_cache=False)
            logits = output.logits[0, -1].double()
            if not bool(logits.isfinite().all()):
                raise ValueError("its logits are not finite")
            found.append((int(logits.argmax()), logits))
            tokens.append(found[-1][0])
    return found


def served(model: nn.Module) -> list[Any]:
    """The engine's outputs: drafts, pieces of prompts, a joining request, few blocks."""
    with compilespec.compile(
        model, spec="ngram", num_draft_tokens=3, backend="eager", max_seq_len=64, max_batch_size=2,
        max_prefill_tokens=16, kv_cache_tokens=64,
    ) as engine:  # fmt: skip
        params = SamplingParams(max_new_tokens=NUM_NEW, ignore_eos=True, logprobs=1)
        return list(engine.generate(prompts(), params))


def first_difference(expected: list[tuple[int, Tensor]], output: Any) -> str:
    """Where tokens or log-probabilities part, or ""."""
    ids = list(output.token_ids)
    if len(ids) != len(expected):
        return f"{len(ids)} tokens, expected {len(expected)} ({output.finish_reason})"
    for place, ((token, logits), got, logprob) in enumerate(
        zip(expected, ids, (one.logprob for one in output.logprobs), strict=True)
    ):
        if got != token:
            if float(logits[token] - logits[got]) < TIE:
                return ""
            return f"token {place} is {got}, expected {token}"
        wanted = float(logits.log_softmax(-1)[token])
        if abs(wanted - logprob) > NOISE * max(1.0, abs(wanted)):
            return f"token {place}: log-probability {logprob:.5f}, expected {wanted:.5f}"
    return ""
