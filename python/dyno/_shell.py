"""Escaping of names and paths for a terminal: one line, no control characters, ready to paste into a
shell."""

from __future__ import annotations

import shlex


def escaped(text: str) -> str:
    """`text` with every character that a terminal does not print as `\\n`, `\\x1b` or `\\u202e`."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def shell_word(text: str) -> str:
    """`text` as one word of a POSIX shell on a single line. Control characters are written in the syntax of
    bash."""
    if text.isprintable():
        return shlex.quote(text)
    plain = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"$'{escaped(plain)}'"
