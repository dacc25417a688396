from __future__ import annotations

import gzip
import html
import json
import re
import statistics
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from conftest_tuner import SlowToStart, short_measurements
from dyno import profiles
from dyno_tuner.cli.commands import app
from dyno_tuner.core.errors import JournalError, TuneError
from dyno_tuner.core.protocol import Workload
from dyno_tuner.execution.inline_executor import InlineExecutor
from dyno_tuner.output.html_report import analyse, figures, page, write_report
from dyno_tuner.output.html_report.analyse import left_undone
from dyno_tuner.output.html_report.elements import TALL, table
from dyno_tuner.output.html_report.read import Run, read
from dyno_tuner.output.html_report.sections import repeat_command
from dyno_tuner.output.verdict import record_of, verdict
from dyno_tuner.record import journal
from dyno_tuner.record.recorder import Recorder
from dyno_tuner.run.continuation import FORMAT
from dyno_tuner.run.tune import Options, Tune
from dyno_tuner.targets.replay.target import ReplayTarget, load_sweep
from dyno_tuner.targets.simulated.hard_surfaces import either
from dyno_tuner.targets.simulated.surfaces import saturating
from dyno_tuner.targets.simulated.target import SimulatedTarget, SimulationNoise
from typer.testing import CliRunner

if TYPE_CHECKING:
    from dyno_tuner.core.outcome import Outcome

SHIPPED = Path(__file__).parents[3] / "profiles"
COMMAND = "tune --model 'my model.gguf' --seed 3 --resume"


def _write(path: Path, target: Any, space: Any, options: Options, **identity: Any) -> Outcome:
    """A journal as a session writes it, without a profile."""
    executor = InlineExecutor(target)
    description = executor.describe()
    with journal.Journal(path) as book:
        book.append(
            {"run": FORMAT, "tuner": "1", "identity": {**description.identity(), **identity},
             "workload": options.workload.to_dict(), "seed": options.seed, "sampler": options.sampler,
             "approx_limit": None, "knobs": {k.name: list(k.values) for k in space.knobs}, "held": {}}
        )  # fmt: skip
        recorder = Recorder(
            executor, options.workload, journal=book, identity=space.identity, virtual_time=True
        )
        if not isinstance(target, ReplayTarget):
            recorder.note("request", command=COMMAND, label=description.label)
        outcome = Tune(recorder, space, options).run()
        recorder.note("outcome", **record_of(outcome))
    return outcome


def _simulated(path: Path, surface: str, noise: SimulationNoise | None = None) -> Outcome:
    target = SimulatedTarget(surface, 3, noise)
    options = Options(
        Workload(512, 64, 4096), seed=3, max_trials=20, weights=dict(target.surface.weights), rounds=3,
        max_rounds=3,
    )  # fmt: skip
    return _write(path, target, target.surface.space(), options)


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    path = tmp_path_factory.mktemp("report") / "p.yaml.journal.jsonl"
    return path, _simulated(path, "faulty")


