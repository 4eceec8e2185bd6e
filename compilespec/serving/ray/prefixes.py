"""The beginnings of prompts that each replica was sent, by hashes of their text.

The engine's prefix cache goes by tokens; a router has no tokenizer.  A replica has computed the
prompts it was sent, and most likely still caches them.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Any

import orjson

CHUNK_BYTES = 64  # characters of a chunk: some 16 tokens, a block of the KV cache
MAX_CHUNKS = 512  # chunks of a prompt that count
CAPACITY = 100_000  # chunks that are remembered


def prompt_keys(body: bytes) -> tuple[bytes, ...]:
    """Chained hashes of the beginnings of a request's prompt; none without a prompt."""
    text = _text(body)[: CHUNK_BYTES * MAX_CHUNKS]
    keys, before = list[bytes](), b""
    for start in range(0, len(text) - CHUNK_BYTES + 1, CHUNK_BYTES):
        chunk = text[start : start + CHUNK_BYTES]
        before = hashlib.blake2b(before + chunk, digest_size=8).digest()
        keys.append(before)
    return tuple(keys)


class PrefixMemory:
    """The prompts that replicas were sent; the least recently seen are forgotten first."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._knowers: OrderedDict[bytes, set[Hashable]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._knowers)

    def note(self, keys: Sequence[bytes], replica: Hashable) -> None:
        """Remember that a replica was sent a prompt with these beginnings."""
        for key in reversed(keys):  # so that longer beginnings are forgotten before shorter ones
            self._knowers.setdefault(key, set()).add(replica)
            self._knowers.move_to_end(key)
        while len(self._knowers) > self._capacity:
            self._knowers.popitem(last=False)

    def depth(self, keys: Sequence[bytes], replica: Hashable) -> int:
        """The number of chunks in the longest beginning that a replica was sent."""
        count = 0
        for key in keys:
            if replica not in self._knowers.get(key, ()):
                break
            count += 1
        return count

    def forget(self, replica: Hashable) -> None:
        """Forget a replica that has ended, and its cache with it."""
        for key in [key for key, knowers in self._knowers.items() if replica in knowers]:
            self._knowers[key].discard(replica)
            if not self._knowers[key]:
                del self._knowers[key]


def _text(body: bytes) -> bytes:
    """The prompt as bytes: equal beginnings of prompts have equal beginnings of bytes."""
    try:
        asked = orjson.loads(body)
    except orjson.JSONDecodeError:
        return b""
    if not isinstance(asked, dict):
        return b""
    if "messages" in asked:
        return orjson.dumps([asked.get("tools"), asked["messages"]])
    return _prompt(asked.get("prompt"))


def _prompt(prompt: Any) -> bytes:
    if isinstance(prompt, str):
        return prompt.encode()
    if isinstance(prompt, list) and prompt:
        if all(isinstance(token, int) and abs(token) < 2**31 for token in prompt):
            return array("i", prompt).tobytes()
        return _prompt(prompt[0])  # the first of several
    return b""
