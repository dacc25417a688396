"""Parsing of words to items: leading assignments, the program, flags with their values, and cmake
definitions."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence  # noqa: TC003
from pathlib import PurePosixPath, PureWindowsPath

from ..core.errors import TuneError
from .flags import IK_TOOLS, TOOLS, engines_of, find_flag
from .gone import GONE, find_gone
from .line import BENCH, COMMON, ENGINES, IK, MAIN, Item
from .others import OTHERS
from .switches import BUILD, BUILD_NAMES, ENV_NAMES, ENVIRONMENT
from .versions import engine_of_version

_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_LIMIT = 4096
_MARK = "\ue000"  # a character of no command line, from the private use area


def split(words: Sequence[str]) -> list[str]:
    """The words of the command line. A single word with spaces is split like in a shell.

    Raises TuneError if there are no words or too many, or if a quote is not closed.
    """
    found = [w.replace("\\\n", " ") for w in words]
    if len(found) == 1 and re.search(r"\s", found[0]):
        try:
            found = shlex.split(found[0])
        except ValueError as error:
            raise TuneError(f"command line {words[0]!r}: {error}; check the quotes") from error
    found = [w for w in found if w.strip()]
    if not found:
        raise TuneError(
            "no command line was given; write it after --, such as tune doctor -- llama-server -m x.gguf -ub "
            "4096"
        )
    if len(found) > _LIMIT:
        raise TuneError(f"the command line has {len(found)} words; at most {_LIMIT} are read")
    return found


def unquoted_parentheses(words: Sequence[str]) -> list[str]:
    """The words of a line that is one string which hold a parenthesis outside quotes.

    A shell stops at it, but replaces `$(…)` by the output of a command.
    """
    if len(words) != 1 or not re.search(r"\s", words[0]):
        return []
    marked = re.sub(
        r"""'[^']*'|"(?:\\.|[^"\\])*"|\\.|\$\(\(.*?\)\)|\$\([^()]*\)|[()]""",
        lambda found: f"{_MARK}{found[0]}" if found[0] in ("(", ")") else found[0],
        words[0].replace("\\\n", " "),
        flags=re.DOTALL,
    )
    return [word.replace(_MARK, "") for word in shlex.split(marked) if _MARK in word]


def program_of(word: str) -> str:
    """The file name of a program without folder and .exe."""
    name = PureWindowsPath(word).name if "\\" in word else PurePosixPath(word).name
    return name[:-4] if name.lower().endswith(".exe") else name


def detect_engine(words: Sequence[str], version: str | None) -> tuple[str, str]:
    """The engine that a line is for, and the reason."""
    owner = engine_of_version(version)
    if owner is not None:
        return owner, f"{version} is a commit of {owner}"
    signs: dict[str, list[str]] = {e: [] for e in ENGINES}
    for word in words:
        for engine in _hints(word):
            signs[engine].append(word)
    ik, main = signs[IK], signs[MAIN]
    if not ik and not main:
        return MAIN, "the line fits both engines; llama.cpp is assumed, so give --engine for the other"
    chosen = IK if len(ik) >= len(main) else MAIN
    other = MAIN if chosen == IK else IK
    reason = f"only {chosen} has {', '.join(dict.fromkeys(signs[chosen]))}"
    if signs[other]:
        against = ", ".join(dict.fromkeys(signs[other]))
        reason += f" (but only {other} has {against}; give --engine if that is wrong)"
    return chosen, reason


def _hints(word: str) -> set[str]:
    if program_of(word) in IK_TOOLS:
        return {IK}
    if word.startswith("-") and not word.startswith("-D"):
        name = word.partition("=")[0] if word.startswith("--") else word
        owners = engines_of(name)
        if owners:  # a name that the other engine also lists, even without a row, decides nothing
            owners |= {engine for (engine, _), names in OTHERS.items() if name in names}
        if (
            not owners
            and any(find_gone(name, IK, t) for t in (COMMON, BENCH))
            and not any(find_gone(name, MAIN, t) for t in (COMMON, BENCH))
        ):
            return {IK}
        lost = any(
            g.removed and name in g.names and g.engine not in owners for g in GONE
        )  # an older line may contain it
        return owners if len(owners) == 1 and not lost else set()
    found = _ASSIGNMENT.fullmatch(re.sub(r"^-D", "", word).replace(":BOOL=", "=").replace(":STRING=", "="))
    if not found:
        return set()
    table = BUILD if found[1] in BUILD_NAMES else ENVIRONMENT
    owners = {s.engine for s in table if s.name == found[1] and s.gone is None}
    return owners if len(owners) == 1 else set()


