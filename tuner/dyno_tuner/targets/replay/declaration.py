"""The declaration of a recorded sweep. The records define the search space of a session."""

from __future__ import annotations

from ..declaration import Declaration


def declaration(engine: str) -> Declaration:
    return Declaration(engine)
