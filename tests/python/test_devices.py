"""Devices by name, and what is said where there is none; the plan's memory on GPUs that need not be here."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from described_gpu import H200
from dyno import _core, _nvml, devices, info
from dyno.errors import DeviceError, DeviceLostError, OutOfMemoryError
from dyno.profiles import CudaDevice, device_from_info

TINY = Path(__file__).resolve().parent.parent / "data" / "tiny"


def seen(monkeypatch: pytest.MonkeyPatch, *gpus: dict[str, Any], problem: str = "") -> None:
    """As if the machine had these GPUs."""
    monkeypatch.setattr(_core, "devices", lambda: [_core.cpu_info(), *gpus])
    monkeypatch.setattr(_core, "device_problem", lambda device: problem)
    monkeypatch.setattr(_nvml, "facts", lambda bus: {"power_limit_w": 700.0, "driver": "580.1"})


def test_auto_takes_the_first_usable_gpu_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    seen(monkeypatch, H200, H200)
    found = devices.resolve_device("auto")
    assert (found.name, found.kind) == ("cuda:0", "cuda")
    assert found.headline == "device: cuda:0, NVIDIA H200 (auto: the first usable one of 2 GPUs)"
    assert devices.resolve_device("cuda").name == "cuda:0"
    assert devices.resolve_device("cuda:1").headline == "device: cuda:1, NVIDIA H200"
    match = device_from_info(found.info)
    assert isinstance(match, CudaDevice)
    assert (match.compute_capability, match.sm_count, match.power_limit_w) == ("9.0", 132, 700.0)


def test_a_lost_gpu_is_named_and_auto_takes_another(monkeypatch: pytest.MonkeyPatch) -> None:
    seen(monkeypatch, H200, H200)
    lost = "[cuda] cuda:0 is lost to this process (restart it ...): cudaErrorLaunchFailure"
    monkeypatch.setattr(_core, "device_loss", lambda ordinal: lost if ordinal == 0 else "")
    with pytest.raises(DeviceLostError, match="cuda:0 is lost") as caught:
        devices.resolve_device("cuda:0")
    assert isinstance(caught.value, DeviceError)
    assert devices.resolve_device("auto").name == "cuda:1"
    assert [d.info.get("problem") for d in devices.list_devices()] == [None, lost, ""]
    monkeypatch.setattr(_core, "device_loss", lambda ordinal: lost)
    found = devices.resolve_device("auto")
    assert found.name == "cpu"
    assert "cuda:1: [cuda] cuda:0 is lost" in found.why


def test_auto_never_falls_back_in_silence(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seen(monkeypatch, H200, problem="this build holds code for 75")
    monkeypatch.setattr(devices, "built_for_cuda", lambda: True)
    log = logging.getLogger("dyno.device")
    caplog.set_level(logging.INFO, "dyno.device")
    log.addHandler(caplog.handler)  # the package's logger need not pass on what it is told
    try:
        caplog.clear()
        found = devices.resolve_device("auto")
    finally:
        log.removeHandler(caplog.handler)
    assert found.name == "cpu"
    assert "cuda:0: this build holds code for 75" in found.headline
    assert {record.levelname for record in caplog.records} == {"WARNING"}


def test_names_that_mean_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("gpu", "cuda:", "cuda:x", "cuda:-1", "cpu:0", "", "CUDA:0"):
        with pytest.raises(DeviceError, match=r"known are 'auto', 'cpu' and 'cuda:N'"):
            devices.resolve_device(name)
    seen(monkeypatch, H200)
    with pytest.raises(DeviceError, match="'cuda:7' does not exist: this machine shows 1 GPU"):
        devices.resolve_device("cuda:7")
    seen(monkeypatch, H200, problem="no code for compute capability 9.0")
    with pytest.raises(DeviceError, match=r"'cuda:0': no code for compute capability 9\.0"):
        devices.resolve_device("cuda:0")


def test_a_build_knows_which_gpus_it_has_code_for() -> None:
    problem = _core.device_problem({"kind": "cuda", "compute_capability": 50})
    assert ("no CUDA engine" in problem) or ("compute capability 5.0" in problem)
    assert _core.device_problem(_core.cpu_info()) == ""


def test_importing_touches_no_device() -> None:
    """Neither the CUDA driver nor NVML is loaded by an import."""
    script = (
        "import dyno, dyno.engine, dyno.devices, dyno.bench, dyno.info, dyno.profiles, sys\n"
        "import dyno_tuner.cli.commands\n"
        "assert 'pynvml' not in sys.modules\n"
        "maps = open('/proc/self/maps').read()\n"
        "assert 'libcuda.so' not in maps and 'libnvidia-ml' not in maps\n"
    )
    if not Path("/proc/self/maps").exists():
        pytest.skip("needs /proc")
    subprocess.run([sys.executable, "-c", script], check=True)


def test_info_shows_every_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    seen(monkeypatch, H200, problem="this build has no CUDA engine")
    facts = info.collect()
    json.dumps(facts)
    assert [d["device"] for d in facts["devices"]] == ["cpu", "cuda:0"]
    text = info.text(facts)
    assert "cuda:0: NVIDIA H200" in text
    assert "compute capability 9.0, 132 SMs, L2 60 MiB" in text
    assert "driver 580.1, power limit 700 W" in text
    assert "not usable: this build has no CUDA engine" in text
    assert [d["device"] for d in info.collect("cpu")["devices"]] == ["cpu"]


def test_info_names_the_weight_types_and_groups_of_the_gpu_kernels() -> None:
    facts = info.collect("cpu")
    build = {**facts["build"], "cuda_types": ["f32", "q4_k"]}
    assert "GPU weight types  f32, q4_k" in info.text({**facts, "build": build}).splitlines()
    # A profile that names no model leaves no type out.
    switches = {**build["switches"], "GGML_CUDA_PROFILE": "p.yaml"}
    assert "GPU weight types  f32, q4_k" in info.text({**facts, "build": {**build, "switches": switches}})
    assert "left out" not in info.text({**facts, "build": {**build, "switches": switches}})
    pruned = {**build, "switches": switches, "cuda_types_of": "p.yaml"}
    line = "GPU weight types  f32, q4_k; GGML_CUDA_PROFILE=p.yaml left out others"
    assert line in info.text({**facts, "build": pruned}).splitlines()
    assert "GPU weight types" not in info.text({**facts, "build": {**build, "cuda_types": []}})
    assert "GPU kernel groups" not in info.text({**facts, "build": pruned})
    grouped = {**pruned, "cuda_groups": ["heads_128", "latent"], "cuda_groups_of": "p.yaml"}
    line = "GPU kernel groups heads_128, latent; GGML_CUDA_PROFILE=p.yaml left out others"
    assert line in info.text({**facts, "build": grouped}).splitlines()


# ---- memory of a GPU that is not here ----


def planned(ctx: int = 4096, ubatch: int = 512, **context: Any) -> _core.Session:
    return _core.Session(
        TINY / "llama-tiny.gguf",
        context={"ctx": ctx, **context},
        session={"ubatch": ubatch},
        plan_only=True,
        device=H200,
    )


def test_a_plan_that_fits_is_no_error() -> None:
    session = planned(ctx=256)
    session.check_memory(session.plan["total_bytes"] + (512 << 20))


@pytest.mark.parametrize(
    ("settings", "short", "advice"),
    [
        ({"ctx": 256, "ubatch": 4096}, 1 << 20, "Use ubatch=2048"),
        ({"ctx": 256, "ubatch": 32, "sequences": 64}, 1 << 18, "sequences="),
        ({"ctx": 256, "ubatch": 32}, 300 << 20, "The settings cannot make it fit"),
    ],
)
def test_what_does_not_fit_says_what_to_change(settings: dict[str, Any], short: int, advice: str) -> None:
    session = planned(**settings)
    needed = session.plan["total_bytes"] + (512 << 20)
    with pytest.raises(OutOfMemoryError) as caught:
        session.check_memory(needed - short)
    text = str(caught.value)
    assert f"is {short / 2**20:.1f} MiB short" in text
    assert advice in text
    for name in ("weights", "KV cache", "arena", f"ubatch={settings['ubatch']}", f"ctx={settings['ctx']}"):
        assert name in text


def test_the_advice_is_enough() -> None:
    """Following one of the changes that are said to suffice makes it fit."""
    session = planned(ctx=256, ubatch=4096)
    free = session.plan["total_bytes"] + (512 << 20) - (3 << 20)
    with pytest.raises(OutOfMemoryError, match="Use ubatch=") as caught:
        session.check_memory(free)
    ubatch = int(str(caught.value).split("Use ubatch=")[1].split(" ")[0])
    planned(ctx=256, ubatch=ubatch).check_memory(free)
