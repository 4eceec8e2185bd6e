"""Text in and out: whole characters, stop strings across tokens, deltas that add up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from compilespec.errors import InvalidRequest, TokenizerFailed
from compilespec.runtime.detokenize import OutputText
from compilespec.runtime.engine import Engine
from compilespec.runtime.sampling_params import SamplingParams
from tests.support.fake_executor import FakeExecutor, engine_over, geometry
from tests.support.toy_tokenizer import byte_level_tokenizer, byte_spelling

EOS = 256
TEXT = "def f(x):\n    return 'naïve 漢字 👍🏽 e\u0301'  # END of it\n"


@pytest.fixture(scope="module")
def byte_level() -> Any:
    """One token per byte, as GPT-2 spells them, and an EOS."""
    tokens = [*(bytes([byte]) for byte in range(256)), "<eos>"]
    tokenizer = byte_level_tokenizer(tokens, eos="<eos>")
    assert set(byte_spelling()) == set(pre_tokenizers.ByteLevel.alphabet())
    return tokenizer


@pytest.fixture(scope="module")
def byte_fallback() -> Any:
    """Sentencepiece's way, as in Llama 2: words with a leading bar, bytes for the unknown."""
    from transformers import PreTrainedTokenizerFast

    pieces = [
        "<unk>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "▁Hello",
        "▁world",
        "s",
        "!",
    ]
    core = Tokenizer(
        models.BPE({p: i for i, p in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    )
    core.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>")


def speaker(text: str, prompt_length: int) -> Any:
    """A toy target that says `text` byte by byte after its prompt, then EOS for ever."""
    script = text.encode()

    def next_token(tokens: Sequence[int]) -> int:
        at = len(tokens) - prompt_length
        return script[at] if at < len(script) else EOS

    return next_token


def speak(tokenizer: Any, text: str, *, hit_rate: float = 0.7) -> Engine:
    sizes = geometry(max_seq_len=256, num_blocks=64)
    executor = FakeExecutor(sizes, hit_rate=hit_rate, next_token=speaker(text, 2))
    return engine_over(executor, tokenizer=tokenizer, eos_token_ids=[EOS])


def all_text(tokens: Sequence[int], tokenizer: Any, prompt: Sequence[int] = (1,)) -> str:
    text = OutputText(tokenizer, prompt)
    pieces = []
    for token in tokens:
        text.add([token])
        pieces.append(text.take())
    text.finish()
    assert "".join([*pieces, text.take()]) == text.text
    return text.text


@pytest.mark.parametrize("hit_rate", [0.0, 0.7, 1.0])
def test_generate_returns_the_text_without_eos(byte_level, hit_rate):
    engine = speak(byte_level, TEXT, hit_rate=hit_rate)
    (output,) = engine.generate("ab", SamplingParams(max_new_tokens=200))
    assert output.text == TEXT
    assert output.token_ids == [*TEXT.encode(), EOS]
    assert output.finish_reason == "stop"


def test_eos_that_is_ignored_leaves_no_text_either(byte_level):
    params = SamplingParams(max_new_tokens=100, ignore_eos=True)
    (output,) = speak(byte_level, TEXT).generate("ab", params)
    assert output.text == TEXT
    assert output.token_ids[-1] == EOS
    assert len(output.token_ids) == 100


@pytest.mark.parametrize("hit_rate", [0.0, 0.7, 1.0])
def test_stream_gives_whole_characters_that_add_up(byte_level, hit_rate):
    engine = speak(byte_level, TEXT, hit_rate=hit_rate)
    deltas = list(engine.stream("ab", SamplingParams(max_new_tokens=200)))
    assert "".join(delta.text for delta in deltas) == TEXT
    assert all("\ufffd" not in delta.text for delta in deltas)
    assert [t for d in deltas for t in d.token_ids] == deltas[-1].output.token_ids
    assert [d.finish_reason for d in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert deltas[-1].output.text == TEXT
    assert len(deltas) > 10, "text comes as it is made"


@pytest.mark.parametrize("hit_rate", [0.0, 0.7, 1.0])
@pytest.mark.parametrize(
    ("stop", "until"),
    [
        ("END", "END"),
        (["nowhere", "return 'n"], "return 'n"),
        (["字 👍", "漢字"], "漢字"),  # the first to be complete wins
        (
            ["return 'naïve", "turn 'naïve"],
            "return 'naïve",
        ),  # both complete at once: cut before both
        ("d", "d"),
        ("\n", "\n"),
    ],
)
def test_stop_strings_across_tokens_and_steps(byte_level, stop, until, hit_rate):
    engine = speak(byte_level, TEXT, hit_rate=hit_rate)
    params = SamplingParams(max_new_tokens=200, stop=stop)
    (output,) = engine.generate("ab", params)
    before = TEXT[: TEXT.index(until)]
    assert output.text == before
    assert output.token_ids == list((before + until).encode())
    assert output.finish_reason == "stop"
    assert 1 + sum(output.emitted_per_step) == len(output.token_ids)
    deltas = list(engine.stream("ab", params))
    assert "".join(delta.text for delta in deltas) == before


def test_almost_a_stop_string_is_given_out_in_the_end(byte_level):
    engine = speak(byte_level, "abcabcabd and ab")
    deltas = list(engine.stream("ab", SamplingParams(max_new_tokens=50, stop=["abcabd!", "ab."])))
    assert "".join(delta.text for delta in deltas) == "abcabcabd and ab"
    assert deltas[-1].output.text == "abcabcabd and ab"


def test_stop_string_before_half_a_character(byte_level):
    text = OutputText(byte_level, [1], ["END"])
    assert text.add(
        [*b"so END", 0xE6]
    )  # the stop string is complete, the character after it is not
    assert text.text == "so "


def test_half_a_character_at_the_limit_becomes_one_replacement(byte_level):
    params = SamplingParams(max_new_tokens=len("漢".encode()) + 2)
    engine = speak(byte_level, "漢字")
    deltas = list(engine.stream("ab", params))
    assert "".join(delta.text for delta in deltas) == "漢\ufffd"


def test_aborted_stream_keeps_its_text(byte_level):
    engine = speak(byte_level, TEXT)
    request = engine.submit("ab", SamplingParams(max_new_tokens=200, stop=["zzz"]))
    for _ in range(4):
        engine.step()
    engine.abort(request)
    output = request.output()
    assert output.finish_reason == "aborted"
    assert output.text
    assert TEXT.startswith(output.text)


def test_closing_a_stream_aborts_its_requests(byte_level):
    engine = speak(byte_level, TEXT)
    stream = engine.stream(["ab", "cd"], SamplingParams(max_new_tokens=50))
    next(stream)
    assert engine.has_work
    stream.close()
    assert not engine.has_work


@settings(max_examples=200, derandomize=True, database=None, deadline=None)
@given(text=st.text(max_size=30), prompt=st.text(max_size=12), cut=st.integers(0, 3))
def test_any_text_survives_byte_by_byte(byte_level, text, prompt, cut):
    data = prompt.encode()
    prompt_ids = list(data[: len(data) - cut]) if cut else list(data)
    whole = bytes(prompt_ids) + text.encode()
    got = all_text(list(text.encode()), byte_level, prompt_ids)
    if "\ufffd" not in bytes(prompt_ids).decode(errors="replace"):
        assert bytes(prompt_ids).decode() + got == whole.decode()


@settings(max_examples=200, derandomize=True, database=None, deadline=None)
@given(data=st.binary(max_size=24))
def test_any_bytes_give_what_decoding_at_once_gives(byte_level, data):
    at_once = byte_level.decode(list(data), clean_up_tokenization_spaces=False)
    assert all_text(list(data), byte_level) == at_once


def test_byte_fallback_runs_and_leading_spaces(byte_fallback):
    ids = byte_fallback.get_vocab()
    hello, world, bar, s = ids["▁Hello"], ids["▁world"], ids["▁"], ids["s"]
    text = [1 + byte for byte in "漢字".encode()]
    tokens = [world, s, bar, *text, bar, *text, ids["!"], hello]
    assert all_text(tokens, byte_fallback, [hello]) == " worlds 漢字 漢字! Hello"
    # A prompt that ends inside a run of bytes, longer than the decoding window.
    prompt = [hello, *(1 + byte for byte in "漢字漢字漢字".encode())]
    assert all_text([*text, s], byte_fallback, prompt) == "漢字s"


def test_stop_strings_need_a_tokenizer():
    engine = Engine(FakeExecutor())
    with pytest.raises(InvalidRequest, match="tokenizer"):
        engine.generate([1, 2], SamplingParams(stop="x"))


def text_engine(tokenizer: Any) -> Engine:
    return engine_over(FakeExecutor(geometry()), tokenizer=tokenizer)


@pytest.mark.parametrize("half", ["caf\udcc3\udca9", "\ud83d", "\udc4d!"], ids=ascii)
def test_text_that_is_no_unicode_is_refused_wherever_it_comes(byte_level, half):
    """And the other prompts of a list are served."""
    engine = text_engine(byte_level)
    byte_level.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    message = {"role": "user", "content": half}
    parts = [{"type": "text", "text": half}]
    short = {"max_new_tokens": 2}
    for call in (
        lambda: engine.generate(half),
        lambda: engine.stream(half),
        lambda: engine.submit(half),
        lambda: engine.encode(half),
        lambda: engine.remember(half),
        lambda: engine.chat([message]),
        lambda: engine.chat([{**message, "content": parts}]),
        lambda: engine.chat([{"role": half, "content": "x"}]),
        lambda: engine.generate({"messages": [{"role": "user", "content": "x"}],
                                 "template_options": {"name": half}}),
        lambda: engine.generate("ok", SamplingParams(stop=half)),
        lambda: engine.generate("ok", SamplingParams(guide=[half])),
        lambda: engine.generate("ok", SamplingParams(guide=half)),
    ):  # fmt: skip
        with pytest.raises(InvalidRequest, match=r"is no Unicode: character .*a lone surrogate"):
            call()
    outputs = engine.generate(["ok", half, "fine"], SamplingParams(**short))
    assert [output.finish_reason for output in outputs] == ["length", "error", "length"]
    assert "is no Unicode" in str(outputs[1].error)


def test_a_tokenizer_that_raises_for_a_prompt_is_told(byte_level):
    class Raises:
        def encode(self, text: str) -> list[int]:
            raise TypeError("TextInputSequence must be str")

        def decode(self, ids: Any, **options: Any) -> str:
            return ""

    with pytest.raises(TokenizerFailed, match="raised TypeError for the prompt: TextInput"):
        text_engine(Raises()).submit("x")


@pytest.mark.parametrize("length", [96 * 8 + 1, 5000, 4_000_000])
def test_texts_that_cannot_fit_are_refused_before_they_are_read(byte_level, length):
    """What a tokenizer is given at most is a little more than usual texts of the maximum length."""
    seen = []
    byte_level.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"

    class Watched:
        chat_template = byte_level.chat_template

        def __getattr__(self, name: str) -> Any:
            return getattr(byte_level, name)

        def encode(self, text: str) -> list[int]:
            seen.append(len(text))
            return list(byte_level.encode(text))

    engine = text_engine(Watched())
    for prompt in ("a" * length, {"messages": [{"role": "user", "content": "a" * length}]}):
        with pytest.raises(InvalidRequest, match=r"the prompt has .* expected at most 95"):
            engine.submit(prompt)
    with pytest.raises(InvalidRequest, match=rf"the prompt has {length} tokens: expected at most"):
        engine.submit([5] * length)
    assert max(seen, default=0) <= 96 * 8


def test_special_tokens_that_a_request_names_are_shown() -> None:
    tokens = [*(bytes([byte]) for byte in range(256)), "<eos>", "<call>", "<end>"]
    said = [*b"a", 257, *"é".encode(), 258, *b"b", EOS]
    executor = FakeExecutor(
        geometry(vocab_size=259),
        next_token=lambda ids: said[len(ids) - 3 :][0] if len(ids) < 10 else EOS,
    )
    tokenizer = byte_level_tokenizer(tokens, eos="<eos>")
    engine = engine_over(executor, tokenizer=tokenizer, eos_token_ids=(EOS,))
    for shown, text in (((), "aéb"), ((257,), "a<call>éb"), ((257, 258), "a<call>é<end>b")):
        params = SamplingParams(max_new_tokens=9, shown_token_ids=shown)
        assert engine.generate([[1, 2, 257]], params)[0].text == text
    with pytest.raises(InvalidRequest, match="shown_token_ids"):
        SamplingParams(shown_token_ids=(-1,))


@settings(max_examples=300, deadline=None)
@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=6), max_size=4))
def test_what_may_become_a_stop_string_is_held_back(text, stops):
    held = OutputText(_Letters(), (), stops)
    held.text = text
    wanted = max(
        (n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0
    )
    assert held._held_back() == wanted


class _Letters:
    def encode(self, text: str) -> list[int]:
        return list(map(ord, text))

    def decode(self, ids: Sequence[int], **options: Any) -> str:
        return "".join(map(chr, ids))
