"""What a guide is, and what follows it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any, Protocol

from torch import Tensor

MAX_GRAMMARS = 64  # compiled ones that an engine keeps


class Matcher(Protocol):
    """A place in a guide's language.  EOS is no part of it: `may_end` says where it may come."""

    def allowed(self) -> Tensor:
        """The ids that may come next: int32 [ceil(V / 32)], bit i of word w is id 32 w + i.

        Raises: GuideFailed when the guide cannot be followed any further, a limit of its parser,
            say.
        """

    def may_end(self) -> bool:
        """True where the tokens so far are a whole answer."""

    def advance(self, token: int) -> bool:
        """Go past a token; False, and nothing changes, where it may not come."""

    def rewind(self, count: int) -> None:
        """Go back over the last `count` tokens."""


class Guide(Protocol):
    """A language of token ids."""

    def matcher(self, vocabulary: Vocabulary) -> Matcher:
        """A matcher at the beginning.

        Raises: InvalidRequest (the guide is no good, or the engine has no tokenizer for it),
            MissingDependency.
        """


class Vocabulary:
    """An engine's token ids, and what guides made of them; shared by its requests.

    Args:
        tokenizer: a fast transformers tokenizer; None where only ids are known.
        size: ids that the model's logits have; the tokenizer may know fewer.
    """

    def __init__(self, tokenizer: Any, size: int) -> None:
        self.tokenizer, self.size = tokenizer, size
        self.grammars: OrderedDict[str, Any] = OrderedDict()  # by source, the latest used last
        self.compiles = threading.Lock()
        self.text_tokens: Any = None  # what guides over text know of the tokenizer

    @property
    def num_words(self) -> int:
        return -(-self.size // 32)

    def keep(self, source: str, grammar: Any) -> None:
        self.grammars[source] = grammar
        self.grammars.move_to_end(source)
        while len(self.grammars) > MAX_GRAMMARS:
            self.grammars.popitem(last=False)
