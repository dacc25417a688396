"""llama.cpp and ik_llama.cpp as targets, on recordings of real CPU builds of two versions of each."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from dyno import _nvml, profiles
from dyno_tuner.cli.commands import _print_result, app
from dyno_tuner.core.errors import TargetFailure, TargetUnusable, TuneError
from dyno_tuner.core.protocol import Configuration, OpContext, TrialStatus, Workload
from dyno_tuner.run.session import Request, run, stderr_log
from dyno_tuner.run.tune import Options
from dyno_tuner.targets.ggml import target as ggml_target
from dyno_tuner.targets.ggml.command_line import parse_command
from dyno_tuner.targets.ggml.help import Help, parse_help, parse_version
from dyno_tuner.targets.ggml.installation import Installation, parse_op_ids
from dyno_tuner.targets.ggml.knobs import make_knobs
from dyno_tuner.targets.ggml.process import Finished, bench_rows, execute, judge
from dyno_tuner.targets.ggml.quality import parse_kld
from dyno_tuner.targets.ggml.spelling import NoSpelling, spell
from dyno_tuner.targets.ggml.target import GgmlTarget
from fake_engines import DATA, TOOLS, calls, fake
from typer.testing import CliRunner

VERSIONS = ["llama.cpp-4227c9b", "llama.cpp-0c1e570", "ik_llama.cpp-3848", "ik_llama.cpp-4840"]
NOW = OpContext("test")


def help_of(version: str, tool: str) -> Help:
    return parse_help((DATA / f"{version}-{tool}.help").read_text())


@pytest.fixture
def model(tiny_dir: Path) -> str:
    return str(next(iter(sorted(tiny_dir.glob("*qwen3moe*.gguf")))))


@pytest.mark.parametrize("version", VERSIONS)
def test_version_and_engine(tmp_path: Path, version: str) -> None:
    engine = version.rpartition("-")[0]
    other = {"llama.cpp": "ik_llama.cpp", "ik_llama.cpp": "llama.cpp"}[engine]
    folder = fake(tmp_path / "b", version)
    found = Installation(str(folder), engine).version("m.gguf")
    assert version.rpartition("-")[2] in (found.number, found.commit)
    with pytest.raises(TargetUnusable, match=f"use --engine {engine}"):
        Installation(str(folder), other)
    with pytest.raises(TargetUnusable, match="no executable llama-bench"):
        Installation(str(tmp_path), engine)


def test_version_from_results_where_no_tool_tells_it(tmp_path: Path) -> None:
    folder = fake(tmp_path / "b", "llama.cpp-4227c9b", ("llama-bench",))
    assert str(Installation(str(folder), "llama.cpp").version("m.gguf")) == "1 (4227c9b)"
    assert parse_version("version: unknowable") is None


@pytest.mark.parametrize(
    ("version", "bench", "common"),
    [
        ("llama.cpp-4227c9b", ["-fa", "1"], ["-fa"]),
        ("llama.cpp-0c1e570", ["-fa", "on"], ["-fa", "on"]),
        ("ik_llama.cpp-3848", ["-fa", "1"], ["-fa"]),
        ("ik_llama.cpp-4840", ["-fa", "1"], ["-fa", "on"]),
    ],
)
def test_spelling_of_flash_attention(version: str, bench: list[str], common: list[str]) -> None:
    engine = version.rpartition("-")[0]
    on = {"flash_attention": True}
    assert spell(on, engine, help_of(version, "bench"), bench=True).args == bench
    assert spell(on, engine, help_of(version, "common"), bench=False).args == common
    off = spell({"flash_attention": False}, engine, help_of(version, "common"), bench=False).args
    assert off == ([] if len(common) == 1 else ["-fa", "off"])


def test_spelling_of_experts_and_cuda_parameters() -> None:
    old, new = help_of("ik_llama.cpp-3848", "common"), help_of("ik_llama.cpp-4840", "common")
    engine = "ik_llama.cpp"
    assert spell({"fused_moe": True}, engine, old, bench=False).args == ["-fmoe"]
    assert spell({"fused_moe": False}, engine, old, bench=False).args == []
    assert spell({"fused_moe": True}, engine, new, bench=False).args == []
    assert spell({"fused_moe": False}, engine, new, bench=False).args == ["-no-fmoe"]
    both = spell({"mmq_id_size": 0, "cuda_graphs": False}, engine, new, bench=False)
    assert both.all_args() == ["-cuda", "mmq-id-size=0,graphs=0"]
    with pytest.raises(NoSpelling, match=r"mmq_id_size.*-cuda"):
        spell({"mmq_id_size": 0}, engine, old, bench=False)
    with pytest.raises(NoSpelling, match="compute_type has no spelling"):
        spell({"compute_type": "f16"}, engine, new, bench=False)


def test_variables_by_presence_and_by_value() -> None:
    help_ = help_of("llama.cpp-0c1e570", "common")
    on = spell(
        {"cuda_graphs": True, "graph_concurrency": True, "fusion": True}, "llama.cpp", help_, bench=False
    )
    assert on.env == {
        "GGML_CUDA_DISABLE_GRAPHS": None, "GGML_CUDA_GRAPH_OPT": "1", "GGML_CUDA_DISABLE_FUSION": None,
    }  # fmt: skip
    off = spell({"cuda_graphs": False, "graph_concurrency": False}, "llama.cpp", help_, bench=False)
    assert off.env == {"GGML_CUDA_DISABLE_GRAPHS": "1", "GGML_CUDA_GRAPH_OPT": None}


def test_a_u_batch_raises_the_batch_that_bounds_it() -> None:
    help_ = help_of("llama.cpp-0c1e570", "common")
    assert spell({"ubatch": 4096}, "llama.cpp", help_, bench=False).args == ["-ub", "4096", "-b", "4096"]
    assert spell({"ubatch": 1024}, "llama.cpp", help_, bench=False).args == ["-ub", "1024"]


def _parse(version: str, line: str) -> Any:
    engine = version.rpartition("-")[0]
    return parse_command(line.split(), help_of(version, "common"), help_of(version, "bench"), engine)


def test_a_command_line_taken_apart() -> None:
    line = "GGML_CUDA_DISABLE_GRAPHS=0 ./llama-server -m x.gguf -ngl 20 -ub 1024 -fa off --port 80"
    line += " -ot a=CPU,b=CPU"
    found = _parse("llama.cpp-0c1e570", line)
    assert found.incumbent == {"cuda_graphs": False, "ubatch": 1024, "flash_attention": False}
    assert found.bench == ["-ngl", "20"]
    assert found.base == {"placement": "a=cpu,b=cpu"}
    assert found.kept == ["-m", "x.gguf", "-ngl", "20", "--port", "80"]
    assert (found.host_weights, found.gpu_layers) == (True, 20)
    old = _parse("ik_llama.cpp-3848", "llama-server -fa -fmoe -mla 3 -ctk q8_0")
    assert old.incumbent == {"flash_attention": True, "fused_moe": True, "mla_mode": "auto"}
    assert old.base == {"kv_type_k": "q8_0"}


def test_graphs_that_a_variable_turns_off() -> None:
    """Both engines test its presence, so it wins over a flag; an older ik_llama.cpp has no such flag."""
    line = "GGML_CUDA_DISABLE_GRAPHS=1 llama-server -m x.gguf"
    for version in ("llama.cpp-0c1e570", "llama.cpp-4227c9b", "ik_llama.cpp-4840"):
        found = _parse(version, line)
        assert (found.incumbent, found.env) == ({"cuda_graphs": False}, {}), version
    assert _parse("ik_llama.cpp-4840", f"{line} -cuda graphs=1").incumbent == {"cuda_graphs": False}
    old = _parse("ik_llama.cpp-3848", line)
    assert (old.incumbent, old.env) == ({}, {"GGML_CUDA_DISABLE_GRAPHS": "1"})
    for word in ("off", "0", "false", "disabled"):
        assert _parse("llama.cpp-0c1e570", f"llama-server -fit {word}").kept == ["-fit", word]


@pytest.mark.parametrize(
    ("version", "line", "message"),
    [
        ("ik_llama.cpp-4840", "llama-server -fmoe", "'-fmoe' is not a flag"),
        ("ik_llama.cpp-4840", "llama-server -op 27,0,28", "not a list of ID"),
        ("ik_llama.cpp-4840", "llama-server -cuda speed", "'speed' is not of the form KEY=VALUE"),
        ("ik_llama.cpp-4840", "llama-server -mla 5", "it is 0, 1, 2 or 3"),
        ("llama.cpp-0c1e570", "llama-server -hf a/b", "names a model"),
        ("llama.cpp-0c1e570", "llama-server -C 0x3,0x1", "would measure each by itself"),
        ("llama.cpp-0c1e570", "llama-server -fit on", "fit"),
        ("llama.cpp-0c1e570", "llama-server --no-mmap", "not a flag"),
        ("llama.cpp-0c1e570", "llama-server --lora x", "--lora cannot be reproduced"),
        ("llama.cpp-0c1e570", "llama-server -ub", "needs a value"),
        (
            "llama.cpp-0c1e570",
            "llama-server -fa -c 8192",
            r"value \(on\|off\|auto\) in this version, and '-c' follows",
        ),
        ("llama.cpp-0c1e570", "llama-server -ub many", "whole number"),
        ("llama.cpp-4227c9b", "llama-server -ncffn 3", "not a flag"),
        ("llama.cpp-0c1e570", "llama-server -ncmoe 3 -ot exps=CPU", "cannot be combined with"),
    ],
)
def test_a_command_line_that_cannot_be_measured(version: str, line: str, message: str) -> None:
    with pytest.raises(TuneError, match=message):
        _parse(version, line)


def test_ids_of_ops_are_of_this_binary(tmp_path: Path) -> None:
    new = Installation(str(fake(tmp_path / "n", "ik_llama.cpp-4840")), "ik_llama.cpp")
    ids = new.op_ids("m.gguf")
    assert (ids["MUL_MAT"], ids["MUL_MAT_ID"], ids["FUSED_UP_GATE"], ids["MOE_FUSED_UP_GATE"]) == (
        27,
        28,
        30,
        31,
    )
    assert (ids["GET_ROWS"], len(ids)) == (42, 111)
    old = Installation(str(fake(tmp_path / "o", "ik_llama.cpp-3848")), "ik_llama.cpp").op_ids("m.gguf")
    assert (old["MUL_MAT"], old["MUL_MAT_ID"], old["MOE_FUSED_UP_GATE"]) == (27, 28, 30)
    assert "FUSED_UP_GATE" not in old
    with pytest.raises(TargetUnusable, match="no tool that takes -op"):
        Installation(str(fake(tmp_path / "m", "llama.cpp-0c1e570")), "llama.cpp").op_ids("m.gguf")
    for ops in (["MUL_MAT", "MUL_MAT_ID"], ["NONE", "MUL_MAT", "NONE", "MUL_MAT_ID"], []):
        text = "\n".join(f"Setting offload policy for op {op} to ON" for op in ops)
        with pytest.raises(TargetUnusable):
            parse_op_ids(text, "x")


def _died(code: int, stderr: str) -> str:
    with pytest.raises(TargetFailure) as caught:
        judge(Finished("", stderr, 1.0, code))
    assert caught.value.message
    return caught.value.status


def test_ways_to_die() -> None:
    assert _died(1, "ggml_backend_cuda_buffer_type_alloc_buffer: cudaMalloc failed: out of memory") == "oom"
    assert _died(-9, "") == "oom"
    assert _died(-6, "GGML_ASSERT(n_dependents == fan_out) failed") == "crash"
    assert _died(1, "error: invalid parameter for argument: -fmoe") == "invalid"
    assert _died(1, "") == "crash"
    assert _died(0, "invalid parameter mmq-id-sizes (3) -> ignored") == "invalid"
    judge(Finished("", "warnings", 1.0, 0))


def test_results_by_key_behind_logs() -> None:
    row = {"n_prompt": 1, "n_gen": 0, "samples_ns": [5]}
    assert bench_rows("[NCCL] up\nlog\n" + json.dumps([row])) == [row]
    assert bench_rows(json.dumps(row) + "\n" + json.dumps(row)) == [row, row]
    for bad in ("", "[]", "[1", '[{"n_prompt": 1}]', json.dumps([{**row, "samples_ns": [0]}]), "[NaN]"):
        with pytest.raises(TargetFailure):
            bench_rows(bad)


def test_divergence_by_label() -> None:
    text = (DATA / "ik_llama.cpp-4840.kld").read_text()
    found = parse_kld(text, 1.0)
    assert (found.mean_kld, found.max_kld, round(found.top1, 5)) == (0.000236, 0.113668, 0.99461)
    assert parse_kld(text, 2.0).digest == found.digest
    assert parse_kld(text.replace("0.000236", "0.000237"), 1.0).digest != found.digest
    assert not parse_kld(text.replace("0.000236", "nan"), 1.0).mean_kld <= 1
    for version in VERSIONS:
        assert 0 <= parse_kld((DATA / f"{version}.kld").read_text(), 1.0).mean_kld < 1e-3
    with pytest.raises(TargetFailure, match="mean_kld"):
        parse_kld("Mean PPL(Q) : 4", 1.0)


def test_a_visit_is_one_process_and_reads_back_what_ran(tmp_path: Path, model: str) -> None:
    folder = fake(tmp_path / "b", "llama.cpp-0c1e570")
    target = GgmlTarget("llama.cpp", model, str(folder))
    workload = Workload(pp=64, tg=8)
    target.apply(Configuration({"ubatch": 128}), NOW)
    rates = [target.measure(workload, metric, i).rate for metric in ("pp", "tg") for i in range(4)]
    assert all(390000 < r < 401000 for r in rates[:4])
    assert all(79000 < r < 80100 for r in rates[4:])
    (call,) = calls(folder, "llama-bench")
    assert call["env"]["CUDA_VISIBLE_DEVICES"] == ""
    assert call["args"][call["args"].index("-ub") + 1] == "128"
    assert "-ngl" in call["args"]
    target.close()
    other = GgmlTarget("llama.cpp", model, str(fake(tmp_path / "c", "llama.cpp-0c1e570", ran=512)))
    other.apply(Configuration({"ubatch": 128}), NOW)
    with pytest.raises(TargetFailure, match="asked for 128, llama-bench ran n_ubatch=512"):
        other.measure(workload, "pp", 0)
    other.close()


def test_hangs_are_killed(tmp_path: Path, model: str) -> None:
    folder = fake(tmp_path / "b", "llama.cpp-4227c9b", faults={"-p 64": "hang"})
    target = GgmlTarget("llama.cpp", model, str(folder), deadline=1.0)
    target.apply(Configuration({}), NOW)
    with pytest.raises(TargetFailure) as caught:
        target.measure(Workload(pp=64, tg=8), "pp", 0)
    assert caught.value.status == TrialStatus.TIMEOUT
    target.close()


def test_an_interrupted_run_is_killed_and_waited_for(tmp_path: Path) -> None:
    said, go = tmp_path / "pid", tmp_path / "go"
    script = f"echo $$ > {said}; while [ ! -e {go} ]; do sleep 0.01; done; kill -INT $PPID; exec sleep 600"
    with pytest.raises(KeyboardInterrupt):
        execute(["sh", "-c", script], look=lambda _: go.touch())  # this process waits for the other one now
    with pytest.raises(ProcessLookupError):
        os.kill(int(said.read_text()), 0)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_memory_is_that_of_the_process_and_not_of_the_tuner(tmp_path: Path) -> None:
    held = bytearray(os.urandom(1)) * (200 << 20)

    def used(statement: str) -> Finished:
        """A process with this statement, which ends when it was looked at twice behind that."""
        seen: list[int] = []
        there = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        wait = f"print(end='.', flush=True)\nwhile not os.path.exists({str(there)!r}): time.sleep(0.01)"

        def look(printed: int) -> None:
            seen.append(printed)
            if printed and len(seen) - seen.index(printed) > 2:
                there.touch()

        script = f"import os, time\n{statement}\n{wait}"
        return execute([sys.executable, "-S", "-c", script], look=look)

    small = used("")
    large = used("x = b'x' * (900 << 20)")
    assert len(held) == 200 << 20
    assert 1 < (small.peak_mib or 0) < 100
    assert 900 < (large.peak_mib or 0) < 1000


@pytest.mark.parametrize("version", ["llama.cpp-0c1e570", "ik_llama.cpp-4840"])
def test_a_tune_writes_a_profile_of_that_engine(
    tmp_path: Path, model: str, version: str, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = version.rpartition("-")[0]
    faults = {"-ub 256": "CUDA error: out of memory"}
    folder = fake(tmp_path / "b", version, faults=faults, wrong="-ub 128")
    options = Options(
        Workload(pp=256, tg=8), max_trials=4, rounds=2, max_rounds=2, aa_processes=2, sampler="random"
    )
    request = Request(
        model, options, out=tmp_path / "p.yaml", quiet=True, deadline_floor=60.0, engine=engine,
        engine_options={"binaries": str(folder), "command": ["llama-server", "-ub", "64", "--port", "80"]},
        held={"threads": 2, "threads_batch": 2, "flash_attention": True},
    )  # fmt: skip
    result = run(request)
    written = profiles.load_profile(result.path)
    assert written.match.engine.name == engine
    assert version.rpartition("-")[2] in written.match.engine.version
    entry = written.settings["ubatch"]
    assert not isinstance(entry, str)
    assert entry.value == 64
    assert (entry.ratio or 0) > 1.4
    assert {
        f.settings["ubatch"]: f.status for f in result.outcome.failures if f.settings["ubatch"] in (128, 256)
    }
    _print_result(result, request, as_json=False)
    log = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("stderr:"))
    assert log.split() == ["stderr:", f"{tmp_path}/p.yaml.stderr.log"]
    assert "a log line on standard error" in Path(log.split()[1]).read_text()
    unnamed = dataclasses.replace(request, out=None)
    assert stderr_log(unnamed).endswith(f"/{engine}-{Path(model).name}.stderr.log")


def test_claims_of_more_time_than_has_passed_are_implausible(tmp_path: Path, model: str) -> None:
    target = GgmlTarget("llama.cpp", model, str(fake(tmp_path / "b", "llama.cpp-4227c9b")))
    target.apply(Configuration({}), NOW)
    with pytest.raises(TargetFailure) as caught:
        target.measure(Workload(pp=1 << 24, tg=0), "pp", 0)
    assert caught.value.status == TrialStatus.IMPLAUSIBLE
    target.close()


def test_what_follows_the_dashes_is_no_subcommand(tmp_path: Path) -> None:
    folder = fake(tmp_path / "b", "llama.cpp-0c1e570")
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF")
    own = ["--engine", "llama.cpp", "--bin", str(folder), "-m", str(file), "--out", str(tmp_path / "p.yaml")]
    failed = CliRunner().invoke(app, [*own, "--", "llama-server", "--port", "80"])
    assert failed.exit_code == 1
    assert "GGUF" in str(failed.exception) or "gguf" in str(failed.exception)
    without = CliRunner().invoke(app, ["-m", str(file), "--", "llama-server", "--port", "80"])
    assert (without.exit_code, "need --engine" in without.output) == (2, True)
    assert CliRunner().invoke(app, ["-m", str(file), "--bin", str(folder)]).exit_code == 2
    assert CliRunner().invoke(app, ["-m", str(file), "--engine", "vllm"]).exit_code == 2
    assert CliRunner().invoke(app, ["-m", str(file), "--engine", "llama.cpp"]).exit_code == 2


def test_the_gpu_is_named_so_that_it_is_watched(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With several: the first."""
    gpu = {"kind": "cuda", "compute_capability": "9.0", "sm_count": 132, "memory_mib": 140000}
    monkeypatch.setattr(ggml_target, "cuda_device", lambda number: (gpu, "a GPU"))
    folder = str(fake(tmp_path / "b", "llama.cpp-0c1e570"))
    for buses, expected in (
        ({1: "0000:00:08.0"}, {"pci_bus_id": "0000:00:08.0", "driver": "580.1"}),
        ({}, None),  # no NVML
    ):
        monkeypatch.setattr(_nvml, "bus_id", buses.get)
        monkeypatch.setattr(_nvml, "facts", lambda bus: {"driver": "580.1"})
        target = GgmlTarget("llama.cpp", model, folder, gpu=[1, 0])
        assert target.describe().engine.get("gpu") == expected
        target.close()


