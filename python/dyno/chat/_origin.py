"""Strings that know which of their characters the template wrote.

Only the template may write control tokens into a prompt. A plain `str` is foreign text. The strings of a
template are `Text`, with the spans that the template wrote. An operation that this module does not track
gives a plain `str`. So text of the template may count as foreign, but foreign text never counts as the
template's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, SupportsIndex

from markupsafe import Markup, escape

if TYPE_CHECKING:
    from collections.abc import Iterable

Spans = tuple[tuple[int, int], ...]
"""Begin and end of each part that the template wrote, in ascending order and not adjacent."""

__all__ = ["Spans", "Text", "joined", "own", "spans_of"]


class Text(str):
    """A string with the spans `_own` that the template wrote; there are none unless `own` made it."""

    __slots__ = ("_own",)
    _own: Spans

    def __new__(cls, value: object = "", spans: Spans = ()) -> Text:
        text = super().__new__(cls, value)
        text._own = spans
        return text

    def __str__(self) -> str:
        return self

    def __add__(self, other: object) -> Any:
        if isinstance(other, Markup):
            return _escaped_sum(self, other)
        return joined((self, other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: object) -> Any:
        # `Markup` itself handles another `Markup`, and escapes this string.
        return joined((other, self)) if isinstance(other, str) else NotImplemented

    def __mul__(self, count: SupportsIndex) -> str:
        whole = str.__mul__(self, count)
        if self._own != ((0, len(self)),):
            return whole
        return own(whole)

    __rmul__ = __mul__

    def __getitem__(self, key: SupportsIndex | slice[Any, Any, Any]) -> str:
        if isinstance(key, slice):
            begin, end, step = key.indices(len(self))
            return _cut(self, begin, max(begin, end)) if step == 1 else str.__getitem__(self, key)
        piece = str.__getitem__(self, key)
        at = key.__index__()
        return _cut(self, at % len(self), at % len(self) + len(piece))

    def lstrip(self, chars: str | None = None, /) -> str:
        return _cut(self, len(self) - len(str.lstrip(self, chars)), len(self))

    def rstrip(self, chars: str | None = None, /) -> str:
        return _cut(self, 0, len(str.rstrip(self, chars)))

    def strip(self, chars: str | None = None, /) -> str:
        begin = len(self) - len(str.lstrip(self, chars))
        return _cut(self, begin, max(begin, len(str.rstrip(self, chars))))

    def removeprefix(self, prefix: str, /) -> str:
        return _cut(self, len(self) - len(str.removeprefix(self, prefix)), len(self))

    def removesuffix(self, suffix: str, /) -> str:
        return _cut(self, 0, len(str.removesuffix(self, suffix)))

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return _located(self, str.split(self, sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        pieces = str.rsplit(self, sep, maxsplit)
        if sep is None and maxsplit.__index__() >= 0:  # the first piece keeps leading blanks
            return [*pieces]
        return _located(self, pieces, sep)

    def splitlines(self, keepends: bool = False) -> list[str]:
        begin, lines = 0, []
        for line, shown in zip(str.splitlines(self, True), str.splitlines(self, keepends), strict=True):
            lines.append(_cut(self, begin, begin + len(shown)))
            begin += len(line)
        return lines

    def partition(self, sep: str, /) -> tuple[str, str, str]:
        return self._parted(*str.partition(self, sep))

    def rpartition(self, sep: str, /) -> tuple[str, str, str]:
        return self._parted(*str.rpartition(self, sep))

    def _parted(self, left: str, middle: str, right: str) -> tuple[str, str, str]:
        first, second = len(left), len(left) + len(middle)
        return _cut(self, 0, first), _cut(self, first, second), _cut(self, second, second + len(right))

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> str:
        if not old:  # an empty string matches between all characters
            return str.replace(self, old, new, count)
        pieces = self.split(old, count)
        return joined(pieces, new)

    def join(self, parts: Iterable[str], /) -> str:
        return joined(parts, self)

    def upper(self) -> str:
        return self._same_length(str.upper(self))

    def lower(self) -> str:
        return self._same_length(str.lower(self))

    def capitalize(self) -> str:
        return self._same_length(str.capitalize(self))

    def title(self) -> str:
        return self._same_length(str.title(self))

    def _same_length(self, changed: str) -> str:
        # Outside ASCII, a changed character may be longer and move the others.
        return Text(changed, self._own) if self.isascii() else changed


class _MarkedText(Markup):
    """A `Markup` with the parts that the template wrote. Any further change of it loses them."""

    __slots__ = ("_own",)
    _own: Spans

    def __str__(self) -> str:
        return Text("".join((self,)), self._own)


def own(value: str) -> Text:
    """Mark `value` as text that the template wrote."""
    return Text(value, ((0, len(value)),) if value else ())


def spans_of(text: str) -> Spans:
    """The parts of `text` that the template wrote."""
    return getattr(text, "_own", ()) if isinstance(text, (Text, _MarkedText)) else ()


def joined(parts: Iterable[object], between: str = "") -> str:
    """`parts` one after the other, each as a string, with `between` between them."""
    strings: list[str] = []
    for part in parts:
        if strings and between:
            strings.append(between)
        strings.append(part if isinstance(part, str) else str(part))
    spans: list[tuple[int, int]] = []
    length = 0
    for string in strings:
        for begin, end in spans_of(string):
            if spans and spans[-1][1] == begin + length:
                spans[-1] = (spans[-1][0], end + length)
            else:
                spans.append((begin + length, end + length))
        length += len(string)
    whole = "".join(strings)
    return Text(whole, tuple(spans)) if spans else whole


def _escaped_sum(left: Text, right: Markup) -> Markup:
    """Concatenation as in `Markup`: the other string is escaped, which moves characters unless none needs
    escaping."""
    whole = _MarkedText(escape(left) + right)
    whole._own = spans_of(left) if len(escape(left)) == len(left) else ()
    return whole


def _cut(text: str, begin: int, end: int) -> str:
    piece = str.__getitem__(text, slice(begin, end))
    spans = tuple(
        (max(first, begin) - begin, min(last, end) - begin)
        for first, last in spans_of(text)
        if first < end and last > begin
    )
    return Text(piece, spans) if spans and piece else piece


def _located(text: str, pieces: list[str], sep: str | None) -> list[str]:
    """Add spans to `pieces`, which occur in `text` in this order, separated by `sep` (None: blanks)."""
    found, at = [], 0
    for piece in pieces:
        # With blanks as separators, a piece begins at the next character that is not blank.
        begin = at if sep is not None else str.find(text, piece, at)
        found.append(_cut(text, begin, begin + len(piece)))
        at = begin + len(piece) + len(sep or "")
    return found
