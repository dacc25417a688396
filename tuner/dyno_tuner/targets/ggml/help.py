"""The options of a binary of llama.cpp or ik_llama.cpp, read from its `--help` and `--version`.

Flags of both engines come, go and change their values often. So a flag exists only if the help of this binary
lists it; version numbers do not count.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_FLAG = re.compile(r"-{1,2}[A-Za-z][A-Za-z0-9_-]*")
_DEFAULT = re.compile(r"default:?\s*['\"]?([^\s'\",;)]+)")
_REMOVED = re.compile(r"the argument has been removed\W*(.*?)\s*(?:\(env:|$)")
_ENV = re.compile(r"\(env:\s*([A-Z][A-Z0-9_]+)\)")


@dataclass(frozen=True, slots=True)
class Flag:
    """One option of a binary."""

    names: tuple[str, ...]
    argument: str = ""  # as in the help, e.g. "<0|1>" or "[on|off|auto]"; "" for a switch
    default: str = ""
    env: str = ""  # the environment variable of the option, if it has one
    removed: str = ""  # advice of the help for a flag that was removed

    @property
    def choices(self) -> tuple[str, ...]:
        """The values that the help lists, e.g. ("on", "off", "auto")."""
        text = self.argument.strip("<>[]{}() ")
        parts = [p.strip() for p in re.split(r"[|,]", text)]
        return tuple(parts) if len(parts) > 1 and all(re.fullmatch(r"[\w+-]+", p) for p in parts) else ()


@dataclass(frozen=True, slots=True)
class Help:
    """The options of one binary, by each of their names."""

    flags: dict[str, Flag] = field(default_factory=dict)

    def get(self, *names: str) -> Flag | None:
        """The flag of the first of `names` that the binary has."""
        return next((self.flags[n] for n in names if n in self.flags), None)

    def has(self, *names: str) -> bool:
        return self.get(*names) is not None


def parse_help(text: str) -> Help:
    """Parse the output of `--help`."""
    blocks: list[list[str]] = []
    for line in text.splitlines():
        if re.match(r"\s{0,12}-{1,2}[A-Za-z]", line):
            blocks.append([line])
        elif blocks and line.startswith(" ") and line.strip():
            blocks[-1].append(line)
        elif blocks and not line.strip():
            blocks.append([""])
    flags: dict[str, Flag] = {}
    for block in blocks:
        names, argument = _head(block[0])
        if not names:
            continue
        whole = " ".join(part.strip() for part in block)
        default, env = _DEFAULT.search(whole), _ENV.search(whole)
        gone = _REMOVED.search(whole)
        removed = (gone[1] or "removed") if gone else ""
        flag = Flag(names, argument, default[1] if default else "", env[1] if env else "", removed)
        for name in names:
            flags.setdefault(name, flag)
    return Help(flags)


def _head(line: str) -> tuple[tuple[str, ...], str]:
    """The names and argument in the first line of an option. Names come first, then the argument, which ends
    at two spaces or at the parenthesis of the description."""
    rest, names = line.strip(), []
    while (found := _FLAG.match(rest)) is not None:
        names.append(found[0])
        rest = rest[found.end() :]
        # Some rows show the argument behind every name: `-a N, --all N`.
        separator = re.match(r"(?: [A-Z]+)?,\s*(?=--[A-Za-z])|\s*[,/|]\s*(?=-)|\s+(?=--[A-Za-z])", rest)
        if separator is None:
            break
        rest = rest[separator.end() :]
    # In parentheses, a list of choices is an argument; other text is a description.
    argument = re.match(r"[ =](<[^>]*>|\[[^\]]*\]|\{[^}]*\}|\([\w|+-]*\|[\w|+-]*\)|[^\s(-]\S*)", rest)
    return tuple(names), argument[1] if argument else ""


@dataclass(frozen=True, slots=True)
class Version:
    number: str  # the build number
    commit: str

    def __str__(self) -> str:
        return f"{self.number} ({self.commit})" if self.commit else self.number


def parse_version(text: str) -> Version | None:
    """`version: 3999 (8337e4cd3)` and `version: 0.1 (build 6710, commit 0c1e570)`; None for anything else."""
    found = re.search(
        r"^version:\s*\S+\s*\(build\s+([0-9]+),\s*commit\s+([0-9a-f]{4,40})\)", text, re.MULTILINE
    )
    found = found or re.search(r"^version:\s*([0-9]+)\s*\(([0-9a-f]{4,40}|unknown)\)", text, re.MULTILINE)
    return Version(found[1], found[2]) if found else None


def engine_of_help(bench: Help) -> tuple[str, str]:
    """The engine that a llama-bench belongs to, and the flags that show it."""
    marks = [n for n in ("-mla", "-rtr", "-amb", "-fmoe", "-ser", "-cuda") if bench.has(n)]
    if marks:
        return "ik_llama.cpp", ", ".join(marks)
    marks = [n for n in ("-nopo", "-ncmoe", "-d", "--poll", "--prio", "-lm", "--no-host") if bench.has(n)]
    return ("llama.cpp", ", ".join(marks)) if marks else ("", "")
