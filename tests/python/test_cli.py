"""The command line: what goes where, exit codes, one-line errors."""

from __future__ import annotations

import csv
import io
import json
import logging
import os
import re
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import typer
from dyno import _core, cli, info
from dyno._cli import bench, options, state
from dyno._vocabulary import TokenType
from dyno.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True)
class Done:
    """What a finished command leaves."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def dyno(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Any]:
    """Runs `dyno ARGUMENTS` in this process, without the profiles of this machine."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("DYNO_SITE_PROFILES", str(tmp_path / "site"))
    monkeypatch.setattr("dyno.profiles.layers.shipped_folder", lambda: tmp_path / "shipped")
    loggers = [logging.getLogger("dyno"), logging.getLogger("dyno.profiles.match")]
    before = [(list(log.handlers), log.propagate, log.level) for log in loggers]

    def run(*arguments: object, stdin: str = "") -> Done:
        monkeypatch.setattr(sys, "argv", ["dyno", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        monkeypatch.setattr(state, "_verbosity", 0)
        capsys.readouterr()
        code = 0
        try:
            cli.main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        out, err = capsys.readouterr()
        return Done(code, out, err)

    yield run
    for log, (handlers, propagate, level) in zip(loggers, before, strict=True):
        log.handlers[:], log.propagate = handlers, propagate
        log.setLevel(level)


@pytest.fixture
def tiny(tiny_dir: Path) -> Path:
    return tiny_dir / "llama-tiny.gguf"


# ---- arguments ----


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("512", [512]),
        ("1,2,4", [1, 2, 4]),
        ("1-4", [1, 2, 3, 4]),
        ("0-1024+512", [0, 512, 1024]),
        ("1-64*4,5", [1, 4, 16, 64, 5]),
    ],
)
def test_numbers(text: str, expected: list[int]) -> None:
    assert bench.numbers(text, "-p") == expected


@pytest.mark.parametrize(
    "text", ["", "x", "1,,2", "-1", "4-1", "1-4+0", "1-4*1", "0-8*2", "1-1000000", "1.5"]
)
def test_no_numbers(text: str) -> None:
    with pytest.raises(typer.BadParameter):
        bench.numbers(text, "-p")


def test_settings_from_options() -> None:
    assert options.settings(["cpu_repack=off", "ctx=64"], threads=2, ubatch=None) == {
        "cpu_repack": False,
        "ctx": 64,
        "threads": 2,
    }
    for given in (["ctx"], ["=3"], ["ctxx=3"], ["ctx=x"], ["threads=3"]):
        with pytest.raises(typer.BadParameter):
            options.settings(given, threads=2)


# ---- run ----


def test_run(dyno: Any, trained_model: Path) -> None:
    prompt = "def read_file(path):"
    done = dyno("run", "--model", trained_model, "--prompt", prompt, "-n", 24, "-t", 1)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(prompt)
    assert len(done.stdout) > len(prompt) + 20
    assert done.stderr == (
        f"profile: none for this model and device; run: tune --model {trained_model}\n"  # this line alone
    )
    limits = ("--virtual-device", "cpu:1,link_gbps=8,memory_mib=4096", "--vram", "2GiB")
    virtual = dyno("run", trained_model, "-p", "x", "-n", 1, "--device", "cpu:1", *limits).stderr
    same = "--device cpu:1 --virtual-device cpu:1,link_gbps=8,memory_mib=4096 --vram 2048MiB"
    assert virtual.splitlines()[-1].endswith(f"run: tune --model {trained_model} {same}")
    chain = dyno("run", "-v", "--model", trained_model, "--prompt", prompt, "-n", 1).stderr
    assert "  exact match: none (no profiles found)\n" in chain
    again = dyno("run", "-m", trained_model, "-p", "-", "-n", 24, "--no-echo", "-v", stdin=prompt)
    assert prompt + again.stdout == done.stdout
    assert "t/s" in again.stderr


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_a_prompt_from_stdin_is_text(monkeypatch: pytest.MonkeyPatch, errors: str) -> None:
    """Python's own error would name a codec, and in some locales it would pass on the wrong byte."""
    wrong = io.TextIOWrapper(io.BytesIO(b"Gr\xfc\xdfe"), encoding="utf-8", errors=errors)
    monkeypatch.setattr(sys, "stdin", wrong)
    with pytest.raises(ValueError, match=r"standard input is not UTF-8 text: byte 2 is 0xfc; .* iconv"):
        options.text_of_stdin()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("a\r\nü".encode()), encoding="utf-8"))
    assert options.text_of_stdin() == "a\nü"
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(ValueError, match="standard input is closed; give the prompt with -p TEXT or -f FILE"):
        options.text_of_stdin()


