"""Matching by properties: the table of levels, the ranking of the nearest, and what may be transferred."""

from __future__ import annotations

from typing import Any

import pytest
from dyno.profiles import (
    CpuDevice,
    CudaDevice,
    EngineIdentity,
    Level,
    ModelIdentity,
    Profile,
    compare,
    decide,
    device_from_info,
    device_info,
    engine_from_build,
    model_from_description,
    shapes_fingerprint,
    weights_kind,
)
from dyno.profiles.match import score

H200 = CudaDevice(
    compute_capability="9.0",
    sm_count=132,
    memory_mib=143771,
    memory_gbps=4310.0,
    pcie_gbps=54.0,
    power_limit_w=700.0,
)
MODEL = ModelIdentity(
    architecture="qwen3moe",
    layers=48,
    embedding=2048,
    experts=128,
    experts_used=8,
    types={"Q4_0": 0.93, "Q6_K": 0.07},
)
ENGINE = EngineIdentity(version="0.3.0", ops_revision=7)
CPU = CpuDevice(isa="avx512_vnni", cores=2, l2_kib=2048, l3_kib=266240, memory_mib=7900)
CPU_MODEL = ModelIdentity(
    architecture="qwen3moe", layers=4, embedding=512, experts=8, experts_used=2, types={"Q4_K": 1.0}
)
CPU_ENGINE = EngineIdentity(version="0.1.0", ops_revision=1)


def changed(value: Any, **changes: Any) -> Any:
    return type(value).model_validate({**value.model_dump(), **changes})


# ---- Levels ----


@pytest.mark.parametrize(
    ("changes", "level", "reason"),
    [
        ({}, Level.EXACT, None),
        ({"memory_mib": int(143771 * 1.019)}, Level.EXACT, None),
        ({"memory_mib": int(143771 * 0.981)}, Level.EXACT, None),
        ({"memory_gbps": 1000.0, "pcie_gbps": 3.0}, Level.EXACT, None),  # rates only rank
        ({"memory_gbps": None, "pcie_gbps": None}, Level.EXACT, None),
        ({"memory_mib": int(143771 * 1.03)}, Level.SAME_DEVICE, "memory 143771 MiB, here 148084 MiB"),
        ({"memory_mib": 81559}, Level.SAME_DEVICE, "memory"),
        ({"power_limit_w": 350.0}, Level.SAME_DEVICE, "power limit 700 W, here 350 W"),
        ({"power_limit_w": None}, Level.SAME_DEVICE, "power limit 700 W, here unknown"),
        ({"sm_count": 114}, Level.NEAREST, "SMs 132, here 114"),
        ({"compute_capability": "8.0"}, Level.NEAREST, "compute capability 9.0, here 8.0"),
    ],
)
def test_levels_of_cuda_devices(
    cuda_profile: Profile, changes: dict[str, Any], level: Level, reason: str | None
) -> None:
    found = compare(cuda_profile.match, changed(H200, **changes), MODEL, ENGINE)
    assert found.level is level
    assert (found.reasons == ()) is (reason is None)
    assert reason is None or any(reason in told for told in found.reasons)


@pytest.mark.parametrize(
    ("changes", "level"),
    [
        ({}, Level.EXACT),
        ({"l1d_kib": 32}, Level.EXACT),  # the profile does not say
        ({"memory_mib": 8000}, Level.EXACT),
        ({"memory_mib": 16000}, Level.SAME_DEVICE),
        ({"l2_kib": 1024}, Level.SAME_DEVICE),
        ({"l3_kib": 32768}, Level.SAME_DEVICE),
        ({"cores": 4}, Level.NEAREST),
        ({"isa": "avx2"}, Level.NEAREST),
    ],
)
def test_levels_of_cpus(cpu_profile: Profile, changes: dict[str, Any], level: Level) -> None:
    assert compare(cpu_profile.match, changed(CPU, **changes), CPU_MODEL, CPU_ENGINE).level is level


