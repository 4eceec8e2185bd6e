"""Plain decoding, one request at a time, nothing shared: what every request must give."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

import compilespec
from compilespec import SamplingParams
from compilespec.runtime.outputs import GenerationOutput
from tests.fuzz.plan import MAX_SEQ_LEN, RECURRENT
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
    return tiny_hybrid(family) if family in RECURRENT else tiny_target(family, num_layers=2)


def lean(logits_BSV: Tensor, position_BS: Tensor, ids_BS: Tensor) -> Tensor:
    """A processor for the step: some ids up, which ones depends on place and last token."""
    id_V = torch.arange(logits_BSV.shape[-1], device=logits_BSV.device)
    turn_BS1 = (3 * position_BS + ids_BS).unsqueeze(-1)
    return logits_BSV + 1.5 * ((id_V + turn_BS1) % 7 == 0)


@functools.cache
def plain_engine(family: str, has_traced_processor: bool) -> Any:
    return compilespec.compile(
        target(family), backend="eager", max_batch_size=1, max_seq_len=MAX_SEQ_LEN,
        enable_prefix_caching=False, overlap=False, host_processors=True, prompt_logprobs=True,
        logits_processor=lean if has_traced_processor else None, tokenizer=tokenizer(),
    )  # fmt: skip


class Truth:
    """Answers for one target."""

    def __init__(self, family: str, *, has_traced_processor: bool) -> None:
        self._engine = plain_engine(family, has_traced_processor)
        self._model, self._is_bare = target(family), not has_traced_processor

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
