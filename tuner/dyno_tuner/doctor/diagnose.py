"""The diagnosis: a look-up of each item in the tables, and then the rules for the whole line."""

from __future__ import annotations

import shlex
from collections.abc import Sequence  # noqa: TC003

from ..core.errors import TuneError
from .flags import FLAGS, IK_TOOLS, TOOLS, find_flag
from .gone import find_gone
from .line import (
    BENCH,
    COMMON,
    ENGINES,
    IK,
    IK_SOURCE,
    MAIN,
    Facts,
    Item,
    Line,
    Status,
    _is_int,
    is_on,
    nearest,
    nearest_hint,
)  # fmt: skip
from .op_ids import decode
from .others import OTHERS
from .parse import detect_engine, parse, split, unquoted_parentheses
from .rules import RULES
from .switches import BUILD_NAMES, CUDA_KEYS, ENV_ELSEWHERE, ENV_NAMES, find_build, find_env
from .versions import resolve_version

CUDA_SOURCE = "ik_llama.cpp 8337e4cd3 (2026-08-15), ggml-cuda.cu:5299-5388"


def diagnose(
    words: Sequence[str], *, engine: str | None = None, version: str | None = None, facts: Facts | None = None
) -> Line:
    """Diagnose a command line: the effect of each token.

    Args:
        words: The line, as words or as one string.
        engine: ``llama.cpp`` or ``ik_llama.cpp``; None: detected from the line.
        version: A date (YYYY-MM-DD) or a commit; None: the commit that the tables describe.
        facts: Facts about GPU and model, as far as known.

    Raises TuneError if the line, engine or version cannot be read.
    """
    line_words = split(words)
    if engine is not None and engine not in ENGINES:
        raise TuneError(f"--engine {engine!r}: give {' or '.join(ENGINES)}")
    chosen, reason = (engine, "as given") if engine else detect_engine(line_words, version)
    when = resolve_version(version, chosen)
    items, tool = parse(line_words, chosen)
    line = Line(chosen, reason, when, facts or Facts(), items, tool)
    for item in list(items):
        {"program": _program, "env": _env, "cmake": _cmake, "flag": _flag, "argument": _argument}[item.kind](
            item, line
        )
    for rule in RULES:
        rule(line)
    for word in unquoted_parentheses(words):
        for item in (one for one in items if word in (one.value, *one.text.split(" "))):
            said = "a shell stops at a parenthesis outside quotes, so in a shell, write"
            item.say(Status.NEEDS, f"{said} {shlex.quote(word)}")
    return line


def _unknown(item: Item, names: Sequence[str], what: str) -> None:
    item.nearest = nearest(item.name, names) or None
    hint = f"; the nearest name is {item.nearest}" if item.nearest else ""
    item.say(Status.UNKNOWN, f"{what} is not in dyno's tables{hint}")


def _program(item: Item, line: Line) -> None:
    if item.name == "cmake" or item.name in TOOLS:
        if item.name in IK_TOOLS and line.engine == MAIN:
            item.say(
                Status.MISSING, "a program of ik_llama.cpp; in llama.cpp, use llama-batched-bench -npl 1"
            )
        else:
            item.say(Status.DOES, "the program")
        return
    _unknown(item, [*TOOLS, "cmake"], "the program")


def _argument(item: Item, line: Line) -> None:
    if line.tool == "cmake":
        item.say(Status.DOES, "an argument of cmake itself")
    elif item.name == "env":
        item.say(Status.DOES, "runs the program with the variables after it")
    elif any(i.kind == "program" for i in line.items[line.items.index(item) + 1 :]):
        item.say(Status.UNKNOWN, "part of a command that starts the program; dyno does not check it")
    else:
        item.say(Status.UNKNOWN, "an argument that follows no flag")


