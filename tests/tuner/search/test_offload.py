"""Weights on the CPU: the knobs that apply, the order in which they race, and the computed threshold."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest_tuner import Simulated
from dyno import profiles
from dyno.settings import SETTINGS
from dyno_tuner.cli.arguments import device_names, placement_of
from dyno_tuner.core.crossing import Verdict
from dyno_tuner.core.errors import TargetUnusable, TuneError
from dyno_tuner.core.protocol import Configuration, Description, OpContext, TrialStatus, Workload
from dyno_tuner.execution.inline_executor import InlineExecutor
from dyno_tuner.record.journal import load
from dyno_tuner.run.order import ordered
from dyno_tuner.run.session import Request, limit_memory, run, space_for
from dyno_tuner.run.tune import Options
from dyno_tuner.search.crossover import solve_by_curves
from dyno_tuner.space.knobs import NEVER_OFFLOAD, Facts, Knob, resolve
from dyno_tuner.targets.dyno.target import DynoTarget
from dyno_tuner.targets.simulated.surfaces import offload
from typer import BadParameter

TINY = Path(__file__).parents[2] / "data" / "tiny"
MODEL = TINY / "qwen3moe-tiny.gguf"
DENSE = TINY / "llama-tiny.gguf"
CONTEXT = OpContext("k")
WORKLOAD = Workload(pp=128, tg=4)
CLUES = {"link_gbps": 8, "latency_us": 10, "streams": 1}


def placed(model: Path = MODEL, share: float = 0.8, **given: Any) -> DynoTarget:
    """A target on a virtual device that has room for a share of the model."""
    whole = DynoTarget(str(model), device="cpu:1", virtual_devices={"cpu:1": CLUES}, ctx=256)
    limit = int(share * (whole.memory({}) or 0))
    whole.close()
    return DynoTarget(
        str(model), device="cpu:1", virtual_devices={"cpu:1": CLUES}, ctx=256, vram=limit, **given
    )


def knobs(target: DynoTarget, workload: Workload = WORKLOAD, **given: Any) -> dict[str, Any]:
    described = target.describe()
    request = Request(str(MODEL), Options(workload), ctx=256, **given)
    return {k.name: k for k in space_for(described, request).knobs}


# ---- the space


def test_where_the_model_fits_nothing_is_placed() -> None:
    target = DynoTarget(str(MODEL), device="cpu:1", virtual_devices={"cpu:1": CLUES}, ctx=256)
    described = target.describe()
    assert described.engine.get("host_weights") is None
    assert described.limits == {}
    assert not {"n_cpu_moe", "n_gpu_layers", "offload_min_tokens"} & set(knobs(target))


def test_a_mixture_that_does_not_fit_turns_experts_and_offload() -> None:
    target = placed()
    described = target.describe()
    assert described.engine["host_weights"] is True
    assert described.limits == {"device": target._placing._vram}
    found = knobs(target)
    assert {"offload_min_tokens", "op_offload.matmul_id", "op_offload.moe_up_gate", "threads"} <= set(found)
    counted = found.get("n_cpu_moe") or found["n_gpu_layers"]
    assert counted.default == described.engine["defaults"][counted.name]
    assert found["offload_min_tokens"].threshold_of == "ubatch"
    assert Description.from_dict(json.loads(json.dumps(described.to_dict()))) == described


def test_a_dense_model_turns_layers() -> None:
    found = knobs(placed(DENSE, 0.85))
    assert "n_gpu_layers" in found
    assert not {"n_cpu_moe", "op_offload.matmul_id"} & set(found)
    assert {"op_offload.matmul", "op_offload.up_gate"} <= set(found)
    code = found["n_gpu_layers"].code
    assert code is not None
    assert code(-1, {}) == code(4, {}) == 4  # three layers and the output


def test_rules_of_the_user_are_kept() -> None:
    target = placed(settings={"placement": ["_exps=cpu"]})
    described = target.describe()
    assert described.engine["defaults"]["placement"] == "_exps=cpu"
    assert described.engine["host_weights"] is True
    assert not {"n_cpu_moe", "n_gpu_layers"} & set(knobs(target, held={"placement": ["_exps=cpu"]}))


def facts(**model: Any) -> Facts:
    defaults = {"n_cpu_moe": 20, "n_gpu_layers": -1, "ubatch": 512, "offload_min_tokens": 32, "cpu_share": 0}
    defaults |= {"op_offload.matmul_id": True, "op_offload.moe_up_gate": True, "threads": 8}
    shape = {"experts": 128, "experts_used": 8, "layers": 48, **model}
    device = {"kind": "cuda", "compute_capability": "9.0"}
    return Facts(device, shape, Workload(4096, 128), defaults, 8192, True, True, 8)


def test_values_of_a_large_model() -> None:
    found = {k.name: k for k in resolve(facts(), approx=False)}
    counts = found["n_cpu_moe"].values
    assert {0, 6, 12, 16, 18, 19, 20, 21, 22, 24, 48} <= set(counts)
    assert len(counts) < 20
    offloads = found["offload_min_tokens"]
    assert {2, 32, NEVER_OFFLOAD} <= set(offloads.values)
    assert min(offloads.values) == 2  # single tokens never stream weights, because only prompts are compared
    assert offloads.code is not None
    # 128 / 8 = 16 tokens share an expert: from 16 times the setting on.
    assert [offloads.code(32, {"ubatch": u}) for u in (256, 512, 4096)] == [False, True, True]
    assert offloads.code(0, {"ubatch": 1}) is True
    off = {"ubatch": 256, "op_offload.matmul_id": False, "op_offload.moe_up_gate": False}
    assert offloads.code(32, off) is True  # without experts among the copies, tokens count as they are
    assert found["threads"].values[-1] == 8  # of the CPU's part
    switch = found["op_offload.matmul_id"]
    assert switch.code is not None
    assert switch.code(True, {"ubatch": 256}) == switch.code(False, {"ubatch": 256}) == "unused"
    assert switch.code(True, {"ubatch": 512}) != switch.code(False, {"ubatch": 512})
    share = found["cpu_share"]
    assert share.default == 0
    assert share.code is not None
    assert share.code(30, {"ubatch": 512}) != share.code(0, {"ubatch": 512})
    assert share.code(30, {"ubatch": 256}) == share.code(0, {"ubatch": 256}) == "unused"
    kept = {"ubatch": 512, "op_offload.matmul_id": False}
    assert share.code(30, kept) == share.code(0, kept) == "unused"


def test_the_expert_cache_is_searched_where_the_use_is_known() -> None:
    def found(**more: Any) -> dict[str, Knob]:
        at = facts(file_bytes=16 << 30, **more)
        with_cache = replace(at, defaults={**at.defaults, "expert_cache_mib": 0})
        return {k.name: k for k in resolve(with_cache, approx=False)}

    assert "expert_cache_mib" not in found(expert_use=False)
    assert "expert_cache_mib" not in found(expert_use=True, experts=0)
    knob = found(expert_use=True)["expert_cache_mib"]
    assert knob.values == (0, 512, 1024, 2048, 4096, 6144, 8192)
    assert knob.default == 0
    assert SETTINGS["expert_cache_mib"].memory_bound


def test_the_kind_of_expert_cache_is_searched_if_a_use_is_recorded() -> None:
    def found(expert_use: bool) -> dict[str, Knob]:
        at = facts(file_bytes=16 << 30, expert_use=expert_use)
        at = replace(at, defaults={**at.defaults, "expert_cache_mib": 0, "expert_cache": "static"})
        return {k.name: k for k in resolve(at, approx=False)}

    assert "expert_cache" not in found(expert_use=False)
    knob = found(expert_use=True)["expert_cache"]
    assert knob.values == ("static", "adaptive")
    assert knob.code is not None
    assert knob.code("adaptive", {}) == knob.code("static", {"expert_cache_mib": 0}) == "unused"
    assert knob.code("adaptive", {"expert_cache_mib": 9}) != knob.code("static", {"expert_cache_mib": 9})


# ---- memory


def test_memory_is_a_hard_constraint() -> None:
    target = placed()
    executor = InlineExecutor(target)
    request = Request(str(MODEL), Options(WORKLOAD), ctx=256)
    described = executor.describe()
    space, _ = limit_memory(described, request, executor, space_for(described, request))
    limit = described.limits["device"]
    rng = np.random.default_rng(1)
    points = {space.random(rng) for _ in range(40)}
    needs = {p: target.memory(space.settings(p)) for p in points}
    assert len(needs) > 4
    assert all(n is not None and n <= limit for n in needs.values())
    whole = {**described.engine["defaults"], "n_cpu_moe": 0, "n_gpu_layers": -1}
    assert (target.memory(whole) or 0) > limit
    target.apply(space.configuration(space.default), CONTEXT)
    assert target._session.plan["devices"][0]["memory_limit"] == limit
    executor.close()


def test_the_memory_of_the_machine_bounds_its_part() -> None:
    target = placed()
    default = target.describe().engine["defaults"]
    part = target.memory(default, "host")
    assert part
    # The engine itself keeps a limit when it places.
    with pytest.raises(TargetUnusable, match=r"needs more memory on the CPU than its limit .*\(ram\)"):
        placed(ram=part // 8)
    executor = InlineExecutor(target)
    described = executor.describe()
    described.limits["host"] = part - 1
    request = Request(str(MODEL), Options(WORKLOAD), ctx=256)
    with pytest.raises(TuneError, match="more than the limit"):
        limit_memory(described, request, executor, space_for(described, request))


# ---- answers and order


def test_answers_are_compared_with_an_exact_path_that_needs_more_memory() -> None:
    """Of a smaller machine, too: its limits are not those of the machine that computes."""
    target = placed()
    exact = target.memory({**target._exact_settings()})
    assert exact is not None
    assert exact > target._placing._vram
    default = Configuration(target.describe().engine["defaults"])
    found = target.quality(default, CONTEXT)
    assert found.status is TrialStatus.OK, found.message
    assert found.mean_kld < 1e-3
    one = DynoTarget(str(MODEL), ctx=256)
    # Virtual devices compute as the CPU does, so nothing changes.
    assert one.quality(Configuration({}), CONTEXT).mean_kld == pytest.approx(found.mean_kld, rel=1e-6)
    target.close()
    one.close()


def test_the_cost_model_orders_and_measurements_decide() -> None:
    class Engine(InlineExecutor):
        asked = 0

        def expected(self, settings: Any, workload: Any) -> dict[str, float] | None:
            Engine.asked += 1
            return {m: 1.0 + int(settings["n_gpu_layers"] == 2) * -0.5 for m in workload.metrics}

    target = placed(DENSE, 0.85)
    executor = Engine(target)
    described = executor.describe()
    request = Request(str(DENSE), Options(WORKLOAD), ctx=256)
    space = space_for(described, request)
    first = ordered(executor, space, WORKLOAD)
    assert first
    assert all(s["n_gpu_layers"] == 2 for s in first) or described.engine["defaults"]["n_gpu_layers"] == 2
    assert len(first) <= 3
    assert Engine.asked > 3
    real = InlineExecutor(target)
    seconds = real.expected(space.settings(space.default), WORKLOAD)
    assert seconds is not None
    assert set(seconds) == {"pp", "tg"}
    assert all(math.isfinite(s) and s > 0 for s in seconds.values())
    executor.close()


def test_a_tune_on_a_virtual_device(tmp_path: Path) -> None:
    """From the command's request to a profile for that device."""
    target = placed()
    options = Options(WORKLOAD, seed=1, max_trials=5, rounds=2, max_rounds=2, kernels=False)
    held = {"cpu_repack": True, "threads": 1, "threads_batch": 1, "op_offload.matmul": True}
    request = Request(
        str(MODEL), options, "cpu:1", ctx=256, out=tmp_path / "p.yaml", quiet=True, force=True, held=held
    )
    result = run(request, InlineExecutor(target))
    device = result.profile.match.device
    assert isinstance(device, profiles.CpuDevice)
    limit = target._placing._vram / 2**20
    assert device.virtual == f"link_gbps=8 latency_us=10 streams=1 memory_mib={limit:g}"
    profiles.load_profile(result.path)
    records = load(result.journal).records
    assert any(r.get("note") == "threshold" and r["knob"] == "offload_min_tokens" for r in records)


