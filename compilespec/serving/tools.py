"""Tools of a chat request: the template's input, the guide of the answer, and its parser."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from compilespec.runtime.guides import Grammar, JsonSchema
from compilespec.serving.errors import bad_request
from compilespec.serving.parsers import reasoning
from compilespec.serving.parsers.calls import BEGIN, END, Hermes, Llama, Whole
from compilespec.serving.parsers.parts import First, Parser, Plain
from compilespec.serving.protocol import ChatRequest
from compilespec.serving.service import Service

TAIL = 8  # last tokens of a prompt, searched for the tag that begins reasoning


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The guide and the parsers of one answer."""

    parser: Callable[[], Parser]
    schema: dict[str, Any] | None
    """The guide of an answer that must be calls."""

    after_token_id: int | None = None
    """The token that ends reasoning; guides begin after it."""

    beside: Callable[[Any], Any]
    """Extends a guide of content so that it admits calls instead."""

    is_compact: bool = True

    def guide(self, asked: Any) -> dict[str, Any]:
        """`guide` and `guide_after_token_id` of the parameters.

        Args: asked: the guide of `response_format`; it describes content, and an answer that must
            be calls has none.
        """
        guide = None if asked is None else self.beside(asked)
        if self.schema is not None:
            guide = JsonSchema(self.schema, compact=self.is_compact)
        if guide is None or self.after_token_id is None:
            return {"guide": guide}
        return {"guide": guide, "guide_after_token_id": self.after_token_id}


@dataclass(frozen=True, kw_only=True)
class Tools:
    """The tools of a request, checked against the model's abilities."""

    shown: Sequence[dict[str, Any]] | None
    """The tools in the template's form."""

    calls: Callable[[], Parser]
    schema: dict[str, Any] | None
    beside: Callable[[Any], Any]
    service: Service
    is_compact: bool

    def reading(self, prompt_ids: Sequence[int]) -> Reading:
        """The reading of an answer to this prompt."""
        reading = Reading(
            parser=self.calls, schema=self.schema, beside=self.beside, is_compact=self.is_compact
        )
        if reasoning_parser(self.service) == "none":
            return reading
        tokenizer = self.service.tokenizer
        tail = str(tokenizer.decode(list(prompt_ids[-TAIL:])))
        is_begun = tail.rstrip().endswith(reasoning.BEGIN)
        end = tokenizer.convert_tokens_to_ids(reasoning.END) if is_begun else None
        return replace(
            reading,
            parser=lambda: reasoning.Think(self.calls(), is_begun=is_begun),
            after_token_id=end if isinstance(end, int) else None,
        )


def read_tools(asked: ChatRequest, service: Service) -> Tools:
    """Raises: ApiError."""
    tools, choice = asked.tools or None, asked.tool_choice
    for tool in tools or ():
        _check_tool(tool)
    calls: Callable[[], Parser] = Plain
    schema: dict[str, Any] | None = None
    beside: Callable[[Any], Any] = _as_it_is
    is_one = asked.parallel_tool_calls is False
    if tools is None:
        if choice not in (None, "none", "auto"):
            raise bad_request("tool_choice asks for a call, and there are no tools", "tool_choice")
    elif choice == "required":
        calls, schema = (lambda: Whole(None)), _schema_of_any(tools, is_one=is_one)
    elif isinstance(choice, dict):
        name = _chosen(choice, tools)
        calls, schema = (lambda: Whole(name)), _parameters(name, tools)
    elif choice != "none":
        calls, beside = _optional(asked, tools, service)
    return Tools(
        shown=tools if choice != "none" else None,
        calls=(lambda: First(calls())) if is_one else calls,
        schema=schema,
        beside=beside,
        service=service,
        is_compact=asked.compact_json,
    )


def tool_parser(service: Service) -> str:
    """ "hermes", "llama" or "none": from the options, or by the chat template."""
    name, template = service.options.tool_parser, _template(service)
    if name != "auto":
        return name
    if BEGIN in template:
        return "hermes"
    return "llama" if '"parameters":' in template else "none"