def _env(item: Item, line: Line) -> None:
    row = find_env(item.name, line.engine)
    if row is not None:
        item.say(Status.DOES, row.does, row.source)
        if row.presence and (item.value or "").strip().lower() in ("0", "off", "false", "no", ""):
            item.say(
                Status.INVALID,
                "only its presence counts, so this value turns it on; to turn it off, leave it out",
                row.source,
            )
        if row.values and item.value not in row.values:
            known = ", ".join(row.values)
            item.say(Status.INVALID, f"value {item.value!r} is not one of {known}", row.source)
    elif item.name in ENV_NAMES:
        text = ENV_ELSEWHERE.get((line.engine, item.name))
        other = f"a variable of {_other(line.engine)}; dyno's tables have none of this name in {line.engine}"
        item.say(Status.MISSING, text or other)
    elif item.name in BUILD_NAMES:
        item.say(Status.INVALID, "a build switch and not an environment variable; give it to cmake as -D")
    elif item.name.startswith("LLAMA_HOTSWAP_") and line.engine == IK:
        item.say(Status.DOES, "a parameter of the persistent mode of llama-perplexity", IK_SOURCE)
    elif item.name.startswith("LLAMA_ARG_") and line.engine == MAIN:
        item.say(Status.NEEDS, "most flags can be given as LLAMA_ARG_*; dyno's tables do not list which")
    else:
        _unknown(item, sorted(ENV_NAMES), "the variable")


def _cmake(item: Item, line: Line) -> None:
    row = find_build(item.name, line.engine)
    if row is None:
        if item.name in ENV_NAMES:
            item.say(Status.INVALID, "an environment variable of the program, which cmake does not read")
        else:
            _unknown(item, sorted(BUILD_NAMES), "the build switch")
        return
    if row.gone is not None:
        item.say(Status.REMOVED if row.lost else Status.MISSING, row.gone, row.source)
        return
    default = f"; default {row.default}" if row.default is not None else ""
    does = row.does
    if row.default in ("ON", "OFF") and item.value is not None and not is_on(item.value):
        does = row.off or f"turned off; with ON: {does}"
    item.say(Status.DOES, does + default, row.source)
    if row.dead is not None:
        item.say(Status.INERT, row.dead, row.source)
    if line.tool is not None and line.tool != "cmake":
        item.say(Status.INVALID, "a build switch, which the program does not read; give it to cmake as -D")


def _flag(item: Item, line: Line) -> None:
    kind = BENCH if line.bench else COMMON
    name = item.text.split()[0].partition("=")[0] if item.text.startswith("--") else item.text.split()[0]
    gone = find_gone(name, line.engine, kind, item.value)
    if gone is not None and (item.flag is None or gone.value is not None):
        known = line.version.has_undated or (gone.since is not None and line.version.since(gone.since))
        if not gone.removed or known:
            item.say(Status.REMOVED if gone.removed else Status.MISSING, gone.text)
            return
        if gone.since is None:
            day = "removed before the commit that dyno's tables describe; the date is unknown"
            item.say(Status.UNKNOWN, f"{day}: {gone.text}")
            return
        item.say(Status.DOES, f"works in {line.version.text}; in later versions: {gone.text}")
        return
    if item.flag is None:
        _foreign(item, name, line)
        return
    item.say(Status.DOES, item.flag.does, item.flag.source)
    if kind not in item.flag.tools:
        item.say(Status.NEEDS, "a flag of llama-bench only, and the line names no program")
    if item.value is not None and item.text.startswith(f"{name}="):
        item.say(
            Status.UNKNOWN, "dyno's tables do not say whether --flag=value is read; write a space instead"
        )
    _value(item, line)
    if item.name == "-op" and item.value is not None:
        decode(item, line.version)
    elif item.name == "-cuda" and item.value is not None:
        _cuda(item, line)


def _foreign(item: Item, name: str, line: Line) -> None:
    kind = BENCH if line.bench else COMMON
    if name in OTHERS[line.engine, line.bench]:
        item.say(Status.DOES, "a known flag; dyno's tables do not describe its effect", line.source)
        if item.value is None and OTHERS[line.engine, line.bench][name]:
            item.say(Status.INVALID, "it needs a value after it", line.source)
        return
    here = [f for f in FLAGS if f.engine == line.engine and name in f.names]
    if here:
        item.say(Status.MISSING, f"{'llama-bench' if line.bench else 'only llama-bench'} "
                 f"{'does not take it' if line.bench else 'takes it'}, by dyno's tables",
                     here[0].source)  # fmt: skip
        return
    other = _other(line.engine)
    there = next((f for k in (kind, BENCH, COMMON) if (f := find_flag(name, other, k))), None)
    if there is not None:
        what = f"a flag of {other} ({there.does}); dyno's tables have none of this name in {line.engine}"
        item.say(Status.MISSING, what, there.source)
        return
    known = [n for f in FLAGS if f.engine == line.engine for n in f.names]
    item.unlisted = True
    _unknown(item, [*known, *OTHERS[line.engine, line.bench]], "the flag")


