"""Placement as settings: a profile and `--set` carry it, and the caller wins."""

from __future__ import annotations

import datetime
import re
import warnings
from pathlib import Path
from typing import Any

import dyno
import numpy as np
import pytest
from dyno import _core, profiles
from dyno._cli.groups import EngineOptions
from dyno._cli.options import once, settings
from dyno.cli import app
from dyno.errors import PlanError, ProfileError
from dyno.testing.models import tiny_model
from dyno_tuner.output.emit import _plain
from dyno_tuner.targets.dyno.placing import as_list, one_word
from typer import BadParameter
from typer.testing import CliRunner

MODEL = Path(__file__).resolve().parents[1] / "data" / "tiny" / "qwen3moe-tiny.gguf"
OPENED: dict[str, Any] = {"device": "cpu:1", "virtual_devices": 1, "ctx": 64, "ubatch": 16, "threads": 1}
LAYERS = 3


def profile_of(
    tmp_path: Path, device: dict[str, Any] | None = None, model: Path = MODEL, **values: Any
) -> Path:
    """A profile that matches this machine, or a device, and the model exactly."""
    made = profiles.Profile(
        schema=1,
        label="placement",
        match=profiles.Match(
            device=profiles.device_from_info(device or _core.cpu_info()),
            model=profiles.model_from_description(_core.describe_model(str(model))),
            engine=profiles.engine_from_build(_core.build_info()),
        ),
        settings={name: profiles.SettingEntry(value=value) for name, value in values.items()},
        provenance=profiles.Provenance(tuner="test", date=datetime.date(2026, 11, 25).isoformat()),
    )
    path = tmp_path / "placed.yaml"
    path.write_text(profiles.dumps_profile(made), encoding="utf-8")
    return path


def opened(**given: Any) -> dyno.Engine:
    return dyno.Engine(MODEL, **{**OPENED, **given})


def experts_on_cpu(engine: dyno.Engine) -> set[int]:
    return {
        int(tensor["name"].split(".")[1])
        for tensor in engine.plan["tensors"]
        if "_exps" in tensor["name"] and tensor["device"] == "cpu"
    }


@pytest.mark.parametrize(
    ("values", "layers"),
    [
        ({"n_cpu_moe": 2}, {0, 1}),
        ({"cpu_moe": True}, {0, 1, 2}),
        ({"n_gpu_layers": 2}, {0, 1}),
        ({"placement": [r"blk\.1\..*_exps=cpu"]}, {1}),
        ({"placement": [r"blk\.0\..*_exps=cpu:1"], "n_cpu_moe": 2}, {1}),
    ],
)
def test_a_profile_carries_a_placement(tmp_path: Path, values: dict[str, Any], layers: set[int]) -> None:
    path = profile_of(tmp_path, **values)
    with opened(profile=None) as whole, opened(profile=path, require_profile=True) as engine:
        assert engine.match.level is profiles.Level.EXACT
        assert experts_on_cpu(engine) == layers
        name, value = next(iter(values.items()))
        assert engine.settings[name] == value
        assert engine.settings.origins[name].startswith("placed.yaml:")
        tokens = np.arange(1, 20)
        np.testing.assert_array_equal(engine.logits(tokens), whole.logits(tokens))


def test_the_caller_wins_over_the_whole_placement_of_a_profile(tmp_path: Path) -> None:
    path = profile_of(tmp_path, n_cpu_moe=2, placement=[r"blk\.2\..*_exps=cpu"])
    for given, layers in (
        ({}, {0, 1, 2}),
        ({"n_cpu_moe": 1}, {0}),
        ({"n_cpu_moe": 0}, set()),
        ({"placement": ()}, set()),
        ({"n_gpu_layers": -1}, set()),
    ):
        with opened(profile=path, plan_only=True, **given) as engine:
            assert experts_on_cpu(engine) == layers, given


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {"placement": ["exps=cuda:1"]},
            r"placement: \['exps=cuda:1'\] \(placed.yaml:\d+\).*'cuda:1'; this plan",
        ),
        ({"placement": ["no_such=cpu"]}, "matches no tensor of the model"),
        ({"placement": ["exps=cpu:3"]}, "names device 'cpu:3'; this plan has cpu:1, cpu"),
    ],
)
def test_a_profile_whose_rules_do_not_fit_the_machine(
    tmp_path: Path, values: dict[str, Any], words: str
) -> None:
    path = profile_of(tmp_path, **values)
    with pytest.raises(ProfileError, match=words) as caught:
        opened(profile=path)
    assert "--no-profile" in str(caught.value)


