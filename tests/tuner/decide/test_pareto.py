from __future__ import annotations

import dataclasses
import math
import xml.etree.ElementTree as ET
from typing import TYPE_CHECKING, Any

import pytest
from dyno import profiles
from dyno_tuner.core.errors import DisturbedError
from dyno_tuner.core.intervals import Estimate
from dyno_tuner.core.protocol import Workload
from dyno_tuner.decide.pareto import TOO_SHORT, Sizes, Variant, front, named, plot, trade_memory, worthwhile
from dyno_tuner.execution.inline_executor import InlineExecutor
from dyno_tuner.record.recorder import Recorder
from dyno_tuner.run.session import Request, run
from dyno_tuner.run.tune import Options, Tune
from dyno_tuner.space.knobs import Fidelity, Knob
from dyno_tuner.space.search_space import Space
from dyno_tuner.targets.simulated.surfaces import Surface, saturating
from dyno_tuner.targets.simulated.target import SimulatedTarget

if TYPE_CHECKING:
    from pathlib import Path

    from dyno_tuner.core.protocol import Settings

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
    def as_good(one: Variant, other: Variant) -> bool:
        return one.overall.ratio * 1.02 >= other.overall.ratio

    every = [_variant("fastest", 1.5, 900), _variant("default", 1.0, 500), _variant("small", 1.495, 300)]
    assert [v.name for v in worthwhile(every, as_good)] == ["small"]
    every[2] = _variant("small", 0.9, 300)
    assert [v.name for v in worthwhile(every, as_good)] == ["fastest", "default", "small"]


def test_only_the_best_is_called_the_fastest() -> None:
    large, default, small = (
        _variant("memory2", 2.0, 900), _variant("default", 1.0, 500), _variant("memory1 plain", 0.9, 300)
    )  # fmt: skip
    assert [v.name for v in named([large, default, small], default)] == ["memory1", "default", "memory2"]
    assert [v.name for v in named([large, default, small], small)] == ["memory1", "default", "fastest"]


@pytest.mark.parametrize("count", [1, 3])
def test_the_plot_is_a_picture_of_all(count: int) -> None:
    every = [_variant(f"<{i}>", 1 + i / 10, (100 + i) * MIB) for i in range(count)]
    root = ET.fromstring(plot(every, "a & b"))
    assert len(root.findall("{http://www.w3.org/2000/svg}circle")) == count


class _Planned(SimulatedTarget):
    def memory(self, settings: Any) -> int:
        return 100 * MIB + int(settings["ubatch"]) * MIB


@pytest.mark.parametrize("error", [KeyboardInterrupt(), DisturbedError("cc1plus used the CPUs")])
def test_an_interrupt_in_the_middle_writes_what_the_tune_has_proven(
    tmp_path: Path, error: BaseException
) -> None:
    class Stopped(InlineExecutor):
        def measurement(self, *args: Any) -> Any:
            if args[4].key.startswith("pareto/"):
                raise error
            return super().measurement(*args)

    target = _Planned("saturating", 1)
    options = Options(Workload(pp=64, tg=8), seed=1, max_trials=28, pareto=True)
    request = Request("simulated", options, out=tmp_path / "p.yaml", quiet=True)
    if isinstance(error, DisturbedError):
        with pytest.raises(DisturbedError, match=r"cc1plus used the CPUs; .*p\.yaml holds the entries"):
            run(request, Stopped(target), target.surface.space())
    else:
        run(request, Stopped(target), target.surface.space())
    written = profiles.load_profile(tmp_path / "p.yaml")
    assert written.provenance is not None
    assert written.provenance.status == "interrupted"
    (said,) = [x for x in (tmp_path / "p.yaml").read_text().splitlines() if x.startswith("# Verdict: ")]
    assert said.startswith("# Verdict: Prompt processing ")
    assert said.endswith(" --pareto was interrupted; --resume continues it.")
    assert any(isinstance(entry, profiles.SettingEntry) for entry in written.settings.values())
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
    tune = Tune(Recorder(InlineExecutor(target), options.workload, virtual_time=True), space, options)
    tune.run()
    assert tune.winner == space.default
    monkeypatch.setattr(tune.context.budget, "more_seconds", lambda seconds: False)
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