def test_a_model_without_a_vocabulary(tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads no text, so answers cannot be compared, and only settings that change no bit are searched."""
    whole = ggml_target.model_identity
    monkeypatch.setattr(ggml_target, "model_identity", lambda path: {**whole(path), "vocabulary": False})
    target = GgmlTarget("llama.cpp", model, str(fake(tmp_path / "b", "llama.cpp-0c1e570")))
    told = target.describe()
    knobs = make_knobs(told.engine, told.model, Workload(pp=64, tg=8), approx=False)
    assert {k.name for k in knobs} <= {"threads", "threads_batch"}
    with pytest.raises(TargetUnusable, match="no vocabulary"):
        target.quality(Configuration({}), NOW)
    target.close()


def test_a_tool_whose_help_lists_nothing(tmp_path: Path) -> None:
    """llama-sweep-bench of mid-2025: the flags are those of another common tool."""
    folder = fake(
        tmp_path / "b", "ik_llama.cpp-3848", (*TOOLS, "llama-sweep-bench"), silent="llama-sweep-bench"
    )
    found = Installation(str(folder), "ik_llama.cpp").help_of("llama-sweep-bench")
    assert found is not None
    assert all(found.has(n) for n in ("-ub", "-op", "-rtr", "-ncmoe"))


def test_statistics_that_were_lost_are_asked_for_again(tmp_path: Path, model: str) -> None:
    folder = fake(tmp_path / "b", "llama.cpp-0c1e570", wrong="-ub 999")
    target = GgmlTarget("llama.cpp", model, str(folder))
    (folder / "lost").write_text("3")
    found = target.quality(Configuration({}), NOW)
    assert (found.status, found.mean_kld) == (TrialStatus.OK, 7.1e-5)
    (folder / "lost").write_text("1000")
    assert "no line for mean_kld" in target.quality(Configuration({}), NOW).message
    target.close()


@pytest.mark.parametrize(
    ("reason", "status"),
    [
        ("ggml_backend_cuda_buffer_type_alloc_buffer: cudaMalloc failed: out of memory", "oom"),
        ("llama_init_from_model: quantized V cache requires flash_attn to be enabled", "invalid"),
        ("", "crash"),
    ],
)
def test_a_benchmark_that_fails_without_a_word_is_asked_why(
    tmp_path: Path, model: str, reason: str, status: str
) -> None:
    folder = fake(tmp_path / "b", "llama.cpp-0c1e570", quiet={"-ub 256": reason})
    target = GgmlTarget("llama.cpp", model, str(folder))
    target.apply(Configuration({"ubatch": 256}), NOW)
    with pytest.raises(TargetFailure) as caught:
        target.measure(Workload(pp=64, tg=0), "pp", 0)
    assert caught.value.status == status
    assert reason in caught.value.message
    assert len(calls(folder, "llama-bench")) == 2
    target.close()