def test_words_of_the_command_line() -> None:
    assert device_names("cpu:1", None) == ["cpu:1"]
    words = ["cpu:1,link_gbps=8,streams=1"]
    assert placement_of(words, 1 << 30, 2 << 30, "cpu:1") == {
        "virtual_devices": {"cpu:1": {"link_gbps": 8, "streams": 1}}, "vram": 1 << 30, "ram": 2 << 30,
    }  # fmt: skip
    assert placement_of([], 1 << 30, None, "cpu") == {}
    with pytest.raises(BadParameter, match="give --vram instead"):
        placement_of([], None, 1, "cpu")
    with pytest.raises(BadParameter, match="is not NAME=NUMBER"):
        placement_of(["cpu:1,link"], None, None, "cpu:1")


# ---- the computed threshold

GRID = [1 << p for p in range(5, 14)]


def curves(first: tuple[float, float], second: tuple[float, float], sigma: float, seed: int) -> Any:
    """Measures paths whose passes take a + b x size seconds, and their times."""
    rng = np.random.default_rng(seed)
    times: dict[int, list[tuple[float, float]]] = {}

    def measure(index: int, repeat: int) -> tuple[float, float]:
        size = GRID[index]
        pair = tuple(
            (b + a / size) * math.exp(sigma / math.sqrt(2) * rng.standard_normal())
            for a, b in (first, second)
        )
        times.setdefault(index, []).append(pair)  # type: ignore[arg-type]
        return math.log(pair[1] / pair[0]), sigma

    def seconds(index: int) -> tuple[float, float] | None:
        return None if index not in times else tuple(np.median(times[index], axis=0))  # type: ignore[return-value]

    return measure, seconds


