"""The same calls written in the form of every family: what all forms must be able to say.

Each writer follows the shape that the family's chat template gives to earlier calls.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tests.serving import tool_answers as shapes
from tests.serving.tool_answers import ANSWERS, LIMA, NOW, OSLO, Answer

Arguments = Mapping[str, Any]
Call = tuple[str, Arguments]
Writer = Callable[[Sequence[Call]], str]

# What is said first, and the calls.
CONTENTS: dict[str, tuple[str, tuple[Call, ...]]] = {
    "three at once": ("", (OSLO, LIMA, NOW)),
    "the same one twice": ("", (OSLO, OSLO)),
    "a line said first": ("First the weather.\n", (LIMA, OSLO)),
    "one letter": ("", (("weather", {"city": "X"}),)),
    "keys in another order": ("", (("weather", {"unit": "F", "days": 12, "city": "La Paz"}),)),
    "a number below zero": ("", (("weather", {"days": -2}), ("plan", {"ratio": -0.0015}))),
    "false and an empty list": ("", (("plan", {"hard": False, "steps": []}),)),
    "values in values": (
        "", (("plan", {"at": {"a": [{"b": [1, 2.5, {"c": []}]}, "d"], "e": {}, "f": True}}),),
    ),
    "a list of twenty": ("", (("plan", {"steps": [f"step {n}, then" for n in range(20)]}),)),
    "other scripts": ("", (("weather", {"city": "Ереван, القاهرة, 東京"}),)),
    "a picture of several signs": ("", (("write", {"path": "👩‍👩‍👧‍👦", "text": "é ≠ é"}),)),
    "empty lines": ("", (("write", {"text": "a\n\n\nb\r\n\tc"}),)),
    "signs of comparison": (
        "", (("write", {"path": "a.c", "text": 'if (a < b && c > d) { s[0] = "<x>"; }'}),),
    ),
    "HTML": ("", (("write", {"text": '<p class="a">1 &lt; 2</p><!-- } -->'}),)),
    "JSON in a text": ("", (("write", {"text": '{"name": "now", "arguments": {"a": [1, "]"]}}'}),)),
    "backslashes": ("", (("write", {"path": "C:\\new\\table", "text": "\\d+\\.\\w"}),)),
    "quotes": ("", (("write", {"text": "it's \"so\", 'no' `x` \"\"\"y\"\"\""}),)),
    "a text that looks like another type": ("", (("write", {"path": "true", "text": "12"}),)),
    "two that write": (
        "", (("write", {"path": "a", "text": "1\n2"}), ("write", {"path": "b", "text": "{[("})),
    ),
    "a long line": ("", (("write", {"text": "lorem ipsum, dolor: " * 12 + "end"}),)),
    "four of a kind": ("", tuple(("weather", {"city": city}) for city in ("A", "B", "C", "D"))),
    "a great number and a small one": (
        "", (("weather", {"days": 2**53}), ("plan", {"ratio": 1e-07})),
    ),
    "several lines said first": ("I look.\n\nThen I tell you:\n", (NOW, LIMA)),
    "blanks and dots in names of members": (
        "", (("plan", {"at": {"a b": 1, "x-y": {"c.d": "{"}}}),),
    ),
    "every kind of value": (
        "I plan.\n",
        (("plan", {"steps": ["x"], "at": {"y": 1}, "hard": True, "ratio": 2.5, "note": "n"}), NOW),
    ),
}  # fmt: skip


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _raw(value: Any) -> str:
    """A text as it is, other values as JSON."""
    return value if isinstance(value, str) else _json(value)


def _gemma(value: Any) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, list):
        return f"[{','.join(map(_gemma, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{_gemma(one)}' for key, one in value.items())}}}"
    return _json(value)


def _each(write: Callable[[str, Arguments], str], between: str, around: str = "%s") -> Writer:
    """A writer of calls one by one."""
    return lambda calls: around % between.join(write(*call) for call in calls)


def _tags(form: str) -> Callable[[str, Arguments], str]:
    """A writer of the arguments, each by `form` with its key and value."""
    return lambda _, given: "".join(form % (key, _raw(value)) for key, value in given.items())


def _kimi_k2(calls: Sequence[Call]) -> str:
    told = (
        f"<|tool_call_begin|>functions.{name}:{n}<|tool_call_argument_begin|>{_json(given)}"
        "<|tool_call_end|>"
        for n, (name, given) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{''.join(told)}<|tool_calls_section_end|>"


_qwen_arguments = _tags("<parameter=%s>\n%s\n</parameter>\n")
_glm_arguments = _tags("<arg_key>%s</arg_key>\n<arg_value>%s</arg_value>\n")
_m2_arguments = _tags('<parameter name="%s">%s</parameter>\n')
_DEEPSEEK_CALLS = "<｜tool▁calls▁begin｜>%s<｜tool▁calls▁end｜>"


def _v32(name: str, given: Arguments) -> str:
    told = (
        shapes.V32_ARG % (key, "true" if isinstance(value, str) else "false", _raw(value))
        for key, value in given.items()
    )
    return shapes.V32 % (name, "".join(told))


WRITERS: dict[str, Writer] = {
    "qwen3_coder": _each(
        lambda name, given: shapes.QWEN % (name, _qwen_arguments(name, given)), "\n"
    ),
    "harmony": _each(
        lambda name, given: (
            f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{_json(given)}"
            "<|call|>"
        ),
        "<|start|>assistant",
    ),
    "gemma4": _each(lambda name, given: f"<|tool_call>call:{name}{_gemma(given)}<tool_call|>", ""),
    "glm4": _each(
        lambda name, given: f"<tool_call>{name}\n{_glm_arguments(name, given)}</tool_call>", "\n"
    ),
    "kimi_k2": _kimi_k2,
    "deepseek_v3": _each(
        lambda name, given: (
            f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{_json(given)}\n```"
            "<｜tool▁call▁end｜>"
        ),
        "\n",
        _DEEPSEEK_CALLS,
    ),
    "deepseek_v31": _each(
        lambda name, given: (
            f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{_json(given)}<｜tool▁call▁end｜>"
        ),
        "",
        _DEEPSEEK_CALLS,
    ),
    "deepseek_v32": _each(_v32, "", shapes.V32_RUN),
    "minimax_m2": _each(
        lambda name, given: shapes.M2 % (name, _m2_arguments(name, given)), "", shapes.M2_RUN
    ),
    "mistral": _each(lambda name, given: f"[TOOL_CALLS]{name}[ARGS]{_json(given)}", ""),
    "pythonic": _each(
        lambda name, given: f"{name}({', '.join(f'{key}={one!r}' for key, one in given.items())})",
        ", ",
        "[%s]",
    ),
    "llama": _each(lambda name, given: f'{{"name": "{name}", "parameters": {_json(given)}}}', "; "),
    "hermes": _each(
        lambda name, given: (
            f'<tool_call>\n{{"name": "{name}", "arguments": {_json(given)}}}\n</tool_call>'
        ),
        "\n",
    ),
}


def _answer(form: str, said: str, calls: Sequence[Call]) -> Answer:
    text = WRITERS[form](calls)
    if said and form == "harmony":
        return Answer(
            f"<|channel|>commentary<|message|>{said}<|end|><|start|>assistant{text}",
            said, tuple(calls),
        )  # fmt: skip
    return Answer(said + text, said, tuple(calls))


ALL: dict[str, dict[str, Answer]] = {
    form: {
        **answers,
        **{f"written: {name}": _answer(form, *told) for name, told in CONTENTS.items()},
    }
    for form, answers in ANSWERS.items()
}
