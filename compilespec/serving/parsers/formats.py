"""The forms in which families of models write tool calls and reasoning, as data.

Source: the chat templates that the checkpoints of each family carry, and OpenAI's description of
    the harmony format; DeepSeek-V3.2 carries its form in its own encoder.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from compilespec.serving.parsers.arguments import GEMMA, JSON, PYTHON, Language, Tags

_NAME = r"(?P<name>[^\s\"'<>(){}\[\]]+)"
_OBJECT = (
    r"\{\s*(?:\"(?:type|id)\"\s*:\s*\"[^\"\\{}]*\"\s*,\s*)*\"name\"\s*:\s*\"(?P<name>[^\"\\{}]+)\""
    r"\s*,\s*\"(?:arguments|parameters)\"\s*:\s*(?=\{)"
)


@dataclass(frozen=True, kw_only=True)
class Format:
    """The form in which a family of models writes tool calls."""

    signs: tuple[str, ...]
    """Each of these tells the form, in a chat template or as a token of the vocabulary."""

    opens: tuple[str, ...] = ()
    """Begins a run of calls."""

    begins: tuple[str, ...] = ()
    """Begins a call, which may stand outside a run."""

    head: str
    """A call up to its arguments, an expression with the group `name`.  Where `name` is missing, it
    is the head of a message, and `channel` its kind."""

    reach: str
    """The end of a head, right or wrong, as an expression."""

    arguments: Language | Tags = JSON
    closes: tuple[str, ...] = ()
    """Ends a call."""

    ends: tuple[str, ...] = ()
    """Ends a run of calls."""

    is_object: bool = False
    """A call is JSON with the name in it."""

    bare: str = ""
    """The first characters of calls of known tools outside runs, where the answer or a line
    begins."""

    has_channels: bool = False
    """All text is in messages, each with its kind."""

    id_length: int | None = None
    """The templates take only ids of this length."""

    def spells(self, token: str) -> bool:
        """True where a token is part of the form, so that its text is needed."""
        quotes = self.arguments.quotes if isinstance(self.arguments, Language) else ()
        fixed = (*self.opens, *self.begins, *self.closes, *self.ends, *quotes)
        return token in " ".join((*fixed, re.sub(r"\\(.)", r"\1", self.head)))


def _literal(text: str) -> str:
    return re.escape(text).replace("NAME", _NAME)


_CALL, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_CALLS, _CALLS_END, _SEP = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁sep｜>"
_DSML = "｜DSML｜"

# The first form that a checkpoint shows is its own.
FORMATS: dict[str, Format] = {
    "harmony": Format(
        signs=("<|channel|>",),
        begins=("<|start|>", "<|channel|>"),
        head=(
            r"(?=(?:(?!<\|message\|>).)*?\bto=functions\.(?P<name>[\w.\-]+))?"
            r"(?:<\|start\|>)?[^<]*(?:<\|channel\|>(?P<channel>\w+))?[^<]*"
            r"(?:<\|constrain\|>[^<]*)?<\|message\|>"
        ),
        reach=r"<\|message\|>",
        closes=("<|call|>", "<|end|>", "<|return|>"),
        has_channels=True,
    ),
    "gemma4": Format(
        signs=("<|tool_call>",),
        opens=("<|tool_call>",),
        head=rf"call:\s*{_NAME}\s*(?=\{{)",
        reach=r"\{",
        arguments=GEMMA,
        ends=("<tool_call|>",),
    ),
    "kimi_k2": Format(
        signs=("<|tool_call_argument_begin|>", "<|tool_calls_section_begin|>"),
        opens=("<|tool_calls_section_begin|>",),
        begins=("<|tool_call_begin|>",),
        head=(
            r"<\|tool_call_begin\|>\s*(?P<id>(?:functions\.)?(?P<name>[^\s:<]+)(?::\d+)?)\s*"
            r"<\|tool_call_argument_begin\|>"
        ),
        reach=r"argument_begin\|>",
        closes=("<|tool_call_end|>",),
        ends=("<|tool_calls_section_end|>",),
    ),
    "deepseek_v32": Format(
        signs=(_DSML,),
        opens=(f"<{_DSML}function_calls>", f"<{_DSML}tool_calls>"),
        head=_literal(f'<{_DSML}invoke name="NAME">'),
        reach=">",
        arguments=Tags(
            begin=f"<{_DSML}parameter ",
            key=rf'<{_DSML}parameter name="(?P<key>[^">]*)" string="(?P<string>true|false)">',
            reach=">",
            end=f"</{_DSML}parameter>",
        ),
        closes=(f"</{_DSML}invoke>",),
        ends=(f"</{_DSML}function_calls>", f"</{_DSML}tool_calls>"),
    ),
    "deepseek_v3": Format(
        signs=("```json",),  # together with the next form's
        opens=(_CALLS,),
        begins=(_CALL,),
        head=_literal(f"{_CALL}function{_SEP}NAME\n```json\n"),
        reach="```json\n",
        closes=("```", _CALL_END),
        ends=(_CALLS_END,),
    ),
    "deepseek_v31": Format(
        signs=(_SEP,),
        opens=(_CALLS,),
        begins=(_CALL,),
        head=_literal(f"{_CALL}NAME{_SEP}"),
        reach=_SEP,
        closes=(_CALL_END,),
        ends=(_CALLS_END,),
    ),
    "minimax_m2": Format(
        signs=("<minimax:tool_call>",),
        opens=("<minimax:tool_call>",),
        head=_literal('<invoke name="NAME">'),
        reach=">",
        arguments=Tags(
            begin="<parameter name=",
            key=r'<parameter name="(?P<key>[^">]*)">',
            reach=">",
            end="</parameter>",
        ),
        closes=("</invoke>",),
        ends=("</minimax:tool_call>",),
    ),
    "glm4": Format(
        signs=("<arg_key>",),
        opens=("<tool_call>",),
        head=rf"{_NAME}\s*(?=<)",
        reach=r"<|\S\s+[^\s<]",
        arguments=Tags(
            begin="<arg_key>",
            key=r"<arg_key>(?P<key>[^<]*)</arg_key>\s*<arg_value>",
            reach="<arg_value>",
            end="</arg_value>",
        ),
        ends=("</tool_call>",),
    ),
    "qwen3_coder": Format(
        signs=("<function=",),
        opens=("<tool_call>",),
        begins=("<function=",),
        head=_literal("<function=NAME>"),
        reach=">",
        arguments=Tags(
            begin="<parameter=",
            key=r"<parameter=(?P<key>[^<>]*)>",
            reach=">",
            end="</parameter>",
            pad="\n",
        ),
        closes=("</function>",),
        ends=("</tool_call>",),
    ),
    "hermes": Format(
        signs=("<tool_call>",),
        opens=("<tool_call>",),
        head=_OBJECT,
        reach=r"\{[^{}]*[{}]",
        ends=("</tool_call>",),
        is_object=True,
        bare="{[",
    ),
    "mistral": Format(
        signs=("[TOOL_CALLS]",),
        opens=("[TOOL_CALLS]",),
        head=(
            rf"\[\s*{_OBJECT}|(?P<called>[^\s\[{{]+)\s*(?:\[CALL_ID\](?P<id>\w+))?"
            r"(?:\[ARGS\])?\s*(?=\{)"
        ),
        reach=r"[^\s\[{]\s*\{|\{[^{}]*[{}]",
        ends=("]",),
        is_object=True,
        id_length=9,
    ),
    "pythonic": Format(
        signs=("[func_name1(",),
        opens=("<|python_start|>",),
        head=r"\[?\s*(?P<name>[^\W\d][\w.]*)(?=\()",
        reach=r"\(",
        arguments=PYTHON,
        closes=("]",),
        ends=("<|python_end|>",),
        bare="[",
    ),
    "llama": Format(
        signs=('"parameters":',),
        opens=("<|python_tag|>", "<|python_start|>"),
        head=_OBJECT,
        reach=r"\{[^{}]*[{}]",
        ends=("<|python_end|>",),
        is_object=True,
        bare="{[",
    ),
}

# The tags around reasoning.  Harmony's reader finds it by itself.
REASONING = {
    "think": ("<think>", "</think>"),
    "gemma4": ("<|channel>thought\n", "<channel|>"),
    "mistral": ("[THINK]", "[/THINK]"),
}

# Under a guide that holds the answer to a list of calls.
LIST = Format(
    signs=(), head=r"\[?\s*" + _OBJECT, reach=r"\{[^{}]*[{}]", ends=("]",), is_object=True
)


def known_format(shown: str) -> str:
    """The form that a chat template, or the tokens of a vocabulary, show; "none": none of them."""
    for name, form in FORMATS.items():
        is_whole = name != "deepseek_v3" or _SEP in shown
        if is_whole and any(sign in shown for sign in form.signs):
            return name
    return "none"


def known_reasoning(template: str) -> str:
    """The tags that a chat template shows; "none": none of them."""
    shown = (name for name, (begin, _) in REASONING.items() if begin.rstrip() in template)
    return next(shown, "none")


def shown_tokens(form: Format | None, reasoning: str, tokenizer: Any) -> tuple[int, ...]:
    """The special tokens whose text the readers need."""
    tags = "".join(REASONING.get(reasoning, ()))
    if form is None and not tags:
        return ()
    return tuple(
        index
        for index, token in getattr(tokenizer, "added_tokens_decoder", {}).items()
        if token.special
        and (token.content in tags or (form is not None and form.spells(token.content)))
    )
