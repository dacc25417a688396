"""Removal of secrets from command lines, because profiles, journals and units are made to be checked in.

A value is replaced by `***` if the name of its option, variable or query parameter shows that it is a secret.
Passwords in URLs are removed, too.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

HIDDEN = "***"
# A name of a secret ends with "token"; "tokens", as in --max-tokens, is a number. A path to a key is not a
# secret.
_NAME = re.compile(
    r"(?:^|[-_.])(?:api[-_]?key|access[-_]?key|secret(?:[-_]?(?:access[-_]?)?key)?|private[-_]?key"
    r"|auth[-_]?key|pass|token|credentials?|authorization)$|[-_.]pwd$|pass(?:word|wd|phrase)$",
    re.IGNORECASE,
)
_OPTIONS = frozenset({"-hft"})  # short names of llama.cpp whose value is a secret
_HEADERS = frozenset({"-H", "--header"})
_PREFIXES = re.compile(r"\b(hf_[A-Za-z0-9]{8,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{16,})")
# Up to the last @ of the word, because a password may contain an @ that was not escaped.
_USER = re.compile(r"(://[^:/@\s]*):[^@]*@(?:\S*@)?")
_QUERY = re.compile(r"([?&;]([A-Za-z0-9_.-]+)=)[^&;\s]*")
_HEADER = re.compile(r"^(\s*[A-Za-z0-9-]+\s*:\s*)(?:(basic|bearer)\s+)?.+$", re.IGNORECASE | re.DOTALL)


def names_secret(name: str) -> bool:
    """Whether an option, variable or parameter with this name holds a secret."""
    bare = name.lstrip("-")
    return name in _OPTIONS or _NAME.search(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", bare)) is not None


def redact_text(text: str) -> str:
    """A URL, or text with URLs, in a form that is safe to show and record."""
    text = _USER.sub(rf"\1:{HIDDEN}@", text)

    def query(found: re.Match[str]) -> str:
        return found[1] + HIDDEN if names_secret(found[2]) else found[0]

    return _PREFIXES.sub(HIDDEN, _QUERY.sub(query, text))


def redact_words(words: Sequence[str]) -> list[str]:
    """The words of a command line in a form that is safe to record."""
    shown: list[str] = []
    before = ""
    for word in words:
        name, equals, _ = word.partition("=")
        if before and names_secret(before) and not word.startswith("--"):
            shown.append(HIDDEN)
        elif before in _HEADERS and (header := _HEADER.match(word)):
            shown.append(header[1] + HIDDEN)
        elif equals and re.fullmatch(r"-{0,2}[A-Za-z_][A-Za-z0-9_.-]*", name) and names_secret(name):
            shown.append(f"{name}={HIDDEN}")
        else:
            shown.append(redact_text(word))
        before = word if word.startswith("-") and not equals else ""
    return shown
