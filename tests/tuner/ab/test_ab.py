"""`tune ab`: the verdict against known truth, and every kind of side."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from dyno import profiles
from dyno_tuner.ab import child, dyno_side
from dyno_tuner.ab.compare import FASTER, SAME, SLOWER, Options, TooEarly, compare, judge
from dyno_tuner.ab.dyno_side import DynoSide
from dyno_tuner.ab.gpu_memory import GpuMemory
from dyno_tuner.ab.render import markdown, to_dict
from dyno_tuner.ab.revision import build, commit_of
from dyno_tuner.ab.run import Run
from dyno_tuner.ab.sides import Given, make_side
from dyno_tuner.cli import ab_command, arguments
from dyno_tuner.cli.commands import app
from dyno_tuner.core.errors import TuneError
from dyno_tuner.core.protocol import Workload
from dyno_tuner.targets.ggml import process
from fake_engines import fake
from typer.testing import CliRunner

WORK = Workload(pp=64, tg=8)


class Simulated:
    """Rates with known truth: `effect` is B's true ratio on pp; tg is the same on both sides."""

    def __init__(self, seed: int, effect: float, between: float = 0.01, drift: float = 0.0) -> None:
        self.rng = np.random.default_rng(seed)
        self.effect, self.between, self.drift = effect, between, drift
        self.order: list[str] = []

    def __call__(self, name: str) -> Run:
        slow = np.exp(-self.drift * len(self.order))
        self.order.append(name)
        process = self.rng.normal(0, self.between, 2)
        within = self.rng.normal(0, 0.004, (2, 3))
        level = {"pp": 400.0 * (self.effect if name == "B" else 1.0), "tg": 80.0}
        return Run(
            {m: tuple(level[m] * slow * np.exp(process[i] + within[i])) for i, m in enumerate(level)}, 64.0
        )


def _verdicts(effect: float, seeds: int, drift: float = 0.0) -> list[tuple[str, str]]:
    found = []
    for seed in range(seeds):
        result = compare(Simulated(seed, effect, drift=drift), Options(WORK), lambda line: None)
        found.append((result.metrics["pp64"].verdict, result.metrics["tg8"].verdict))
    return found


@pytest.mark.parametrize("drift", [0.0, 0.004])  # the second: 10 % over the run
def test_what_is_equal_is_called_equal(drift: float) -> None:
    found = _verdicts(1.0, 100, drift)
    assert sum(v == (SAME, SAME) for v in found) >= 95


def test_what_differs_is_found() -> None:
    assert sum(v == (FASTER, SAME) for v in _verdicts(1.05, 40)) >= 38
    assert sum(v == (SLOWER, SAME) for v in _verdicts(0.95, 40)) >= 38


def test_less_than_the_least_is_no_difference() -> None:
    runs = [{"A": [Run({"pp": (100.0,)})] * 2, "B": [Run({"pp": (100.8,)})] * 2}] * 3
    metric = judge(runs, Options(Workload(pp=8, tg=0))).metrics["pp8"]
    assert (metric.verdict, metric.margin, round(metric.ratio.ratio, 3)) == (SAME, 0.01, 1.008)
    assert judge(runs, Options(Workload(pp=8, tg=0), least=0.005)).verdict == FASTER


def test_a_mix_is_judged_by_its_parts_and_as_a_whole() -> None:
    """B gains 30 % on one part and loses 10 % on another that counts twice."""
    workload = Workload.parse("pp=64,weight=1; tg=8,depth=32,weight=2")
    truth = {"pp64": 1.3, "tg8@d32": 0.9}
    rng = np.random.default_rng(5)

    def measure(name: str) -> Run:
        noise = rng.normal(0, 0.002, (2, 3))
        level = {m: 100.0 * (r if name == "B" else 1.0) for m, r in truth.items()}
        return Run({m: tuple(level[m] * np.exp(noise[i])) for i, m in enumerate(level)})

    result = compare(measure, Options(workload), lambda line: None)
    assert {n: m.verdict for n, m in result.metrics.items()} == {"pp64": FASTER, "tg8@d32": SLOWER}
    assert result.objective is not None
    assert result.objective.ratio.ratio == pytest.approx((1.3 * 0.9**2) ** (1 / 3), rel=0.005)
    assert result.objective.verdict == FASTER
    assert result.verdict == "mixed"
    facts = {s: {"engine": "dyno", "settings": {}} for s in "ab"} | {
        "model": "m", "device": "d", "workload": str(workload), "command": "tune ab",
    }  # fmt: skip
    assert "weighted mean of the ratios | | | 1.0" in markdown(result, None, facts, "")
    assert to_dict(result, None, facts)["objective"]["verdict"] == FASTER


