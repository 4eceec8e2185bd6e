"""Write prompts as JSONL: those to train on, and those held out.

    python -m tools.prompts --output FOLDER

Each line has "messages", "domain" and "source"; a source (a function, a passage, a topic) is held
out as a whole, by its hash.  The order is that of a hash too, so that the beginning of the file is
a fair sample of it.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tools.prompts.sources import Function, Passage, functions, passages
from tools.prompts.topics import ABOUT, CODE_FORMS, LANGUAGES, PAIRS, PROGRAMS, TOPICS

HELD_OUT_ONE_IN = 20
SHARES = {"chat": 0.4, "code": 0.22, "explain": 0.18, "summarise": 0.2}
Prompt = dict[str, object]

EXPLAIN = (
    "Explain what this {package} function does:\n\n```python\n{code}\n```",
    "What does the following code do?\n\n```python\n{code}\n```",
    "Write a docstring for this function.\n\n```python\n{code}\n```",
    "Review this function and suggest improvements.\n\n```python\n{code}\n```",
    "What does `{name}` in {package} do? Its documentation says:\n\n{docstring}",
    "Rewrite this documentation so that a beginner understands it:\n\n{docstring}",
)
WRITE = (
    "Write a Python function `{name}` that does the following:\n\n{docstring}",
    'Complete this function.\n\n```python\n{signature}\n    """{docstring}"""\n```',
    "Write unit tests for this function.\n\n```python\n{code}\n```",
    "Add comments to this code.\n\n```python\n{code}\n```",
    "Show an example of how to call `{name}`:\n\n{docstring}",
)
SUMMARISE = (
    "Summarize the following text:\n\n{text}",
    "Summarize this in one sentence.\n\n{text}",
    "What are the main points of this text?\n\n{text}",
    "Answer with the help of this text: what is said about {title}?\n\n{text}",
    "Rewrite the following text in your own words.\n\n{text}",
    "Write three questions that this text answers, with their answers.\n\n{text}",
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--count", type=int, default=20_000, help="default: %(default)s")
    args = parser.parse_args()
    prompts = chosen(args.count)
    args.output.mkdir(parents=True, exist_ok=True)
    for name, held_out in (("prompts", False), ("held-out", True)):
        lines = [one for one in prompts if is_held_out(str(one["source"])) == held_out]
        text = "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in lines)
        (args.output / f"{name}.jsonl").write_text(text, encoding="utf-8")
        counts = Counter(one["domain"] for one in lines)
        print(f"{args.output / name}.jsonl: {len(lines)} prompts, {dict(counts)}")


def chosen(count: int) -> list[Prompt]:
    """At most `count` prompts, in their shares, no prompt twice, in the order of a hash."""
    ways = {"chat": chats(), "code": codes(), "explain": explanations(), "summarise": summaries()}
    prompts: list[Prompt] = []
    for domain, found in ways.items():
        unique = {_digest(source + text): (source, text) for source, text in found}
        for digest in sorted(unique)[: round(count * SHARES[domain])]:
            source, text = unique[digest]
            message = {"role": "user", "content": text}
            prompts.append({"messages": [message], "domain": domain, "source": source})
    return sorted(prompts, key=lambda one: _digest(json.dumps(one)))


def is_held_out(source: str) -> bool:
    """Whether the prompts of a source are for judging alone."""
    return int(_digest(source)[:8], 16) % HELD_OUT_ONE_IN == 0


def chats() -> Iterator[tuple[str, str]]:
    """Ordinary requests."""
    for a, form in itertools.product(TOPICS, ABOUT):
        yield f"topic {a}", form.format(a=a)
    for number, a in enumerate(TOPICS):
        for step, form in enumerate(PAIRS):
            yield f"topic {a}", form.format(a=a, b=TOPICS[(number * 7 + step * 13) % len(TOPICS)])


def codes() -> Iterator[tuple[str, str]]:
    """Programs to write."""
    for task in PROGRAMS:
        for language, form in itertools.product(dict.fromkeys(LANGUAGES), CODE_FORMS):
            yield f"task {task}", form.format(language=language, task=task)
    for one in functions():
        yield _source(one), _pick(WRITE, one.name + one.package).format(**_fields(one))


def explanations() -> Iterator[tuple[str, str]]:
    """Code and its documentation, to explain."""
    for one in functions():
        yield _source(one), _pick(EXPLAIN, one.package + one.name).format(**_fields(one))


def summaries() -> Iterator[tuple[str, str]]:
    """Documentation, to say in other words."""
    for one in passages():
        yield f"passage {one.text[:80]}", _pick(SUMMARISE, one.text).format(**_passage(one))


def _fields(one: Function) -> dict[str, str]:
    return {
        "name": one.name, "package": one.package, "docstring": one.docstring, "code": one.code,
        "signature": one.signature,
    }  # fmt: skip


def _passage(one: Passage) -> dict[str, str]:
    return {"title": one.title, "text": one.text}


def _source(one: Function) -> str:
    return f"function {one.package} {one.name}"


def _pick(forms: tuple[str, ...], text: str) -> str:
    return forms[int(_digest(text)[:8], 16) % len(forms)]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


if __name__ == "__main__":
    main()