def test_a_closed_stdout_is_an_error_of_one_line(trained_model: Path) -> None:
    """A service manager may start a command without it."""
    words = [sys.executable, "-m", "dyno", "run", str(trained_model), "-p", "x", "-n", "1"]
    script = 'exec "$@" >&-'
    done = subprocess.run(["sh", "-c", script, "sh", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "error: standard output is closed, so the text cannot be printed; use > FILE\n"


def test_an_error_amid_the_text_begins_a_line(dyno: Any, trained_model: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.gguf"
    whole = bytearray(trained_model.read_bytes())
    (norm,) = (t for t in _core.Gguf(str(trained_model)).tensors() if t["name"] == "output_norm.weight")
    whole[norm["offset"] : norm["offset"] + 4] = np.float32(np.nan).tobytes()
    damaged.write_bytes(whole)
    done = dyno("run", "-m", damaged, "-p", "x = 1", "-n", 4)
    assert done.returncode == 1
    assert done.stdout == "x = 1\n"
    assert "\nerror: [generate] the logits after position" in done.stderr


def test_run_reads_names_of_control_tokens_as_text_if_asked(dyno: Any, trained_model: Path) -> None:
    vocabulary = Tokenizer.from_gguf(trained_model).vocabulary
    name = next(t for t, k in zip(vocabulary.tokens, vocabulary.types, strict=True) if k == TokenType.CONTROL)
    counts = []
    for option in ("--special", "--no-special"):
        done = dyno("run", "-m", trained_model, "-p", f"x = 1{name}", option, "-n", 1, "-v")
        assert done.returncode == 0, done.stderr
        counts.append(int(done.stderr.split("prompt ")[1].split(" tokens")[0]))
    assert counts[0] < counts[1]


def test_names_of_a_hostile_file_reach_no_terminal_raw(dyno: Any, tmp_path: Path) -> None:
    from dyno.testing.gguf_writer import tiny_gguf

    path = tmp_path / "a\x1b[2J.gguf"
    tiny_gguf(path, {"general.architecture": "llama", "general.name": "x\x1b]0;owned\x07"})
    shown = dyno("explain", "gguf", path)
    assert shown.returncode == 0, shown.stderr
    assert "\x1b" not in shown.stdout
    assert r"\x1b]0;owned\x07" in shown.stdout
    for words in (("run", "-m", path, "-p", "x"), ("run", "-m", tmp_path / "b\x1b[2J.gguf", "-p", "x")):
        failed = dyno(*words)
        assert failed.returncode == 1
        assert "\x1b" not in failed.stderr


def test_run_with_a_profile(dyno: Any, tiny: Path, trained_model: Path, tmp_path: Path) -> None:
    missing = dyno("run", "-m", trained_model, "-p", "x", "--require-profile")
    assert (missing.returncode, missing.stdout) == (1, "")
    last = missing.stderr.splitlines()[-1]
    assert last.startswith("error: [profile] a profile is required")
    assert "run `tune` for this model on this device, or leave out --require-profile" in last
    both = dyno("run", "-m", trained_model, "-p", "x", "--no-profile", "--require-profile")
    assert both.returncode == 2
    none = dyno("run", "-m", trained_model, "-p", "x", "--profile", tmp_path / "none.yaml")
    assert none.returncode == 1
    assert "none.yaml" in none.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("run", "-m", "missing.gguf", "-p", "x"), 1, "error: [gguf]"),
        (("run", "-m", "TINY", "-p", "x", "--device", "cuda:999"), 1, "'cuda:999'"),
        (("run", "-m", "TINY", "-p", "x", "-c", "99999999"), 1, "99999999"),
        (("run", "-m", "TINY", "-p", "x", "--temp", "-1"), 2, "--temperature: -1.0 is not valid"),
        (("run", "-m", "TINY", "-f", "missing.txt"), 1, "error: missing.txt: No such file"),
        (("run", "-m", "TINY"), 2, "or -p - for standard input"),
        (("run", "-m", "TINY", "-p", "x", "--set", "threds=2"), 2, "did you mean 'threads'"),
        (("run", "-p", "x"), 2, "--model"),
        (("nothing",), 2, "nothing"),
        (("bench", "-m", "TINY", "-p", "0", "-n", "0"), 1, "nothing to measure"),
        (("bench", "-m", "TINY", "-p", "x"), 2, "neither a number nor a range"),
        (("bench", "-m", "TINY", "-o", "xml"), 2, "choose from md, json, jsonl, csv"),
        (("perplexity", "-m", "TINY"), 2, "--file"),
        (("perplexity", "-m", "TINY", "--reference", "TINY"), 1, "is not a reference that dyno wrote"),
        (("perplexity", "-m", "TINY", "--reference", "TINY", "--chunks", "0"), 2, "--chunks"),
        (("perplexity", "-m", "TINY", "--reference", "TINY", "--chunks", "-1"), 2, "--chunks"),
        (("explain", "plans", "TINY"), 2, "plans"),
        (("profiles", "check", "missing.yaml"), 1, "missing.yaml"),
    ],
)
def test_errors(dyno: Any, tiny: Path, arguments: tuple[str, ...], code: int, message: str) -> None:
    done = dyno(*[str(tiny) if a == "TINY" else a for a in arguments])
    assert done.returncode == code, done.stderr
    assert message in done.stderr + done.stdout
    assert "Traceback" not in done.stderr
    if code == 1 and arguments[0] != "profiles":
        assert sum(line.startswith("error: ") for line in done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("-p", "x", "--temp", "nan"), "--temperature: nan is not valid; the value must be at least 0"),
        (("-p", "x", "--top-p", "2"), "--top-p: 2.0 is not valid; the value must be in [0, 1]"),
        (("-p", "x", "--repeat-last-n", "-2"), "--repeat-last-n: -2 is not valid"),
        (("-p", ""), "--prompt: the prompt is empty"),
        (("-f", "EMPTY"), "--file: the prompt is empty"),
        (("-p", "x", "-j", "{"), "--json-schema: json_schema cannot be read"),
        (("-p", "x", "-j", "x.json"), "; for the content of a file, give --json-schema-file"),
        (("-p", "x", "-j", "EMPTY"), "; for the content of a file, give --json-schema-file"),
        (("-p", "x", "--grammar", "x.gbnf"), "; for the content of a file, give --grammar-file"),
        (("-p", "x", "-j", "5"), "--json-schema: json_schema cannot be read: 5 is not a JSON schema"),
        (
            ("-p", "x", "-j", '{"type": "objekt"}'),
            "--json-schema: json_schema cannot be used: Invalid type: objekt",
        ),
        (("-p", "x", "--grammar", 'start: "a" b'), "--grammar: grammar cannot be used"),
    ],
)
def test_a_bad_value_costs_no_load(
    dyno: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], message: str
) -> None:
    model = Path(__file__).parents[2] / "models/pycode-moe-20m-Q4_K_M.gguf"
    (tmp_path / "empty.txt").touch()
    monkeypatch.setattr("dyno.engine.Engine", None)  # a call of it would be an error of another kind
    given = [str(tmp_path / "empty.txt") if word == "EMPTY" else word for word in words]
    done = dyno("run", model, *given)
    assert (done.returncode, message in " ".join(done.stderr.split())) == (2, True), done.stderr


