"""Building blocks of the profile models: the strict base class and shared field types."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from dyno.settings import suggestion


def problem(message: str, location: tuple[str | int, ...], value: object) -> InitErrorDetails:
    """One line of a `ValidationError`, with our message, at a location inside the model that raises it."""
    # Without escaping, pydantic would read braces as fields of a message template.
    return InitErrorDetails(
        type=PydanticCustomError("profile", "{message}", {"message": message}), loc=location, input=value
    )


class StrictModel(BaseModel):
    """The base class of all profile models: immutable, without conversions, only finite numbers. An unknown
    key is an error that names the most similar valid key."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        populate_by_name=True,
        allow_inf_nan=False,
        hide_input_in_errors=True,
        protected_namespaces=(),
    )

    @classmethod
    def keys(cls) -> list[str]:
        """The keys of this map in a file, in order."""
        return [field.alias or name for name, field in cls.model_fields.items()]

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, data: Any) -> Any:
        if not isinstance(data, dict) or cls.model_config.get("extra") == "allow":
            return data
        known = cls.keys()
        unknown = [key for key in data if key not in known and key not in cls.model_fields]
        if unknown:
            raise ValidationError.from_exception_data(
                cls.__name__,
                [problem(unknown_key(str(key), known), (str(key),), data[key]) for key in unknown],
            )
        return data


MAX_NAME = 200
MAX_TEXT = 2000
MAX_COMMAND = 32_000
"""Maximum length of a command line, which may have dozens of placement rules."""


def unknown_key(key: str, known: list[str]) -> str:
    """The message for an unknown key of a map."""
    return f"unknown key; {suggestion(key, known)}"


def _is_printable(value: str) -> str:
    """Refuse control characters, because labels and notes are printed on terminals."""
    if not value.isprintable():
        raise PydanticCustomError("profile", "holds characters that cannot be printed")
    return value


def clean_text(text: str, limit: int = MAX_NAME) -> str:
    """Foreign text (the name of a model or device, a command) in a form that is valid as a label or note.

    Characters that cannot be printed become blanks, several blanks become one, and longer text is cut.
    """
    plain = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return plain if len(plain) <= limit else plain[: limit - 3] + "..."


def _as_interval(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _as_text(value: Any) -> Any:
    """Restore the text of an unquoted version, which YAML reads as a number."""
    if isinstance(value, float) and math.isfinite(value):
        return getattr(value, "text", repr(value))
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return value


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, int) and not isinstance(value, bool) else value


Ratio = Annotated[float, Field(gt=0, le=1e6)]
Interval = Annotated[tuple[Ratio, Ratio], BeforeValidator(_as_interval)]
Positive = Annotated[float, Field(gt=0, le=1e15)]
NonNegative = Annotated[float, Field(ge=0, le=1e15)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=0, le=2**53)]
PositiveCount = Annotated[int, Field(ge=1, le=2**53)]
_TEXT_SCHEMA = {"type": ["string", "number"]}  # an unquoted version is read as text
Text = Annotated[
    str,
    BeforeValidator(_as_text),
    Field(max_length=MAX_TEXT),
    AfterValidator(_is_printable),
    WithJsonSchema(_TEXT_SCHEMA),
]
Command = Annotated[
    str,
    BeforeValidator(_as_text),
    Field(max_length=MAX_COMMAND),
    AfterValidator(_is_printable),
    WithJsonSchema(_TEXT_SCHEMA),
]
Name = Annotated[
    str,
    BeforeValidator(_as_text),
    Field(min_length=1, max_length=MAX_NAME),
    AfterValidator(_is_printable),
    WithJsonSchema(_TEXT_SCHEMA),
]
GroupName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
_COUNT_SCHEMA = {"type": "integer", "minimum": 0}
Counts = Annotated[
    list[Count],
    BeforeValidator(_as_list),
    Field(max_length=64),
    WithJsonSchema({"anyOf": [_COUNT_SCHEMA, {"type": "array", "items": _COUNT_SCHEMA}]}),
]

_TOKEN_RANGE = re.compile(r"m([1-9][0-9]{0,9})(?:-([1-9][0-9]{0,9})|(\+))?")
LAST_TOKENS = 1 << 31
"""Upper end of the last bucket of token counts."""


def parse_tokens(text: str) -> tuple[int, int]:
    """Parse a range of token counts: `m1` is (1, 1), `m2-8` is (2, 8), and `m513+` is all counts from 513.

    Ranges consist of whole buckets, as in csrc/ops/tokens.cpp: 1, 2-4, 5-8, 9-16, 17-32, ...

    Raises:
        ValueError: `text` is not such a range.
    """
    found = _TOKEN_RANGE.fullmatch(text)
    if found is None:
        raise ValueError(f"{text[:60]!r} is not a range of tokens; write 'm1', 'm2-8' or 'm513+'")
    low = int(found[1])
    high = LAST_TOKENS if found[3] else int(found[2] or low)
    if high < low:
        raise ValueError(f"{text!r} is an empty range of tokens")
    if (low > 2 and not _is_power_of_two(low - 1)) or low == 3:
        raise ValueError(f"{text!r} starts inside a bucket; ranges start at 1, 2, 5, 9, 17, ...")
    if high == 2 or not _is_power_of_two(high):
        raise ValueError(f"{text!r} ends inside a bucket; ranges end at 1, 4, 8, 16, 32, ...")
    if high > LAST_TOKENS:
        raise ValueError(f"{text!r} ends beyond {LAST_TOKENS}; write 'm{low}+'")
    return low, high


def _is_power_of_two(value: int) -> bool:
    return value & (value - 1) == 0


def plain_value(value: Any) -> Any:
    """Refuse values of other types, with one message for the whole union of plain types."""
    items = value if isinstance(value, list | tuple) else [value]
    if not all(isinstance(item, bool | int | str) for item in items):
        raise PydanticCustomError("profile", "must be true or false, a whole number, text or a list of text")
    return value


def setting_value(value: Any) -> Any:
    """As `plain_value`, but also with fractions. The row of the setting in the table decides further."""
    if isinstance(value, float):
        if not math.isfinite(value):
            raise PydanticCustomError("profile", "must be a finite number")
        return float(value)
    items = value if isinstance(value, list | tuple) else [value]
    if not all(isinstance(item, bool | int | str) for item in items):
        raise PydanticCustomError("profile", "must be true or false, a number, text or a list of text")
    return value


def interval_problem(ratio: float | None, ci95: tuple[float, float] | None) -> str | None:
    """The reason why an interval cannot belong to a ratio; None if it can."""
    if ci95 is None:
        return None
    if ci95[0] > ci95[1]:
        return f"ci95 [{ci95[0]}, {ci95[1]}] is upside down"
    if ratio is not None and not ci95[0] <= ratio <= ci95[1]:
        return f"ratio {ratio} lies outside its ci95 [{ci95[0]}, {ci95[1]}]"
    return None
