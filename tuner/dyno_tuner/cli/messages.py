"""Messages that the command can print before its modules are loaded."""

from __future__ import annotations

EARLY = "tune: interrupted before anything was measured"
