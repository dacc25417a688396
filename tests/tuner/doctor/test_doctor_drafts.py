"""`tune doctor` on flags of draft models and on override patterns."""

from __future__ import annotations

import pytest
from doctor_lines import find, says
from dyno_tuner.doctor import Facts, diagnose
from dyno_tuner.doctor.line import ENGINES, IK, MAIN, Item, Status


@pytest.mark.parametrize("engine", ENGINES)
def test_a_blank_in_an_override_is_not_trimmed(engine: str) -> None:
    def item(value: str, program: str = "llama-server") -> Item:
        return find(diagnose([program, "-ot", value], engine=engine), "-ot")

    said = item("A=CUDA0, B=CUDA0")
    assert str(said.status) == "invalid"
    assert "pattern ' B' begins with a blank" in says(said)
    assert "'B=CUDA0'" in says(said)
    assert "ends with a blank" in says(item("A =CUDA0"))
    assert "buffer ' CUDA0' has a blank" in says(item("A= CUDA0"))
    assert "not PATTERN=BUFFER" in says(item("A=CUDA0,B"))
    assert str(item("A=CUDA0,B=CPU").status) == "does"
    assert str(item("A=CUDA0,B=CPU", "llama-bench").status) == "does"
    assert "begins" in says(item("A=CUDA0, B=CPU", "llama-bench"))


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        (r"blk\.(1|2\.ffn", "a ( is not closed"),
        (r"blk\.1)\.ffn", "a ) closes nothing"),
        (r"blk\.[1-3\.ffn", "a [ is not closed"),
        (r"blk\.[3-1]\.ffn", "ends before it begins"),
        ("*exps", "follows nothing"),
        ("exps\\", "escapes nothing"),
    ],
)
@pytest.mark.parametrize("tensors", [None, [("blk.1.ffn_up_exps.weight", 1)]])
def test_a_pattern_that_is_no_regular_expression(
    pattern: str, why: str, tensors: list[tuple[str, int]] | None
) -> None:
    for program in ("llama-server", "llama-bench"):
        line = diagnose([program, "-ot", f"{pattern}=CPU"], facts=Facts(tensors=tensors))
        assert find(line, "-ot").status is Status.INVALID
        assert why in says(find(line, "-ot"))
        assert "the program stops" in says(find(line, "-ot"))
    assert (
        find(diagnose(["llama-server", "-ot", r"blk\.(1|2)\.[[:alpha:]]+=CPU"]), "-ot").status is Status.DOES
    )


def test_a_shell_stops_at_a_parenthesis_outside_quotes() -> None:
    line = "llama-server -m x.gguf -ot {} -ngl 99"
    for rule in (r"blk.(1|2).ffn=CPU", r"blk\.(1|2)\.ffn=CPU"):
        said = find(diagnose([line.format(rule)]), "-ot")
        assert said.status is Status.NEEDS
        assert "write 'blk.(1|2).ffn=CPU'" in says(said)
        for quoted in (f"'{rule}'", f'"{rule}"'):
            assert find(diagnose([line.format(quoted)]), "-ot").status is Status.DOES
    assert find(diagnose(["llama-server", "-ot", "blk.(1|2).ffn=CPU"]), "-ot").status is Status.DOES
    assert "write '--override-tensor=a.(b)=CPU'" in says(
        find(diagnose(["llama-server --override-tensor=a.(b)=CPU"]), "--override-tensor")
    )


@pytest.mark.parametrize("threads", ["$(nproc)", "$(nproc --all)", "$((2 * 4))", "$(( (1 + 3) * 2 ))"])
def test_a_shell_replaces_a_command_in_parentheses(threads: str) -> None:
    line = diagnose([f"llama-server -m x.gguf -t {threads} -ngl 99"])
    assert not any("parenthesis" in says(item) for item in line.items)
    both = diagnose([f"llama-server -m x.gguf -t {threads} -ot a.(b)=CPU"])
    assert "write 'a.(b)=CPU'" in says(find(both, "-ot"))


def test_bench_of_llama_cpp_splits_overrides_at_semicolons_too() -> None:
    words = ["llama-bench", "-ot", "A=CUDA0; B=CUDA0"]
    assert "pattern ' B'" in says(find(diagnose(words, engine=MAIN), "-ot"))