@pytest.fixture(autouse=True)
def _small_library(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Packing plotly.js takes most of a second; where the library does not matter it is left out."""
    if "real_plotly" not in request.fixturenames:
        monkeypatch.setattr(page, "_plotly", lambda: "cGxvdGx5")


@pytest.fixture
def real_plotly() -> None:
    """The page with the library in it."""


class _Structure(HTMLParser):
    """Balanced tags, and all that a browser would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.ids: list[str] = []
        self.scripts: dict[str, str] = {}
        self._script = ""
        self.words = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.loads += [str(v) for k, v in attrs if k in ("src", "href", "srcset", "action", "data", "poster")]
        self.ids += [i for i in [given.get("id")] if i]
        if tag not in ("meta", "br"):
            self.open.append(tag)
        if tag == "script":
            self._script = given.get("id") or "own"
            self.scripts[self._script] = ""

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["script"]:
            self.scripts[self._script] += data
        elif self.open[-1:] != ["style"]:
            self.words += data


def _check(text: str) -> _Structure:
    """What every page has to be."""
    structure = _Structure(text)
    assert structure.open == []
    assert structure.loads == []
    assert len(structure.ids) == len(set(structure.ids))
    assert "@import" not in text
    assert "url(" not in text
    assert "default-src 'none'" in text
    plots = set(re.findall(r'class="plot" id="([^"]+)"', text))
    figures = json.loads(structure.scripts["figures"]) if plots else {}
    assert plots == set(figures)
    graph_objects = pytest.importorskip("plotly.graph_objects")
    resolved = json.loads(re.sub(r'"--[a-z]+"', '"#123456"', json.dumps(figures)))
    for figure in resolved.values():
        graph_objects.Figure(figure)  # ValueError for what Plotly does not know
    return structure


def test_page_of_a_whole_run(faulty: tuple[Path, Outcome]) -> None:
    path, outcome = faulty
    text = page.render(path)
    structure = _check(text)
    for title in ("Default and tuned", "Rates by u-batch", "History", "Importance of the knobs",
                  "Quality gate", "Machine and environment", "Repeat this run", "Failed trials"):  # fmt: skip
        assert title in structure.words, title
    assert outcome.entries
    assert outcome.failures
    for metric, gain in outcome.gain.items():
        assert f"{gain.ratio:.4f}" in structure.words
        assert f"{gain.low:.4f} … {gain.high:.4f}" in structure.words
        assert f"{outcome.baseline[metric]:,.1f}" in structure.words
        assert f"{outcome.tuned[metric]:,.1f}" in structure.words
    for entry in outcome.entries:
        assert f"{entry.estimate.ratio:.4f}" in structure.words
    for failure in outcome.failures:
        assert failure.message in structure.words
    assert outcome.default_quality is not None
    assert f"{1.5 * outcome.default_quality.mean_kld + 1e-5:.3g}" in structure.words
    assert "pp512 @ d4096" in structure.words
    assert "tune --model 'my model.gguf' --seed 3\n" in structure.words + "\n"
    assert "--resume" not in structure.words
    assert journal.sha256(path) in structure.words


def test_scores_are_those_of_the_tuner(faulty: tuple[Path, Outcome]) -> None:
    """What is computed again from samples equals what the run itself noted."""
    run = read(faulty[0])
    checked = 0
    for trial in analyse.trials(run):
        if trial.ratio is not None and len(trial.by_metric) == 2:
            product = trial.by_metric["pp"] * trial.by_metric["tg"]
            assert product**0.5 == pytest.approx(trial.ratio, rel=1e-9)
            checked += 1
    assert checked
    pair = analyse.paired(run, faulty[1].settings)
    assert pair is not None
    for metric, gain in faulty[1].gain.items():
        assert pair.ratio[metric].ratio == pytest.approx(gain.ratio, rel=1e-9)


def test_what_was_taken_in_the_winners_place_is_said(tmp_path: Path) -> None:
    path = tmp_path / "either.yaml.journal.jsonl"
    target = SimulatedTarget(either(), 6)
    space = target.surface.space()
    options = Options(Workload(64, 8), seed=6, max_trials=15, weights=dict(target.surface.weights))
    assert _write(path, target, space, options).settings["streams"] == 4
    assert "chosen instead of prefetch=8: equally good, and found first" in _check(page.render(path)).words


def test_rounds_that_a_comparison_forgot_are_not_counted(faulty: tuple[Path, Outcome]) -> None:
    path, outcome = faulty
    run = read(path)
    whole = analyse.paired(run, outcome.settings)
    assert whole is not None
    assert whole.rounds > 2
    run.notes.append({"note": "anew", "stage": whole.stage, "first": 1})
    later = analyse.paired(run, outcome.settings)
    assert later is not None
    assert (later.stage, later.rounds) == (whole.stage, whole.rounds - 1)
    assert all(len(later.base[m]) < len(whole.base[m]) for m in run.metrics)


def test_main_effects_of_a_known_product(faulty: tuple[Path, Outcome]) -> None:
    run = read(faulty[0])
    run.head["knobs"] = {"a": [1, 2], "b": [1, 2, 3], "c": [0, 1]}
    run.measurements.clear()
    run.head["identity"] = {"engine": {"defaults": {"a": 1, "b": 1, "c": 0}}}
    factors = {"a": {1: 1.0, 2: 1.5}, "b": {1: 1.0, 2: 1.1, 3: 0.7}, "c": {0: 1.0, 1: 1.0}}
    tried = [
        analyse.Tried(0, {"a": a, "b": b, "c": c}, "ok", factors["a"][a] * factors["b"][b], "", None, {})
        for a in (1, 2) for b in (1, 2, 3) for c in (0, 1)
    ]  # fmt: skip
    found, explained = analyse.effects(run, tried)
    assert [e.knob for e in found] == ["b", "a", "c"]
    for effect in found:
        for value, factor in factors[effect.knob].items():
            assert effect.by_value[str(value)] == pytest.approx(factor, rel=0.02)
    assert explained is not None
    assert explained > 0.99


def test_crossing_and_voided_blocks(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    noise = SimulationNoise(throttle=0.2, throttle_period=300, throttle_seconds=30)
    _simulated(path, "crossover", noise)
    run = read(path)
    curves, crossing = analyse.curves(run, "pp")
    assert len(curves) == 2
    assert crossing is not None
    assert 512 < crossing < 4096
    blocks = analyse.voids(run)
    assert len(blocks) == len(list(run.noted("void"))) > 0
    assert all(b.begin < b.end and b.measurements for b in blocks)
    structure = _check(page.render(path))
    figures = json.loads(structure.scripts["figures"])
    assert [s["x0"] for s in figures["ubatch_pp"]["layout"]["shapes"]] == [crossing]
    assert [(s["x0"], s["x1"]) for s in figures["history"]["layout"]["shapes"]] == [
        (b.begin, b.end) for b in blocks
    ]


def test_rates_over_depth_and_the_crossing_of_a_mix(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    target = SimulatedTarget("crossover", 3)
    workload = Workload.parse("pp=512,depth=0,4096; tg=64,depth=0,1024,4096; pp=64")
    options = Options(workload, seed=3, max_trials=20, weights=workload.weights, rounds=3, max_rounds=3)
    _write(path, target, target.surface.space(), options)
    run = read(path)
    structure = _check(page.render(path))
    drawn = json.loads(structure.scripts["figures"])
    assert {n for n in drawn if n.startswith("depth_")} == {"depth_pp512", "depth_tg64"}
    default, tuned = drawn["depth_tg64"]["data"]
    assert (default["name"], tuned["name"]) == ("default", "tuned")
    assert default["x"] == tuned["x"] == [0, 1024, 4096]
    pair = analyse.paired(run, run.last("outcome")["settings"])
    assert pair is not None
    assert default["y"][2] == pytest.approx(statistics.median(pair.base["tg64@d4096"]))
    assert tuned["y"][0] == pytest.approx(statistics.median(pair.rates["tg64"]))
    # Each prompt of the mix has its u-batches, and the paths cross in it as they do in a single workload.
    (line,) = drawn["ubatch_pp512@d4096"]["layout"]["shapes"]
    assert line["x0"] == analyse.curves(run, "pp512@d4096")[1]
    assert 512 < line["x0"] < 4096
    # Before anything is proven there is the default alone, and with one depth there is no such section.
    cut = tmp_path / "cut.jsonl"
    cut.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:30]))
    drawn = json.loads(_check(page.render(cut)).scripts["figures"])
    assert [t["name"] for t in drawn["depth_pp512"]["data"]] == ["default"]
    single = tmp_path / "single.jsonl"
    _simulated(single, "crossover")
    assert "Rates by depth" not in _check(page.render(single)).words


