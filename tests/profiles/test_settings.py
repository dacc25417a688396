"""The table of settings: rows are consistent, values are checked, command-line text is read."""

from __future__ import annotations

import pytest
from dyno.settings import (
    SETTINGS,
    DefaultsFor,
    Setting,
    closest,
    engine_defaults,
    settings_for,
    unknown_setting,
)


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=lambda setting: setting.name)
def test_rows_are_consistent(setting: Setting) -> None:
    assert setting.problem(setting.default_value()) is None
    assert (
        setting.problem(setting.default_value(DefaultsFor(cores=96, n_ctx_train=131072, numerics="exact")))
        is None
    )
    assert setting.problem(object()) is not None
    assert setting.doc.endswith(".")
    assert setting.defaults_doc()
    assert setting.values_doc()
    assert bool(setting.choices) == (setting.type == "choice")
    assert setting.devices
    assert setting.engines


def test_defaults_that_depend_on_machine_and_model() -> None:
    given = DefaultsFor(cores=6, n_ctx_train=2048, numerics="exact", threads=3)
    values = {name: setting.default_value(given) for name, setting in SETTINGS.items()}
    assert (values["threads"], values["threads_batch"]) == (6, 3)
    assert (values["ctx"], values["kv_type_k"]) == (2048, "f32")
    assert SETTINGS["ctx"].default_value(DefaultsFor(n_ctx_train=131072)) == 4096
    matvec = SETTINGS["matvec_max_tokens"]
    assert matvec.default_value(DefaultsFor(compute_capability=80, dense_quantised=True)) == 16
    assert matvec.default_value(DefaultsFor(compute_capability=90)) == 8
    assert matvec.default_value(DefaultsFor(compute_capability=90, dense_quantised=True)) == 3
    assert SETTINGS["threads_batch"].default_value(DefaultsFor(cores=6)) == 6


def test_a_default_list_is_not_shared() -> None:
    first = SETTINGS["placement"].default_value()
    assert isinstance(first, list)
    first.append("x=cpu")
    assert SETTINGS["placement"].default_value() == []


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("ubatch", "2048", 2048),
        ("cpu_repack", "off", False),
        ("cpu_repack", "TRUE", True),
        ("kv_type_k", "Q8_0", "q8_0"),
        ("spec_min_p", "0.25", 0.25),
        ("spec_min_p", "1", 1.0),
        ("placement", r"blk\.1.*=cpu,exps=cuda:1", [r"blk\.1.*=cpu", "exps=cuda:1"]),
    ],
)
def test_command_line_values(name: str, text: str, value: object) -> None:
    assert SETTINGS[name].parse(text) == value


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("ubatch", "0", "must be from 1 to 65536, not 0"),
        ("ubatch", "many", "must be a whole number, not 'many'"),
        ("ubatch", "9" * 5000, "must be a whole number"),
        ("cpu_repack", "maybe", "must be true or false"),
        ("kv_type_k", "q8", "did you mean 'q8_0'?"),
        ("placement", "exps", "must read 'REGEX=DEVICE'"),
        ("placement", "exps=gpu", "with a device cpu or cuda:N"),
        ("placement", "(=cpu", "bad regular expression"),
        ("placement", "a" * 600 + "=cpu", "longer than"),
        ("placement", "a=cpu," * 300, "at most 256"),
    ],
)
def test_wrong_command_line_values(name: str, text: str, words: str) -> None:
    with pytest.raises(ValueError, match=name) as caught:
        SETTINGS[name].parse(text)
    assert words in str(caught.value)
    assert len(str(caught.value)) < 300


def test_what_applies_where() -> None:
    on_cpu = {setting.name for setting in settings_for("cpu")}
    assert {"ubatch", "threads", "kv_type_k", "ctx", "numerics", "cpu_isa", "sequences"} <= on_cpu
    assert "cuda_graphs" not in on_cpu
    assert "batch" not in on_cpu
    assert "flash_attention" in {setting.name for setting in settings_for("cpu", "llama.cpp")}
    on_cuda = {setting.name for setting in settings_for("cuda")}
    assert {"cuda_graphs", "ubatch", "threads", "kv_type_k", "ctx", "numerics", "sequences"} <= on_cuda
    assert not {"cpu_isa", "cpu_repack"} & on_cuda


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_the_table_and_the_compiled_engine_agree(kind: str) -> None:
    """What the engine takes has a row, and constant defaults are its own."""
    taken = engine_defaults()
    assert set(taken) <= {setting.name for setting in SETTINGS.values() if "dyno" in setting.engines}
    for setting in settings_for(kind):
        if not callable(setting.default) and setting.kind != "scheduler":  # those never reach the engine
            assert setting.default == taken[setting.name], setting.name


def test_unknown_names_are_told_the_nearest() -> None:
    assert "did you mean 'ubatch'?" in unknown_setting("n-ubatch", "cpu")
    assert "did you mean 'cuda_graphs'?" in unknown_setting("cuda-graph", "cuda")
    assert "has no effect on a cpu device" in unknown_setting("fusion", "cpu")
    assert "is a setting of ik_llama.cpp, not of dyno" in unknown_setting("fused_moe")
    assert closest("xyzzy", ["ubatch"]) is None


def test_a_name_that_resembles_none_gets_a_place_to_look() -> None:
    assert unknown_setting("foo", "cpu") == (
        "unknown setting 'foo'; `dyno explain plan MODEL` prints the valid names, "
        "and docs/user/profile-reference.md describes them"
    )
    of_another = unknown_setting("foo", None, "llama.cpp")
    assert of_another == "unknown setting 'foo'; docs/user/profile-reference.md describes the valid names"
