"""The table of settings and the engine allow the same numbers; planned, not run."""

from __future__ import annotations

from pathlib import Path

import pytest
from dyno import _core
from dyno.errors import DynoError
from dyno.settings import SETTINGS

TINY = Path(__file__).resolve().parent.parent / "data" / "tiny"


def plan_for(name: str, value: int) -> _core.Session:
    context, session = {"ctx": 64}, {"cuda_graphs": False}
    (context if SETTINGS[name].kind == "context" else session)[name] = value
    return _core.Session(TINY / "llama-tiny.gguf", context=context, session=session, plan_only=True)


@pytest.mark.parametrize("name", ["sequences", "ubatch", "threads", "threads_batch"])
def test_the_largest_number_of_the_table_is_the_engines(name: str) -> None:
    largest = SETTINGS[name].maximum
    plan_for(name, largest)
    with pytest.raises(DynoError, match=f"{name} is {largest + 1}; expected"):
        plan_for(name, largest + 1)
