"""`tune doctor`: the effect of each token of a llama.cpp or ik_llama.cpp command line, without running it.

    words ─ parse ─> Line of Items ─ diagnose, rules ─> Notes on them ─ render ─> table or JSON
                     flags, switches, op_ids, versions: data ──┘

The tables describe llama.cpp at 0c1e57098 and ik_llama.cpp at 8337e4cd3 (2026-08-15), from their source code.
If the tables have no entry, the answer is `unknown`, and never a guess.
"""

from __future__ import annotations

from .diagnose import diagnose
from .line import Facts, Line

__all__ = ["Facts", "Line", "diagnose"]