@pytest.mark.parametrize(("objective", "unit"), [("speed", "t/s"), ("energy", "tokens/J")])
def test_the_page_names_the_unit_of_what_decides(tmp_path: Path, objective: str, unit: str) -> None:
    path = tmp_path / "r.jsonl"
    target = SimulatedTarget("hungry", 4)
    options = Options(Workload(pp=64, tg=8), seed=4, objective=objective, max_trials=20)
    outcome = _write(path, target, target.surface.space(), options)
    assert outcome.entries
    rendered = page.render(path)
    structure = _check(rendered)
    assert f"default {unit}" in structure.words
    assert f"best {unit}" in structure.words
    drawn = json.loads(structure.scripts["figures"])
    names = [n for n in drawn if n.startswith(("samples", "ubatch"))]
    assert {n.partition("_")[0] for n in names} == {"samples", "ubatch"}
    for name in names:
        assert drawn[name]["layout"]["yaxis"]["title"]["text"].endswith(f", {unit}")
        assert f"}} {unit}<" in drawn[name]["data"][0]["hovertemplate"]
    other = "tokens/J" if unit == "t/s" else "t/s"
    assert other not in structure.words
    assert other not in structure.scripts["figures"]
    if objective == "energy":
        row = re.search(r"<td[^>]*>pp64</td><td[^>]*>([0-9.]+)</td>", rendered)
        assert row is not None
        default, _ = outcome.joules["pp"]
        assert float(row[1]) == pytest.approx(1 / default, rel=0.05), "not rounded to nothing"


