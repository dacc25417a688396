"""`tune build` over a source tree that is no engine: real CMake and objects, rates that follow switches."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from dyno_tuner.ab.compare import FASTER
from dyno_tuner.ab.run import Run, Side
from dyno_tuner.build import measure
from dyno_tuner.build.builder import Builder, BuildFailed, Built
from dyno_tuner.build.content import snapshot, source_files
from dyno_tuner.build.measure import Measured, RealBench
from dyno_tuner.build.sections import differing
from dyno_tuner.cli import build_command
from dyno_tuner.cli.commands import app
from dyno_tuner.core.errors import DisturbedError, TargetUnusable, TuneError
from dyno_tuner.core.intervals import Estimate
from dyno_tuner.core.protocol import Workload
from dyno_tuner.measure.cpu_monitor import Load as CpuLoad
from dyno_tuner.output.html_report import page as page_module
from typer.testing import CliRunner
from waiting import until


def builder_of(tree: Path, cache: Path, limit: int | None = None) -> Builder:
    copy, sources = snapshot(tree, cache)
    return Builder(copy, sources, "llama.cpp", cache, {}, limit, lambda line: None)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def model(trained_model: Path) -> str:
    return str(trained_model)


def run(*words: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["build", *words])
    said = "" if isinstance(done.exception, SystemExit | None) else str(done.exception)
    return done.exit_code, done.stdout, done.stderr + said


def test_builds_are_kept_by_content(tree: Path, cache: Path) -> None:
    builder = builder_of(tree, cache)
    assert builder.known({}) is None
    first = builder.build({}, "default")
    assert first.seconds > 0
    assert first.link_mib > 1, "the launcher saw the link of tool"
    assert set(first.objects) == {"CMakeFiles/core.dir/core.cpp.o", "CMakeFiles/tool.dir/tool.cpp.o"}
    again = builder_of(tree, cache).build({}, "default")
    assert again == first
    assert builder.key({}) != builder.key({"GGML_LTO": "ON"})


def test_an_edit_is_another_build(tree: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in source_files(tree):
        (copy / name).write_bytes((tree / name).read_bytes())
    one, first = snapshot(copy, tmp_path / "cache")
    (copy / "core.cpp").write_text("int core(int x) { return x + 1; }\n")
    other, second = snapshot(copy, tmp_path / "cache")
    assert first != second
    assert (one / "core.cpp").read_text() != (other / "core.cpp").read_text()


def test_the_same_code_is_told_by_its_sections(tree: Path, cache: Path) -> None:
    builder = builder_of(tree, cache)
    base = builder.build({}, "default")
    unused = builder.build({"GGML_LLAMAFILE": "OFF"}, "unused")
    assert builder.configured({}) != builder.configured({"GGML_LLAMAFILE": "OFF"})
    assert differing(base.objects, unused.objects) == []
    lto = builder.build({"GGML_LTO": "ON"}, "lto")
    assert differing(base.objects, lto.objects) == ["CMakeFiles/core.dir/core.cpp.o"]
    assert builder.configured({}) == builder.configured({"GGML_CPU_REPACK": "OFF"})


def test_a_switch_that_cmake_refuses_has_its_words(tree: Path, cache: Path) -> None:
    with pytest.raises(BuildFailed, match="GGML_NATIVE=OFF is not supported here"):
        builder_of(tree, cache).configured({"GGML_NATIVE": "OFF"})


def test_a_link_that_does_not_fit_is_refused_with_a_number(tree: Path, tmp_path: Path) -> None:
    builder = builder_of(tree, tmp_path, 8_192)
    with pytest.raises(TuneError, match=r"about 23,552 MiB \(the last one took 20,480\), and 8,192"):
        builder.build({}, "lto", link_mib=20_480)
    assert builder.known({}) is None
    assert builder.build({}, "lto", link_mib=4_096).bytes > 0


def test_a_link_is_predicted_from_the_last_one_with_the_switch(tree: Path, tmp_path: Path) -> None:
    """The table's number holds until a link was measured; an edit of the sources keeps that."""
    first = builder_of(tree, tmp_path).build({"GGML_LTO": "ON"}, "lto", link_mib=1)
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in source_files(tree):
        (copy / name).write_bytes((tree / name).read_bytes())
    (copy / "core.cpp").write_text("int core(int x) { return x + 1; }\n")
    assert first.link_mib > 1
    with pytest.raises(TuneError, match=rf"the last one took {first.link_mib}\), and 1 MiB are free"):
        builder_of(copy, tmp_path, 1).build({"GGML_LTO": "ON"}, "lto")
    tight = builder_of(copy, tmp_path, 2 * first.link_mib)
    assert tight.build({"GGML_LTO": "ON"}, "lto", link_mib=20_480).bytes > 0, "it did fit the last time"


