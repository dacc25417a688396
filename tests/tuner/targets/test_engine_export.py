"""What a tune of llama.cpp or ik_llama.cpp has written: exported, verified, and named from anywhere."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from dyno import profiles
from dyno.cli import app as dyno_app
from dyno_tuner.cli import export as cli_export
from dyno_tuner.cli.arguments import command_line
from dyno_tuner.core.errors import TuneError
from dyno_tuner.core.machine_match import device_of, model_of
from dyno_tuner.core.recorded_command import held_with
from dyno_tuner.run.verify import verify
from dyno_tuner.targets.ggml.export import binaries_folder, export, tuned_with
from dyno_tuner.targets.ggml.installation import Installation, engine_in
from dyno_tuner.targets.ggml.target import GgmlTarget
from fake_engines import calls, fake
from typer.testing import CliRunner


@pytest.fixture
def model(tiny_dir: Path) -> str:
    return str(next(iter(sorted(tiny_dir.glob("*qwen3moe*.gguf")))))


def _profile(engine: str, settings: dict[str, Any], command: str = "tune") -> profiles.Profile:
    entries = {n: {"value": v} for n, v in settings.items()}
    return profiles.Profile.model_validate({
        "schema": 1, "label": "a 100 % test",
        "match": {
            "device": {"kind": "cpu", "isa": "avx2", "cores": 2, "memory_mib": 1000},
            "model": {"architecture": "llama", "layers": 1, "embedding": 8, "types": {"F32": 1.0}},
            "engine": {"name": engine, "version": "1"},
        },
        "settings": entries, "provenance": {"tuner": "1", "date": "2026-11-20", "command": command},
    })  # fmt: skip


def test_export_keeps_the_users_command_line(tmp_path: Path) -> None:
    folder = fake(tmp_path / "b", "llama.cpp-0c1e570")
    profile = _profile("llama.cpp", {"ubatch": 4096, "graph_concurrency": True})
    own = ["llama-server", "-m", "old.gguf", "-ub", "512", "-fa", "off", "--port", "80"]
    text = export(profile, "llama-server", binaries=str(folder), model="/m.gguf", command=own)
    flags = "-m /m.gguf --port 80 -fa off -ub 4096 -b 4096 -ngl 0 -fit off"
    assert text == f"env GGML_CUDA_GRAPH_OPT=1 {folder}/llama-server {flags}\n"
    unit = export(profile, "systemd", binaries=str(folder), model="/m $x.gguf")
    assert "Environment=GGML_CUDA_GRAPH_OPT=1\n" in unit
    assert f'ExecStart={folder}/llama-server -m "/m $$x.gguf" -ub 4096 -b 4096 -ngl 0 -fit off\n' in unit
    assert "Description=a 100 %% test\n" in unit
    env = export(profile, "env", binaries=str(folder), model="/m.gguf")
    placed = "LLAMA_ARG_N_GPU_LAYERS=0\nLLAMA_ARG_FIT=off\n"
    model = "LLAMA_ARG_MODEL=/m.gguf\n"  # without it, a server would start without a model
    assert env == f"{model}LLAMA_ARG_UBATCH=4096\nLLAMA_ARG_BATCH=4096\n{placed}GGML_CUDA_GRAPH_OPT=1\n"
    held = _profile("llama.cpp", {"ubatch": 64}, "tune --set threads=3 --engine llama.cpp")
    assert export(held, "env", binaries=str(folder), model="/m.gguf").startswith(
        f"{model}LLAMA_ARG_THREADS=3\n"
    )
    plain = _profile("llama.cpp", {"cpu_repack": False})
    assert (
        export(plain, "env", binaries=str(folder), model="/m.gguf") == f"{model}LLAMA_ARG_REPACK=0\n{placed}"
    )


SERVED = {"workload": {"name": "serve:concurrency=3,pp=20,tg=6", "tg": 6}, "baseline": {"tg6_served3": 9.0}}


@pytest.mark.parametrize(
    ("version", "settings", "words"),
    [
        ("llama.cpp-0c1e570", {"sequences": 8}, "-np 8 -kvu"),
        ("llama.cpp-0c1e570", {"sequences": 8, "kv_unified": False}, "-np 8 -no-kvu"),
        ("llama.cpp-0c1e570", {"batch": 512}, "-b 512"),
        ("llama.cpp-4227c9b", {"sequences": 8}, "-np 8"),
        ("ik_llama.cpp-4840", {"sequences": 8}, "-np 8"),
    ],
)
def test_a_tune_of_a_load_is_exported_as_it_was_measured(
    tmp_path: Path, version: str, settings: dict[str, Any], words: str
) -> None:
    folder, engine = fake(tmp_path / "b", version), version.rpartition("-")[0]
    whole = _profile(engine, settings).model_dump(mode="json", exclude_none=True) | {"evidence": SERVED}
    profile = profiles.Profile.model_validate(whole)
    text = export(profile, "llama-server", binaries=str(folder), model="/m.gguf")
    assert text.split("-m /m.gguf ")[1].startswith(f"{words} -ngl 0")
    own = ["llama-server", "-np", "2", "-b", "1024", "-c", "9000"]
    merged = export(profile, "llama-server", binaries=str(folder), model="/m.gguf", command=own).split()
    assert (merged.count("-np"), merged.count("-b")) == (1, 1)
    assert merged[merged.index("-np") + 1] == str(settings.get("sequences", 2))
    assert merged[merged.index("-b") + 1] == str(settings.get("batch", 1024))
    assert merged[merged.index("-c") + 1] == "9000"
    assert "-kvu" not in merged  # with a number of slots, the user's server has no buffer for all of them


def test_a_model_without_an_option_name_is_found() -> None:
    for words in ("tune /a/m.gguf --bin /b --force", "tune --force --bin /b /a/m.gguf", "tune -m /a/m.gguf"):
        assert tuned_with(_profile("llama.cpp", {"ubatch": 64}, words))[1] == "/a/m.gguf"
    other = _profile("llama.cpp", {"ubatch": 64}, "tune --bin /b -- llama-server -md /c/d.gguf")
    assert tuned_with(other)[1] is None


GPU = {"kind": "cuda", "compute_capability": "9.0", "sm_count": 132, "memory_mib": 143771}


def _ended(profile: profiles.Profile, status: str | None, **settings: Any) -> profiles.Profile:
    whole = profile.model_dump(mode="json", exclude_none=True)
    whole["settings"] |= settings
    whole["provenance"] = {**whole["provenance"], **({"status": status} if status else {})}
    return profiles.Profile.model_validate(whole)


@pytest.mark.parametrize(
    ("version", "line", "wanted"),
    [
        ("llama.cpp-0c1e570", "--gpu 1", "-ngl 999 -fit off"),
        ("llama.cpp-0c1e570", "--device=cuda:1", "-ngl 999 -fit off"),
        ("llama.cpp-4227c9b", "--gpu 1", "-ngl 999"),
        ("ik_llama.cpp-4840", "--gpu 1", "-ngl 999"),
    ],
)
def test_export_places_as_was_measured(tmp_path: Path, version: str, line: str, wanted: str) -> None:
    engine = version.rpartition("-")[0]
    folder = str(fake(tmp_path / "b", version))
    profile = _profile(engine, {"ubatch": 64}, f"tune {line} --bin b")
    whole = profile.model_dump(mode="json", exclude_none=True)
    whole["match"]["device"] = GPU
    profile = profiles.Profile.model_validate(whole)
    seen = "env CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=1"
    assert export(profile, "llama-server", binaries=folder, model="/m.gguf") == (
        f"{seen} {folder}/llama-server -m /m.gguf -ub 64 {wanted}\n"
    )
    own = ["CUDA_VISIBLE_DEVICES=3", "llama-server", "-ngl", "20"]
    said: list[str] = []
    text = export(profile, "llama-server", binaries=folder, model="/m.gguf", command=own, tell=said.append)
    assert "CUDA_VISIBLE_DEVICES=3 " in text
    assert "-ngl 20 -ub 64" in text
    assert "999" not in text
    assert said == ["CUDA_VISIBLE_DEVICES=3 of the command line stays, but the tune measured '1'"]


def test_export_hides_gpus_that_no_run_had(tmp_path: Path) -> None:
    folder = fake(tmp_path / "b", "llama.cpp-0c1e570")
    (folder / "libggml-cuda.so").write_bytes(b"GGML_CUDA_DISABLE_GRAPHS\0")
    text = export(_profile("llama.cpp", {}), "llama-server", binaries=str(folder), model="/m.gguf")
    assert text == f"env CUDA_VISIBLE_DEVICES= {folder}/llama-server -m /m.gguf -ngl 0 -fit off\n"


@pytest.mark.parametrize(
    ("status", "flags", "why"),
    [
        ("complete", "-fa off", "is omitted, because the default was as fast"),
        (
            "budget",
            "-ub 64 -fa off",
            "stays: the tune ended with status 'budget', so its default is not proven",
        ),
        ("interrupted", "-ub 64 -fa off", "stays: the tune ended with status 'interrupted'"),
        (None, "-ub 64 -fa off", "stays: the profile does not record how the tune ended"),
    ],
)
def test_export_keeps_what_no_tune_has_beaten(
    tmp_path: Path, status: str | None, flags: str, why: str
) -> None:
    folder = str(fake(tmp_path / "b", "llama.cpp-0c1e570"))
    profile = _ended(_profile("llama.cpp", {"threads": 2}), status, ubatch="default")
    own = ["llama-server", "-m", "x/m.gguf", "-ub", "64", "-fa", "off", "-t", "8"]
    said: list[str] = []
    text = export(profile, "llama-server", binaries=folder, model="/m.gguf", command=own, tell=said.append)
    assert text == f"{folder}/llama-server -m /m.gguf {flags} -t 2 -ngl 0 -fit off\n"
    assert said[0].startswith("ubatch: 64 of the command line")
    assert why in said[0]
    assert said[1:] == ["flash_attention: False of the command line stays: no tune has searched it"]


def test_export_keeps_a_policy_and_further_cuda_parameters(tmp_path: Path) -> None:
    folder = str(fake(tmp_path / "b", "ik_llama.cpp-4840"))
    own = ["llama-server", "-op", "28,0,31,0", "-cuda", "fa-offset=0.5,graphs=0", "-mla", "2"]
    profile = _profile("ik_llama.cpp", {"fusion": False})
    text = export(profile, "llama-server", binaries=folder, model="/m.gguf", command=own)
    assert "-mla 2 " in text
    assert " -op 28,0,31,0 -cuda fa-offset=0.5,graphs=0,fusion=0\n" in text
    with pytest.raises(TuneError, match="26 is MULTI_ADD in this binary"):
        export(profile, "llama-server", binaries=folder, model="/m", command=["llama-server", "-op", "26,0"])


def test_another_model_in_the_command_line_is_said(tmp_path: Path, model: str) -> None:
    folder = fake(tmp_path / "b", "llama.cpp-0c1e570")
    said: list[str] = []
    own = ["llama-server", "-m", "other.gguf"]
    profile = _profile("llama.cpp", {})
    export(profile, "llama-server", binaries=str(folder), model="/m.gguf", command=own, tell=said.append)
    assert said == ["-m other.gguf of the command line is replaced by /m.gguf, the tuned or given model"]
    for named, count in (("other.gguf", 1), (model, 0), (f"elsewhere/{model.rpartition('/')[2]}", 0)):
        target = GgmlTarget("llama.cpp", model, str(folder), command=["llama-server", "-m", named])
        notes = target.describe().engine["notes"]
        target.close()
        assert len(notes) == count
        assert all("other.gguf is not the file of --model" in n for n in notes)


def test_export_refuses_by_name(tmp_path: Path) -> None:
    ik = str(fake(tmp_path / "i", "ik_llama.cpp-3848"))
    with pytest.raises(TuneError, match="mmq_id_size"):
        export(_profile("ik_llama.cpp", {"mmq_id_size": 0}), "systemd", binaries=ik, model="m")
    with pytest.raises(TuneError, match="-ub has no environment variable"):
        export(_profile("ik_llama.cpp", {"ubatch": 64}), "env", binaries=ik, model="m")
    policy = _profile("ik_llama.cpp", {"op_offload.matmul": False})
    assert "-op 27,0" in export(policy, "systemd", binaries=ik, model="m")
    with pytest.raises(TuneError, match="FUSED_UP_GATE in this binary is unknown"):
        export(_profile("ik_llama.cpp", {"op_offload.up_gate": False}), "systemd", binaries=ik, model="m")
    with pytest.raises(TuneError, match="docker"):
        export(_profile("ik_llama.cpp", {}), "docker", binaries=ik, model="m")
    bench = str(fake(tmp_path / "x", "llama.cpp-0c1e570", ("llama-bench",)))
    with pytest.raises(TuneError, match="no llama-server"):
        export(_profile("llama.cpp", {}), "env", binaries=bench, model="m")


def test_what_a_profile_was_tuned_with() -> None:
    line = "tune --engine llama.cpp --bin=/b -m 'x y.gguf' -- llama-server -m z.gguf"
    found = tuned_with(_profile("llama.cpp", {}, line))
    assert found == ("/b", "x y.gguf", ["llama-server", "-m", "z.gguf"])
    assert tuned_with(_profile("llama.cpp", {})) == (None, None, [])
    held = "tune --engine llama.cpp --set threads=3 --set=cpu_repack=off -- llama-server --set x=1"
    assert held_with(_profile("llama.cpp", {}, held)) == {"threads": 3, "cpu_repack": False}
    own_type = "tune --engine llama.cpp --set kv_type_k=q4_0 --set placement=exps=cpu,x=cuda:0"
    found_held = held_with(_profile("llama.cpp", {}, own_type))
    assert found_held == {"kv_type_k": "q4_0", "placement": "exps=cpu,x=cuda:0"}
    with pytest.raises(TuneError, match="--set threads=many"):
        held_with(_profile("llama.cpp", {}, "tune --set threads=many"))


def test_a_unit_keeps_control_characters_on_their_line(tmp_path: Path) -> None:
    folder = fake(tmp_path / "b", "llama.cpp-0c1e570")
    unit = export(_profile("llama.cpp", {}), "systemd", binaries=str(folder), model="/m\r\n\t\x7f.gguf")
    assert r'llama-server -m "/m\x0d\x0a\x09\x7f.gguf" ' in unit
    assert "\r" not in unit


def test_a_hostile_name_of_a_model_reaches_no_terminal_raw(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, path = fake(tmp_path / "b", "llama.cpp-0c1e570"), tmp_path / "p.yaml"
    profiles.save_profile(_profile("llama.cpp", {}), path)
    own = ["llama-server", "-m", "x.gguf"]
    cli_export.export(path, own, "systemd", str(folder), "/m\r\n\x1b[2J.gguf")
    assert capsys.readouterr().err == (
        "-m x.gguf of the command line is replaced by /m\\r\\n\\x1b[2J.gguf, the tuned or given model\n"
    )


@pytest.mark.parametrize("form", ["llama-server", "systemd"])
def test_no_secret_is_exported(tmp_path: Path, form: str) -> None:
    folder = fake(tmp_path / "b", "llama.cpp-0c1e570")
    own = ["HF_TOKEN=s3cr3t", "llama-server", "-m", "m.gguf", "--api-key", "s3cr3t", "--port", "80"]
    told: list[str] = []
    text = export(
        _profile("llama.cpp", {}), form, binaries=str(folder), model="/m", command=own, tell=told.append
    )
    assert "s3cr3t" not in text
    assert "--port 80" in text
    assert "***" in text
    assert len([line for line in told if "written as ***" in line]) == 2


def test_a_file_of_variables_keeps_the_users_command_line(tmp_path: Path) -> None:
    folder = fake(tmp_path / "b", "llama.cpp-0c1e570")
    told: list[str] = []
    own = ["llama-server", "-ngl", "60", "--port=9000", "--no-slots", "-nocb", "--no-host", "-ub", "64"]
    own += ["--temp", "0.5", "--samplers", "top_k;top_p"]
    text = export(
        _profile("llama.cpp", {"ubatch": 1024}), "env", binaries=str(folder), model="/m.gguf", command=own,
        tell=told.append,
    )  # fmt: skip
    assert text.splitlines() == [
        "# these words have no environment variable, so give them to the server: --samplers 'top_k;top_p'",
        "LLAMA_ARG_MODEL=/m.gguf",
        "LLAMA_ARG_N_GPU_LAYERS=60", "LLAMA_ARG_PORT=9000", "LLAMA_ARG_ENDPOINT_SLOTS=0",
        "LLAMA_ARG_CONT_BATCHING=0", "LLAMA_ARG_NO_HOST=1", "LLAMA_ARG_TEMPERATURE=0.5",
        "LLAMA_ARG_UBATCH=1024", "LLAMA_ARG_FIT=off",
    ]  # fmt: skip
    assert [line for line in told if "--samplers" in line] == [
        "--samplers 'top_k;top_p' have no environment variable: give these words to the server as well"
    ]


def test_a_negation_without_an_opposite_is_set_by_its_variable(tmp_path: Path) -> None:
    """An older llama-server has LLAMA_ARG_NO_REPACK alone, and 0 there would leave repacking on."""
    folder = fake(tmp_path / "b", "llama.cpp-4227c9b")
    profile = _profile("llama.cpp", {"cpu_repack": False})
    text = export(
        profile, "env", binaries=str(folder), model="/m.gguf", command=["llama-server", "--no-mmap"]
    )
    assert {"LLAMA_ARG_NO_MMAP=1", "LLAMA_ARG_NO_REPACK=1"} <= set(text.splitlines())


def test_the_command_that_exports(tmp_path: Path) -> None:
    folder = fake(tmp_path / "b", "llama.cpp-0c1e570")
    path = tmp_path / "p.yaml"
    line = f"tune --engine llama.cpp --bin {folder} -m /m.gguf -- llama-server -ub 64 --port 80"
    profiles.save_profile(_profile("llama.cpp", {"ubatch": 1024}, line), path)
    words = ["profiles", "export", str(path), "--as", "llama-server"]
    asked = CliRunner().invoke(dyno_app, words)
    assert f"--bin {folder}" in str(asked.exception)
    with pytest.raises(FileNotFoundError):
        calls(folder, "llama-server")  # a stranger's profile chooses no program
    done = CliRunner().invoke(dyno_app, [*words, "--bin", str(folder)])
    assert done.output == f"{folder}/llama-server -m /m.gguf --port 80 -ub 1024 -ngl 0 -fit off\n"


@pytest.mark.parametrize("answer", [True, False])
def test_recorded_binaries_are_confirmed_at_a_terminal(monkeypatch: pytest.MonkeyPatch, answer: bool) -> None:
    questions: list[str] = []

    def confirm(question: str, **_: Any) -> bool:
        questions.append(question)
        return answer

    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setattr("typer.confirm", confirm)
    profile = _profile("llama.cpp", {}, "tune --bin '/b c' -m m.gguf")
    path = Path("p.yaml")
    if answer:
        assert binaries_folder(path, profile, None) == "/b c"
    else:
        with pytest.raises(TuneError, match="not run"):
            binaries_folder(path, profile, None)
    assert questions == ["profile p.yaml was tuned with programs in /b c; run them?"]
    with pytest.raises(TuneError, match="relative folder 'b/c'"):
        binaries_folder(path, _profile("llama.cpp", {}, "tune --bin b/c -m m.gguf"), None)
    assert binaries_folder(path, profile, "/mine") == "/mine"
    assert len(questions) == 1


def test_binaries_in_a_relative_folder(tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tools run in folders of their own, where a relative path names nothing."""
    folder = fake(tmp_path / "bins" / "x", "ik_llama.cpp-4840")
    (tmp_path / "m.gguf").symlink_to(model)
    monkeypatch.chdir(tmp_path)
    install = Installation("bins/x", "ik_llama.cpp")
    assert install.bench == f"{folder}/llama-bench"
    assert engine_in(Path("bins/x")) == "ik_llama.cpp"
    assert install.op_ids("m.gguf")["MUL_MAT"] == 27
    asked = next(c["args"] for c in calls(folder, "llama-perplexity") if "-op" in c["args"])
    assert asked[asked.index("-m") + 1] == f"{tmp_path}/m.gguf"
    text = export(_profile("ik_llama.cpp", {}), "llama-server", binaries="bins/x", model="m.gguf")
    assert text == f"{folder}/llama-server -m {tmp_path}/m.gguf -ngl 0\n"


