"""Many texts of the trained model with default numerics, judged by the logits of exact ones."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from dyno import Engine, Sampling, Scheduler
from dyno._requests import Handling
from dyno.scheduler import Speculation
from test_speculation import Always

if TYPE_CHECKING:
    from pathlib import Path

SEQUENCES = 12
TEXTS = 30
SETTINGS: dict[str, Any] = {"profile": None, "ctx": 256, "sequences": SEQUENCES}


def prompts_of(engine: Engine, text: Path) -> list[list[int]]:
    """Two beginnings of 60 tokens, each followed by 3 to 80 tokens of another place."""
    tokens = engine.tokenize(text.read_text(encoding="utf-8"))
    starts = np.random.default_rng(1).integers(0, len(tokens) - 200, TEXTS)
    return [
        [*tokens[600 * (i % 2) :][:60], *tokens[start:][: 3 + 77 * i // TEXTS]]
        for i, start in enumerate(starts)
    ]


def behind_the_best(exact: Engine, prompt: list[int], drawn: list[int]) -> list[float]:
    """How far the exact logit of each drawn token is below the largest one of its place."""
    rows = exact.logits([*prompt, *drawn])[len(prompt) - 1 : -1]
    return [float(row.max() - row[token]) for row, token in zip(rows, drawn, strict=True)]


@pytest.mark.parametrize(
    ("kv_type", "speculation"),
    [("f16", None), ("q8_0", Speculation(most=4, min_p=0.0))],
    ids=["f16", "q8_0 and drafts"],
)
def test_tokens_are_best_ones(
    trained_model: Path, eval_text: Path, device: str, kv_type: str, speculation: Speculation | None
) -> None:
    kv = {"kv_type_k": kv_type, "kv_type_v": kv_type}
    with (
        Engine(trained_model, device=device, **SETTINGS, **kv) as engine,
        Engine(trained_model, device=device, **{**SETTINGS, "sequences": 1}, numerics="exact") as exact,
    ):
        prompts = prompts_of(engine, eval_text)

        def text(i: int) -> list[int]:
            # Texts end one after the other, so that steps have all numbers of texts.
            drawn = scheduler.drawn(prompts[i], Sampling(), 10 + i, handling=Handling(ignore_end=True))
            return [each.token for each in drawn]

        with (
            Scheduler(engine, speculation=speculation, step_tokens=100) as scheduler,
            ThreadPoolExecutor(TEXTS) as pool,
        ):
            if scheduler._drafting is not None:
                scheduler._drafting.judge = Always()
            texts = list(pool.map(text, range(TEXTS)))
            assert scheduler.totals()["copied_tokens"] > 0
            assert speculation is None or scheduler.drafts.accepted > 20
        captures = engine.diagnostics.captures()
        gaps, others = (
            np.array(
                [gap for p, t in zip(prompts, drawn, strict=True) for gap in behind_the_best(exact, p, t)]
            )
            for drawn in (texts, [*texts[1:], texts[0]])
        )
    assert gaps.max() < 0.5
    assert np.mean(gaps > 0) < (0.02 if device == "cpu" else 0.04)  # about 0.012 on a CPU
    assert np.mean(others > 0) > 0.3  # the texts of other prompts
    if device == "cpu":
        assert captures == []
        return
    assert [work for work in captures if work["failures"]] == []
    if speculation is None:
        captured = {work["sequences"] for work in captures if work["captured"]}
        assert len(captured) > 5
        assert SEQUENCES in captured
