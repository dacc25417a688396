"""Smaller machines, slices of a model, layers over several devices: the same answers, or a clear error."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import dyno
import numpy as np
import pytest
from dyno import _core, profiles
from dyno._cli.groups import EngineOptions
from dyno._placement import Placement
from dyno.cli import app
from dyno.devices import Device, limited
from dyno.errors import OutOfMemoryError, PlanError, UnsupportedError
from random_models import Shape, random_model
from typer import BadParameter
from typer.testing import CliRunner

TINY = Path(__file__).resolve().parents[1] / "data" / "tiny"
NAMES = sorted(p.name.removesuffix("-tiny.gguf") for p in TINY.glob("*-tiny.gguf"))
MOE = Shape("qwen3moe", ("q8_0",), 256, 4, 2, 64, 0, 300, experts=16, used=2, n_ff_expert=256, n_layers=4)
OPENED: dict[str, Any] = {"profile": None, "ctx": 64, "ubatch": 16, "threads": 1}
TOKENS = np.arange(1, 40)
GPU = {"kind": "cuda", "compute_capability": 90, "sm_count": 132, "shared_per_block_bytes": 232_448}


def opened(path: Path, **given: Any) -> dyno.Engine:
    return dyno.Engine(path, **{**OPENED, **given})


def held(engine: dyno.Engine, name: str) -> int:
    one = next(d for d in engine.plan["devices"] if d["name"] == name)
    return sum(int(v) for part, v in one.items() if part.endswith("_bytes"))


def _layer(name: str) -> int:
    words = name.split(".")
    return int(words[1]) if words[0] == "blk" else -1


def layers_by_device(engine: dyno.Engine) -> dict[str, list[int]]:
    found: dict[str, set[int]] = {}
    for tensor in engine.plan["tensors"]:
        words = tensor["name"].split(".")
        if words[0] == "blk":
            found.setdefault(tensor["device"], set()).add(int(words[1]))
    return {device: sorted(layers) for device, layers in found.items()}


# ---- smaller machines


def test_vram_makes_a_smaller_device(tmp_path: Path) -> None:
    path = random_model(tmp_path / "m.gguf", MOE)
    where = {"device": "cpu:1", "virtual_devices": 1}
    with opened(path, **where) as engine:
        whole, want = held(engine, "cpu:1"), engine.logits(TOKENS)
    limit = whole - (whole // 4)
    with opened(path, **where, vram=limit) as engine:
        assert held(engine, "cpu:1") <= limit
        assert engine.plan["placement"]["note"].startswith("auto: the model takes")
        np.testing.assert_array_equal(engine.logits(TOKENS), want)
    with pytest.raises(OutOfMemoryError, match=r"virtual device cpu:1 is .* short"):
        opened(path, **where, vram=limit, placement=())
    # The lesser of both limits counts.
    both = {"device": "cpu:1", "virtual_devices": {"cpu:1": {"memory_mib": 4096}}}
    with opened(path, **both, vram=limit, plan_only=True) as engine:
        assert held(engine, "cpu:1") <= limit


def test_ram_bounds_the_part_of_the_cpu(tmp_path: Path) -> None:
    path = random_model(tmp_path / "m.gguf", MOE)
    where = {"device": "cpu:1", "virtual_devices": 1}
    with opened(path, **where, cpu_moe=True) as engine:
        part = held(engine, "cpu")
        want = engine.logits(TOKENS)
    # Counted are also pages of the file that the CPU reads in place: a smaller machine has no room for them.
    with pytest.raises(OutOfMemoryError, match=r"the CPU is .* short: .* allowed"):
        opened(path, **where, cpu_moe=True, ram=part // 2)
    with opened(path, **where, cpu_moe=True, ram=part * 2) as engine:
        np.testing.assert_array_equal(engine.logits(TOKENS), want)
    with opened(path, **where, plan_only=True) as engine:
        limit = held(engine, "cpu:1") // 2
    with pytest.raises(OutOfMemoryError, match=r"auto: every placement that fits cpu:1 needs more .*\(ram\)"):
        opened(path, **where, vram=limit, ram=part // 4)


def test_limits_of_a_described_gpu() -> None:
    def planned(**placement: Any) -> dict[str, Any]:
        session = _core.Session(
            TINY / "qwen3moe-tiny.gguf",
            context={"ctx": 64},
            session={"ubatch": 16, "cuda_graphs": False},
            plan_only=True,
            device={**GPU, "memory_bytes": 80 << 30},
            placement={"beside_gpu": [dict(_core.cpu_info())], "automatic": True, **placement},
        )
        return dict(session.plan)

    assert planned()["placement"]["note"] == ""
    reserve = 512 << 20
    whole = sum(v for k, v in planned()["devices"][0].items() if k.endswith("_bytes"))
    scratch = planned()["scratch_bytes"]
    assert planned(main_memory=whole + scratch + reserve)["placement"]["note"] == ""
    note = planned(main_memory=whole + scratch + reserve - 1)["placement"]["note"]
    assert "cuda:0 has" in note


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"vram": "much"}, "vram: 'much' is not an amount of memory"),
        ({"ram": 0}, "ram is 0; expected bytes"),
        ({"ram": True}, "ram is True"),
        ({"vram": "1GiB"}, "vram limits a GPU or a virtual device, and the device is cpu; use ram"),
        ({"split": "row"}, "split is 'row'; expected none or layer"),
        ({"split": "layer"}, "split=layer needs two GPUs or two virtual devices"),
        ({"tensor_split": [1, 2]}, "tensor_split needs split=layer"),
        ({"tensor_split": ["a"]}, "tensor_split holds 'a'"),
        ({"split": "layer", "virtual_devices": 2, "tensor_split": [1]}, "has 1 shares, .* over 2 devices"),
        (
            {"split": "layer", "virtual_devices": 2, "tensor_split": [0, 0]},
            "all shares of tensor_split are 0",
        ),
        ({"split": "layer", "virtual_devices": 2, "tensor_split": [-1, 2]}, "tensor_split holds -1"),
        ({"layers": 9}, "layers is 9; the model has 3"),
    ],
)
def test_what_cannot_be_is_told(given: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        opened(TINY / "qwen3moe-tiny.gguf", device="cpu", plan_only=True, **given)


# ---- layers over several devices


@pytest.mark.parametrize("name", NAMES)
def test_split_layers_give_the_answers_of_one_device(name: str) -> None:
    path = TINY / f"{name}-tiny.gguf"
    with opened(path, device="cpu") as engine:
        want = engine.logits(TOKENS)
    with opened(path, device="cpu:1", virtual_devices=2, split="layer") as engine:
        spread = layers_by_device(engine)
        assert set(spread) == {"cpu:1", "cpu:2"}
        assert spread["cpu:1"][-1] < spread["cpu:2"][0]
        np.testing.assert_array_equal(engine.logits(TOKENS), want)


@pytest.mark.parametrize(
    ("shares", "first"), [((3, 1), [0, 1, 2, 3]), ((1, 3), [0, 1]), ((1, 0), [0, 1, 2, 3]), ((0, 1), None)]
)
def test_shares_are_of_layers_and_the_output(
    tmp_path: Path, shares: tuple[int, ...], first: list[int] | None
) -> None:
    """Four layers and the output are five: of 3 to 1, the first 3.75 lie on the first device."""
    path = random_model(tmp_path / "m.gguf", MOE)
    with opened(path, device="cpu:1", virtual_devices=2, split="layer", tensor_split=shares) as engine:
        assert layers_by_device(engine).get("cpu:1") == first
        output = next(t for t in engine.plan["tensors"] if t["name"] == "output.weight")
        assert output["device"] == ("cpu:1" if shares == (1, 0) else "cpu:2")


def test_without_shares_the_memory_of_the_devices_counts(tmp_path: Path) -> None:
    path = random_model(tmp_path / "m.gguf", MOE)
    limits = {"cpu:1": {"memory_mib": 64}, "cpu:2": {"memory_mib": 192}}
    with opened(path, device="cpu:1", virtual_devices=limits, split="layer") as engine:
        assert layers_by_device(engine) == {"cpu:1": [0, 1], "cpu:2": [2, 3]}
        text = engine.describe_plan()
    assert "cpu:1: weights" in text
    assert "of layers 0-1" in text
    assert "of layers 2-3" in text


def test_a_split_comes_behind_rules_and_layers_of_the_cpu(tmp_path: Path) -> None:
    path = random_model(tmp_path / "m.gguf", MOE)
    where = {"device": "cpu:1", "virtual_devices": 2, "split": "layer"}
    with opened(path, **where, n_gpu_layers=3) as engine:
        assert layers_by_device(engine) == {"cpu": [0, 1], "cpu:1": [2, 3]} or layers_by_device(engine) == {
            "cpu": [0, 1], "cpu:1": [2], "cpu:2": [3]
        }  # fmt: skip
    with opened(path, **where, placement=[r"blk\.0\.=cpu:2"]) as engine:
        assert 0 in layers_by_device(engine)["cpu:2"]


def test_layers_over_described_gpus() -> None:
    session = _core.Session(
        TINY / "qwen3moe-tiny.gguf",
        context={"ctx": 64},
        session={"ubatch": 16, "cuda_graphs": False},
        plan_only=True,
        device={**GPU, "memory_bytes": 80 << 30},
        placement={
            "beside_gpu": [dict(_core.cpu_info()), {**GPU, "memory_bytes": 80 << 30}],
            "split_layers": True,
            "shares": [1.0, 1.0],
        },
    )
    devices = {t["name"]: t["device"] for t in session.plan["tensors"]}
    assert devices["blk.0.attn_q.weight"] == "cuda:0"
    assert devices["blk.2.attn_q.weight"] == devices["output.weight"] == "cuda:1"
    assert [d["name"] for d in session.plan["devices"]] == ["cuda:0", "cuda:1"]


@pytest.mark.parametrize(
    ("given", "meant"),
    [("5", "5GiB"), (" 1.5 ", "1.5GiB"), (24, "24GiB"), (24576, "16GiB or 800MiB"), ("67108863", "16GiB")],
)
def test_a_plain_number_is_no_limit_unless_it_can_be_bytes(given: int | str, meant: str) -> None:
    for name in ("vram", "ram"):
        with pytest.raises(PlanError, match=rf"{name}: {re.escape(repr(given))} is .* bytes; write {meant}"):
            Placement.of((), 0, None, None, None, {name: given})
    for enough in ("67108864", 65536, "32MiB", "5B"):
        assert Placement.of((), 0, None, None, None, {"vram": enough}).vram > 0


def test_options_of_the_command_line() -> None:
    assert EngineOptions(tensor_split="3,1").placement() == {
        "split": "layer",
        "tensor_split": [3.0, 1.0],
    }
    for words, message in (
        ({"vram": "x"}, "'x' is not an amount"),
        ({"vram": "5"}, "'5' is 5 bytes; the least limit is 64 MiB; write 5GiB"),
        ({"ram": "63M"}, "the least limit is 64 MiB"),
        ({"split_mode": "row"}, "dyno has none and layer"),
        ({"tensor_split": "3;1"}, "is not N,N"),
    ):
        with pytest.raises(BadParameter, match=message):
            EngineOptions(**words).placement()
    given = ["explain", "plan", str(TINY / "qwen3moe-tiny.gguf"), "--no-profile", "--device", "cpu:1"]
    done = CliRunner().invoke(app, [*given, "--virtual-devices", "2", "-sm", "layer", "-ts", "1,1"])
    assert done.exit_code == 0, done.output
    assert "of layers 0-1" in done.output


# ---- a slice of the model


@pytest.mark.parametrize("name", NAMES)
def test_a_slice_has_the_first_layers_and_the_output(name: str, caplog: pytest.LogCaptureFixture) -> None:
    path = TINY / f"{name}-tiny.gguf"
    with opened(path, device="cpu", plan_only=True) as engine:
        whole = engine.plan
        count = int(engine.model["n_layers"])
    try:
        with caplog.at_level(logging.WARNING, "dyno"), opened(path, device="cpu", layers=1) as engine:
            assert engine.model["n_layers"] == 1
            assert engine.logits(TOKENS).shape == (len(TOKENS), engine.model["n_vocab"])
            found = {t["name"] for t in engine.plan["tensors"]}
    except UnsupportedError as error:
        assert "only the whole model can run" in str(error)  # noqa: PT017 - which architectures can is no contract
        return
    assert count > 1
    assert f"layers=1 of {count}: the answers are meaningless" in caplog.text
    assert found == {t["name"] for t in whole["tensors"] if _layer(t["name"]) < 1}
    assert engine.settings["layers"] == 1


def test_all_layers_are_the_whole_model() -> None:
    path = TINY / "llama-tiny.gguf"
    with opened(path, device="cpu", layers=3) as one, opened(path, device="cpu") as other:
        np.testing.assert_array_equal(one.logits(TOKENS), other.logits(TOKENS))


# ---- profiles of virtual devices


def test_a_profile_of_a_virtual_device_is_for_that_device_alone() -> None:
    info = dict(_core.cpu_info())
    real = profiles.device_from_info(info)
    slow = profiles.device_from_info({**info, "virtual": "link_gbps=4"})
    model = profiles.model_from_description(_core.describe_model(str(TINY / "llama-tiny.gguf")))
    engine = profiles.engine_from_build(_core.build_info())
    match = profiles.Match(device=slow, model=model, engine=engine)
    assert profiles.compare(match, slow, model, engine).level is profiles.Level.EXACT
    for other in (real, profiles.device_from_info({**info, "virtual": "link_gbps=8"})):
        found = profiles.compare(match, other, model, engine)
        assert found.level is profiles.Level.DEFAULT
        assert "a virtual device (link_gbps=4)" in found.reasons[0]
    assert profiles.default_path(slow, model, engine) != profiles.default_path(real, model, engine)
    with opened(
        TINY / "llama-tiny.gguf", device="cpu:1", virtual_devices={"cpu:1": {"link_gbps": 4, "streams": 1}},
        plan_only=True,
    ) as one:  # fmt: skip
        assert one.device_info["virtual"] == "link_gbps=4 streams=1"


def test_limits_make_another_device_for_profiles() -> None:
    where = {"cpu:1": {"link_gbps": 4, "memory_mib": 64}}
    path = TINY / "llama-tiny.gguf"
    with opened(path, device="cpu:1", virtual_devices=where, vram="32MiB", ram="1GiB", plan_only=True) as one:
        assert one.device_info["virtual"] == "link_gbps=4 memory_mib=32 ram_mib=1024"
    gpu = Device("cuda:0", {"kind": "cuda", "memory_bytes": 80 << 30})
    assert limited(gpu, 16 << 30, 0).info["memory_bytes"] == 16 << 30
    assert limited(gpu, 100 << 30, 1).info == gpu.info


def test_a_placement_for_less_memory_is_not_taken_over() -> None:
    """On a device with more memory fewer layers have to leave it."""

    def decided(memory_mib: int) -> str:
        there = profiles.CudaDevice(compute_capability="9.0", sm_count=132, memory_mib=16384)
        here = there.model_copy(update={"memory_mib": memory_mib})
        model = profiles.model_from_description(_core.describe_model(str(TINY / "qwen3moe-tiny.gguf")))
        profile = profiles.Profile(
            schema=1, label="x", settings={"n_cpu_moe": profiles.SettingEntry(value=2)},
            match=profiles.Match(
                device=there, model=model, engine=profiles.engine_from_build(_core.build_info())
            ),
            provenance=profiles.Provenance(tuner="test", date="2026-11-25"),
        )  # fmt: skip
        [decision] = profiles.decide(profile, profiles.Level.SAME_DEVICE, here)
        return f"{decision.action} {decision.reason}"

    assert decided(16400).startswith("fit_check")
    assert decided(81920) == "reject placed for 16384 MiB of memory, here 81920 MiB"
