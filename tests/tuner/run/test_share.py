"""`tune share` and `tune import`: a row tells nothing of its owner, and no gain of it counts unmeasured."""

from __future__ import annotations

import dataclasses
import datetime
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from conftest_tuner import WORKLOAD, Simulated
from dyno import profiles
from dyno_tuner.cli import share_command
from dyno_tuner.cli.commands import app, main
from dyno_tuner.core.errors import BudgetError, TuneError
from dyno_tuner.core.intervals import Estimate
from dyno_tuner.core.workload import Workload
from dyno_tuner.execution.inline_executor import InlineExecutor
from dyno_tuner.output.emit import Made, workload_of
from dyno_tuner.output.emit import profile_of as written_of
from dyno_tuner.run import adopt as adopt_module
from dyno_tuner.run.adopt import Adopted, adopt
from dyno_tuner.run.session import Request, run
from dyno_tuner.run.share import FORMAT, digest, profile_of, read_row, row_of
from dyno_tuner.run.tune import Options
from dyno_tuner.run.verify import Verdict, verify
from dyno_tuner.targets.simulated.surfaces import SimulatedOp, saturating
from dyno_tuner.targets.simulated.target import SimulatedTarget
from typer.testing import CliRunner

if TYPE_CHECKING:
    from collections.abc import Callable

ALL = sorted((Path(__file__).resolve().parents[3] / "profiles").glob("*.yaml"))
SHIPPED = [path for path in ALL if dict(profiles.load_profile(path).entries())]  # with entries
PRIVATE = re.compile(r"/|\\|\.gguf|tune --|Xeon|H200|NVIDIA|@|~")


@pytest.mark.parametrize("path", ALL, ids=[p.stem for p in ALL])
def test_a_row_is_read_back_and_tells_nothing_of_its_owner(path: Path) -> None:
    profile = profiles.load_profile(path)
    if path not in SHIPPED:
        with pytest.raises(TuneError, match="nothing to share"):
            row_of(profile)
        return
    text = json.dumps(row_of(profile))
    assert PRIVATE.search(text) is None
    again = profile_of(read_row(text))
    assert again.match.device == profile.match.device
    assert again.match.model == profile.match.model
    assert dict(again.entries()).keys() == dict(profile.entries()).keys()
    assert again.evidence is not None
    assert profile.evidence is not None
    assert again.evidence.gain == profile.evidence.gain


def test_paths_of_build_switches_stay_at_home() -> None:
    profile = profiles.load_profile(SHIPPED[0])
    engine = profile.match.engine.model_copy(update={"build": {"GGML_CUDA_PROFILE": "/home/me/p.yaml"}})
    match = profile.match.model_copy(update={"engine": engine})
    row = row_of(profile.model_copy(update={"match": match}))
    assert row["engine"]["build"] == {"GGML_CUDA_PROFILE": True}


def changed(row: dict[str, Any], sign: bool, **more: Any) -> str:
    other = {**row, **more}
    return json.dumps({**other, "sha256": digest(other)} if sign else other)


def test_bad_rows_are_errors() -> None:
    row = row_of(profiles.load_profile(SHIPPED[0]))
    for text, said in (
        ("", "not a row, as `tune share PROFILE` prints one"),
        ("[]", "its format is 'list'"),
        ("{}", "its format is None"),
        ("[" * 100_000, "not a row"),
        (changed(row, False, gain={}), "was changed"),
        (changed(row, False, tuner="9"), "was changed"),
        (json.dumps(row).replace('"ratio": ', '"ratio": NaN, "x": ', 1), "that cannot be read|was changed"),
        (" " * (2 << 20), "at most"),
    ):
        with pytest.raises(TuneError, match=said):
            read_row(text)
    for text, said in (
        (changed(row, True, settings={"ubatchh": {"value": 1}}), "ubatchh"),
        (changed(row, True, device={"kind": "cuda"}), "device"),
        (changed(row, True, model=3), "model"),
        (json.dumps({"format": FORMAT, "sha256": digest({"format": FORMAT})}), "incomplete"),
    ):
        with pytest.raises(TuneError, match=said):
            profile_of(read_row(text))


def test_a_profile_without_gains_has_no_row() -> None:
    profile = profiles.load_profile(SHIPPED[0])
    with pytest.raises(TuneError, match="nothing to share"):
        row_of(profile.model_copy(update={"settings": {"ubatch": "default"}, "kernels": {}}))
    with pytest.raises(TuneError, match="no measured gain"):
        row_of(profile.model_copy(update={"evidence": None}))


# ---- import ----


def surface(tg: float) -> Any:
    op = SimulatedOp("matmul a", "tg", 1.6, lambda settings: {"tg": tg})
    return dataclasses.replace(saturating(), ops=(op,))


