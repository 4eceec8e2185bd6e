"""Conversations as prompts: the tokenizer's chat template turns messages into ids.

Source: the messages and tools of OpenAI's chat completions, text only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from compilespec.errors import InvalidRequest
from compilespec.runtime.texts import MAX_NESTING, check_unicode, is_nested_too_deep

LONG = 1 << 14  # characters: longer conversations are checked before tokenizing
BESIDE = ("tools", "template_options")  # the other keys of a prompt with messages
CHAT_CURE = 'engine.chat(messages), or {"messages": messages} as the prompt'


def is_chat(prompt: Sequence[Any]) -> bool:
    """True where the prompt is a conversation: messages that each have a role."""
    return all(isinstance(message, Mapping) and "role" in message for message in prompt)


def is_chat_prompt(prompt: Any) -> bool:
    """True where it is a prompt of the form `{"messages": [...]}`."""
    return isinstance(prompt, Mapping) and "messages" in prompt


def chat_prompts(messages: Any) -> Any:
    """The prompt of one conversation (a list of messages), or those of a list of conversations.

    Raises: InvalidRequest.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise _not_messages(messages)
    if is_chat(messages):  # an empty one, too, which `encode_chat` refuses
        return {"messages": messages}
    return [{"messages": one} for one in messages]


def encode_chat(
    prompt: Mapping[str, Any], tokenizer: Any, check_text: Callable[[str], None] | None = None
) -> tuple[int, ...]:
    """The ids of a `{"messages": [...]}` prompt, up to where the assistant's answer begins.

    It may also have "tools", a list in OpenAI's form, and "template_options", a mapping of other
    variables of the template, such as `{"enable_thinking": False}`.  The template writes the tokens
    that begin a text itself, so we add none.  `check_text` may refuse the written text before it is
    tokenized.
    Raises: InvalidRequest (no messages, other content than text, no tokenizer, no chat template,
        or one that refuses the messages, or takes no tools).
    """
    check_names(prompt)
    messages = _read_messages(prompt["messages"])
    if tokenizer is None:
        raise InvalidRequest(
            "the prompt is chat messages and the engine has no tokenizer; compile with "
            "tokenizer=..., or give token ids"
        )
    if not getattr(tokenizer, "chat_template", None):
        raise InvalidRequest(
            "the prompt is chat messages and the tokenizer has no chat template: expected that of "
            "a chat model; set engine.tokenizer.chat_template, or give text"
        )
    options = chat_options(prompt, tokenizer)
    check_unicode("the conversation", [messages, options])
    if is_nested_too_deep([messages, options]):
        raise InvalidRequest(
            f"the messages, tools or template_options are nested more than {MAX_NESTING} levels "
            "deep; nest them less"
        )
    try:
        if check_text is not None and sum(map(_num_characters, messages)) > LONG:
            check_text(
                tokenizer.apply_chat_template(
                    messages, add_generation_prompt=True, tokenize=False, **options
                )
            )
        ids = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False, **options
        )
        return tuple(int(token) for token in ids)
    except InvalidRequest:
        raise
    except Exception as error:  # templates raise any error: bad roles, a wrong order
        why = (str(error).splitlines() or ["no message"])[0]
        raise InvalidRequest(
            f"the chat template refuses the messages ({type(error).__name__}: {why}); give roles "
            "that it knows, in their order"
        ) from error


def _num_characters(message: Mapping[str, Any]) -> int:
    content = message.get("content")
    return len(content) if isinstance(content, str) else 0


def chat_error() -> InvalidRequest:
    """The error for messages that are given as if they were ids."""
    return InvalidRequest(
        f"the prompt is chat messages: expected text or token ids here; give {CHAT_CURE}"
    )


def check_names(prompt: Mapping[str, Any]) -> None:
    """Refuse unknown keys beside messages.  Raises: InvalidRequest."""
    if others := [name for name in prompt if name not in ("messages", *BESIDE)]:
        raise InvalidRequest(
            f"the prompt has {others[0]!r} beside messages: expected {' or '.join(BESIDE)}; apply "
            "the chat template yourself to give it more, and pass the ids"
        )


def chat_options(prompt: Mapping[str, Any], tokenizer: Any) -> dict[str, Any]:
    """The variables of a template beside messages.  Raises: InvalidRequest."""
    tools, more = prompt.get("tools"), prompt.get("template_options") or {}
    if not isinstance(more, Mapping) or not all(isinstance(name, str) for name in more):
        raise InvalidRequest(f"template_options: expected names and values, got {more!r:.60}")
    if own := {"messages", "tools", "conversation", "tokenize", "return_dict"} & {*more}:
        raise InvalidRequest(
            f"template_options: {min(own)!r} is none of the template's; leave it out"
        )
    if not tools:
        return dict(more)
    template = tokenizer.chat_template
    if isinstance(template, str) and "tools" not in template:
        raise InvalidRequest(
            "the chat template takes no tools: expected that of a model which was trained to call "
            "them; describe the tools in a message, or serve another model"
        )
    return {**more, "tools": list(tools)}


def _read_messages(messages: Any) -> list[dict[str, Any]]:
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise _not_messages(messages)
    if not messages:
        raise InvalidRequest("messages is empty: expected at least one message")
    return [_read_message(index, message) for index, message in enumerate(messages)]


def _read_message(index: int, message: Any) -> dict[str, Any]:
    """The message with its content as one string."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidRequest(
            f"message {index} is {message!r:.60}: expected a mapping with a role and content"
        )
    content = message.get("content")
    if isinstance(content, str) or (content is None and message.get("tool_calls")):
        return dict(message)
    if content is None and message.get("reasoning_content"):  # cut while reasoning
        return {**message, "content": ""}
    if not isinstance(content, Sequence) or not all(map(_is_text, content)):
        raise InvalidRequest(
            f"the content of message {index} is {content!r:.60}: expected text, or a list of "
            '{"type": "text", "text": ...}; input_audio and videos are not taken'
        )
    return {**message, "content": "".join(part["text"] for part in content)}


def _is_text(part: Any) -> bool:
    return (
        isinstance(part, Mapping)
        and part.get("type") == "text"
        and isinstance(part.get("text"), str)
    )


def _not_messages(messages: Any) -> InvalidRequest:
    return InvalidRequest(
        f"messages: expected a list of mappings with a role and content, got {messages!r:.60}"
    )