@pytest.mark.parametrize("link", [4, 8, 12, 25, 55])
def test_the_threshold_is_computed_to_one_step(link: float) -> None:
    """The CPU takes 2 ms a token; copies of 15 GB cross for each pass, then a token takes 0.1 ms."""
    right = close = 0
    for seed in range(40):
        first, second = (0.02, 2e-3), (15 / link, 1e-4)
        truth = (second[0] - first[0]) / (first[1] - second[1])
        measure, seconds = curves(first, second, 0.02, seed)
        found = solve_by_curves(GRID, measure, seconds)
        assert found.measurements <= 12
        below = sum(size < truth for size in GRID)
        right += found.verdict is Verdict.CROSSING and abs(found.below - below) <= 1
        close += found.at is not None and abs(found.at / truth - 1) < 0.1
    assert right >= 39
    assert close >= 38


def test_curves_of_another_form_are_bisected() -> None:
    """Experts that no token chose do not cross: the second path is cheap for few tokens and for many."""
    for crossing in range(1, 8):
        truth = [0.4 if i < crossing else -0.3 for i in range(len(GRID))]

        def measure(index: int, repeat: int, truth: list[float] = truth) -> tuple[float, float]:
            return truth[index], 0.01

        def seconds(index: int, truth: list[float] = truth) -> tuple[float, float] | None:
            return 1.0, math.exp(truth[index])

        found = solve_by_curves(GRID, measure, seconds)
        assert (found.verdict, found.below) == (Verdict.CROSSING, crossing)
        assert found.measurements <= 12


