"""Answers with tool calls, written by hand in the form that each family of models uses.

Of each: the text, and what it holds: content, reasoning and calls.  Arguments are an object, or
the text itself where the answer was cut.
"""

from __future__ import annotations

from typing import Any, NamedTuple


def upto(text: str, mark: str) -> str:
    """A text that is cut before a mark."""
    return text[: text.index(mark)]


class Answer(NamedTuple):
    text: str
    content: str = ""
    calls: tuple[tuple[str, Any], ...] = ()
    reasoning: str = ""


TOOLS: dict[str, dict[str, Any]] = {
    "weather": {"type": "object", "properties": {
        "city": {"type": "string"}, "days": {"type": "integer"}, "unit": {"enum": ["C", "F"]},
    }},
    "write": {"type": "object", "properties": {
        "path": {"type": "string"}, "text": {"type": "string"},
    }},
    "plan": {"type": "object", "$defs": {"when": {"type": ["string", "null"]}}, "properties": {
        "steps": {"type": "array", "items": {"type": "string"}}, "at": {"type": "object"},
        "hard": {"type": "boolean"}, "ratio": {"type": "number"}, "when": {"$ref": "#/$defs/when"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    }},
    "now": {"type": "object", "properties": {}},
}  # fmt: skip

OSLO = ("weather", {"city": "Oslo"})
LIMA = ("weather", {"city": "Lima", "days": 3})
NOW: tuple[str, Any] = ("now", {})
CODE = 'def f(x):\n    return {"a": [x], \'b\': "}"}\n'
PLAN = (
    "plan",
    {"steps": ["a, b", "c]"], "at": {"x": {"y": None}}, "hard": True, "ratio": 0.5, "note": None},
)
ODD = ("write", {"path": "naïve/日本/🙂.txt", "text": 'say "hi" \\ <b>&amp;</b>\tend'})


QWEN = "<tool_call>\n<function=%s>\n%s</function>\n</tool_call>"
QWEN_OSLO = QWEN % ("weather", "<parameter=city>\nOslo\n</parameter>\n")
QWEN_LIMA = QWEN % (
    "weather",
    "<parameter=city>\nLima\n</parameter>\n<parameter=days>\n3\n</parameter>\n",
)
QWEN3_CODER = {
    "one": Answer(QWEN_OSLO, "", (OSLO,)),
    "text before": Answer(f"I look it up.\n\n{QWEN_OSLO}", "I look it up.\n\n", (OSLO,)),
    "two in a row": Answer(f"{QWEN_OSLO}\n{QWEN_LIMA}", "", (OSLO, LIMA)),
    "two in one run": Answer(
        "<tool_call>\n<function=now>\n</function>\n<function=weather>\n<parameter=city>\nOslo\n"
        "</parameter>\n</function>\n</tool_call>",
        "", (NOW, OSLO),
    ),
    "text after": Answer(f"{QWEN_OSLO}\nThat is all.", "That is all.", (OSLO,)),
    "no arguments": Answer(QWEN % ("now", ""), "", (NOW,)),
    "no run around it": Answer(
        "<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>",
        "", (OSLO,),
    ),
    "lines and braces": Answer(
        QWEN % ("write", f"<parameter=path>\nf.py\n</parameter>\n<parameter=text>\n{CODE}\n"
                "</parameter>\n"),
        "", (("write", {"path": "f.py", "text": CODE}),),
    ),
    "unicode": Answer(
        QWEN % ("write", f"<parameter=path>\n{ODD[1]['path']}\n</parameter>\n<parameter=text>\n"
                f"{ODD[1]['text']}\n</parameter>\n"),
        "", (ODD,),
    ),
    "types": Answer(
        QWEN % ("plan", '<parameter=steps>\n["a, b", "c]"]\n</parameter>\n<parameter=at>\n'
                '{"x": {"y": null}}\n</parameter>\n<parameter=hard>\nTrue\n</parameter>\n'
                "<parameter=ratio>\n0.5\n</parameter>\n<parameter=note>\nnull\n</parameter>\n"),
        "", (PLAN,),
    ),
    "Python's values": Answer(
        QWEN % ("plan", "<parameter=at>\n{'x': {'y': None}}\n</parameter>\n<parameter=note>\n12\n"
                "</parameter>\n<parameter=when>\n2\n</parameter>\n"),
        "", (("plan", {"at": {"x": {"y": None}}, "note": "12", "when": "2"}),),
    ),
    "empty text": Answer(
        QWEN % ("write", "<parameter=path>\n\n</parameter>\n<parameter=text>\n</parameter>\n"),
        "", (("write", {"path": "", "text": ""}),),
    ),
    "its own tags in a text": Answer(
        QWEN % ("write", "<parameter=text>\na </parameter> b </function> c\n</parameter>\n"),
        "", (("write", {"text": "a </parameter> b </function> c"}),),
    ),
    "a tool that nobody gave": Answer(
        QWEN % ("other", "<parameter=n>\n5\n</parameter>\n<parameter=s>\nfive\n</parameter>\n"),
        "", (("other", {"n": 5, "s": "five"}),),
    ),
    "cut in a text": Answer(upto(QWEN_OSLO, "lo\n"), "",
                            (("weather", '{"city": "Os'),)),
    "cut in a number": Answer(upto(QWEN_LIMA, "\n</parameter>\n</function>"), "",
                              (("weather", '{"city": "Lima", "days": '),)),
    "cut in its head": Answer("Hm.\n<tool_call>\n<function=wea", "Hm.\n<tool_call>\n<function=wea"),
    "no call": Answer("Use <tool_call> or <function> here.", "Use <tool_call> or <function> here."),
}  # fmt: skip

HARMONY_OSLO = (
    "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
    '{"city": "Oslo"}<|call|>'
)
HARMONY = {
    "final": Answer("<|channel|>final<|message|>Yes.<|return|>", "Yes."),
    "no channel": Answer("Just text.", "Just text."),
    "thought and final": Answer(
        "<|channel|>analysis<|message|>Easy {sum}.\n<|end|><|start|>assistant<|channel|>final"
        "<|message|>4",
        "4", (), "Easy {sum}.\n",
    ),
    "one": Answer(HARMONY_OSLO, "", (OSLO,)),
    "thought and call": Answer(
        f"<|channel|>analysis<|message|>Look it up.<|end|><|start|>assistant{HARMONY_OSLO}",
        "", (OSLO,), "Look it up.",
    ),
    "recipient in the role": Answer(
        "<|start|>assistant to=functions.weather<|channel|>commentary <|constrain|>json<|message|>"
        '{"city":"Lima","days":3}<|call|>',
        "", (LIMA,),
    ),
    "recipient in the role that the prompt began": Answer(
        ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Oslo"}<|call|>',
        "", (OSLO,),
    ),
    "text like a recipient": Answer(" to be, to=functions.", " to be, to=functions."),
    "a message about recipients": Answer(
        "<|channel|>final<|message|>Write to=functions.f <|", "Write to=functions.f <|",
    ),
    "a word said first": Answer(
        "<|channel|>commentary<|message|>I ask twice.<|end|><|start|>assistant" + HARMONY_OSLO,
        "I ask twice.", (OSLO,),
    ),
    "two": Answer(
        f"{HARMONY_OSLO}<|start|>assistant<|channel|>commentary to=functions.weather json"
        '<|message|>{"city": "Lima", "days": 3}<|call|>',
        "", (OSLO, LIMA),
    ),
    "no arguments": Answer(
        "<|channel|>commentary to=functions.now<|message|><|call|>", "", (NOW,),
    ),
    "lines and braces": Answer(
        "<|channel|>commentary to=functions.write <|constrain|>json<|message|>"
        '{"text": "def f(x):\\n    return {\\"a\\": [x], \'b\': \\"}\\"}\\n"}<|call|>',
        "", (("write", {"text": CODE}),),
    ),
    "unicode": Answer(
        "<|channel|>commentary to=functions.write<|message|>"
        '{"path": "na\\u00efve/日本/\\ud83d\\ude42.txt", '
        '"text": "say \\"hi\\" \\\\ <b>&amp;<\\/b>\\tend"}<|call|>',
        "", (ODD,),
    ),
    "cut": Answer(upto(HARMONY_OSLO, "slo"), "", (("weather", '{"city": "O'),)),
    "cut in its head": Answer("<|channel|>commentary to=functions.wea",
                              "<|channel|>commentary to=functions.wea"),
    "cut in thought": Answer("<|channel|>analysis<|message|>Let me <", "", (), "Let me <"),
    "a tool of another kind": Answer(
        "<|channel|>commentary to=browser.search<|message|>oslo<|end|>", "oslo",
    ),
}  # fmt: skip

GEMMA_OSLO = '<|tool_call>call:weather{city:<|"|>Oslo<|"|>}<tool_call|>'
GEMMA_LIMA = '<|tool_call>call:weather{city:<|"|>Lima<|"|>,days:3}<tool_call|>'
GEMMA4 = {
    "one": Answer(GEMMA_OSLO, "", (OSLO,)),
    "two": Answer(GEMMA_OSLO + GEMMA_LIMA, "", (OSLO, LIMA)),
    "text around": Answer(f"So: {GEMMA_OSLO}\nDone.", "So: Done.", (OSLO,)),
    "no arguments": Answer("<|tool_call>call:now{}<tool_call|>", "", (NOW,)),
    "types": Answer(
        '<|tool_call>call:plan{steps:[<|"|>a, b<|"|>,<|"|>c]<|"|>],at:{x:{y:null}},hard:true,'
        "ratio:0.5,note:null}<tool_call|>",
        "", (PLAN,),
    ),
    "lines and braces": Answer(
        f'<|tool_call>call:write{{path:<|"|>f.py<|"|>,text:<|"|>{CODE}<|"|>}}<tool_call|>',
        "", (("write", {"path": "f.py", "text": CODE}),),
    ),
    "unicode": Answer(
        f'<|tool_call>call:write{{path:<|"|>{ODD[1]["path"]}<|"|>,text:<|"|>{ODD[1]["text"]}<|"|>}}'
        "<tool_call|>",
        "", (ODD,),
    ),
    "text without quotes": Answer(
        "<|tool_call>call:weather{city: New York , unit:F}<tool_call|>",
        "", (("weather", {"city": "New York", "unit": "F"}),),
    ),
    "half a quote in a text": Answer(
        '<|tool_call>call:write{text:<|"|>a <| b <|" c<|"|>}<tool_call|>',
        "", (("write", {"text": 'a <| b <|" c'}),),
    ),
    "keys in quotes": Answer(
        '<|tool_call>call:weather{<|"|>city<|"|>:<|"|>Oslo<|"|>}<tool_call|>', "", (OSLO,),
    ),
    "cut in a text": Answer(upto(GEMMA_OSLO, "o<"), "", (("weather", '{"city": "Osl'),)),
    "cut in a number": Answer(
        upto(GEMMA_LIMA, "}"), "", (("weather", '{"city": "Lima", "days": '),),
    ),
    "cut in its head": Answer("<|tool_call>call:wea", "<|tool_call>call:wea"),
    "no call": Answer("<|tool_call>nothing{}", "<|tool_call>nothing{}"),
}  # fmt: skip

GLM_OSLO = "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n</tool_call>"
GLM_LIMA = (
    "<tool_call>weather<arg_key>city</arg_key><arg_value>Lima</arg_value><arg_key>days</arg_key>"
    "<arg_value>3</arg_value></tool_call>"
)
GLM4 = {
    "one": Answer(GLM_OSLO, "", (OSLO,)),
    "without line ends": Answer(GLM_LIMA, "", (LIMA,)),
    "two": Answer(f"\n{GLM_OSLO}\n{GLM_LIMA}", "", (OSLO, LIMA)),
    "text around": Answer(f"Let me see.\n{GLM_OSLO}\n\nOK.", "Let me see.\nOK.", (OSLO,)),
    "no arguments": Answer("<tool_call>now\n</tool_call>", "", (NOW,)),
    "no arguments, no line": Answer("<tool_call>now</tool_call>", "", (NOW,)),
    "types": Answer(
        '<tool_call>plan\n<arg_key>steps</arg_key>\n<arg_value>["a, b", "c]"]</arg_value>\n'
        '<arg_key>at</arg_key>\n<arg_value>{"x": {"y": null}}</arg_value>\n'
        "<arg_key>hard</arg_key>\n<arg_value>true</arg_value>\n"
        "<arg_key>ratio</arg_key>\n<arg_value>0.5</arg_value>\n"
        "<arg_key>note</arg_key>\n<arg_value>null</arg_value>\n</tool_call>",
        "", (PLAN,),
    ),
    "lines and braces": Answer(
        "<tool_call>write\n<arg_key>path</arg_key>\n<arg_value>f.py</arg_value>\n"
        f"<arg_key>text</arg_key>\n<arg_value>{CODE}</arg_value>\n</tool_call>",
        "", (("write", {"path": "f.py", "text": CODE}),),
    ),
    "unicode": Answer(
        f"<tool_call>write<arg_key>path</arg_key><arg_value>{ODD[1]['path']}</arg_value>"
        f"<arg_key>text</arg_key><arg_value>{ODD[1]['text']}</arg_value></tool_call>",
        "", (ODD,),
    ),
    "a number that is text": Answer(
        "<tool_call>weather<arg_key>city</arg_key><arg_value>42</arg_value></tool_call>",
        "", (("weather", {"city": "42"}),),
    ),
    "its own tags in a text": Answer(
        "<tool_call>write<arg_key>text</arg_key><arg_value>x</arg_value> y </tool_call> z"
        "</arg_value></tool_call>",
        "", (("write", {"text": "x</arg_value> y </tool_call> z"}),),
    ),
    "cut in a text": Answer(upto(GLM_OSLO, "slo"), "", (("weather", '{"city": "O'),)),
    "cut in a key": Answer(upto(GLM_LIMA, "ys</"), "",
                           (("weather", '{"city": "Lima"'),)),
    "no call": Answer("<tool_call> is a tag.", "<tool_call> is a tag."),
}  # fmt: skip

KIMI = "<|tool_call_begin|>functions.%s:%d<|tool_call_argument_begin|>%s<|tool_call_end|>"
KIMI_RUN = "<|tool_calls_section_begin|>%s<|tool_calls_section_end|>"
KIMI_OSLO = KIMI % ("weather", 0, '{"city": "Oslo"}')
KIMI_K2 = {
    "one": Answer(KIMI_RUN % KIMI_OSLO, "", (OSLO,)),
    "two": Answer(
        KIMI_RUN % (KIMI_OSLO + KIMI % ("weather", 1, '{"city":"Lima","days":3}')),
        "", (OSLO, LIMA),
    ),
    "text around": Answer(f"Wait.{KIMI_RUN % KIMI_OSLO} Good.", "Wait.Good.", (OSLO,)),
    "no arguments": Answer(KIMI_RUN % (KIMI % ("now", 0, "{}")), "", (NOW,)),
    "nothing as arguments": Answer(KIMI_RUN % (KIMI % ("now", 0, "")), "", (NOW,)),
    "white space": Answer(
        KIMI_RUN.replace("%s", "\n%s\n") % KIMI_OSLO.replace("<|tool_call_arg", " <|tool_call_arg"),
        "", (OSLO,),
    ),
    "no run around it": Answer(KIMI_OSLO, "", (OSLO,)),
    "lines and braces": Answer(
        KIMI_RUN % (KIMI % ("write", 2, '{"text": "def f(x):\\n    return {\\"a\\": [x], '
                            '\'b\': \\"}\\"}\\n"}')),
        "", (("write", {"text": CODE}),),
    ),
    "raw lines in a text": Answer(
        KIMI_RUN % (KIMI % ("write", 0, '{"text": "a\n\tb"}')),
        "", (("write", {"text": "a\n\tb"}),),
    ),
    "its own marks in a text": Answer(
        KIMI_RUN % (KIMI % ("write", 0, '{"text": "<|tool_call_end|>"}')),
        "", (("write", {"text": "<|tool_call_end|>"}),),
    ),
    "half a character": Answer(
        KIMI_RUN % (KIMI % ("write", 0, r'{"text": "\ud83d!"}')),
        "", (("write", {"text": "\ufffd!"}),),
    ),
    "no JSON": Answer(
        KIMI_RUN % (KIMI % ("weather", 0, '{"city": Oslo}')) + "Hm.", "Hm.",
        (("weather", '{"city": Oslo}'),),
    ),
    "cut": Answer(upto(KIMI_RUN % KIMI_OSLO, '"}<'), "", (("weather", '{"city": "Oslo'),)),
    "cut in its head": Answer(KIMI_OSLO[:40], KIMI_OSLO[:40]),
}  # fmt: skip

V31 = "<｜tool▁call▁begin｜>%s<｜tool▁sep｜>%s<｜tool▁call▁end｜>"
V31_RUN = "<｜tool▁calls▁begin｜>%s<｜tool▁calls▁end｜>"
V31_OSLO = V31 % ("weather", '{"city": "Oslo"}')
DEEPSEEK_V31 = {
    "one": Answer(V31_RUN % V31_OSLO, "", (OSLO,)),
    "two": Answer(
        V31_RUN % (V31_OSLO + V31 % ("weather", '{"city": "Lima", "days": 3}')), "", (OSLO, LIMA),
    ),
    "text around": Answer(f"I see.{V31_RUN % V31_OSLO}\nSo.", "I see.So.", (OSLO,)),
    "no arguments": Answer(V31_RUN % (V31 % ("now", "{}")), "", (NOW,)),
    "types": Answer(
        V31_RUN % (V31 % ("plan", '{"steps": ["a, b", "c]"], "at": {"x": {"y": null}}, '
                          '"hard": true, "ratio": 0.5, "note": null}')),
        "", (PLAN,),
    ),
    "lines": Answer(
        V31_RUN % (V31 % ("weather", '{\n  "city": "Lima",\n  "days": 3\n}\n')), "", (LIMA,),
    ),
    "unicode": Answer(
        V31_RUN % (V31 % ("write", '{"path": "naïve/日本/🙂.txt", '
                          '"text": "say \\"hi\\" \\\\ <b>&amp;</b>\\tend"}')),
        "", (ODD,),
    ),
    "a comma too many": Answer(V31_RUN % (V31 % ("weather", '{"city": "Oslo",}')), "", (OSLO,)),
    "an escape that is none": Answer(
        V31_RUN % (V31 % ("write", r'{"text": "\d+\u12"}')), "",
        (("write", {"text": "\\d+\\u12"}),),
    ),
    "cut": Answer(upto(V31_OSLO, '"}<'), "", (("weather", '{"city": "Oslo'),)),
    "no call": Answer("<｜tool▁calls▁begin｜>no", "<｜tool▁calls▁begin｜>no"),
}  # fmt: skip

V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>%s\n```json\n%s\n```<｜tool▁call▁end｜>"
V3_OSLO = V3 % ("weather", '{"city": "Oslo"}')
DEEPSEEK_V3 = {
    "one": Answer(V31_RUN % V3_OSLO, "", (OSLO,)),
    "two": Answer(
        V31_RUN % (V3_OSLO + "\n" + V3 % ("weather", '{"city":"Lima","days":3}')), "", (OSLO, LIMA),
    ),
    "text around": Answer(f"Well.\n{V31_RUN % V3_OSLO}End.", "Well.\nEnd.", (OSLO,)),
    "no arguments": Answer(V31_RUN % (V3 % ("now", "{}")), "", (NOW,)),
    "a fence in a text": Answer(
        V31_RUN % (V3 % ("write", '{"text": "```json\\n{}\\n```"}')), "",
        (("write", {"text": "```json\n{}\n```"}),),
    ),
    "braces": Answer(
        V31_RUN % (V3 % ("write", '{"text": "}{ \\"}\\" ]["}')), "",
        (("write", {"text": '}{ "}" ]['}),),
    ),
    "nested": Answer(
        V31_RUN % (V3 % ("plan", '{"at": {"b": [{}, [], {"c": -1.5e3}]}}')), "",
        (("plan", {"at": {"b": [{}, [], {"c": -1500.0}]}}),),
    ),
    "unicode": Answer(
        V31_RUN % (V3 % ("weather", '{"city": "東京\\u90fd"}')),
        "", (("weather", {"city": "東京都"}),),
    ),
    "cut": Answer(upto(V31_RUN % V3_OSLO, 'lo"}'), "", (("weather", '{"city": "Os'),)),
    "cut in its head": Answer("A<｜tool▁calls▁begin｜>", "A<｜tool▁calls▁begin｜>"),
    "a fence of content": Answer("```json\n{}\n```", "```json\n{}\n```"),
}  # fmt: skip

V32 = '<｜DSML｜invoke name="%s">\n%s</｜DSML｜invoke>\n'
V32_RUN = "<｜DSML｜function_calls>\n%s</｜DSML｜function_calls>"
V32_ARG = '<｜DSML｜parameter name="%s" string="%s">%s</｜DSML｜parameter>\n'
V32_OSLO = V32 % ("weather", V32_ARG % ("city", "true", "Oslo"))
V32_LIMA = V32 % (
    "weather",
    V32_ARG % ("city", "true", "Lima") + V32_ARG % ("days", "false", "3"),
)
DEEPSEEK_V32 = {
    "one": Answer(V32_RUN % V32_OSLO, "", (OSLO,)),
    "two": Answer(V32_RUN % (V32_OSLO + V32_LIMA), "", (OSLO, LIMA)),
    "text around": Answer(f"Now.\n\n{V32_RUN % V32_OSLO}\nOK", "Now.\n\nOK", (OSLO,)),
    "the later name of a run": Answer(
        (V32_RUN % V32_OSLO).replace("function_calls", "tool_calls"), "", (OSLO,),
    ),
    "no arguments": Answer(V32_RUN % (V32 % ("now", "")), "", (NOW,)),
    "types": Answer(
        V32_RUN % (V32 % ("plan", V32_ARG % ("steps", "false", '["a, b", "c]"]')
                          + V32_ARG % ("at", "false", '{"x": {"y": null}}')
                          + V32_ARG % ("hard", "false", "true")
                          + V32_ARG % ("ratio", "false", "0.5")
                          + V32_ARG % ("note", "false", "null"))),
        "", (PLAN,),
    ),
    "the tag decides": Answer(
        V32_RUN % (V32 % ("other", V32_ARG % ("a", "true", "5") + V32_ARG % ("b", "false", "5"))),
        "", (("other", {"a": "5", "b": 5}),),
    ),
    "lines and braces": Answer(
        V32_RUN % (V32 % ("write", V32_ARG % ("text", "true", CODE))), "",
        (("write", {"text": CODE}),),
    ),
    "unicode": Answer(
        V32_RUN % (V32 % ("write", V32_ARG % ("path", "true", ODD[1]["path"])
                          + V32_ARG % ("text", "true", ODD[1]["text"]))),
        "", (ODD,),
    ),
    "cut": Answer(upto(V32_RUN % V32_OSLO, "lo</"), "", (("weather", '{"city": "Os'),)),
    "no call": Answer("<｜DSML｜function_calls>?", "<｜DSML｜function_calls>?"),
}  # fmt: skip

M2 = '<invoke name="%s">\n%s</invoke>\n'
M2_RUN = "<minimax:tool_call>\n%s</minimax:tool_call>"
M2_OSLO = M2 % ("weather", '<parameter name="city">Oslo</parameter>\n')
M2_LIMA = M2 % (
    "weather",
    '<parameter name="city">Lima</parameter>\n<parameter name="days">3</parameter>\n',
)
MINIMAX_M2 = {
    "one": Answer(M2_RUN % M2_OSLO, "", (OSLO,)),
    "two": Answer(M2_RUN % (M2_OSLO + M2_LIMA), "", (OSLO, LIMA)),
    "two runs": Answer(f"{M2_RUN % M2_OSLO}\n{M2_RUN % M2_LIMA}\n", "", (OSLO, LIMA)),
    "text around": Answer(f"One moment.\n{M2_RUN % M2_OSLO}\nYes", "One moment.\nYes", (OSLO,)),
    "no arguments": Answer(M2_RUN % (M2 % ("now", "")), "", (NOW,)),
    "on one line": Answer((M2_RUN % M2_LIMA).replace("\n", ""), "", (LIMA,)),
    "types": Answer(
        M2_RUN % (M2 % ("plan", '<parameter name="steps">["a, b", "c]"]</parameter>\n'
                        '<parameter name="at">{"x": {"y": null}}</parameter>\n'
                        '<parameter name="hard">true</parameter>\n'
                        '<parameter name="ratio">0.5</parameter>\n'
                        '<parameter name="note">null</parameter>\n')),
        "", (PLAN,),
    ),
    "lines and braces": Answer(
        M2_RUN % (M2 % ("write", f'<parameter name="text">{CODE}</parameter>\n')), "",
        (("write", {"text": CODE}),),
    ),
    "unicode": Answer(
        M2_RUN % (M2 % ("write", f'<parameter name="path">{ODD[1]["path"]}</parameter>\n'
                        f'<parameter name="text">{ODD[1]["text"]}</parameter>\n')),
        "", (ODD,),
    ),
    "no JSON where it should be": Answer(
        M2_RUN % (M2 % ("plan", '<parameter name="steps">first, second</parameter>\n')), "",
        (("plan", {"steps": "first, second"}),),
    ),
    "something else among arguments": Answer(
        M2_RUN % (M2 % ("weather", "city: Oslo\n")), "", (("weather", "{city: Oslo\n"),),
    ),
    "cut": Answer(upto(M2_RUN % M2_OSLO, "lo</"), "", (("weather", '{"city": "Os'),)),
    "cut in its head": Answer('<minimax:tool_call>\n<invoke name="wea',
                              '<minimax:tool_call>\n<invoke name="wea'),
}  # fmt: skip

MISTRAL = {
    "a list": Answer(
        '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Oslo"}}]', "", (OSLO,),
    ),
    "a list with ids": Answer(
        '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Oslo"}, "id": "a1b2c3d4e"}, '
        '{"name": "weather", "arguments": {"city": "Lima", "days": 3}, "id": "a1b2c3d4f"}]',
        "", (OSLO, LIMA),
    ),
    "arguments first": Answer(
        '[TOOL_CALLS][{"arguments": {"city": "Oslo"}, "name": "weather"}]', "", (OSLO,),
    ),
    "a name and arguments": Answer('[TOOL_CALLS]weather[ARGS]{"city": "Oslo"}', "", (OSLO,)),
    "two of them": Answer(
        '[TOOL_CALLS]weather[ARGS]{"city": "Oslo"}'
        '[TOOL_CALLS]weather[ARGS]{"city": "Lima", "days": 3}',
        "", (OSLO, LIMA),
    ),
    "with an id": Answer(
        '[TOOL_CALLS]weather[CALL_ID]Ab3dE6gH9[ARGS]{"city": "Oslo"}', "", (OSLO,),
    ),
    "without a mark": Answer('[TOOL_CALLS]weather{"city": "Oslo"}', "", (OSLO,)),
    "no arguments": Answer("[TOOL_CALLS]now[ARGS]{}", "", (NOW,)),
    "text before": Answer('Sure. [TOOL_CALLS]now{}', "Sure. ", (NOW,)),
    "text after": Answer("[TOOL_CALLS]now[ARGS]{} Done {x}.", "Done {x}.", (NOW,)),
    "lines and braces": Answer(
        '[TOOL_CALLS]write[ARGS]'
        '{"text": "def f(x):\\n    return {\\"a\\": [x], \'b\': \\"}\\"}\\n"}',
        "", (("write", {"text": CODE}),),
    ),
    "brackets in a list": Answer(
        '[TOOL_CALLS][{"name": "write", "arguments": {"text": "}]"}}]', "",
        (("write", {"text": "}]"}),),
    ),
    "unicode": Answer('[TOOL_CALLS]weather[ARGS]{"city": "Zürich 山"}', "",
                      (("weather", {"city": "Zürich 山"}),)),
    "cut": Answer('[TOOL_CALLS]weather[ARGS]{"city": "Os', "", (("weather", '{"city": "Os'),)),
    "cut in a list": Answer('[TOOL_CALLS][{"name": "weather", "arguments": {"ci', "",
                            (("weather", '{"ci'),)),
    "cut in its head": Answer("[TOOL_CALLS]wea", "[TOOL_CALLS]wea"),
}  # fmt: skip

PYTHONIC = {
    "one": Answer("[weather(city='Oslo')]", "", (OSLO,)),
    "two": Answer("[weather(city='Oslo'), weather(city=\"Lima\", days=3)]", "", (OSLO, LIMA)),
    "no arguments": Answer("[now()]", "", (NOW,)),
    "marked": Answer("<|python_start|>[weather(city='Oslo')]<|python_end|>", "", (OSLO,)),
    "types": Answer(
        "[plan(steps=['a, b', \"c]\"], at={'x': {'y': None}}, hard=True, ratio=.5, note=None)]", "",
        (PLAN,),
    ),
    "white space": Answer("\n[ weather( city = 'Lima' , days = 3 ) , now() ]\n", "", (LIMA, NOW)),
    "quotes": Answer(
        "[write(path='it\\'s', text=\"'\\\"(\\x41\\u00e9\\U0001F642\")]", "",
        (("write", {"path": "it's", "text": "'\"(Aé🙂"}),),
    ),
    "lines and braces": Answer(
        "[write(text='def f(x):\\n    return {\"a\": [x], \\'b\\': \"}\"}\\n')]", "",
        (("write", {"text": CODE}),),
    ),
    "a tuple": Answer("[plan(steps=('a', 'b',))]", "", (("plan", {"steps": ["a", "b"]}),)),
    "text after": Answer("[now()]\nSo it is.", "So it is.", (NOW,)),
    "text before": Answer("I ask.\n[now()]", "I ask.\n", (NOW,)),
    "numbers": Answer("[plan(ratio=-1_000.5)]", "", (("plan", {"ratio": -1000.5}),)),
    "a list that is none": Answer("[1, 2] and [now]", "[1, 2] and [now]"),
    "of another name": Answer("[later()]", "[later()]"),
    "in a line": Answer("So [now()] it is", "So [now()] it is"),
    "an expression": Answer("[weather(city=a + b)]", "", (("weather", '{"city": a + b)'),)),
    "cut": Answer("[weather(city='Os", "", (("weather", '{"city": "Os'),)),
    "cut in its head": Answer("[weath", "[weath"),
}  # fmt: skip

LLAMA = {
    "marked": Answer('<|python_tag|>{"name": "now", "parameters": {}}', "", (NOW,)),
    "two": Answer(
        '{"name": "weather", "parameters": {"city": "Oslo"}}; {"name": "weather", "parameters": '
        '{"city": "Lima", "days": 3}}',
        "", (OSLO, LIMA),
    ),
    "type first": Answer(
        '{"type": "function", "name": "weather", "parameters": {"city": "Oslo"}}', "", (OSLO,),
    ),
    "between Llama 4's marks": Answer(
        '<|python_start|>{"name": "weather", "parameters": {"city": "Oslo"}}<|python_end|>', "",
        (OSLO,),
    ),
    "cut": Answer('{"name": "weather", "parameters": {"city": "Os', "",
                  (("weather", '{"city": "Os'),)),
}  # fmt: skip

HERMES = {
    "one": Answer(
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>',
        "", (OSLO,),
    ),
    "a key after": Answer(
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}, "id": "1"}\n</tool_call>',
        "", (OSLO,),
    ),
    "JSON in JSON": Answer(
        '<tool_call>\n{"name": "weather", "arguments": "{\\"city\\": \\"Oslo\\"}"}\n</tool_call>',
        "", (OSLO,),
    ),
    "a brace too few": Answer(
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}\n</tool_call>\nSo.', "So.",
        (OSLO,),
    ),
    "a value that is none": Answer(
        '<tool_call>\n{"name": "plan", "arguments": {"ratio": NaN}}\n</tool_call>', "",
        (("plan", '{"ratio": NaN}}\n'),),
    ),
    "cut": Answer('<tool_call>\n{"name": "weather", "arguments": {"city": "Os', "",
                  (("weather", '{"city": "Os'),)),
}  # fmt: skip

ANSWERS: dict[str, dict[str, Answer]] = {
    "qwen3_coder": QWEN3_CODER, "harmony": HARMONY, "gemma4": GEMMA4, "glm4": GLM4,
    "kimi_k2": KIMI_K2, "deepseek_v3": DEEPSEEK_V3, "deepseek_v31": DEEPSEEK_V31,
    "deepseek_v32": DEEPSEEK_V32, "minimax_m2": MINIMAX_M2, "mistral": MISTRAL,
    "pythonic": PYTHONIC, "llama": LLAMA, "hermes": HERMES,
}  # fmt: skip
