"""The declaration of the simulated engine: its surface has the knobs, so a session is given a space."""

from __future__ import annotations

from ..declaration import Declaration


def declaration(engine: str) -> Declaration:
    return Declaration(engine)