@pytest.mark.parametrize(
    ("changes", "exact"),
    [
        ({}, True),
        ({"types": {"Q4_0": 0.9312, "Q6_K": 0.0688}}, True),
        ({"types": {"Q4_0": 0.925, "Q6_K": 0.065, "F32": 0.01}}, True),
        ({"vocab": 151936, "shapes": "0" * 16}, True),  # the profile does not say
        ({"types": {"Q4_0": 0.90, "Q6_K": 0.10}}, False),
        ({"types": {"Q4_K": 0.93, "Q6_K": 0.07}}, False),
        ({"architecture": "llama"}, False),
        ({"layers": 47}, False),
        ({"embedding": 4096}, False),
        ({"experts": 64}, False),
        ({"experts_used": 4}, False),
    ],
)
def test_a_profile_belongs_to_its_model(cuda_profile: Profile, changes: dict[str, Any], exact: bool) -> None:
    found = compare(cuda_profile.match, H200, changed(MODEL, **changes), ENGINE)
    assert found.level is (Level.EXACT if exact else Level.OTHER_MODEL)
    assert bool(found.other_model) is not exact


def test_shapes_count_where_both_know_them(cuda_profile: Profile) -> None:
    match = changed(cuda_profile.match, model=changed(MODEL, shapes="a" * 16).model_dump())
    assert compare(match, H200, changed(MODEL, shapes="a" * 16), ENGINE).level is Level.EXACT
    assert compare(match, H200, changed(MODEL, shapes="b" * 16), ENGINE).level is Level.OTHER_MODEL


def test_another_ops_revision_is_not_exact(cuda_profile: Profile) -> None:
    found = compare(cuda_profile.match, H200, MODEL, changed(ENGINE, ops_revision=8))
    assert found.level is Level.SAME_DEVICE
    assert found.reasons == ("ops revision 7, here 8",)
    other_version = compare(cuda_profile.match, H200, MODEL, changed(ENGINE, version="0.9.9"))
    assert other_version.level is Level.EXACT  # the revision says whether measurements hold


@pytest.mark.parametrize(
    ("measured", "here", "level"),
    [
        ("synthetic", "real", Level.SAME_DEVICE),
        ("synthetic", "synthetic", Level.EXACT),
        ("real", "synthetic", Level.EXACT),
        ("real", "real", Level.EXACT),
    ],
)
def test_synthetic_weights_are_never_exact_for_a_real_model(
    cuda_profile: Profile, measured: str, here: str, level: Level
) -> None:
    match = changed(cuda_profile.match, model=changed(MODEL, weights=measured).model_dump())
    assert compare(match, H200, changed(MODEL, weights=here), ENGINE).level is level


def test_kinds_and_engines_never_mix(cuda_profile: Profile, cpu_profile: Profile) -> None:
    for profile, device in ((cuda_profile, CPU), (cpu_profile, H200)):
        assert compare(profile.match, device, MODEL, ENGINE).level is Level.DEFAULT
    other = EngineIdentity(name="ik_llama.cpp", version="4000")
    assert compare(cuda_profile.match, H200, MODEL, other).level is Level.DEFAULT


# ---- Scores ----


def likeness(profile: Profile, device: CudaDevice | CpuDevice, model: ModelIdentity = MODEL) -> float:
    return score(profile, device, model, ENGINE).score


def test_nearer_devices_and_models_score_higher(cuda_profile: Profile) -> None:
    h100 = changed(H200, sm_count=114, memory_mib=81559, memory_gbps=3000.0)
    a100 = changed(h100, compute_capability="8.0", sm_count=108, memory_gbps=1800.0, pcie_gbps=25.0)
    turing = changed(a100, compute_capability="7.5", sm_count=68, memory_gbps=600.0, pcie_gbps=12.0)
    scores = [likeness(cuda_profile, device) for device in (H200, h100, a100, turing)]
    assert scores == sorted(scores, reverse=True)
    assert len(set(scores)) == 4
    assert all(0 <= value <= 1 for value in scores)
    dense = ModelIdentity(architecture="llama", layers=32, embedding=4096, types={"Q8_0": 1.0})
    assert likeness(cuda_profile, h100, dense) < likeness(cuda_profile, h100)