def test_draft_knobs_have_words_of_their_own() -> None:
    words = "llama-server -m x.gguf -md d.gguf --spec-draft-n-max 8 -ngld 99 --draft-p-min 0.4"
    line = diagnose(words.split(), engine=MAIN)
    for name in ("-md", "--spec-draft-n-max", "-ngld", "--draft-p-min"):
        assert find(line, name).status is Status.DOES, name
    assert "which pays off if most drafts are accepted" in find(line, "--spec-draft-n-max").notes[0].text


@pytest.mark.parametrize("engine", ENGINES)
def test_a_line_that_drafts_nothing_says_so(engine: str) -> None:
    words = ["llama-server", "-m", "x.gguf", "-ngld", "99", "-td", "4"]
    line = diagnose(words, engine=engine)
    for name in ("-ngld", "-td"):
        item = find(line, name)
        assert item.status is Status.INERT
        assert any("nothing is drafted" in note.text for note in item.notes)
    for start in (["-md", "d.gguf"], ["--spec-type", "ngram-simple"]):
        assert find(diagnose([*words, *start], engine=engine), "-ngld").status is Status.DOES
    none = diagnose([*words, "--spec-type", "none"], engine=engine)
    assert find(none, "-ngld").status is Status.INERT


@pytest.mark.parametrize(
    ("engine", "value", "text"),
    [
        (MAIN, "ngram-simpel", "is not one of none, draft-simple, "),
        (MAIN, "ngram-simpel", "(nearest: ngram-simple)"),
        (MAIN, "ngram-simple,bogus", "value 'bogus'"),
        (MAIN, "mtp", "(nearest: draft-mtp)"),
        (MAIN, "draft-simple", "needs a draft model, and the line names none"),
        (MAIN, "none,ngram-mod", "none cannot be combined with other kinds"),
        (IK, "draft-mtp", "value 'draft-mtp' is not one of none, draft, "),
        (IK, "draft:n_max=4", "needs a draft model"),
        (IK, "mtp:n_maxx=1", "limit 'n_maxx=1' is not one of n_max, "),
        (IK, "mtp:n_max", "limit 'n_max'"),
    ],
)
def test_kinds_of_speculation_are_the_engines_own(engine: str, value: str, text: str) -> None:
    item = find(
        diagnose(["llama-server", "-m", "x.gguf", "--spec-type", value], engine=engine), "--spec-type"
    )
    assert item.wrong
    assert text in says(item)


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        (MAIN, "--spec-type ngram-simple,ngram-cache"),
        (MAIN, "--spec-type none"),
        (MAIN, "--spec-type draft-simple -md d.gguf"),
        (MAIN, "--spec-type draft-mtp"),
        (IK, "--spec-type mtp:n_max=1,p_min=0.0"),
        (IK, "--spec-type draft:n_max=4 -md d.gguf"),
        (IK, "--spec-type suffix:n_max=16,suffix_corpus='/tmp/a,b.json',n_min=2"),
        (IK, "--spec-type ngram-mod:n_max=64,ngram_size_n=8 --spec-type mtp:n_max=1"),
    ],
)
def test_kinds_of_speculation_that_an_engine_has(engine: str, words: str) -> None:
    line = diagnose(["llama-server", "-m", "x.gguf", *words.split()], engine=engine)
    for item in line.all("flag", "--spec-type"):
        assert not item.wrong, says(item)
    assert len(line.all("flag", "--spec-type")) == words.count("--spec-type"), "stages add up"


@pytest.mark.parametrize("engine", ENGINES)
def test_slots_share_the_context(engine: str) -> None:
    item = find(diagnose(["llama-server", "-m", "x.gguf", "-c", "32768", "-np", "4"], engine=engine), "-np")
    assert item.status is Status.DOES
    assert "sequences that a server generates at the same time" in says(item)
    assert "each of 4 slots has 8192 of the 32768 tokens of the context" in says(item)
    assert "give -c 131072" in says(item)
    assert find(diagnose(["llama-server", "-np", "0"], engine=engine), "-np").status is Status.INVALID
    one = diagnose(["llama-server", "-np", "1", "-nocb"], engine=engine)
    assert find(one, "-nocb").status is Status.INERT
    assert find(diagnose(["llama-server", "-np", "4", "-nocb"], engine=engine), "-nocb").status is Status.DOES