def test_a_build_that_was_killed_goes_on(tree: Path, tmp_path: Path) -> None:
    """The run dies by SIGKILL during a compilation; its compiler ends, and the next run finishes."""
    copy = tmp_path / "slow"
    copy.mkdir()
    for name in source_files(tree):
        (copy / name).write_bytes((tree / name).read_bytes())
    sleeper = copy / "cc"
    mark = tmp_path / "compiling"
    sleeper.write_text(
        f'#!/bin/sh\ncase "$*" in *tool.cpp*) [ -e {mark} ] || (echo $$ > {mark}; sleep 600);; esac\n'
        'exec "$@"\n'
    )
    sleeper.chmod(0o755)
    script = (
        "import sys; from pathlib import Path\n"
        "from dyno_tuner.build.content import snapshot\n"
        "from dyno_tuner.build.builder import Builder\n"
        "tree, cache = Path(sys.argv[1]), Path(sys.argv[2])\n"
        "copy, key = snapshot(tree, cache)\n"
        "fixed = {'CMAKE_CXX_COMPILER_LAUNCHER': str(tree / 'cc')}\n"
        "built = Builder(copy, key, 'llama.cpp', cache, fixed, None, print).build({}, 'default')\n"
        "print(built.seconds)\n"
    )
    words = [sys.executable, "-c", script, str(copy), str(tmp_path / "cache")]
    child = subprocess.Popen(words, stdout=subprocess.DEVNULL)
    until(lambda: mark.exists() and mark.read_text().strip())
    child.send_signal(signal.SIGKILL)
    child.wait()
    compiler = int(mark.read_text())
    until(lambda: not _alive(compiler))  # no compiler of the killed run writes into the tree any more
    (place,) = [p.parent for p in (tmp_path / "cache").glob("*/lock")]
    assert not (place / "built.json").exists()
    kept = sorted((place / "tree").rglob("core.cpp.o"))
    stamps = [p.stat().st_mtime_ns for p in kept]
    done = subprocess.run(words, capture_output=True, text=True, timeout=600, check=True)
    assert float(done.stdout.split()[-1]) > 0
    assert (place / "built.json").exists()
    if kept:  # it had been compiled before the kill, and was not compiled again
        assert [p.stat().st_mtime_ns for p in kept] == stamps


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (ProcessLookupError, FileNotFoundError):
        return False
    return state != "Z"


def test_verdicts_and_the_line_to_use(tree: Path, cache: Path, model: str, tmp_path: Path) -> None:
    names = ["GGML_LTO", "GGML_OPENMP", "GGML_LLAMAFILE", "GGML_CPU_REPACK", "GGML_NATIVE", "GGML_WRONG=ON"]
    names.append("GGML_MISSPELT=ON")
    switches = [word for name in names for word in ("--switch", name)]
    page = tmp_path / "page.html"
    code, output, said = run(
        "--model", model, "--engine", "llama.cpp", "--source", str(tree), "--cache", str(cache),
        "--rounds", "2",
        "--workload", "pp=128,tg=16", "--device", "cpu", "--json", "--report", str(page), "--no-retune",
        "--switch", "GGML_CUDA_FORCE_MMQ", *switches,
    )  # fmt: skip
    assert code == 0, said
    told: dict[str, Any] = json.loads(output)
    verdicts = {name: row["verdict"] for name, row in told["verdicts"].items()}
    assert verdicts == {
        "GGML_CUDA_FORCE_MMQ": "inert", "GGML_LTO": "on", "GGML_OPENMP": "default", "GGML_LLAMAFILE": "inert",
        "GGML_CPU_REPACK": "inert", "GGML_NATIVE": "refused", "GGML_WRONG": "default",
        "GGML_MISSPELT": "inert",
    }, told  # fmt: skip
    assert told["command"] == "cmake -B build -DGGML_LTO=ON"
    lto = told["verdicts"]["GGML_LTO"]
    assert lto["ratio"]["pp128"] == pytest.approx(1.3, rel=0.02)
    assert lto["ratio"]["tg16"] == pytest.approx(1.0, rel=0.01)
    assert lto["ci95"]["pp128"][0] > 1
    assert lto["seconds"] > 0
    assert lto["bytes"] > 0
    assert told["verdicts"]["GGML_OPENMP"]["ratio"]["pp128"] < 0.6
    assert "answers changed" in told["verdicts"]["GGML_WRONG"]["reason"]
    assert "objects is that of the default build" in told["verdicts"]["GGML_LLAMAFILE"]["reason"]
    assert "every command is that of the default build" in told["verdicts"]["GGML_CPU_REPACK"]["reason"]
    assert "declares GGML_MISSPELT" in told["verdicts"]["GGML_MISSPELT"]["reason"]
    assert "declares" not in told["verdicts"]["GGML_CPU_REPACK"]["reason"]
    assert told["chosen"]["defines"] == {"GGML_LTO": "ON"}
    text = page.read_text()
    assert "cmake -B build -DGGML_LTO=ON" in text
    assert "GGML_WRONG" in text
    assert list((cache / "runs").iterdir()) == [], "a run that ended measures anew the next time"


