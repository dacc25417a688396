from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dyno import profiles
from dyno.tokenizer import Tokenizer
from dyno_tuner.core.errors import TargetUnusable
from dyno_tuner.core.protocol import Configuration, Workload
from dyno_tuner.execution.inline_executor import InlineExecutor
from dyno_tuner.record.recorder import Recorder
from dyno_tuner.run.session import Request
from dyno_tuner.run.tune import Options
from dyno_tuner.targets.dyno.prompts import Prompts, use_of_experts
from dyno_tuner.targets.dyno.target import DynoTarget
from dyno_tuner.targets.simulated.target import SimulatedTarget
from real_tunes import tuned

MODEL = Path(__file__).parents[2] / "data" / "tiny" / "qwen3moe-tiny.gguf"
WORKLOAD = Workload(pp=64, tg=4)


def test_experts_are_counted() -> None:
    """Two layers of four experts, two used: one layer spreads evenly, one takes the same two every time."""
    even = np.array([[0, 1], [2, 3], [0, 1], [2, 3]])
    same = np.array([[1, 2]] * 4)
    found = use_of_experts(np.stack([even, same]).astype(np.int32), 4)
    assert found == {"distinct": 3.0, "busiest_over_mean": 1.5}


@pytest.fixture(scope="module")
def target() -> Any:
    made = DynoTarget(str(MODEL), ctx=256)
    yield made
    made.close()


def test_the_routing_of_the_workload_is_that_of_the_engine(target: Any) -> None:
    found = target.routing(Configuration({"ubatch": 32}), WORKLOAD)
    experts, used = int(target._model["experts"]), int(target._model["experts_used"])
    assert found["tokens"] == 32
    assert found["source"] == "random tokens"
    assert used <= found["distinct"] <= experts
    assert 1.0 <= found["busiest_over_mean"] <= experts / used
    target._session.reset()
    _, chosen = target._session.decode(
        [(0, target._prompts.take(32, "pp", 0))], rows="last", capture_routing=True
    )
    assert np.asarray(chosen).shape[1:] == (32, used)
    assert use_of_experts(np.asarray(chosen), experts)["distinct"] == found["distinct"]


def test_prompts_are_passages_of_the_text(tmp_path: Path, target: Any) -> None:
    prompts = Prompts(str(MODEL), 100, None)
    assert (prompts.take(9, "a") == prompts.take(9, "a")).all()
    assert (prompts.take(9, "a") != prompts.take(9, "b")).any()
    prompts._tokens = np.arange(80, dtype=np.int32)
    taken = prompts.take(200, "pp", 0)
    assert set(np.diff(taken) % 80) == {1}  # in the order of the text, which begins anew at its end
    text = tmp_path / "t.txt"
    text.write_text("def main():\n    return 1\n" * 50)
    found = Prompts(str(MODEL), 100, str(text))
    assert found.source == "t.txt"
    assert len(found.digest) == 64
    assert set(found.take(64, "x")) <= set(Tokenizer.from_gguf(str(MODEL)).encode(text.read_text()))


def test_a_text_that_says_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TargetUnusable, match="No such file"):
        Prompts(str(MODEL), 100, str(tmp_path / "absent"))
    short = tmp_path / "s.txt"
    short.write_text("a")
    with pytest.raises(TargetUnusable, match="too few"):
        Prompts(str(MODEL), 100, str(short))


def test_routing_is_journaled_and_written(tmp_path: Path) -> None:
    options = Options(WORKLOAD, budget=12.0, max_trials=3)
    request = Request(str(MODEL), options, out=tmp_path / "p.yaml", quiet=True, ctx=256)
    result = tuned(request, lambda: InlineExecutor(DynoTarget(str(MODEL), ctx=256)))
    evidence = profiles.load_profile(tmp_path / "p.yaml").evidence
    assert evidence is not None
    assert evidence.routing is not None
    assert evidence.routing.tokens == 64
    assert evidence.routing.busiest_over_mean == result.outcome.routing["busiest_over_mean"]
    assert '"op": "routing"' in result.journal.read_text() or '"op":"routing"' in result.journal.read_text()


def test_an_engine_without_routing_says_nothing() -> None:
    """It keeps the method of `Target`."""
    recorder = Recorder(InlineExecutor(SimulatedTarget("null", 1)), WORKLOAD, virtual_time=True)
    assert recorder.routing("routing", Configuration({}), process=1) == {}
