"""What routers remember of prompts, without a cluster."""

from __future__ import annotations

import orjson

from compilespec.serving.ray.prefixes import CHUNK_BYTES, PrefixMemory, prompt_keys


def keys(**body: object) -> tuple[bytes, ...]:
    return prompt_keys(orjson.dumps(body))


def test_equal_beginnings_have_equal_keys() -> None:
    short, longer = keys(prompt="a" * 130), keys(prompt="a" * 130 + "b" * 100, n=2)
    assert len(short) == 130 // CHUNK_BYTES
    assert longer[: len(short)] == short
    assert keys(prompt="b" + "a" * 129)[0] != short[0]
    assert keys(prompt=[7] * 33) == keys(prompt=[[7] * 33, [8] * 40])
    turn = {"role": "user", "content": "x" * 100}
    one, two = keys(messages=[turn]), keys(messages=[turn, {"role": "assistant", "content": "y"}])
    assert two[: len(one)] == one
    assert keys(messages=[turn], tools=[{"type": "function"}])[0] != one[0]


def test_what_is_no_prompt_has_no_keys() -> None:
    for body in (b"{", b"[]", b"7", b'{"prompt": 7}', b'{"prompt": [1e9]}', b'{"prompt": []}'):
        assert prompt_keys(body) == ()
    assert keys(prompt=[2**40] * 99) == ()
    assert keys(prompt="short") == ()


def test_who_was_given_most_of_a_prompt() -> None:
    memory, prompt = PrefixMemory(capacity=10), keys(prompt="".join(map(str, range(200))))
    memory.note(prompt[:2], "a")
    memory.note(prompt[:5], "b")
    assert [memory.depth(prompt, who) for who in "abc"] == [2, 5, 0]
    memory.forget("b")
    assert [memory.depth(prompt, who) for who in "abc"] == [2, 0, 0]
    memory.note(keys(prompt="z" * 64 * 9), "c")
    assert len(memory) == 10
    assert memory.depth(prompt, "a") == 1  # the longest beginning went first
