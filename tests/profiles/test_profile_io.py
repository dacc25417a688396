"""Reading and writing: round trips, errors with line and suggestion, hostile files, atomic writes."""

from __future__ import annotations

import datetime
import errno
import os
import re
import stat
from pathlib import Path
from typing import Any

import pytest
import yaml
from dyno.profiles import (
    Profile,
    ProfileError,
    _yaml,
    clean_text,
    dumps_profile,
    io,
    load_profile,
    loads_profile,
    save_profile,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from profile_texts import CUDA_TEXT

SHIPPED = sorted((Path(__file__).parents[2] / "profiles").glob("*.yaml"))


def error_of(text: str, name: str = "p.yaml") -> str:
    with pytest.raises(ProfileError) as caught:
        loads_profile(text, name)
    message = str(caught.value)
    assert "\n" not in message
    return message


def replaced(text: str, old: str, new: str) -> str:
    assert old in text
    return text.replace(old, new, 1)


# ---- Round trips ----


@pytest.mark.parametrize("name", ["cuda_text", "cpu_text"])
def test_what_is_written_reads_back_equal(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    profile = loads_profile(request.getfixturevalue(name))
    path = tmp_path / "new" / "folder" / "p.yaml"
    save_profile(profile, path)
    assert load_profile(path) == profile
    assert dumps_profile(load_profile(path)) == path.read_text()


def test_written_text_keeps_the_reading_order_and_one_line_per_entry(cuda_profile: Profile) -> None:
    lines = dumps_profile(cuda_profile).splitlines()
    top = [line.split(":")[0] for line in lines if line[:1] != " "]
    assert top == [
        "schema",
        "label",
        "",
        "match",
        "",
        "settings",
        "",
        "kernels",
        "",
        "evidence",
        "",
        "provenance",
    ]
    assert (
        "  ubatch:            {value: 4096, default: 512, ratio: 1.64, ci95: [1.63, 1.65], n: 9, moves: pp, "
        "group: g1}" in lines
    )
    assert '  "matmul q4_0 n=4096 k=2048":' in lines
    assert "  cuda_graphs:       default" in lines


HOSTILE = ("two\nlines: 1", "\u2028settings: {}", "\x1b[2J\x00", "# - {a: [", "x" * 400)


def test_comments_stand_above_the_profile_and_nothing_reads_them(
    cuda_profile: Profile, tmp_path: Path
) -> None:
    path = tmp_path / "p.yaml"
    save_profile(cuda_profile, path, HOSTILE)
    written = path.read_text()
    head, rest = written.splitlines()[: len(HOSTILE)], written.splitlines(keepends=True)[len(HOSTILE) :]
    assert head[:2] == ["# two lines: 1", "# settings: {}"]
    assert all(line.startswith("# ") and line.isprintable() and len(line) <= 302 for line in head)
    assert "".join(rest) == dumps_profile(cuda_profile)
    assert load_profile(path) == cuda_profile
    assert yaml.safe_load(written) == yaml.safe_load(dumps_profile(cuda_profile))
    line = written.splitlines().index("provenance:") + 1
    assert load_profile(path).origin("provenance") == f"p.yaml:{line}", "messages name the lines of the file"


@pytest.mark.parametrize("path", SHIPPED, ids=[path.stem for path in SHIPPED])
def test_shipped_profiles_are_written_as_a_tune_writes_them(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    head, schema, rest = text.partition("schema:")
    assert all(line.startswith("# ") for line in head.splitlines())
    assert "Verdict: " in head
    assert schema + rest == dumps_profile(load_profile(path))


def test_changes_come_before_defaults_and_empty_maps_are_left_out(cuda_profile: Profile) -> None:
    data = cuda_profile.model_dump(by_alias=True)
    data["settings"] = {"threads": "default", **data["settings"], "cuda_graphs": "default"}
    changed = dict(data["kernels"])
    data["kernels"] = {"norm n=64": {"m1": "default"}, **changed}
    data["evidence"] |= {"crossings": {}, "samples": {}}
    data["match"]["engine"]["build"] = {}
    written = io.to_dict(Profile.model_validate(data))
    settings = list(written["settings"].values())
    assert settings == sorted(settings, key=lambda entry: entry == "default")
    assert settings[-1] == "default" != settings[0]
    assert list(written["kernels"]) == [*changed, "default"]
    assert written["kernels"]["default"] == ["m1 norm n=64"]

    def empty(value: object) -> bool:
        return value == {} or (isinstance(value, dict) and any(map(empty, value.values())))

    assert not empty(written)


LISTED = """  default:
    - m9-16 matmul q4_0 n=4096 k=2048
    - m1 norm n=64
"""


def with_list(text: str) -> str:
    return replaced(text, "\nkernels:\n", "\nkernels:\n" + LISTED)


def test_kernels_that_stay_as_they_are_are_one_list(cuda_text: str) -> None:
    listed = loads_profile(with_list(cuda_text))
    spread = loads_profile(cuda_text).model_dump(by_alias=True)
    spread["kernels"]["norm n=64"] = {"m1": "default"}
    spread["kernels"]["matmul q4_0 n=4096 k=2048"]["m9-16"] = "default"
    assert listed == Profile.model_validate(spread), "files that name each under its op key mean the same"
    written = dumps_profile(listed)
    assert LISTED in written
    assert loads_profile(written) == listed


@pytest.mark.parametrize(
    ("item", "why"),
    [
        ("m1", "not a token range and an op key"),
        ("norm n=64", "not a token range and an op key"),
        ("8-m1 norm n=64", "8-m1"),
        ("m1 Norm!", "not a token range and an op key"),
        ("4", "not a token range and an op key"),
        ("m1-8 matmul q4_0 n=4096 k=2048", "is listed twice"),
    ],
)
def test_a_wrong_item_of_the_list_is_named_with_its_line(
    item: str, why: str, cuda_text: str, tmp_path: Path
) -> None:
    text = with_list(cuda_text).replace("m1 norm n=64", item)
    line = next(n for n, found in enumerate(text.splitlines(), 1) if found == f"    - {item}")
    said = error_of(text)
    assert said.startswith(f"[profile] p.yaml:{line}: kernels.default.1: ")
    assert why in said
    path = tmp_path / "p.yaml"
    path.write_text(text)
    profile, wrong = io.load_readable(path)
    assert list(wrong) == ["kernels.default.1"]
    assert item in wrong["kernels.default.1"]
    assert profile.kernels["matmul q4_0 n=4096 k=2048"]["m9-16"] == "default"


def test_the_list_of_kernels_is_checked_as_a_whole(cuda_text: str) -> None:
    assert "a list of token ranges" in error_of(replaced(with_list(cuda_text), LISTED, "  default: all\n"))
    overlapping = with_list(cuda_text).replace("m9-16", "m2-4")
    assert "range 'm2-4' overlaps 'm1-8'" in error_of(overlapping)


def test_another_yaml_reader_sees_the_same_values(cuda_profile: Profile) -> None:
    """People read these files with PyYAML (YAML 1.1): nothing may change its type there."""
    seen = yaml.safe_load(dumps_profile(cuda_profile))
    assert seen["match"]["device"]["compute_capability"] == "9.0"
    assert seen["provenance"]["cuda"] == "13.0"
    assert seen["evidence"]["quality"]["mean_kld"] == 2.1e-5
    assert seen["evidence"]["journal"] == "sha256:0123456789abcdef"
    assert seen["provenance"]["date"] == datetime.date(2026, 11, 20)


def test_unquoted_versions_keep_their_spelling(cuda_profile: Profile) -> None:
    assert cuda_profile.provenance is not None
    assert cuda_profile.provenance.driver == "580.10"
    assert cuda_profile.provenance.cuda == "13.0"


def test_unquoted_compute_capability_is_understood(cuda_text: str) -> None:
    profile = loads_profile(replaced(cuda_text, '"9.0"', "9.0"))
    assert profile.match.device.kind == "cuda"
    assert profile.match.device.compute_capability == "9.0"
    assert "compute_capability" in error_of(replaced(cuda_text, '"9.0"', "9.05"))


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
SCALARS = st.one_of(
    st.booleans(),
    st.integers(-(2**53), 2**53),
    st.floats(allow_nan=False, allow_infinity=False),
    TEXTS,
    st.sampled_from(
        ["on", "No", "1e5", "0x1f", "1:30", "~", "null", "-", "- a", "a: b", "a #b", "2026-11-20", "1_0"]
    ),
)
VALUES = st.recursive(
    SCALARS,
    lambda child: st.lists(child, max_size=4) | st.dictionaries(TEXTS, child, max_size=4),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@given(VALUES)
def test_any_plain_value_survives_a_line_of_yaml(value: Any) -> None:
    line = f"{{k: {_yaml.flow(value)}}}"
    assert "\n" not in line
    assert _yaml.parse(line)[0]["k"] == value
    if not _has_date(value):
        assert yaml.safe_load(line)["k"] == value


def _has_date(value: Any) -> bool:
    return re.search(r"\d{4}-\d", repr(value)) is not None


@settings(max_examples=300, deadline=None)
@given(st.text(st.sampled_from("ab:{}[]-,#&*!|>'\"%@`\n\t \\?~<=1.0\u0085\u2028\ufeff\x00")))
def test_random_text_is_a_profile_error_or_nothing(text: str) -> None:
    with pytest.raises(ProfileError):
        loads_profile(text)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_damaged_profile_is_a_profile_or_one_line(data: st.DataObject) -> None:
    """Any cut, doubled or overwritten piece: a profile that survives a round trip, or a one-line error."""
    text = CUDA_TEXT
    start = data.draw(st.integers(0, len(text)))
    end = min(len(text), start + data.draw(st.integers(0, 40)))
    pieces = ["", text[start:end] * 2, "{", "]", "'", ": ", "\n", "- ", "1e999", "~", '"\\x1b"', "\x1b"]
    damaged = text[:start] + data.draw(st.sampled_from(pieces)) + text[end:]
    try:
        profile = loads_profile(damaged)
    except ProfileError:
        assert error_of(damaged).isprintable()
    else:
        assert loads_profile(dumps_profile(profile)) == profile


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=300))
def test_cleaned_text_is_always_a_label(text: str) -> None:
    label = clean_text("model " + text)
    profile = Profile.model_validate(_yaml.parse(CUDA_TEXT)[0] | {"label": label})
    assert loads_profile(dumps_profile(profile)).label == label


# ---- Errors: one line, with file, line and the nearest valid key ----


@pytest.mark.parametrize(
    ("old", "new", "line", "where", "near"),
    [
        ("label:", "lable:", 2, "lable", "label"),
        ("settings:", "setings:", 7, "setings", "settings"),
        ("  device:", "  devise:", 4, "match.devise", "device"),
        ("sm_count", "sm_cuont", 4, "match.device.sm_cuont", "sm_count"),
        ("experts_used", "expert_used", 5, "match.model.expert_used", "experts_used"),
        ("ops_revision", "ops-revision", 6, "match.engine.ops-revision", "ops_revision"),
        ("ubatch:  ", "n_ubatch:", 8, "settings.n_ubatch", "ubatch"),
        ("cuda_graphs", "cuda_graph", 10, "settings.cuda_graph", "cuda_graphs"),
        ("value: 8192", "valeu: 8192", 9, "settings.mmq_id_max_tokens.valeu", "value"),
        ("ratio: 1.06", "ratoi: 1.06", 12, "kernels.matmul q4_0 n=4096 k=2048.m1-8.ratoi", "ratio"),
        ("workload:", "worklaod:", 14, "evidence.worklaod", "workload"),
        ("tg: 128}", "tgs: 128}", 14, "evidence.workload.tgs", "tg"),
        ("mean_kld", "mean_kdl", 17, "evidence.quality.mean_kdl", "mean_kld"),
        ("margin", "margins", 18, "evidence.noise.margins", "margin"),
        ("tuner", "tunre", 20, "provenance.tunre", "tuner"),
    ],
)
def test_unknown_keys_name_place_and_nearest(
    cuda_text: str, old: str, new: str, line: int, where: str, near: str
) -> None:
    message = error_of(replaced(cuda_text, old, new))
    assert message.startswith(f"[profile] p.yaml:{line}: {where}: unknown ")
    assert f"did you mean '{near}'?" in message


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("schema: 1", "schema: 2", "schema 2 is unknown; this version reads schema 1"),
        ("schema: 1", "schema: true", "schema True is unknown"),
        ("schema: 1\n", "", "schema: missing"),
        ("value: 4096", "value: '4096'", "settings.ubatch.value: must be a whole number, not '4096'"),
        ("value: 4096", "value: 0", "settings.ubatch.value: must be from 1 to 65536, not 0"),
        ("value: 4096", "value: true", "settings.ubatch.value: must be a whole number, not True"),
        ("value: 4096, ", "", "settings.ubatch.value: missing"),
        (
            "value: 4096",
            "value: 1.5",
            "settings.ubatch.value: must be a whole number, not 1.5",
        ),
        ("value: 4096", "value: {a: 1}", "settings.ubatch.value: must be true or false, a number, text"),
        ("value: 4096", "value: null", "settings.ubatch.value: must be true or false, a number, text"),
        ("default: 512", "default: many", "settings.ubatch.default: must be a whole number, not 'many'"),
        ("default      #", "defualt  #", "settings.cuda_graphs: must be 'default'"),
        ("default      #", "[]  #", "settings.cuda_graphs"),
        (
            "cuda_graphs:       default",
            "cuda_graphs: {value: 1}",
            "cuda_graphs.value: must be true or false, not 1",
        ),
        ("cuda_graphs: ", "batch: ", "'batch' is a setting of ik_llama.cpp, llama.cpp, not of dyno"),
        ("cuda_graphs:       default", "kv_type_k: {value: q8_1}", "did you mean 'q8_0'?"),
        ("cuda_graphs:       default", "kv_type_k: {value: q4_0}", "kv_type_k.value: must be one of"),
        ("cuda_graphs:       default", "split_mode: {value: row}", "is a setting of ik_llama.cpp"),
        ("ratio: 1.64", "ratio: .nan", "settings.ubatch.ratio: must be a finite number"),
        ("ratio: 1.64", "ratio: .inf", "settings.ubatch.ratio: must be a finite number"),
        ("ratio: 1.64", "ratio: -1", "settings.ubatch.ratio: must be greater than 0, not -1"),
        ("ratio: 1.64", "ratio: 2", "ratio 2.0 lies outside its ci95 [1.63, 1.65]"),
        ("ci95: [1.63, 1.65]", "ci95: [1.65, 1.63]", "upside down"),
        ("ci95: [1.63, 1.65]", "ci95: [1.63]", "settings.ubatch.ci95"),
        ("n: 9", "n: yes", "settings.ubatch.n: must be a whole number, not 'yes'"),
        ("moves: pp", "moves: px", "must be 'pp', 'tg', 'memory' or 'vram'"),
        ("kind: cuda", "kind: cuba", "match.device: must be a map with kind: cuda or kind: cpu"),
        ("kind: cuda, ", "", "match.device: must be a map with kind: cuda or kind: cpu"),
        ("layers: 48", "layers: 48.0", "match.model.layers: must be a whole number, not 48.0"),
        (
            "layers: 48",
            "layers: 99999999999999999999999999",
            "match.model.layers: must be at most 65536, not 9999",
        ),
        ("Q4_0: 0.93", "Q4_0: 1.93", "match.model.types.Q4_0"),
        ("Q4_0: 0.93", "Q4_0: 0.13", "add up to 0.200 instead of 1"),
        ("ops_revision: 7, ", "", "match.engine.ops_revision: missing"),
        ("m1-8", "m8-1", "'m8-1' is an empty range of tokens"),
        ("m1-8", "1-8", "'1-8' is not a range of tokens"),
        ("m1-8", "m0", "'m0' is not a range of tokens"),
        ("m1-8", "m3-8", "starts inside a bucket; ranges start at 1, 2, 5, 9"),
        ("m1-8", "m2", "ends inside a bucket; ranges end at 1, 4, 8"),
        ("m1-8", "m1-12", "ends inside a bucket"),
        ("m1-8", "m1-8589934592", "ends beyond"),
        (
            "GGML_CUDA_LTO: false",
            "GGML_CUDA_LTO: 1.5",
            "build.GGML_CUDA_LTO: must be true or false, a whole number",
        ),
        ("label: NVIDIA H200", 'label: "\\x1b[2J" #', "label: holds characters that cannot be printed"),
        ("label: NVIDIA", '"a\\nb\\x1b": {}\nlabel: NVIDIA', "a\\nb\\x1b: unknown key"),
        ('"matmul q4', '"matmul  q4', "not an op key"),
        ("warps: 4", "warps: 4.5", "warps: unknown key with a value that is not a whole number"),
        ("warps: 4", "warps: 99999", "warps"),
        ("{m1-8: {", "{m5-8: {variant: x}, m1-8: {", "range 'm1-8' overlaps 'm5-8'"),
        ("sha256:", "md5:", "evidence.journal: must match the pattern ^sha256:"),
        ("label: NVIDIA", "label: [] #", "label: must be a string, not a list"),
        ("cuda_graphs:       default", "cuda_graphs: []", "settings.cuda_graphs: must be a map, not a list"),
        (
            "cuda_graphs:       default",
            "cuda_graphs: off",
            "settings.cuda_graphs: must be 'default' or a map, such as {value: \"off\"}",
        ),
        ("cuda_graphs:       default", "cuda_graphs: 5", "must be 'default' or a map, such as {value: 5}"),
        ("cuda_graphs:       default", "cuda_graphs: true", "a map, such as {value: true}"),
        ("pp4096: 7600.1", "PP: 7600.1", "evidence.baseline"),
        (
            "date: 2026-11-20",
            "date: yesterday",
            "provenance.date: must match the pattern ^[0-9]{4}-",
        ),
    ],
)
def test_wrong_values_are_named(cuda_text: str, old: str, new: str, words: str) -> None:
    assert words in error_of(replaced(cuda_text, old, new))


