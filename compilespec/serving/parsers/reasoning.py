"""Reasoning between tags, such as `<think>` and `</think>`."""

from __future__ import annotations

from compilespec.serving.parsers.parts import Parser, Parts, held_back


class Think:
    """The reasoning at the beginning of an answer; the rest goes to the next parser.

    Args:
        tags: begin and end of the reasoning.
        is_begun: the prompt ends with the first tag.
    """

    def __init__(self, following: Parser, tags: tuple[str, str], *, is_begun: bool) -> None:
        self._following = following
        self._begin, self._end = tags
        self._state = "inside" if is_begun else "before"
        self._text = ""

    def add(self, text: str) -> Parts:
        self._text += text
        parts = Parts()
        if self._state == "before":
            start = self._text.lstrip()
            if start.startswith(self._begin):
                self._state, self._text = "inside", start.removeprefix(self._begin)
            elif not self._begin.startswith(start):
                self._state = "after"
        if self._state == "inside":
            parts += self._read_inside()
        if self._state == "between":
            self._text = self._text.lstrip()
            self._state = "after" if self._text else "between"
        if self._state == "after":
            rest, self._text = self._text, ""
            parts += self._following.add(rest)
        return parts

    def finish(self) -> Parts:
        rest, self._text = self._text, ""
        if self._state == "inside":
            return Parts(reasoning=rest) + self._following.finish()
        return self._following.add(rest) + self._following.finish()

    def _read_inside(self) -> Parts:
        thought, tag, rest = self._text.partition(self._end)
        if tag:
            self._state, self._text = "between", rest
        else:
            keep = len(thought) - held_back(thought, self._end)
            thought, self._text = thought[:keep], thought[keep:]
        return Parts(reasoning=thought)
