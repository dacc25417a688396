"""`tune doctor`: what every token of a llama.cpp or ik_llama.cpp command line does, without running it.

    words ─ parse ─> Line of Items ─ diagnose, rules ─> Notes on them ─ render ─> table or JSON
                     flags, switches, op_ids, versions: data ──┘

The tables describe llama.cpp at 0c1e57098 and ik_llama.cpp at 8337e4cd3 (2026-08-15), read from their source.
Where they do not say, the answer is `unknown`, never a guess.
"""

from __future__ import annotations

from .diagnose import diagnose
from .line import Facts, Line

__all__ = ["Facts", "Line", "diagnose"]
