"""What people see while a tune runs."""

from __future__ import annotations

import io
from typing import Any

import pytest
from conftest_tuner import WORKLOAD, Simulated
from dyno_tuner.core.intervals import Estimate
from dyno_tuner.core.outcome import KernelEntry, Screened
from dyno_tuner.core.protocol import KernelChoice
from dyno_tuner.execution.inline_executor import InlineExecutor
from dyno_tuner.output.html_report.analyse import left_undone
from dyno_tuner.output.progress import STAGES, Progress
from dyno_tuner.output.report import print_outcome
from dyno_tuner.output.verdict import record_of, verdict
from dyno_tuner.record.recorder import Recorder
from dyno_tuner.run.session import _rate, judged_nothing
from dyno_tuner.run.tune import Options, Tune
from dyno_tuner.targets.simulated.target import SimulatedTarget
from rich.console import Console


def _shown(progress: Progress) -> str:
    out = io.StringIO()
    Console(file=out, width=200).print(progress._view())
    return out.getvalue()


def _trial(progress: Progress, number: int, ratio: float) -> None:
    interval = [ratio - 0.01, ratio + 0.01]
    progress.note(
        "trial",
        {"number": number, "settings": {"ubatch": number}, "status": "ok", "ratio": ratio, "ci95": interval},
    )


def _finalist(progress: Progress, ubatch: int, ratio: float, beats: bool) -> None:
    interval = [ratio - 0.01, ratio + 0.01]
    progress.note(
        "finalist",
        {"settings": {"ubatch": ubatch}, "ratio": ratio, "ci95": interval, "beats": beats, "rounds": 4},
    )


def test_nothing_slower_than_the_default_is_the_best_so_far() -> None:
    progress = Progress("m", None, quiet=True)
    assert "1.000 × default   the default" in _shown(progress)
    _trial(progress, 1, 0.761)
    assert "1.000 × default   the default" in _shown(progress)
    _trial(progress, 2, 1.05)
    _trial(progress, 3, 1.02)
    assert "1.050 × default   [1.040, 1.060]   ubatch=2, not confirmed" in _shown(progress)


def test_only_what_beats_the_default_is_confirmed() -> None:
    progress = Progress("m", None, quiet=True)
    _finalist(progress, 64, 1.02, beats=False)
    assert "confirmed" not in _shown(progress)
    for ubatch, ratio, beats in ((128, 1.07, True), (256, 1.05, True), (512, 1.2, False)):
        _finalist(progress, ubatch, ratio, beats)
    assert "1.070 × [1.060, 1.080]   ubatch=128" in _shown(progress)


def test_a_trial_names_only_settings_that_differ_from_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    """A line with fifteen settings hides the one that was changed."""
    progress = Progress("m", None, defaults={"ubatch": 512, "threads": 2})
    shared: dict[str, Any] = {"status": "ok", "ratio": 1.05, "ci95": [1.04, 1.06]}
    progress.note("trial", {"number": 1, "settings": {"ubatch": 512, "threads": 1}, **shared})
    progress.note("trial", {"number": 2, "settings": {"ubatch": 512, "threads": 2}, **shared})
    finalist = {"ratio": 1.05, "ci95": [1.04, 1.06], "beats": True, "rounds": 4}
    progress.note("finalist", {"settings": {"ubatch": 64, "threads": 2}, **finalist})
    assert capsys.readouterr().err.splitlines() == [
        "    1   1.050 × [1.040, 1.060]  threads=1",
        "    2   1.050 × [1.040, 1.060]  default",
        "  ubatch=64: 1.050 × [1.040, 1.060], beats the default",
    ]


def test_a_finalist_that_is_slower_somewhere_says_where(capsys: pytest.CaptureFixture[str]) -> None:
    """1.08 × as a mean that is not taken is no riddle."""
    progress = Progress("m", None)
    interval = {"ratio": 1.076, "ci95": [1.067, 1.086], "beats": False, "rounds": 4}
    progress.note("finalist", {"settings": {"cpu_repack": False}, **interval, "harmed": {"tg": 0.9534}})
    progress.note("finalist", {"settings": {"ubatch": 64}, **interval, "harmed": {}})
    said = capsys.readouterr().err + capsys.readouterr().out
    assert "cpu_repack=False: 1.076 × [1.067, 1.086], slower at tg: 0.953 ×" in said
    assert "ubatch=64: 1.076 × [1.067, 1.086], does not beat the default" in said


