"""Power limits by a library of the tests' own: its card lives in a file, so that other processes see it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from dyno_tuner.core.errors import TuneError
from dyno_tuner.measure.power_limit import PowerLimit
from waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

BUS = "00000000:07:00.0"
LIBRARY = """
import json, os
from pathlib import Path
PLACE = os.environ["FAKE_NVML"]
class NVMLError(Exception): pass
def _card(): return json.loads(Path(PLACE).read_text())
def nvmlInit():
    if _card().get("deaf"): raise NVMLError("Driver Not Loaded")
def nvmlShutdown(): pass
def nvmlDeviceGetHandleByPciBusId(bus):
    if bus != "00000000:07:00.0": raise NVMLError("Not Found")
    return bus
def nvmlDeviceGetPowerManagementLimitConstraints(handle): return [200000, 700000]
def nvmlDeviceGetPowerManagementLimit(handle): return _card()["limit"]
def nvmlDeviceGetEnforcedPowerLimit(handle):
    if _card().get("silent"): raise NVMLError("GPU is lost")
    return min(_card()["limit"], _card().get("cap", 10**9))
def nvmlDeviceSetPowerManagementLimit(handle, limit):
    card = _card()
    if card.get("forbidden"): raise NVMLError("Insufficient Permissions")
    card["limit"] = limit
    card["set"].append(limit)
    Path(PLACE + ".new").write_text(json.dumps(card))
    os.replace(PLACE + ".new", PLACE)
"""


@pytest.fixture
def card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder, place = tmp_path / "library", tmp_path / "card.json"
    folder.mkdir()
    (folder / "pynvml.py").write_text(LIBRARY)
    place.write_text(json.dumps({"limit": 650_000, "set": []}))
    monkeypatch.setenv("FAKE_NVML", str(place))
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.syspath_prepend(str(folder))
    sys.modules.pop("pynvml", None)
    yield place
    sys.modules.pop("pynvml", None)  # the next one has another place


def told(card: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads(card.read_text())
    return found


def change(card: Path, **values: object) -> None:
    card.write_text(json.dumps({**told(card), **values}))


def opened() -> PowerLimit:
    return PowerLimit(BUS, sleep=lambda seconds: None)


def test_limits_are_set_one_after_the_other_and_set_back(card: Path) -> None:
    limit = opened()
    assert limit.range == (200.0, 700.0)
    limit.check([400, 500])
    with limit:
        for watts in (500, 400):
            limit.set(watts)
            assert told(card)["limit"] == watts * 1000
    assert told(card) == {"limit": 650_000, "set": [650_000, 500_000, 400_000, 650_000]}


def test_a_limit_is_set_back_after_an_error(card: Path) -> None:
    def interrupted() -> None:
        with opened() as limit:
            limit.set(300)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert told(card)["limit"] == 650_000


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_limit_is_set_back_after_a_kill(card: Path, number: signal.Signals) -> None:
    """The whole group gets the signal, as from a terminal or a service."""
    script = (
        "import time\nfrom dyno_tuner.measure.power_limit import PowerLimit\n"
        f"with PowerLimit({BUS!r}, lambda seconds: None) as limit:\n"
        "    limit.set(300)\n    print('set', flush=True)\n    time.sleep(600)\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "set\n"
    assert told(card)["limit"] == 300_000
    os.killpg(child.pid, number)
    child.wait()
    child.stdout.close()
    until(lambda: told(card)["limit"] == 650_000)


def test_without_the_right_nothing_begins(card: Path) -> None:
    change(card, forbidden=True)
    with pytest.raises(TuneError, match=r"cannot be set \(Insufficient Permissions\); this needs root"):
        opened().check([400])
    assert told(card)["set"] == []


def test_limits_beyond_the_card_are_refused(card: Path) -> None:
    with pytest.raises(TuneError, match=r"--power-limits 800: this GPU accepts 200 to 700 W"):
        opened().check([400, 800])


def test_a_limit_that_is_not_enforced_is_an_error(card: Path) -> None:
    change(card, cap=450_000)
    with pytest.raises(TuneError, match="500: the driver enforces 450 W"), opened() as limit:
        limit.set(500)


def test_a_card_that_nobody_knows_is_an_error(card: Path) -> None:
    with pytest.raises(TuneError, match="NVML does not report the limits of 0000:99"):
        PowerLimit("0000:99")
    change(card, deaf=True)
    with pytest.raises(TuneError, match="Driver Not Loaded"):
        opened()


def test_a_limit_that_cannot_be_set_back_is_said(card: Path) -> None:
    limit = opened()
    limit.__enter__()
    limit.set(400)
    change(card, forbidden=True)
    with pytest.raises(TuneError, match=r"was not set back to 650 W \(.*\); set it with nvidia-smi -i 00"):
        limit.__exit__(None, None, None)


def test_a_limit_that_cannot_be_set_back_does_not_hide_an_interrupt(
    card: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted() -> None:
        with opened() as limit:
            limit.set(400)
            change(card, forbidden=True)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert "was not set back to 650 W (Insufficient Permissions)" in capsys.readouterr().err


def test_without_its_guard_a_limit_is_set_back_all_the_same(card: Path) -> None:
    with opened() as limit:
        limit.set(400)
        assert limit._guard is not None
        limit._guard.kill()
        limit._guard.wait()
    assert told(card)["limit"] == 650_000


def test_an_enforced_limit_that_nobody_tells_is_an_error(card: Path) -> None:
    change(card, silent=True)
    with pytest.raises(TuneError, match="report the enforced limit: GPU is lost"), opened() as limit:
        limit.set(500)
    assert told(card)["limit"] == 650_000
