"""`tune report`: a journal as one HTML page that needs nothing else, neither network nor hardware."""

from __future__ import annotations

from .page import write_report

__all__ = ["write_report"]
