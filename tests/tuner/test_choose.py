"""What is proven when the budget is small: the settings before kernels."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from dyno_tuner import choose

if TYPE_CHECKING:
    from collections.abc import Sequence

POINT = (1,)


class _Judge:
    """Of one knob, with room for so many visits before kernels begin and before the tune ends."""

    def __init__(self, before_kernels: int, before_the_end: int) -> None:
        self._room = {"confirm": 0, "leave_one_out": before_kernels, "kernels": before_the_end}
        self.stages: list[str] = []
        self.rounds = SimpleNamespace(affordable=lambda visits: visits <= self._room[self.stages[-1]])
        self.space = SimpleNamespace(
            entries=lambda point: [0],
            code_class=lambda point: point,
            settings=lambda point: {},
            without=lambda point, knob: (0,),
            legal=lambda point: True,
        )

    def until(self, stage: str) -> None:
        self.stages.append(stage)

    def affordable(self, stage: str, visits: int) -> bool:
        self.until(stage)
        return bool(self.rounds.affordable(visits))

    def proof_visits(self, entries: int, rounds: int = 2) -> int:
        return rounds * 4

    def history(self, trials: Sequence[Any]) -> list[Any]:
        return []

    def note(self, kind: str, **data: Any) -> None:
        """Nobody reads it."""

    def admit(self, point: Any) -> None:
        """Every point may be taken."""


@pytest.mark.parametrize(
    ("before_kernels", "before_the_end", "proven_until"),
    [(8, 100, "leave_one_out"), (7, 100, "kernels"), (7, 8, "kernels"), (7, 7, None)],
)
def test_where_no_entry_fits_before_kernels_its_proof_takes_their_time(
    before_kernels: int, before_the_end: int, proven_until: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge = _Judge(before_kernels, before_the_end)
    proven: list[str] = []

    class Proof:
        cut = True

        def __init__(self, judge: _Judge, last: str) -> None:
            assert last == "kernels"
            self._judge = judge

        def run(self, point: Any, choice: Any) -> bool:
            assert point == POINT
            proven.append(self._judge.stages[-1])
            return False

    monkeypatch.setattr(choose, "Proof", Proof)
    monkeypatch.setattr(choose.Chooser, "pick", lambda self, trials: [POINT])
    chooser = choose.Chooser(judge, lambda points: [])  # type: ignore[arg-type]
    chooser.run([], SimpleNamespace(entries=[]))  # type: ignore[arg-type]
    assert proven == ([] if proven_until is None else [proven_until])
    assert chooser.unproven