def test_bandwidth_entries_rank_by_bandwidth_and_tile_entries_by_chip(cuda_profile: Profile) -> None:
    """The same two machines rank differently for a profile of u-batches and one of kernels."""
    same_chip_slow_bus = changed(H200, sm_count=114, memory_gbps=1000.0, pcie_gbps=6.0)
    other_chip_fast_bus = changed(H200, compute_capability="12.0", sm_count=114)
    only_settings = cuda_profile.model_copy(
        update={"kernels": {}, "settings": {"ubatch": cuda_profile.settings["ubatch"]}}
    )
    only_kernels = cuda_profile.model_copy(update={"settings": {}})
    assert likeness(only_settings, other_chip_fast_bus) > likeness(only_settings, same_chip_slow_bus)
    assert likeness(only_kernels, same_chip_slow_bus) > likeness(only_kernels, other_chip_fast_bus)


# ---- What may be transferred ----


def actions(profile: Profile, level: Level, device: CudaDevice | CpuDevice) -> dict[str, str]:
    return {decision.path: decision.action for decision in decide(profile, level, device)}


def test_exact_applies_everything(cuda_profile: Profile) -> None:
    assert set(actions(cuda_profile, Level.EXACT, H200).values()) == {"apply"}


@pytest.mark.parametrize("level", [Level.SAME_DEVICE, Level.NEAREST])
def test_values_bounded_by_memory_need_a_fit_check(cuda_profile: Profile, level: Level) -> None:
    assert actions(cuda_profile, level, H200) == {
        "settings.ubatch": "fit_check",
        "settings.mmq_id_max_tokens": "apply",
        "kernels.matmul q4_0 n=4096 k=2048.m1-8": "apply",
    }


def test_thread_counts_hold_for_the_same_number_of_cores(cpu_profile: Profile) -> None:
    assert actions(cpu_profile, Level.SAME_DEVICE, CPU)["settings.threads"] == "apply"
    decisions = {d.path: d for d in decide(cpu_profile, Level.NEAREST, changed(CPU, cores=8))}
    assert decisions["settings.threads"].action == "reject"
    assert decisions["settings.threads"].reason == "measured with 2 cores, here 8"


# ---- Identities from the engine's own descriptions ----


def test_a_cpu_from_the_engine() -> None:
    info = {
        "kind": "cpu",
        "name": "some marketing name",
        "isa": "avx2",
        "features": ["avx2"],
        "cores": 6,
        "l1d_bytes": 32768,
        "l2_bytes": 1 << 20,
        "l3_bytes": 0,
        "memory_bytes": 16 << 30,
    }
    device = device_from_info(info)
    assert device == CpuDevice(isa="avx2", cores=6, l1d_kib=32, l2_kib=1024, l3_kib=0, memory_mib=16384)
    again = device_info(device)
    assert {key: again[key] for key in again if key != "name"} == {
        key: info[key] for key in info if key not in ("name", "features")
    }


def test_a_cuda_device_from_the_engine() -> None:
    info = {"kind": "cuda", "compute_capability": 90, "sm_count": 132, "memory_bytes": 143771 << 20}
    device = device_from_info(info, memory_gbps=4310.0, pcie_gbps=54.0)
    assert device == changed(H200, power_limit_w=None)
    assert {key: device_info(device)[key] for key in info} == info
    assert device_from_info({**info, "compute_capability": 120}).compute_capability == "12.0"


@pytest.mark.parametrize(("capability", "kib"), [("9.0", 227), ("7.5", 64), ("8.6", 99), ("13.7", 48)])
def test_shared_memory_follows_from_the_compute_capability(capability: str, kib: int) -> None:
    """A profile does not name it, and kernels that need more than nothing are right all the same."""
    info = device_info(changed(H200, compute_capability=capability))
    assert info["shared_per_block_bytes"] == kib << 10


