"""The form of prompts: whether they are what the model's chat template writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

PROBE = "compilespec-probe"


def answer_marks(tokenizer: Any) -> list[tuple[int, ...]]:
    """The ids that the template puts where an answer begins, thinking modes each; none without a
    template.
    """
    if not getattr(tokenizer, "chat_template", None):
        return []
    message = [{"role": "user", "content": PROBE}]
    modes: list[dict[str, Any]] = [{}]
    if "enable_thinking" in str(tokenizer.chat_template):
        modes += [{"enable_thinking": False}, {"enable_thinking": True}]
    marks = []
    for mode in modes:
        try:
            asked, bare = (
                tokenizer.apply_chat_template(
                    message, tokenize=False, add_generation_prompt=adds, **mode
                )
                for adds in (True, False)
            )
        except Exception:  # templates raise any error
            return []
        if asked.startswith(bare) and len(asked) > len(bare):
            ids = tokenizer.encode(asked[len(bare) :], add_special_tokens=False)
            marks.append(tuple(ids))
    return list(dict.fromkeys(marks))


def turn_mark(tokenizer: Any) -> str:
    """The text that the template puts before a user's message."""
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": PROBE}], tokenize=False, add_generation_prompt=False
    )
    return str(text).partition(PROBE)[0].rpartition("\n\n")[2].strip() or PROBE


def other_forms(prompt: Sequence[int], tokenizer: Any) -> dict[str, tuple[int, ...]]:
    """The same prompt as it should be asked, by what it lacks now; none where it lacks nothing."""
    prompt, marks = tuple(prompt), answer_marks(tokenizer)
    if not marks:
        return {}
    if own := [one for one in marks if prompt[-len(one) :] == one]:
        own.sort(key=len)
        rest = prompt[: -len(own[-1])]
        other = next((one for one in marks if one != own[-1]), None)
        return {} if other is None else {"the other thinking mode": rest + other}
    text = tokenizer.decode(prompt)
    if any(part in text for part in _special(turn_mark(tokenizer), tokenizer)):
        return {"the generation prompt, where an answer begins,": prompt + marks[0]}
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
    )
    return {"the chat template": tuple(int(one) for one in ids)}


def _special(mark: str, tokenizer: Any) -> list[str]:
    """The special tokens in a mark, or all of it."""
    known = [one for one in getattr(tokenizer, "all_special_tokens", None) or [] if one in mark]
    begins = getattr(tokenizer, "bos_token", None)  # plain texts may begin with it, too
    return [one for one in known if one != begins] or known or [mark]