def test_every_part_of_a_mix_is_run_at_its_depth(model: str) -> None:
    workload = Workload.parse("pp=16,32:2,tg=2,depth=0,8")
    run = DynoSide("A", model).run(workload)
    assert set(run.rates) == set(workload.metrics)
    assert len(run.rates) == 6
    assert all(len(rates) == 3 and min(rates) > 0 for rates in run.rates.values())


def test_rounds_go_there_and_back_and_can_be_stopped() -> None:
    simulated = Simulated(0, 1.0)
    assert compare(simulated, Options(WORK, rounds=3), lambda line: None).rounds == 3
    assert "".join(simulated.order) == "A" + "ABBA" * 3

    def stops(after: int) -> Simulated:
        class Stops(Simulated):
            def __call__(self, name: str) -> Run:
                if len(self.order) == after:
                    raise KeyboardInterrupt
                return super().__call__(name)

        return Stops(0, 1.0)

    cut = compare(stops(11), Options(WORK), lambda line: None)
    assert (cut.rounds, cut.interrupted) == (2, True)
    with pytest.raises(TooEarly, match="after 1 rounds"):
        compare(stops(6), Options(WORK), lambda line: None)


def test_an_early_interrupt_has_its_exit_code(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(self: DynoSide, workload: Workload) -> Run:
        raise KeyboardInterrupt

    monkeypatch.setattr(DynoSide, "run", stopped)
    code, text = _ab("default", "default", "-m", model, "--no-answers", "--device", "cpu")
    assert (code, "interrupted after 0 rounds" in text) == (130, True), text


@pytest.fixture
def model(tiny_dir: Path) -> str:
    return str(next(iter(sorted(tiny_dir.glob("*qwen3moe*.gguf")))))


def _ab(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["ab", "--workload", "pp=64,tg=8", "--rounds", "2", "-q", *arguments])
    error = done.exception if isinstance(done.exception, TuneError) else ""
    return done.exit_code, done.output + str(error)


def test_the_profile_of_another_model_is_used_only_if_it_is_forced(model: str) -> None:
    other = next((Path(__file__).parents[3] / "profiles").glob("xeon-*pycode-moe*.yaml"))
    work = Workload(pp=16, tg=2)
    with pytest.raises(TuneError, match=r"belongs to another model.*--force-profile"):
        DynoSide("B", model, profile=other).run(work)
    side = DynoSide("B", model, profile=other, force=True)
    assert set(side.run(work).rates) == {"pp", "tg"}
    assert "--force-profile" in _ab("--help")[1]
    code, said = _ab("default", "x.yaml", "-m", str(Path(model).parent), "--force-profile")
    assert (code, "a folder; give a file in it: " in said) == (1, True), said


@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        ([], 0, "no difference"),
        (["--flags-b", "-ub 64"], 0, "**faster**"),
        (["--flags-a", "-ub 64"], 3, "**slower**"),
        (["--flags-b", "-ub 128"], 4, "answers changed"),
        (["--flags-b", "-ub 128", "--allow-approx", "0.01"], 0, "no difference"),
        (["--flags-b", "-ub 128", "--no-answers"], 0, "no difference"),
        (["--workload", "pp=64,128:2,tg=8"], 0, "weighted mean of the ratios"),
    ],
)
def test_two_sets_of_flags(
    tmp_path: Path, model: str, flags: list[str], code: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A process that ends before it was looked at has no memory of its own, unless it used more than this one.
    monkeypatch.setattr(process, "resident_peak", lambda pid="self": 1.0)
    folder = str(fake(tmp_path / "b", "llama.cpp-0c1e570", wrong="-ub 128"))
    found, text = _ab(folder, folder, "-m", model, *flags, "--", "-t", "2")
    assert (found, said in text) == (code, True), text
    assert "| pp64 (t/s) |" in text
    assert "memory, host" in text


def test_two_engines_as_json(tmp_path: Path, model: str) -> None:
    main, ik = (
        fake(tmp_path / "a", "llama.cpp-0c1e570", wrong="-ub 999"),
        fake(tmp_path / "b", "ik_llama.cpp-4840", wrong="-ub 999"),
    )
    table = tmp_path / "table.md"
    code, text = _ab(str(main), str(ik / "llama-bench"), "-m", model, "--json", "--out", str(table))
    told = json.loads(text)
    assert code == 0
    assert (told["a"]["engine"], told["b"]["engine"]) == ("llama.cpp", "ik_llama.cpp")
    assert (told["verdict"], told["rounds"]) == (SAME, 2)
    assert set(told["metrics"]) == {"pp64", "tg8"}
    assert told["answers"]["b"]["mean_kld"] == pytest.approx(7.1e-5)
    assert len(told["samples"]["A"]["pp"]) == 4
    assert told["command"] in table.read_text()


def test_a_profile_of_another_engine(tmp_path: Path, model: str) -> None:
    folder = fake(tmp_path / "b", "llama.cpp-0c1e570")
    path = tmp_path / "p.yaml"
    profiles.save_profile(
        profiles.Profile.model_validate({
            "schema": 1, "label": "x",
            "match": {
                "device": {"kind": "cpu", "isa": "avx2", "cores": 2, "memory_mib": 1000},
                "model": {"architecture": "llama", "layers": 1, "embedding": 8, "types": {"F32": 1.0}},
                "engine": {"name": "llama.cpp", "version": "1"},
            },
            "settings": {"ubatch": {"value": 64}, "flash_attention": "default"},
            "provenance": {
                "tuner": "1", "date": "2026-11-20", "command": "tune -- llama-server -fa off -t 1",
            },
        }),
        path,
    )  # fmt: skip
    code, text = _ab(str(folder), str(path), "-m", model, "--bin", str(folder))
    assert (code, "**faster**" in text) == (0, True), text
    assert "ubatch=64" in text
    assert "threads=1" in text  # of the command line that it was tuned from
    assert "flash_attention=False" not in text  # which the profile has put back
    with pytest.raises(TuneError, match="give --bin"):
        make_side("B", str(path), Given(model), "", print)


def test_dyno_runs_and_answers(tmp_path: Path, model: str) -> None:
    side = DynoSide("A", model, settings={"threads": 1, "threads_batch": 1})
    run = side.run(Workload(pp=16, tg=2, depth=4))
    assert {m: len(r) for m, r in run.rates.items()} == {"pp": 3, "tg": 3}
    assert (run.host_mib or 0) > 20
    mine = side.answers(tmp_path, first=True)
    other = DynoSide("B", model, settings={"kv_type_k": "q8_0", "kv_type_v": "q8_0"}).answers(
        tmp_path, first=False
    )
    assert mine is not None
    assert other is not None
    assert 0 <= mine.mean_kld < other.mean_kld
    assert mine.tokens == other.tokens == 2048
    with pytest.raises(TuneError, match=r"side A: .*ubatch"):
        DynoSide("A", model, settings={"ubatch": -1}).run(Workload(pp=8, tg=0))


class Build:
    """The engine of one build, which notes what it is asked; an older one has its hooks itself."""

    def __init__(self, older: bool) -> None:
        self.asked: list[str] = []
        hooks = SimpleNamespace(draws_on_device=True, greedy_after=lambda _: self.asked.append("greedy"))
        if older:
            vars(self).update(vars(hooks))
        else:
            self.diagnostics = hooks

    def reset(self) -> None:
        self.asked.append("reset")


@pytest.mark.parametrize("older", [True, False])
def test_generating_draws_where_the_build_does(older: bool) -> None:
    build = Build(older)
    child.one(build, {"vocab": 9}, {"kind": "tg", "tokens": 3, "depth": 0}, 0)
    assert build.asked == ["reset", "greedy"]


_PACKAGE = """
class Engine:
    def __init__(self, path, **settings): self.settings = settings
    def __enter__(self): return self
    def __exit__(self, *error): pass
    def reset(self): pass
    def logits(self, tokens, **how): return [[0.0]]
__version__ = "0.0.9"
"""
_CMAKE = """cmake_minimum_required(VERSION 3.20)
project(sample LANGUAGES NONE)
if(BREAK)
  message(FATAL_ERROR "broken on purpose")
endif()
file(WRITE ${CMAKE_BINARY_DIR}/csrc/bindings/_core.so "")
"""


def test_a_commit_is_built_once_and_run(tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    repository = tmp_path / "r"
    (repository / "python" / "dyno").mkdir(parents=True)
    (repository / "python" / "dyno" / "__init__.py").write_text(_PACKAGE)
    (repository / "CMakeLists.txt").write_text(_CMAKE)
    who = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_AUTHOR_NAME": "x", "GIT_AUTHOR_EMAIL": "x@y",
           "GIT_COMMITTER_NAME": "x", "GIT_COMMITTER_EMAIL": "x@y"}  # fmt: skip
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"]):
        subprocess.run(["git", "-C", str(repository), *words], check=True, env=who)
    commit = commit_of("HEAD", repository)
    assert commit is not None
    said: list[str] = []
    side = make_side("A", "HEAD", Given(model, repository=repository), "", said.append)
    assert side.run(WORK).rates["pp"]
    assert side.facts["version"] == "0.0.9"
    assert len(said) == 1
    make_side("B", commit[:9], Given(model, repository=repository), "", said.append)
    assert len(said) == 1  # built before
    with pytest.raises(TuneError, match="broken on purpose"):
        build(commit, repository, ["BREAK=ON"], said.append)


@pytest.mark.parametrize(
    ("word", "own", "message"),
    [
        ("nosuchthing", "", "neither a file, nor a folder, nor a commit"),
        ("--all", "", "neither a file"),
        ("empty", "", "nor a folder with dyno or llama-bench"),
        ("default", "-ub 64", "flags of other engines"),
        ("default", "'", "check the quotes"),
        ("none.yaml", "", "none.yaml"),
    ],
)
def test_what_is_no_side(tmp_path: Path, model: str, word: str, own: str, message: str) -> None:
    (tmp_path / "empty").mkdir()
    where = str(tmp_path / word) if word in ("empty", "none.yaml") else word
    with pytest.raises((TuneError, profiles.ProfileError), match=message):
        make_side("A", where, Given(model, repository=tmp_path), own, print)


def test_wrong_usage(tmp_path: Path, model: str) -> None:
    assert _ab("default", "default")[0] == 2
    assert _ab("default", "default", "-m", model, "--device", "tpu")[0] == 2
    assert _ab("default", "default", "-m", model, "--device", "cuda:1", "--gpu", "0")[0] == 2
    assert _ab("default", "default", "-m", str(tmp_path / "no.gguf"))[0] == 1


def _dyno_profile(path: Path, kind: str) -> Path:
    gpu = {"kind": "cuda", "compute_capability": "9.0", "sm_count": 132, "memory_mib": 140000}
    cpu = {"kind": "cpu", "isa": "avx2", "cores": 2, "memory_mib": 1000}
    profiles.save_profile(
        profiles.Profile.model_validate({
            "schema": 1, "label": "x",
            "match": {
                "device": gpu if kind == "cuda" else cpu,
                "model": {"architecture": "llama", "layers": 1, "embedding": 8, "types": {"F32": 1.0}},
                "engine": {"name": "dyno", "version": "1", "ops_revision": 1},
            },
            "settings": {"ubatch": {"value": 64}},
        }),
        path,
    )  # fmt: skip
    return path


def test_a_profile_that_is_not_used_is_no_side(tmp_path: Path, model: str) -> None:
    """What would be measured is the default, under the profile's name."""
    path = _dyno_profile(tmp_path / "p.yaml", "cuda")
    with pytest.raises(TuneError, match=r"side A: profile .*p\.yaml is not used here: .*cuda"):
        DynoSide("A", model, profile=path).run(Workload(pp=8, tg=0))


@pytest.mark.parametrize(
    ("a", "options"),
    [
        ("default", ["--", "-ub", "512"]),
        ("default", ["--flags-a", "-ub 512"]),
        ("default", ["--bin", "{bins}"]),
        ("default", ["-D", "GGML_CUDA=ON"]),
        ("default", ["--repo", "{bins}"]),
        ("default", ["--text", "text.txt"]),
        ("default", ["--log", "log.txt"]),
        ("{bins}", ["--profile-a", "nothere.yaml"]),
        ("{bins}", ["--bin", "{bins}"]),
        ("{bins}", ["--set", "threads=1"]),
        ("{profile}", ["--profile-a", "{profile}"]),
    ],
)
def test_an_option_that_no_side_takes_is_wrong_usage(
    tmp_path: Path, model: str, a: str, options: list[str]
) -> None:
    places = {"bins": fake(tmp_path / "b", "llama.cpp-0c1e570"),
              "profile": _dyno_profile(tmp_path / "p.yaml", "cpu")}  # fmt: skip
    side, *words = [word.format(**places) for word in (a, *options)]
    name = words[0].replace("-D", "--define")
    code, text = _ab(side, side, "-m", model, *words)
    assert (code, f"{name} " in text, "works only with" in text) == (2, True, True), text


def test_a_word_that_is_no_flag_of_an_engine_is_named(model: str) -> None:
    code, text = _ab("default", "default", "-m", model, "--json", "out.json")  # --json takes no file
    assert (code, "-- FLAGS (out.json) works only with" in text) == (2, True), text


def test_the_place_of_the_table_is_looked_at_first(tmp_path: Path, model: str) -> None:
    folder = str(fake(tmp_path / "b", "llama.cpp-0c1e570"))
    for place, said in ((tmp_path / "no" / "x.md", "does not exist"), (tmp_path, "is a folder")):
        done = CliRunner().invoke(app, ["ab", folder, folder, "-m", model, "--out", str(place)])
        assert said in str(done.exception)
    assert not any("-p" in line for line in (tmp_path / "b" / "calls.jsonl").read_text().splitlines())


def test_the_device_is_chosen_as_tune_does(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is a GPU, dyno runs on it unless told otherwise; other engines' binaries alone do not."""
    monkeypatch.setattr(arguments, "devices_of", lambda device, gpu: ["cuda:0"])
    asked: list[int | None] = []

    def given(name: str, word: str, given: Given, *rest: object) -> None:
        asked.append(given.gpu)
        raise TuneError("enough")

    monkeypatch.setattr(ab_command, "make_side", given)
    foreign = str(fake(tmp_path / "b", "llama.cpp-0c1e570"))
    for sides, flags, expected in (
        (("default", foreign), [], 0),
        (("default", "default"), ["--device", "cpu"], None),
        (("default", "default"), ["--gpu", "3"], 3),
        ((foreign, foreign), [], None),
        ((foreign, foreign), ["--device", "cuda:1"], 1),
    ):
        assert _ab(*sides, "-m", model, *flags)[0] == 1
        assert asked.pop() == expected
    assert asked == []


def test_dyno_against_another_engine(tmp_path: Path, model: str) -> None:
    """Each is held against its own most exact path, and nothing is concluded from the two."""
    folder = str(fake(tmp_path / "b", "llama.cpp-0c1e570", wrong="-ub 64"))
    _, text = _ab("default", folder, "-m", model, "--flags-b", "-ub 64", "--set", "threads=1")
    assert "mean KLD, its own most exact path" in text
    assert "answers changed" not in text
    assert "0.0005" in text


def test_memory_is_that_of_the_gpu_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA counts what CUDA_VISIBLE_DEVICES leaves; the driver's library counts all."""
    asked: list[tuple[str, object]] = []

    def call(self: GpuMemory, name: str, *arguments: Any) -> None:
        if arguments:
            asked.append((name, getattr(arguments[0], "value", None)))

    monkeypatch.setattr(GpuMemory, "_call", call)
    GpuMemory(2, library="libc.so.6")
    GpuMemory(0, "0000:00:08.0", library="libc.so.6")
    handles = [found for found in asked if "Handle" in found[0]]
    assert handles == [
        ("nvmlDeviceGetHandleByIndex_v2", 2),
        ("nvmlDeviceGetHandleByPciBusId_v2", b"0000:00:08.0"),
    ]


def test_a_side_watches_the_gpu_that_cuda_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, str | None]] = []
    info = SimpleNamespace(info={"pci_bus_id": "0000:00:08.0"})
    monkeypatch.setattr(dyno_side, "GpuMemory", lambda gpu, bus: asked.append((gpu, bus)))
    monkeypatch.setattr(dyno_side, "resolve_device", lambda name: {"cuda:0": info}[name])
    for built in (True, False):
        monkeypatch.setattr(dyno_side, "built_for_cuda", lambda built=built: built)
        dyno_side.gpu_memory(0)
    assert asked == [(0, "0000:00:08.0"), (0, None)]
    with dyno_side.gpu_memory(None) as nothing:
        assert nothing is None
