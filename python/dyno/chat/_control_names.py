"""The names of the control tokens of a vocabulary, and the search for them in a text."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from dyno._vocabulary import TokenType

if TYPE_CHECKING:
    from dyno._vocabulary import Vocabulary
    from dyno.tokenizer import Tokenizer

__all__ = ["ControlNames", "control_names"]


class ControlNames:
    """The names of a vocabulary's control tokens.

    A vocabulary may have a thousand of them. One regular expression with all names would try each of them at
    each "<" of a text. Here a position costs one look-up for each length that a name may have.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        kinds = (TokenType.CONTROL, TokenType.UNKNOWN)
        named = zip(vocabulary.tokens, vocabulary.types, strict=True)
        self.ids = {text: i for i, (text, kind) in enumerate(named) if kind in kinds and text}
        """Ids by name."""
        self._lengths = sorted({len(name) for name in self.ids}, reverse=True)
        begins = sorted({name[:2] for name in self.ids})
        self._begins = re.compile("|".join(map(re.escape, begins))) if begins else None

    def first(self, text: str, begin: int, end: int) -> tuple[int, str] | None:
        """The first name within `text[begin:end]` and its position in `text`. If several begin there, the
        longest one.
        """
        while self._begins is not None and (match := self._begins.search(text, begin, end)):
            name = self.at(text, match.start(), end)
            if name is not None:
                return match.start(), name
            begin = match.start() + 1
        return None

    def at(self, text: str, place: int, end: int) -> str | None:
        """The longest name that begins at `place` and ends before `end`."""
        for length in self._lengths:
            if place + length <= end and (name := text[place : place + length]) in self.ids:
                return name
        return None


_known: WeakKeyDictionary[Tokenizer, ControlNames] = WeakKeyDictionary()


def control_names(tokenizer: Tokenizer) -> ControlNames:
    """The names of a tokenizer. They are cached, because a vocabulary may have 250,000 tokens."""
    if tokenizer not in _known:
        _known[tokenizer] = ControlNames(tokenizer.vocabulary)
    return _known[tokenizer]