LAYER: dict[str, Any] = {
    "attention": {
        "kind": "gqa",
        "heads": 8,
        "kv_heads": 4,
        "scale": 0.125,
        "rope": {"dims": 64, "base": 1e6},
    },
    "ffn": {"kind": "moe", "width": 256, "experts": 8, "experts_used": 2, "gating": "softmax"},
}
DENSE: dict[str, Any] = {**LAYER, "ffn": {"kind": "dense", "width": 1024}}
DESCRIPTION: dict[str, Any] = {
    "architecture": "qwen3moe",
    "name": "anything",
    "n_layers": 3,
    "n_embd": 512,
    "n_vocab": 8192,
    "n_ctx_train": 2048,
    "norm_eps": 1e-6,
    "tied_output": False,
    "experts": 8,
    "experts_used": 2,
    "layers": [DENSE, LAYER, LAYER],
    "parameters": 20_000_000,
    "types": {"q4_k": 0.9, "q6_k": 0.09996, "f32": 0.00004},
    "unused_tensors": [],
}


def test_a_model_from_the_engine() -> None:
    model = model_from_description(DESCRIPTION)
    assert (model.architecture, model.layers, model.embedding, model.vocab) == ("qwen3moe", 3, 512, 8192)
    assert (model.experts, model.experts_used, model.heads, model.kv_heads) == (8, 2, 8, 4)
    assert (model.feed_forward, model.expert_feed_forward) == (1024, 256)
    # Each type has a share, also the router's: a build for the profile needs kernels for it.
    assert model.types == {"Q4_K": 0.9, "Q6_K": 0.1, "F32": 0.0001}
    assert list(model.types) == ["Q4_K", "Q6_K", "F32"]  # largest share first
    assert model.shapes == shapes_fingerprint(DESCRIPTION)


def test_types_of_a_head_are_named_and_do_not_count(cuda_profile: Profile) -> None:
    """A build for the profile needs kernels for them, and a profile written without them still matches."""
    described = {**DESCRIPTION, "draft_types": ["q4_k", "q8_0"]}
    model, without = model_from_description(described), model_from_description(DESCRIPTION)
    assert model.types == {"Q4_K": 0.9, "Q6_K": 0.1, "F32": 0.0001, "Q8_0": 0.0001}
    assert model.shapes == without.shapes
    match = cuda_profile.match.model_copy(update={"model": without})
    assert compare(match, match.device, model, match.engine).level is Level.EXACT


def with_attention(**changes: Any) -> dict[str, Any]:
    layer = {**LAYER, "attention": LAYER["attention"] | changes}
    return {"layers": [DENSE, layer, LAYER]}


@pytest.mark.parametrize(
    ("changes", "same"),
    [
        ({"norm_eps": 1e-5}, True),
        ({"n_ctx_train": 4096}, True),
        ({"types": {"f16": 1.0}}, True),
        ({"name": "other", "unused_tensors": ["a", "b"]}, True),
        ({"draft_types": ["q8_0"]}, True),
        (with_attention(scale=0.25), True),
        ({"n_vocab": 8193}, False),
        ({"tied_output": True}, False),
        ({"architecture": "qwen3"}, False),
        (with_attention(heads=4), False),
        (with_attention(rope={"dims": 32, "base": 1e6}), False),
        ({"layers": [LAYER, DENSE, LAYER]}, False),
        ({"layers": [DENSE, LAYER]}, False),
    ],
)
def test_the_fingerprint_holds_shapes_and_nothing_else(changes: dict[str, Any], same: bool) -> None:
    assert (shapes_fingerprint({**DESCRIPTION, **changes}) == shapes_fingerprint(DESCRIPTION)) is same


def test_the_engine_of_a_build() -> None:
    info = {
        "version": "0.1.0",
        "ops_revision": 3,
        "compiler": "gcc",
        "switches": {"GGML_NATIVE": "OFF", "GGML_LTO": "ON", "DYNO_SANITIZE": "", "GGML_CUDA": "AUTO"},
    }
    build = {"GGML_NATIVE": False, "GGML_LTO": True, "DYNO_SANITIZE": False, "GGML_CUDA": "AUTO"}
    assert engine_from_build(info) == EngineIdentity(version="0.1.0", ops_revision=3, build=build)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("synthetic qwen3-0.6b", "synthetic"), ("Qwen3 0.6B", "real"), (None, "real"), (7, "real")],
)
def test_files_say_of_themselves_that_their_weights_are_random(name: object, kind: str) -> None:
    assert weights_kind({"general.name": name} if name is not None else {}) == kind