def test_rules_of_another_machine_fall_back_loudly(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = profile_of(tmp_path, placement=["exps=cuda:1"]).read_text(encoding="utf-8")
    cores = int(_core.cpu_info()["cores"])
    other = tmp_path / "other.yaml"
    other.write_text(text.replace(f"cores: {cores}", f"cores: {cores + 1}"), encoding="utf-8")
    with opened(profile=other, plan_only=True) as engine:
        assert experts_on_cpu(engine) == set()
        assert any("settings.placement" in line and "does not fit here" in line for line in engine.fallbacks)


def test_a_profile_keeps_what_does_not_fit_from_being_placed_by_itself(tmp_path: Path) -> None:
    """A placement of the profile and one by itself exclude each other."""
    with opened(profile=profile_of(tmp_path, n_cpu_moe=1), plan_only=True) as engine:
        assert engine.plan["placement"] == {
            "rules": [], "cpu_moe": False, "n_cpu_moe": 1, "n_gpu_layers": None, "note": "",
        }  # fmt: skip


def test_settings_of_the_command_line() -> None:
    def explained(*words: str) -> tuple[int, str]:
        given = ["explain", "plan", str(MODEL), "--no-profile", "--device", "cpu:1", "--virtual-devices", "1"]
        done = CliRunner().invoke(app, [*given, *words])
        return done.exit_code, done.output + str(done.exception)

    code, text = explained("--set", "n_cpu_moe=2")
    assert code == 0
    assert "n_cpu_moe" in text
    assert "argument" in text
    assert explained("--set", "n_cpu_moe=2", "-ncmoe", "1")[0] == 2
    code, text = explained("--set", r"placement=blk\.1\..*_exps=cpu,attn_q=cpu:1")
    assert (code, "segments of one device" in text) == (0, True)
    with pytest.raises(BadParameter, match="n_cpu_moe is also given by its own option"):
        once(EngineOptions(n_cpu_moe=1).placement(), settings(["n_cpu_moe=2"]))
    assert EngineOptions(n_gpu_layers="all").placement() == {"n_gpu_layers": -1}
    assert EngineOptions().placement() == {}
    with pytest.raises(BadParameter, match="must be from -1 to"):
        settings(["n_gpu_layers=-2"])


def test_a_placement_cannot_change_while_the_engine_is_open() -> None:
    with opened(profile=None) as engine:
        for name, value in (("n_cpu_moe", 1), ("placement", ["exps=cpu"])):
            with pytest.raises(PlanError, match=f"'{name}' is a load setting"):
                engine.set(**{name: value})


def test_a_comma_inside_a_regular_expression_ends_no_rule() -> None:
    rules = [r"blk\.[0-9]{1,2}\.ffn_.*_exps=cpu", "attn_q=cpu:1"]
    word = ",".join(rules)
    assert settings([f"placement={word}"]) == {"placement": rules}
    assert EngineOptions(override_tensor=[word]).placement() == {"placement": rules}
    assert as_list("placement", one_word(rules)) == rules
    assert _plain("placement", word) == rules
    with pytest.raises(BadParameter, match="must read 'REGEX=DEVICE'"):
        settings(["placement=attn_q,exps=cpu,ffn"])


def test_a_class_of_characters_in_a_rule_prints_no_warning_of_python() -> None:
    rule = r"blk\.[[:digit:]]\.ffn_.*_exps=cpu"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert settings([f"placement={rule}"]) == {"placement": [rule]}


@pytest.mark.parametrize("elsewhere", [False, True], ids=["exact", "of more memory"])
def test_a_u_batch_moves_no_weights_off_the_device(tmp_path: Path, elsewhere: bool) -> None:
    """The model takes 2.8 MiB, and the arena of the u-batch about 11 MiB instead of 2."""
    given: dict[str, Any] = {"device": "cpu:1", "threads": 1}

    def room(mib: int) -> dict[str, Any]:
        return {**given, "virtual_devices": {"cpu:1": {"memory_mib": mib}}}

    with dyno.Engine(MODEL, profile=None, plan_only=True, ctx=64, **room(16)) as engine:
        info = {**engine.device_info, **({"memory_bytes": 1 << 40} if elsewhere else {})}
    given["profile"] = profile_of(tmp_path, info, ubatch=3000)
    level = profiles.Level.SAME_DEVICE if elsewhere else profiles.Level.EXACT
    short, long = {"ctx": 64}, {"ctx": 4096, "sequences": 3}
    with dyno.Engine(MODEL, **short, **room(16)) as engine:
        assert (engine.match.level, engine.settings["ubatch"]) == (level, 3000)
    with dyno.Engine(MODEL, **long, **room(16)) as engine:
        assert (engine.match.level, engine.settings["ubatch"]) == (level, 512)
        assert engine.plan["placement"]["note"] == ""
        [line] = engine.fallbacks
        assert line.endswith(
            "engine default instead of 3000: does not fit here: weights would leave cpu:1 for it"
        )
    with dyno.Engine(MODEL, **long, placement=[], **room(16)) as engine:
        [line] = engine.fallbacks
        assert re.search(r"the plan needs \d+ MiB of 16 MiB", line)
    if not elsewhere:
        with pytest.raises(ProfileError, match="weights would leave cpu:1"):
            dyno.Engine(MODEL, require_profile=True, **long, **room(16))


def test_a_u_batch_stays_where_weights_lie_on_the_cpu_anyway(tmp_path: Path) -> None:
    given: dict[str, Any] = {"device": "cpu:1", "threads": 1, "ctx": 64}
    given["virtual_devices"] = {"cpu:1": {"memory_mib": 4}}
    with dyno.Engine(MODEL, profile=None, **given) as engine:
        assert engine.plan["placement"]["note"]
        path = profile_of(tmp_path, engine.device_info, ubatch=1024)
    with dyno.Engine(MODEL, profile=path, require_profile=True, **given) as engine:
        assert engine.settings["ubatch"] == 1024
        assert engine.plan["placement"]["note"]


def test_a_u_batch_of_a_near_device_displaces_no_weights(tmp_path: Path) -> None:
    """Another memory holds another part of the model beside the same u-batch."""
    given: dict[str, Any] = {"device": "cpu:1", "threads": 1, "ctx": 64, "plan_only": True}
    path = tiny_model(tmp_path / "m.gguf", n_layers=16, n_embd=128, n_heads=2, n_kv_heads=1, n_ff=512)
    with dyno.Engine(path, profile=None, **given, virtual_devices=1) as engine:
        need = int(engine.plan["total_bytes"])
    # Half of the weights, which take 15 MiB, do not fit.
    given["virtual_devices"] = {"cpu:1": {"memory_mib": need // 2**20 - 7}}

    def on_device(engine: dyno.Engine) -> int:
        return int(engine.plan["devices"][0]["weights_bytes"])

    with dyno.Engine(path, profile=None, **given) as engine:
        assert engine.plan["placement"]["note"]
        usual, info = on_device(engine), engine.device_info
    exact = profile_of(tmp_path, info, path, ubatch=1024)
    with dyno.Engine(path, profile=exact, **given) as engine:
        assert on_device(engine) < usual
    for ubatch in (1024, 256):
        near = profile_of(tmp_path, {**info, "memory_bytes": 1 << 40}, path, ubatch=ubatch)
        with dyno.Engine(path, profile=near, **given) as engine:
            assert engine.match.level is profiles.Level.SAME_DEVICE
            assert on_device(engine) >= usual
            assert engine.settings["ubatch"] == (512 if ubatch == 1024 else ubatch)
            assert ["weights would leave cpu:1" in line for line in engine.fallbacks] == [True] * (
                ubatch > 512
            )


@pytest.mark.parametrize(
    ("values", "ctx", "kind", "words"),
    [
        ({}, 1 << 15, PlanError, "^.plan. ctx is 32768"),
        (
            {"placement": ["exps=cuda:1"]},
            64,
            ProfileError,
            "placement of the profile does not fit this machine",
        ),
    ],
)
def test_a_u_batch_is_not_blamed_for_other_errors(
    tmp_path: Path, values: dict[str, Any], ctx: int, kind: type[Exception], words: str
) -> None:
    given: dict[str, Any] = {"device": "cpu:1", "threads": 1, "plan_only": True}
    given["virtual_devices"] = {"cpu:1": {"memory_mib": 16}}
    with dyno.Engine(MODEL, profile=None, ctx=64, **given) as engine:
        path = profile_of(tmp_path, engine.device_info, ubatch=32, **values)
    with pytest.raises(kind, match=words) as caught:
        dyno.Engine(MODEL, profile=path, require_profile=True, ctx=ctx, **given)
    assert caught.type is kind
