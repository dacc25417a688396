from __future__ import annotations

import xml.etree.ElementTree as ET
from typing import TYPE_CHECKING, Any

import pytest
from dyno import profiles
from dyno_tuner.inline import InlineExecutor
from dyno_tuner.ledger import Ledger
from dyno_tuner.pareto import TOO_SHORT, Variant, front, plot, trade_memory, worthwhile
from dyno_tuner.session import Request, run
from dyno_tuner.stats import Estimate
from dyno_tuner.target import Workload
from dyno_tuner.targets.simulated import SimulatedTarget
from dyno_tuner.tune import Options, Tune

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20


def test_the_front_is_what_nothing_beats_in_both() -> None:
    found = [((0,), 0.0, 500), ((1,), 0.1, 400), ((2,), -0.2, 100), ((3,), -0.3, 200), ((4,), 0.5, 900)]
    assert front(found, 900) == [(1,), (2,)]
    assert front(found, 100) == []
    many = [((i,), 0.01 * i, 100 + i) for i in range(9)]
    assert front(many, 1000) == [(8,), (4,), (0,)]


def _variant(name: str, ratio: float, size: int) -> Variant:
    estimate = Estimate(ratio, ratio - 0.01, ratio + 0.01, 8)
    return Variant(name, (0,), {}, size, estimate, {}, {})


def test_more_memory_has_to_be_faster_by_the_margin() -> None:
    every = [_variant("fastest", 1.5, 900), _variant("default", 1.0, 500), _variant("small", 1.495, 300)]
    assert [v.name for v in worthwhile(every, 0.02)] == ["small"]
    every[2] = _variant("small", 0.9, 300)
    assert [v.name for v in worthwhile(every, 0.02)] == ["fastest", "default", "small"]


@pytest.mark.parametrize("count", [1, 3])
def test_the_plot_is_a_picture_of_all(count: int) -> None:
    every = [_variant(f"<{i}>", 1 + i / 10, (100 + i) * MIB) for i in range(count)]
    root = ET.fromstring(plot(every, "a & b"))
    assert len(root.findall("{http://www.w3.org/2000/svg}circle")) == count


class _Planned(SimulatedTarget):
    def memory(self, settings: Any) -> int:
        return 100 * MIB + int(settings["ubatch"]) * MIB


def test_an_interrupt_in_the_middle_writes_what_the_tune_has_proven(tmp_path: Path) -> None:
    class Stopped(InlineExecutor):
        def visit(self, *args: Any) -> Any:
            if args[4].key.startswith("pareto/"):
                raise KeyboardInterrupt
            return super().visit(*args)

    target = _Planned("saturating", 1)
    options = Options(Workload(pp=64, tg=8), seed=1, max_trials=28, pareto=True)
    request = Request("simulated", options, out=tmp_path / "p.yaml", quiet=True)
    stopped = run(request, Stopped(target), target.surface.space())
    assert stopped.outcome.status == "interrupted"
    assert stopped.outcome.entries
    written = profiles.load_profile(tmp_path / "p.yaml")
    request.resume = True
    resumed = run(request, InlineExecutor(target), target.surface.space())
    assert resumed.outcome.status == "complete"
    assert resumed.pareto is not None
    assert resumed.profile.settings == written.settings


def test_no_time_is_not_taken_for_nothing_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default is the fastest, and what needs less memory was met but cannot be confirmed in time."""
    target = _Planned("null", 1)
    space = target.surface.space()
    options = Options(Workload(pp=64, tg=8), seed=1, max_trials=12)
    tune = Tune(Ledger(InlineExecutor(target), options.workload, virtual_time=True), space, options)
    tune.run()
    assert tune.winner == space.default
    monkeypatch.setattr(tune.schedule, "more_seconds", lambda seconds: False)
    small = {**space.settings(space.default)}
    assert trade_memory(tune, lambda s: 100 if dict(s) == small else 50) == ([], TOO_SHORT)
    assert trade_memory(tune, lambda s: 100)[1].startswith("the default is the fastest")


def test_profiles_of_speed_and_memory(tmp_path: Path) -> None:
    """More u-batch is faster and larger: every profile is on the front, and their truth is in that order."""
    target = _Planned("saturating", 1)
    options = Options(Workload(pp=64, tg=8), seed=1, max_trials=28, pareto=True)
    request = Request("simulated", options, out=tmp_path / "p.yaml", quiet=True)
    result = run(request, InlineExecutor(target), target.surface.space())
    assert result.pareto is not None
    names = sorted(p.name for p in result.pareto.iterdir())
    assert "pareto.svg" in names
    assert "fastest.yaml" in names
    found = [profiles.load_profile(result.pareto / n) for n in names if n.endswith(".yaml")]
    assert len(found) >= 2
    defaults = {k.name: k.default for k in target.knobs()}

    def settings(profile: profiles.Profile) -> dict[str, Any]:
        return defaults | {
            n: e.value for n, e in profile.settings.items() if isinstance(e, profiles.SettingEntry)
        }

    points = sorted((target.memory(s), target.surface.truth(s)) for s in map(settings, found))
    assert [t for _, t in points] == sorted(t for _, t in points)
