"""`tune report`: a journal as a self-contained HTML page, which needs neither network nor hardware."""

from __future__ import annotations

from .page import check_plotly, write_report

__all__ = ["check_plotly", "write_report"]
