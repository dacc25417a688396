"""The YAML subset of profiles: plain data with line numbers, and nothing that a hostile file could exploit.

The subset is the core schema of YAML 1.2: maps, lists, text, decimal numbers, booleans and null. Tags,
anchors, aliases and duplicate keys are errors. Nesting and size are limited. `on` and `2026-11-20` are text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import yaml

MAX_BYTES = 1 << 20
MAX_DEPTH = 24
MAX_NODES = 50_000

Path = tuple[str, ...]
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # same events, but ten times as fast

_NULL = re.compile(r"~|null|Null|NULL|")
_BOOL = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INT = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_SPECIAL = re.compile(r"([-+]?)\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
MAX_NUMBER_LENGTH = 40


class YamlProblem(ValueError):
    """An error in a text that is not YAML of this subset."""

    def __init__(self, message: str, line: int | None) -> None:
        super().__init__(message)
        self.message = message
        self.line = line


class FloatWithText(float):
    """A float that keeps its original text, because an unquoted version `13.10` is not 13.1."""

    text: str

    def __new__(cls, text: str) -> FloatWithText:
        value = super().__new__(cls, text)
        value.text = text
        return value


@dataclass
class _Frame:
    """A map or list during parsing."""

    value: dict[str, Any] | list[Any]
    path: Path
    key: str | None = None


def resolve(text: str) -> Any:
    """The value of a plain (unquoted) scalar."""
    if _NULL.fullmatch(text):
        return None
    if text in _BOOL:
        return _BOOL[text]
    if len(text) <= MAX_NUMBER_LENGTH:
        if _INT.fullmatch(text):
            return int(text)
        if _FLOAT.fullmatch(text):
            return FloatWithText(text)
        special = _SPECIAL.fullmatch(text)
        if special:
            return float("nan") if special[3] else float(f"{special[1]}inf")
    elif _FLOAT.fullmatch(text):
        raise ValueError(f"number of {len(text)} digits")
    return text


def parse(text: str) -> tuple[Any, dict[Path, int]]:
    """Parse one document.

    Returns:
        The plain value, and the line (from 1) of each key by its path. Items of lists have the keys "0", "1",
        ...

    Raises:
        YamlProblem: The text is not YAML, or not in the subset. The error has the line, if it is known.
    """
    try:
        return _parse(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else None
        problem = error.problem or error.context or "cannot be read"
        if "nesting depth" in problem:  # libyaml reads ahead, and newer versions have a limit of 1,000
            raise YamlProblem(f"nested more than {MAX_DEPTH} deep", line) from error
        raise YamlProblem(f"not valid YAML: {problem}", line) from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1 if isinstance(error.position, int) else None
        raise YamlProblem(f"not valid YAML: {error.reason}", line) from error
    except yaml.YAMLError as error:
        raise YamlProblem(f"not valid YAML: {' '.join(str(error).split())}", None) from error


def _parse(text: str) -> tuple[Any, dict[Path, int]]:
    lines: dict[Path, int] = {}
    stack: list[_Frame] = []
    documents = nodes = 0
    root: Any = None

    def attach(value: Any, line: int) -> Path:
        """Add a value to the current map or list, and return its path."""
        nonlocal root
        if not stack:
            root = value
            return ()
        top = stack[-1]
        if isinstance(top.value, list):
            top.value.append(value)
            path = (*top.path, str(len(top.value) - 1))
            lines[path] = line
        else:
            assert top.key is not None  # the caller has already read the key
            top.value[top.key] = value
            path = (*top.path, top.key)
            top.key = None
        return path

    for event in yaml.parse(text, Loader=_LOADER):
        line = event.start_mark.line + 1 if event.start_mark else 0
        nodes += 1
        if nodes > MAX_NODES:
            raise YamlProblem(f"more than {MAX_NODES} items", line)
        if isinstance(event, yaml.DocumentStartEvent):
            documents += 1
            if documents > 1:
                raise YamlProblem("more than one document", line)
        elif isinstance(event, yaml.AliasEvent):
            raise YamlProblem(f"aliases (*{event.anchor}) are not allowed; write the value out", line)
        elif isinstance(event, yaml.ScalarEvent | yaml.CollectionStartEvent):
            if event.anchor is not None:
                raise YamlProblem(f"anchors (&{event.anchor}) are not allowed", line)
            if event.tag is not None:
                raise YamlProblem(f"tags ({event.tag}) are not allowed", line)
            wants_key = bool(stack) and isinstance(stack[-1].value, dict) and stack[-1].key is None
            if isinstance(event, yaml.ScalarEvent):
                if wants_key:
                    _read_key(stack[-1], event.value, line, lines)
                    continue
                try:
                    value = resolve(event.value) if event.implicit[0] else event.value
                except ValueError as error:
                    raise YamlProblem(str(error), line) from error
                attach(value, line)
            else:
                if wants_key:
                    raise YamlProblem("a key must be text, not a map or list", line)
                if len(stack) >= MAX_DEPTH:
                    raise YamlProblem(f"nested more than {MAX_DEPTH} deep", line)
                container: dict[str, Any] | list[Any] = (
                    {} if isinstance(event, yaml.MappingStartEvent) else []
                )
                stack.append(_Frame(container, attach(container, line)))
        elif isinstance(event, yaml.MappingEndEvent | yaml.SequenceEndEvent):
            stack.pop()
    if documents == 0:
        raise YamlProblem("empty", None)
    return root, lines


def _read_key(frame: _Frame, key: str, line: int, lines: dict[Path, int]) -> None:
    path = (*frame.path, key)
    if key in frame.value:
        shown = key if len(key) <= 60 else key[:57] + "..."
        raise YamlProblem(f"duplicate key {shown!r}; first on line {lines[path]}", line)
    lines[path] = line
    frame.key = key


# ---- Writing ----

_PLAIN = re.compile(r"[A-Za-z0-9_./+-](?:[A-Za-z0-9_./+@=·-]| (?! |#))*")
# YAML 1.1 parsers, which most tools use, do not read these words as text.
_OTHER_IN_YAML_1_1 = re.compile(
    r"(?i:yes|no|on|off|true|false|null|~|<<|=|-|\.{1,3}|---.*|[-+]?[0-9][0-9_]*(\.[0-9_]*)?(e[-+]?[0-9]+)?"
    r"|[-+]?\.[0-9_]+|0[xob][0-9a-f_]+|[-+]?\.(inf|nan)|[-+.].*)"
)


def scalar(value: Any, *, as_key: bool = False) -> str:
    """A scalar in a form that all YAML parsers read as the same value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(int(value))
    if isinstance(value, float):
        if value.is_integer() and abs(value) < 1e15:
            return str(int(value))
        text = repr(float(value))
        # YAML 1.1 requires a point in a float, so 1e-05 would be text.
        return text.replace("e", ".0e") if "e" in text and "." not in text else text
    if not isinstance(value, str):
        raise TypeError(f"not a scalar: {value!r}")
    is_plain = _PLAIN.fullmatch(value) and not value.endswith(" ") and not _OTHER_IN_YAML_1_1.fullmatch(value)
    # A blank inside a key is valid YAML, but hard to read. So op keys are quoted.
    if is_plain and not (as_key and " " in value):
        return value
    return yaml.safe_dump(value, default_style='"', width=1 << 30, allow_unicode=True).rstrip("\n")


def flow(value: Any) -> str:
    """A value on one line: {a: 1, b: [2, 3]}."""
    if isinstance(value, dict):
        return (
            "{" + ", ".join(f"{scalar(key, as_key=True)}: {flow(item)}" for key, item in value.items()) + "}"
        )
    if isinstance(value, list | tuple):
        return "[" + ", ".join(flow(item) for item in value) + "]"
    return scalar(value)
