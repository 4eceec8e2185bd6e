"""Guides: what the output of a request must look like.

`SamplingParams(guide=...)` takes a `JsonSchema`, a `Regex`, a `Grammar`, a `Choice`, or what stands
for one: a mapping (a JSON schema), a string (a regular expression), a sequence of strings or of
lists of token ids (choices).  A guide over text is followed by llguidance, the optional dependency
of the extra `guide`; choices of token ids need nothing.
"""

from compilespec.runtime.guides.base import Guide, Matcher, Vocabulary
from compilespec.runtime.guides.choice import Choice
from compilespec.runtime.guides.grammar import Grammar, JsonSchema, Regex
from compilespec.runtime.guides.shorthand import as_guide

__all__ = ["Choice", "Grammar", "Guide", "JsonSchema", "Matcher", "Regex", "Vocabulary", "as_guide"]
