"""Tools of a chat request: what the template is shown, what guides the answer, who reads it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from compilespec.runtime.guides import JsonSchema
from compilespec.serving.errors import bad_request
from compilespec.serving.parsers import reasoning
from compilespec.serving.parsers.calls import BEGIN, Hermes, Llama, Whole
from compilespec.serving.parsers.parts import Parser, Plain
from compilespec.serving.protocol import ChatRequest
from compilespec.serving.service import Service

TAIL = 8  # tokens of a prompt in which the tag that begins reasoning is looked for


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How one answer is guided and read."""

    parser: Callable[[], Parser]
    schema: dict[str, Any] | None = None
    """Of an answer that must be calls."""

    after_token_id: int | None = None
    """The token that ends reasoning; guides begin after it."""

    is_compact: bool = True

    def guide(self, asked: Any) -> dict[str, Any]:
        """`guide` and `guide_after_token_id` of the parameters.

        Args: asked: the guide that `response_format` stands for.
        """
        guide = asked
        if self.schema is not None:
            if asked is not None:
                raise bad_request(
                    "tool_choice asks for a call and response_format for something else; leave "
                    "one of them out",
                    "tool_choice",
                )
            guide = JsonSchema(self.schema, compact=self.is_compact)
        if guide is None or self.after_token_id is None:
            return {"guide": guide}
        return {"guide": guide, "guide_after_token_id": self.after_token_id}


@dataclass(frozen=True, kw_only=True)
class Tools:
    """What a request says of tools, against what the model can do."""

    shown: Sequence[dict[str, Any]] | None
    """For the template."""

    calls: Callable[[], Parser]
    schema: dict[str, Any] | None
    service: Service
    is_compact: bool

    def reading(self, prompt_ids: Sequence[int]) -> Reading:
        """How an answer to this prompt is read."""
        if reasoning_parser(self.service) == "none":
            return Reading(parser=self.calls, schema=self.schema, is_compact=self.is_compact)
        tokenizer = self.service.tokenizer
        tail = str(tokenizer.decode(list(prompt_ids[-TAIL:])))
        is_begun = tail.rstrip().endswith(reasoning.BEGIN)
        end = tokenizer.convert_tokens_to_ids(reasoning.END) if is_begun else None
        return Reading(
            parser=lambda: reasoning.Think(self.calls(), is_begun=is_begun),
            schema=self.schema,
            after_token_id=end if isinstance(end, int) else None,
            is_compact=self.is_compact,
        )


def read_tools(asked: ChatRequest, service: Service) -> Tools:
    """Raises: ApiError."""
    tools, choice = asked.tools or None, asked.tool_choice
    for tool in tools or ():
        _check_tool(tool)
    calls: Callable[[], Parser] = Plain
    schema: dict[str, Any] | None = None
    if tools is None:
        if choice not in (None, "none", "auto"):
            raise bad_request("tool_choice asks for a call, and there are no tools", "tool_choice")
    elif choice == "required":
        calls, schema = (lambda: Whole(None)), _schema_of_any(tools)
    elif isinstance(choice, dict):
        name = _chosen(choice, tools)
        calls, schema = (lambda: Whole(name)), _parameters(name, tools)
    elif choice != "none":
        calls = _parser_of(tool_parser(service))
    return Tools(
        shown=tools if choice != "none" else None,
        calls=calls,
        schema=schema,
        service=service,
        is_compact=asked.compact_json,
    )


def tool_parser(service: Service) -> str:
    """ "hermes", "llama" or "none": as the options say, or by the chat template."""
    name, template = service.options.tool_parser, _template(service)
    if name != "auto":
        return name
    if BEGIN in template:
        return "hermes"
    return "llama" if '"parameters":' in template else "none"


def reasoning_parser(service: Service) -> str:
    """ "think" or "none": as the options say, or by the chat template."""
    name = service.options.reasoning_parser
    if name != "auto":
        return name
    return "think" if reasoning.BEGIN in _template(service) else "none"


def _parser_of(name: str) -> Callable[[], Parser]:
    if name == "none":
        raise bad_request(
            "the model's tool calls cannot be read: its chat template has no form that is known; "
            "leave out tools, or start the server with --tool-parser hermes or llama",
            "tools",
        )
    return Hermes if name == "hermes" else Llama


def _template(service: Service) -> str:
    template = getattr(service.tokenizer, "chat_template", None)
    return template if isinstance(template, str) else ""


def _check_tool(tool: dict[str, Any]) -> None:
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, dict):
        raise _bad_tool(tool)
    if not isinstance(function.get("name"), str):
        raise _bad_tool(tool)
    if not isinstance(function.get("parameters", {}), dict):
        raise _bad_tool(tool)


def _bad_tool(tool: dict[str, Any]) -> Exception:
    return bad_request(
        'tools: expected {"type": "function", "function": {"name": ..., "parameters": {...}}}, got '
        f"{tool!r:.80}",
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
    return dict(found.get("parameters") or {"type": "object", "properties": {}})


def _schema_of_any(tools: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A list of at least one call."""
    names = [tool["function"]["name"] for tool in tools]
    one = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "arguments": _parameters(name, tools)},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for name in names
    ]
    return {"type": "array", "minItems": 1, "items": {"anyOf": one}}
