"""Plain decoding, one request at a time, nothing shared: what every request must give."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import compilespec
from compilespec import SamplingParams
from compilespec.runtime.outputs import GenerationOutput
from tests.fuzz.plan import MAX_SEQ_LEN, RECURRENT, WITH_IMAGES, Plan
from tests.support.adapters import write_adapter
from tests.support.images import tiny_images_target
from tests.support.models import VOCAB, tiny_hybrid, tiny_target
from tests.support.toy_tokenizer import byte_level_tokenizer

EOS = 2
LETTERS = b"abcdefghijklmn"


def _pieces() -> list[bytes | str]:
    """Tokens most of which begin or end inside a character of two, three or four bytes."""
    one, rest, three, last = b"\xc3", b"\xa9", b"\xe6\xbc", b"\xa2"  # é, 漢
    letters = [bytes([byte]) for byte in LETTERS]
    opening = [letter + one for letter in [*letters, *b"o p q r s t".split()]]
    closing = [rest + letter for letter in [*letters, *b"o p q r s t".split()]]
    wide = [letter + three for letter in letters[:12]] + [last + letter for letter in letters[:12]]
    both = [rest + letter + one for letter in letters[:10]]
    four = [b"\xf0", b"\x9f", b"\x91", b"\x8d", b"\xf0\x9f", b"\x91\x8d"]
    return ["<pad>", "<bos>", "<eos>", *letters, *opening, *closing, *wide, *both, *four]


PIECES = _pieces()
assert len(PIECES) == VOCAB


@functools.cache
def tokenizer() -> Any:
    return byte_level_tokenizer(PIECES, eos="<eos>")


def text_of(tokens: list[int]) -> str:
    """What the tokens spell, without the tokenizer."""
    pieces = [PIECES[token] for token in tokens]
    return b"".join(p for p in pieces if isinstance(p, bytes)).decode("utf-8", errors="replace")


@functools.cache
def target(family: str) -> nn.Module:
    if family in WITH_IMAGES:
        return tiny_images_target(family)
    return tiny_hybrid(family) if family in RECURRENT else tiny_target(family, num_layers=2)


ADAPTERS = ("first", "second")


@functools.cache
def adapters(family: str) -> dict[str, Path]:
    """On disk, till the process ends."""
    folder = Path(tempfile.mkdtemp(prefix="compilespec-fuzz-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return {
        name: write_adapter(folder / name, target(family), seed=seed, rank=2 + seed)
        for seed, name in enumerate(ADAPTERS)
    }


@functools.cache
def embeds_table(family: str) -> Tensor:
    """A row for each id, which is no row of the model's own embedding: [V, D]."""
    width = target(family).get_input_embeddings().weight.shape[1]
    generator = torch.Generator().manual_seed(7)
    return torch.randn((VOCAB, width), generator=generator, dtype=torch.float64)


def beside(plan: Plan) -> dict[str, Any]:
    """What plain decoding must be compiled with, too."""
    return {
        "logits_processor": lean if plan.has_traced_processor else None,
        "prompt_embeds": "embeds" in plan.features,
        **({"adapters": adapters(plan.family)} if "adapter" in plan.features else {}),
    }


def lean(logits_BSV: Tensor, position_BS: Tensor, ids_BS: Tensor) -> Tensor:
    """A processor for the step: some ids up, which ones depends on place and last token."""
    id_V = torch.arange(logits_BSV.shape[-1], device=logits_BSV.device)
    turn_BS1 = (3 * position_BS + ids_BS).unsqueeze(-1)
    return logits_BSV + 1.5 * ((id_V + turn_BS1) % 7 == 0)


_engines: dict[tuple[Any, ...], Any] = {}


def plain_engine(plan: Plan) -> Any:
    kind = (plan.family, plan.has_traced_processor, *(plan.features & {"embeds", "adapter"}))
    if kind not in _engines:
        _engines[kind] = compilespec.compile(
            target(plan.family), backend="eager", max_batch_size=1, max_seq_len=MAX_SEQ_LEN,
            enable_prefix_caching=False, overlap=False, host_processors=True, prompt_logprobs=True,
            tokenizer=tokenizer(), **beside(plan),
        )  # fmt: skip
    return _engines[kind]


class Truth:
    """Answers for one target."""

    def __init__(self, plan: Plan) -> None:
        self._engine = plain_engine(plan)
        self._model, self._is_bare = target(plan.family), not plan.has_traced_processor

    def answer(self, prompt: Any, params: SamplingParams) -> list[GenerationOutput]:
        outputs: list[GenerationOutput] = self._engine.generate([prompt], params)
        return outputs

    def is_the_models_own(self, output: GenerationOutput) -> bool:
        """Whether the tokens are the argmaxes of one forward of the model, without any cache."""
        if not self._is_bare:
            return True
        ids = torch.tensor([[*output.prompt_token_ids, *output.token_ids]])
        with torch.no_grad():
            result = self._model(ids)
        best = getattr(result, "logits", result)[0].argmax(-1).tolist()
        return best[len(output.prompt_token_ids) - 1 : -1] == output.token_ids
