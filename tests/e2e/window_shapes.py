"""Models whose layers have a sliding window, and rows that their cache keeps besides it."""

from __future__ import annotations

from dataclasses import replace

from random_models import SHAPES

SLACK, STEP = 256, 256
"""Rows before the window that stay, and in what steps rows go."""
GPT_OSS = next(shape for shape in SHAPES if shape.architecture == "gpt-oss" and shape.n_layers == 3)
WIDE = replace(GPT_OSS, heads=8, kv_heads=8, head_dim=64, window=128)
