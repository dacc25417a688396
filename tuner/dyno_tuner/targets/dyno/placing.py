"""Where the weights of a configuration lie: the part of a plan that no single setting says."""

from __future__ import annotations

from typing import Any

from dyno.settings import SETTINGS


def one_word(value: Any) -> Any:
    """Rules as the search holds them: `a=cpu,b=cuda:1`."""
    return ",".join(value) if isinstance(value, list) else value


def as_list(name: str, value: Any) -> Any:
    """Rules as the engine takes them; other values stay as they are."""
    if SETTINGS[name].type != "rules" or not isinstance(value, str):
        return value
    return [rule for rule in value.split(",") if rule]