def test_nothing_gained_stays_default(tree: Path, cache: Path, model: str) -> None:
    code, output, said = run(
        "--model", model, "--engine", "llama.cpp", "--source", str(tree), "--cache", str(cache),
        "--rounds", "2",
        "--workload", "pp=128,tg=16", "--device", "cpu", "--switch", "GGML_OPENMP", "--no-retune",
    )  # fmt: skip
    assert code == 0, said
    assert "No build was faster than the default build. Keep the default build." in output
    assert output.rstrip().endswith("    cmake -B build")


def test_a_define_moves_the_default_of_its_switch(tree: Path, cache: Path, model: str) -> None:
    """A name may have a value for every build and another one to try against it."""
    words = (
        "--model", model, "--engine", "llama.cpp", "--source", str(tree), "--cache", str(cache),
        "--rounds", "2", "--workload", "pp=128,tg=16", "--device", "cpu", "--json", "--no-retune",
    )  # fmt: skip
    code, output, said = run(*words, "-D", "GGML_OPENMP=OFF", "--switch", "GGML_OPENMP=ON")
    assert code == 0, said
    told = json.loads(output)
    row = told["verdicts"]["GGML_OPENMP"]
    assert (row["default"], row["value"], row["verdict"]) == ("OFF", "ON", "on")
    assert row["ratio"]["pp128"] > 1.6
    assert told["command"] == "cmake -B build -DGGML_OPENMP=ON"


def test_a_define_leaves_the_catalogue(tree: Path, cache: Path, model: str) -> None:
    """Without --switch all switches are tried but the names of defines."""
    given = {
        "GGML_NATIVE": "ON", "GGML_LTO": "OFF", "CMAKE_CXX_FLAGS_RELEASE": "-O1", "GGML_LLAMAFILE": "ON",
        "GGML_OPENMP": "ON",
    }  # fmt: skip
    defines = [word for name, value in given.items() for word in ("--define", f"{name}={value}")]
    code, output, said = run(
        "--model", model, "--engine", "llama.cpp", "--source", str(tree), "--cache", str(cache),
        "--device", "cpu", "--json", *defines,
    )  # fmt: skip
    assert code == 0, said
    verdicts = {name: row["verdict"] for name, row in json.loads(output)["verdicts"].items()}
    assert verdicts == {"GGML_CPU_REPACK": "inert"}


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--engine", "llama.cpp"], 2, "needs its source tree; give --source DIR"),
        (["--switch", "NO_SUCH"], 2, "write NO_SUCH=VALUE"),
        (["--switch", "a b"], 2, "write NAME or NAME=VALUE"),
        (["--define", "GGML_LTO"], 2, "is not of the form NAME=VALUE"),
        (["--source", "/nonexistent-tree"], 1, "/nonexistent-tree: the folder does not exist"),
        (["--source", "/tmp", "--engine", "llama.cpp"], 1, "because it has no CMakeLists.txt"),
        (["--source", str(Path(__file__).parents[2] / "fuzz")], 1, "give its engine with --engine llama.cpp"),
        (["--model", "/nonexistent.gguf"], 1, "nonexistent.gguf"),
    ],
)  # fmt: skip
def test_wrong_words(model: str, words: list[str], code: int, said: str) -> None:
    given = words if "--model" in words else ["--model", model, *words]
    found, _, errors = run(*given, "--device", "cpu")
    assert found == code
    assert said in " ".join(errors.replace("│", " ").split())