def parse(words: Sequence[str], engine: str) -> tuple[list[Item], str | None]:
    """The items of a line and the name of its program."""
    items: list[Item] = []
    rest = list(words)
    while rest and (rest[0] == "env" or _ASSIGNMENT.fullmatch(rest[0])):
        word = rest.pop(0)
        found = _ASSIGNMENT.fullmatch(word)
        if found is None:
            items.append(Item("argument", "env", word))
        else:
            items.append(
                Item("cmake" if found[1] in BUILD_NAMES - ENV_NAMES else "env", found[1], word, found[2])
            )
    tool: str | None = None
    if rest and not rest[0].startswith("-"):
        known = (*TOOLS, "cmake")
        at = next((i for i, w in enumerate(rest) if program_of(w) in known), 0)  # after numactl and the like
        items.extend(Item("argument", w, w) for w in rest[:at])
        tool = program_of(rest[at])
        items.append(Item("program", tool, rest[at]))
        rest = rest[at + 1 :]
    if tool == "cmake" or (tool is None and any(w.startswith("-D") for w in rest)):
        items.extend(_cmake(rest))
    else:
        kind = BENCH if tool == "llama-bench" else COMMON
        items.extend(_flags(rest, engine, kind, loose=tool is None))
    return items, tool


def _cmake(words: list[str]) -> list[Item]:
    items: list[Item] = []
    at = 0
    while at < len(words):
        word, text = words[at], words[at]
        at += 1
        if word == "-D" and at < len(words):
            word, text = f"-D{words[at]}", f"-D {words[at]}"
            at += 1
        found = re.fullmatch(r"(?:-D)?([A-Za-z_][A-Za-z0-9_]*)(?::[A-Z]+)?=(.*)", word, re.DOTALL)
        if found:
            items.append(Item("cmake", found[1], text, found[2]))
        elif word in ("-B", "-S", "-G") and at < len(words):
            items.append(Item("argument", word, f"{word} {words[at]}", words[at]))
            at += 1
        else:
            items.append(Item("argument", word, text))
    return items


def _flags(words: list[str], engine: str, kind: str, *, loose: bool) -> list[Item]:
    """Parse flags. `loose`: no program was named, so flags of llama-bench are accepted, too."""
    items: list[Item] = []
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        if not _is_flag(word):
            found = _ASSIGNMENT.fullmatch(word)
            if found and (found[1] in ENV_NAMES or found[1] in BUILD_NAMES):
                items.append(
                    Item("cmake" if found[1] in BUILD_NAMES - ENV_NAMES else "env", found[1], word, found[2])
                )
            else:
                items.append(Item("argument", word, word))
            continue
        name, equals, joined = word.partition("=") if word.startswith("--") else (word, "", "")
        flag = find_flag(name, engine, kind)
        following = words[at] if at < len(words) else None
        gone = find_gone(name, engine, kind)
        if flag is None and gone is None and loose:
            flag = find_flag(name, engine, BENCH)
        if flag is not None:
            takes = flag.takes
            if flag.optional:
                takes = following in ("0", "1")
        elif gone is not None:
            takes = gone.takes or (following in ("0", "1") and not gone.takes)
        elif name in (others := OTHERS[engine, kind == BENCH]):
            takes = others[name]
        else:  # known in another table: as there; unknown: a word that is not like a flag is its value
            rows = [f for e in ENGINES for k in (COMMON, BENCH) if (f := find_flag(name, e, k))]
            takes = rows[0].takes if rows else following is not None and not _is_flag(following)
        item = Item("flag", flag.name if flag else name, word, joined if equals else None, flag)
        if (
            takes
            and not equals
            and following is not None
            and not _looks_like_another(following, engine, kind)
        ):
            item.value = following
            item.text = f"{word} {following}"
            at += 1
        items.append(item)
    return items


def _is_flag(word: str) -> bool:
    return len(word) > 1 and word.startswith("-") and not re.match(r"-[0-9.]", word)


def _looks_like_another(word: str, engine: str, kind: str) -> bool:
    """Whether a word is itself a flag, so that the flag before it has no value."""
    if not _is_flag(word):
        return False
    listed = word in OTHERS[engine, kind == BENCH]
    return listed or bool(engines_of(word)) or find_gone(word, engine, kind) is not None
