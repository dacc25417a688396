"""`tune build`: builds as a searched dimension, each switch measured against the default build.

switches ─ what can be turned, and why it cannot help here ─┐
content ── key of sources, switches and compilers ──────────┤
builder ── pip or CMake into the cache, memory guarded ─────┤─> run ─> decide ─> render: table, JSON, page
sections ─ two builds with the same code are one ───────────┤
measure ── ABBA rounds of `tune ab`, answers, loading ──────┘
"""

from __future__ import annotations
