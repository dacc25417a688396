"""`tune doctor` on flags of draft models and on override patterns."""

from __future__ import annotations

import pytest
from doctor_lines import find, says
from dyno_tuner.doctor import diagnose
from dyno_tuner.doctor.line import ENGINES, MAIN, Item, Status


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


def test_bench_of_llama_cpp_splits_overrides_at_semicolons_too() -> None:
    words = ["llama-bench", "-ot", "A=CUDA0; B=CUDA0"]
    assert "pattern ' B'" in says(find(diagnose(words, engine=MAIN), "-ot"))


def test_draft_knobs_have_words_of_their_own() -> None:
    words = "llama-server -m x.gguf -md d.gguf --spec-draft-n-max 8 -ngld 99 --draft-p-min 0.4"
    line = diagnose(words.split(), engine=MAIN)
    for name in ("-md", "--spec-draft-n-max", "-ngld", "--draft-p-min"):
        assert find(line, name).status is Status.DOES, name
    assert "it pays as long as most drafts are accepted" in find(line, "--spec-draft-n-max").notes[0].text


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


def test_limits_of_a_draft_that_contradict_each_other() -> None:
    words = ["llama-server", "-md", "d.gguf", "--spec-draft-n-max", "4", "--spec-draft-n-min"]
    assert find(diagnose([*words, "8"], engine=MAIN), "--spec-draft-n-min").status is Status.INVALID
    assert find(diagnose([*words, "2"], engine=MAIN), "--spec-draft-n-min").status is Status.DOES


def test_draft_flags_that_llama_cpp_has_lost_name_their_heirs() -> None:
    line = diagnose(["llama-server", "-md", "d.gguf", "--draft-max", "8"], engine=MAIN)
    item = find(line, "--draft-max")
    assert item.status is Status.REMOVED
    assert "--spec-draft-n-max" in item.notes[0].text
