"""The declaration of the simulated engine. Its surface defines the search space of a session."""

from __future__ import annotations

from ..declaration import Declaration


def declaration(engine: str) -> Declaration:
    return Declaration(engine)