def test_one_path_that_wins_everywhere_and_a_path_that_does_not_run() -> None:
    measure, seconds = curves((0.1, 1e-3), (0.2, 2e-3), 0.005, 1)
    assert solve_by_curves(GRID, measure, seconds).verdict is Verdict.ALWAYS
    measure, seconds = curves((0.2, 2e-3), (0.1, 1e-3), 0.005, 1)
    assert solve_by_curves(GRID, measure, seconds).verdict is Verdict.NEVER
    found = solve_by_curves(GRID, lambda i, r: (3.0 if GRID[i] < 512 else -3.0, 0.01), lambda i: None)
    assert (found.verdict, GRID[found.below], found.at) == (Verdict.CROSSING, 512, None)


# ---- the two source cases, on an engine whose truth is known


def tuned(link: float, seed: int = 1) -> Simulated:
    return Simulated(offload(link), seed, workload=Workload(pp=8192, tg=8), max_trials=40)


def streams(settings: Any, ubatch: int) -> bool:
    return ubatch >= int(settings["offload_min_tokens"]) * 8


def true_crossing(tune: Simulated) -> int:
    """The first u-batch that copies are faster at."""
    for ubatch in (1 << p for p in range(5, 14)):
        at = {"ubatch": ubatch, "op_offload.matmul_id": True}
        cpu = tune.surface.rates({**at, "offload_min_tokens": 1 << 20})["pp"]
        if tune.surface.rates({**at, "offload_min_tokens": 0})["pp"] > cpu:
            return ubatch
    return 1 << 30


@pytest.mark.parametrize("link", [4, 8, 12, 25, 55])
def test_the_verdict_flips_at_the_crossing(link: float) -> None:
    run = tuned(link)
    [solved] = [s for s in run.outcome.crossings if s.knob == "offload_min_tokens"]
    truth = true_crossing(run)
    assert solved.verdict is Verdict.CROSSING
    assert solved.up_to is not None
    assert truth // 4 <= solved.up_to <= truth  # within one step of the grid
    note = next(data for kind, data in run.notes if kind == "threshold")
    assert truth / 4 < note["at"] < 2 * truth
    assert run.regret < 0.03


def test_on_a_slow_link_experts_stay_on_the_cpu_below_a_large_ubatch() -> None:
    slow, fast = tuned(4), tuned(55)
    assert true_crossing(slow) >= 2048
    assert true_crossing(fast) <= 256
    for tune, at_512 in ((slow, False), (fast, True)):
        [solved] = [s for s in tune.outcome.crossings if s.knob == "offload_min_tokens"]
        assert solved.up_to is not None
        assert (solved.up_to < 512) is at_512
        # And the profile makes the engine do so.
        settings = tune.outcome.settings
        assert streams(settings, int(settings["ubatch"])) is (int(settings["ubatch"]) >= true_crossing(tune))
