"""The load of a server as a workload: of this engine in one process, of others over HTTP."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import typer
from dyno import Engine, Tokenizer
from dyno.profiles import load_profile
from dyno.testing import tiny_model
from dyno_tuner.cli.arguments import text_of_load
from dyno_tuner.core.errors import TargetFailure, TargetUnusable, TuneError
from dyno_tuner.core.protocol import Configuration, OpContext, Workload
from dyno_tuner.core.serve_load import ServedLoad
from dyno_tuner.output.emit import workload_of
from dyno_tuner.run.session import Request
from dyno_tuner.run.tune import Options
from dyno_tuner.run.verify import text_beside
from dyno_tuner.targets import declared
from dyno_tuner.targets.declaration import TargetRequest
from dyno_tuner.targets.dyno.prompts import Prompts, served_prompts
from dyno_tuner.targets.dyno.target import DynoTarget
from dyno_tuner.targets.ggml.target import GgmlTarget
from fake_engines import calls, fake
from real_tunes import tuned

if TYPE_CHECKING:
    from pathlib import Path

NOW = OpContext("test")
TEXT = "serve:concurrency=3,pp=20,tg=6,shared=0.5,rounds=2"
WORK = Workload.parse(TEXT)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "m.gguf", n_layers=1, n_ctx=512)


# ---- the workload ----


def test_a_load_is_read_and_written() -> None:
    assert str(WORK) == TEXT
    assert Workload.parse(str(WORK)) == WORK == Workload.from_dict(WORK.to_dict())
    assert Workload.parse("serve").served == ServedLoad()
    limited = Workload.parse("serve:ttft=0.5,itl=0.05")
    assert limited.served is not None
    assert (limited.served.ttft, limited.served.itl) == (0.5, 0.05)
    assert Workload.parse(str(limited)) == limited
    cut = Workload.parse(TEXT + ",text=my prompts.txt")
    assert cut.served is not None
    assert cut.served.text == "my prompts.txt"
    assert Workload.parse(str(cut)) == cut == Workload.from_dict(cut.to_dict())
    assert WORK.metrics == ("tg6_served3",)
    assert WORK.tokens("tg6_served3") == 3 * 2 * 6
    assert WORK.longest == 26
    assert WORK.bounds({"tg": 10.0}) == {"tg": 30.0}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("serve:clients=3", "no parameter 'clients'; known: concurrency"),
        ("serve:pp=0", "pp=0; give 1 to"),
        ("serve:pp=many", "pp='many'"),
        ("serve:pp=4,pp=5", "given more than once"),
        ("serve:shared=2", "a share from 0 to 1"),
        ("serve:ttft=0", "seconds above 0"),
        ("serve:text=", "give a file without a comma"),
        ("serve:text=a,b.txt", "no parameter 'b.txt'"),
    ],
)
def test_wrong_loads(text: str, words: str) -> None:
    with pytest.raises(TuneError, match=words):
        Workload.parse(text)


# ---- this engine ----


def target_of(file: Path, work: Workload) -> DynoTarget:
    asked = TargetRequest(str(file), longest=work.longest, served=True)
    return DynoTarget(**declared("dyno").worker_options(asked))


def test_the_engine_serves_the_load(file: Path) -> None:
    target = target_of(file, WORK)
    defaults = target.describe().engine["defaults"]
    assert (defaults["sequences"], defaults["ctx"]) == (4, 26)
    # A step has room for each sequence, whatever its setting.
    for settings in ({"sequences": 1}, {"sequences": 3}, {"sequences": 3, "step_tokens": 2}):
        target.apply(Configuration(settings), NOW)
        for prompt in (0, 1):
            sample = target.measure(WORK, "tg6_served3", prompt)
            assert sample.tokens == 36
            assert 0 < sample.seconds <= sample.clock_seconds * 1.02
        target.measure(Workload(pp=8, tg=4), "tg", 0)  # the session is fit for other work afterwards
    late = Workload.parse(TEXT + ",ttft=1e-9")
    with pytest.raises(TargetFailure, match=r"time to first token: .* the limit is 1e-09 s"):
        target.measure(late, "tg6_served3", 0)
    target.close()


def test_knobs_of_a_load(file: Path) -> None:
    target = target_of(file, WORK)
    description = target.describe()
    knobs = {k.name: k for k in declared("dyno").knobs(description, WORK, approx=True, held={})}
    assert knobs["sequences"].values == (1, 2, 3, 4)
    assert knobs["sequences"].default == 4
    assert {"ubatch", "kv_type_k"} <= set(knobs)
    assert {knob.moves for knob in knobs.values()} == {frozenset({"tg"})}
    alone = declared("dyno").knobs(description, Workload(), approx=False, held={})
    assert "sequences" not in {knob.name for knob in alone}
    target.close()


# ---- prompts from a text ----

CUT = Workload.parse(TEXT + ",text=mine.txt")
WORDS = "the quick brown fox jumps over the lazy dog and the quick brown cat sleeps. " * 40


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "mine.txt"
    path.write_text(WORDS, encoding="utf-8")
    return path


def test_prompts_are_passages_of_the_text(trained_model: Path, text: Path) -> None:
    assert CUT.served is not None
    source = Prompts(str(trained_model), 8192, str(text))
    prompts = served_prompts(CUT.served, source, 0)
    tokens = Tokenizer.from_gguf(trained_model).encode(WORDS)
    held = {tuple(tokens[i : i + 10]) for i in range(len(tokens))}
    assert len(prompts) == 6
    assert {len(prompt) for prompt in prompts} == {20}
    assert len({tuple(prompt[:10]) for prompt in prompts}) == 1  # half of each is shared
    assert {tuple(p[i : i + 10]) for p in prompts for i in (0, 10)} <= held
    assert served_prompts(CUT.served, source, 1) != prompts
    with pytest.raises(
        TargetUnusable, match=r"come from the text mine\.txt; give that file with --text FILE"
    ):
        served_prompts(CUT.served, Prompts(str(trained_model), 8192, None), 0)


def test_speculation_is_searched_where_prompts_are_a_text(trained_model: Path, text: Path) -> None:
    asked = TargetRequest(str(trained_model), longest=CUT.longest, served=True, text=str(text))
    target = DynoTarget(**declared("dyno").worker_options(asked))
    description = target.describe()
    random = {k.name for k in declared("dyno").knobs(description, WORK, approx=False, held={})}
    assert not random & {"spec", "spec_max"}
    knobs = {k.name: k for k in declared("dyno").knobs(description, CUT, approx=False, held={})}
    assert knobs["spec"].values == ("off", "ngram")
    assert knobs["spec_max"].code is not None
    assert knobs["spec_max"].code(4, {"spec": "off"}) == knobs["spec_max"].code(16, {}) == "unused"
    assert knobs["spec_max"].code(4, {"spec": "ngram"}) != knobs["spec_max"].code(16, {"spec": "ngram"})
    for settings in ({}, {"spec": "ngram", "spec_max": 4, "sequences": 2}):
        target.apply(Configuration(settings), NOW)
        assert target.measure(CUT, "tg6_served3", 0).tokens == 36
    target.close()


@pytest.mark.parametrize(
    ("version", "words"),
    [
        ("llama.cpp-0c1e570", ["--spec-type", "ngram-simple", "--spec-ngram-simple-size-m", "16"]),
        ("ik_llama.cpp-4840", ["--spec-type", "ngram-simple:n_max=16"]),
    ],
)
def test_llama_server_gets_passages_and_drafts(
    tmp_path: Path, trained_model: Path, text: Path, version: str, words: list[str]
) -> None:
    folder = fake(tmp_path / "b", version)
    engine = version.rpartition("-")[0]
    target = GgmlTarget(engine, str(trained_model), str(folder), served=True, text=str(text))
    knobs = {k.name: k for k in declared(engine).knobs(target.describe(), CUT, approx=True, held={})}
    assert set(knobs["spec"].values) == {"off", "ngram"}
    assert 48 in knobs["spec_max"].values
    assert "spec" not in {
        k.name for k in declared(engine).knobs(target.describe(), WORK, approx=True, held={})
    }
    for spec in ("off", "ngram"):
        target.apply(Configuration({"spec": spec, "spec_max": 16}), NOW)
        assert target.measure(CUT, "tg6_served3", 0).tokens == 36
    servers = [call["args"] for call in calls(folder, "llama-server") if "--port" in call["args"]]
    off, on = (args[args.index("--spec-type") :] for args in servers)
    assert off[:2] == ["--spec-type", "none"]
    assert on[: len(words)] == words
    quality = target.quality(Configuration({"spec": "ngram", "spec_max": 16}), NOW)
    assert quality.status == "ok"
    assert all("--spec-type" not in call["args"] for call in calls(folder, "llama-perplexity"))
    target.close()
    without = GgmlTarget(engine, str(trained_model), str(folder), served=True)
    without.apply(Configuration({}), NOW)
    with pytest.raises(TargetUnusable, match="give that file"):
        without.measure(CUT, "tg6_served3", 0)
    without.close()


def test_a_load_names_its_text_by_name(tmp_path: Path, text: Path) -> None:
    load = f"serve:pp=20,text={text}"
    named, found = text_of_load(load, None, foreign=True)
    assert found == text
    assert named is not None
    assert Workload.parse(named).served == ServedLoad(pp=20, text="mine.txt")
    assert text_of_load(load, text, foreign=False) == (named, text)
    assert text_of_load("serve:pp=20", text, foreign=False) == (named, text)
    assert text_of_load("serve:pp=20", text, foreign=True) == ("serve:pp=20", text)  # of the answers
    assert text_of_load("pp=20", text, foreign=False) == ("pp=20", text)
    assert text_of_load(None, None, foreign=False) == (None, None)
    with pytest.raises(typer.BadParameter, match="give only one of them"):
        text_of_load(load, tmp_path / "other.txt", foreign=False)
    with pytest.raises(typer.BadParameter, match="does not exist"):
        text_of_load(f"serve:text={tmp_path / 'none.txt'}", None, foreign=False)


def test_a_profile_of_a_text_is_verified_with_it(
    file: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = tmp_path / "p.yaml"
    monkeypatch.chdir(file.parent)
    assert text_beside(CUT, profile) == str(text)
    assert text_beside(WORK, profile) is None
    text.unlink()
    with pytest.raises(TuneError, match=r"come from mine\.txt, which is neither beside the profile"):
        text_beside(CUT, profile)


# ---- tunes ----


def test_a_tune_of_a_load_writes_a_profile_that_a_server_takes(file: Path, tmp_path: Path) -> None:
    held = {"threads": 1, "threads_batch": 1, "cpu_repack": False, "ubatch": 64}
    options = Options(workload=WORK, budget=20.0, seed=1)
    request = Request(str(file), options, out=tmp_path / "p.yaml", quiet=True, force=True, held=held)
    result = tuned(request)
    profile = load_profile(result.path)
    assert workload_of(profile) == WORK
    assert profile.evidence is not None
    assert set(profile.evidence.baseline) == {"tg6_served3"}
    # These were searched, unless the budget ended before that.
    assert set(profile.settings) <= {"sequences", "step_tokens", *held}
    with Engine(file, device="cpu", profile=result.path) as engine:
        assert engine.settings.origins["ubatch"]  # the profile can be read and belongs to the model


# ---- llama-server ----


@pytest.mark.parametrize("version", ["llama.cpp-0c1e570", "ik_llama.cpp-4840"])
def test_llama_server_serves_the_load(tmp_path: Path, file: Path, version: str) -> None:
    folder = fake(tmp_path / "b", version)
    target = GgmlTarget(version.rpartition("-")[0], str(file), str(folder), served=True)
    for sequences in (1, 3):
        target.apply(Configuration({"sequences": sequences, "batch": 512, "ubatch": 64}), NOW)
        samples = [target.measure(WORK, "tg6_served3", prompt) for prompt in range(4)]
        assert {sample.tokens for sample in samples} == {36}
        assert all(0 < sample.seconds <= sample.clock_seconds * 1.02 for sample in samples)
    servers = [call["args"] for call in calls(folder, "llama-server") if "--port" in call["args"]]
    assert len(servers) == 2  # four samples are of one process
    for words, sequences in zip(servers, ("1", "3"), strict=True):
        given = {flag: words[words.index(flag) + 1] for flag in ("-np", "-b", "-ub", "-c")}
        assert given == {"-np": sequences, "-b": "512", "-ub": "64", "-c": str(int(sequences) * 34)}
        assert words.count("-b") == 1
        assert ("-kvu" in words) == (not version.startswith("ik"))  # as if the server chose its slots
    target.close()


@pytest.mark.parametrize(
    ("version", "sequences", "unified"),
    [
        ("llama.cpp-0c1e570", 4, True),
        ("llama.cpp-4227c9b", 1, False),
        ("ik_llama.cpp-4840", 1, None),
        ("ik_llama.cpp-3848", 1, None),
    ],
)
def test_a_tune_begins_with_the_defaults_of_this_server(
    tmp_path: Path, file: Path, version: str, sequences: int, unified: bool | None
) -> None:
    folder = fake(tmp_path / "b", version)
    target = GgmlTarget(version.rpartition("-")[0], str(file), str(folder), served=True)
    engine = target.describe().engine
    assert (engine["defaults"]["sequences"], engine["defaults"].get("kv_unified")) == (sequences, unified)
    assert not {"sequences", "batch", "kv_unified"} & set(engine["refused"])
    target.close()
    alone = GgmlTarget(version.rpartition("-")[0], str(file), str(folder))
    assert {"sequences", "batch"} <= set(alone.describe().engine["refused"])
    assert ("kv_unified" in alone.describe().engine["refused"]) == version.startswith("llama")
    alone.close()


@pytest.mark.parametrize(
    ("version", "on", "words"),
    [
        ("llama.cpp-0c1e570", True, ["-kvu"]),
        ("llama.cpp-0c1e570", False, ["-no-kvu"]),
        ("llama.cpp-4227c9b", True, ["-kvu"]),
        ("llama.cpp-4227c9b", False, []),
    ],
)
def test_a_buffer_for_all_sequences(
    tmp_path: Path, file: Path, version: str, on: bool, words: list[str]
) -> None:
    folder = fake(tmp_path / "b", version)
    target = GgmlTarget("llama.cpp", str(file), str(folder), served=True)
    target.apply(Configuration({"kv_unified": on, "sequences": 3}), NOW)
    assert target.measure(WORK, "tg6_served3", 0).tokens == 36
    (server,) = (call["args"] for call in calls(folder, "llama-server") if "--port" in call["args"])
    assert [word for word in server if word.endswith("-kvu")] == words
    assert target.quality(Configuration({"kv_unified": on}), NOW).status == "ok"
    assert not [c for c in calls(folder, "llama-perplexity") if {"-kvu", "-no-kvu"} & set(c["args"])]
    target.close()


def test_the_command_line_of_a_server_is_measured(tmp_path: Path, file: Path) -> None:
    folder = fake(tmp_path / "b", "llama.cpp-0c1e570")
    words = (
        "llama-server -np 2 -b 1024 -no-kvu --spec-type ngram-simple --spec-ngram-simple-size-m 16 -c 9000 "
        "--cache-reuse 64 -md draft.gguf --port 80"
    )
    target = GgmlTarget("llama.cpp", str(file), str(folder), command=words.split(), served=True)
    own = target.describe().engine["incumbent"]
    assert own == {"sequences": 2, "batch": 1024, "kv_unified": False, "spec": "ngram", "spec_max": 16}
    knobs = {k.name: k for k in declared("llama.cpp").knobs(target.describe(), WORK, approx=True, held={})}
    assert knobs["spec"].values == ("off", "ngram")  # the user's own value races, also without a text
    target.apply(Configuration(own), NOW)
    assert target.measure(WORK, "tg6_served3", 0).tokens == 36
    (server,) = (call["args"] for call in calls(folder, "llama-server") if "--port" in call["args"])
    text = " ".join(server)
    for part in ("--cache-reuse 64", "-md draft.gguf", "-np 2", "-b 1024", "-no-kvu", "-c 68"):
        assert f" {part} " in text + " ", part
    assert all(server.count(flag) == 1 for flag in ("-np", "-b", "-c", "--port", "--spec-type"))
    assert target.quality(Configuration(own), NOW).status == "ok"
    assert not [c for c in calls(folder, "llama-perplexity") if {"-md", "--cache-reuse"} & set(c["args"])]
    target.close()
    with pytest.raises(TuneError, match="cannot be reproduced in llama-bench"):
        GgmlTarget("llama.cpp", str(file), str(folder), command=words.split())


@pytest.mark.parametrize(
    ("version", "spec", "words"),
    [
        ("ik_llama.cpp-4840", {"reads": 12}, "read 12 of 20 tokens of a prompt"),
        ("llama.cpp-0c1e570", {"most": 5}, "wrote 5 of 6 tokens of an answer"),
        ("llama.cpp-0c1e570", {"dies": "x.c:7: GGML_ASSERT(n > 0) failed"}, "SIGABRT.*GGML_ASSERT"),
    ],
)
def test_a_server_that_does_less_work_is_not_faster(
    tmp_path: Path, file: Path, version: str, spec: dict[str, object], words: str
) -> None:
    folder = fake(tmp_path / "b", version, **spec)
    log = tmp_path / "log"
    target = GgmlTarget(version.rpartition("-")[0], str(file), str(folder), served=True, log=str(log))
    target.apply(Configuration({}), NOW)
    with pytest.raises(TargetFailure, match=words):
        target.measure(WORK, "tg6_served3", 0)
    assert "a log line on standard error" in log.read_text()
    assert str(spec.get("dies", "")) in log.read_text()
    target.close()


def test_a_server_that_ends_or_refuses(tmp_path: Path, file: Path) -> None:
    faults = {"-np 2": "ggml: out of memory", "-np 3": "error: invalid argument: -np"}
    folder = fake(tmp_path / "b", "llama.cpp-0c1e570", faults=faults)
    target = GgmlTarget("llama.cpp", str(file), str(folder), served=True)
    for sequences, status in ((2, "oom"), (3, "invalid")):
        target.apply(Configuration({"sequences": sequences}), NOW)
        with pytest.raises(TargetFailure) as failed:
            target.measure(WORK, "tg6_served3", 0)
        assert failed.value.status == status
    target.close()
    only_bench = fake(tmp_path / "c", "llama.cpp-0c1e570", ("llama-bench",))
    with pytest.raises(TargetUnusable, match="no llama-server"):
        GgmlTarget("llama.cpp", str(file), str(only_bench), served=True)


def test_answers_are_compared_without_slots(tmp_path: Path, file: Path) -> None:
    folder = fake(tmp_path / "b", "llama.cpp-0c1e570")
    target = GgmlTarget("llama.cpp", str(file), str(folder), served=True)
    quality = target.quality(Configuration({"sequences": 3, "batch": 512}), NOW)
    assert quality.status == "ok"
    assert all("-np" not in call["args"] for call in calls(folder, "llama-perplexity"))
    target.close()


def test_knobs_of_llama_server(tmp_path: Path, file: Path) -> None:
    folder = fake(tmp_path / "b", "llama.cpp-0c1e570")
    target = GgmlTarget("llama.cpp", str(file), str(folder), served=True)
    knobs = {k.name: k for k in declared("llama.cpp").knobs(target.describe(), WORK, approx=True, held={})}
    assert {1, 2, 3, 4} == set(knobs["sequences"].values)
    assert (knobs["sequences"].default, knobs["batch"].default) == (4, 2048)
    assert {knob.moves for knob in knobs.values()} == {frozenset({"tg"})}
    target.close()
