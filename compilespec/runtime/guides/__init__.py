"""Guides describe the form that the output of a request must have.

`SamplingParams(guide=...)` takes a `JsonSchema`, a `Regex`, a `Grammar`, a `Choice`, or a
shorthand: a mapping (a JSON schema), a string (a regular expression), a sequence of strings or of
lists of token ids (choices).  llguidance, the optional dependency of the extra `guide`, follows
guides over text; choices of token ids need nothing.
"""

from compilespec.runtime.guides.base import Guide, Matcher, Vocabulary
from compilespec.runtime.guides.choice import Choice
from compilespec.runtime.guides.grammar import Grammar, JsonSchema, Regex
from compilespec.runtime.guides.shorthand import as_guide

__all__ = ["Choice", "Grammar", "Guide", "JsonSchema", "Matcher", "Regex", "Vocabulary", "as_guide"]
