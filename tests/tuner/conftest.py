from __future__ import annotations

import sys
from pathlib import Path

import pytest
from dyno_tuner.measure import machine_monitor
from dyno_tuner.measure.cpu_monitor import Load

sys.path.insert(0, str(Path(__file__).parent))  # for conftest_tuner


@pytest.fixture(autouse=True)
def quiet_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets tests pass on a busy machine: nobody disturbs, and no hypervisor moves CPUs. `test_disturbance.py`
    and `test_cpu_distance.py` override this."""
    monkeypatch.setattr(Load, "disturbed", "")
    monkeypatch.setattr(machine_monitor, "probe", lambda: None)
    monkeypatch.setattr(machine_monitor.Window, "between", [])  # nodes of a cluster probe for themselves


@pytest.fixture(scope="session")
def sweep_path() -> Path:
    return Path(__file__).parents[1] / "data" / "replay" / "ik-h200-qwen3moe-30b-a3b.jsonl"