def test_where_rates_over_depth_cross() -> None:
    default, tuned = {0: 100.0, 1000: 90.0, 3000: 80.0}, {0: 96.0, 1000: 94.0, 3000: 90.0}
    found = analyse.Depths("tg64", default, tuned, {0: -1, 1000: 1, 3000: 1})
    assert found.crossings == [pytest.approx(500.0)]
    assert figures.by_depth(Run("r.jsonl", ""), found)["layout"]["shapes"][0]["x0"] == pytest.approx(500.0)
    assert analyse.Depths("tg64", default, tuned, {0: 0, 1000: 1, 3000: 1}).crossings == [], "noise"


def test_replay_without_quality(tmp_path: Path, sweep_path: Path) -> None:
    target = ReplayTarget(load_sweep(sweep_path))
    options = Options(target.workload(), max_trials=10, max_distinct=11, check=False)
    outcome = _write(tmp_path / "r.jsonl", target, target.space(), options)
    structure = _check(page.render(tmp_path / "r.jsonl"))
    assert "no answers were compared" in structure.words
    assert f"{outcome.gain['pp'].ratio:.4f}" in structure.words
    assert repeat_command(read(tmp_path / "r.jsonl"))[0].startswith("tune replay SWEEP.jsonl --metric pp4096")


def test_an_interrupted_run_says_what_is_missing(faulty: tuple[Path, Outcome], tmp_path: Path) -> None:
    data = faulty[0].read_bytes()
    lines = data.split(b"\n")
    cut = tmp_path / "cut.jsonl"
    for count in (1, 2, 3, 8, 15, 30, 60, len(lines) // 2, len(lines) - 2):
        cut.write_bytes(b"\n".join(lines[:count]) + b"\n" + lines[count][:20])
        words = _check(page.render(cut)).words
        assert "no closing record" in words
        assert "1 incomplete line and " in words
    cut.write_bytes(b"\n".join(lines[:1]) + b"\n")
    words = _check(page.render(cut)).words
    for missing in ("History", "Importance", "Quality gate", "Noise"):
        assert f"{missing}" in words
    cut.write_bytes(b"\n".join(lines[1:]))
    assert "first record" in _check(page.render(cut)).words


def test_hostile_texts_are_escaped(tmp_path: Path) -> None:
    bad = (
        "</script><script>alert(1)</script><img src=x onerror=alert(2)>\u2028'\"&<a href='http://evil'>x</a>"
    )
    path = tmp_path / "h.jsonl"
    target = SimulatedTarget("faulty", 3)
    options = Options(Workload(64, 8), seed=3, max_trials=6, rounds=2, max_rounds=2)
    _write(path, target, target.surface.space(), options, model={"architecture": bad, "name": bad, bad: bad})
    with journal.Journal(path) as book:
        book.append({"note": "request", "command": "tune --model " + bad, "label": bad})
        book.append({"note": "trial", "number": 1, "settings": {bad: bad}, "status": bad, "ratio": None,
                     "message": bad})  # fmt: skip
        book.append({"note": "tie", "knob": bad, "value": bad, "ratio": 1.0})
        book.append({"note": "machine", bad: bad})
        book.append({"note": "trial", "number": 2, "settings": {bad: bad}, "status": "ok", "ratio": 1.5,
                     "message": ""})  # fmt: skip
    text = page.render(path)
    structure = _check(text)
    assert bad.split("\u2028")[0] in structure.words  # shown as it is, as text
    assert "<img" not in text
    assert "<a " not in text
    assert "<" not in structure.scripts["figures"]
    assert text.count("<script") == 3
    drawn = json.dumps(json.loads(structure.scripts["figures"]))
    assert "<script" not in drawn
    assert "<a href" not in drawn


def test_nonsense_is_counted_not_believed(faulty: tuple[Path, Outcome], tmp_path: Path) -> None:
    path = tmp_path / "n.jsonl"
    path.write_bytes(faulty[0].read_bytes())
    measurement = next(r for r in journal.load(path).records if r.get("op") == "visit")
    nonsense: list[dict[str, Any]] = [
        {"x": 1},
        {"op": "visit"},
        {**measurement, "t": "soon"},
        {**measurement, "result": {**measurement["result"], "samples": [["pp", 0, 512, 0.0, 0.0]]}},
        {**measurement, "result": {**measurement["result"], "samples": [["pp"]]}},
        {**measurement, "result": {**measurement["result"], "status": "great"}},
        {**measurement, "config": {"settings": {"ubatch": [1]}, "kernels": []}},
        {"op": "quality", "key": 1, "config": None, "result": 3, "t": 1.0},
    ]
    noise: list[dict[str, Any]] = [
        {"note": kind, **dict.fromkeys(
            ("number", "ratio", "ci95", "settings", "margin", "within", "block", "entries", "gain", "kernels",
             "command", "label", "name", "beats", "group", "knob", "value", "key", "tokens", "config",
             "status", "kept"), value)}
        for kind in ("trial", "void", "finalist", "tie", "without", "incorrect", "machine", "kernels",
                     "kernel_trial", "noise", "stage", "request", "outcome")
        for value in (None, True, "x", -1, 1e400, [1, "a"], {"a": {"b": None}})
    ]  # fmt: skip
    with journal.Journal(path) as book:
        for record in [*nonsense, *noise]:
            book.append(record)
    assert f"{len(nonsense)} inconsistent records: not shown" in _check(page.render(path)).words


def test_what_is_no_journal(tmp_path: Path) -> None:
    file = tmp_path / "x"
    with pytest.raises(JournalError, match="cannot be read"):
        write_report(file)
    for content in (b"", b"hello\n", b"\x00\xff" * 100):
        file.write_bytes(content)
        with pytest.raises(JournalError, match=r"no complete record"):
            write_report(file)
    file.write_bytes(journal.encode({"hello": 1}))
    with pytest.raises(JournalError, match="none of a tune"):
        write_report(file)
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_a_profile_in_place_of_its_journal(tmp_path: Path) -> None:
    profile = tmp_path / "p.yaml"
    profile.write_text("schema: 1\n")
    (tmp_path / "p.yaml.journal.jsonl").touch()
    with pytest.raises(JournalError, match=r"give its journal, .*p\.yaml\.journal\.jsonl"):
        write_report(profile)


@pytest.mark.usefixtures("real_plotly")
def test_command_writes_one_page_with_the_library(faulty: tuple[Path, Outcome], tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    done = CliRunner().invoke(app, ["report", str(faulty[0]), "--out", str(out)])
    assert done.exit_code == 0, done.output
    structure = _check(out.read_text(encoding="utf-8"))
    assert 500_000 < len(structure.scripts["plotly"]) < 3_000_000
    assert out.stat().st_size < 3_500_000
    with pytest.raises(TuneError, match="journal itself"):
        write_report(faulty[0], faulty[0])
    with pytest.raises(TuneError, match="cannot be written"):
        write_report(faulty[0], tmp_path / "absent" / "page.html")


@pytest.mark.usefixtures("real_plotly")
def test_without_plotly(faulty: tuple[Path, Outcome], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(TuneError, match=r"pip install 'gguf-dyno\[report\]'"):
        write_report(faulty[0])


def test_what_disturbed_a_run_is_shown(faulty: tuple[Path, Outcome], tmp_path: Path) -> None:
    path = tmp_path / "p.yaml.journal.jsonl"
    path.write_bytes(faulty[0].read_bytes())
    assert "Disturbances of the run" not in write_report(path, tmp_path / "quiet.html").read_text()
    with journal.Journal(path) as book:
        book.append(
            {"note": "throttled", "key": "aa/p0/v0", "attempt": 0, "message": "the GPU <is> throttled"}
        )
        book.append({"note": "company", "processes": [7], "message": ["no text"]})
    text = write_report(path, tmp_path / "disturbed.html").read_text()
    assert "Disturbances of the run" in text
    assert "the GPU &lt;is&gt; throttled" in text
    assert "no text" not in text


def test_packed_journals_of_the_shipped_profiles_are_read(tmp_path: Path) -> None:
    """The checksum is the one in the profile, of what the run wrote."""
    packed = sorted(SHIPPED.glob("*.journal.jsonl.gz"))
    assert packed
    for path in packed:
        run = read(path)
        assert run.damaged == 0
        evidence = profiles.load_profile(path.with_name(path.name.removesuffix(".journal.jsonl.gz"))).evidence
        assert evidence is not None
        assert evidence.journal == f"sha256:{run.sha256}"
    mine = tmp_path / packed[0].name
    mine.write_bytes(packed[0].read_bytes())
    assert write_report(mine).name == packed[0].name.replace(".jsonl.gz", ".html")


def test_packed_journals_of_several_devices(faulty: tuple[Path, Outcome], tmp_path: Path) -> None:
    records = journal.load(faulty[0]).records
    records[0] |= {"devices": 2, "id": "one"}
    data = b"".join(journal.encode(r) for r in records)
    first = tmp_path / "p.yaml.journal.jsonl.gz"
    first.write_bytes(gzip.compress(data))
    assert read(first).absent == ["p.yaml.device-1.jsonl"]
    (tmp_path / "p.yaml.device-1.jsonl.gz").write_bytes(gzip.compress(data))
    whole = read(first)
    assert whole.absent == []
    assert {s.device for s in whole.measurements} == {0, 1}


def test_what_was_proven_in_part_is_no_near_tie(tmp_path: Path) -> None:
    path = tmp_path / "slow.yaml.journal.jsonl"
    target = SlowToStart(saturating(), 0, SimulationNoise(within=0.001, process=0.002, layout=0.0005))
    workload = short_measurements(target.surface)
    options = Options(workload, seed=0, weights=dict(target.surface.weights), budget=42.0, max_trials=400)
    outcome = _write(path, target, target.surface.space(), options)
    assert set(outcome.missed["settings"]) == {"ubatch", "threads", "threads_batch"}
    shown = _check(page.render(path)).words
    assert "threads=4, threads_batch=12, ubatch=4096 together looked" in shown
    assert "Near-ties" not in shown


@pytest.mark.parametrize(
    ("outcome", "said"),
    [
        ({"missed": {"settings": {"ubatch": 4096, "mmq_id_size": 64}, "ratio": 1.2825}},
         "ubatch=4096, mmq_id_size=64 together looked 1.282 × as fast"),
        ({"missed": {}, "unproven": True}, "the time ran out before they could be proven"),
        ({"unproven": True, "verdict": "Nothing is proven: the noise margin at the end was 46 %."}, ""),
        ({"not_proven": ["Not proven: 6 kernels.", 5]}, "Not proven: 6 kernels."),
        ({"missed": {"settings": 5, "ratio": "x"}, "unproven": False}, ""),
        ({}, ""),
    ],
)  # fmt: skip
def test_what_was_left_undone_is_said(outcome: dict[str, Any], said: str) -> None:
    assert said in left_undone(outcome)
    assert bool(left_undone(outcome)) == bool(said)


def test_the_page_begins_with_the_verdict(tmp_path: Path) -> None:
    path = tmp_path / "v.yaml.journal.jsonl"
    target = SimulatedTarget("saturating", 1)
    options = Options(Workload(64, 8), seed=1, max_trials=6)
    outcome = _write(path, target, target.surface.space(), options)
    shown = page.render(path)
    assert html.escape(verdict(outcome)) in shown[shown.index("<h1>") : shown.index('class="tiles"')]
    # Half of the page, in which a list of the machine stands, is too narrow for the table of the noise.
    assert "</div>\n<h3>Noise: the default compared with itself (A/A)</h3>" in shown


def test_the_page_tells_beside_what_a_ratio_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note = "the ratio was measured together with threads, which is now at its default"
    usual = record_of

    def settled(outcome: Outcome) -> dict[str, Any]:
        record = usual(outcome)
        record["entries"]["ubatch"]["note"] = note
        return record

    monkeypatch.setitem(globals(), "record_of", settled)
    path = tmp_path / "n.yaml.journal.jsonl"
    target = SimulatedTarget("saturating", 1)
    _write(path, target, target.surface.space(), Options(Workload(64, 8), seed=1, max_trials=14))
    assert f"ubatch: {note}." in page.render(path)


def test_if_nothing_was_tried_the_page_claims_no_comparison(tmp_path: Path) -> None:
    path = tmp_path / "v.yaml.journal.jsonl"
    target = SimulatedTarget("saturating", 1)
    _write(path, target, target.surface.space(), Options(Workload(64, 8), seed=1, budget=4.0))
    shown = page.render(path)
    assert "nothing else was tried" in shown
    assert "nothing was faster beyond" not in shown


def test_only_a_long_table_scrolls() -> None:
    """The table of a model has less than thirty rows; the last one was hidden by a scroll bar."""
    css = (Path(page.__file__).parent / "page.css").read_text()
    limited = set(re.findall(r"^\.([a-z]+) \{[^}]*max-height", css, re.MULTILINE))
    assert limited == {"tall"}
    for rows, scrolls in ((1, False), (TALL, False), (TALL + 1, True)):
        assert ("tall" in table(["a"], [["1"]] * rows)) == scrolls