@pytest.mark.parametrize("words", [("perplexity", "-f"), ("experts", "--text")])
def test_a_missing_text_costs_no_load(
    dyno: Any, trained_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, str]
) -> None:
    monkeypatch.setattr("dyno.engine.Engine", None)
    done = dyno(words[0], trained_model, words[1], tmp_path / "absent.txt")
    assert (done.returncode, done.stderr) == (1, f"error: {tmp_path}/absent.txt: No such file or directory\n")


@pytest.mark.parametrize("words", [("perplexity", "-c", "64", "-f"), ("experts", "--tokens", "64", "--text")])
def test_a_text_may_be_a_pipe(trained_model: Path, tmp_path: Path, words: tuple[str, ...]) -> None:
    """It can be opened only once."""
    pipe, text = tmp_path / "text", "def add(a, b):\n    return a + b\n\n\n" * 20
    os.mkfifo(pipe)
    threading.Thread(target=pipe.write_text, args=(text, "utf-8"), daemon=True).start()
    done = subprocess.run(
        [sys.executable, "-P", "-m", "dyno", *words, str(pipe), "-m", str(trained_model)],
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=600,  # it would wait for ever
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_one_chunk_is_counted_as_one(dyno: Any, trained_model: Path, tmp_path: Path) -> None:
    text = tmp_path / "t.txt"
    text.write_text("def add(a, b):\n    return a + b\n\n\n" * 40)
    words = ("perplexity", "-m", trained_model, "-f", text, "-c", 64, "--chunks")
    assert ", 1 chunk of 64)" in dyno(*words, 1).stdout
    assert ", 2 chunks of 64)" in dyno(*words, 2).stdout


def test_verbose_shows_the_trace(dyno: Any) -> None:
    for arguments in (("-v", "run"), ("run", "-v")):
        done = dyno(*arguments, "-m", "missing.gguf", "-p", "x")
        assert "Traceback" in done.stderr
        assert done.stderr.splitlines()[-1].startswith("error: ")


def test_a_reader_that_goes_away(trained_model: Path, tmp_path: Path) -> None:
    """`dyno run | head -c 5` ends without a trace."""
    command = [
        sys.executable,
        "-m",
        "dyno",
        "run",
        "-m",
        str(trained_model),
        "-p",
        "import os\n",
        "-n",
        "400",
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(5)
        process.stdout.close()
        errors = process.stderr.read().decode()
        assert process.wait() == 1
    assert "Traceback" not in errors
    assert "BrokenPipe" not in errors


# ---- the other commands ----


def test_the_module_is_the_command() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-m", "dyno", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert "perplexity" in done.stdout


def test_info(dyno: Any) -> None:
    facts = json.loads(dyno("info", "--json").stdout)
    assert facts["devices"][0]["kind"] == "cpu"
    assert {"version", "compiler", "switches", "isas"} <= facts["build"].keys()
    text = dyno("info").stdout
    assert all(name in text for name in facts["build"]["switches"])
    assert facts["build"]["compiler"] in text
    assert "built for         CPU" in text
    assert facts["devices"][0]["name"] in text
    assert dyno("--version").stdout == f"dyno {facts['build']['version']}\n"


def test_info_says_for_which_devices_the_module_is_built() -> None:
    assert info._built_for({"GGML_CUDA": "OFF"}).startswith("CPU only; with CUDA: ")
    both = info._built_for({"GGML_CUDA": "ON", "CMAKE_CUDA_ARCHITECTURES": "75;90a"})
    assert both.startswith("CPU and CUDA (architectures 75, 90a)")


@pytest.mark.parametrize("stage", ["gguf", "model", "plan", "ops"])
def test_explain(dyno: Any, tiny: Path, stage: str) -> None:
    done = dyno("explain", stage, tiny, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    text = dyno("explain", stage, tiny).stdout
    if stage == "gguf":
        assert found["metadata"]["general.architecture"] == "llama"
        assert found["metadata"]["tokenizer.ggml.tokens"]["length"] == 320
        assert {"output.weight"} <= {t["name"] for t in found["tensors"]}
    elif stage == "model":
        assert found["architecture"] == "llama"
        assert len(found["layers"]) == found["n_layers"]
    elif stage == "plan":
        assert found["settings"]["ctx"] == {"value": 4096, "origin": "default"}
        assert "kv_type_k" in text
    else:
        assert all(op["reason"] for op in found["ops"])
        assert "default heuristic" in text
    assert text.strip()


def test_explain_plan_of_several_sequences(dyno: Any, tiny: Path) -> None:
    from dyno.server.opening import ServedEngine

    given = ("explain", "plan", tiny, "--json", "--ctx", "64")
    with ServedEngine(tiny, ctx=64, plan_only=True) as served:
        count = int(served.settings["sequences"])
        for option in ("--sequences", "--parallel", "-np"):
            told = json.loads(dyno(*given, option, str(count)).stdout)
            assert told["settings"]["sequences"] == {"value": count, "origin": "argument"}
            assert told["kv_bytes"] == served.plan["kv_bytes"]
    assert count * json.loads(dyno(*given).stdout)["kv_bytes"] == told["kv_bytes"]
    assert dyno(*given, "--sequences", "0").returncode == 2


def test_explain_plan_says_what_exceeds_a_limit(dyno: Any, trained_model: Path) -> None:
    """It is the command to ask before a model runs on a smaller machine."""
    words = ("explain", "plan", trained_model, "--ram", "64MiB", "--sequences")
    done = dyno(*words, 64)
    assert done.returncode == 0
    assert re.search(r"warning: cpu needs \d+\.\d MiB, and its limit is 64\.0 MiB: the model", done.stderr)
    assert dyno("run", trained_model, "-p", "x", "--ram", "64MiB", "--set", "sequences=64").returncode == 1
    assert "its limit is" not in dyno(*words, 4).stderr


def test_explain_plan_prints_every_launch_when_asked(dyno: Any, tiny: Path) -> None:
    assert "nodes" not in json.loads(dyno("explain", "plan", tiny, "--json").stdout)
    nodes = json.loads(dyno("explain", "plan", tiny, "--nodes", "--json").stdout)["nodes"]
    assert [node["name"] for node in nodes][:2] == ["token_embd", "blk.0.attn_norm"]
    text = dyno("explain", "plan", tiny, "--nodes").stdout
    (line,) = [line for line in text.splitlines() if " blk.0.attn_norm: " in line]
    assert "norm n=" in line
    assert "x=read residual @" in line
    assert "weight=blk.0.attn_norm.weight" in line
    assert "residual=" not in line  # an operand that the launch does not have


def test_bench_formats(dyno: Any, tiny: Path) -> None:
    arguments = (
        "bench",
        "-m",
        tiny,
        "-p",
        "8",
        "-n",
        "2",
        "-d",
        "0,4",
        "-r",
        "2",
        "-ub",
        "4,8",
        "--no-warmup",
    )
    done = dyno(*arguments, "-o", "json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    found = [(r["n_ubatch"], r["n_depth"], r["n_prompt"], r["n_gen"]) for r in rows]
    assert found == [(u, d, p, n) for u in (4, 8) for d in (0, 4) for p, n in ((8, 0), (0, 2))]
    assert all(len(r["samples_ns"]) == len(r["samples_ts"]) == 2 for r in rows)
    assert all(min(r["samples_ts"]) > 0 for r in rows)
    table = list(csv.DictReader(io.StringIO(dyno(*arguments, "-o", "csv").stdout)))
    assert len(table) == 8
    lines = dyno(*arguments, "-o", "md").stdout.splitlines()
    assert len(lines) == 10
    assert "n_ubatch" in lines[0]
    assert "pp8 @ d4" in lines[4]
    jsonl = dyno(*arguments, "-o", "jsonl").stdout.splitlines()
    assert [json.loads(line)["test"] for line in jsonl][:2] == ["pp8", "tg2"]


def test_bench_takes_context_settings(dyno: Any, tiny: Path) -> None:
    done = dyno(
        *(
            "bench",
            "-m",
            tiny,
            "-p",
            "0",
            "-n",
            "0",
            "-pg",
            "8,2",
            "-ctk",
            "f16,q8_0",
            "-r",
            "1",
            "-o",
            "json",
        ),
        *("-t", "1,2", "-tb", "1", "-b", "3", "--no-warmup"),
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [(r["type_k"], r["n_threads"], r["n_threads_batch"]) for r in rows] == [
        (k, t, 1) for k in ("f16", "q8_0") for t in (1, 2)
    ]
    assert {r["test"] for r in rows} == {"pp8+tg2"}


def test_help_names_the_types_that_the_cache_takes(dyno: Any, tiny: Path) -> None:
    (option,) = options.KvTypeK.__metadata__
    named = option.help.partition(": ")[2].partition(". Default")[0].replace(" or ", ", ").split(", ")
    assert len(named) >= 4
    for kind in named:
        done = dyno("perplexity", "-m", tiny, "-f", os.devnull, "-ctk", kind)
        assert "kv_type_k" not in done.stderr, done.stderr
    assert "kv_type_k" in dyno("perplexity", "-m", tiny, "-f", os.devnull, "-ctk", "auto").stderr


def test_perplexity_and_references(dyno: Any, trained_model: Path, eval_text: Path, tmp_path: Path) -> None:
    reference = tmp_path / "reference.npz"
    common = ("perplexity", "-m", trained_model, "--ctx", 64, "--chunks", 2, "--json")
    saved = dyno(*common, "-f", eval_text, "--save-reference", reference)
    assert saved.returncode == 0, saved.stderr
    first = json.loads(saved.stdout)
    assert (first["tokens"], first["chunks"]) == (2 * 31, 2)
    assert 2 < first["ppl"] < 60
    compared = dyno(*common, "--reference", reference)
    assert compared.returncode == 0, compared.stderr
    second = json.loads(compared.stdout)
    assert second["ppl"] == pytest.approx(first["ppl"], rel=1e-9)
    assert second["ppl_ratio"] == pytest.approx(1.0, rel=1e-9)
    assert second["mean_kld"] < 1e-6
    assert second["top1_agreement"] == 1.0
    rough = dyno(*common, "--reference", reference, "--kv-type-k", "q8_0", "--kv-type-v", "q8_0")
    assert 1e-6 < json.loads(rough.stdout)["mean_kld"] < 1e-1
    assert "mean KLD" in dyno(*common[:-1], "--reference", reference).stdout


def test_a_reference_that_cannot_be_saved_is_said_at_once(dyno: Any, eval_text: Path, tmp_path: Path) -> None:
    """Before the model is opened, let alone computed with."""
    done = dyno("perplexity", "-m", tmp_path / "absent.gguf", "-f", eval_text, "--save-reference", tmp_path)
    assert (done.returncode, done.stderr) == (1, f"error: {tmp_path}: Is a directory\n")


def test_a_reference_of_another_vocabulary(
    dyno: Any, tiny: Path, trained_model: Path, eval_text: Path, tmp_path: Path
) -> None:
    reference = tmp_path / "reference.npz"
    common = ("perplexity", "--ctx", 64, "--chunks", 1)
    saved = dyno(*common, "-m", trained_model, "-f", eval_text, "--save-reference", reference)
    assert saved.returncode == 0, saved.stderr
    refused = dyno(*common, "-m", tiny, "--reference", reference)
    assert refused.returncode == 1
    (line,) = [line for line in refused.stderr.splitlines() if line.startswith("error: ")]
    assert "has a vocabulary of" in line
    assert "320" in line


def test_profiles(dyno: Any, tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text("schema: 1\nlabel: x\nsettngs: {}\n")
    done = dyno("profiles", "check", bad)
    assert done.returncode == 1
    assert "settngs" in done.stdout
    report = json.loads(dyno("profiles", "check", bad, "--json").stdout)
    assert report[0]["ok"] is False
    assert dyno("profiles", "show", bad).returncode == 1
    folder = tmp_path / "config/dyno/profiles"
    folder.mkdir(parents=True)
    bad.rename(folder / "bad.yaml")
    (folder / "empty.yaml").touch()
    listed = dyno("profiles", "list")
    assert listed.returncode == 0
    assert f"user     {folder}/bad.yaml:3: settngs: unknown key" in listed.stdout
    assert f"user     {folder}/empty.yaml: empty" in listed.stdout
    assert isinstance(json.loads(dyno("profiles", "list", "--json").stdout), list)


def test_tune_is_the_tuner(dyno: Any) -> None:
    pytest.importorskip("dyno_tuner.cli")
    done = dyno("tune", "--help")
    assert done.returncode == 0, done.stderr
    assert "--budget" in done.stdout


@pytest.fixture(params=["", "1"], ids=["buffered", "unbuffered"])
def environment(request: pytest.FixtureRequest) -> dict[str, str]:
    paths = os.pathsep.join(p for p in sys.path if p)
    return {**os.environ, "PYTHONPATH": paths, "PYTHONUNBUFFERED": request.param}


def test_a_full_device_is_named(environment: dict[str, str]) -> None:
    command = [sys.executable, "-m", "dyno", "info"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, env=environment, check=False
        )
    assert done.returncode == 1
    assert done.stderr == "error: no space is left on the device that the output goes to\n"


def test_a_reader_that_has_gone_is_no_error_message(environment: dict[str, str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        command = [sys.executable, "-m", "dyno", "info"]
        done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, env=environment)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize(
    ("swapped", "ending"), [(0, ""), (1, "; 1 expert swapped"), (7, "; 7 experts swapped")]
)
def test_swaps_of_experts_are_told_in_words(
    swapped: int, ending: str, capsys: pytest.CaptureFixture[str]
) -> None:
    state.print_expert_choices({"chosen": 8, "cached": 6, "swapped": swapped}, "pp8")
    told = capsys.readouterr().err
    assert told == f"expert cache (pp8): 75.0 % hits in 8 choices of experts{ending}\n"
