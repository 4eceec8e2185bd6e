"""The bytes that a token stands for, which need not be whole characters.

Source: the alphabets of byte-level BPE (GPT-2) and of SentencePiece with byte fallback.
"""

from __future__ import annotations

import re
from typing import Any

SPACE = "\u2581"  # SentencePiece's stand-in
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """Gives the bytes of token ids; works from any thread.

    Args:
        tokenizer: a transformers tokenizer.  One that is not fast gives the text of the token
            alone, whole characters only.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, bytes] = {}
        self._added = {int(i): str(t) for i, t in _added(tokenizer).items()}
        self._special = frozenset(getattr(tokenizer, "all_special_ids", None) or ())
        self._is_fast = getattr(tokenizer, "backend_tokenizer", None) is not None
        self._is_byte_level = self._is_fast and _is_byte_level(tokenizer)

    def __call__(self, token_id: int) -> bytes:
        known = self._known.get(token_id)
        if known is None:
            known = self._known[token_id] = self._read(token_id)
        return known

    def shown(self, token_id: int) -> bytes:
        """The same; special tokens leave no text."""
        return b"" if token_id in self._special else self(token_id)

    def text(self, token_id: int) -> str:
        """The token as text; part of a character appears as `bytes:\xe2\x82`, as OpenAI writes
        it.
        """
        spelled = self(token_id)
        try:
            return spelled.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)

    def _read(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        if not self._is_fast:
            return str(self._tokenizer.decode([token_id])).encode()
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        if token is None:  # a row of the head that the tokenizer does not know
            return b""
        if self._is_byte_level:
            return bytes(_BYTE_OF[char] for char in token if char in _BYTE_OF)
        if found := _BYTE.fullmatch(token):
            return bytes([int(found[1], 16)])
        return str(token).replace(SPACE, " ").encode()


def _added(tokenizer: Any) -> dict[Any, Any]:
    """Tokens that stand for their own text, by id."""
    return dict(getattr(tokenizer, "added_tokens_decoder", None) or {})


def _is_byte_level(tokenizer: Any) -> bool:
    decoder = tokenizer.backend_tokenizer.decoder
    return decoder is not None and b"ByteLevel" in decoder.__getstate__()


def _byte_of() -> dict[str, int]:
    """GPT-2's printable stand-ins: printable Latin-1 as it is, the others from U+0100 on."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return {chr(byte if byte in plain else next(others)): byte for byte in range(256)}


_BYTE_OF = _byte_of()