def _memory(settings: Settings) -> int:
    caches = {"q8_0": -60, "f32": 120}
    return (300 + int(settings["ubatch"]) // 8 + caches.get(str(settings["kv_type_k"]), 0)) * MIB


def _with_caches(rate: float) -> Surface:
    """`saturating` with a smaller cache and larger ones; the smaller one has `rate` times its speed."""
    base = saturating()
    cache = Knob("kv_type_k", ("q8_0", "f16", "bf16", "f32"), "f16", fidelity=Fidelity.APPROX, ordinal=False)

    def rates(settings: Settings) -> dict[str, float]:
        own = {"q8_0": rate, "bf16": 0.98}.get(str(settings["kv_type_k"]), 1.0)
        return {m: r * own for m, r in base.rates(settings).items()}

    return dataclasses.replace(
        base,
        knobs=(*base.knobs, cache),
        rates=rates,
        kld=lambda s: 2e-4 if s["kv_type_k"] == "q8_0" else 1e-6,
    )


def _traded(surface: Surface, seed: int, **options: Any) -> tuple[Tune, list[Variant]]:
    work = Workload(pp=64, tg=8)
    given = {"max_trials": 28, "pareto": True, "approx_limit": 0.01, **options}
    executor = InlineExecutor(SimulatedTarget(surface, seed))
    tune = Tune(
        Recorder(executor, work, virtual_time=True), surface.space(), Options(work, seed=seed, **given)
    )
    tune.run()
    return tune, trade_memory(tune, _memory)[0]


@pytest.mark.parametrize("rate", [0.9, 1.05])
@pytest.mark.parametrize("seed", range(3))
def test_no_entry_costs_speed_and_saves_nothing(seed: int, rate: float) -> None:
    """By the surface's truth: what is slower than its default, or changes answers, saves memory; the fastest
    harms no metric. Whole points of the screen had held `threads: 1`, 0.55 times as fast, for nothing."""
    surface = _with_caches(rate)
    tune, variants = _traded(surface, seed)
    margin = tune.outcome().margin
    defaults = {k.name: k.default for k in surface.knobs}
    assert len(variants) >= 2
    for v in variants:
        for name, default in defaults.items():
            without = {**v.settings, name: default}
            if v.settings[name] == default or _memory(without) > _memory(v.settings):
                continue
            gain = surface.truth(v.settings) - surface.truth(without)
            assert gain > -math.log1p(max(margin.values())), (v.name, name, v.settings)
            assert name != "kv_type_k" or v.point == tune.winner, (v.name, v.settings)
        if v.name == "fastest":
            own, base = surface.rates(v.settings), surface.rates(defaults)
            assert all(own[m] >= base[m] * (1 - margin[m]) for m in margin), v.settings


def test_what_needs_less_memory_keeps_what_made_the_winner_fast() -> None:
    """Threads need no memory: the smallest profile has them as the winner has."""
    surface = _with_caches(0.9)
    tune, variants = _traded(surface, 1)
    winner, small = tune.space.settings(tune.winner), variants[-1]
    assert winner["threads"] != 8
    assert small.size < 300 * MIB
    assert small.settings["threads"] == winner["threads"]


def test_a_smaller_one_that_harms_a_metric_is_not_the_fastest() -> None:
    """A u-batch of 32 reads prompts half as fast and is said to generate three times as fast: so it is faster
    on the whole, and nothing else beats the default."""
    knobs = (Knob("ubatch", (32, 512), 512, moves=frozenset({"pp", "tg"}), fidelity=Fidelity.ROUNDING),)
    surface = Surface(
        "traded", knobs,
        lambda s: {"pp": 100.0 if s["ubatch"] == 32 else 200.0, "tg": 90.0 if s["ubatch"] == 32 else 30.0},
    )  # fmt: skip
    work = Workload(pp=64, tg=8)
    executor = InlineExecutor(SimulatedTarget(surface, 3))
    tune = Tune(
        Recorder(executor, work, virtual_time=True), Space(knobs), Options(work, seed=3, max_trials=8)
    )
    tune.run()
    assert tune.winner == tune.space.default
    variants, _ = trade_memory(tune, lambda s: int(s["ubatch"]) * MIB)
    assert [v.name for v in variants] == ["default", "memory1"]
    assert variants[1].overall.ratio > 1.1


def test_of_a_point_is_left_what_saves_memory_and_what_the_winner_has() -> None:
    space = _with_caches(0.9).space()
    sizes = Sizes(space, _memory)

    def point(**settings: Any) -> tuple[int, ...]:
        return space.point(settings)

    messy = point(ubatch=64, threads=1, threads_batch=12, kv_type_k="q8_0")
    assert sizes.savings(messy) == point(ubatch=64, kv_type_k="q8_0")
    winner = point(ubatch=2048, threads=4)
    assert sizes.beside(messy, winner) == point(ubatch=64, threads=4, kv_type_k="q8_0")
    costs = point(ubatch=1024, threads=1, kv_type_k="f32")
    assert sizes.beside(costs, winner) == point(
        ubatch=1024, threads=4
    )  # an answer is changed for memory only
    assert sizes.beside(point(kv_type_k="bf16"), winner) == point(threads=4)


def test_what_saves_only_together_with_another_is_not_lost() -> None:
    """Memory is what the larger of two needs, so either alone at its default saves nothing."""
    knobs = tuple(Knob(name, (64, 512), 512) for name in ("ubatch", "threads"))
    space = Space(knobs)
    either = Sizes(space, lambda s: min(int(s["ubatch"]), int(s["threads"])) * MIB)
    both = Sizes(space, lambda s: max(int(s["ubatch"]), int(s["threads"])) * MIB)
    assert len(space.entries(either.savings((0, 0)))) == 1  # the other one saves nothing more
    assert both.savings((0, 0)) == (0, 0)
    assert both.savings((0, 1)) == space.default


@pytest.mark.parametrize("pareto", [True, False])
def test_profiles_of_an_earlier_tune_do_not_stay(tmp_path: Path, pareto: bool) -> None:
    target = _Planned("saturating", 1)
    out, folder = tmp_path / "p.yaml", tmp_path / "p.pareto"

    def tune(pareto: bool, trials: int) -> Any:
        options = Options(Workload(pp=64, tg=8), seed=1, max_trials=trials, pareto=pareto)
        request = Request("simulated", options, out=out, quiet=True)
        return run(request, InlineExecutor(target), target.surface.space())

    assert tune(True, 28).pareto == folder
    first = {p.name: p.read_bytes() for p in folder.iterdir()}
    (folder / "memory3.yaml").write_text("mine")
    (folder / "notes.txt").write_text("mine, too")
    result = tune(pareto, 12)
    written = {p.name for p in folder.iterdir()} - {"notes.txt"}
    assert result.pareto == (folder if pareto else None)
    assert bool(written) == pareto
    journal = {profiles.load_profile(folder / n).evidence.journal for n in written if n.endswith(".yaml")}
    assert journal <= {result.profile.evidence.journal}
    kept = {p.name: p.read_bytes() for p in (tmp_path / "p.pareto.1").iterdir()}
    assert kept == {**first, "memory3.yaml": b"mine"}
    assert (folder / "notes.txt").read_text() == "mine, too"
