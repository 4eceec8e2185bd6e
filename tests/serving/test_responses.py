"""OpenAI's responses over the toy program, by the openai client."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from compilespec.errors import InvalidOption
from compilespec.serving import ServerOptions
from compilespec.serving.responses import ResponsesRequest, _as_chat, _items
from compilespec.serving.stored import StoredResponses
from tests.support.live_server import live, toy_engine

HELLO = [{"role": "user", "content": "hello"}]
BRIEF = "be brief, and then be briefer still"
TOOL = {"type": "function", "name": "look", "description": "Looks.",
        "parameters": {"type": "object", "properties": {"x": {"type": "string"}}}}  # fmt: skip
SAID = (
    '<think>hm, ä</think>I look.<tool_call>\n{"name": "look", "arguments": {"x": "{ö}"}}\n'
    '</tool_call><tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
)
GREEDY: dict[str, Any] = {"model": "toy", "temperature": 0, "max_output_tokens": 30}


@contextlib.contextmanager
def saying(text: str, **options: Any) -> Iterator[Any]:
    given = ServerOptions(
        model_names=("toy",), tool_format="hermes", reasoning_parser="think", **options
    )
    with live(toy_engine(text), given) as server, server.openai() as client:
        yield client


@pytest.fixture(scope="module")
def agent() -> Iterator[Any]:
    with saying(SAID) as client:
        yield client


@pytest.fixture(scope="module")
def toy() -> Iterator[Any]:
    with live(toy_engine()) as server, server.openai() as client:
        yield client


def streamed(client: Any, **asked: Any) -> tuple[list[Any], Any]:
    """The events, and the response that the client puts together."""
    with client.responses.stream(**asked) as stream:
        events = list(stream)
        return events, stream.get_final_response()


def without_ids(items: Any) -> list[dict[str, Any]]:
    read = [item.model_dump(exclude_none=True) for item in items]
    for item in read:
        item.pop("id"), item.pop("call_id", None)
        for part in item.get("content", ()):
            part.pop("parsed", None)
        item.pop("parsed_arguments", None)
    return read


def test_an_answer_is_that_of_chat_completions(toy: Any) -> None:
    messages = [{"role": "system", "content": BRIEF}, *HELLO]
    chat = toy.chat.completions.create(model="toy", messages=messages, temperature=0, max_tokens=30)
    whole = toy.responses.create(input="hello", instructions=BRIEF, **GREEDY)
    assert whole.output_text == chat.choices[0].message.content
    cut = chat.choices[0].finish_reason == "length"
    assert whole.status == ("incomplete" if cut else "completed")
    assert (whole.incomplete_details is not None) == cut
    used = whole.usage
    assert used.output_tokens == chat.usage.completion_tokens
    assert used.input_tokens == chat.usage.prompt_tokens
    assert used.total_tokens == chat.usage.total_tokens
    events, final = streamed(toy, input=HELLO, instructions=BRIEF, **GREEDY)
    assert final.output_text == whole.output_text
    assert final.usage.output_tokens == used.output_tokens
    numbers = [event.sequence_number for event in events if hasattr(event, "sequence_number")]
    assert numbers == sorted(set(numbers))


def test_reasoning_text_and_calls_are_items(agent: Any) -> None:
    asked = {"model": "toy", "input": HELLO, "tools": [TOOL]}
    whole = agent.responses.create(**asked)
    told = without_ids(whole.output)
    assert [item["type"] for item in told] == ["reasoning", "message", *["function_call"] * 2]
    assert told[0]["content"] == [{"type": "reasoning_text", "text": "hm, ä"}]
    assert whole.output_text == "I look."
    assert [item["arguments"] for item in told[2:]] == ['{"x": "{ö}"}', "{}"]
    assert {item["status"] for item in told} == {"completed"}
    assert len({item.call_id for item in whole.output[2:]}) == 2
    assert whole.usage.output_tokens_details.reasoning_tokens > 0
    events, final = streamed(agent, **asked)
    assert without_ids(final.output) == told
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    for kind in ("output_item.added", "output_item.done"):
        assert kinds.count(f"response.{kind}") == 4


def test_a_response_goes_on_from_a_stored_one(agent: Any) -> None:
    first = agent.responses.create(model="toy", input=HELLO, tools=[TOOL])
    outputs = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "seen"}
        for item in first.output
        if item.type == "function_call"
    ]
    second = agent.responses.create(
        model="toy", input=outputs, previous_response_id=first.id, tools=[TOOL]
    )
    whole = agent.responses.create(
        model="toy", input=[*HELLO, *(item.model_dump() for item in first.output), *outputs],
        tools=[TOOL], store=False,
    )  # fmt: skip
    assert second.usage.input_tokens == whole.usage.input_tokens > first.usage.input_tokens
    assert agent.responses.retrieve(second.id).output_text == second.output_text
    listed = agent.responses.input_items.list(second.id).data
    assert [item.type for item in listed] == [
        "message", "reasoning", "message", *["function_call"] * 2, *["function_call_output"] * 2,
    ]  # fmt: skip
    agent.responses.delete(first.id)
    for gone in (first.id, whole.id, "resp_x", "../x"):
        with pytest.raises(openai.NotFoundError):
            agent.responses.create(model="toy", input=HELLO, previous_response_id=gone)
    assert agent.responses.retrieve(second.id).id == second.id  # it has all items itself


def test_stored_in_a_folder_they_outlive_the_server(tmp_path: Path) -> None:
    folder = tmp_path / "stored"
    with saying("one", stored_responses_dir=str(folder)) as client:
        _, first = streamed(client, model="toy", input=HELLO)
    assert [path.stem for path in folder.iterdir()] == [first.id]
    assert folder.stat().st_mode & 0o77 == 0
    with saying("two", stored_responses_dir=str(folder)) as client:
        again = client.responses.create(
            model="toy", input="more", previous_response_id=first.id, store=False
        )
        assert again.usage.input_tokens > first.usage.input_tokens
        (folder / f"{first.id}.json").write_bytes(b"{")
        with pytest.raises(openai.NotFoundError, match="no stored response"):
            client.responses.retrieve(first.id)


@pytest.mark.parametrize("place", ["memory", "folder"])
def test_the_oldest_ones_make_room(tmp_path: Path, place: str) -> None:
    folder = str(tmp_path / "stored") if place == "folder" else None
    stored = StoredResponses(100, folder)
    names = [f"resp_{number:032x}" for number in range(4)]
    for name in names[:3]:
        stored.put(name, {"text": "x" * 30})
    assert [stored.get(name) is not None for name in names[:3]] == [False, True, True]
    assert not stored.put(names[3], {"text": "x" * 200})
    assert stored.get(names[3]) is None
    assert stored.get(names[2]) == {"text": "x" * 30}
    assert stored.remove(names[1])
    assert not stored.remove(names[1])
    if folder:
        assert StoredResponses(100, folder).get(names[2]) is not None
        assert StoredResponses(10, folder).get(names[2]) is None


def test_a_full_disk_costs_the_stored_response_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(path: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with saying("one", stored_responses_dir=str(tmp_path)) as client:
        monkeypatch.setattr(Path, "write_bytes", full)
        told = client.responses.create(model="toy", input=HELLO)
        assert (told.output_text, told.store) == ("one", False)
        assert "a response was not stored: " in caplog.text
        assert not list(tmp_path.iterdir())
        with pytest.raises(openai.NotFoundError, match="no stored response"):
            client.responses.retrieve(told.id)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidOption, match=r"stored_responses_dir: .*name another folder"):
        StoredResponses(1, str(tmp_path / "file" / "below"))


def test_items_become_messages_of_a_chat() -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": "auto"}
    asked = ResponsesRequest(
        instructions="i", reasoning={"effort": "low"}, tools=[TOOL], max_output_tokens=9,
        tool_choice={"type": "function", "name": "look"},
        text={"format": {"type": "json_schema", "name": "n", "schema": {}, "strict": True}},
        input=[
            {"role": "developer", "content": "d"},
            {"role": "user", "content": [{"type": "input_text", "text": "a"}, image]},
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "t"}]},
            {"role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
            {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c",
             "output": [{"type": "input_text", "text": "r"}]},
            {"role": "assistant", "content": "e"},
            {"role": "assistant", "content": "f"},
            {"role": "user", "content": [{"type": "input_text", "text": "g"}]},
        ],
    )  # fmt: skip
    read = _as_chat(asked, _items(asked.input))
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    assert read.messages == [
        {"role": "system", "content": "i"},
        {"role": "developer", "content": "d"},
        {"role": "user", "content": [
            {"type": "text", "text": "a"},
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
        ]},
        {"role": "assistant", "reasoning_content": "t", "content": "b", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "r"},
        {"role": "assistant", "content": "e"},
        {"role": "assistant", "content": "f"},
        {"role": "user", "content": "g"},
    ]  # fmt: skip
    assert read.response_format == {
        "type": "json_schema", "json_schema": {"name": "n", "schema": {}, "strict": True},
    }  # fmt: skip
    assert (read.max_tokens, read.reasoning_effort) == (9, "low")
    assert read.tools == [{"type": "function", "function": {k: v for k, v in TOOL.items()
                                                            if k != "type"}}]  # fmt: skip
    assert read.tool_choice == {"type": "function", "function": {"name": "look"}}


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ({"input": []}, "or there is none"),
        ({"input": [{"role": "assistant", "content": "x"}]}, "the last item is the assistant's"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "items of type 'item_reference'"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file"}]}]},
            "'input_file'",
        ),
        ({"input": [{"type": "reasoning", "summary": []}, *HELLO]}, "reasoning without its text"),
        ({"input": [{"role": "tool", "content": "x"}]}, "expected messages with a role"),
        ({"tools": [{"type": "web_search"}]}, "tools that a server runs itself"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice: expected"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format: expected"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"conversation": "c"}, "no field 'conversation'"),
    ],
    ids=str,
)
def test_bad_requests_are_refused_by_the_field(toy: Any, field: dict[str, Any], said: str) -> None:
    with pytest.raises(openai.BadRequestError, match=said):
        toy.responses.create(model="toy", input=HELLO, extra_body=field)