def test_a_recorded_command_names_its_files_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    line = ["--engine", "llama.cpp", "--bin", "b", "--model=m.gguf", "--out", "p", "--", "x", "-m", "y"]
    monkeypatch.setattr(sys, "argv", ["tune", *line])
    profile = _profile("llama.cpp", {}, command_line(("--bin", "--model", "-m")))
    assert tuned_with(profile) == (f"{tmp_path}/b", f"{tmp_path}/m.gguf", ["x", "-m", "y"])
    assert command_line() == "tune " + " ".join(line)


def test_a_profile_of_another_engine_is_verified(tmp_path: Path, model: str) -> None:
    folder = fake(tmp_path / "b", "llama.cpp-0c1e570", wrong="-ub 999")
    line = f"tune --engine llama.cpp --bin {folder} -m {model} -- llama-server -t 2 --port 80"
    profile = _profile("llama.cpp", {"ubatch": 64}, line)
    target = GgmlTarget("llama.cpp", model, str(folder))
    about = target.describe()
    target.close()
    match = profile.match.model_copy(update={"device": device_of(about, {}), "model": model_of(about)})
    profile = profile.model_copy(update={"match": match})
    path = tmp_path / "p.yaml"
    profiles.save_profile(profile, path)
    few = {"aa_processes": 2, "rounds": 2, "max_rounds": 2}
    with pytest.raises(TuneError, match=f"--bin {folder}"):
        verify(path, model, budget=None, quiet=True, options=few)
    verdicts, gain = verify(path, model, budget=None, quiet=True, options=few, binaries=str(folder))
    assert {v.entry: v.verdict for v in verdicts}["settings.ubatch"] == "keep"
    assert gain["pp"].ratio > 1.3
    profiles.save_profile(profile.model_copy(update={"provenance": None}), path)
    with pytest.raises(TuneError, match="give --bin"):
        verify(path, model, quiet=True)