def _value(item: Item, line: Line) -> None:
    flag = item.flag
    if flag is None or not flag.takes or (flag.optional and item.value is None):
        return
    if item.value is None:
        if item.name == "-fa" and line.engine == IK and not line.version.has_undated:
            item.say(
                Status.UNKNOWN,
                "without a value: only older versions accept this, and dyno's tables do not say which",
            )
        elif item.name == "-fa" and line.engine == IK and not line.bench:
            item.say(
                Status.REMOVED,
                "bare -fa is no longer accepted: it takes the next word as its value; write -fa on",
                flag.source,
            )
        else:
            number = ["a number"] if flag.values and flag.form == "int" else []
            told = f": {', '.join([*number, *flag.values])}" if flag.values else ""
            item.say(Status.INVALID, f"it needs a value after it{told}", flag.source)
        return
    parts = item.value.split(",") if line.bench and item.name != "-ot" else [item.value]
    for part in parts:
        if part in flag.also:
            continue
        if flag.values and part not in flag.values and not (flag.form == "int" and _is_int(part)):
            known = ", ".join((*flag.values, *(["a number"] if flag.form == "int" else [])))
            hint = nearest_hint(part, flag.values)
            item.say(Status.INVALID, f"value {part!r} is not one of {known}{hint}", flag.source)
        elif flag.form == "percent" and not (_is_int(part) and 0 <= int(part) <= 100):
            item.say(Status.INVALID, f"value {part!r} is not a number from 0 to 100", flag.source)
        elif flag.form == "int" and part not in flag.values and not _is_int(part):
            if line.bench and line.engine == MAIN and _is_range(part):
                continue
            item.say(Status.INVALID, f"value {part!r} is not a whole number", flag.source)


def _is_range(text: str) -> bool:
    """Whether a text is a range of llama.cpp's llama-bench: `a-b`, `a-b+step` or `a-b*factor`."""
    first, dash, rest = text.partition("-")
    last, step = rest, ""
    for sign in "+*":
        if sign in rest:
            last, _, step = rest.partition(sign)
            return bool(dash) and _is_int(first) and _is_int(last) and _is_int(step)
    return bool(dash) and _is_int(first) and _is_int(last)


def _cuda(item: Item, line: Line) -> None:
    """Check each key=value of a `-cuda`, and add it to the line as a separate item."""
    if any(c.isspace() for c in item.value or ""):
        item.say(Status.INVALID, "spaces between the parameters are not allowed", CUDA_SOURCE)
    at = line.items.index(item)
    for text in (item.value or "").split(","):
        key, equals, value = (p.strip() for p in text.partition("="))
        part = Item("cuda", key, text, value)
        at += 1
        line.items.insert(at, part)
        row = CUDA_KEYS.get(key)
        if row is None:
            part.nearest = nearest(key, CUDA_KEYS) or None
            known = f"{', '.join(CUDA_KEYS)}{nearest_hint(key, CUDA_KEYS)}"
            what = f"unknown parameter, which the program ignores with a warning; known: {known}"
            part.say(Status.INVALID, what, CUDA_SOURCE)
            continue
        kind, default, does = row
        part.say(Status.DOES, f"{does}; default {default}", CUDA_SOURCE)
        if not equals or not _fits(kind, value):
            wanted = {"bool": "0 or 1", "int": "a whole number", "float": "a number from 0 to 3"}[kind]
            what = f"value {value!r} is not {wanted}; the program ignores it with a warning"
            part.say(Status.INVALID, what, CUDA_SOURCE)


def _fits(kind: str, value: str) -> bool:
    if kind == "bool":
        return value in ("0", "1")
    if kind == "int":
        return _is_int(value)
    try:
        return 0 <= float(value) <= 3
    except ValueError:
        return False


def _other(engine: str) -> str:
    return MAIN if engine == IK else IK
