"""benchmarks/batches_vs_peers.py: rates of batches beside the batched bench of another engine."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import types
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from dyno.testing import tiny_model

if TYPE_CHECKING:
    from collections.abc import Iterator

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "batches_vs_peers.py"
PEER = """#!{python} -S
import sys
from pathlib import Path

words = sys.argv[1:]
value = lambda flag: words[words.index(flag) + 1]
with (Path(__file__).parent / "calls").open("a") as calls:
    calls.write(" ".join(words) + "\\n")
if "-broken" in words:
    sys.exit("cannot load the model")
print("main: n_kv_max = 640, n_batch = 2048 | n_threads = 1")
print("|    PP |     TG |    B |   N_KV |   T_PP s | S_PP t/s |   T_TG s | S_TG t/s |      T s |    S t/s |")
print("|-------|--------|------|--------|----------|----------|----------|----------|----------|----------|")
pp, tg = int(value("-npp")), int(value("-ntg"))
for count in map(int, value("-npl").split(",")):
    rate = {rate} * count
    cells = [pp, tg, count, count * (pp + tg), 0.1, pp / 0.1, tg / rate, f"{{rate:.2f}}", 0.2, 1.0]
    if "-short" not in words or count == 1:
        print("|" + "|".join(f" {{cell:>8}} " for cell in cells) + "|")
"""


def peer(path: Path, rate: float) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(PEER.format(python=sys.executable, rate=rate))
    path.chmod(0o755)
    return path


def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_model(tmp_path / "m.gguf", n_layers=1, n_ctx=128)


LOAD = ("--sequences", "1,3", "--threads", "1", "--depth", "8", "--steps", "4", "--rounds", "3", "--force")


def test_the_faster_other_engine_counts(model: Path, tmp_path: Path) -> None:
    slow, fast, out = peer(tmp_path / "a" / "slow", 0.01), peer(tmp_path / "b" / "fast", 1e9), tmp_path / "o"
    done = run(model, *LOAD, "--peer", f"slow={slow} -x", "--peer", f"fast={fast}", "--json", out)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert (found["rounds"], found["left_out"], set(found["sequences"])) == (3, 0, {"1", "3"})
    for count, row in found["sequences"].items():
        assert row["fast"] == 1e9 * int(count)
        assert row["dyno"] > 0
        # Rates of this machine, but 1e9 tokens a second are beyond it.
        assert row["ratio"] == min(row["ratio_of_rounds"]) == 0.0
        assert len(row["ratio_of_rounds"]) == 3
    (words,) = set((tmp_path / "a" / "calls").read_text().splitlines())
    for part in ("-x", f"-m {model}", "-t 1 -tb 1", "-npp 8 -ntg 4 -npl 1,3", "-c 36"):
        assert part in words
    alone = run(model, *LOAD, "--peer", f"slow={slow}", "--json", out)
    assert alone.returncode == 0, alone.stderr
    assert all(row["ratio"] > 1 for row in json.loads(out.read_text())["sequences"].values())


@pytest.mark.parametrize(
    ("flag", "words"), [("-broken", "cannot load the model"), ("-short", "printed no row of 3 sequences")]
)
def test_a_peer_that_fails(model: Path, tmp_path: Path, flag: str, words: str) -> None:
    done = run(model, *LOAD, "--peer", f"a={peer(tmp_path / 'a' / 'p', 1.0)} {flag}")
    assert done.returncode == 1
    assert words in done.stderr
    assert run(model, *LOAD).returncode == 2


def test_disturbed_rounds_are_left_out(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import batches_vs_peers as script

    # Processes in order: the first of three rounds has a disturbed one, whose repetition is disturbed, too.
    told = iter(["", "busy", "still busy", *[""] * 4])

    class Watch:
        def __init__(self, needed: int) -> None:
            assert needed == 1

        @contextlib.contextmanager
        def window(self) -> Iterator[types.SimpleNamespace]:
            yield types.SimpleNamespace(disturbed=next(told))

    monkeypatch.setattr(script, "CpuWatch", Watch)
    out = tmp_path / "o"
    words = [w for w in LOAD if w != "--force"] + ["--repeats", "1", "--json", str(out)]
    assert script.main([str(model), *words, "--peer", f"a={peer(tmp_path / 'a' / 'p', 1.0)}"]) == 0
    found = json.loads(out.read_text())
    assert (found["rounds"], found["left_out"], found["disturbed"]) == (2, 1, False)
    assert all(len(row["ratio_of_rounds"]) == 2 for row in found["sequences"].values())
    assert "busy; measuring again" in capsys.readouterr().err
    told = iter(["busy"] * 4)
    assert script.main([str(model), *words, "--rounds", "1", "--peer", f"a={tmp_path / 'a' / 'p'}"]) == 1
    assert "no round was undisturbed" in capsys.readouterr().err