def test_a_unified_cache_and_an_automatic_number_of_slots_are_llama_cpps() -> None:
    words = "llama-server -c 32768 -np 4 -kvu"
    assert "each of" not in says(find(diagnose(words.split(), engine=MAIN), "-np"))
    assert find(diagnose(["llama-server", "-np", "-1"], engine=MAIN), "-np").status is Status.DOES
    assert find(diagnose(["llama-server", "-np", "-1"], engine=IK), "-np").status is Status.INVALID


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("buffer", "gpus", "text"),
    [
        ("NOWHERE", None, "no backend has a buffer 'NOWHERE'"),
        ("cpu", None, "(nearest: CPU)"),
        ("CUDA", None, "(nearest: CUDA0)"),
        ("cuda0", None, "(nearest: CUDA0)"),
        ("CUDA2", 2, "buffer CUDA2 is beyond the 2 GPUs; the last one is CUDA1"),
        ("CUDA0", 0, "there is no GPU"),
    ],
)
def test_a_buffer_that_no_backend_has_is_wrong(engine: str, buffer: str, gpus: int | None, text: str) -> None:
    line = diagnose(["llama-server", "-ot", f"x={buffer}"], engine=engine, facts=Facts(gpus=gpus))
    item = find(line, "-ot")
    assert item.status is Status.INVALID
    assert text in says(item)


@pytest.mark.parametrize(
    "buffer", ["CPU", "CUDA0", "CUDA15", "Vulkan1", "ROCm0", "Metal", "RPC[10.0.0.1:50052]"]
)
def test_a_buffer_of_a_backend_is_taken(buffer: str) -> None:
    assert not find(diagnose(["llama-server", "-ot", f"x={buffer}"], engine=MAIN), "-ot").wrong
    two = Facts(gpus=2)
    assert not find(diagnose(["llama-server", "-ot", "x=CUDA1"], engine=MAIN, facts=two), "-ot").wrong


def test_devices_have_the_same_names() -> None:
    def item(value: str) -> Item:
        return find(diagnose(["llama-server", "-dev", value], engine=MAIN, facts=Facts(gpus=2)), "-dev")

    assert not item("CUDA0,CUDA1").wrong
    assert not item("none").wrong
    assert "device 'GPU0'" in says(item("CUDA0,GPU0"))
    assert "device CUDA2 is beyond" in says(item("CUDA2"))


@pytest.mark.parametrize(
    ("value", "main", "ik"),
    [
        ("BLAS", "", ""),
        ("CUDA0,BLAS", "", ""),
        ("BLAS0", "no backend has a device 'BLAS0'", "no backend has a device"),
        (" CUDA0", "device ' CUDA0' has a blank, which llama.cpp does not trim, so that the program stops",
         "does not trim, so that the device is left out"),
        ("CUDA0, CUDA1", "write 'CUDA1'", "write 'CUDA1'"),
        ("CUDA0 ", "has a blank", "has a blank"),
        ("cuda0", "", "no backend has a device 'cuda0'"),
        ("cuda7", "device CUDA7 is beyond", "no backend has a device"),
        ("CPU", "llama.cpp does not accept the CPU as a device: the program stops; write none", ""),
        ("cpu", "does not accept the CPU", "no backend has a device"),
        ("CUDA0,none", "none cannot be combined with another device", ""),
        ("rpc[10.0.0.1:50052]", "", "no backend has a device"),
        ("RPC[10.0.0.1:50052]", "", ""),
    ],
)  # fmt: skip
def test_devices_are_read_as_the_engine_reads_them(value: str, main: str, ik: str) -> None:
    for engine, text in ((MAIN, main), (IK, ik)):
        line = diagnose(["llama-server", "-dev", value], engine=engine, facts=Facts(gpus=2))
        item = find(line, "-dev")
        assert bool(item.wrong) == bool(text), (engine, says(item))
        assert text in says(item)


def test_blas_is_no_buffer() -> None:
    item = find(diagnose(["llama-server", "-ot", "x=BLAS"], engine=MAIN), "-ot")
    assert "no backend has a buffer 'BLAS'; write CPU" in says(item)


def test_limits_of_a_draft_that_contradict_each_other() -> None:
    words = ["llama-server", "-md", "d.gguf", "--spec-draft-n-max", "4", "--spec-draft-n-min"]
    assert find(diagnose([*words, "8"], engine=MAIN), "--spec-draft-n-min").status is Status.INVALID
    assert find(diagnose([*words, "2"], engine=MAIN), "--spec-draft-n-min").status is Status.DOES


def test_draft_flags_that_llama_cpp_has_lost_name_their_heirs() -> None:
    line = diagnose(["llama-server", "-md", "d.gguf", "--draft-max", "8"], engine=MAIN)
    item = find(line, "--draft-max")
    assert item.status is Status.REMOVED
    assert "--spec-draft-n-max" in item.notes[0].text
