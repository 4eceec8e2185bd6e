"""Compares ways to decode the same prompts: their speeds, and where their tokens part.

Prompts run one at a time, on each way in turn, so that all ways see the same machine load.  The
first round warms up and gives the tokens; the others are timed.  Nothing here prints.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from compilespec.runtime.sampling_params import SamplingParams

if TYPE_CHECKING:
    from compilespec.runtime.engine import Engine


# The largest gap between the two best logits at which two ways may part.  Rounding in this dtype
# does not explain a wider gap, so the tokens are wrong.
MARGINS = {"bfloat16": 0.25, "float16": 0.05, "float32": 1e-4, "float64": 1e-9}


@dataclass(frozen=True, kw_only=True)
class Decoded:
    """The outcome of one prompt."""

    token_ids: tuple[int, ...]
    emitted_per_step: tuple[int, ...] = ()  # empty if the way has no verify steps


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way to decode: a name and a function of a prompt's token ids."""

    name: str
    decode: Callable[[Sequence[int]], Decoded]


@dataclass(frozen=True, kw_only=True)
class Parting:
    """The place where a way's tokens part from the reference's."""

    prompt: int  # index of the prompt
    token: int  # index of the first generated token that differs
    got: int | None  # None: the output ended there
    expected: int | None
    margin: float  # between the two best float32 logits of the target at that position


@dataclass(frozen=True, kw_only=True)
class SpeedRow:
    """One way's line of the table."""

    name: str
    num_tokens: int  # of one round over all prompts
    elapsed_ms: float  # median round
    tokens_per_second: float
    ratio: float  # of tokens_per_second to the reference's
    acceptance_length: float | None
    partings: tuple[Parting, ...]  # from the reference
    plain_partings: tuple[Parting, ...] | None = None  # from plain decoding; None: not compared

    @property
    def identical(self) -> bool:
        return not self.partings


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The table, and how it was made."""

    rows: tuple[SpeedRow, ...]
    reference: str  # name of the way with which ratios and tokens are compared
    plain: str | None  # name of the way with which tokens are also compared
    num_prompts: int
    num_rounds: int

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        data = asdict(self)
        for row, entry in zip(self.rows, data["rows"], strict=True):
            entry["identical"] = row.identical
            if row.plain_partings is not None:
                entry["identical_to_plain"] = not row.plain_partings
        return data


@dataclass(frozen=True, kw_only=True)
class Timed:
    """Each way's outputs and the milliseconds of its rounds, by name."""

    first: dict[str, list[Decoded]] = field(default_factory=dict)
    elapsed_ms: dict[str, list[float]] = field(default_factory=dict)

    def add(self, other: Timed) -> None:
        """Take over the ways of another measurement."""
        self.first.update(other.first)
        self.elapsed_ms.update(other.elapsed_ms)


