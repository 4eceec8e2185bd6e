"""Tools of a chat request: the template's input, the guide of the answer, and its parser."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from compilespec.runtime.guides import Grammar, JsonSchema
from compilespec.serving.errors import bad_request
from compilespec.serving.parsers.calls import Calls, Named
from compilespec.serving.parsers.formats import (
    FORMATS,
    LIST,
    REASONING,
    Format,
    known_format,
    known_reasoning,
    shown_tokens,
)
from compilespec.serving.parsers.parts import First, Parser, Plain
from compilespec.serving.parsers.reasoning import Think
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
    shown_token_ids: tuple[int, ...] = ()
    """Special tokens whose text the parser needs."""

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
    form: Format | None
    """The form of the model's own that the answer may be in."""

    def reading(self, prompt_ids: Sequence[int]) -> Reading:
        """The reading of an answer to this prompt."""
        form, tokenizer = self.form, self.service.tokenizer
        name = "none" if form and form.has_channels else reasoning_parser(self.service)
        reading = Reading(
            parser=self.calls,
            schema=self.schema,
            beside=self.beside,
            is_compact=self.is_compact,
            shown_token_ids=shown_tokens(form, name, tokenizer),
        )
        if name == "none":
            return reading
        begin, ending = tags = REASONING[name]
        tail = str(tokenizer.decode(list(prompt_ids[-TAIL:])))
        is_begun = tail.rstrip().endswith(begin.rstrip())
        end = tokenizer.convert_tokens_to_ids(ending) if is_begun else None
        return replace(
            reading,
            parser=lambda: Think(self.calls(), tags, is_begun=is_begun),
            after_token_id=end if isinstance(end, int) else None,
        )


def read_tools(asked: ChatRequest, service: Service) -> Tools:
    """Raises: ApiError."""
    tools, choice = asked.tools or None, asked.tool_choice
    for tool in tools or ():
        _check_tool(tool)
    form = FORMATS.get(tool_format(service))
    calls: Callable[[], Parser] = Plain
    if form is not None and form.has_channels:
        calls = partial(Calls, form, has_calls=False)
    else:
        form = form if tools is not None and choice in (None, "auto") else None
    schema: dict[str, Any] | None = None
    beside: Callable[[Any], Any] = _as_it_is
    is_one = asked.parallel_tool_calls is False
    if tools is None:
        if choice not in (None, "none", "auto"):
            raise bad_request("tool_choice asks for a call, and there are no tools", "tool_choice")
    elif choice == "required":
        calls, schema = partial(Calls, LIST, is_begun=True), _schema_of_any(tools, is_one=is_one)
    elif isinstance(choice, dict):
        name = _chosen(choice, tools)
        calls, schema = partial(Named, name), _parameters(name, tools)
    elif choice != "none":
        calls, beside = _optional(asked, tools, service)
    return Tools(
        shown=tools if choice != "none" else None,
        calls=(lambda: First(calls())) if is_one else calls,
        schema=schema,
        beside=beside,
        service=service,
        is_compact=asked.compact_json,
        form=form,
    )


def tool_format(service: Service) -> str:
    """A name of `FORMATS`, or "none": from the options, or by the checkpoint."""
    name = service.options.tool_format
    if name == "auto":
        name = known_format(_template(service))
    if name == "none" and service.options.tool_format == "auto":
        name = known_format(" ".join(getattr(service.tokenizer, "get_added_vocab", dict)()))
    return name


def reasoning_parser(service: Service) -> str:
    """A name of `REASONING`, or "none": from the options, or by the chat template."""
    name = service.options.reasoning_parser
    return known_reasoning(_template(service)) if name == "auto" else name


def _as_it_is(guide: Any) -> Any:
    return guide


def _optional(
    asked: ChatRequest, tools: Sequence[dict[str, Any]], service: Service
) -> tuple[Callable[[], Parser], Callable[[Any], Any]]:
    """The parser of calls that the model may write, and the extension of guides that makes room for
    them.
    """
    name = tool_format(service)
    if name == "none":
        raise bad_request(
            "the model's tool calls cannot be read: its chat template has no form that is known; "
            f"leave out tools, or start the server with --tool-format, one of {', '.join(FORMATS)}",
            "tools",
        )
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}
    if (asked.response_format or {}).get("type", "text") == "text":
        return (lambda: Calls(FORMATS[name], schemas)), _as_it_is
    if name not in ("hermes", "llama"):
        raise bad_request(
            f"response_format with tools that may be called is not built for {name} calls: leave "
            'out response_format, or set tool_choice to "none", "required" or a function',
            "response_format",
        )
    if name == "hermes":
        schemas = {}  # the guide writes calls between tags; JSON without tags is content
    return (lambda: Calls(FORMATS[name], schemas)), _beside(asked, tools, name, service.tokenizer)


def _beside(
    asked: ChatRequest, tools: Sequence[dict[str, Any]], name: str, tokenizer: Any
) -> Callable[[Any], Grammar]:
    """The extension of guides that makes room for calls."""
    form = FORMATS[name]
    key, join = ("parameters", "; ") if name == "llama" else ("arguments", "\n")
    call = "@call"
    if name == "hermes":
        begin, end = (_tag_rule(tag, tokenizer) for tag in (*form.opens, *form.ends))
        call = f'{begin} "\\n" @call "\\n" {end}'
    is_one, is_compact = asked.parallel_tool_calls is False, asked.compact_json
    more = "" if is_one else f" ({json.dumps(join)} call)*"
    one = JsonSchema(_schema_of_call(tools, key), compact=is_compact)

    def beside(guide: Any) -> Grammar:
        rules = f"start: @format | call{more}\ncall: {call}\n"
        return Grammar(rules, {"format": guide, "call": one})

    return beside


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


def _schema_of_call(tools: Sequence[dict[str, Any]], key: str, place: str = "#") -> dict[str, Any]:
    """One call, with its arguments under `key`.

    Args: place: where this schema will stand.
    """
    names = [tool["function"]["name"] for tool in tools]
    one = [
        {
            "type": "object",
            "properties": {
                "name": {"const": name},
                key: _moved(_parameters(name, tools), f"{place}/anyOf/{index}/properties/{key}"),
            },
            "required": ["name", key],
            "additionalProperties": False,
        }
        for index, name in enumerate(names)
    ]
    return {"anyOf": one}


def _moved(schema: Any, place: str) -> Any:
    """A schema whose references to its own parts hold where it stands within another."""
    if isinstance(schema, list):
        return [_moved(part, place) for part in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {name: _moved(part, place) for name, part in schema.items()}
    if isinstance(own := schema.get("$ref"), str) and own.startswith("#"):
        moved["$ref"] = place + own[1:]
    return moved


def _schema_of_any(tools: Sequence[dict[str, Any]], *, is_one: bool) -> dict[str, Any]:
    """The schema of a list of at least one call, or of exactly one."""
    items = {
        "type": "array",
        "minItems": 1,
        "items": _schema_of_call(tools, "arguments", "#/items"),
    }
    return {**items, "maxItems": 1} if is_one else items