def test_a_tree_of_something_else_is_told(tmp_path: Path, model: str) -> None:
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.24)\nproject(other CXX)\nadd_executable(other other.cpp)\n"
    )
    (tmp_path / "other.cpp").write_text("int main() {}\n")
    code, _, said = run(
        "--model", model, "--engine", "llama.cpp", "--source", str(tmp_path),
        "--cache", str(tmp_path / "cache"), "--device", "cpu", "--switch", "GGML_LTO",
    )  # fmt: skip
    assert code == 1
    assert "the source tree builds no llama-bench; --source names a tree of llama.cpp" in said


def test_another_engine_on_a_gpu_needs_no_cuda_in_dyno(
    tree: Path, cache: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver tells which GPU it is, and the line has what the builds had."""

    class Bench(RealBench):
        def compare(self, a: Built, b: Built, *words: Any, **more: Any) -> Measured:
            ratio = Estimate(1.3, 1.29, 1.31, 6)
            return Measured({"pp4096": ratio}, {"pp4096": FASTER}, {"pp4096": 0.01}, 2)

        def loading(self, build: Built, profile: str = "") -> None:
            return None

    def driver(number: int) -> tuple[dict[str, Any], str]:
        if number:
            raise TargetUnusable(
                f"--gpu {number}: cuDeviceGet gave error 101; check that nvidia-smi lists this GPU"
            )
        return {"compute_capability": "9.0"}, "H200"

    monkeypatch.setattr(build_command, "cuda_device", driver)
    monkeypatch.setattr(build_command, "RealBench", Bench)
    monkeypatch.setenv("CUDACXX", "c++")  # nothing of this tree is CUDA
    words = (
        "--model",
        model,
        "--engine",
        "llama.cpp",
        "--source",
        str(tree),
        "--cache",
        str(cache),
        "--json",
    )
    code, output, said = run(*words, "--gpu", "0", "--switch", "GGML_LTO", "--no-retune")
    assert code == 0, said
    told = json.loads(output)
    assert told["device"] == "H200"
    assert told["command"] == (
        "cmake -B build -DGGML_CUDA=ON -DCMAKE_CUDA_ARCHITECTURES=90-real -DGGML_LTO=ON"
    )
    code, _, said = run(*words, "--gpu", "1", "--switch", "GGML_LTO")
    assert code == 1
    assert "check that nvidia-smi lists this GPU" in said


def test_a_report_without_plotly_is_refused_before_any_work(
    tree: Path, tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_module.importlib.util, "find_spec", lambda name: None)
    code, _, said = run(
        "--model", model, "--engine", "llama.cpp", "--source", str(tree), "--cache", str(tmp_path / "cache"),
        "--device", "cpu", "--report", str(tmp_path / "page.html"),
    )  # fmt: skip
    assert code == 1
    assert "pip install 'gguf-dyno[report]'" in said
    assert not (tmp_path / "cache").exists()


def test_a_page_that_cannot_be_written_is_refused_before_any_work(tmp_path: Path, model: str) -> None:
    for option in ("--report", "--out"):
        code, _, said = run(
            "--model", model, "--device", "cpu", "--cache", str(tmp_path / "cache"), option,
            str(tmp_path / "absent" / "page"),
        )  # fmt: skip
        assert code == 1
        absent = tmp_path / "absent"
        assert f"{option} {absent / 'page'}: the folder {absent} does not exist" in said
    assert not (tmp_path / "cache").exists()


class _Instant(Side):
    """A side that runs at once."""

    kind, facts = "fake", {}

    def run(self, workload: Workload) -> Run:
        return Run({"pp": (100.0, 101.0, 102.0), "tg": (10.0, 10.1, 10.2)})

    def answers(self, reference: Path, *, first: bool) -> None:
        return None

    def close(self) -> None:
        """Nothing is held."""


@pytest.mark.parametrize("force", [False, True])
def test_others_load_is_an_error_or_is_marked(force: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuLoad, "disturbed", "other programs use 1.9 of 2 cores")
    monkeypatch.setattr(measure, "patience_of", lambda budget: 0.0)
    monkeypatch.setattr(RealBench, "_side", lambda *words: _Instant())
    bench = RealBench(
        "dyno", "m.gguf", Workload(pp=64, tg=16), None, {}, 2, 0.01, 60.0, 0, Path("/dev/null"), None,
        lambda line: None, force,
    )  # fmt: skip
    built = Built("key", "/folder", 1.0, 1.0, 1, 1, 1)
    if force:
        assert bench.compare(built, built, {}, {}, None, answers=False).disturbed == 9
    else:
        with pytest.raises(DisturbedError, match=r"other programs use 1\.9 of 2 cores"):
            bench.compare(built, built, {}, {}, None, answers=False)
