"""The difference between a configuration's answers and the engine's most exact ones, measured with
llama-perplexity."""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING

from ...core.errors import TargetFailure
from ...core.intervals import keyed_rng
from ...core.protocol import Quality, TrialStatus
from ..check_text import TEXT

if TYPE_CHECKING:
    from pathlib import Path

CONTEXT = 512
CHUNKS = 8  # half of each is scored: 8 × 255 = 2,040 tokens
_NUMBER = r"(-?[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|-?nan|-?inf)"
_LINES = {
    "mean_kld": rf"^Mean\s+KLD\s*:\s*{_NUMBER}",
    "max_kld": rf"^Maximum\s+KLD\s*:\s*{_NUMBER}",
    "top1": rf"^Same\s+top\s+p\s*:\s*{_NUMBER}",
}
_STATISTIC = re.compile(
    r"^(?:Mean|Maximum|Minimum|Median|RMS|Same|Cor|[0-9.]+%)\s*.*:\s*-?[0-9n].*$", re.MULTILINE
)


def write_text(path: Path, user_text: str | None) -> None:
    """Write the user's text, or the built-in paragraphs with their words in a new order each time, so that
    earlier text does not predict later text."""
    if user_text is not None:
        path.write_text(user_text, encoding="utf-8")
        return
    words, parts = TEXT.split(), [TEXT]
    for number in range(max(1, 8 * CONTEXT * CHUNKS // len(TEXT))):
        order = keyed_rng("kld text", number).permutation(len(words))
        parts.append(" ".join(words[i] for i in order))
    path.write_text("\n\n".join(parts), encoding="utf-8")


def complete(text: str) -> bool:
    """Whether the closing statistics are complete."""
    return re.search(_LINES["top1"], text, re.MULTILINE | re.IGNORECASE) is not None


def parse_kld(text: str, seconds: float) -> Quality:
    """Parse the closing statistics of a run with a comparison by their labels.

    Raises:
        TargetFailure: a statistic is missing.
    """
    found: dict[str, float] = {}
    for name, pattern in _LINES.items():
        match = re.search(pattern, text, re.MULTILINE | re.IGNORECASE)
        if match is None:
            raise TargetFailure(TrialStatus.CRASH, f"llama-perplexity printed no line for {name}")
        found[name] = float(match[1])
    # The figures are printed with six digits, so "equal" means equal to six digits.
    printed = "\n".join(" ".join(line.split()) for line in _STATISTIC.findall(text))
    digest = hashlib.sha256(printed.encode()).hexdigest()[:32]
    # The reference is stored rounded, so the mean for equal answers can be slightly negative. NaN stays NaN,
    # and the comparison refuses it.
    mean = 0.0 if found["mean_kld"] < 0 else found["mean_kld"]
    return Quality(
        TrialStatus.OK, mean,
        found["max_kld"], found["top1"] / 100, CHUNKS * (CONTEXT // 2 - 1), digest, "", seconds,
    )  # fmt: skip