@pytest.fixture(scope="module")
def row(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What a stranger's machine found: a u-batch and a kernel."""
    there = surface(1.15)
    options = Options(WORKLOAD, seed=1, max_trials=20, rounds=3, max_rounds=3, kernels=True)
    request = Request("m", options, out=tmp_path_factory.mktemp("s") / "p.yaml", quiet=True)
    result = run(request, InlineExecutor(SimulatedTarget(there, 1)), there.space())
    return json.dumps(row_of(profiles.load_profile(result.path)))


def measured_on(here: Any) -> Callable[[Path, float | None], Any]:
    return lambda path, seconds: verify(
        path, budget=seconds, quiet=True, executor=InlineExecutor(SimulatedTarget(here, 7)),
        options={"rounds": 3, "max_rounds": 4},
    )  # fmt: skip


def test_only_what_gains_here_is_kept(row: str, tmp_path: Path) -> None:
    claimed = profile_of(read_row(row))
    result = adopt(claimed, tmp_path / "row.yaml", claimed.match, "tune import", measured_on(surface(1.0)))
    assert result.profile is not None
    kept = dict(result.profile.entries())
    assert "settings.ubatch" in kept
    assert not any(name.startswith("kernels.") for name in kept), "that kernel gains nothing on this machine"
    entry = result.profile.settings["ubatch"]
    assert isinstance(entry, profiles.SettingEntry)
    (unit,) = [v for v in result.verdicts if v.entry == "settings.ubatch"]
    assert unit.measured is not None
    assert entry.ratio == pytest.approx(unit.measured.ratio, abs=1e-4), "the ratio is this machine's"
    profiles.save_profile(result.profile, tmp_path / "own.yaml")
    assert profiles.load_profile(tmp_path / "own.yaml") == result.profile


class Verifies:
    """Verdicts that a machine gives, one list for each pass; the profiles that it was given are kept."""

    def __init__(self, *passes: dict[str, tuple[str, bool]]) -> None:
        self.passes, self.asked = list(passes), list[set[str]]()
        self.end: TuneError = BudgetError("too short for two rounds", "give --budget 2m")  # of the next pass
        self.budgets: list[float | None] = []
        self.now = 1000.0  # each pass takes 50 s

    def __call__(self, path: Path, seconds: float | None) -> tuple[list[Verdict], dict[str, Estimate]]:
        self.budgets.append(seconds)
        self.now += 50.0
        if not self.passes:
            raise self.end
        self.asked.append(set(dict(profiles.load_profile(path).entries())))
        number = len(self.asked)
        recorded = 1.6 if number == 1 else 1 + (number - 1) / 10  # the first pass writes its own ratios
        verdicts = [
            Verdict(entry, verdict, "", recorded, Estimate(1 + number / 10, 1.05, 1.9, 6), proven)
            for entry, (verdict, proven) in self.passes.pop(0).items()
        ]
        return verdicts, {"pp": Estimate(1 + number / 10, 1.05, 1.9, 6)}


TWO = {"ubatch": {"value": 2048}, "threads": {"value": 4}}


def test_what_is_left_of_a_row_is_measured_as_a_whole(tmp_path: Path) -> None:
    """The gain of a profile is its own, not the gain of a row with entries that were dropped."""
    claimed = profile_of(row_of(profiles.load_profile(SHIPPED[0]))).model_copy(update={"kernels": {}})
    claimed = claimed.model_validate({**claimed.model_dump(by_alias=True), "settings": TWO})
    machine = Verifies(
        {"settings.ubatch": ("keep", True), "settings.threads": ("harmful", False)},
        {"settings.ubatch": ("keep", True)},
    )
    result = adopt(claimed, tmp_path / "row.yaml", claimed.match, "tune import", machine)
    assert machine.asked == [{"settings.ubatch", "settings.threads"}, {"settings.ubatch"}]
    assert result.profile is not None
    assert result.profile.evidence is not None
    (gain,) = result.profile.evidence.gain.values()
    assert gain.ratio == 1.2
    assert {v.entry: v.verdict for v in result.verdicts} == {
        "settings.ubatch": "keep", "settings.threads": "harmful",
    }  # fmt: skip
    entry = result.profile.settings["ubatch"]
    assert isinstance(entry, profiles.SettingEntry)
    assert entry.ratio == 1.2
    assert {v.recorded for v in result.verdicts} == {1.6}, "as the row has it, not this machine's first pass"


def test_all_passes_of_an_import_share_one_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pass had the whole, so an import took as many budgets as entries fell out one by one."""
    three = {**TWO, "threads_batch": {"value": 4}}
    claimed = profile_of(row_of(profiles.load_profile(SHIPPED[0]))).model_copy(update={"kernels": {}})
    claimed = claimed.model_validate({**claimed.model_dump(by_alias=True), "settings": three})
    keep, drop = ("keep", True), ("harmful", False)
    passes = [
        {"settings.ubatch": keep, "settings.threads": keep, "settings.threads_batch": drop},
        {"settings.ubatch": keep, "settings.threads": drop},
        {"settings.ubatch": keep},
    ]

    def adopted(budget: float | None, passes: list[Any]) -> tuple[Adopted, Verifies]:
        machine = Verifies(*passes)
        monkeypatch.setattr(adopt_module.time, "monotonic", lambda: machine.now)
        return adopt(claimed, tmp_path / "r.yaml", claimed.match, "", machine, budget), machine

    result, machine = adopted(300.0, passes)
    assert result.profile is not None
    assert machine.budgets == [pytest.approx(0.6 * 300), pytest.approx(0.6 * 250), pytest.approx(200)]
    assert adopted(None, passes)[1].budgets == [None, None, None]
    cut, _ = adopted(100.0, passes[:2])
    assert cut.profile is None, "the remaining entries were not measured together"
    assert {v.entry: v.verdict for v in cut.verdicts}["settings.ubatch"] == "keep"
    assert share_command._told(cut, tmp_path) == (
        "no profile was written: the import could not measure the remaining entries together (too short for "
        "two rounds); give a longer --budget"
    )
    # A pass has a part of the budget, so the budget that it names is no remedy.
    with pytest.raises(BudgetError, match=r"^too short for two rounds; give a longer --budget$"):
        adopted(100.0, [])


def test_a_busy_machine_is_not_answered_by_a_longer_budget(tmp_path: Path) -> None:
    claimed = profile_of(row_of(profiles.load_profile(SHIPPED[0]))).model_copy(update={"kernels": {}})
    claimed = claimed.model_validate({**claimed.model_dump(by_alias=True), "settings": TWO})
    machine = Verifies({"settings.ubatch": ("keep", True), "settings.threads": ("harmful", False)})
    machine.end = TuneError("CPUs were busy; stop these programs and verify again")
    cut = adopt(claimed, tmp_path / "r.yaml", claimed.match, "", machine)
    assert share_command._told(cut, tmp_path) == (
        "no profile was written: the import could not measure the remaining entries together (CPUs were "
        "busy; stop these programs and verify again); import again"
    )


@pytest.mark.parametrize(
    ("verdict", "line"),
    [
        (
            Verdict("settings.ubatch", "unclear", "noise is 41 %", 1.161, Estimate(0.946, 0.9, 1.0, 4)),
            "unclear     settings.ubatch: 0.946 × on this machine, 1.161 × in the row; noise is 41 %",
        ),
        (
            Verdict("settings.ubatch", "unsupported", "no such setting"),
            "unsupported settings.ubatch: no such setting",
        ),
        (Verdict("settings.ubatch", "keep", "", 1.1), "keep        settings.ubatch: 1.100 × in the row"),
    ],
)
def test_a_line_separates_ratios_from_the_reason(verdict: Verdict, line: str) -> None:
    assert share_command._line(verdict) == line


def test_a_row_without_a_proven_entry_names_no_profile(
    tmp_path: Path, trained_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Entries that today's noise hides are kept by `tune verify`, and no profile is written for them."""
    cpu = next(p for p in SHIPPED if p.stem.startswith("xeon"))
    claimed = profiles.load_profile(cpu)
    entries = [entry for entry, _ in claimed.entries()]
    found = [Verdict(entry, "keep", "as recorded", 1.1, None, proven=False) for entry in entries]
    monkeypatch.setattr(share_command, "adopt", lambda *_: Adopted(None, found, {}))
    row, out = tmp_path / "row.json", tmp_path / "new.yaml"
    row.write_text(json.dumps(row_of(claimed)))
    done = CliRunner().invoke(app, ["import", str(row), "--model", str(trained_model), "--out", str(out)])
    assert done.exit_code == 1
    assert str(out) not in done.output
    assert "the rounds proved no entry on this machine; give a longer --budget" in done.output
    assert not out.exists()


@pytest.mark.parametrize(
    "text",
    ["chat", "rag", "pp=64:9,512;tg=8,depth=0,32", "serve:concurrency=3,pp=32,tg=6,text=/home/me/notes.txt"],
)
def test_a_row_tells_its_workload(text: str) -> None:
    """A mix with its weights, the load of a server without the name of its text."""
    workload = Workload.parse(text)
    run_ = Simulated("saturating", 1)
    made = Made(workload, 1, "tune", None, "m.gguf", datetime.date(2026, 11, 20))
    outcome = dataclasses.replace(
        run_.outcome,
        baseline={m: 100.0 + n for n, m in enumerate(workload.metrics)}, tuned={},
        gain={m: Estimate(1.5, 1.4, 1.6, 6) for m in workload.metrics},
        margin=dict.fromkeys(workload.metrics, 0.01),
    )  # fmt: skip
    written = written_of(outcome, SimulatedTarget(run_.surface).describe(), made)
    sent = json.dumps(row_of(written), sort_keys=True)
    assert "notes" not in sent
    found = workload_of(profile_of(read_row(sent)))
    if workload.served is None:
        assert found == workload
    else:
        assert found.served == dataclasses.replace(workload.served, text=None)


def test_gains_of_another_workload_are_refused() -> None:
    """A row from before mixes were told whole: its gains are of measures that its workload does not have."""
    row = row_of(profiles.load_profile(next(p for p in SHIPPED if p.stem.startswith("xeon"))))
    gain = dict.fromkeys(("pp512", "tg64", "tg64@d4096"), next(iter(row["gain"].values())))
    with pytest.raises(TuneError, match="does not give the workload of its gain of tg64@d4096"):
        profile_of(json.loads(changed(row, True, gain=gain)))
    work = {**row["workload"], "weights": [1.0, 3.0], "metrics": ["pp512"]}
    with pytest.raises(TuneError, match=r"workload\.metrics"):
        profile_of(json.loads(changed(row, True, workload=work)))
    work["metrics"] = sorted(row["gain"])
    with pytest.raises(TuneError, match="3 weights for 2 measures"):
        profile_of(json.loads(changed(row, True, workload={**work, "weights": [1.0, 3.0, 1.0]})))


@pytest.mark.parametrize(
    ("data", "said"), [(b"\xff\xfe", "is not a row: 'utf-8'"), (b" " * (2 << 20), "at most")]
)
def test_a_file_that_is_no_text_is_named(data: bytes, said: str, tmp_path: Path, trained_model: Path) -> None:
    path = tmp_path / "row.json"
    path.write_bytes(data)
    for name, given in ((str(path), None), ("-", data)):
        done = CliRunner().invoke(app, ["import", name, "--model", str(trained_model)], input=given)
        assert isinstance(done.exception, TuneError)
        assert said in str(done.exception)


def test_a_place_that_cannot_be_written_is_refused_before_any_work(
    row: str, tmp_path: Path, trained_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(share_command, "adopt", lambda *_: pytest.fail("measured"))
    file = tmp_path / "row.json"
    file.write_text(row)
    words = ["import", str(file), "--model", str(trained_model), "--out", str(file / "p.yaml")]
    done = CliRunner().invoke(app, words)
    assert f"the profile's folder {file} cannot be made" in str(done.exception)


def test_a_row_of_another_model_or_device_is_refused(row: str, tmp_path: Path) -> None:
    claimed = profile_of(read_row(row))
    never: Callable[[Path], Any] = lambda path: pytest.fail("nothing may be measured")  # noqa: E731
    model = claimed.match.model.model_copy(update={"layers": 99})
    here = claimed.match.model_copy(update={"model": model})
    with pytest.raises(TuneError, match="another model: layers"):
        adopt(claimed, tmp_path / "r.yaml", here, "", never)
    cuda = profiles.load_profile(next(p for p in SHIPPED if p.stem.startswith("h200"))).match.device
    here = claimed.match.model_copy(update={"device": cuda})
    with pytest.raises(TuneError, match="not for this machine"):
        adopt(claimed, tmp_path / "r.yaml", here, "", never)


def test_a_row_that_is_not_there_is_named_in_plain_words(
    tmp_path: Path, trained_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = tmp_path / "absent.json"
    monkeypatch.setattr("sys.argv", ["tune", "import", str(row), "--model", str(trained_model)])
    monkeypatch.setattr("signal.signal", lambda *_: None)  # of this process, which runs further tests
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    assert capsys.readouterr().err == f"tune: {row}: No such file or directory\n"


def test_the_commands(tmp_path: Path, trained_model: Path) -> None:
    cpu = next(p for p in SHIPPED if p.stem.startswith("xeon"))
    out = tmp_path / "row.json"
    assert CliRunner().invoke(app, ["share", str(cpu), "--out", str(out)]).exit_code == 0
    printed = CliRunner().invoke(app, ["share", str(cpu)])
    assert read_row(printed.stdout) == read_row(out.read_text())
    out.write_text(out.read_text().replace("1.16", "9.99"))
    for words in (["--model", str(trained_model)], [str(trained_model)]):
        done = CliRunner().invoke(app, ["import", str(out), *words])
        assert (done.exit_code, "was changed" in str(done.exception)) == (1, True), done.output
    there = tmp_path / "there.yaml"
    there.write_text("mine")
    done = CliRunner().invoke(
        app, ["import", "-", "--model", str(trained_model), "--out", str(there)], input=printed.stdout
    )
    assert "already exists" in str(done.exception)
    assert there.read_text() == "mine"