def compare(
    ways: Sequence[Way],
    prompts: Sequence[Sequence[int]],
    *,
    margin: Callable[[Sequence[int]], float],
    num_rounds: int = 3,
    plain: str | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> Comparison:
    """Decode all prompts in all ways; tokens and speeds are compared with the LAST way's.

    Args:
        margin, plain: see `judge`.
        num_rounds, progress: see `measure`.
    """
    timed = measure(ways, prompts, num_rounds=num_rounds, progress=progress)
    progress("comparing tokens")
    return judge(timed, prompts, reference=ways[-1].name, margin=margin, plain=plain)


def measure(
    ways: Sequence[Way],
    prompts: Sequence[Sequence[int]],
    *,
    num_rounds: int = 3,
    progress: Callable[[str], None] = lambda text: None,
) -> Timed:
    """Decode all prompts in all ways, by turns.

    Args:
        num_rounds: timed rounds, after a warm-up round.
        progress: called with the name of what is running.
    """
    first: dict[str, list[Decoded]] = {}
    for way in ways:
        progress(f"{way.name}: warming up")
        first[way.name] = [way.decode(prompt) for prompt in prompts]
    elapsed_ms: dict[str, list[float]] = {way.name: [] for way in ways}
    for round_index, way in itertools.product(range(num_rounds), ways):
        progress(f"{way.name}: round {round_index + 1} of {num_rounds}")
        start = time.perf_counter()
        for prompt in prompts:
            way.decode(prompt)
        elapsed_ms[way.name].append((time.perf_counter() - start) * 1e3)
    return Timed(first=first, elapsed_ms=elapsed_ms)


def judge(
    timed: Timed,
    prompts: Sequence[Sequence[int]],
    *,
    reference: str,
    margin: Callable[[Sequence[int]], float],
    same_tokens: bool = True,
    plain: str | None = None,
) -> Comparison:
    """Compare what was measured with one of the ways, which stands last in the table.

    Args:
        margin: distance between the target's two best logits after a prefix; called once per
            parting.
        same_tokens: whether to compare tokens; ways that share only a distribution differ in them.
        plain: name of a way with which the tokens of the other ways are also compared.
    """
    first, elapsed_ms = timed.first, timed.elapsed_ms
    names = [*(name for name in first if name != reference), reference]
    speed = {name: _speed(first[name], elapsed_ms[name]) for name in names}
    rows = tuple(
        SpeedRow(
            name=name,
            num_tokens=sum(len(decoded.token_ids) for decoded in first[name]),
            elapsed_ms=statistics.median(elapsed_ms[name]),
            tokens_per_second=speed[name],
            ratio=speed[name] / speed[reference],
            acceptance_length=_acceptance_length(first[name]),
            partings=find_partings(first[name], first[reference], prompts, margin=margin)
            if same_tokens
            else (),
            plain_partings=find_partings(first[name], first[plain], prompts, margin=margin)
            if plain is not None and name not in (plain, reference)
            else None,
        )
        for name in names
    )
    return Comparison(
        rows=rows, reference=reference, plain=plain, num_prompts=len(prompts),
        num_rounds=len(elapsed_ms[reference]),
    )  # fmt: skip


def engine_way(
    name: str,
    engine: Engine,
    *,
    max_new_tokens: int,
    ignore_eos: bool,
    temperature: float = 0.0,
    seed: int | None = None,
) -> Way:
    """Decode with a compiled engine."""
    params = SamplingParams(
        max_new_tokens=max_new_tokens, ignore_eos=ignore_eos, temperature=temperature, seed=seed
    )

    def decode(prompt: Sequence[int]) -> Decoded:
        engine.reset_prefix_cache()  # every round computes the whole prompt, as other ways do
        (output,) = engine.generate(list(prompt), params)
        return Decoded(
            token_ids=tuple(output.token_ids), emitted_per_step=tuple(output.emitted_per_step)
        )

    return Way(name=name, decode=decode)


def transformers_way(
    model: Any,
    *,
    max_new_tokens: int,
    max_seq_len: int,
    eos_token_ids: Sequence[int] = (),
    name: str = "transformers generate",
) -> Way:
    """Decode with transformers' own `generate`, eagerly and greedily.

    Args:
        model: a causal language model of transformers; its generation settings are replaced
            meanwhile.
        max_seq_len: the engines' limit, which transformers does not know.
        eos_token_ids: ids that end an output; none to ignore EOS.
    """
    import torch
    from transformers import GenerationConfig

    device = next(model.parameters()).device

    def decode(prompt: Sequence[int]) -> Decoded:
        ids = torch.tensor([list(prompt)], device=device)
        room = min(max_new_tokens, max_seq_len - len(prompt))
        config = GenerationConfig(
            do_sample=False,
            max_new_tokens=room,
            eos_token_id=list(eos_token_ids) or None,
            pad_token_id=0,
        )
        with torch.no_grad(), _generation_config(model, config):
            output = model.generate(ids, attention_mask=torch.ones_like(ids))
        return Decoded(token_ids=tuple(output[0, len(prompt) :].tolist()))

    return Way(name=name, decode=decode)


def find_partings(
    got: Sequence[Decoded],
    expected: Sequence[Decoded],
    prompts: Sequence[Sequence[int]],
    *,
    margin: Callable[[Sequence[int]], float],
) -> tuple[Parting, ...]:
    """Compare the outputs of each prompt up to the first token that differs."""
    partings = []
    for index, (prompt, one, other) in enumerate(zip(prompts, got, expected, strict=True)):
        pairs = itertools.zip_longest(one.token_ids, other.token_ids)
        for at, (token, wanted) in enumerate(pairs):
            if token != wanted:
                prefix = [*prompt, *other.token_ids[:at]]
                partings.append(
                    Parting(
                        prompt=index, token=at, got=token, expected=wanted, margin=margin(prefix)
                    )
                )
                break
    return tuple(partings)


def logit_margin(model: Any, token_ids: Sequence[int]) -> float:
    """Return how far apart the two best logits after `token_ids` are, computed in float32.

    The model is cast to float32 in place (exact for narrower weights) and stays so: run timings
    first.
    """
    best, second = _last_logits(model, token_ids).topk(2).values.tolist()
    return float(best - second)


def sampled_margin(model: Any, token_ids: Sequence[int], *, temperature: float, seed: int) -> float:
    """Like `logit_margin`, for the scores of a draw: logits over the temperature, plus the noise of
    the next position.
    """
    import torch

    from compilespec.ops.sample.layout import STREAM_DRAW
    from compilespec.ops.sample.philox import gumbel, noise_bits

    scores_V = _last_logits(model, token_ids) / temperature
    bits_V = noise_bits(
        torch.arange(len(scores_V), device=scores_V.device), seed_low=seed & 0xFFFFFFFF,
        seed_high=seed >> 32, sample=0, position=len(token_ids), stream=STREAM_DRAW,
    )  # fmt: skip
    best, second = (scores_V + gumbel(bits_V)).topk(2).values.tolist()
    return float(best - second)


def _last_logits(model: Any, token_ids: Sequence[int]) -> Any:
    """Float32 logits after the tokens."""
    import torch

    model.float()
    ids = torch.tensor([list(token_ids)], device=next(model.parameters()).device)
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits[0, -1].float()


def _speed(outcome: Sequence[Decoded], elapsed_ms: Sequence[float]) -> float:
    num_tokens = sum(len(decoded.token_ids) for decoded in outcome)
    return num_tokens / max(statistics.median(elapsed_ms), 1e-6) * 1e3


def _acceptance_length(outcome: Sequence[Decoded]) -> float | None:
    steps = [count for decoded in outcome for count in decoded.emitted_per_step]
    return sum(steps) / len(steps) if steps else None


@contextlib.contextmanager
def _generation_config(model: Any, config: Any) -> Iterator[None]:
    """Replace the model's own settings; generate() would merge settings passed to it with them."""
    before, model.generation_config = model.generation_config, config
    try:
        yield
    finally:
        model.generation_config = before