def test_cuda_settings_in_a_cpu_profile_are_refused(cpu_text: str) -> None:
    message = error_of(replaced(cpu_text, "cpu_repack:", "cuda_graphs:"))
    assert "'cuda_graphs' has no effect on a cpu device (only on cuda)" in message


def test_every_problem_of_a_file_is_found(cuda_text: str, tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(cuda_text.replace("sm_count", "sm").replace("value: 8192", "value: -1"))
    profile, problems = io.file_problems(path)
    assert profile is None
    # The device's key hides nothing: both its unknown and its missing key are told, with lines.
    assert {(problem.line, problem.where) for problem in problems} >= {(4, "match.device.sm")}
    assert "(and " not in str(problems[0])


# ---- Hostile text ----


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "empty"),
        ("# nothing\n", "empty"),
        ("null", "not a map"),
        ("[1, 2]", "not a map"),
        ("schema: 1\nlabel: a\nlabel: b\n", "p.yaml:3: duplicate key 'label'; first on line 2"),
        ("match: {device: {kind: cpu, kind: cuda}}", "duplicate key 'kind'"),
        ("a: &x [1]\nb: *x\n", "anchors (&x) are not allowed"),
        ("a: *x\n", "aliases (*x) are not allowed"),
        (
            "a: !!python/object/apply:os.system [id]\n",
            "tags (tag:yaml.org,2002:python/object/apply:os.system)",
        ),
        ("!!map {a: 1}", "tags"),
        ("a: !!str 1", "tags"),
        ("schema: 1\n---\nschema: 1\n", "more than one document"),
        ("{[1]: 2}", "a key must be text"),
        ("? {a: 1}\n: 2\n", "a key must be text"),
        ("a: [1", "not valid YAML"),
        ("a: b: c", "p.yaml:1: not valid YAML"),
        ("\tschema: 1", "not valid YAML"),
        ("a: \x07", "not valid YAML"),
        ("[" * 5000, "nested more than"),
        ("{a: " * 5000, "nested more than"),
        ("- " * 5000, "nested more than"),
        ("a: " + "9" * 5000, "number of 5000 digits"),
        ("<<: {schema: 1}", "<<: unknown key"),
    ],
)
def test_hostile_yaml_is_one_line(text: str, words: str) -> None:
    assert words in error_of(text)


