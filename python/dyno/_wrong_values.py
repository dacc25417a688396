"""Plain error messages for values that a schema refuses, instead of the texts of pydantic."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

__all__ = ["has_plain_words", "not_given", "plain_words"]

_WORDS = {
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "must be a whole number"),
    "int_parsing_size": "must be a smaller whole number",
    **dict.fromkeys(("float_type", "float_parsing"), "must be a number"),
    "finite_number": "must be a finite number",
    **dict.fromkeys(("bool_type", "bool_parsing"), "must be true or false"),
    "string_type": "must be a string",
    **dict.fromkeys(("list_type", "tuple_type"), "must be a list"),
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), "must be {map}"),
    "literal_error": "must be {expected}",
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "too_short": "must have at least {min_length} item{s}",
    "too_long": "must have at most {max_length} item{s}",
    "string_too_short": "must have at least {min_length} character{s}",
    "string_too_long": "must have at most {max_length} character{s}",
    "string_pattern_mismatch": "must match the pattern {pattern}",
    "missing": "is required",
}
"""By the kind of a validation error: the words that follow the name of the field."""


def has_plain_words(error: ErrorDetails) -> bool:
    """Whether the kind of an error is one of pydantic's that have plain words, which never name the value."""
    return error["type"] in _WORDS


def plain_words(error: ErrorDetails, *, mapping: str = "an object") -> str:
    """The message for one error. If the message is our own, the prefix that pydantic adds is removed.

    Args:
        error: The error, with its context.
        mapping: The name of a map in the format that was read.
    """
    if (words := _WORDS.get(error["type"])) is not None:
        limits = error.get("ctx", {}).items()
        context = {name: f"{value:g}" if isinstance(value, float) else value for name, value in limits}
        one = 1 in (context.get("min_length"), context.get("max_length"))
        return words.format(**context, s="" if one else "s", map=mapping)
    return error["msg"].removeprefix("Value error, ")


def not_given(error: ErrorDetails, *, mapping: str = "an object") -> str:
    """The end of a message, which shows the wrong value, or only its type if it may be large."""
    given, kind = error["input"], error["type"]
    if kind == "missing":
        return ""
    if isinstance(given, (dict, list, tuple)):
        name = "a list" if isinstance(given, (list, tuple)) else mapping
        return f", not {name}" if kind.endswith("_type") else ""
    if given is None or isinstance(given, bool):
        return f", not {_PLAIN[given]}"
    return f", not {given[:80] if isinstance(given, str) else given!r:.80}"


_PLAIN = {None: "null", True: "true", False: "false"}
"""As JSON and YAML write them."""
