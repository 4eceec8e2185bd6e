"""Byte-level tokenizers of a few pieces, made on the spot; pieces may end inside a character."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers


def byte_level_tokenizer(tokens: Sequence[bytes | str], *, eos: str) -> Any:
    """A transformers tokenizer whose id i is tokens[i]: bytes, or the name of a special token.

    Text is encoded byte by byte, so that only its single bytes need to be among the tokens.
    """
    from transformers import PreTrainedTokenizerFast

    spelling = byte_spelling()
    names = [
        token if isinstance(token, str) else "".join(spelling[byte] for byte in token)
        for token in tokens
    ]
    core = Tokenizer(models.BPE({name: index for index, name in enumerate(names)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(t, special=True) for t in tokens if isinstance(t, str)])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token=eos)


def byte_spelling() -> list[str]:
    """GPT-2's printable stand-in for each byte."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
