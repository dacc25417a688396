from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import optuna
import pytest
import studies
import typer
from dyno import _output
from dyno.errors import DynoError
from dyno_tuner.cli.arguments import parse_duration, usual_workload
from dyno_tuner.cli.commands import app, main
from dyno_tuner.core.errors import Interrupted, TuneError
from dyno_tuner.core.protocol import Workload
from dyno_tuner.execution.inline_executor import InlineExecutor
from dyno_tuner.output.diff import compare_profiles
from dyno_tuner.run.session import Request, run
from dyno_tuner.run.tune import Options
from dyno_tuner.targets.simulated.target import SimulatedTarget
from typer.testing import CliRunner

if TYPE_CHECKING:
    from pathlib import Path


def test_durations() -> None:
    assert parse_duration("90") == parse_duration("90s") == parse_duration("1.5m") == 90
    assert parse_duration("2h") == 7200
    for bad in ("", "x", "3 days", "-1m", "0", "1e9h"):
        with pytest.raises(typer.BadParameter):
            parse_duration(bad)


def _tune(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, list(arguments))
    error = done.exception if isinstance(done.exception, TuneError | DynoError) else ""
    return done.exit_code, done.output + str(error)


def test_wrong_usage(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF")
    assert _tune("--model", str(tmp_path / "absent.gguf"))[1].endswith("the file does not exist")
    assert _tune("--model", "https://example.org/x.gguf")[1].endswith("tune does not download models")
    assert _tune("--model", str(file), "--budget", "soon")[0] == 2
    assert "sampler 'psychic' does not exist" in _tune("--model", str(file), "--sampler", "psychic")[1]
    assert "workload" in _tune("--model", str(file), "--workload", "pp=many")[1]
    assert "more than once" in _tune("--model", str(file), "--gpu", "1,1")[1]
    assert "numbers" in _tune("--model", str(file), "--gpu", "0,")[1]
    assert "'cuda:999'" in _tune("--model", str(file), "--gpu", "999")[1]
    assert "contradict" in _tune("--model", str(file), "--gpu", "0", "--device", "cpu")[1]
    assert "threads" in _tune("--model", str(file), "--set", "thread=3")[1]
    assert "a whole number" in _tune("--model", str(file), "--set", "threads=many")[1]
    assert _tune()[0] == 2
    for words in (("--resume",), ("--out", "x.yaml", "--budget", "1m")):
        code, said = _tune(*words)
        assert (code, "--model: no model was given; give the GGUF file" in said) == (2, True), said
        assert "Commands:" not in said, "the whole help hides the error"
    code, said = _tune(str(file), "-ngl", "99")
    assert (code, "--set n_gpu_layers=VALUE" in said) == (2, True), said
    code, said = _tune(str(file), "-c", "4096")
    assert (code, "--ctx N" in said) == (2, True), said
    assert _tune("doctor", "--", "llama-server", "-ngl", "99")[0] == 0  # a line of another program


def test_a_folder_in_place_of_the_model_names_its_files(tmp_path: Path) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / "notes.txt").touch()
    code, said = _tune("--model", str(folder))
    assert (code, said) == (1, f"model {folder}: a folder without a GGUF file")
    for name in "dcba":
        (folder / f"{name}.gguf").touch()
    said = _tune("--model", str(folder))[1]
    assert said == f"model {folder}: a folder; give a file in it: a.gguf, b.gguf, c.gguf, …"


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("foo", "storage foo: not the URL of a database; give a URL such as sqlite:///tune.db"),
        ("nodatabase://x/y", "storage nodatabase://x/y: not the URL of a database"),
        ("sqlite:////nowhere/at/all/tune.db", "unable to open database file"),
        ("postgresql://user@127.0.0.1:1/db", "storage postgresql://user@127.0.0.1:1/db: "),
    ],
)
def test_a_storage_that_cannot_be_used_moves_nothing(url: str, said: str, tmp_path: Path) -> None:
    target = SimulatedTarget("saturating", 5)
    options = Options(Workload(pp=64, tg=8), seed=5, max_trials=2, rounds=2, max_rounds=2)
    request = Request("simulated", options, out=tmp_path / "p.yaml", quiet=True)
    run(request, InlineExecutor(target), target.surface.space())
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    request.storage = url
    with pytest.raises(TuneError) as caught:
        run(request, InlineExecutor(target), target.surface.space())
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("program", ["tune", "dyno tune"])
@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("--mo", "--model"),
        ("-m x.gguf --bud", "--budget"),
        ("hist", "history"),
        ("ab --force-", "--force-profile"),
    ],
)
def test_the_shell_completes_options_and_subcommands(program: str, words: str, wanted: str) -> None:
    line = f"{program} {words}"
    environment = {
        **os.environ, f"_{program.split()[0].upper()}_COMPLETE": "complete_bash", "COMP_WORDS": line,
        "COMP_CWORD": str(len(line.split()) - 1),
    }  # fmt: skip
    module = "dyno_tuner.entry" if program == "tune" else "dyno"
    done = subprocess.run(
        [sys.executable, "-m", module], env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == [wanted]
    assert done.stderr == ""


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_closed_pipe_is_no_error_message(tmp_path: Path, unbuffered: str) -> None:
    """As of `tune history | head -1`: what wrote the lines is not to complain that nobody reads them."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "dyno_tuner.entry", "history", str(tmp_path)],
            stdout=writing, stderr=subprocess.PIPE, text=True, check=False,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )  # fmt: skip
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "dyno_tuner.entry", "history", str(tmp_path)],
            stdout=full, stderr=subprocess.PIPE, text=True, check=False,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (1, f"tune: {_output.FULL}\n")


def test_a_bare_model(tmp_path: Path) -> None:
    code, said = _tune(str(tmp_path / "absent.gguf"), "--budget", "90s")
    assert (code, said.endswith("absent.gguf: the file does not exist")) == (1, True), said
    # Options may stand before it, as with dyno run.
    code, said = _tune("--budget", "90s", "--force", "--seed", "1", str(tmp_path / "absent.gguf"), "-q")
    assert (code, said.endswith("absent.gguf: the file does not exist")) == (1, True), said


@pytest.mark.parametrize("before", [(), ("--budget", "90s", "-D", "A=B.gguf", "--no-retune")])
def test_a_build_takes_a_bare_model(before: tuple[str, ...], tmp_path: Path) -> None:
    code, said = _tune("build", *before, str(tmp_path / "absent.gguf"), "--seed", "1")
    assert (code, said.endswith("absent.gguf: the file does not exist")) == (1, True), said
    code, said = _tune("build", *before, "--seed", "1")
    assert (code, "--model" in said) == (2, True), said


@pytest.mark.parametrize(
    "words",
    [
        ("a.gguf", "b.gguf"),
        ("-m", "a.gguf", "--seed", "1", "b.gguf"),
        ("--model=a.gguf", "b.gguf"),
        ("-ma.gguf", "b.gguf"),
        ("a.gguf", "--model=b.gguf"),
        ("--model=a.gguf", "-m", "b.gguf"),
        ("build", "a.gguf", "b.gguf"),
        ("build", "--model=a.gguf", "b.gguf"),
    ],
)
def test_two_models_are_one_too_many(words: tuple[str, ...]) -> None:
    code, said = _tune(*words)
    assert (code, "two models were given, a.gguf and b.gguf; give only one" in said) == (2, True), said


@pytest.mark.parametrize("budget", ["soon", "1s"])
def test_a_wrong_budget_is_told_with_its_option(budget: str) -> None:
    code, said = _tune("a.gguf", "--budget", budget)
    assert (code, f"--budget: '{budget}'" in said) == (2, True), said


def test_a_command_line_without_an_engine_is_no_subcommand(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF")
    for before in (["--model", str(file)], [], ["--engine", "llama.cpp"]):
        code, said = _tune(*before, "--", "llama-server", "-ub", "512")
        assert (code, "a command line after -- need" in said) == (2, True), said
    assert "No such command" not in _tune("--", "doctor", "--", "llama-server")[1]


@pytest.mark.parametrize("memory", ["5", "800MiB"])
def test_a_build_in_too_little_memory_is_wrong_usage(memory: str, tmp_path: Path) -> None:
    code, said = _tune("build", "--model", str(tmp_path / "none.gguf"), "--memory", memory)
    said = " ".join(said.replace("│", " ").split())
    assert (code, f"'{memory}' is" in said, "8GiB" in said) == (2, True, True), said


@pytest.mark.parametrize("option", ["--vram", "--ram"])
@pytest.mark.parametrize(("limit", "meant"), [("5", "5GiB"), ("63MiB", "16GiB")])
def test_a_limit_that_holds_no_model_is_wrong_usage(
    option: str, limit: str, meant: str, tmp_path: Path
) -> None:
    code, said = _tune(str(tmp_path / "none.gguf"), option, limit)
    said = " ".join(said.replace("│", " ").split())
    assert (code, f"{option}: '{limit}' is" in said, f"write {meant}" in said) == (2, True, True), said
    assert _tune(str(tmp_path / "none.gguf"), option, "64MiB")[0] == 1


def test_commands_for_profiles_are_commands_of_dyno() -> None:
    for name in ("show", "list", "check"):
        code, said = _tune(name, "x.yaml")
        assert (code, f"use `dyno profiles {name}`" in " ".join(said.split())) == (2, True), said
    assert "dyno profiles" not in _tune("shaw")[1]


WRONG = (
    ("--budget", "soon"), ("--workload", "pp=many"), ("--workload", "pp=0,tg=0"), ("--set", "threads=many"),
    ("--gpu", "0,"), ("--vram", "lots"),
)  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_usage_is_told_before_anything_starts(
    wrong: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cluster takes half a minute to start, and then it has to be ended, too."""
    import dyno_tuner.cli.commands as module

    def started(*args: object) -> None:
        raise AssertionError("something was started")

    monkeypatch.setattr(module, "_cluster", started)
    monkeypatch.setattr(module, "devices_of", started)
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF")
    ways: list[list[str]] = [[]] if wrong[0] == "--gpu" else [["--ray", "local"], []]
    for way in ways:
        assert _tune("--model", str(file), *way, *wrong)[0] == 2


@pytest.mark.parametrize("wrong", [w for w in WRONG if w[0] in ("--budget", "--workload", "--set")])
def test_wrong_usage_of_ab_is_told_before_anything_starts(wrong: tuple[str, str], tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF")
    assert _tune("ab", "default", "default", "--model", str(file), *wrong)[0] == 2


BEFORE = (
    ("--model", "m"), ("--workload", "nonsense"), ("--vram", "abc"), ("--seed", "0"), ("--json",), ("-q",),
    ("--no-kernels",), ("--set", "a=1"),
)  # fmt: skip


@pytest.mark.parametrize("before", BEFORE)
def test_options_before_a_subcommand_are_not_ignored(before: tuple[str, ...], tmp_path: Path) -> None:
    code, said = _tune(*before, "history", str(tmp_path))
    assert code == 2
    named = {"-q": "--quiet", "--no-kernels": "--kernels"}.get(before[0], before[0])
    assert f"{named} is an option of `tune` and" in " ".join(said.replace("│", " ").split())
    assert _tune("-v", "history", str(tmp_path))[0] == 0


def test_one_line_on_standard_error(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dyno_tuner.cli", "--model", str(tmp_path / "absent.gguf")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("tune: ")


@pytest.mark.parametrize(
    "how",
    [
        "raise KeyboardInterrupt",
        "os.kill(os.getpid(), signal.SIGINT)",
        # As modules in C do that clear what is raised while they load: then the command went on for minutes.
        "try: os.kill(os.getpid(), signal.SIGINT); time.sleep(5)\n            except BaseException: pass",
    ],
)
def test_an_interrupt_while_the_command_loads_is_one_line(how: str) -> None:
    code = (
        "import os, signal, sys, time\n"
        "class Interrupted:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'typer':\n"
        f"            {how}\n"
        "sys.meta_path.insert(0, Interrupted())\n"
        "from dyno_tuner.entry import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    said = "tune: interrupted before anything was measured\n"
    assert (done.returncode, done.stdout, done.stderr) == (130, "", said)


def test_an_interrupt_that_was_switched_off_stays_so() -> None:
    """As of a command in the background of a script."""
    code = (
        "import signal, sys\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "sys.argv = ['tune', '--version']\n"
        "from dyno_tuner.entry import main\n"
        "try: main()\n"
        "finally: assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (KeyboardInterrupt(), "interrupted; run the same command with --resume"),
        (
            Interrupted("interrupted before anything was proven; p.yaml is unchanged"),
            "p.yaml is unchanged",
        ),
    ],
)
def test_an_interrupt_of_a_tune_has_its_exit_code_and_a_line(
    raised: BaseException,
    said: str,
    tiny_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def stopped(request: object) -> None:
        raise raised

    monkeypatch.setattr("dyno_tuner.run.session.run", stopped)
    words = ["tune", "-m", str(tiny_dir / "qwen3moe-tiny.gguf"), "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130
    assert said in capsys.readouterr().err


class Stopped(InlineExecutor):
    """Ctrl-C comes while the noise is measured."""

    def measurement(self, *arguments: Any) -> Any:
        raise KeyboardInterrupt


def test_an_interrupt_before_anything_was_judged_writes_no_profile(tmp_path: Path) -> None:
    """An empty profile would hide the site's proven one."""
    target = SimulatedTarget("saturating", 5)
    request = Request(
        "simulated", Options(Workload(pp=64, tg=8), seed=5), out=tmp_path / "p.yaml", quiet=True
    )
    with pytest.raises(Interrupted) as ended:
        run(request, Stopped(target), target.surface.space())
    assert str(ended.value) == (
        "interrupted before anything was proven; no profile was written, continue with --resume. "
        f"Journal: {tmp_path / 'p.yaml.journal.jsonl'}"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["p.yaml.journal.jsonl"]


@pytest.mark.parametrize(("budget", "code"), [(4.0, 1), (60.0, 0)])
def test_a_budget_too_short_to_judge_anything_ends_with_an_error_code(
    budget: float, code: int, tmp_path: Path, tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script that goes on with the profile has to learn that there is none."""

    def simulated(request: Request) -> Any:
        target = SimulatedTarget("saturating", 5)
        options = Options(Workload(pp=64, tg=8), seed=5, budget=budget)
        made = Request("simulated", options, out=tmp_path / "p.yaml", quiet=True)
        return run(made, InlineExecutor(target), target.surface.space())

    monkeypatch.setattr("dyno_tuner.run.session.run", simulated)
    line = (str(tiny_dir / "qwen3moe-tiny.gguf"), "--device", "cpu")
    ended, said = _tune(*line)
    assert ended == code, said
    assert ("profile: no profile was written, because" in said) == bool(code)
    assert (tmp_path / "p.yaml").exists() != bool(code)
    ended, said = _tune(*line, "--json")
    assert ended == code
    assert json.loads(said)["profile"] == (None if code else str(tmp_path / "p.yaml"))


def test_an_interrupt_that_keeps_the_old_profile(tmp_path: Path) -> None:
    """The run ends as interrupted ones do, and what stood there stays."""
    target = SimulatedTarget("saturating", 5)
    options = Options(Workload(pp=64, tg=8), seed=5, max_trials=4, rounds=2, max_rounds=2)
    request = Request("simulated", options, out=tmp_path / "p.yaml", quiet=True)
    run(request, InlineExecutor(target), target.surface.space())
    before = (tmp_path / "p.yaml").read_bytes()
    with pytest.raises(Interrupted, match="is unchanged, continue with --resume"):
        run(request, Stopped(target), target.surface.space())
    assert (tmp_path / "p.yaml").read_bytes() == before


@pytest.mark.parametrize(
    ("module", "said"), [(["dyno_tuner.cli"], "Usage: tune "), (["dyno", "tune"], "Usage: dyno tune ")]
)
def test_help_names_the_program(module: list[str], said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *module, "--help"], capture_output=True, text=True, check=True
    )
    assert done.stdout.lstrip().startswith(said)


def _session(out: Path, seed: int, storage: str | None = None) -> None:
    target = SimulatedTarget("saturating", seed)
    options = Options(Workload(64, 8), seed=seed, max_trials=12, rounds=2, max_rounds=2)
    request = Request("simulated", options, out=out, quiet=True, storage=storage)
    run(request, InlineExecutor(target), target.surface.space())


def test_diff_of_two_profiles(tmp_path: Path) -> None:
    a, b = tmp_path / "a.yaml", tmp_path / "b.yaml"
    _session(a, 2)
    b.write_text(a.read_text())
    assert all(row.verdict == "equal" for row in compare_profiles(a, b))
    b.write_text(a.read_text().replace("value: 2048", "value: 1024"))
    assert a.read_text() != b.read_text(), "the surface has a best u-batch of 2048"
    assert [r.verdict for r in compare_profiles(a, b) if r.entry == "settings.ubatch"] == ["differs"]
    # A setting for which a tune had no time runs the default.
    b.write_text(a.read_text().replace("settings:\n", "settings:\n  kv_type_k: default\n", 1))
    rows = {row.entry: row for row in compare_profiles(a, b)}
    assert (rows["settings.kv_type_k"].first, rows["settings.kv_type_k"].second) == ("(absent)", "default")
    assert all(row.verdict == "equal" for row in rows.values())
    b.write_text(a.read_text().replace("value: 2048", "value: 1024"))
    same = CliRunner().invoke(app, ["diff", str(a), str(a)])
    assert same.exit_code == 0
    (line,) = same.stdout.splitlines()  # equal entries are only counted
    assert line.endswith("entries agree")
    every = CliRunner().invoke(app, ["diff", str(a), str(a), "--all"]).stdout.splitlines()
    assert len(every) == 1 + len(compare_profiles(a, a))
    assert every[0].startswith("equal ")
    differs = CliRunner().invoke(app, ["diff", str(a), str(b)]).stdout.splitlines()
    assert any(row.startswith("differs   settings.ubatch: 2048 | 1024") for row in differs)
    assert CliRunner().invoke(app, ["diff", str(a), str(b), "--json"]).exit_code == 1


def test_the_study_can_be_read_in_an_optuna_storage(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'study.db'}"
    _session(tmp_path / "p.yaml", 1, url)
    storage = studies.storage(url)
    (name,) = optuna.get_all_study_names(storage)
    study = optuna.load_study(study_name=name, storage=storage)
    assert len(study.trials) >= 12  # with the default, which the others are ratios to
    assert study.best_value > 1.05
    assert set(study.best_trial.params) == {"ubatch", "threads", "threads_batch"}
    values = {k.name: k.values for k in SimulatedTarget("saturating", 1).knobs()}
    for trial in study.trials:  # as a dashboard shows them
        assert all(value in values[name] for name, value in trial.params.items())
    assert study.trials[0].params["ubatch"] == 512, "the default"


def test_a_storage_that_cannot_be_reached_is_said(tmp_path: Path) -> None:
    with pytest.raises(TuneError, match="storage"):
        _session(tmp_path / "p.yaml", 1, f"sqlite:///{tmp_path}/absent/study.db")


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TuneError, match="cannot be made"):
        _session(tmp_path / "file" / "p.yaml", 1)
    with pytest.raises(TuneError, match="is a folder"):
        _session(tmp_path, 1)


@pytest.mark.parametrize(
    ("device", "budget", "bytes_", "pp", "tg"),
    [
        ("cpu", 120.0, 256 << 20, 128, 16),
        ("cpu", 299.0, 300 << 20, 128, 16),
        ("cpu", 300.0, 300 << 20, 512, 64),
        ("cpu", None, 300 << 20, 512, 64),
        ("cpu", 120.0, 255 << 20, 512, 64),
        ("cuda:0", 120.0, 300 << 20, 4096, 128),
    ],
)
def test_a_short_budget_measures_short_runs_of_a_large_file(
    device: str, budget: float | None, bytes_: int, pp: int, tg: int, tmp_path: Path
) -> None:
    """`--budget 2m` once measured nothing of a file of 335 MB: a measurement took 11 s."""
    model = tmp_path / "x.gguf"
    with model.open("wb") as file:
        file.truncate(bytes_)
    assert usual_workload(device, budget, str(model)) == Workload(pp=pp, tg=tg)
    assert usual_workload("cpu", budget, str(tmp_path)) == Workload(pp=512, tg=64)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["x.gguf", "-p", "512", "-n", "128"],
            "-p: a tune takes lengths as a workload, such as --workload pp=512",
        ),
        (
            ["x.gguf", "--profile", "x.yaml"],
            "--out FILE names it, and `tune verify FILE` measures an old one",
        ),
        (["x.gguf", "--virtual-device", "cpu:1"], "--virtual-device has no effect unless --device names it"),
        (["."], ". is a folder; give the path of a .gguf file in it"),
        ([__file__], "is neither a command nor a .gguf file; to tune it, give --model"),
        (
            ["me/My-Model-GGUF"],
            "me/My-Model-GGUF is neither a command nor a file; give the path of a .gguf file",
        ),
        (["verfy"], "No such command 'verfy'. Did you mean 'verify'?"),
    ],
)
def test_words_of_other_commands_are_answered(words: list[str], said: str) -> None:
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2
    assert said in " ".join(done.output.split())
