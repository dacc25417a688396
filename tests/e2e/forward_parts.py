"""The functions of `forward.py` on rows, in float64."""

from __future__ import annotations

from typing import Any

import numpy as np

Rows = np.ndarray[Any, np.dtype[np.float64]]


def sigmoid(x: Rows) -> Rows:
    return 0.5 * (1 + np.tanh(0.5 * x))  # which no large number overflows


def silu(x: Rows) -> Rows:
    return x * sigmoid(x)


def gelu(x: Rows) -> Rows:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def relu2(x: Rows) -> Rows:
    return np.maximum(x, 0) ** 2


def softmax(x: Rows) -> Rows:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def rms(x: Rows, weight: Rows | float, eps: float) -> Rows:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def l2(x: Rows, eps: float) -> Rows:
    return x / np.sqrt((x**2).sum(-1, keepdims=True) + eps)