def test_a_tune_shows_trials_with_intervals(capsys: pytest.CaptureFixture[str]) -> None:
    """On a terminal and elsewhere: the interval that the noise of measurements leaves of one ratio."""
    target = SimulatedTarget("saturating", 3)
    space = target.surface.space()
    recorder = Recorder(InlineExecutor(target), WORKLOAD, identity=space.identity, virtual_time=True)
    notes: list[dict[str, Any]] = []
    progress = Progress("m", None)

    def note(kind: str, data: Any) -> None:
        progress.note(kind, data)
        if kind == "trial" and data["ratio"] is not None:
            notes.append(data)

    recorder.on_note = note
    Tune(recorder, space, Options(WORKLOAD, seed=3, max_trials=10, rounds=2, max_rounds=2)).run()
    assert notes
    for data in notes:
        low, high = data["ci95"]
        assert low < data["ratio"] < high < 1.2 * low
    best = max(notes, key=lambda n: n["ratio"])
    low, high = best["ci95"]
    assert f"{best['ratio']:.3f} × [{low:.3f}, {high:.3f}]" in capsys.readouterr().err


def _told(outcome: Any) -> str:
    out = io.StringIO()
    print_outcome(outcome, WORKLOAD, Console(file=out, width=200))
    return out.getvalue()


def test_the_closing_table_begins_with_a_verdict() -> None:
    tuned = Simulated("saturating", 1, max_trials=20).outcome
    first = _told(tuned).splitlines()[0]
    assert first == verdict(tuned) == record_of(tuned)["verdict"]
    pp, tg = (tuned.gain[m].ratio for m in ("pp", "tg"))
    assert first.startswith(f"Prompt processing {pp:.2f} × as fast, generation {tg:.2f} ×; the answers ")


@pytest.mark.parametrize("width", [80, 50])
def test_narrow_terminals_cut_off_no_names(width: int) -> None:
    """An op key is wider than a column, and a log has 80 columns. An ellipsis would hide the name."""
    tuned = Simulated("saturating", 1, max_trials=20).outcome
    key = "moe_up_gate q4_k n=256 k=512 experts=8 used=2 activation=silu layout=x16 act=q8"
    choice = KernelChoice(key, "m1", {"variant": "by_row", "rows": 128, "prefetch": 2048})
    gain = Estimate(1.161, 1.129, 1.173, 9)
    tuned.kernels = [KernelEntry(choice, gain, "kernels_tg", Screened(alone=gain))]
    out = io.StringIO()
    print_outcome(tuned, WORKLOAD, Console(file=out, width=width))
    said = out.getvalue()
    assert (
        "1.161 × [1.129, 1.173]  " + key + " m1: variant=by_row rows=128 prefetch=2048 (kernels_tg;" in said
    )
    table = said[: said.index("Kernels")]
    cells = [cell.strip() for line in table.splitlines() for cell in line.split("│")]
    assert not [cell for cell in cells if cell.endswith("…") and cell[0].isalpha()]
    first = "".join(line.split("│")[1].strip() for line in table.splitlines() if line.startswith("│"))
    for name in tuned.judged:
        assert name in first


@pytest.mark.parametrize(("number", "voided", "unstable"), [
    (1, "1 measurement or block repeated", "1 measurement did not become stable"),
    (2, "2 measurements or blocks repeated", "2 measurements did not become stable"),
])  # fmt: skip
def test_the_closing_line_counts_in_words_of_that_number(number: int, voided: str, unstable: str) -> None:
    tuned = Simulated("null", 1, max_trials=4).outcome
    tuned.voided = tuned.unstable = number
    assert f"; {voided}; {unstable}" in _told(tuned)


@pytest.mark.parametrize(
    ("status", "said"),
    [
        ("budget", "; the budget ended before everything was tried"),
        ("interrupted", "; interrupted: --resume continues the run"),
        ("unproven", "; no setting that looked faster was proven"),
    ],
)
def test_the_closing_line_says_how_the_run_ended(status: str, said: str) -> None:
    tuned = Simulated("null", 1, max_trials=4).outcome
    assert "; no setting that" not in _told(tuned)
    tuned.status = status
    (line,) = [line for line in _told(tuned).splitlines() if line.startswith("Measured ")]
    assert line.endswith(said)


@pytest.mark.parametrize(("number", "said"), [(1, "1 block repeated"), (2, "2 blocks repeated")])
def test_the_table_counts_blocks_in_words_of_that_number(number: int, said: str) -> None:
    progress = Progress("m", None, quiet=True)
    progress._voided = number
    assert f"0 failed; {said}" in _shown(progress)


def test_the_verdict_says_why_nothing_was_gained() -> None:
    tuned = Simulated("null", 1, max_trials=8).outcome
    margin = 100 * max(tuned.margin.values())
    assert verdict(tuned) == (
        f"Nothing gains more than the noise of this machine ({margin:.1f} %): "
        "7 other configurations were slower than the defaults or tied with them."
    )


