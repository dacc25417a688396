"""What the tuner does for a GPU, seen without one: the device is a description, its rates are given."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest
from described_gpu import H200, RATES
from dyno import _core, _nvml, profiles
from dyno._ubatch import GPU_PROPERTIES
from dyno.devices import Device, built_for_cuda
from dyno_tuner.core.crossing import Solved, Verdict
from dyno_tuner.core.errors import TargetUnusable
from dyno_tuner.core.outcome import Outcome
from dyno_tuner.core.protocol import Configuration, Description, Measurement, Sample, TrialStatus, Workload
from dyno_tuner.measure.measurement import judge_plausibility
from dyno_tuner.output.emit import Made, profile_of
from dyno_tuner.space.knobs import Facts, resolve
from dyno_tuner.space.search_space import Space
from dyno_tuner.targets.dyno.bounds import GPU_HEADROOM
from dyno_tuner.targets.dyno.placing import Placing
from dyno_tuner.targets.dyno.target import DynoTarget

MODEL = Path(__file__).parents[2] / "data" / "tiny" / "qwen3moe-tiny.gguf"
WORKLOAD = Workload(pp=4096, tg=128)


@pytest.fixture
def described(monkeypatch: pytest.MonkeyPatch) -> Description:
    monkeypatch.setattr(_core, "devices", lambda: [_core.cpu_info(), H200])
    monkeypatch.setattr(_core, "device_problem", lambda device: "")
    monkeypatch.setattr(_core, "measure_rates", lambda name: dict(RATES))
    monkeypatch.setattr(_nvml, "facts", lambda bus: {"power_limit_w": 700.0, "driver": "580.1"})
    return DynoTarget(str(MODEL), device="cuda:0").describe()


def test_the_device_is_described_as_profiles_need_it(described: Description) -> None:
    device = profiles.CudaDevice(**described.device)
    assert (device.compute_capability, device.sm_count, device.power_limit_w) == ("9.0", 132, 700.0)
    assert described.label == f"NVIDIA H200 · {MODEL.name}"
    assert described.rates == {"memory_gbps": 4141.5, "pcie_gbps": 55.2, "f16_tflops": 756.4}
    assert described.engine["gpu"]["driver"] == "580.1"
    assert not {"cpu_repack", "cpu_isa"} & set(described.engine["defaults"])
    assert Description.from_dict(described.to_dict()) == described
    assert "rates" not in described.identity()  # they differ from start to start


def test_rates_beyond_the_hardware_are_implausible(described: Description) -> None:
    model = _core.describe_model(str(MODEL))
    active = (model["parameters"] - 2 * model["n_vocab"] * model["n_embd"]) * (
        model["experts_used"] / model["experts"]
    )
    assert described.bounds["pp"] == pytest.approx(GPU_HEADROOM * 756.4e12 / active)
    assert "tg" not in described.bounds  # all of this model fits into the L2 cache
    seconds = 4096 / (1.01 * described.bounds["pp"])
    measurement = Measurement(TrialStatus.OK, (Sample("pp", 0, 4096, seconds, seconds),))
    judged = judge_plausibility(measurement, described.bounds, None)
    assert judged.status is TrialStatus.IMPLAUSIBLE
    assert "bound" in judged.message


def test_generation_is_bound_by_the_weights_that_a_token_reads(
    described: Description, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = DynoTarget(str(MODEL), device="cuda:0")
    target._model = {"parameters": 10e9, "active_parameters": 1e9}
    monkeypatch.setattr("os.path.getsize", lambda path: 6_000_000_000)
    read = 6e9 * 0.1 - H200["l2_bytes"]
    assert target._bounds()["tg"] == pytest.approx(GPU_HEADROOM * 4141.5e9 / read)


def test_a_build_without_cublas_bounds_no_prompt(
    described: Description, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = {name: rate for name, rate in RATES.items() if name != "f16_tflops"}
    monkeypatch.setattr(_core, "measure_rates", lambda name: left)
    told = DynoTarget(str(MODEL), device="cuda:0").describe()
    assert told.rates == {"memory_gbps": 4141.5, "pcie_gbps": 55.2}
    assert "pp" not in told.bounds


def test_knobs_of_a_gpu(described: Description) -> None:
    facts = Facts(described.device, described.model, WORKLOAD, described.engine["defaults"], 4096)
    names = {knob.name for knob in resolve(facts, approx=False)}
    assert {"ubatch", "fusion"} <= names
    assert not {"threads", "threads_batch", "cpu_repack", "kv_type_k"} & names
    assert names <= set(described.engine["defaults"])  # what this engine does not have is not searched
    assert {"kv_type_k", "kv_type_v"} <= {knob.name for knob in resolve(facts, approx=True)}
    ubatch = next(knob for knob in resolve(facts, approx=False) if knob.name == "ubatch")
    assert ubatch.values[-1] == 4096
    prompts = Facts(
        described.device, described.model, Workload(pp=4096, tg=0), described.engine["defaults"], 4096
    )
    assert "cuda_graphs" not in {knob.name for knob in resolve(prompts, approx=False)}


@pytest.mark.skipif(not built_for_cuda(), reason="this build has no CUDA kernels to choose from")
def test_kernels_are_those_of_the_path_that_the_settings_chose(
    described: Description, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = DynoTarget(str(MODEL), device="cuda:0")
    monkeypatch.setattr(target, "_switch", lambda configuration: None)
    variants: dict[int, set[Any]] = {}
    for bound in (0, 65536):
        settings = {"ubatch": 512, "cuda_graphs": False, "mmq_max_tokens": bound, "mmq_id_max_tokens": bound}
        target._session = _core.Session(
            str(MODEL), context={"ctx": 512}, session=settings, plan_only=True, device=H200
        )
        target._loaded = settings
        ops = target.kernel_ops(Configuration(settings), Workload(pp=512, tg=4))
        products = [op for op in ops if op.key.startswith("matmul") and "layout=gpu" in op.key]
        assert {op.metric for op in products} == {"pp", "tg"}
        for op in products:
            assert op.default in op.candidates
            # A product that normalises has the kernels of both paths.
            if op.metric == "tg" and " norm " not in op.key:
                assert {c["variant"] for c in op.candidates} == {"stream"}
        (drawing,) = [op for op in ops if op.key.startswith("sample ")]
        assert (drawing.metric, drawing.tokens, drawing.m, drawing.count) == ("tg", "m1", 1, 1)
        assert drawing.default in drawing.candidates
        variants[bound] = {c["variant"] for op in products if op.metric == "pp" for c in op.candidates}
    hopper = {"wgmma", "wgmma_split", "wgmma_ring", "wgmma_codes", "wgmma_wide", "wgmma_wide_split"}
    assert "wgmma" in variants[65536]
    assert variants[65536] <= hopper | {"mma"}
    assert variants[0] <= {"cublas", "half_mma", "half_staged", "float32"}
    target._session = None


def test_the_compute_type_matters_only_where_products_are_dequantised(described: Description) -> None:
    facts = Facts(described.device, described.model, WORKLOAD, described.engine["defaults"], 4096)
    space = Space(resolve(facts, approx=False))
    settings = space.settings(space.default)

    def kind(**changes: Any) -> Any:
        return space.code_class(space.point({**settings, **changes}))

    assert kind(compute_type="bf16") == kind()
    assert kind(compute_type="bf16", mmq_max_tokens=256) != kind(mmq_max_tokens=256)
    assert kind(compute_type="f32", mmq_id_max_tokens=256) != kind(mmq_id_max_tokens=256)
    assert kind(compute_type="bf16", mmq_max_tokens=4096) == kind()  # 4096 tokens are a u-batch


def test_the_profile_says_where_paths_cross(described: Description) -> None:
    crossing = Solved("mmq_id_max_tokens", Verdict.CROSSING, 1024, {512: 1.31234, 2048: 0.8})
    outcome = Outcome(settings={}, defaults={}, crossings=[crossing])
    made = Made(WORKLOAD, 0, "tune", None, MODEL.name, datetime.date(2026, 11, 20))
    profile = profiles.loads_profile(profiles.dumps_profile(profile_of(outcome, described, made)))
    assert profile.evidence is not None
    found = profile.evidence.crossings["mmq_id_max_tokens"]
    assert (found.verdict, found.up_to) == ("crossing", 1024)
    assert (found.ubatch, found.ratio) == ([512, 2048], [1.3123, 0.8])


def test_the_profile_carries_the_measured_rates(described: Description) -> None:
    outcome = Outcome(settings={}, defaults={}, baseline={"pp": 1000.0, "tg": 100.0})
    made = Made(WORKLOAD, 0, "tune", None, MODEL.name, datetime.date(2026, 11, 20))
    profile = profile_of(outcome, described, made, described.rates)
    device = profile.match.device
    assert isinstance(device, profiles.CudaDevice)
    assert (device.memory_gbps, device.pcie_gbps) == (4141.5, 55.2)
    assert profile.provenance is not None
    assert profile.provenance.driver == "580.1"
    assert profiles.loads_profile(profiles.dumps_profile(profile)).match == profile.match


def test_a_gpu_that_cannot_be_measured_is_unusable(
    described: Description, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(name: str) -> dict[str, float]:
        from dyno.errors import DeviceError

        raise DeviceError("[cuda] the device is lost")

    target = DynoTarget(str(MODEL), device="cuda:0")
    monkeypatch.setattr(_core, "measure_rates", lost)
    with pytest.raises(TargetUnusable, match="lost"):
        target.describe()
    with pytest.raises(TargetUnusable, match="does not exist"):
        DynoTarget(str(MODEL), device="cuda:3")


def test_the_usual_placement_fits_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program holds all but a part of the GPU's memory."""

    def usual(free: int) -> tuple[dict[str, Any], dict[str, int]]:
        monkeypatch.setattr(_core, "no_cuda_reason", lambda: "")
        monkeypatch.setattr(_core, "gpu_free_bytes", lambda number: free)
        described = DynoTarget(str(MODEL), device="cuda:0", settings={"ubatch": 512}).describe()
        return described.engine["defaults"], described.limits

    monkeypatch.setattr(_core, "devices", lambda: [_core.cpu_info(), H200])
    monkeypatch.setattr(_core, "device_problem", lambda device: "")
    monkeypatch.setattr(_core, "measure_rates", lambda name: dict(RATES))
    monkeypatch.setattr(_nvml, "facts", lambda bus: {"power_limit_w": 700.0, "driver": "580.1"})
    whole, limits = usual(H200["memory_bytes"])
    assert (whole["n_cpu_moe"], whole["n_gpu_layers"]) == (0, -1)
    assert limits == {}
    # The runtime's reserve, and hardly more.
    short, limits = usual(520 << 20)
    assert short["n_cpu_moe"] > 0 or short["n_gpu_layers"] >= 0
    assert limits == {"device": 520 << 20}, "where weights are placed, no configuration may take more either"


def test_the_usual_placement_goes_by_all_that_plans_go_by(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a GPU cannot map memory by need, caches are full ones, and less is left for weights."""
    asked: list[dict[str, Any]] = []
    session = _core.Session

    def spied(*args: Any, **options: Any) -> _core.Session:
        if options.get("device") is not None:
            asked.append(dict(options["device"]))
        return session(*args, **options)

    gpu = {**H200, "maps_memory": False}
    monkeypatch.setattr(_core, "Session", spied)
    placing = Placing(0, 0, 0)
    placing.free = 1 << 30
    kinds = {"load": {}, "context": {"ctx": 64}, "session": {"ubatch": 64}}
    placing.usual(str(MODEL), Device("cuda:0", gpu), kinds)
    (described,) = asked
    told = {n: v for n, v in gpu.items() if n not in ("name", "pci_bus_id")}
    assert described == {**told, "memory_bytes": 1 << 30}
    assert set(described) == set(GPU_PROPERTIES)
