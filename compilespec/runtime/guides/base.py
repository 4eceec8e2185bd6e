"""Guides, and the matchers that follow them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any, Protocol

from torch import Tensor

MAX_GRAMMARS = 64  # compiled guides that an engine keeps


class Matcher(Protocol):
    """A place in a guide's language.  EOS is no part of it: `may_end` says whether it may come
    here.
    """

    def allowed(self) -> Tensor:
        """The ids that may come next: int32 [ceil(V / 32)], bit i of word w is id 32 w + i.

        Raises: GuideFailed when the guide cannot be followed any further, for example at a limit of
            its parser.
        """

    def may_end(self) -> bool:
        """True where the tokens so far are a whole answer."""

    def advance(self, token: int) -> bool:
        """Go past a token; returns False, and changes nothing, if it may not come."""

    def rewind(self, count: int) -> None:
        """Go back over the last `count` tokens."""


class Guide(Protocol):
    """A language of token ids."""

    def matcher(self, vocabulary: Vocabulary) -> Matcher:
        """A matcher at the beginning.

        Raises: InvalidRequest (a bad guide, or an engine without a tokenizer for it),
            MissingDependency.
        """


class Vocabulary:
    """An engine's token ids, and the guides compiled for them; shared by its requests.

    Args:
        tokenizer: a fast transformers tokenizer; None where only ids are known.
        size: ids that the model's logits have; the tokenizer may know fewer.
    """

    def __init__(self, tokenizer: Any, size: int) -> None:
        self.tokenizer, self.size = tokenizer, size
        self.grammars: OrderedDict[str, Any] = OrderedDict()  # by source, the latest used last
        self.compiles = threading.Lock()
        self.text_tokens: Any = None  # the tokenizer's facts for guides over text

    @property
    def num_words(self) -> int:
        return -(-self.size // 32)

    def keep(self, source: str, grammar: Any) -> None:
        self.grammars[source] = grammar
        self.grammars.move_to_end(source)
        while len(self.grammars) > MAX_GRAMMARS:
            self.grammars.popitem(last=False)


def only_bit(words: Tensor) -> int | None:
    """The id that a mask allows; -1 where it allows none, None where it allows several."""
    places = words.nonzero().flatten().tolist()
    if len(places) > 1:
        return None
    if not places:
        return -1
    word = int(words[places[0]]) & 0xFFFFFFFF
    return None if word & (word - 1) else 32 * places[0] + word.bit_length() - 1
