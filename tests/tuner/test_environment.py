from __future__ import annotations

import os
from typing import TYPE_CHECKING

from dyno_tuner.environment import busy, environment

if TYPE_CHECKING:
    import pytest


def test_what_the_kernel_tells_is_plain_text() -> None:
    found = environment()
    assert len(found["load"]) == 3
    assert all(isinstance(v, str) for k, v in found.items() if k != "load")


def test_a_busy_machine_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (7.25, 1.0, 1.0))
    assert "load 7.2 on 2 cores" in busy(2)
    assert busy(64) == ""
