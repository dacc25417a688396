"""The tuner measures a value of a knob only by the measures that the knob moves. So no value may change the
launches of another measure."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from described_gpu import H200, RATES
from dyno import Engine, _core, _nvml
from dyno.errors import PlanError
from dyno.settings import SETTINGS
from dyno_tuner.core.protocol import Workload
from dyno_tuner.run.session import Request, space_for
from dyno_tuner.run.tune import Options
from dyno_tuner.targets.dyno.target import DynoTarget

if TYPE_CHECKING:
    from dyno_tuner.space.knobs import Knob

TINY = Path(__file__).parents[2] / "data" / "tiny"
WORKLOAD = Workload(pp=128, tg=4)
TOKENS = {"pp": 128, "tg": 1}  # of a pass
VIRTUAL: dict[str, Any] = {
    "device": "cpu:1",
    "virtual_devices": {"cpu:1": {"link_gbps": 8, "latency_us": 10, "streams": 1}},
    "ctx": 256,
}
# The model, and the share of it for which the device has room; None: the CPU alone; 1: the described GPU.
CASES = [
    ("llama-tiny", None),
    ("qwen3moe-tiny", None),
    ("deepseek2-lite-tiny", None),
    ("gemma3-tiny", None),
    ("llama-tiny", 0.85),
    ("qwen3moe-tiny", 0.8),
    ("deepseek2-lite-tiny", 0.8),
    ("llama-tiny", 1),
    ("qwen3moe-tiny", 1),
    ("deepseek2-lite-tiny", 1),
    ("gemma3-tiny", 1),
]


@pytest.fixture
def described_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_core, "devices", lambda: [_core.cpu_info(), H200])
    monkeypatch.setattr(_core, "device_problem", lambda device: "")
    measured = _core.measure_rates
    monkeypatch.setattr(_core, "measure_rates", lambda name: RATES if name == "cuda:0" else measured(name))
    monkeypatch.setattr(_nvml, "facts", lambda bus: {})


def knobs_and_options(model: Path, share: float | None) -> tuple[tuple[Knob, ...], dict[str, Any]]:
    given: dict[str, Any] = {"ctx": 256, "device": "cuda:0" if share == 1 else "cpu"}
    if share is not None and share < 1:
        whole = DynoTarget(str(model), **VIRTUAL)
        given = {**VIRTUAL, "vram": int(share * (whole.memory({}) or 0))}
        whole.close()
    target = DynoTarget(str(model), **given)
    request = Request(str(model), Options(WORKLOAD, approx_limit=1e-3), ctx=256)
    knobs = space_for(target.describe(), request).knobs
    target.close()
    return knobs, given | {knob.name: knob.default for knob in knobs}


def launches(model: Path, tokens: int, given: dict[str, Any]) -> list[Any]:
    shown = ("list", "device", "key", "count", "tokens", "config")
    if given.get("device") == "cuda:0":  # an engine would look for the GPU
        kinds: dict[str, Any] = {"load": {}, "context": {}, "session": {}}
        for name in given.keys() - {"device"}:
            kinds[SETTINGS[name].kind][name] = given[name]
        ops = _core.Session(str(model), plan_only=True, device=H200, **kinds).ops(tokens)
        return [{name: op[name] for name in shown} for op in ops]
    with Engine(model, profile=None, plan_only=True, **given) as engine:
        return [{name: op[name] for name in shown} for op in engine.describe_ops(tokens)]


@pytest.mark.usefixtures("described_gpu")
@pytest.mark.parametrize(("name", "share"), CASES)
def test_values_change_only_the_measures_that_their_knob_moves(name: str, share: float | None) -> None:
    model = TINY / f"{name}.gguf"
    knobs, given = knobs_and_options(model, share)
    usual = {measure: launches(model, tokens, given) for measure, tokens in TOKENS.items()}
    compared = set()
    for knob in knobs:
        for value in knob.values:
            for measure in TOKENS.keys() - set(knob.moves):
                try:
                    found = launches(model, TOKENS[measure], {**given, knob.name: value})
                except PlanError:  # such as a thread count for a smaller machine; a trial of it is invalid
                    continue
                assert found == usual[measure], (knob.name, value, measure)
                compared.add(knob.name)
    expected: dict[float | None, set[str]] = {
        None: {"ubatch"},
        1: {"ubatch", "mmq_max_tokens", "compute_type"},
    }
    assert expected.get(share, {"ubatch", "offload_min_tokens"}) <= compared


def test_a_value_that_changes_single_tokens_is_seen() -> None:
    model = TINY / "llama-tiny.gguf"
    knobs, given = knobs_and_options(model, 0.85)
    usual = launches(model, 1, given)
    assert {0, 1}.isdisjoint(next(k for k in knobs if k.name == "offload_min_tokens").values)
    for value in (0, 1):
        assert launches(model, 1, {**given, "offload_min_tokens": value}) != usual