def test_many_items_are_refused() -> None:
    assert "more than" in error_of("[" + "1," * (_yaml.MAX_NODES + 1) + "]")


def test_files_that_are_none(tmp_path: Path) -> None:
    big = tmp_path / "big.yaml"
    big.write_bytes(b"#" * (_yaml.MAX_BYTES + 1))
    latin = tmp_path / "latin.yaml"
    latin.write_bytes(b"label: \xff\n")
    pipe = tmp_path / "pipe.yaml"
    os.mkfifo(pipe)
    cases = {
        big: "larger than",
        latin: "not UTF-8 text (byte 7)",
        pipe: "not a regular file",
        tmp_path: "this is a folder; give a .yaml file in it",
        tmp_path / "none.yaml": "No such file",
    }
    for path, words in cases.items():
        with pytest.raises(ProfileError, match=re.escape(words)):
            load_profile(path)
    with pytest.raises(ProfileError, match="cannot be read"):
        load_profile("a\0b")


def test_a_byte_order_mark_is_no_key(cpu_text: str, tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + cpu_text.encode())
    assert load_profile(path) == loads_profile(cpu_text)


# ---- Atomic writes ----


def test_a_full_disk_leaves_the_old_file(
    cpu_profile: Profile, cuda_profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "p.yaml"
    save_profile(cpu_profile, path)
    before = path.read_bytes()

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(
        ProfileError, match=r"p\.yaml: cannot be written: No space left.*older file is unchanged"
    ):
        save_profile(cuda_profile, path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["p.yaml"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_write_that_fails_part_way_leaves_nothing(
    cpu_profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real ENOSPC from the kernel: the temporary file is opened on /dev/full."""
    real = io.tempfile.mkstemp

    def on_full(**options: Any) -> tuple[int, str]:
        descriptor, name = real(**options)
        os.close(descriptor)
        return os.open("/dev/full", os.O_WRONLY), name

    monkeypatch.setattr(io.tempfile, "mkstemp", on_full)
    with pytest.raises(ProfileError, match="No space left"):
        save_profile(cpu_profile, tmp_path / "p.yaml")
    assert os.listdir(tmp_path) == []


def test_where_nothing_can_be_written(cpu_profile: Profile, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ProfileError, match="cannot be written"):
        save_profile(cpu_profile, tmp_path / "file" / "p.yaml")
    with pytest.raises(ProfileError, match="cannot be written"):
        save_profile(cpu_profile, tmp_path)  # a folder
    assert os.listdir(tmp_path) == ["file"]


def test_links_and_modes_survive(cpu_profile: Profile, cuda_profile: Profile, tmp_path: Path) -> None:
    target = tmp_path / "target.yaml"
    save_profile(cpu_profile, target)
    target.chmod(0o640)
    (tmp_path / "link.yaml").symlink_to(target)
    save_profile(cuda_profile, tmp_path / "link.yaml")
    assert (tmp_path / "link.yaml").is_symlink()
    assert load_profile(target) == cuda_profile
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
