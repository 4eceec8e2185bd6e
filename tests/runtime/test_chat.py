"""Conversations as prompts: the ids are those of the tokenizer's own chat template."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

import pytest

from compilespec.errors import InvalidRequest
from compilespec.runtime.engine import Engine
from compilespec.runtime.sampling_params import SamplingParams
from tests.support.fake_executor import FakeExecutor, engine_over, geometry
from tests.support.toy_tokenizer import byte_level_tokenizer

BOS, EOS = 256, 257
TEMPLATE = (
    "<bos>{% for m in messages %}"
    "{% if m.role not in ('system', 'user', 'assistant') %}"
    "{{ raise_exception('no role ' + m.role) }}{% endif %}"
    "{{ m.role[0] }}:{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
QUESTION = [{"role": "user", "content": "naïve?"}]
TALK = [{"role": "system", "content": "s"}, *QUESTION, {"role": "assistant", "content": "yes"}]


def text_ids(text: str) -> list[int]:
    return list(text.encode())


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """One token per byte, a template that writes BOS itself, and a BOS before encoded text."""
    from tokenizers.processors import TemplateProcessing

    tokens = [*(bytes([byte]) for byte in range(256)), "<bos>", "<eos>"]
    tokenizer = byte_level_tokenizer(tokens, eos="<eos>")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", BOS)]
    )
    tokenizer.chat_template = TEMPLATE
    assert tokenizer.encode("x") == [BOS, ord("x")]
    return tokenizer


@pytest.fixture(scope="module")
def engine(tokenizer) -> Iterator[Engine]:
    sizes = geometry(vocab_size=258, max_seq_len=64)
    with engine_over(FakeExecutor(sizes), tokenizer=tokenizer) as engine:
        yield engine


def test_the_template_begins_the_answer_and_bos_stands_once(engine):
    expected = [BOS, *text_ids("u:naïve?\na:")]
    assert engine.encode({"messages": QUESTION}) == expected
    assert engine.chat(QUESTION)[0].prompt_token_ids == expected


def test_system_and_earlier_answers_are_part_of_it(engine):
    turns = [*TALK, *QUESTION]
    assert engine.encode({"messages": turns}) == [
        BOS, *text_ids("s:s\nu:naïve?\na:yes\nu:naïve?\na:"),
    ]  # fmt: skip


def test_parts_of_text_are_joined(engine):
    parts = [{"type": "text", "text": "naï"}, {"type": "text", "text": "ve?"}]
    given = {"messages": [{"role": "user", "content": parts}]}
    before = copy.deepcopy(given)
    assert engine.encode(given) == engine.encode({"messages": QUESTION})
    assert given == before


def test_conversations_go_among_other_prompts(engine):
    params = SamplingParams(max_new_tokens=3)
    one, two = engine.chat([QUESTION, TALK], params)
    mixed = engine.generate([[5, 6], {"messages": TALK}, {"messages": QUESTION}], params)
    assert [o.token_ids for o in mixed[1:]] == [two.token_ids, one.token_ids]
    deltas = list(engine.stream({"messages": QUESTION}, params))
    assert deltas[-1].output.token_ids == one.token_ids
    assert len(engine.chat(QUESTION, SamplingParams(max_new_tokens=1, n=3))) == 3


BAD = {
    "no messages": ([], "messages is empty"),
    "text": ("hi", "list of mappings with a role"),
    "a mapping": ({"role": "user"}, "list of mappings with a role"),
    "a message without a role": ([{"content": "hi"}], "message 0 is"),
    "no content": ([{"role": "user"}], "content of message 0 is None"),
    "an image": (
        [*QUESTION, {"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
        "the prompt has images or sound and the model takes none",
    ),
    "a role that the template refuses": (
        [{"role": "tool", "content": "7"}],
        "template refuses the messages .*no role tool.* give roles",
    ),
    "too long": ([{"role": "user", "content": "x" * 80}], "at most 63"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_messages_are_refused_in_one_line(engine, name):
    messages, message = BAD[name]
    with pytest.raises(InvalidRequest, match=message) as raised:
        engine.submit({"messages": messages})
    assert "\n" not in str(raised.value)
    good, bad = engine.generate([{"messages": QUESTION}, {"messages": messages}])
    assert good.error is None
    assert re.search(message, str(bad.error))
    assert not engine.has_work


def test_chat_refuses_what_is_no_conversation(engine):
    for messages in ("hi", None, 7, {"messages": QUESTION}):
        with pytest.raises(InvalidRequest, match="messages: expected a list of mappings"):
            engine.chat(messages)
    assert "message 1 is 'x'" in str(engine.chat([[*QUESTION, "x"]])[0].error)
    with pytest.raises(InvalidRequest, match="'images' beside messages: expected tools or"):
        engine.generate({"messages": QUESTION, "images": []})


def test_tools_and_options_reach_the_template(tokenizer):
    tool = {"type": "function", "function": {"name": "f"}}
    asked = {"messages": QUESTION, "tools": [tool], "template_options": {"mood": "!"}}
    with_tools = copy.deepcopy(tokenizer)
    with_tools.chat_template = "{% for t in tools %}{{ t.function.name }}{% endfor %}{{ mood }}"
    sizes = geometry(vocab_size=258, max_seq_len=64)
    with engine_over(FakeExecutor(sizes), tokenizer=with_tools) as engine:
        assert engine.encode(asked) == text_ids("f!")
        calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}}]
        called = {"role": "assistant", "content": None, "tool_calls": calls}
        assert engine.encode({**asked, "messages": [*QUESTION, called]}) == text_ids("f!")
        for wrong in ({"tokenize": False}, [1]):
            with pytest.raises(InvalidRequest, match="template_options: "):
                engine.encode({**asked, "template_options": wrong})
    with engine_over(FakeExecutor(sizes), tokenizer=tokenizer) as engine:
        with pytest.raises(InvalidRequest, match="template takes no tools"):
            engine.encode(asked)


def test_a_tokenizer_without_a_template_is_named(tokenizer):
    plain = copy.deepcopy(tokenizer)
    plain.chat_template = None
    with engine_over(FakeExecutor(geometry(vocab_size=258)), tokenizer=plain) as engine:
        with pytest.raises(InvalidRequest, match="no chat template: expected that of a chat model"):
            engine.chat(QUESTION)


def test_a_served_engine_takes_conversations(tokenizer):
    sizes = geometry(vocab_size=258, max_seq_len=64)
    engine = engine_over(FakeExecutor(sizes), tokenizer=tokenizer)
    with engine.serve() as server:
        ticket = server.submit({"messages": QUESTION}, SamplingParams(max_new_tokens=2))
        assert ticket.result().prompt_token_ids == [BOS, *text_ids("u:naïve?\na:")]