def test_the_verdict_counts_one_configuration_as_one() -> None:
    tuned = Simulated("null", 1, max_trials=2).outcome
    assert ": 1 other configuration was slower than the defaults or tied with them." in verdict(tuned)


def test_the_verdict_of_a_tune_without_noise_names_what_ended_it() -> None:
    tuned = Simulated("null", 1, max_trials=4).outcome
    tuned.noise, tuned.margin, tuned.status = {}, {}, "interrupted"
    assert verdict(tuned) == (
        "Nothing was measured: the tune was interrupted before the noise of this machine was known; --resume "
        "continues it."
    )
    assert "budget" in verdict(Simulated("saturating", 1, budget=4.0).outcome)


def test_an_interrupt_behind_the_finals_keeps_the_verdict_of_the_tune() -> None:
    """Nothing gains, and Ctrl-C comes while --pareto compares what needs less memory."""
    tuned = Simulated("null", 1, max_trials=8).outcome
    said = verdict(tuned)
    tuned.finished, tuned.status = tuned.status, "interrupted"
    tuned.afterwards = "--pareto was interrupted; --resume continues it."
    assert verdict(tuned) == f"{said} --pareto was interrupted; --resume continues it."


@pytest.mark.parametrize("stage", ["answers", "screen"])
def test_an_interrupt_before_kernels_does_not_name_them(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = Tune.stage

    def stopped(self: Tune, name: str) -> None:
        if name == stage:
            raise KeyboardInterrupt
        usual(self, name)

    monkeypatch.setattr(Tune, "stage", stopped)
    tuned = Simulated("null", 1, max_trials=4).outcome
    assert verdict(tuned) == (
        "Nothing is proven: the tune was interrupted before a gain was proven; --resume continues it."
    )


def test_the_verdict_of_a_noisy_machine_claims_no_tie() -> None:
    """If the noise is too large to prove anything, nothing was slower than the defaults either."""
    tuned = Simulated("null", 1, max_trials=8).outcome
    tuned.margin = {"pp": 0.212, "tg": 0.388}
    assert verdict(tuned) == (
        "Nothing is proven: the noise margin at the end was 22 %, and a proof needs a margin of at most "
        "10 %; a longer --budget or a quieter machine reduces it."
    )
    tuned.unproven, tuned.status = True, "budget"  # time was short too, and more of it is not what is missing
    assert "the time ran out" not in _told(tuned)
    assert _told(tuned).startswith("Nothing is proven: the noise margin at the end was 22 %")
    tuned.unproven = False
    tuned.margin = {"pp": 0.02, "tg": 0.388}
    assert "were slower than the defaults" in verdict(tuned)


@pytest.mark.parametrize(
    ("margin", "needed", "end"),
    [
        (0.184, {"needed": 390}, "19 %, and a proof needs a margin of at most 10 %; a longer --budget or a "
         "quieter machine reduces it."),
        (0.1001, {"needed": 390}, "11 %, and a proof needs a margin of at most 10 %; a longer --budget or a "
         "quieter machine reduces it."),
        (0.9, {}, "90 %, and a proof needs a margin of at most 10 %; only a quieter machine reduces it "
         "enough."),
    ],
)  # fmt: skip
def test_the_verdict_names_the_margin_that_was_too_wide(
    margin: float, needed: dict[str, int], end: str
) -> None:
    tuned = Simulated("null", 1, max_trials=8).outcome
    tuned.unproven, tuned.status = True, "budget"
    tuned.promises = [{"settings": {"threads": 2}, "ratio": 1.9, "margin": margin, **needed}]
    assert verdict(tuned) == f"Nothing is proven: the noise margin at the end was {end}"
    assert "the time ran out" not in _told(tuned)
    assert ("--budget 390s is enough for the proof" in _told(tuned)) is bool(needed)
    remedy = "continue with --resume --budget 390s" if needed else "tune again on a quieter machine"
    assert judged_nothing(tuned) == f", because this tune judged no setting; {remedy}"


@pytest.mark.parametrize("needed", [{}, {"needed": 390}])
def test_a_tune_without_time_for_the_proof_names_the_remedy(needed: dict[str, int]) -> None:
    """A budget that is known, or else a longer one."""
    tuned = Simulated("null", 1, max_trials=8).outcome
    tuned.unproven, tuned.status = True, "budget"
    tuned.promises = [{"settings": {"threads": 2}, "ratio": 1.07, **needed}]
    said = _told(tuned)
    assert ("--budget 390s is enough for the proof" in said) is bool(needed)
    assert ("Give a longer --budget." in said) is (not needed)


def test_the_verdict_names_what_there_was_no_time_to_try() -> None:
    tuned = Simulated("null", 1, max_trials=8).outcome
    name = tuned.searched.pop()
    assert verdict(tuned).endswith("tied with them.")
    tuned.status = "budget"
    assert verdict(tuned).endswith(f"The time ran out before {name} could be tried: give a longer --budget.")


def test_every_stage_says_what_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    run = Simulated("saturating", 1, max_trials=8, pareto=True)
    stages = [str(data["name"]) for kind, data in run.notes if kind == "stage"]
    assert {"noise", "answers", "screen", "finalists", "done"} <= set(stages)
    progress = Progress("m", None)
    for name in stages:
        progress.note("stage", {"name": name, "t": 0.0})
    said = capsys.readouterr().err
    assert "noise: comparing the default with itself" in said
    assert "computing exact answers" in said
    for name in stages:
        assert len(STAGES[name].split()) > 2 or name == "done", name


def test_what_looked_faster_and_was_not_proven_is_the_last_line() -> None:
    """The closing lines name it with its promise and with a budget that has room for the proof."""
    tuned = Simulated("null", 1, max_trials=4).outcome
    tuned.promises = [
        {"kernels": 6, "ratio": 1.317, "needed": 240},
        {"settings": {"ubatch": 1024, "threads": 4}, "ratio": 1.074},
    ]
    assert _told(tuned).splitlines()[-2:] == [
        "Not proven: 6 kernels for generation looked 1.317 × as fast; --budget 240s is enough for the proof.",
        "Not proven: ubatch=1024, threads=4 looked 1.074 × as fast.",
    ]
    assert "the time ran out before settings that looked faster" in verdict(tuned)


def test_the_lines_name_what_the_objective_counts() -> None:
    tuned = Simulated("null", 1, max_trials=4).outcome
    tuned.objective, tuned.unproven = "energy", True
    tuned.promises = [{"settings": {"ubatch": 1024}, "ratio": 1.074}]
    said = _told(tuned)
    assert "the time ran out before settings that looked better" in said
    assert "Not proven: ubatch=1024 looked 1.074 × the tokens per joule." in said
    assert "Some settings looked" not in said, "the verdict has said so"
    tuned.unproven, tuned.missed = False, {"settings": {"threads": 2}, "ratio": 1.2}
    said = _told(tuned)
    assert "threads=2 together looked 1.200 × the defaults' tokens per joule; only part of this gain" in said
    assert "fast" not in said
    told = left_undone(record_of(tuned))
    assert "threads=2 together looked 1.200 × the defaults' tokens per joule" in told
    assert "fast" not in told


def test_the_verdict_of_memory_tells_the_plan() -> None:
    tuned = Simulated("saturating", 1, max_trials=20).outcome
    tuned.objective, tuned.memory = "memory", (712 << 20, 356 << 20)
    pp, tg = (tuned.gain[m].ratio for m in ("pp", "tg"))
    assert verdict(tuned).startswith(
        "The plan needs 356 MiB instead of 712 (0.50 ×), and no metric is slower: "
        f"prompt processing {pp:.2f} × as fast, generation {tg:.2f} ×; the answers "
    )
    tuned.gain = {}
    assert "and no metric is slower; the answers " in verdict(tuned)


@pytest.mark.parametrize(
    ("status", "end"),
    [
        ("complete", "3 other configurations were tried."),
        ("budget", "3 other configurations were tried. Give a longer --budget."),
        ("interrupted", "the tune was interrupted before smaller settings were compared with the default."),
    ],
)
def test_the_verdict_of_memory_says_nothing_of_settings_that_are_only_faster(status: str, end: str) -> None:
    tuned = Simulated("null", 1, max_trials=4).outcome
    tuned.objective, tuned.status, tuned.unproven = "memory", status, True  # type: ignore[assignment]
    tuned.promises = [{"settings": {"ubatch": 1024}, "ratio": 1.074, "needed": 240}]
    assert verdict(tuned) == f"Nothing is proven to need less memory at the speed of the default: {end}"
    assert "fast" not in _told(tuned)
    assert record_of(tuned)["not_proven"] == []
    assert left_undone(record_of(tuned)) == ""


def test_measured_rates_have_units() -> None:
    assert _rate("memory_gbps", 4.9) == "memory 4.9 GB/s"
    assert _rate("host_memory_gbps", 344.0) == "host memory 344 GB/s"
    assert _rate("f16_tflops", 650.5) == "f16 650.5 TFLOP/s"