def reasoning_parser(service: Service) -> str:
    """ "think" or "none": from the options, or by the chat template."""
    name = service.options.reasoning_parser
    if name != "auto":
        return name
    return "think" if reasoning.BEGIN in _template(service) else "none"


def _as_it_is(guide: Any) -> Any:
    return guide


def _optional(
    asked: ChatRequest, tools: Sequence[dict[str, Any]], service: Service
) -> tuple[Callable[[], Parser], Callable[[Any], Any]]:
    """The parser of calls that the model may write, and the extension of guides that makes room for
    them.
    """
    name = tool_parser(service)
    if name == "none":
        raise bad_request(
            "the model's tool calls cannot be read: its chat template has no form that is known; "
            "leave out tools, or start the server with --tool-parser hermes or llama",
            "tools",
        )
    is_one, is_compact = asked.parallel_tool_calls is False, asked.compact_json
    names = frozenset(tool["function"]["name"] for tool in tools)
    kind, key, join = (
        (Llama, "parameters", "; ") if name == "llama" else (Hermes, "arguments", "\n")
    )
    if kind is Hermes and (asked.response_format or {}).get("type", "text") != "text":
        names = frozenset()  # the guide writes calls between tags; JSON without tags is content
    begin, end = (_tag_rule(tag, service.tokenizer) for tag in (BEGIN, END))
    call = "@call" if kind is Llama else f'{begin} "\\n" @call "\\n" {end}'
    more = "" if is_one else f" ({json.dumps(join)} call)*"
    one = JsonSchema(_schema_of_call(tools, key), compact=is_compact)

    def beside(guide: Any) -> Grammar:
        rules = f"start: @format | call{more}\ncall: {call}\n"
        return Grammar(rules, {"format": guide, "call": one})

    return (lambda: kind(names)), beside


def _template(service: Service) -> str:
    template = getattr(service.tokenizer, "chat_template", None)
    return template if isinstance(template, str) else ""


def _check_tool(tool: dict[str, Any]) -> None:
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, dict):
        raise _bad_tool(tool)
    if not isinstance(function.get("name"), str):
        raise _bad_tool(tool)
    parameters = function.get("parameters") or {}
    if not isinstance(parameters, dict) or parameters.get("type") not in (None, "object"):
        raise _bad_tool(tool)


def _bad_tool(tool: dict[str, Any]) -> Exception:
    return bad_request(
        'tools: expected {"type": "function", "function": {"name": ..., "parameters": {"type": '
        f'"object", ...}}}}}}, got {tool!r:.80}',
        "tools",
    )


def _chosen(choice: dict[str, Any], tools: Sequence[dict[str, Any]]) -> str:
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    known = [tool["function"]["name"] for tool in tools]
    if name not in known:
        raise bad_request(
            f"tool_choice: expected one of {known}, got {choice!r:.80}", "tool_choice"
        )
    return str(name)


def _parameters(name: str, tools: Sequence[dict[str, Any]]) -> dict[str, Any]:
    functions = (tool["function"] for tool in tools)
    found = next(function for function in functions if function["name"] == name)
    return {"properties": {}, **(found.get("parameters") or {}), "type": "object"}


def _tag_rule(tag: str, tokenizer: Any) -> str:
    """The text of a tag, which is also a token in many vocabularies."""
    is_token = tag in tokenizer.get_added_vocab() and tag not in tokenizer.all_special_tokens
    return f'({tag} | "{tag}")' if is_token else f'"{tag}"'


def _schema_of_call(tools: Sequence[dict[str, Any]], key: str) -> dict[str, Any]:
    """One call, with its arguments under `key`."""
    names = [tool["function"]["name"] for tool in tools]
    one = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, key: _parameters(name, tools)},
            "required": ["name", key],
            "additionalProperties": False,
        }
        for name in names
    ]
    return {"anyOf": one}


def _schema_of_any(tools: Sequence[dict[str, Any]], *, is_one: bool) -> dict[str, Any]:
    """The schema of a list of at least one call, or of exactly one."""
    items = {"type": "array", "minItems": 1, "items": _schema_of_call(tools, "arguments")}
    return {**items, "maxItems": 1} if is_one else items
